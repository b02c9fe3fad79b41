"""Numbers of a training run as JSON lines."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from mpishard.base import Document


class MetricsWriter:
    """The writer of a file with one JSON object per line, flushed at once.

    A resumed run goes on in the same file. Lines after the step from which it resumes are dropped
    when the file is opened, so that the file has every step once. An incomplete line of a killed
    run is dropped too.

    Use it as a context manager, or call `close`.

    Parameters
    ----------
    path : path
        The file; missing parents are made.
    resume_step : int, optional
        Keep the lines up to this step; 0 begins anew. Default: keep all.

    Raises
    ------
    ValueError
        If the file has lines that are no metrics. It is not changed then.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume_step: int | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        times: list[float] = [0.0]
        if self.path.is_file():  # not a device such as /dev/null, which has no lines to keep
            # Imported here, because it imports safetensors, without which `mpishard doctor` must
            # work.
            from mpishard.checkpoint import replace_file

            # A resumed run repeats the steps after its checkpoint, and writes their lines again.
            last = math.inf if resume_step is None else resume_step
            kept = [record for record in read_metrics(self.path) if record["step"] <= last]
            replace_file(self.path, ["".join(json.dumps(r) + "\n" for r in kept).encode()])
            times += [t for r in kept if isinstance(t := r.get("time"), int | float)]
        self._stream = self.path.open("a", encoding="utf-8")
        # The time of a resumed run goes on from the last line that was kept. So times rise with
        # steps, and a curve over time does not go back.
        self._began = time.monotonic() - max(times)

    def write(self, step: int, **values: object) -> None:
        """Append a line.

        Parameters
        ----------
        step : int
            Number of steps done.
        **values : JSON values or NumPy scalars
            Figures such as loss, learning_rate and gradient_norm. If ``time`` is not given, the
            seconds since the file was opened are added, plus the last time in a file that is
            continued. Infinities and NaN, which JSON does not have, become null.
        """
        # Microseconds are enough, and keep the lines of a long file short.
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
            error.filename = str(self.path)  # the error of a full disk names no file
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | os.PathLike[str]) -> list[Document]:
    """Return the lines of a metrics file, in order.

    A last line without its line break is left out: a run is writing it, or was killed in it.

    Raises
    ------
    FileNotFoundError
        If there is no file.
    ValueError
        If a line is no metrics; the message names the line.
    """
    return parse_metrics(Path(path).read_text(encoding="utf-8", errors="replace"), path)


def parse_metrics(text: str, path: str | os.PathLike[str]) -> list[Document]:
    """Return the whole lines of ``text``, which was read from ``path``; see `read_metrics`."""
    records = []
    # The text after the last line break is an incomplete line.
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise ValueError(  # noqa: TRY004 - not an argument but the file is wrong
                f"{path}, line {number} has no step: {line[:60]}"
            )
        records.append(record)
    return records


def _plain(value: object) -> object:
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has neither NaN nor infinity
    return value
