"""The values of --hosts, and hostfiles."""

import re

import pytest

from mpishard.cli.run.hostfile import expanded_hosts
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


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("node1:4\nnode2:4\n", "node1:4,node2:4"),  # MPICH, Intel MPI
        ("# the cluster\nnode1 slots=4 max_slots=8  # fast\n\nnode2 slots=2\n", "node1:4,node2:2"),
        ("worker-1 slots=2\nworker-2 slots=2", "worker-1:2,worker-2:2"),  # DeepSpeed
        ("pi-worker-0.pi.default.svc slots=1\n", "pi-worker-0.pi.default.svc:1"),  # Kubeflow
        ("pi-worker-0.pi.default.svc:1\n", "pi-worker-0.pi.default.svc:1"),  # for MPICH
        ("a\nb\n", "a,b"),
        ("a\na\nb\nb\nb\n", "a:2,b:3"),  # PBS
        ("a\nb:2\na slots=3\n", "a:4,b:2"),
    ],
)
def test_hostfiles(tmp_path, lines, expected):
    (tmp_path / "file").write_text(lines)
    assert expanded_hosts(f"@{tmp_path}/file") == expected
    assert expanded_hosts("a,b:2") == "a,b:2"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("a\nb slots=two\n", "file, line 2: a machine has 1 slot or more, got slots=two"),
        ("a:0\n", "file, line 1: a machine has 1 slot or more, got slots=0"),
        ("a:\n", "file, line 1: a machine has 1 slot or more, got slots="),
        ("a:2 slots=2\n", "file, line 1: 'slots=2' is not known here"),
        ("a gpus=2\n", "file, line 1: 'gpus=2' is not known here; a line is NAME, NAME:SLOTS or"),
        ("a 4\n", "file, line 1: '4' is not known here"),
        ("a slots=4 max-slots=2\n", "file, line 1: max_slots is below slots=4"),
        ("\n-oProxyCommand=x slots=1\n", "file, line 2: '-oProxyCommand=x' is no name or address"),
        ("a,b\n", "file, line 1: 'a,b' is no name"),
        ("# none\n", "the file names no machine"),
        (b"\xff\xfe", "cannot be read: it is no text"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_refuses_lines_of_hostfiles(tmp_path, lines, message):
    if lines is not None:
        (tmp_path / "file").write_bytes(lines if isinstance(lines, bytes) else lines.encode())
    with pytest.raises(ValueError, match=re.escape(message)):
        expanded_hosts(f"@{tmp_path}/file")
