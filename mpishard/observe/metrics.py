"""Numbers of a training run as JSON lines."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self


class MetricsWriter:
    """Appends one JSON object per line, written out at once, so that a run can be watched.

    A run that resumes goes on in the same file: lines behind the step that it resumes from are
    dropped when the file is opened, so that every step stands there once. A line that a killed
    run left half written is dropped too.

    Use as a context manager, or `close`.

    Parameters
    ----------
    path : path
        The file; missing parents are made.
    resume_step : int, optional
        Keep the lines up to this step: 0 begins anew. Default: keep all.

    Raises
    ------
    ValueError
        If the file holds lines that are no metrics; it is then unchanged.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume_step: int | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        before = 0.0
        if self.path.is_file():  # and not /dev/null, of which nothing is kept
            before = _keep(self.path, math.inf if resume_step is None else resume_step)
        self._stream = self.path.open("a", encoding="utf-8")
        # A resumed run goes on from the time of the last line that was kept: its times rise with
        # its steps, and a curve over time has no fold.
        self._began = time.monotonic() - before

    def write(self, step: int, **values: Any) -> None:
        """Append a line.

        Parameters
        ----------
        step : int
            Steps done.
        **values : JSON values or NumPy scalars
            loss, learning_rate, gradient_norm and the like. ``time``, in seconds, is added
            if it is not given: since the file was opened, and on top of the last time in a file
            that is continued. Infinities and NaN, which JSON does not know, become null.
        """
        values.setdefault("time", round(time.monotonic() - self._began, 6))
        record = {"step": int(step), **{name: _plain(value) for name, value in values.items()}}
        line = json.dumps(record, allow_nan=False) + "\n"
        with self._naming_file():
            self._stream.write(line)
            self._stream.flush()

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._naming_file():
            self._stream.close()

    @contextmanager
    def _naming_file(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = str(self.path)  # a full disk does not say for what
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a metrics file, in order.

    A last line without its end, which a run is writing or was killed in, is left out.

    Raises
    ------
    FileNotFoundError
        If there is no file.
    ValueError
        If a line is no metrics, naming it.
    """
    return parse_metrics(Path(path).read_text(encoding="utf-8", errors="replace"), path)


def parse_metrics(text: str, path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the whole lines of ``text``, which was read from ``path``; see `read_metrics`."""
    records = []
    # What follows the last line break was being written when it was read.
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise ValueError(  # noqa: TRY004 - it is the file that is wrong
                f"{path}, line {number} has no step: {line[:60]}"
            )
        records.append(record)
    return records


def _keep(path: Path, step: float) -> float:
    """Drop lines after ``step``, by writing a new file and renaming it; return the last time."""
    # Here, because it imports safetensors, which `mpishard doctor` does without.
    from mpishard.checkpoint.format.disk import replace_file

    # A run that resumes repeats the steps after its checkpoint, and writes their lines again.
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    replace_file(path, ["".join(json.dumps(record) + "\n" for record in kept).encode()])
    times = [time for record in kept if isinstance(time := record.get("time"), int | float)]
    return float(max(times, default=0.0))


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    # JSON has no NaN and no infinity.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
