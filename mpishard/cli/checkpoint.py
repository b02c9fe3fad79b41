"""``mpishard checkpoint``: inspect checkpoints, check them, and convert them for other programs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Column, Table

from mpishard import checkpoint as checkpoints
from mpishard.base import Document
from mpishard.checkpoint import (
    COUNT,
    LATEST,
    MANIFEST,
    TEXT,
    CheckpointFolder,
    CheckpointForm,
    CheckpointProblem,
    describe,
    find_checkpoint,
    find_single,
    newest_first,
    problems_in,
    require_form,
    spelled,
)
from mpishard.cli.tables import show
from mpishard.cli.wording import bytes_text, counted, echo, parse_bytes, refusing, say

_LISTED = 3  # tensors of a damaged block whose names are printed
_MOST_ITEMS, _MOST_CHARACTERS = 8, 80  # of a list, and of a text, that is printed

checkpoint = typer.Typer(rich_markup_mode=None)

# A string, because the Path of a blank one would be the current folder.
PathArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="A checkpoint, or a folder of them.")
]
JSONOption = Annotated[bool, typer.Option("--json", help="Print JSON in place of tables.")]


@checkpoint.command()
def inspect(path: PathArgument, as_json: JSONOption = False) -> None:
    """Print the content of a checkpoint, or the checkpoints of a folder. Reads no tensors."""
    with refusing("checkpoint"):
        entries = [] if find_single(path) is not None else newest_first(CheckpointFolder(path))
        if entries:
            listed = []
            for entry in entries:
                # lexists, because a manifest that is a broken link is damaged, and not missing.
                has_manifest = os.path.lexists(entry.path / MANIFEST)
                listed.append(
                    {
                        "name": entry.path.name,
                        "step": entry.step,
                        "bytes": sum(
                            f.stat().st_size for f in _files_of(entry.path) if f.is_file()
                        ),
                        "saved": _time_of(entry.path),
                        "whole": not entry.problem,
                        "problem": entry.problem if has_manifest else f"it has no {MANIFEST}",
                    }
                )
            found: Document = {
                "folder": str(Path(path).resolve()), "latest": _latest(path), "checkpoints": listed
            }  # fmt: skip
        else:
            report = describe(path)
            model = report.metadata.get("model") or {}
            optimizer = report.metadata.get("optimizer") or {}
            form = {"steps?": COUNT, "strategy?": TEXT, "world_size?": COUNT}
            # Any program may write metadata: wrong types must not end in a traceback.
            require_form(model, form, f"{report.path / MANIFEST}: metadata.model")
            form = {"optimizer_steps?": COUNT}
            require_form(optimizer, form, f"{report.path / MANIFEST}: metadata.optimizer")
            found = {
                "path": str(report.path),
                "saved": _time_of(report.path),
                # Updates: a rule that searches evaluates the loss several times for each.
                "step": optimizer.get("optimizer_steps", model.get("steps")),
                "strategy": model.get("strategy"),
                "world_size": model.get("world_size"),
                "elements": report.parameter_count,
                "kinds": dict(report.kinds),
                "parameters": {name: list(shape) for name, shape in report.shapes.items()},
                "files": dict(report.files),
                "metadata": dict(report.metadata),
            }
    if as_json:
        # RFC 8259 has no NaN and no infinity, which the metadata of a run may have.
        typer.echo(json.dumps(spelled(found), indent=1, allow_nan=False))
    elif entries:
        _print_folder(found)
    else:
        _print_checkpoint(found)


@checkpoint.command()
def check(
    path: PathArgument,
    every: Annotated[
        bool, typer.Option("--all", help="Check each checkpoint of a folder, not only the newest.")
    ] = False,
) -> None:
    """Read every byte of a checkpoint and compare checksums.

    In a folder of checkpoints, reads the newest, and the one that `latest` names if that is
    another. Exit codes: 0, all bytes are as they were written; 1, damage was found, or `latest`
    names nothing; 2, there is no checkpoint.
    """
    with refusing("checkpoint"):
        single = find_single(path)
        entries = newest_first(CheckpointFolder(path)) if single is None else []
        others = [entry.path for entry in entries]
        if entries and not every:
            latest = _latest(path)
            # After an interrupted save `latest` may name an older one: users can load either.
            chosen = [o for o in others if o == others[0] or _is_named(o.name, latest)]
        else:
            chosen = others or [find_checkpoint(path)]
        wrong = [each for each in chosen if not _is_whole(each)]
        is_lost = bool(entries) and _says_lost(path, others)
        if not wrong and not is_lost:
            return
        if wrong:
            them = counted(len(chosen), "checkpoint")
            say("checkpoint", f"{len(wrong)} of {them} cannot be trusted")
        if entries:
            # Older ones are read only now, and until one is whole, because each may take minutes.
            whole = next(
                (o for o in others if o not in wrong and (o in chosen or not _read(o))), None
            )
            text = "none is whole" if whole is None else f"the newest that is whole is {whole}"
            say("checkpoint", text)
    raise typer.Exit(1)


@checkpoint.command()
def consolidate(
    path: PathArgument,
    target: Annotated[str, typer.Argument(metavar="TARGET.safetensors", help="To be made.")],
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="Write the states of the optimizer, too.")
    ] = False,
) -> None:
    """Write one safetensors file: parameters by name, in their global shapes.

    With --optimizer it also has the states, as optimizer/STATE/PARAMETER, and `convert` makes the
    same checkpoint from the file.
    """
    with refusing("checkpoint"):
        with _bar(f"writing {Path(target).name}") as progress:
            made = checkpoints.consolidate(path, target, optimizer=optimizer, progress=progress)
        _say_made(made)


@checkpoint.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="IN", help="A checkpoint, a .safetensors file, or a directory with an index."
        ),
    ],
    target: Annotated[str, typer.Argument(metavar="OUT", help="To be made.")],
    to: Annotated[
        CheckpointForm | None,
        typer.Option(
            show_default=False,
            help="Form of OUT. Default: safetensors if OUT ends with .safetensors; otherwise hf "
            "for a checkpoint, and checkpoint for other files.",
        ),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Size of the files of hf, as 500MB, 5GB, 4GiB.")
    ] = "5GB",
) -> None:
    """Write parameters as a checkpoint, as one safetensors file, or as several with an index.

    The last form, hf, is that of Hugging Face's libraries: model.safetensors.index.json and the
    files that it names.
    """
    with refusing("checkpoint"):
        # Before the source is opened, so that a wrong size is refused by the name of its flag.
        with refusing("checkpoint", "--max-shard-size: "):
            limit = parse_bytes(max_shard_size)
        with _bar(f"writing {Path(target).name}") as progress:
            made = checkpoints.convert(
                source, target, to, maximum_shard_bytes=limit, progress=progress
            )
        _say_made(made)


# ------------------------------------------------------------------------------------- reading


def _latest(folder: str) -> str | None:
    try:
        return (Path(folder) / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _is_named(name: str, latest: str | None) -> bool:
    """Return True if `latest` names it, even after a save was killed between its two renames."""
    return latest is not None and name in (latest, f"{latest}.previous")


def _read(path: Path) -> list[CheckpointProblem]:
    with _bar(f"reading {path.name}") as progress:
        return problems_in(path, progress)


def _is_whole(path: Path) -> bool:
    """Read a checkpoint, print its state, and return True if it is whole."""
    problems = _read(path)
    if not problems:
        echo(str(describe(path)))
        return True
    echo(f"{path} is damaged:")
    for problem in problems:
        # A damaged block may hold parts of hundreds of tensors.
        more = len(problem.tensors) - _LISTED
        words = ", ".join(problem.tensors[:_LISTED]) + (f" and {more} more" if more > 0 else "")
        echo(f"  {problem.file}: {problem.reason}" + (f"; tensors there: {words}" if words else ""))
    return False


def _says_lost(folder: str, found: list[Path]) -> bool:
    """Print a line, and return True, if `latest` names a checkpoint that is missing."""
    latest = _latest(folder)
    is_lost = latest is not None and not any(_is_named(path.name, latest) for path in found)
    if is_lost:
        echo(f"{Path(folder) / LATEST} names {latest!r}, which is not there")
    return is_lost


def _files_of(directory: Path) -> list[Path]:
    return [*directory.iterdir()] if directory.is_dir() else []


def _time_of(directory: Path) -> str:
    """Return the local time at which the directory's newest file was written."""
    # The folder's own time also changes when a file in it is removed or renamed.
    newest = max((file.stat().st_mtime for file in _files_of(directory)), default=0.0)
    return datetime.fromtimestamp(newest).astimezone().isoformat(sep=" ", timespec="seconds")


# ------------------------------------------------------------------------------------- showing


def _show(title: str, columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
    """Print a table. Cells are escaped, because rich would take brackets in names for markup."""
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(escape, row))
    show(table)


def _print_folder(found: Mapping[str, Any]) -> None:
    rows = []
    for entry in found["checkpoints"]:
        state = "broken" if entry["problem"] else "whole"
        if _is_named(entry["name"], found["latest"]):
            state += f", {LATEST}"
        size = bytes_text(entry["bytes"])
        rows.append((entry["name"], str(entry["step"]), size, entry["saved"], state))
    left = [Column(name, no_wrap=True) for name in ("checkpoint", "saved", "state")]
    right = [Column(name, justify="right") for name in ("step", "size")]
    _show(f"{found['folder']}, the newest first", (left[0], *right, *left[1:]), rows)
    # `inspect` reads no tensors: the table must not sound as if it had verified them.
    echo("whole: manifest and lengths fit; `mpishard checkpoint check` reads every byte")
    for entry in found["checkpoints"]:
        if entry["problem"]:
            echo(f"{entry['name']}: {entry['problem']}")
    _says_lost(found["folder"], [Path(entry["name"]) for entry in found["checkpoints"]])


def _print_checkpoint(found: Mapping[str, Any]) -> None:
    words = [f"{found['path']}, saved {found['saved']}"]
    if found["step"] is not None:
        words.append(f"after step {found['step']}")
    if found["strategy"] is not None:
        words.append(f"{found['strategy']} on {counted(found['world_size'], 'rank')}")
    echo("; ".join(words))
    dtype, kinds, files = found["kinds"].get("parameters", ""), found["kinds"], found["files"]
    _show(
        f"{counted(len(found['parameters']), 'parameter')}, {found['elements']:,} elements",
        (Column("name"), Column("shape", justify="right"), Column("dtype")),
        (
            (name, " x ".join(map(str, shape)) or "scalar", dtype)
            for name, shape in found["parameters"].items()
        ),
    )
    _show("Kinds of values", (Column("kind"), Column("dtype")), kinds.items())
    _show(
        f"{counted(len(files), 'file')}, {bytes_text(sum(files.values()))}",
        (Column("file"), Column("size", justify="right")),
        ((name, bytes_text(nbytes)) for name, nbytes in files.items()),
    )
    echo("metadata, in full with --json:")
    for key, value in found["metadata"].items():
        # Empty entries are those of features that the run did not use.
        if value:
            echo(f"  {key}: {json.dumps(_shortened(value))}")


def _shortened(value: object) -> object:
    """Return JSON in which the length replaces a long list or text."""
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        if len(value) > _MOST_ITEMS:
            return f"({len(value)} items)"
        return [_shortened(item) for item in value]
    if isinstance(value, str) and len(value) > _MOST_CHARACTERS:
        return f"({len(value)} characters)"
    return value


@contextmanager
def _bar(words: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar in bytes during the block, on a terminal; yield its update function."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    # The bar goes to stderr, so that stdout can be piped to another program.
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(words, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _say_made(target: Path) -> None:
    files = [target] if target.is_file() else sorted(target.iterdir())
    total = sum(file.stat().st_size for file in files)
    echo(f"{target}: {counted(len(files), 'file')}, {bytes_text(total)}")
