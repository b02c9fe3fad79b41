"""The frame of measurements on ranks: options, a table on the terminal, and a file of JSON.

    mpishard run -n 2 benchmarks/NAME.py --json FILE
    python benchmarks/NAME.py                              # two thread-ranks

`compare.py` and `growth.py` start such scripts in jobs, and read their files.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

import mpishard as ms
from mpishard.cli.outputs import write_json
from mpishard.cli.tables import show
from mpishard.cli.wording import parse_bytes

Measurement = Callable[
    [ms.CommunicationBackend, argparse.Namespace], tuple[Mapping[str, Any], Table | str]
]
"""Measures on all ranks, and returns the figures of the file, and a table or a line."""


def options(description: str | None) -> argparse.ArgumentParser:
    """The command line of a measurement, with its file."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to this file")
    return parser


def positive(text: str) -> int:
    """Return a number of 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number


def size(text: str) -> int:
    """Return the number of bytes that ``64KiB`` or ``5GB`` names."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def measure(main: Measurement, arguments: argparse.Namespace) -> None:
    """Run a measurement on the ranks of the job, or on two threads. Rank 0 shows and writes."""

    def body(backend: ms.CommunicationBackend) -> None:
        figures, shown = main(backend, arguments)
        if backend.rank > 0:
            return
        show(shown) if isinstance(shown, Table) else print(shown)
        if arguments.json is not None:
            write_json(arguments.json, {"world_size": backend.world_size, **figures})

    ms.launch(body, world_size=2)
