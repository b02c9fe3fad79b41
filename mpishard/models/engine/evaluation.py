"""Losses and gradients of batches that update nothing."""

from __future__ import annotations

import numpy as np

from mpishard.base import Array, Data, NoSampleError, array_namespace, read_numbers
from mpishard.contracts import ILossFunction
from mpishard.models.engine.engine import Engine
from mpishard.models.programs.program import Batch
from mpishard.models.stores.gradient_store import BackwardPass
from mpishard.models.stores.replicated_gradients import ReplicatedGradients
from mpishard.nn import Context


def local_gradient(
    engine: Engine, x: Data, y: Data, loss: ILossFunction | None, sample_start: int = 0
) -> Array:
    """Return the gradient of the mean loss of this rank's batch, shape (length,), not reduced."""
    engine.layout.device.use()
    program, replica = engine.program, engine.replica
    inputs, targets = program.check_pair(x, y, loss or engine.loss)
    layout = engine.gradients.layout
    # A separate store, because the gradient of an open round must not change.
    sink = ReplicatedGradients(layout)
    # Sharded parameters are gathered, so that every rank must pass its batch at the same time.
    everywhere = engine.policy.shards_parameters
    replica.require_one_batch(
        "compute_gradients", x, y, everywhere=everywhere, subject=engine.layout.subject
    )
    # With is_last=False nothing is reduced.
    with engine.leaving_no_unit():
        total, weight = engine.run_pass(
            inputs,
            targets,
            sink,
            this=BackwardPass(is_first=True, is_last=False),
            loss=loss,
            sample_start=sample_start,
        )
        # Copies of a parameter on several stages have a part of its gradient each.
        program.finish_local(sink)
    full = sink.vector
    # The store has no memory for frozen units, but the result has zeros for them.
    if program.frozen:
        pieces = program.trained(layout.pieces(sharded=False))
        full = array_namespace(full).zeros(engine.layout.length, full.dtype)
        for piece, values in zip(pieces, sink.local(pieces), strict=True):
            full[piece.start : piece.stop] = values
    total, weight = replica.share_loss(*read_numbers([total, weight]))
    full = program.vector.assemble(full, layout)
    # An empty batch has no mean: its zeros count with weight 0 when gradients are averaged.
    if weight:
        full /= engine.divisor(weight, loss)
    engine.computed = full, total, weight, loss
    return full


def synchronize_gradient(engine: Engine) -> tuple[float, float, Array] | None:
    """Average the last `local_gradient` over the batches of all ranks, in place. Collective.

    Returns
    -------
    tuple of (float, float, Array) or None
        Mean loss, weight of all samples, and the gradient; None if no `local_gradient` was computed
        since the last call or the last step.
    """
    if engine.computed is None:
        return None
    # Forgotten at once: averaged twice, it would be weighted by all samples of all ranks.
    (full, total, weight, loss), engine.computed = engine.computed, None
    ranks, subject = engine.replica.sample_group, engine.layout.subject
    total, total_weight = map(float, ranks.all_reduce(np.array([total, weight]), subject=subject))
    # Ranks have means over different numbers of samples: each is weighted by its own. Sums are not.
    full *= engine.divisor(weight, loss)
    ranks.all_reduce(full, subject=subject)
    if total_weight:
        full /= engine.divisor(total_weight, loss)
    return engine.mean(total, total_weight, loss), total_weight, full


def global_gradient(engine: Engine, x: Data, y: Data) -> tuple[float, Array]:
    """Return the mean loss of all ranks' batches and its gradient, shape (length,). Collective."""
    engine.replicas.require_equal("loss_and_gradients()")
    engine.round.require_none("loss_and_gradients()")
    inputs, _ = engine.program.check_pair(x, y, engine.loss)
    engine.replica.require_one_batch(
        "compute_gradients", x, y, everywhere=True, subject=engine.layout.subject
    )
    # Only random layers need the indices of samples, and these cost a message.
    sample_start = 0
    if engine.program.is_random:
        sample_start = engine.round.sample_start(len(inputs))
        engine.round.end()
    local_gradient(engine, x, y, None, sample_start)
    found = synchronize_gradient(engine)
    assert found is not None
    loss, weight, full = found
    # A pass in train mode has changed batch statistics, which must not differ on ranks.
    engine.program.share_changed_state(engine.backend)
    # The weight is a sum over ranks: all raise this, or none.
    if weight == 0:
        raise NoSampleError("no rank has a sample that counts; all weights are 0")
    return loss, full


def measured(
    engine: Engine, x: Data, y: Data, *, predicts: bool = False
) -> tuple[Array | None, float, float]:
    """Return outputs for this rank's batch, and the sum and the weight of the loss.

    No gradient is computed, unless a black box computes its loss only together with one. Then
    outputs are computed only with ``predicts``. They may be None if the batch has no samples.
    """
    engine.layout.device.use()
    inputs, targets = engine.program.check_pair(x, y, engine.loss)
    # An empty batch is skipped, unless other ranks wait for this one to gather parameters.
    if not engine.policy.shards_parameters and len(x) == 0:
        return None, 0.0, 0.0
    if engine.loss is None:
        batch = Batch(inputs, targets, None, Context(training=False))
        total, weight = read_numbers(engine.program.forward(engine.parameters, batch)[:2])
        return engine.predict(x) if predicts and len(x) else None, total, weight
    prediction = engine.predict(x)
    return prediction, *engine.program.measure(engine.loss, prediction, targets)


def mean_loss(engine: Engine, x: Data, y: Data) -> tuple[float, float]:
    """Return the mean loss of all ranks' batches, NaN if unknown, and its weight. Collective."""
    engine.replicas.require_equal("evaluate()")
    _, total, weight = measured(engine, x, y)
    # The loss of ranks that compute one batch together counts once.
    own = (total, weight) if engine.replica.reports_loss else (0.0, 0.0)
    sums = engine.world.all_reduce(np.array(own), subject=engine.layout.subject)
    total, weight = map(float, sums)
    return engine.mean(total, weight), weight
