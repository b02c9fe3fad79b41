"""Program of the ranks that ``mpishard bench -n N`` starts: the command line again."""

from mpishard.cli import main

if __name__ == "__main__":
    main()
