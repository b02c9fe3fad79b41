"""The ``mpishard`` command, which is ``python -m mpishard``.

SIGUSR1 is an order for the job of ``mpishard run``. Its handler is installed before anything is
imported that takes long: without one the signal would end the command.
"""

import os
import signal
import sys


def main() -> None:
    """Entry point of the ``mpishard`` script."""
    # Streams that are closed at the start become /dev/null: a file that the command or a rank opens
    # would get the number, and all output with it.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r"))  # noqa: SIM115, PTH123
    early: list[int] = []
    # Whoever started us with the signal ignored wants it ignored.
    is_heard = signal.getsignal(signal.SIGUSR1) is not signal.SIG_IGN
    if is_heard:
        signal.signal(signal.SIGUSR1, lambda number, _: early.append(number))
    from mpishard import cli
    from mpishard.cli.run.notice import notice

    if is_heard:
        signal.signal(signal.SIGUSR1, notice.receive)
    if early:
        notice.is_given = True
    cli.main()


if __name__ == "__main__":
    main()
