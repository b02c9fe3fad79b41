"""Speeds of a machine: products, passes over arrays, memory, and messages, in a file of JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from mpishard.base import as_amount, as_count, as_positive, nearest

FORMAT = "mpishard machine"
VERSION = 1
MEASURED_ON = "measured_on"
"""Name of a description that plans do not read."""

_NEAREST = 8  # measured shapes from which the rate of another one is interpolated


_Row = TypeVar("_Row", "ProductRate", "PassRate", "Link")


class MachineError(ValueError):
    """Raised if a machine file cannot be used; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class ProductRate:
    """Speed of the product of a matrix (rows, inner) by another one (inner, columns).

    Parameters
    ----------
    precision : str
        "float32", "float64" or "bfloat16".
    rows, columns, inner : int
        The shape.
    flops_per_second : float
        Operations per second, 2 rows columns inner of them, of one rank while all ranks of a node
        multiply.
    """

    precision: str
    rows: int
    columns: int
    inner: int
    flops_per_second: float

    def __post_init__(self) -> None:
        for name in ("rows", "columns", "inner"):
            as_count(name, getattr(self, name))
        as_positive("flops_per_second", self.flops_per_second)


@dataclass(frozen=True, slots=True)
class PassRate:
    """Time of a layer or loss besides its products, or of an update rule.

    Parameters
    ----------
    name : str
        Class of the layer, the loss or the rule.
    precision : str
        "float32", "float64" or "bfloat16".
    forward, backward : float
        Seconds for each element of the output; of attention for each score, and of a rule for each
        parameter, with 0 for backward.
    """

    name: str
    precision: str
    forward: float
    backward: float = 0.0

    def __post_init__(self) -> None:
        as_amount("forward", self.forward)
        as_amount("backward", self.backward)


@dataclass(frozen=True, slots=True)
class Link:
    """Messages between two ranks of a node, or between two hosts.

    Parameters
    ----------
    latency : float
        Seconds from the beginning of a short message to its end.
    bytes_per_second : float
        Rate of long messages in each direction: of one rank, or of a host with all its ranks.
    message_seconds : float
        Seconds in which a rank begins one more message.
    processor_seconds : float
        Seconds of a rank's processor for each byte that it sends and receives between hosts, which
        it cannot compute in. 0 if the network moves memory by itself.
    """

    latency: float
    bytes_per_second: float
    message_seconds: float = 0.0
    processor_seconds: float = 0.0

    def __post_init__(self) -> None:
        as_amount("latency", self.latency)
        as_positive("bytes_per_second", self.bytes_per_second)
        as_amount("message_seconds", self.message_seconds)
        as_amount("processor_seconds", self.processor_seconds)

    def collective_seconds(self, nbytes: float, others: int, passes: int = 1) -> float:
        """Return the time of a collective in which a rank sends to ``others``, once or twice.

        All messages of a pass are under way at once, and ``nbytes`` are those of both passes.
        """
        begun = passes * (self.latency + others * self.message_seconds)
        return begun + nbytes / self.bytes_per_second

    def seconds(self, nbytes: float, messages: float = 1) -> float:
        """Return the time of messages of ``nbytes`` together, one after the other."""
        return messages * self.latency + nbytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Machine:
    """Speeds of one kind of host, and of the network between them.

    Parameters
    ----------
    name : str
        Name for people.
    ranks_per_node : int
        Number of ranks of a node that worked at once in the measurement.
    products : tuple of ProductRate
        At least one.
    memory : tuple of float
        Bytes per second that each rank reads and writes while 1, 2, .. ranks of a node do so, or
        one number for each of ``ranks_per_node`` ranks. More ranks share what the last ones have.
    node : Link
        Between two ranks of a node.
    network : Link, optional
        Between two hosts. None if it was measured on one host.
    passes : tuple of PassRate
        Layers that are not here take the time in which memory reads and writes their arrays.
    call_seconds : float
        Time of the call of a layer, forward or backward, on small arrays.
    unit_seconds : float
        Time in which a rank starts and ends the reduction of a unit, besides moving its bytes.
    step_seconds : float
        Time of a step besides its layers, its reductions and its update.
    memory_bytes : int, optional
        Memory of a host.
    """

    name: str
    ranks_per_node: int
    products: tuple[ProductRate, ...]
    memory: tuple[float, ...]
    node: Link
    network: Link | None = None
    passes: tuple[PassRate, ...] = ()
    call_seconds: float = 0.0
    unit_seconds: float = 0.0
    step_seconds: float = 0.0
    memory_bytes: int | None = None
    _rates: dict[tuple[str, int, int, int], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        as_count("ranks_per_node", self.ranks_per_node)
        if not self.products or not self.memory:
            raise ValueError("products and memory must have at least one entry")
        for rate in self.memory:
            as_positive("a rate of memory", rate)
        as_amount("call_seconds", self.call_seconds)
        as_amount("unit_seconds", self.unit_seconds)
        as_amount("step_seconds", self.step_seconds)
        if self.memory_bytes is not None:
            as_count("memory_bytes", self.memory_bytes)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a machine file.

        Raises
        ------
        OSError
            If it cannot be read.
        MachineError
            If there is none, it is no machine file, of another version, or lacks a value.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise MachineError(
                f"there is no machine file {path}: `mpishard bench machine` writes machine.json; "
                "docs/plan-time.md shows one that is written by hand"
            ) from None
        except ValueError as error:
            raise MachineError(f"{path} is no JSON: {error}") from None
        kind = found.get("format") if isinstance(found, dict) else None
        if kind != FORMAT:
            raise MachineError(
                f'{path} is no machine file: expected "format": "{FORMAT}", got {kind!r}; '
                "`mpishard bench machine` writes one"
            )
        if found.get("version") != VERSION:
            raise MachineError(
                f"{path} has version {found.get('version')!r} of the machine file, and this "
                f"mpishard reads version {VERSION}: measure again with `mpishard bench machine`"
            )
        try:
            return cls.of(found)
        except KeyError as error:
            raise MachineError(f"{path} lacks {error}: docs/plan-time.md has all names") from None
        except (TypeError, ValueError) as error:
            raise MachineError(f"{path}: {error}") from None

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Self:
        """Return the machine of a file's content, whose format and version were checked."""
        known = [each.name for each in fields(cls) if each.init]
        for name in found:
            if name not in (*known, "format", "version", MEASURED_ON):
                raise ValueError(f"{name!r} is no name of a machine file{nearest(name, known)}")
        network = found.get("network")
        return cls(
            name=str(found["name"]),
            ranks_per_node=found["ranks_per_node"],
            products=tuple(
                _read(ProductRate, "products", each) for each in _list(found, "products")
            ),
            memory=tuple(_list(found, "memory")),
            node=_read(Link, "node", found["node"]),
            network=None if network is None else _read(Link, "network", network),
            passes=tuple(_read(PassRate, "passes", each) for each in _list(found, "passes", ())),
            call_seconds=found.get("call_seconds", 0.0),
            unit_seconds=found.get("unit_seconds", 0.0),
            step_seconds=found.get("step_seconds", 0.0),
            memory_bytes=found.get("memory_bytes"),
        )

    def write(self, path: str | os.PathLike[str], measured_on: object = None) -> None:
        """Write a machine file; ``measured_on`` describes the machine to people."""
        found = asdict(self)
        del found["_rates"]
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        about = {} if measured_on is None else {MEASURED_ON: measured_on}
        text = json.dumps({"format": FORMAT, "version": VERSION, **found, **about}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    def keeping(self, before: Machine) -> tuple[Self, list[str]]:
        """Return a measurement with what another file has besides, and the names of that.

        Those are the network, if this was measured on one host, and passes of a user's classes.
        """
        measured = {(each.name, each.precision) for each in self.passes}
        more = [p for p in before.passes if (p.name, p.precision) not in measured]
        names = [f"passes of {name}" for name in dict.fromkeys(each.name for each in more)]
        network = self.network
        if network is None and before.network is not None:
            network, names = before.network, ["network", *names]
        return replace(self, network=network, passes=(*self.passes, *more)), names

    # ----------------------------------------------------------------------------------- questions

    def product_seconds(
        self, precision: str, rows: float, columns: float, inner: float, count: float = 1
    ) -> float:
        """Return the time of ``count`` products of one shape, at the rates of shapes near it.

        Raises
        ------
        MachineError
            If no product of the precision was measured.
        """
        if not (rows and columns and inner and count):
            return 0.0
        flops = 2.0 * rows * columns * inner * count
        return flops / self._product_rate(precision, round(rows), round(columns), round(inner))

    def _product_rate(self, precision: str, rows: int, columns: int, inner: int) -> float:
        key = precision, max(1, rows), max(1, columns), max(1, inner)
        if key not in self._rates:
            measured = [p for p in self.products if p.precision == precision]
            if not measured:
                have = ", ".join(sorted({p.precision for p in self.products}))
                raise MachineError(
                    f"the machine file has no products in {precision}, only in {have}: `mpishard "
                    "bench machine` measures float32, float64, and bfloat16 if the processor has a "
                    "unit for it; measure again, or write rows of products by hand"
                )
            spans = [
                (min(logs), max(logs))
                for logs in (
                    [math.log2(getattr(p, name)) for p in measured]
                    for name in ("rows", "columns", "inner")
                )
            ]
            # Larger shapes than all that were measured have the rate of the largest.
            wanted = [
                min(max(math.log2(size), low), high)
                for size, (low, high) in zip(key[1:], spans, strict=True)
            ]
            near = sorted((_distance(p, wanted), p.flops_per_second) for p in measured)
            weights = [(1 / max(d, 1e-9) ** 3, rate) for d, rate in near[:_NEAREST]]
            # The mean of logarithms, because the rates of small sizes grow as their powers.
            total = sum(weight for weight, _ in weights)
            mean = sum(weight * math.log(rate) for weight, rate in weights) / total
            self._rates[key] = math.exp(mean)
        return self._rates[key]

    def pass_rate(self, name: str, precision: str) -> PassRate | None:
        """Return the measured time of a layer, loss or rule, or None."""
        for each in self.passes:
            if each.name == name and each.precision == precision:
                return each
        return None

    def memory_seconds(self, nbytes: float, ranks: int) -> float:
        """Return the time in which a rank reads and writes ``nbytes``, as ``ranks`` of a node do.

        More ranks than were measured share the last rate.
        """
        # One number holds for each rank of a node.
        known = len(self.memory) if len(self.memory) > 1 else self.ranks_per_node
        rate = self.memory[min(ranks, len(self.memory)) - 1]
        return nbytes / (rate * min(1.0, known / ranks))

    def between_hosts(self) -> Link:
        """Return the network.

        Raises
        ------
        MachineError
            If it is not known.
        """
        if self.network is None:
            raise MachineError(
                'the machine file has no "network": measure it on two hosts, with all of their '
                "ranks, N, with `mpishard run --hosts a,b -n N -m mpishard bench machine`, "
                "or write its latency and bytes_per_second by hand"
            )
        return self.network


def _list(found: Mapping[str, Any], name: str, usual: tuple[()] | None = None) -> Sequence[Any]:
    """Return a list of a file; without ``usual`` the file must have it."""
    given = found[name] if usual is None else found.get(name, usual)
    if not isinstance(given, list | tuple):
        raise TypeError(f"{name} must be a list, got {given!r}")
    return given


def _read(kind: type[_Row], place: str, given: Mapping[str, Any]) -> _Row:
    """Return the row of a file that has these names, at ``place``."""
    names = [each.name for each in fields(kind)]
    if not isinstance(given, Mapping):
        raise TypeError(f"{place} must name {', '.join(names)}, got {given!r}")
    for name in given:
        if name not in names:
            raise ValueError(f"{name!r} is no name of a {kind.__name__}{nearest(name, names)}")
    return kind(**given)


def _distance(product: ProductRate, wanted: list[float]) -> float:
    sizes = (product.rows, product.columns, product.inner)
    return math.dist([math.log2(size) for size in sizes], wanted)
