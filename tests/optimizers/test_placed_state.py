"""State of ranks that store boxes of the model's tensors, as bytes and as pieces."""

import numpy as np
import pytest

import mpishard as ms
from mpishard.optimizers.sharded.state_bytes import StateBytes
from mpishard.sharding import LocalParameter, ParameterEntry, Piece, Placement, Unit
from mpishard.training.run_state import BestParameters

ENTRIES = [
    ParameterEntry("rows", (6, 2), 0), ParameterEntry("frozen", (3,), 12),
    ParameterEntry("columns", (3, 4), 15), ParameterEntry("scale", (), 27),
    ParameterEntry("norm", (5,), 28),
]  # fmt: skip
STATEFUL = [entry for entry in ENTRIES if entry.name != "frozen"]
FULL = np.random.default_rng(0).standard_normal((2, 33))


def held(rank):
    """Return what a rank of three stores: boxes of rows and columns, and the rest whole."""
    blocks = tuple(((3 * b + rank, 3 * b + rank + 1), (0, 2)) for b in (0, 1))
    slices = [
        LocalParameter(ParameterEntry("rows", (2, 2), 0), blocks),
        LocalParameter(ParameterEntry("frozen", (3,), 4), (((0, 3),),), is_counted=rank == 0),
        LocalParameter(ParameterEntry("columns", (3, 1), 7), (((0, 3), (rank, rank + 1)),)),
        LocalParameter(ParameterEntry("scale", (), 10), ((),), is_counted=rank == 0),
        LocalParameter(ParameterEntry("norm", (5,), 11), (((0, 5),),), is_counted=rank == 0),
    ]
    return Placement(ENTRIES, slices)


UNIT = Unit(0, 0, 16, 0, 0)
# Pieces that a rank updates, without frozen parameters, and those that the first and the other
# ranks count. The state is as long as the former, and begins with its first element.
UPDATED = [
    Piece(UNIT, 0, 2, 0),
    Piece(UNIT, 2, 4, 2),
    Piece(UNIT, 7, 11, 4),
    Piece(UNIT, 11, 16, 8),
]
SPOKEN = {0: UPDATED, 1: [*UPDATED[:2], Piece(UNIT, 7, 10, 4)]}
SPOKEN[2] = SPOKEN[1]


def last_column():
    """Return what a fourth rank stores: one column."""
    boxes = (((0, 3), (3, 4)),)
    return Placement(ENTRIES, [LocalParameter(ParameterEntry("columns", (3, 1), 0), boxes)])


def state_of(rank):
    placement = last_column() if rank == 3 else held(rank)
    pieces = [Piece(UNIT, 0, 3, 0)] if rank == 3 else UPDATED
    state = {}
    for name, full in zip("mv", FULL, strict=True):
        parts = [placement.local(full, piece.start, piece.stop) for piece in pieces]
        state[name] = np.concatenate(parts)
    return placement, pieces, state


def regions(placement, pieces, state):
    return {
        name: placement.cut((piece.start, vector[piece.in_shard]) for piece in pieces)
        for name, vector in state.items()
    }


def test_every_rank_has_the_tensors_of_all():
    def gather(backend):
        placement, pieces, state = (held(0), [], {n: np.empty(0) for n in "mv"})
        if backend.rank < 4:  # the fifth rank has no piece
            placement, pieces, state = state_of(backend.rank)
        spoken = SPOKEN.get(backend.rank, pieces)
        return StateBytes.gather(
            backend, regions(placement, spoken, state), {}, STATEFUL, np.dtype(float)
        ).arrays

    for arrays in ms.run_in_threads(5, gather):
        for name, full in zip("mv", FULL, strict=True):
            assert [*arrays[name]] == [entry.name for entry in STATEFUL]
            for entry in STATEFUL:
                found = arrays[name][entry.name]
                assert found.shape == entry.shape
                assert found.tobytes() == full[entry.start : entry.stop].tobytes()


@pytest.mark.parametrize("rank", range(4))
def test_every_rank_takes_its_slices_of_the_tensors(rank):
    arrays = {
        name: {
            entry.name: full[entry.start : entry.stop].reshape(entry.shape) for entry in STATEFUL
        }
        for name, full in zip("mv", FULL, strict=True)
    }
    placement, pieces, expected = state_of(rank)
    state = {name: np.zeros_like(vector) for name, vector in expected.items()}
    StateBytes({"optimizer_steps": 1}, arrays).fill(regions(placement, pieces, state), STATEFUL)
    for name, vector in state.items():
        assert vector.tobytes() == expected[name].tobytes()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_reads_but_does_not_write_parameters_that_it_does_not_count(strategy, monkeypatch):
    """A model of a world of one, whose biases are counted by another rank."""

    def ask(backend):
        model = ms.as_distributed(ms.nn.MLP([3, 4, 2], seed=0), backend, strategy)
        optimizer = ms.as_distributed(ms.optimizers.AdamW(1e-2), backend, strategy)
        optimizer.bind(model)
        whole = model.engine.placement
        slices = [
            LocalParameter(held.entry, held.boxes, is_counted=not held.entry.name.endswith("bias"))
            for held in whole.local_parameters
        ]
        placement = Placement(whole.entries, slices)
        monkeypatch.setattr(model.engine, "placement", placement)
        monkeypatch.setattr(model.engine.program.vector, "placement", placement)
        best = BestParameters(model)
        best.keep()
        weights = [entry.name for entry in model.parameter_entries if "weight" in entry.name]
        everything = [entry.name for entry in model.parameter_entries]
        states = (model.checkpointed(), optimizer.checkpoint_view(model), best)
        for state in states:
            for pieces in state.arrays_to_write().values():
                assert [region.name for region, _ in pieces] == weights
            for pieces in state.arrays_to_read().values():
                assert [region.name for region, _ in pieces] == everything
        assert [len(state.arrays_to_read()) for state in states] == [1, 2, 1]

    ms.run_in_threads(1, ask)
