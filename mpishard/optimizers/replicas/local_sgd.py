"""The optimizer whose ranks train alone for some steps, and then average parameters."""

from __future__ import annotations

from dataclasses import fields
from types import MappingProxyType

from mpishard.base import as_count, require_type
from mpishard.models import ShardedModelBase
from mpishard.optimizers.replicas.local_state import CODES, LocalSettings, LocalState
from mpishard.optimizers.replicas.wrapper import ReplicasOptimizer
from mpishard.optimizers.rules.rule import Optimizer
from mpishard.optimizers.sharded.state import ModelState
from mpishard.sharding import ShardingConfiguration, refuse_line_search


class LocalSGDOptimizer(ReplicasOptimizer):
    """Updates each replica of a model alone; every H steps they agree on their parameters.

    The ``replica_size`` of the model's configuration is the number of ranks of a replica; inside a
    replica the strategy is unchanged. With None each rank is a replica. If ``optimize`` wraps a
    plain model and there are several nodes with equal numbers of consecutive ranks, each node is a
    replica by default: `sharding_configuration` has this size, also for a model that is wrapped
    before. On one node each rank is a replica.

    Without ``outer`` they take the mean of their parameters, weighted by the samples that each has
    used (Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, algorithm 1). With
    an outer rule the change of that mean is its gradient: theta before the H steps, less the mean
    after them. With Nesterov's SGD of rate 0.7 and momentum 0.9 that is DiLoCo (Douillard et al.,
    arXiv 2311.08105, algorithm 1).

    The ranks of a replica keep the inner rule's state for it, as under the strategy. The outer
    rule's state, and the parameters before the H steps, are sharded over all ranks. Sent every H
    steps, summed over N replicas, for S bytes of trained units: 2 (N - 1) S. In between replicas
    exchange only the small all-reduce of a step: it gives all ranks the loss, and stops all of them
    if one loss is not finite. ``optimize`` makes the replicas agree before each evaluation and each
    checkpoint, too.

    With ``exchange`` the changes of the parameters travel rounded, both to the owner of a piece and
    back from it: "int8" as in `GradientCompressionOptimizer`. Replicas have the same bits
    afterwards. Each rank keeps a copy of the parameters for this.

    With ``start_step=N`` the replicas take their mean every ``start_period`` steps until step N,
    without the outer rule, and the periods begin then. Replicas change fast at the start, and need
    to agree often (Lin et al., "Don't Use Large Mini-batches, Use Local SGD", ICLR 2020, section 3,
    with a period of 1).

    A checkpoint has the inner state of each replica. The same number of replicas continues with the
    same bits. If N replicas continue a run of M, replica j takes the mean of the states of the
    replicas i with i % N == j, or for N > M the state of replica j % M. The ranks of a replica may
    be others.

    Parameters
    ----------
    wrapped_optimizer : Optimizer
        The inner rule and its settings.
    config : ShardingConfiguration
        Backend and choices.
    synchronization_period : int
        H: 1 or more. With SGD without momentum, 1 is what DDP does.
    outer : Optimizer, optional
        The outer rule, for example `SGD(0.7, momentum=0.9, nesterov=True)`.
    strategy : {"ddp", "zero1", "zero2", "zero3", "fsdp", "hybrid"}
        Inside each replica; others than "ddp" need replicas of several ranks. "hybrid" takes a
        wrapped `HybridShardedModel` whose configuration has a ``replica_size``: each replica is a
        mesh of its own, also with a data axis.
    exchange : {"float32", "bfloat16", "int8"}, optional
        Encoding of the changes that travel. Default: the model's dtype. With "int8" on a mesh,
        changes of parameters that several ranks of a replica hold travel in the model's dtype.
    start_step : int
        N: 0 or more. The number of steps is in checkpoints.
    start_period : int
        From 1 to H.

    Raises
    ------
    TypeError, ValueError
        As `ShardedOptimizerBase`; for a number outside its range, an outer rule that clips or
        freezes, rules that search along a line, another strategy or exchange, and a strategy that
        shards without a ``replica_size``.
    """

    _refused = MappingProxyType(
        {
            "last_computed_gradients": "no gradient of all ranks; each replica has its own",
            "apply_gradients": "each replica trains with its own: use step, or DDPOptimizer",
        }
    )
    _sends_gradients = False
    _setting_names = tuple(field.name for field in fields(LocalSettings))

    def __init__(
        self,
        wrapped_optimizer: Optimizer,
        config: ShardingConfiguration,
        synchronization_period: int = 10,
        outer: Optimizer | None = None,
        *,
        strategy: str = "ddp",
        exchange: str | None = None,
        start_step: int = 0,
        start_period: int = 1,
    ) -> None:
        super().__init__(wrapped_optimizer, config)
        period = self.synchronization_period = as_count(
            "synchronization_period", synchronization_period
        )
        self.start_step = as_count("start_step", start_step, least=0)
        self.start_period = as_count("start_period", start_period)
        # A start that exchanges more rarely than the rest would be a mistake.
        if start_period > period:
            raise ValueError(
                f"start_period must be from 1 to synchronization_period, {period}, got "
                f"{start_period}"
            )
        if exchange is not None and exchange not in CODES:
            raise ValueError(f"exchange must be one of {', '.join(CODES)}, got {exchange!r}")
        if outer is not None:
            require_type("outer", outer, Optimizer)
            # Its gradient is the change of the parameters of H steps, which are clipped already.
            if outer.clip_global_norm or outer.clip_value or outer.parameter_options:
                raise ValueError(
                    "outer must have no clipping and no parameter_options: give them to the inner "
                    "rule"
                )
        # A line search compares values of one function, and replicas see different samples.
        for rule in (self._rule, outer):
            if rule is not None and rule.searches:
                refuse_line_search(type(rule).__name__, "each replica has a function of its own")
        self.outer = outer
        self.exchange = exchange
        self._choose_replicas(strategy)

    def _fingerprint(self) -> dict[str, object]:
        outer = None if self.outer is None else self.outer.fingerprint()
        return {**super()._fingerprint(), "outer": outer}

    def _make_state(self, model: ShardedModelBase, frozen: frozenset[str]) -> ModelState:
        return LocalState(self._rule, model, frozen, LocalSettings(**self._settings()))

    def synchronize_optimizer_state(self) -> None:
        """Do nothing: each rank has the inner state of its own replica."""
