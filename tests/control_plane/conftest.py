"""One control plane for all tests of this tier: a test makes its own namespace and its own nodes in it."""

from __future__ import annotations

import os
import sys
import time
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
    control_plane.kubectl("apply", "--server-side", "-f", str(HERE.parents[1] / "crds"))
    deadline = time.monotonic() + 30
    while True:  # `kubectl wait` fails where a new CRD has no conditions yet
        try:
            control_plane.get("/apis/shoal.dev/v1alpha1/trainingjobs")
            return
        except OSError:
            assert time.monotonic() < deadline, "the TrainingJobs are not served"
            time.sleep(0.1)
