"""A user's choices about sharding."""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable
from typing import Any

from mpishard.base import as_count, as_flag, as_integer, as_positive, require_attribute
from mpishard.base.mirrored import ConfigurationPresets
from mpishard.communication import CommunicationBackend
from mpishard.sharding.refusals import refuse_with_leaves


def shared_choices(config: ShardingConfiguration) -> dict[str, bool | int | str | None]:
    """Return the choices that decide which collectives a rank calls: equal on all ranks.

    They are the keyword arguments: all choices but the backend and the learning rate.
    """
    # From the signature, so that a new choice is compared from the day it is written.
    names = inspect.getfullargspec(ShardingConfiguration.__init__).kwonlyargs
    return {name: getattr(config, name) for name in names}


def by_node(config: ShardingConfiguration) -> ShardingConfiguration:
    """Return ``config``, or a copy of it whose replicas are nodes. Collective.

    It is a copy if no ``replica_size`` was given, and there are several nodes, each with the same
    number of consecutive ranks, above one.

    Raises
    ------
    ValueError
        If it would be a copy, and ``gradient_leaves`` is given.
    """
    backend = config.communication_backend
    if config.replica_size is not None:
        return config
    backend.initialize()
    size = _ranks_of_a_node(backend)
    if backend.node_count == 1 or size in (None, 1):
        return config
    # Refused here, because a later refusal would name a replica_size that the user has not given.
    if config.gradient_leaves is not None:
        refuse_with_leaves(
            config.gradient_leaves,
            f"an optimizer that makes each of the {backend.node_count} nodes a replica",
            "leave out gradient_leaves",
        )
    # A copy: the user's configuration may serve other models, of one replica.
    found = copy.copy(config)
    found._replica_size = size
    return found


def _ranks_of_a_node(backend: CommunicationBackend) -> int | None:
    """Return the number of ranks of each node; None if they differ or are not consecutive."""
    # From the order of ranks alone, which every rank knows: no message is needed.
    size, rest = divmod(backend.world_size, backend.node_count)
    # Ranks placed on nodes in turn would make replicas whose messages all cross nodes.
    is_even = not rest and backend.nodes == tuple(r // size for r in range(backend.world_size))
    return size if is_even else None


def _power_of_two(name: str, value: object) -> int | None:
    if value is None:
        return None
    value = as_integer(name, value)
    if value < 1 or value & (value - 1):
        raise ValueError(
            f"{name} must be a power of two, the largest world that is to reproduce, or None; "
            f"got {value}"
        )
    return int(value)


_HINTS = {
    "float16": "; float16 needs loss scaling, which there is not",
    "float32": "; leave precision out: a model computes in its own dtype, by default float32",
    "float64": '; leave precision out, and make the model with dtype="float64"',
}
"""Precision that is refused -> a hint for the error."""


def _precision(name: str, value: object) -> str | None:
    if value is not None and not (isinstance(value, str) and value in ("bfloat16", "tf32")):
        raise ValueError(
            f'{name} must be "bfloat16", "tf32", or None for the model\'s own dtype; got {value!r}'
            + _HINTS.get(str(value), "")
        )
    return value


# A property: a choice has its own docstring, and is checked whenever it is set.
class _Choice(property):
    """An attribute of a configuration, which is set to ``check(name, value)``."""

    def __init__(self, check: Callable[[str, Any], object], doc: str) -> None:
        self._check, self._text = check, doc

    def __set_name__(self, owner: type, name: str) -> None:
        def write(config: ShardingConfiguration, value: object) -> None:
            setattr(config, f"_{name}", self._check(name, value))

        # No Python function runs to read a choice, which each step does several times.
        super().__init__(operator.attrgetter(f"_{name}"), write, doc=self._text)


def _choice(check: Callable[[str, Any], object], doc: str) -> Any:
    """Return a `_Choice`, which a class declares as an attribute of the value's type."""
    return _Choice(check, doc)


class ShardingConfiguration(ConfigurationPresets):
    """Choices that a sharded model and its sharded optimizer share.

    All but the backend and ``replica_size`` can be set afterwards, too. The place of memory and the
    cuts of units are decided when a model is wrapped: ``minimum_parameter_group_size``,
    ``gradient_leaves``, ``precision`` and the three flags of CPU offload are read then, and a later
    change holds for the next model.

    Parameters
    ----------
    communication_backend : CommunicationBackend
        Backend of this rank. Read-only afterwards.
    learning_rate : float
        Step size of ``model.train``, plain gradient descent. Optimizers have their own.
    auto_sync_gradients : bool
        Whether every update uses the gradient of all ranks. If False, each rank updates with its
        own, and replicas drift apart until they are synchronised. Only a strategy that shards
        neither gradients nor state allows it, in a loop of the user's: `optimize` refuses it.
    minimum_parameter_group_size : int
        Consecutive layers are merged into one unit until it has this many elements. Larger units
        mean fewer, longer messages, and more memory for the units in use.
    enable_gradient_compression : bool
        Send the parameters' gradients over the data axis as bfloat16, half or a quarter of the
        bytes; sums are made in float32. They are rounded even if that axis has one rank, so that
        the result does not depend on its size. Messages between stages, slices and the copies of a
        tied parameter are not compressed.
    cpu_offload_optimizer : bool
        For a model on a GPU: keep the optimizer's state in host memory, and update the owned
        pieces there. Saves the state's bytes of GPU memory (twice the owned parameters for Adam),
        and costs two copies of the owned pieces over the bus in each step. Ren et al.,
        "ZeRO-Offload: Democratizing Billion-Scale Model Training", USENIX ATC 2021.
    cpu_offload_gradients : bool
        For a model on a GPU: keep reduced gradients in host memory.
    cpu_offload_parameters : bool
        For a model on a GPU whose strategy shards parameters: keep the owned pieces in host
        memory, and copy each unit to the GPU while it is used. Rajbhandari et al.,
        "ZeRO-Infinity", SC 2021, section 5.1.
    gradient_leaves : int, optional
        V, a power of two: worlds of 1 to 8 and of 16, 32 .. ranks, up to V, walk through *the
        same bits*, so that a run may continue with more or fewer ranks and end with identical
        parameters. The global batch is cut into V leaves, ``ShardLayout(batch, V)``, whatever the
        number of ranks; each leaf's gradient is computed alone, and all are summed in one tree.
        All ranks hold and update their pieces. For V = 8:

        ==========  ==================  =================================
        world size  ranks that compute  passes and reductions a step each
        ==========  ==================  =================================
        1           1                   8
        2 or 3      2                   4
        4 to 7      4                   2
        8           8                   1
        ==========  ==================  =================================

        Give each rank ``x[model.batch_indices(len(x))]`` of the global batch. For the data axis
        alone, with one BLAS thread. Default: None, one pass per rank and batch.
    check_collectives : bool
        Compare every rank's call before data is mixed. Costs one small message per collective.
    allow_nonfinite : bool
        Continue if a loss or gradient is infinite or NaN, instead of raising `NonFiniteLossError`
        on every rank before the update.
    precision : {"bfloat16", "tf32"}, optional
        For a float32 model of `mpishard.nn`. On the host "bfloat16" computes with bfloat16
        parameters and activations, while the owners keep float32 parameters and optimizer state:
        products are summed in float32, and weight gradients are float32. On a GPU both round the
        operands of products alone, and all arrays stay float32; the host refuses "tf32". Default:
        None, the model's dtype. See the page "Mixed precision". float16 is not offered, because it
        needs loss scaling.
    replica_size : int or "node", optional
        Number of consecutive ranks that hold one replica of the model together, for
        `LocalSGDOptimizer`, `GradientCompressionOptimizer` and `AsyncSGDOptimizer`.
        Inside a replica the strategy is unchanged, and the optimizer decides what replicas
        exchange. "node" means all ranks of a node. For a `HybridShardedModel` it is the product of
        its pipeline, tensor and data axes. Read-only afterwards. Default: None, one replica of all
        ranks; for a plain model that these optimizers wrap, a node or a rank.

    Raises
    ------
    TypeError
        If the backend is not a `CommunicationBackend`, a flag is not a bool, or a number has
        another type.
    ValueError
        If ``learning_rate`` is not above 0, the group size is below 1, ``gradient_leaves`` is not a
        power of two, or ``precision`` is another one. If ``replica_size`` does not divide the
        world, or is "node" and the nodes do not each have the same number of consecutive ranks.
    """

    def __init__(
        self,
        communication_backend: CommunicationBackend,
        learning_rate: float = 0.01,
        *,
        auto_sync_gradients: bool = True,
        minimum_parameter_group_size: int = 1024,
        enable_gradient_compression: bool = False,
        cpu_offload_optimizer: bool = False,
        cpu_offload_gradients: bool = False,
        cpu_offload_parameters: bool = False,
        gradient_leaves: int | None = None,
        check_collectives: bool = True,
        allow_nonfinite: bool = False,
        precision: str | None = None,
        replica_size: int | str | None = None,
    ) -> None:
        if not isinstance(communication_backend, CommunicationBackend):
            raise TypeError(
                "communication_backend must be a CommunicationBackend, got "
                f"{type(communication_backend).__name__}; mpishard.init() returns one"
            )
        self._communication_backend = communication_backend
        self.learning_rate = learning_rate
        self.auto_sync_gradients = auto_sync_gradients
        self.minimum_parameter_group_size = minimum_parameter_group_size
        self.enable_gradient_compression = enable_gradient_compression
        self.cpu_offload_optimizer = cpu_offload_optimizer
        self.cpu_offload_gradients = cpu_offload_gradients
        self.cpu_offload_parameters = cpu_offload_parameters
        self.gradient_leaves = gradient_leaves
        self.check_collectives = check_collectives
        self.allow_nonfinite = allow_nonfinite
        self.precision = precision
        # Not a `_Choice`: models have made groups of ranks of it, so it cannot change.
        self._replica_size = self._checked_replica_size(replica_size)

    def __setattr__(self, name: str, value: object) -> None:
        # A misspelled choice would otherwise be set, and have no effect.
        require_attribute(self, name, vars(ShardingConfiguration))
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        """The backend, and the choices that are not the defaults."""
        # The defaults are left out, because a log would not show the choice among thirteen names.
        defaults = inspect.signature(ShardingConfiguration).parameters.values()
        chosen = [
            f", {each.name}={getattr(self, each.name)!r}"
            for each in defaults
            if each.default is not each.empty and getattr(self, each.name) != each.default
        ]
        return f"{type(self).__name__}({self._communication_backend!r}{''.join(chosen)})"

    # ----------------------------------------------------------------------------------- choices

    def _checked_replica_size(self, given: int | str | None) -> int | None:
        if given is None:
            return None
        backend = self._communication_backend
        world = backend.world_size
        # By type first: an array compared with a text would be an array.
        if isinstance(given, str) and given == "node":
            backend.initialize()  # nodes are known only afterwards
            # Numbers of ranks differ on the nodes of some jobs; replicas must be equally large.
            of_a_node = _ranks_of_a_node(backend)
            if of_a_node is None:
                raise ValueError(
                    'replica_size="node" needs as many ranks on each node, and consecutive ones; '
                    f"rank {backend.rank} of {world} on {backend.node_count} nodes "
                    f"shares its node with {list(backend.peers)}: start the job with its "
                    "ranks by node, or give a number"
                )
            return of_a_node
        if isinstance(given, str):
            raise TypeError(f'replica_size must be a number of ranks or "node", got {given!r}')
        if as_integer("replica_size", given) < 1 or world % int(given):
            raise ValueError(
                f"replica_size must divide the {world} ranks of the world, got {given}"
            )
        return int(given)

    @property
    def communication_backend(self) -> CommunicationBackend:
        """The backend of this rank."""
        return self._communication_backend

    @property
    def replica_size(self) -> int | None:
        """Number of ranks that hold one replica; None if all do."""
        return self._replica_size

    learning_rate: float = _choice(as_positive, "Step size of ``model.train``.")
    auto_sync_gradients: bool = _choice(as_flag, "True if every update uses all ranks' gradient.")
    minimum_parameter_group_size: int = _choice(as_count, "Elements below which a unit grows.")
    enable_gradient_compression: bool = _choice(as_flag, "True if gradients travel as bfloat16.")
    cpu_offload_optimizer: bool = _choice(as_flag, "True if a GPU model's state is on the host.")
    cpu_offload_gradients: bool = _choice(as_flag, "True if its reduced gradients are there.")
    cpu_offload_parameters: bool = _choice(as_flag, "True if its owned pieces are there.")
    gradient_leaves: int | None = _choice(_power_of_two, "V, the largest world with equal bits.")
    precision: str | None = _choice(
        _precision, "bfloat16, tf32, or None for the model's own dtype."
    )
    allow_nonfinite: bool = _choice(as_flag, "Whether training survives an infinite or NaN loss.")

    # The backend compares calls, so that it holds this choice.

    @property
    def check_collectives(self) -> bool:
        """True if the calls of all ranks are compared before data is mixed."""
        return self._communication_backend.check_collectives

    @check_collectives.setter
    def check_collectives(self, value: bool) -> None:
        self._communication_backend.check_collectives = as_flag("check_collectives", value)
