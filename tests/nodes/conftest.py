"""One cluster with real nodes for all tests of this tier. What is slow, images and tools, is in the user's cache."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dev.cluster.local import DEFAULT_NODES, LocalCluster
from dev.commands import command
from dev.demo.local import Local
from dev.demo.tell import install
from dev.images import DEMO, IMAGES, build
from dev.kube import Kube, tolerant
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


@pytest.fixture(scope="package")
def one_cluster() -> Iterator[LocalCluster]:
    """A control plane, one on-demand node, three spot nodes; all images of the demo."""
    build(DEMO, ensure())
    local = LocalCluster("test")
    local.down()  # what a run that was killed left behind
    try:
        local.up(DEFAULT_NODES, [IMAGES[name].reference for name in DEMO])
        yield local
    finally:
        local.down()


@pytest.fixture
def cluster(one_cluster: LocalCluster) -> LocalCluster:
    """The cluster with its four nodes and no others, whatever the test before has taken, and however it ended.

    To Kubernetes a machine that died is Ready for 40 s more: the scheduler would place pods there.
    """
    wanted = dict(DEFAULT_NODES)
    kept = {
        node.spec.name for node in one_cluster.nodes() if node.alive and is_ready(one_cluster, node.spec.name)
    }
    kept &= wanted.keys()
    for node in one_cluster.nodes():
        if node.spec.name not in kept:
            node.kill()
    for name in one_cluster.plane.kubectl("get", "nodes", "-o", "name").split():
        if name.removeprefix("node/") not in kept:
            one_cluster.plane.kubectl("delete", name, "--ignore-not-found")
    one_cluster.add_nodes([(name, spot) for name, spot in DEFAULT_NODES if name not in kept])
    return one_cluster


def is_ready(cluster: LocalCluster, name: str) -> bool:
    """Not being told to go, for example: such a node will take no pod."""
    said = 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'
    return cluster.plane.kubectl("get", "node", name, "--ignore-not-found", "-o", said) == "True"


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
    async with asyncio.timeout(60):
        while True:
            with tolerant(404):
                await node_kube.get(f"/api/v1/namespaces/{name}/serviceaccounts/default")
                break
            await asyncio.sleep(0.05)
    yield name
    await node_kube.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture
def backend(cluster: LocalCluster) -> Iterator[Local]:
    """The operator, installed with Helm."""
    local = Local(cluster.name)
    install(local)
    command("helm", "test", "shoal", "--namespace", "shoal-system", "--timeout", "2m", env=local.env)
    yield local
    command("helm", "uninstall", "shoal", "--namespace", "shoal-system", env=local.env)


@pytest.fixture
def namespace(cluster: LocalCluster) -> Iterator[str]:
    """A namespace of this try alone."""
    name = f"training-{os.urandom(4).hex()}"
    cluster.plane.kubectl("create", "namespace", name)
    yield name
    cluster.plane.kubectl("delete", "namespace", name, "--wait=false")
