"""A rank's batches of a run; a thread reads them ahead from files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple, Self

import numpy as np

from mpishard.base import Data, as_count, as_flag, as_index, require_type
from mpishard.data.dataset import Dataset, Samples, TokenWindows, is_sparse, namespace_of, take
from mpishard.data.sampler import GlobalBatchSampler, Indices, LocalBatchSampler

_NAMED_RUNS = 4  # runs of samples that a message lists


class RankBatch(NamedTuple):
    """A rank's samples of a global batch.

    Attributes
    ----------
    x, y : array
        Inputs and targets, shape (n, ...); ``y`` is None if the loss needs none.
    sample_start : int
        Position of the first one in the global batch.
    indices : array of int64
        Their indices in the data set, shape (n,).
    """

    x: Data
    y: Data
    sample_start: int
    indices: Indices


class Batches:
    """The batches of consecutive steps for one rank; a context manager, iterated once.

    Arrays in memory are indexed step by step. For other data sets a thread of this object reads the
    next window of batches (`GlobalBatchSampler.window`) while the caller uses the current one. A
    window's samples are read in rising order, in runs, each once; so a rank holds two windows of
    its own samples. The thread communicates nothing. If it fails, the caller's next step raises its
    exception, with a note that names data set, samples and step.

    Parameters
    ----------
    x, y : array or data set
        As `take` reads them; ``y`` may be None.
    sampler : GlobalBatchSampler or LocalBatchSampler
        The order of samples. While files are read, only the thread uses it.
    rank, world_size : int
        The rank, and the number of ranks that divide a batch.
    steps : range
        Numbers of the steps, counted from the first batch of epoch 0.
    ahead : bool
        False: no thread, and the caller reads each batch when its step comes. A data set needs
        this if it draws from a generator that checkpoints save.
    part : str
        "train", "validation" or "test", for messages.

    Raises
    ------
    TypeError
        If the sampler, the steps, a number or the flag is of another type.
    ValueError
        If ``rank`` is outside [0, world_size).
    """

    def __init__(
        self,
        x: Dataset,
        y: Dataset | None,
        sampler: GlobalBatchSampler | LocalBatchSampler,
        rank: int,
        world_size: int,
        *,
        steps: range,
        ahead: bool = True,
        part: str = "train",
    ) -> None:
        require_type("sampler", sampler, GlobalBatchSampler, LocalBatchSampler)
        require_type("steps", steps, range)
        as_index("rank", rank, as_count("world_size", world_size))
        self._datasets = {f"x_{part}": x, f"y_{part}": y}
        self._sampler = sampler
        self._rank_and_size = rank, world_size
        self._steps = steps
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: Future[list[RankBatch]] | None = None
        # Indexing arrays in memory is faster than passing samples between threads.
        if as_flag("ahead", ahead) and not all(_is_in_memory(dataset) for dataset in (x, y)):
            # One thread, because a second one would read the window after next too early, into more
            # memory.
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="mpishard-reading")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread, after the read that is under way: a file may be closed then."""
        if self._thread is not None:
            # The read under way is waited for, and one that has not begun is dropped.
            self._thread.shutdown(cancel_futures=True)
            self._ahead = None

    def await_read(self) -> None:
        """Wait until the thread reads nothing: some files let one thread at a time read."""
        if self._ahead is not None:
            # It waits as `result` does, and leaves an error to the step that needs the batch.
            self._ahead.exception()

    def __iter__(self) -> Iterator[RankBatch]:
        if self._thread is None:
            # In memory: each batch is indexed when its step comes.
            for step in self._steps:
                yield from self._read(range(step, step + 1))
            return
        thread = self._thread
        reads = (thread.submit(self._read, window) for window in self._windows())  # begun by next()
        self._ahead = next(reads, None)
        while self._ahead is not None:
            # It raises what the thread has raised, in the step that needs the window.
            batches = self._ahead.result()
            # Begun before the first batch is yielded, so that it overlaps with all steps of this
            # window.
            self._ahead = next(reads, None)
            # A batch is dropped from the list, so that the caller's reference is the only one.
            while batches:
                yield batches.pop(0)

    def _windows(self) -> Iterator[range]:
        """Yield runs of steps that are read together: the windows of each epoch."""
        per_epoch, step = self._sampler.batches_per_epoch, self._steps.start
        while step < self._steps.stop:
            epoch, index = divmod(step, per_epoch)
            # After a resume in the middle of a window the first run is the rest of that window.
            following = min(index - index % self._sampler.window + self._sampler.window, per_epoch)
            stop = min(epoch * per_epoch + following, self._steps.stop)
            yield range(step, stop)
            step = stop

    def _read(self, steps: range) -> list[RankBatch]:
        per_epoch = self._sampler.batches_per_epoch
        parts = [
            self._sampler.local(*divmod(step, per_epoch), *self._rank_and_size) for step in steps
        ]
        # One read for all steps of a window, in which neighbours in the file are one run.
        wanted = parts[0][0] if len(parts) == 1 else np.concatenate([part for part, _ in parts])
        found: list[list[Data]] = []
        for name, dataset in self._datasets.items():
            try:
                samples = take(dataset, wanted) if dataset is not None else None
            # The type stays as it is, because callers may catch what the user's own data set
            # raises.
            except Exception as error:
                last = f" to {steps.stop}" if len(steps) > 1 else ""
                error.add_note(
                    f"while reading {described(wanted)} of {name} ({origin_of(dataset)}) for step "
                    f"{steps.start + 1}{last}"
                )
                raise
            if samples is None or len(parts) == 1:
                found.append([samples] * len(parts))
                continue
            # Views of what was read: the samples are not copied again.
            ends = np.cumsum([0, *(len(part) for part, _ in parts)]).tolist()
            found.append([samples[start:stop] for start, stop in itertools.pairwise(ends)])
        return [
            RankBatch(x, y, start, indices)
            for x, y, (indices, start) in zip(*found, parts, strict=True)
        ]


def _is_in_memory(dataset: Dataset | None) -> bool:
    if dataset is None or isinstance(dataset, TokenWindows):
        return True
    # An array whose pages are read from the disk when they are accessed.
    if isinstance(dataset, np.memmap):
        return False
    if isinstance(dataset, Samples):
        return all(map(_is_in_memory, dataset.leaves()))
    return namespace_of(dataset) is not None or is_sparse(dataset)


def origin_of(dataset: object) -> str:
    """Return the class of a data set, and its file if it has one."""
    name = place = None
    with suppress(Exception):  # a data set whose file is closed may refuse anything
        # h5py and Zarr data sets know their path within the file or store.
        name = getattr(dataset, "name", None)
        file = getattr(dataset, "file", dataset)  # h5py and netCDF4: the data set's file
        place = getattr(file, "filename", None) or getattr(dataset, "store_path", None)
    words = (type(dataset).__qualname__, name, place and f"of {place}")
    return " ".join(str(word) for word in words if word)


def described(indices: Indices) -> str:
    """Describe samples as runs, and their number."""
    rising = np.unique(indices)
    if not rising.size:
        return "no samples"
    # Runs, because a list of all indices of a window would fill pages.
    runs = np.split(rising, np.flatnonzero(np.diff(rising) > 1) + 1)
    listed = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:_NAMED_RUNS]]
    return f"samples {', '.join(listed + ['...'] * (len(runs) > _NAMED_RUNS))} ({len(indices)})"
