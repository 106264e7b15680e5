"""One control plane for all tests of this tier; each test has a separate namespace and nodes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dev.cluster import ControlPlane
from dev.kube import Json, Kube, tolerant
from tests.control_plane.operators import eventually
from tests.control_plane.pools import GPUS, POOLS, pool
from tests.control_plane.terminal import Terminal
from tests.doubles.fake_kubelet import FakeKubelet

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.control_plane)
            if not sys.platform.startswith("linux"):
                item.add_marker(pytest.mark.skip(reason="the local control plane runs on Linux"))


@pytest.fixture(scope="package")
def control_plane() -> Iterator[ControlPlane]:
    """A real etcd, kube-apiserver, controller-manager and scheduler on loopback; `.kubeconfig`, `.audit_log`."""
    with ControlPlane.start() as plane:
        yield plane


@pytest.fixture
async def kube(control_plane: ControlPlane) -> AsyncIterator[Kube]:
    """A client with the administrator's rights."""
    async with Kube(control_plane.kubeconfig) as client:
        yield client


@contextlib.asynccontextmanager
async def fresh_namespace(kube: Kube) -> AsyncIterator[str]:
    """A namespace in which pods can be created at once, and whose pods are deleted at the end.

    The default service account exists a moment after the namespace. A remaining pod could be bound to a node of the
    next test, since nodes have the same names, or use its capacity.
    """
    name = f"test-{os.urandom(4).hex()}"
    path = f"/api/v1/namespaces/{name}"
    await kube.create("/api/v1/namespaces", {"metadata": {"name": name}})

    async def account() -> Json:
        return await kube.get(f"{path}/serviceaccounts/default")

    await eventually(account, what="the namespace's service account")
    yield name
    with tolerant(404, 409):  # the test deleted it
        await kube.delete(path)  # no more objects can be created in it
        await kube.delete(f"{path}/pods", grace_seconds=0)


@pytest.fixture
async def namespace(kube: Kube) -> AsyncIterator[str]:
    """A namespace for one test."""
    async with fresh_namespace(kube) as name:
        yield name


@pytest.fixture
async def second_namespace(kube: Kube) -> AsyncIterator[str]:
    """A second namespace for one test."""
    async with fresh_namespace(kube) as name:
        yield name


@pytest.fixture
def terminal(control_plane: ControlPlane, crds: None, namespace: str, tmp_path: Path) -> Terminal:
    """For commands of the pages."""
    return Terminal(control_plane, namespace, tmp_path)


@pytest.fixture
async def fake_kubelet(control_plane: ControlPlane) -> AsyncIterator[FakeKubelet]:
    """Fake nodes, removed at the end of the test."""
    async with FakeKubelet(control_plane.kubeconfig) as kubelet:
        yield kubelet
        for name in list(kubelet.nodes):
            await kubelet.remove_node(name)


@pytest.fixture(scope="package")
def crds(control_plane: ControlPlane) -> None:
    """The custom resource definitions from `crds/`, installed and served."""
    control_plane.kubectl("apply", "--server-side", "-f", str(HERE.parents[1] / "crds"))
    await_served(control_plane, "/apis/shoal.dev/v1alpha1/trainingjobs")


def await_served(control_plane: ControlPlane, path: str) -> None:
    """Wait until the objects of a new CRD are served, of which this is the path."""
    deadline = time.monotonic() + 60
    while True:  # `kubectl wait` fails where a new CRD has no conditions yet
        try:
            control_plane.get(path)
            control_plane.kubectl("get", path.rpartition("/")[2])  # discovery follows a moment later
            return
        except (OSError, subprocess.CalledProcessError):
            assert time.monotonic() < deadline, f"{path} is not served"
            time.sleep(0.1)


@pytest.fixture
async def pools(kube: Kube, crds: None, fake_kubelet: FakeKubelet, namespace: str) -> AsyncIterator[None]:
    """`spot-NAMESPACE` with four nodes and `od-NAMESPACE` with three, and a node for parameter servers."""
    await fake_kubelet.add_node("safe-1")
    for number in range(4):
        label = {"example.com/pool": f"spot-{namespace}"}
        await fake_kubelet.add_node(f"spot-{number}", spot=True, labels=label, capacity=GPUS)
    for number in range(3):
        label = {"example.com/pool": f"od-{namespace}"}
        await fake_kubelet.add_node(f"od-{number}", labels=label, capacity=GPUS)
    for each in (pool("spot", namespace, 0.3, True, 4), pool("od", namespace, 1.0, False, 3)):
        await kube.create(POOLS, each)
    yield
    for name in ("spot", "od"):
        await kube.delete(f"{POOLS}/{name}-{namespace}")
