"""``python -m mpishard``: the command line, where the ``mpishard`` script is not on PATH."""

from mpishard.cli import main

if __name__ == "__main__":
    main()
