"""One control plane for all tests of this tier: a test makes its own namespace and its own nodes in it."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dev.cluster import ControlPlane
from dev.fake_kubelet import FakeKubelet
from dev.kube import Kube

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.control_plane)
            if not sys.platform.startswith("linux"):
                item.add_marker(pytest.mark.skip(reason="the local control plane runs on Linux"))


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """A real etcd, kube-apiserver, controller-manager and scheduler on loopback; `.kubeconfig`, `.audit_log`."""
    with ControlPlane.start() as plane:
        yield plane


@pytest.fixture
async def kube(control_plane: ControlPlane) -> AsyncIterator[Kube]:
    """A client with the administrator's rights."""
    async with Kube(control_plane.kubeconfig) as client:
        yield client


@pytest.fixture
async def namespace(kube: Kube) -> AsyncIterator[str]:
    """A namespace of this test alone."""
    name = f"test-{os.urandom(4).hex()}"
    await kube.create("/api/v1/namespaces", {"metadata": {"name": name}})
    yield name
    await kube.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture
async def fake_kubelet(control_plane: ControlPlane) -> AsyncIterator[FakeKubelet]:
    """Fake nodes, all of which are removed at the end of the test."""
    async with FakeKubelet(control_plane.kubeconfig) as kubelet:
        yield kubelet
        for name in list(kubelet.nodes):
            await kubelet.remove_node(name)


@pytest.fixture(scope="session")
def crds(control_plane: ControlPlane) -> None:
    """The custom resources, installed from `crds/` and served."""
    folder = str(HERE.parents[1] / "crds")
    control_plane.kubectl("apply", "--server-side", "-f", folder)
    # Not --for=condition=Established: that is an error as long as there are no conditions at all.
    established = '--for=jsonpath={.status.conditions[?(@.type=="Established")].status}=True'
    control_plane.kubectl("wait", established, "--timeout=30s", "-f", folder)
