"""Selection of a test's rows by world: all together run all rows, or a sample of all pairs."""

from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__)
WORLDS = (1, 2, 3, 4, 5, 8)
ROWS = [(letter, number) for letter in "abc" for number in range(4)]


@pytest.fixture
def conftest(request, monkeypatch):
    """Return the conftest of all tests, as it is without ``--full``."""
    wanted = str(HERE.parents[1] / "conftest.py")
    plugins = request.config.pluginmanager.get_plugins()
    (module,) = (p for p in plugins if getattr(p, "__file__", None) == wanted)
    monkeypatch.setattr(module, "_is_full", False)
    return module


def items(worlds=WORLDS, rows=ROWS, name="test_something", marks=("in_worlds",)):
    return [
        SimpleNamespace(
            parent="a file",
            originalname=name,
            callspec=SimpleNamespace(
                params={"row": row, "world_size": world_size}, _idlist=[*row, world_size]
            ),
            get_closest_marker=lambda mark: mark in marks,
        )
        for world_size in worlds
        for row in rows
    ]


def by_world(kept):
    found = {}
    for item in kept:
        found.setdefault(item.callspec.params["world_size"], []).append(item.callspec.params["row"])
    return found


def on_threads(conftest, given):
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))
    given = list(given)
    conftest._select_worlds(config, given)
    return by_world(given)


def under_mpi(conftest, world_size, given):
    selection = conftest.RowSelection(given, world_size)
    return by_world([item for item in given if selection.has(item)]).get(world_size, [])


def anywhere(conftest, given):
    """The rows that threads or MPI ranks run."""
    found = on_threads(conftest, given)
    for world_size in (2, 3, 4):
        found[world_size] = sorted(
            {*found.get(world_size, []), *under_mpi(conftest, world_size, given)}
        )
    return found


def test_three_parameters_run_all_pairs_of_values(conftest):
    rows = [*product("abcd", range(4), (1, 2, 3))]
    chosen = [rows[place] for place in conftest.all_pairs(rows)]
    assert len(chosen) < len(rows) / 2
    for a, b in combinations(range(3), 2):
        assert {(row[a], row[b]) for row in chosen} == {(row[a], row[b]) for row in rows}
    given = items(worlds=(1, 2, 3))
    assert sum(conftest._in_samples_of_pairs(given)) == len(ROWS)
    kept = {i.callspec.params["row"] for i in given if conftest._in_samples_of_pairs([i])[0]}
    assert kept == set(ROWS), "one row of a test is its sample"


def test_two_parameters_and_whole_tests_run_all_rows(conftest):
    two = items(worlds=(3,))
    for item in two:
        item.callspec._idlist = item.callspec._idlist[:2]
    assert all(conftest._in_samples_of_pairs(two))
    assert all(conftest._in_samples_of_pairs(items(name="test_conformance")))


def test_threads_run_all_rows_in_a_small_world_and_every_value_in_each(conftest):
    assert 2 not in on_threads(conftest, items()), "MPI ranks have these"
    found = anywhere(conftest, items())
    assert found[4] == ROWS
    assert not set(found[1]) & set(found[3])
    for world_size in (1, 3, 5, 8):
        assert len(found[world_size]) == len(ROWS) // 3
        for values in zip(*ROWS, strict=True):
            assert {v for row in found[world_size] for v in row} >= set(values)


def test_threads_run_the_rows_that_the_largest_small_world_lacks(conftest):
    own = [("d", number) for number in range(6)]
    found = anywhere(conftest, items((1,), own + ROWS) + items((3,), ROWS))
    assert [row for row in found[1] if row in own] == own
    assert found[3] == ROWS


def test_threads_run_worlds_of_two_that_mpi_ranks_do_not(conftest):
    assert anywhere(conftest, items((1, 2)))[2] == ROWS
    found = on_threads(conftest, items((2, 3), marks=("in_worlds", "threads_alone")))
    assert len(found[2]) == len(ROWS) // 3


def test_few_rows_run_in_all_small_worlds(conftest):
    found = anywhere(conftest, items(rows=ROWS[:2]))
    assert {w: len(rows) for w, rows in found.items()} == {1: 2, 2: 2, 3: 2, 4: 2, 5: 1, 8: 1}


def test_threads_leave_to_mpi_ranks_all_but_one_of_the_rows_that_these_run(conftest):
    for rows in (ROWS[:1], ROWS[:2], ROWS):
        for worlds in ((2,), (1, 3), (2, 3, 4)):
            given = items(worlds, rows)
            mine = on_threads(conftest, given)
            both = [set(mine.get(w, [])) & set(under_mpi(conftest, w, given)) for w in (2, 3, 4)]
            assert sum(map(len, both)) <= 1
            assert mine.keys() & {2, 3, 4}, "threads run the test on several ranks"


@pytest.mark.parametrize("name", ["test_conformance", "test_equals_sequential_training"])
def test_whole_tests_run_all_rows_in_all_worlds(conftest, name):
    found = anywhere(conftest, items(name=name))
    for world_size in (1, 2, 3, 4):
        assert found[world_size] == ROWS
    for world_size in (2, 3, 4):
        assert under_mpi(conftest, world_size, items(name=name)) == ROWS
    sevens = on_threads(conftest, items((5, 6, 7, 8), name="test_conformance"))
    assert sevens[5] == ROWS
    assert sorted(sevens[6] + sevens[7] + sevens[8]) == sorted(ROWS)


def test_mpi_worlds_have_rows_of_their_own(conftest):
    two = under_mpi(conftest, 2, items())
    assert len(two) == len(ROWS) // 3
    three, four = (under_mpi(conftest, world_size, items()) for world_size in (3, 4))
    assert bool(three) != bool(four), "it runs in one of them"
    assert not set(two) & set(three + four)
    few = ROWS[:2]
    assert under_mpi(conftest, 2, items(rows=few)) == few
    assert not under_mpi(conftest, 2, items(rows=few, marks=("in_worlds", "threads_alone")))


def test_every_test_of_larger_worlds_runs_in_one_of_them(conftest):
    for number in range(20):
        given = items(rows=ROWS[:2], name=f"test_{number}")
        assert len(under_mpi(conftest, 3, given) + under_mpi(conftest, 4, given)) == 1
    many = [*ROWS, *(("d", number) for number in range(12))]
    assert len(under_mpi(conftest, 4, items((2, 4), many))) == 2


def test_worlds_of_three_and_four_mpi_ranks_take_turns(conftest):
    def rows(world_size, count=6):
        pairs = [(kind, node) for kind in "abc" for node in "12"][:count]
        given = items((0,), pairs, marks=("mpi",))
        selection = conftest.RowSelection(given, world_size)
        return by_world([item for item in given if selection.has_turn(item)]).get(0, [])

    assert len(rows(2)) == 6
    three, four = rows(3), rows(4)
    assert sorted(three + four) == rows(2)
    for mine in (three, four):
        assert {kind for kind, _ in mine} == set("abc")
        assert {node for _, node in mine} == set("12")
    assert sorted(rows(4, count=1) + rows(3, count=1)) == rows(2, count=1)


def test_full_runs_all_rows(conftest, monkeypatch):
    monkeypatch.setattr(conftest, "_is_full", True)
    for world_size in (2, 3, 4):
        assert under_mpi(conftest, world_size, items(marks=("in_worlds",))) == ROWS
