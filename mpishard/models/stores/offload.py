"""Offload: vectors of a GPU model in host memory, to have GPU memory left.

Nothing here runs at the same time as the GPU computes: each copy is waited for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from mpishard.base import Array, Device, copy_into, is_device_array, synchronize, to_host
from mpishard.communication import Arena
from mpishard.models.stores.gradient_store import GradientStore, WrappedGradients
from mpishard.models.stores.parameter_store import ParameterStore, UnitBuffers
from mpishard.models.stores.replicated_gradients import ReplicatedGradients
from mpishard.models.stores.store_layout import StoreLayout
from mpishard.observe import MemoryCategory
from mpishard.sharding import Piece, ShardingConfiguration, Unit

_log = logging.getLogger("mpishard")


def log_ignored_offload(config: ShardingConfiguration, device: Device) -> None:
    """Log on rank 0 that the flags change nothing, for a model that is in host memory anyway."""
    flags = ("cpu_offload_optimizer", "cpu_offload_gradients", "cpu_offload_parameters")
    ignored = ", ".join(flag for flag in flags if getattr(config, flag))
    # No warning: one script may run on machines with and without a GPU.
    if ignored and not device.is_gpu and config.communication_backend.rank == 0:
        _log.info("%s has no effect, because the model is in host memory already", ignored)


class OffloadedParameters(ParameterStore):
    """Parameters in host memory; each unit is copied to the GPU while it is used.

    Rajbhandari et al., "ZeRO-Infinity", SC 2021, section 5.1.

    Parameters
    ----------
    inner : ParameterStore
        Holds the parameters on the host, by whichever strategy.
    layout : StoreLayout
        Of the model on the GPU.
    """

    def __init__(self, inner: ParameterStore, layout: StoreLayout) -> None:
        super().__init__(layout)
        self.local_pieces = inner.local_pieces
        self.once_per_node = inner.once_per_node
        self.in_flight = inner.in_flight
        self._inner = inner
        self._pool = UnitBuffers(layout)
        self._buffers: dict[int, Arena] = {}

    def fill(self, unit: Unit, full: Array | None) -> None:
        self._inner.fill(unit, full)

    def refresh(self) -> None:
        self._inner.refresh()

    def prefetch(self, unit: Unit) -> None:
        if unit.index not in self._buffers:
            # The host gathers meanwhile; a copy to the GPU would need one more buffer there.
            self._inner.prefetch(unit)

    def unshard(self, unit: Unit) -> Array:
        buffer = self._buffers.get(unit.index)
        if buffer is None:
            host = self._inner.unshard(unit)
            buffer = self._pool.take(unit)
            copy_into(buffer.mine[: unit.length], host)
            synchronize(buffer.mine)  # before the host's buffer is used for the next unit
            # The GPU has its copy, so that the unit gathered on the host can be released.
            self._inner.reshard(unit)
            self._buffers[unit.index] = buffer
        return buffer.mine[: unit.length]

    def reshard(self, unit: Unit) -> None:
        buffer = self._buffers.pop(unit.index, None)
        if buffer is not None:
            self._pool.give(unit.index, buffer)
        self._inner.reshard(unit)  # a unit that was prefetched and never used

    def held(self) -> AbstractContextManager[None]:
        # On the host: a unit is copied to the GPU again for each use.
        return self._inner.held()

    def abandon(self) -> None:
        for index, buffer in self._buffers.items():
            self._pool.give(index, buffer)
        self._buffers.clear()
        self._inner.abandon()

    def owned(self, pieces: Sequence[Piece]) -> list[Array]:
        return self._inner.owned(pieces)

    def publish(self, pieces: Sequence[Piece]) -> None:
        self._inner.publish(pieces)


class OffloadedGradients(WrappedGradients):
    """Gradients in host memory, reduced there; a unit's is on the GPU while it is computed.

    Parameters
    ----------
    inner : GradientStore
        Holds and reduces gradients on the host, by whichever strategy.
    layout : StoreLayout
        Of the model on the GPU.
    """

    def __init__(self, inner: GradientStore, layout: StoreLayout) -> None:
        super().__init__(inner, layout)
        # Buffers of the longest unit fit all, so that any free one can be taken.
        self._slot_length = max(unit.length for unit in layout.trained_units)
        self._free: list[Array] = []
        self._open: dict[int, Array] = {}

    def target(self, unit: Unit) -> tuple[Array, bool]:
        is_empty = unit.index not in self._open
        if is_empty:
            self._open[unit.index] = self._take_slot()
        return self._open[unit.index][: unit.length], is_empty

    def reduce(self, unit: Unit) -> None:
        full = self.gradient(unit)
        # Only the host's store knows whether earlier passes of the round have added to it.
        host, is_empty = self._inner.target(unit)
        if is_empty:
            copy_into(host, full)
        else:
            host += to_host(full)
        self._free.append(self._open.pop(unit.index))
        self._inner.reduce(unit)

    def abandon(self) -> None:
        self._free += self._open.values()
        self._open.clear()
        self._inner.abandon()

    def local(self, pieces: Sequence[Piece]) -> list[Array]:
        """Return the rank's own gradients of ``pieces``, reduced or not."""
        assert isinstance(self._inner, ReplicatedGradients)
        return self._inner.local(pieces)

    def _take_slot(self) -> Array:
        if self._free:
            return self._free.pop()
        return self.layout.allocate(MemoryCategory.FULL_GRADIENTS, self._slot_length)


class UpdateStage:
    """Copies parameters and gradients to the device of the optimizer's state, and back.

    Arrays that are there already are not copied. Otherwise it keeps buffers of their length: pinned
    host memory for an update on the host, which is what ZeRO-Offload does (Ren et al., USENIX ATC
    2021, section 4).

    Parameters
    ----------
    layout : StoreLayout
        Layout of the optimizer's state.
    """

    def __init__(self, layout: StoreLayout) -> None:
        self.layout = layout
        self._is_on_gpu = layout.device.is_gpu and not layout.is_on_host
        self._buffers: dict[str, Array] = {}

    @contextmanager
    def staged(
        self, parameters: list[Array], gradients: list[Array]
    ) -> Iterator[tuple[list[Array], list[Array]]]:
        """Yield both on the state's device; copy the block's changes of the parameters back.

        An exception in the block leaves the parameters unchanged, if they were copied.
        """
        # Parameters too, although they are on the GPU: a rule works where its state is.
        near = self._bring("parameters", parameters)
        yield near, self._bring("gradients", gradients)
        if near is not parameters:
            _copy_all(parameters, near)

    def _bring(self, name: str, arrays: list[Array]) -> list[Array]:
        if all(is_device_array(array) == self._is_on_gpu for array in arrays):
            return arrays
        length = sum(int(array.size) for array in arrays)
        # Kept from step to step, because allocating pinned memory takes long.
        if name not in self._buffers:
            self._buffers[name] = self.layout.allocate(MemoryCategory.SCRATCH, length)
        buffer, start, brought = self._buffers[name], 0, []
        for array in arrays:
            brought.append(buffer[start : start + int(array.size)])
            start += int(array.size)
        _copy_all(brought, arrays)
        return brought


def _copy_all(targets: Sequence[Array], sources: Sequence[Array]) -> None:
    """Copy each source into its target, and wait until the GPU has done so.

    After that the sources may change: CuPy's copies from pinned memory are asynchronous.
    """
    for target, source in zip(targets, sources, strict=True):
        copy_into(target, source)
    for array in (*targets[:1], *sources[:1]):  # one of the two is on the GPU
        synchronize(array)
