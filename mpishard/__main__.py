"""The ``mpishard`` command, which is ``python -m mpishard``.

SIGUSR1 is an order for the job of ``mpishard run``. Without a handler the signal would end the
command, so the handler is installed before the slow imports.
"""

import os
import signal
import sys


def main() -> None:
    """Entry point of the ``mpishard`` script."""
    # Streams that are closed at the start become /dev/null. Otherwise the next file that the
    # command or a rank opens would get the descriptor, and all output of that stream.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is ``number``
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r"))  # noqa: SIM115, PTH123
    early: list[int] = []
    # A signal that is ignored at the start stays ignored, as under nohup.
    is_received = signal.getsignal(signal.SIGUSR1) is not signal.SIG_IGN
    if is_received:
        signal.signal(signal.SIGUSR1, lambda number, _: early.append(number))
    from mpishard import cli
    from mpishard.cli.run.notice import notice

    if is_received:
        signal.signal(signal.SIGUSR1, notice.receive)
    if early:
        notice.is_given = True
    cli.main()


if __name__ == "__main__":
    main()
