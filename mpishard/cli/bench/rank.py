"""What `mpishard bench -n N` lets `mpishard run` start on each rank: the command line again."""

from mpishard.cli import main

if __name__ == "__main__":
    main()
