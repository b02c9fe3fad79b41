"""The values of --hosts."""

import re

import pytest

from mpishard.cli.run.launcher import Host, parse_hosts


@pytest.mark.parametrize(
    ("text", "ranks", "slots"),
    [
        ("", 4, {}),
        ("a", 4, {"a": 4}),
        ("a,b", 4, {"a": 2, "b": 2}),
        ("a, b", 5, {"a": 3, "b": 3}),
        ("a:1,b", 4, {"a": 1, "b": 3}),
        ("a,b:2,c", 6, {"a": 2, "b": 2, "c": 2}),
        ("a:4,b:8", 6, {"a": 4, "b": 8}),
    ],
)
def test_ranks_are_distributed_over_hosts(text, ranks, slots):
    assert parse_hosts(text, ranks) == [Host(name, n) for name, n in slots.items()]


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("a,,b", 4, "has an empty name: 'a,,b'"),
        ("a,b", 1, "names 2 machines for 1 ranks"),
        ("a:0", 1, "takes NAME or NAME:SLOTS, with 1 slot or more; got a:0"),
        ("a:two", 2, "got a:two"),
        ("a:", 2, "got a:"),
        ("a:1,b:2", 4, "has 3 slots for 4 ranks"),
        ("a:4,b", 4, "leaves no rank of 4 for b: the others take 4"),
    ],
)
def test_refuses(text, ranks, message):
    with pytest.raises(ValueError, match=message):
        parse_hosts(text, ranks)


@pytest.mark.parametrize(
    "name", ["../x", "a..b", "-oProxyCommand=x", f"{'a' * 64}.b", "a b", "é", ".a", "a." * 150]
)
def test_refuses_invalid_names_of_machines(name):
    with pytest.raises(ValueError, match=f"got {re.escape(repr(name))}"):
        parse_hosts(f"good,{name}", 2)


@pytest.mark.parametrize("name", ["node-1", "10.0.0.7", "n_1.cluster.org.", "a" * 63])
def test_takes_names_and_addresses(name):
    assert parse_hosts(f"{name}:2", 2) == [Host(name, 2)]
