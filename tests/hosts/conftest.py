"""Several hosts on one machine: see namespaces.py. Marker ``hosts``; needs root and namespaces."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from namespaces import Hosts, why_none


@pytest.fixture(scope="session")
def two_hosts():
    """Two hosts for all tests of this process; removed when it ends, or by the next run.

    Each has a docker0 with one and the same address, as a machine with Docker.
    """
    reason = why_none()
    if reason:
        pytest.skip(reason)
    with Hosts(2, DECOY="1") as hosts:
        yield hosts


@pytest.fixture
def hosts(two_hosts):
    """Two hosts without any process or file of an earlier test."""
    yield two_hosts
    two_hosts.mend()
