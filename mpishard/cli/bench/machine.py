"""``mpishard bench machine``: speeds of this machine, for ``mpishard plan step``."""

from __future__ import annotations

import itertools
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from mpishard import nn
from mpishard.base import BFLOAT16, Array, DType, available_memory, library
from mpishard.cli.bench.step import alone, training_step
from mpishard.cli.machine import describe_machine
from mpishard.cli.tables import figures_table
from mpishard.cli.wording import bytes_text, counted, milliseconds
from mpishard.communication import CommunicationBackend
from mpishard.observe import Timing
from mpishard.optimizers import AdamW, UpdateContext
from mpishard.planning import Link, Machine, PassRate, ProductRate, works_of
from mpishard.sharding import ShardingConfiguration

_SIZES = (16, 64, 256, 1024)
"""Numbers of columns of the products."""

_FEW = (1, 4)
"""Further numbers of rows and of inner elements: a micro-batch may have few samples."""

_ROWS, _WIDTH, _HEADS, _TIME = 256, 1024, 8, 128
"""Arrays of passes are _ROWS x _WIDTH: a megabyte in float32, as activations mostly have."""

_LARGE = 1 << 25  # elements of the arrays that do not fit a cache, all ranks together
_COLD = 1 << 26  # bytes of weights
_MESSAGE = 1 << 23
_MANY = 32
_BACKGROUND = 1 << 20  # bytes of a message that is under way while a rank computes
_MESSAGES = 10  # times as many repeats, because all ranks must run at once
_MESSAGES_SECONDS = 2.0  # of all repeats of a message, but five at least: a network may be slow
_ELEMENT = np.dtype(np.float32)

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class MachineBenchmark:
    """Measurement of a machine.

    Parameters
    ----------
    repeats : int
        Number of times of each call.
    """

    repeats: int = 15

    def run(self, backend: CommunicationBackend) -> Machine:
        """Measure on all ranks at once. Collective; the same result on every rank."""
        ranks = len(backend.peers)
        products = tuple(self._products(backend))
        sketch = Machine(platform.node(), ranks, products, (1.0,), Link(0, 1))
        passes = [
            rate for precision in _precisions() for rate in self._passes(backend, sketch, precision)
        ]
        passes.append(self._update(backend))
        memory = tuple(self._memory(backend, active) for active in range(1, ranks + 1))
        call, unit, step = self._overheads(backend)
        return Machine(
            str(describe_machine()["processor"]),
            ranks,
            products,
            memory,
            self._link(backend, within=True) or Link(0.0, memory[0]),
            self._link(backend, within=False),
            tuple(passes),
            call,
            unit,
            step,
            available_memory()[0],
        )

    def _seconds(
        self, backend: CommunicationBackend, call: Call, prepare: Call | None = None
    ) -> float:
        """Return the seconds of a call that all ranks make at once: the mean of the ranks.

        The clock of the thread counts only while it runs, so that other programs do not slow it
        down, and the lower quartile leaves out calls whose caches they have emptied.
        """
        if prepare is not None:
            prepare()
        call()
        seconds = []
        for _ in range(self.repeats):
            if prepare is not None:
                prepare()
            backend.barrier()
            start = time.thread_time()
            call()
            seconds.append(time.thread_time() - start)
        # The least would be too good: a step has many calls, and few of them are the fastest.
        own = Timing(tuple(seconds)).quartiles[0]
        return float(backend.all_gather(np.array([own])).mean())

    def _products(self, backend: CommunicationBackend) -> Iterator[ProductRate]:
        for precision in _precisions():
            dtype = _dtype(precision)
            sizes = (*_FEW, *_SIZES)
            for rows, columns, inner in itertools.product(sizes, _SIZES, sizes):
                x = np.ones((rows, inner), dtype)
                # As many weights and results as do not fit a cache: a model's come from memory.
                weights = itertools.cycle(_cold((columns, inner), dtype))
                outs = itertools.cycle(_cold((rows, columns), dtype))
                # Blocks of calls, because a small product takes less than the clock shows.
                calls = min(1000, max(1, int(2e6 / (rows * columns * inner))))

                def call(
                    x: Array = x,
                    weights: Iterator[Array] = weights,
                    outs: Iterator[Array] = outs,
                    calls: int = calls,
                ) -> None:
                    for _ in range(calls):
                        nn.product(x, next(weights).T, next(outs))

                seconds = self._seconds(backend, call) / calls
                yield ProductRate(
                    precision, rows, columns, inner, 2 * rows * columns * inner / seconds
                )

    def _passes(
        self, backend: CommunicationBackend, sketch: Machine, precision: str
    ) -> Iterator[PassRate]:
        """Yield the time of each layer and loss besides its products."""
        dtype = _dtype(precision)
        for layer, shape, samples in _layers():
            works, output = works_of(layer, shape, samples)
            (work,) = (w for w in works if w.name == type(layer).__name__)
            forward, backward = self._layer(backend, layer, (samples, *shape), output, dtype)
            # Of a linear layer the bias alone is measured, because its products hide it.
            if not isinstance(layer, nn.Linear):
                forward -= sum(sketch.product_seconds(precision, *p) for p in work.forward)
                backward -= sum(
                    sketch.product_seconds(precision, *p) for p in (*work.input, *work.weight)
                )
            yield PassRate(
                work.name,
                precision,
                max(0.0, forward) / work.elements,
                max(0.0, backward) / work.elements,
            )
        if precision != "bfloat16":  # a loss is computed in the dtype of the parameters
            for loss in (nn.CrossEntropy(), nn.MSE()):
                x = np.ones((_ROWS, _WIDTH), dtype)
                y = np.zeros(_ROWS, np.int64) if isinstance(loss, nn.CrossEntropy) else x.copy()
                seconds = self._seconds(backend, lambda: loss.backward(loss.forward(x, y)[2]))  # noqa: B023
                yield PassRate(type(loss).__name__, precision, seconds / x.size)

    def _layer(
        self,
        backend: CommunicationBackend,
        layer: nn.Layer,
        shape: tuple[int, ...],
        output: tuple[int, ...],
        dtype: DType,
    ) -> tuple[float, float]:
        """Return the seconds of a layer's forward and backward."""
        generator = np.random.default_rng(0)
        if isinstance(layer, nn.Linear):  # the passes over the output and its gradient alone
            y = generator.standard_normal((shape[0], *output)).astype(dtype)
            total, bias = np.zeros(output, _of_gradients(dtype)), np.ones(output, dtype)
            return (
                self._seconds(backend, lambda: nn.added(y, bias, out=y)),
                self._seconds(backend, lambda: nn.add_column_sums(total, y.reshape(-1, *output))),
            )
        if layer.takes_integers:
            x: Array = generator.integers(0, _ROWS, shape)
        else:
            x = generator.standard_normal(shape).astype(dtype)
        p = {
            name: spec.initializer(generator, spec.shape).astype(dtype)
            for name, spec in layer.walk_parameters()
        }
        g = {name: np.zeros(array.shape, _of_gradients(dtype)) for name, array in p.items()}
        dy = generator.standard_normal((shape[0], *output)).astype(dtype)
        state: dict[str, Any] = {}

        def forward() -> None:
            state["saved"] = layer.forward(p, x, nn.Context())[1]

        def prepare() -> None:
            forward()
            state["dy"] = dy.copy()

        def backward() -> None:
            layer.backward(p, state.pop("saved"), state.pop("dy"), g)

        return self._seconds(backend, forward), self._seconds(backend, backward, prepare)

    def _update(self, backend: CommunicationBackend) -> PassRate:
        """Return the time of AdamW's update for each parameter."""
        length = _LARGE // 2 // len(backend.peers)
        rule = AdamW(1e-3, weight_decay=0.01)
        p, g = np.ones(length, _ELEMENT), np.ones(length, _ELEMENT)
        state = {name: np.zeros(length, _ELEMENT) for name in rule.needed_state()}
        context = UpdateContext(1, 1e-3, 1.0)
        seconds = self._seconds(backend, lambda: rule.update(p, g, state, (), context))
        return PassRate("AdamW", "float32", seconds / length)

    def _memory(self, backend: CommunicationBackend, active: int) -> float:
        """Return the bytes per second of a rank while ``active`` ranks of a node copy memory."""
        length = _LARGE // len(backend.peers)
        a, b = np.ones(length, _ELEMENT), np.zeros(length, _ELEMENT)
        works = backend.local_rank < active
        seconds = []
        for _ in range(self.repeats):
            backend.barrier()
            start = time.thread_time()
            if works:
                np.copyto(b, a)
                seconds.append(time.thread_time() - start)
        rate = 2 * a.nbytes / Timing(tuple(seconds)).quartiles[0] if works else 0.0
        rates = backend.all_gather(np.array([rate]))
        return float(rates[rates > 0].mean())

    def _overheads(self, backend: CommunicationBackend) -> tuple[float, float, float]:
        """Return the seconds of a layer's call, of a unit's reduction, and of the rest of a step.

        The models have tiny layers, which take no time, and one rank, which waits for no other.
        """
        seconds = []
        for layers, unit in ((2, 1 << 20), (34, 1 << 20), (34, 1)):
            own = alone()
            model = nn.MLP([4] * (layers + 1), dtype="float32")
            x = np.ones((1, 4), np.float32)
            config = ShardingConfiguration(own, minimum_parameter_group_size=unit)
            _, step = training_step(config, model, "ddp", x, x)
            seconds.append(self._seconds(backend, step))
            own.shutdown()
        few, many, units = seconds
        # Each further layer is a Linear and a ReLU, forward and backward.
        call = max(0.0, (many - few) / (32 * 4))
        reduction = max(0.0, (units - many) / 33)
        return call, reduction, max(0.0, few - 2 * 4 * call - reduction)

    def _link(self, backend: CommunicationBackend, *, within: bool) -> Link | None:
        """Measure messages between two ranks of a node, or between all hosts; None without."""
        groups = _groups(backend.nodes, within=within)
        if not groups:
            return None
        others = [r for group in groups if backend.rank in group for r in group]
        others = [rank for rank in others if rank != backend.rank]
        seconds = []
        # A short message, a long one in all, and many short ones under way at once.
        share = len(groups[0]) - 1
        for length, count in ((1, 1), (_MESSAGE // _ELEMENT.itemsize // share, 1), (1, _MANY)):
            array = np.ones(length, _ELEMENT)

            def exchange(array: Array = array, count: int = count) -> None:
                works = [backend.send_async(array, each) for each in others for _ in range(count)]
                for each in others:
                    for _ in range(count):
                        backend.receive(each, array.size, dtype=array.dtype)
                for work in works:
                    work.wait()

            seconds.append(self._exchange_seconds(backend, exchange))
        latency, long, many = seconds
        # All ranks of a host send at once: the rate is the host's.
        sharing = 1 if within else len(groups)
        rate = _MESSAGE / max(long - latency, 1e-9)
        message = max(0.0, many - latency) / ((_MANY - 1) * share)
        busy = 0.0 if within else self._processor(backend, groups, rate)
        return Link(latency, sharing * rate, message, busy)

    def _exchange_seconds(self, backend: CommunicationBackend, exchange: Call) -> float:
        """Return the least time of an exchange of messages by the clock of the wall.

        A rank that begins late finds messages that are there already: the slowest rank counts.
        """
        exchange()  # the first one connects
        seconds: list[float] = []
        while len(seconds) < _MESSAGES * self.repeats:
            backend.barrier()
            start = time.perf_counter()
            exchange()
            own = np.array([time.perf_counter() - start])
            seconds.append(float(backend.all_gather(own).max()))
            if len(seconds) >= 5 and sum(seconds) > _MESSAGES_SECONDS:
                break
        return min(seconds)

    def _processor(
        self, backend: CommunicationBackend, groups: Sequence[tuple[int, ...]], rate: float
    ) -> float:
        """Return a processor's seconds for each byte that it sends and receives as it computes.

        Each rank computes alone, and while a collective of its group sends bytes. The clock is that
        of all threads of the process, because one of them moves the messages.
        """
        own_group = next((i for i, ranks in enumerate(groups) if backend.rank in ranks), None)
        group, others = backend.split(own_group), len(groups[0]) - 1
        piece = np.ones(_BACKGROUND // _ELEMENT.itemsize // others, _ELEMENT)
        gathered = np.empty(piece.size * len(groups[0]), _ELEMENT)
        nbytes = piece.nbytes * others
        x, out = np.ones((256, 256), _ELEMENT), np.empty((256, 256), _ELEMENT)
        nn.product(x, x, out)
        start = time.thread_time()
        nn.product(x, x, out)
        # The collective ends long before the products, so that no rank waits for it.
        length = 2 * nbytes / rate + 0.05
        wanted = length / (time.thread_time() - start)
        calls = int(backend.all_gather(np.array([wanted])).max())

        busy = []
        for _ in range(max(3, min(self.repeats, int(_MESSAGES_SECONDS / length)))):
            used = []
            for sends in (False, True):
                backend.barrier()
                start = time.process_time()
                work = group.all_gather_async(piece, out=gathered) if sends and group else None
                for _ in range(calls):
                    nn.product(x, x, out)
                if work is not None:
                    work.wait()
                used.append(time.process_time() - start)
            busy.append(used[1] - used[0])
        if group is not None:
            group.shutdown()
        own = np.array([Timing(tuple(busy)).median])
        of_groups = backend.all_gather(own)[[rank for ranks in groups for rank in ranks]]
        return max(0.0, float(of_groups.mean())) / nbytes

    def table(self, machine: Machine) -> Table:
        """Return the measurements as a table, of products the slowest and the fastest."""
        title = f"{machine.name}, {counted(machine.ranks_per_node, 'rank')} of a node at once"
        table = figures_table(title, ("measured", "", "rate or time"), ("measured", ""))
        for precision in dict.fromkeys(p.precision for p in machine.products):
            found = [p for p in machine.products if p.precision == precision]
            for text, best in (("slowest", min), ("fastest", max)):
                one = best(found, key=lambda p: p.flops_per_second)
                shape = f"{one.rows} x {one.inner} by {one.inner} x {one.columns}"
                rate = f"{one.flops_per_second / 1e9:.1f} GFLOP/s"
                table.add_row(f"{text} product, {precision}", shape, rate)
        for count, rate_of_memory in enumerate(machine.memory, 1):
            speed = f"{bytes_text(int(rate_of_memory))}/s"
            table.add_row("memory", f"{counted(count, 'rank')} at once", speed)
        for name, link in (("node", machine.node), ("network", machine.network)):
            if link is not None:
                table.add_row(
                    name,
                    f"latency {milliseconds(link.latency)}",
                    f"{bytes_text(int(link.bytes_per_second))}/s",
                )
        if machine.network is not None:
            busy = 1e9 * machine.network.processor_seconds
            table.add_row("processor", "for each byte between hosts", f"{busy:.2f} ns")
        for timed in machine.passes:
            table.add_row(
                timed.name,
                timed.precision,
                f"{timed.forward * 1e9:.2f} + {timed.backward * 1e9:.2f} ns",
            )
        table.add_row("call of a layer", "", milliseconds(machine.call_seconds))
        table.add_row("reduction of a unit", "", milliseconds(machine.unit_seconds))
        table.add_row("rest of a step", "", milliseconds(machine.step_seconds))
        table.caption = (
            "memory: bytes that each rank reads and writes; layers: forward + backward for each "
            "element of the output, besides products; attention: for each score."
        )
        return table


def _groups(nodes: Sequence[int], *, within: bool) -> list[tuple[int, ...]]:
    """Return groups of ranks that exchange messages: two of a node, or one of each host.

    Between hosts there are as many groups as the host with the fewest ranks has ranks, so that
    their network is busy.
    """
    ranks_of = [[r for r, node in enumerate(nodes) if node == n] for n in dict.fromkeys(nodes)]
    if within:
        return [tuple(ranks_of[0][:2])] if len(ranks_of[0]) > 1 else []
    return [*zip(*ranks_of, strict=False)] if len(ranks_of) > 1 else []


def _cold(shape: tuple[int, int], dtype: DType) -> Array:
    """Return arrays of one shape, at most 64, which together fill `_COLD` bytes."""
    count = _COLD // (math.prod(shape) * dtype.itemsize)
    return np.ones((min(max(1, count), 64), *shape), dtype)


def _precisions() -> tuple[str, ...]:
    # Without the processor's unit bfloat16 is computed as float32, and nobody plans it.
    own = "float32", "float64"
    return own if library() is None else (*own, "bfloat16")


def _dtype(precision: str) -> DType:
    return BFLOAT16 if precision == "bfloat16" else np.dtype(precision)


def _layers() -> Iterator[tuple[nn.Layer, tuple[int, ...], int]]:
    """Yield layers, the shape of a sample, and the number of samples, whose passes are timed."""
    for layer in (nn.ReLU(), nn.GELU(), nn.Tanh(), nn.Sigmoid(), nn.SiLU(), nn.Softmax()):
        yield layer, (_WIDTH,), _ROWS
    yield nn.LayerNorm(_WIDTH), (_WIDTH,), _ROWS
    yield nn.RMSNorm(_WIDTH), (_WIDTH,), _ROWS
    yield nn.Dropout(0.1), (_WIDTH,), _ROWS
    yield nn.Linear(_WIDTH, _WIDTH), (_WIDTH,), _ROWS
    yield nn.Embedding(_ROWS, _ROWS), (_TIME,), _ROWS * _WIDTH // _ROWS // _TIME
    yield nn.PositionalEmbedding(_TIME, _ROWS), (_TIME, _ROWS), _WIDTH // _TIME
    for attention in (nn.CausalAttention(_HEADS), nn.Attention(_HEADS)):
        yield attention, (_TIME, 3 * _HEADS * 32), _ROWS * _WIDTH // (_TIME * _HEADS * 32)
    yield nn.Conv2D(16, 16, 3), (16, 32, 32), 16
    yield nn.MaxPool2D(2), (16, 32, 32), 16


def _of_gradients(dtype: DType) -> DType:
    """Return the dtype of the gradients of parameters of ``dtype``."""
    return _ELEMENT if dtype == BFLOAT16 else dtype
