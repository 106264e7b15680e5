"""One cluster with real nodes for all tests of this tier. What is slow, images and tools, is in the user's cache."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dev.cluster.local import DEFAULT_NODES, LocalCluster
from dev.images import DEMO, IMAGES, build
from dev.kube import Kube
from dev.tools import ensure

HERE = Path(__file__).parent
MINUTES = 60


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    possible = sys.platform.startswith("linux") and os.geteuid() == 0
    skip = pytest.mark.skip(reason="real nodes need root on Linux: run `sudo make test`")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.nodes)
            if item.get_closest_marker("timeout") is None:
                # The first test waits for the cluster; on a machine without a cache also for images and tools.
                item.add_marker(pytest.mark.timeout(40 * MINUTES))
            if not possible:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """A control plane, one on-demand node, three spot nodes; all images of the demo. A test may take nodes away."""
    build(DEMO, ensure())
    local = LocalCluster("test")
    local.down()  # what a run that was killed left behind
    try:
        local.up(DEFAULT_NODES, [IMAGES[name].reference for name in DEMO])
        yield local
    finally:
        local.down()


@pytest.fixture
async def node_kube(cluster: LocalCluster) -> AsyncIterator[Kube]:
    """A client with the administrator's rights."""
    async with Kube(cluster.plane.kubeconfig) as client:
        yield client


@pytest.fixture
async def node_namespace(node_kube: Kube) -> AsyncIterator[str]:
    """A namespace of this test alone, with its default service account."""
    name = f"test-{os.urandom(4).hex()}"
    await node_kube.create("/api/v1/namespaces", {"metadata": {"name": name}})
    yield name
    await node_kube.delete(f"/api/v1/namespaces/{name}")
