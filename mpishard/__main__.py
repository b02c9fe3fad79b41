"""The ``mpishard`` command, which is ``python -m mpishard``.

SIGUSR1 is an order for the job of ``mpishard run``. It is heard before anything is imported that
takes long: Python's own answer to it would be to end the command.
"""

import signal


def main() -> None:
    """Entry point of the ``mpishard`` script."""
    early: list[int] = []
    # Whoever started us with the signal ignored wants it ignored.
    is_heard = signal.getsignal(signal.SIGUSR1) is not signal.SIG_IGN
    if is_heard:
        signal.signal(signal.SIGUSR1, lambda number, _: early.append(number))
    from mpishard import cli
    from mpishard.cli.notice import notice

    if is_heard:
        signal.signal(signal.SIGUSR1, notice.hear)
    if early:
        notice.is_given = True
    cli.main()


if __name__ == "__main__":
    main()
