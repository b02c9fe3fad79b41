"""Callbacks that write a run's figures, on rank 0: files, TensorBoard, W&B, the progress line."""

from __future__ import annotations

import csv
import io
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsFloat

from mpishard.base import check_path, optional_package
from mpishard.callbacks.run import Record, Run
from mpishard.checkpoint import replace_file
from mpishard.contracts import PathLike
from mpishard.observe import MetricsWriter, Progress

Figures = Mapping[str, SupportsFloat | str]
"""Name of a figure -> a number or a text."""


class _Writer:
    """A writer of the figures of steps and evaluations on rank 0, from ``on_start`` to the end."""

    _opened_by = 0  # identity of the thread, because thread-ranks may share a callback

    @property
    def _is_open(self) -> bool:
        return self._opened_by == threading.get_ident()

    def on_start(self, run: Run, record: Record) -> None:
        """Open the output on rank 0."""
        if run.rank == 0:
            self._open(run, record)
            self._opened_by = threading.get_ident()

    def on_step(self, run: Run, record: Record) -> None:
        """Write the figures of a step, and the values that earlier callbacks have logged."""
        if self._is_open:
            figures: dict[str, SupportsFloat | str | None] = {
                "epoch": record.epoch,
                "loss": record.loss,
                "learning_rate": record.learning_rate,
                "gradient_norm": record.gradient_norm,
                "weight": record.samples,
                "memory": record.memory,
                **run.logged,
            }
            # Figures that the loop does not report have no column.
            self._write(record.step, {k: v for k, v in figures.items() if v is not None})

    def on_evaluate(self, run: Run, record: Record) -> None:
        """Write the figures of the validation data, and logged values."""
        figures = {f"validation_{name}": value for name, value in record.validation.items()}
        if self._is_open and (figures or run.logged):
            self._write(record.step, {**figures, **run.logged})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        # Of thread-ranks that share a callback, the one that opened the output closes it.
        if self._is_open:
            self._opened_by = 0
            self._close(error)

    def _open(self, run: Run, record: Record) -> None:
        raise NotImplementedError

    def _write(self, step: int, figures: Figures) -> None:
        raise NotImplementedError

    def _close(self, error: BaseException | None) -> None:
        raise NotImplementedError


class JSONLines(_Writer):
    """A file with one JSON object per line and step; ``metrics=`` of a run is its short form.

    A resumed run goes on in the same file; see `mpishard.observe.MetricsWriter`.

    Parameters
    ----------
    path : path
        The file.
    """

    def __init__(self, path: PathLike) -> None:
        check_path("path", path)
        self._path = Path(path)

    def _open(self, run: Run, record: Record) -> None:
        # Lines after the resumed step are those of a run that was killed, and come again.
        self._file = MetricsWriter(self._path, resume_step=record.step)

    def _write(self, step: int, figures: Figures) -> None:
        self._file.write(step, **figures)

    def _close(self, error: BaseException | None) -> None:
        self._file.close()


class CSVFile(_Writer):
    """A table with a row for each step and each evaluation.

    Rows are appended and flushed at once. A figure that first appears in a later row gets a column
    of its own, which is empty in earlier rows: the table is then written anew, and replaces the
    file. A resumed run goes on in the same file. Rows after the step from which it resumes are
    dropped, and so is an incomplete row.

    Parameters
    ----------
    path : path
        The file; missing parents are made.
    """

    def __init__(self, path: PathLike) -> None:
        check_path("path", path)
        self._path = Path(path)

    def _open(self, run: Run, record: Record) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._columns = ["step"]
        self._begin(record.step)

    def _begin(self, last_step: float) -> None:
        """Write the rows up to ``last_step`` under the present columns, and go on after them."""
        text = ""
        # A new run begins a new table.
        if last_step and self._path.exists():
            with self._path.open(newline="", encoding="utf-8", errors="replace") as stream:
                text = stream.read()
        # A last row without a line break was cut by a full disk or a crash.
        rows = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
        kept = [row for row in rows if int(row["step"]) <= last_step]
        self._columns += [n for n in rows.fieldnames or () if n not in self._columns]
        whole = io.StringIO(newline="")
        table = csv.DictWriter(whole, self._columns, restval="")
        table.writeheader()
        table.writerows(kept)
        # In one rename: a kill leaves the old table, or the new one.
        replace_file(self._path, [whole.getvalue().encode()])
        self._stream = self._path.open("a", newline="", encoding="utf-8")
        self._table = csv.DictWriter(self._stream, self._columns, restval="")

    def _write(self, step: int, figures: Figures) -> None:
        new = [name for name in figures if name not in self._columns]
        if new:  # the table is written anew, with all of its rows, for the new columns
            self._columns += new
            self._stream.close()
            self._begin(math.inf)
        self._table.writerow({"step": step, **figures})
        # Row by row, so that a kill loses none.
        self._stream.flush()

    def _close(self, error: BaseException | None) -> None:
        self._stream.close()


class TensorBoard(_Writer):
    """Event files for TensorBoard; needs ``pip install 'mpishard[tensorboard]'``.

    Parameters
    ----------
    folder : path
        Folder of the event files. A resumed run goes on in the same folder.

    Raises
    ------
    ImportError
        Without tensorboardX.
    """

    def __init__(self, folder: PathLike) -> None:
        self._kind = optional_package("tensorboardX", "TensorBoard", "tensorboard").SummaryWriter
        check_path("folder", folder)
        self._folder = Path(folder)

    def _open(self, run: Run, record: Record) -> None:
        # A resumed run repeats the steps after its checkpoint: earlier events of these are purged.
        purge = record.step + 1 if record.step else None
        self._events = self._kind(str(self._folder), purge_step=purge, flush_secs=10)

    def _write(self, step: int, figures: Figures) -> None:
        for name, value in figures.items():
            if isinstance(value, str):
                self._events.add_text(name, value, step)
            else:
                self._events.add_scalar(name, float(value), step)

    def _close(self, error: BaseException | None) -> None:
        self._events.close()


class WandB(_Writer):
    """A run of Weights & Biases; needs the extra ``wandb``.

    Parameters
    ----------
    **options
        Arguments of ``wandb.init``: project, name, config and the like. With ``id=...`` and
        ``resume="allow"`` a resumed run goes on in the same run of W&B.

    Raises
    ------
    ImportError
        Without wandb.
    """

    def __init__(self, **options: Any) -> None:
        self._wandb = optional_package("wandb", "WandB", "wandb")
        self._options = options

    def _open(self, run: Run, record: Record) -> None:
        self._run = self._wandb.init(**self._options)

    def _write(self, step: int, figures: Figures) -> None:
        self._run.log(figures, step=step)

    def _close(self, error: BaseException | None) -> None:
        # W&B marks a run with another exit code than 0 as failed.
        self._run.finish(exit_code=0 if error is None else 1)


class ProgressLine(_Writer):
    """The line of progress; ``progress=True`` of a run is its short form."""

    def _open(self, run: Run, record: Record) -> None:
        self._line = Progress(run.total_steps, start=record.step, unit=f"{run.unit}/s")
        if run.announcement:
            self._line.announce(run.announcement)
        self._line.__enter__()

    def on_step(self, run: Run, record: Record) -> None:
        """Show the step."""
        if self._is_open:
            self._line.update(record.step, loss=record.loss, amount=record.samples)

    def on_evaluate(self, run: Run, record: Record) -> None:
        """Show the validation loss."""
        if self._is_open and record.validation:
            accuracy = record.validation.get("accuracy")
            self._line.validation(record.step, record.validation["loss"], accuracy)

    def on_stop(self, run: Run, record: Record) -> None:
        """Show the reason of an early end."""
        if self._is_open:
            self._line.conclude(run.ending)

    def _close(self, error: BaseException | None) -> None:
        self._line.__exit__(None, None, None)
