"""Times of messages in a step: collectives of the data and tensor axes, and between stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from mpishard.models import DATA_POLICIES
from mpishard.planning.jobs import Job
from mpishard.planning.layouts import Known, mesh_of
from mpishard.planning.machine import Link, Machine


class Group:
    """Ranks of an axis: their hosts, and the share of a host's network that they have.

    Attributes
    ----------
    size, hosts : int
        Numbers of ranks and of hosts.
    here : int
        Ranks of the group on one host.
    sharing : int
        Groups of a host that use its network at once.
    """

    def __init__(self, nodes: Sequence[int], ranks_per_host: int) -> None:
        self.size = len(nodes)
        self.hosts = len(set(nodes))
        self.here = -(-self.size // self.hosts)
        self.sharing = max(1, ranks_per_host // self.here)


class Sending(NamedTuple):
    """A collective between hosts: its time on the network, and that of a rank's processor."""

    seconds: float = 0.0
    busy: float = 0.0


_NOTHING = Sending()


class Messages:
    """Times of the messages of a job on a machine.

    Attributes
    ----------
    data, tensor : Group
        The groups of the first rank; all others are like these.
    gradient_bytes, parameter_bytes : int
        Bytes of an element that is reduced, and of one that is gathered.
    """

    def __init__(self, job: Job, machine: Machine, itemsize: int, known: Known) -> None:
        self._job, self._machine = job, machine
        self._policy = DATA_POLICIES[job.axis_strategy]
        self.gradient_bytes = itemsize
        self.parameter_bytes = 2 if job.precision is not None else itemsize
        mesh, per_host = mesh_of(job, 0, known), job.ranks_per_host
        self.data, self.tensor = (Group(g.nodes, per_host) for g in (mesh.data, mesh.tensor))
        self._pipeline_hosts = mesh.pipeline.nodes
        self._links: dict[int, Link] = {}

    def tensor_seconds(self, passes: int, nbytes: float) -> float:
        """Return the time of a collective on the tensor axis, on arrays of ``nbytes``."""
        group = self.tensor
        if group.size == 1:
            return 0.0
        seconds = 0.0
        if group.here > 1:
            moved = passes * nbytes * (group.here - 1) / group.here
            seconds += self._machine.node.seconds(moved, passes)
        if group.hosts > 1:
            seconds += self._collective(group, nbytes, passes).seconds
        return seconds

    def reduce(self, elements: int) -> tuple[float, Sending]:
        """Return the time in which a rank adds gradients of its host, and what the host sends."""
        group = self.data
        if group.size == 1 or not elements:
            return 0.0, _NOTHING
        nbytes = elements * self.gradient_bytes
        own = 0.0
        if group.here > 1:
            moved = nbytes * (group.here + 1) / group.here
            own = self._machine.memory_seconds(moved, self._job.ranks_per_host)
            own += self._machine.node.latency
        if group.hosts == 1:
            return own, _NOTHING
        return own, self._collective(group, nbytes, 1 if self._policy.shards_state else 2)

    def gather(self, elements: int) -> Sending:
        """Return the time in which the parameters of a unit are gathered between hosts."""
        if self.data.hosts == 1 or not elements:
            return _NOTHING
        return self._collective(self.data, elements * self.parameter_bytes)

    def boundaries(self, ranks: Sequence[int], output_bytes: Sequence[float]) -> list[float]:
        """Return the times of messages from each stage to the next.

        Parameters
        ----------
        ranks : sequence of int
            The pipeline rank of each stage.
        output_bytes : sequence of float
            Bytes of the output of each stage.
        """
        hosts = self._pipeline_hosts
        seconds = []
        for number in range(len(ranks) - 1):
            is_near = hosts[ranks[number]] == hosts[ranks[number + 1]]
            link = self._machine.node if is_near else self._machine.between_hosts()
            sharing = 1 if is_near else self._job.ranks_per_host
            seconds.append(link.seconds(output_bytes[number] * sharing))
        return seconds

    def _collective(self, group: Group, nbytes: float, passes: int = 1) -> Sending:
        """Return a collective in which a host sends to each other one its part of ``nbytes``."""
        hosts = group.hosts
        link, others = self._between_hosts(group.sharing), hosts - 1
        sent = passes * nbytes * others / hosts
        seconds = link.collective_seconds(sent, others, passes)
        return Sending(seconds, link.processor_seconds * sent / group.here)

    def _between_hosts(self, sharing: int) -> Link:
        """Return the network for one of ``sharing`` groups that use it at once."""
        if sharing not in self._links:
            link = self._machine.between_hosts()
            rate = link.bytes_per_second / sharing
            self._links[sharing] = replace(link, bytes_per_second=rate)
        return self._links[sharing]
