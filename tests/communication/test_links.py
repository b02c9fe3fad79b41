"""Connections between nodes: a process that is gone, and ranks that leave or have reported."""

import os
import signal
import socket
import threading
import time

import pytest

from mpishard.communication.failure import links as node_links
from mpishard.communication.failure.links import LEFT, REPORTED, NodeLinks


@pytest.fixture
def offered():
    """Return rank 0's links and its offer."""
    links = NodeLinks()
    names, port, word = links.offer()
    yield links, (["localhost", *names], port, word)
    links.end(LEFT)


def first_dead(links, seconds=5.0):
    end = time.monotonic() + seconds
    while (dead := links.dead_rank()) is None and time.monotonic() < end:
        time.sleep(0.01)
    return dead


@pytest.mark.parametrize("last", [LEFT, REPORTED, None])
def test_a_rank_that_is_gone_without_a_word_is_dead(monkeypatch, offered, last):
    zero, offer = offered
    four = NodeLinks()
    assert four.connect(4, offer)
    assert (zero.dead_rank(), four.dead_rank()) == (None, None)
    four._close() if last is None else four.end(last)
    dead = first_dead(zero, 5.0 if last is None else 0.1)
    assert dead == (4 if last is None else None)
    if last == REPORTED:  # and the launcher has ended nobody
        monkeypatch.setattr(node_links, "_REPORTED_SECONDS", 0.0)
        assert zero.dead_rank() == 4


def test_a_rank_that_closes_its_links_while_another_thread_asks_sees_no_dead_rank():
    links, enders = NodeLinks(), []

    class Link:
        is_closed = False

        def recv(self, _count):
            ender = threading.Thread(target=links.end, args=[LEFT])
            enders.append(ender)
            ender.start()
            ender.join(0.2)
            raise OSError("closed") if self.is_closed else BlockingIOError

        def send(self, _last):
            pass

        def close(self):
            self.is_closed = True

    links._peers[4] = link = Link()
    assert links.dead_rank() is None
    enders[0].join(5)
    assert link.is_closed
    assert links.dead_rank() is None


def test_rank_zero_is_seen_as_well(offered):
    zero, offer = offered
    four, eight = NodeLinks(), NodeLinks()
    assert four.connect(4, offer)
    assert eight.connect(8, offer)
    assert zero.dead_rank() is None
    zero._close()
    assert (first_dead(four), first_dead(eight)) == (0, 0)


def test_a_killed_process_is_seen_though_a_process_that_it_forked_goes_on(offered):
    zero, offer = offered
    ready, say = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            zero._close()
            NodeLinks().connect(2, offer)
            grandchild = os.fork()
            if grandchild:
                os.write(say, b"%d\n" % grandchild)
            time.sleep(60)
        finally:
            os._exit(1)
    grandchild = int(os.read(ready, 20))
    assert zero.dead_rank() is None
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    dead = first_dead(zero)
    os.kill(grandchild, signal.SIGKILL)
    os.close(ready)
    os.close(say)
    assert dead == 2


def test_strangers_are_no_ranks_and_a_rank_that_nobody_answers_goes_on(offered):
    zero, (_, port, _) = offered
    stranger = socket.create_connection(("localhost", port), timeout=5)
    stranger.sendall(bytes(20))
    assert first_dead(zero, 0.2) is None
    assert zero._peers == {}
    assert not NodeLinks().connect(4, (["localhost"], 1, "00"))
    stranger.close()
