"""Crashes and network faults of the operator: nothing is created twice, and each loss is counted once."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from dev.audit import creates, writes
from dev.cluster import ControlPlane
from dev.kube import Kube
from shoal.cluster.transport import JSON, Answer, Query, Transport
from tests.control_plane.operators import (
    COLLECTED_SECONDS,
    QUICK_LEASE,
    Job,
    OperatorProcess,
    eventually,
    running_operator,
)
from tests.doubles.fake_kubelet import FakeKubelet
from tests.meanwhile import losing_the_lease


@pytest.fixture
async def nodes(fake_kubelet: FakeKubelet) -> FakeKubelet:
    await fake_kubelet.add_node("safe-1")
    for number in range(3):
        await fake_kubelet.add_node(f"spot-{number}", spot=True)
    return fake_kubelet


def active(pods: dict[str, Any]) -> list[tuple[str, str]]:
    """(role, index) of the pods that have not ended and are not terminating."""
    return sorted(
        (labels["shoal.dev/role"], labels["shoal.dev/index"])
        for pod in pods.values()
        if not pod["metadata"].get("deletionTimestamp")
        and pod["status"].get("phase") in {"Pending", "Running"}
        and (labels := pod["metadata"]["labels"])
    )


@pytest.mark.nightly
async def test_operator_killed_at_random_points_counts_each_loss_once(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet, tmp_path: Path
) -> None:
    workers, lost = 6, 0
    dice = random.Random(namespace)
    job = Job(kube, namespace)
    async with OperatorProcess(control_plane.kubeconfig, namespace, tmp_path) as process:
        await job.apply(workers={"replicas": workers, "maxSurge": 2}, runPolicy={"backoffLimit": 100})
        await job.runs(workers)
        for _ in range(5):
            victims = dice.sample(range(workers), 2)
            names = [n for n in await job.pods() if any(n.startswith(f"digits-worker-{v}-") for v in victims)]
            assert len(names) == 2
            # One is deleted while the operator may still run, the other while it does not.
            before = len(list(writes(control_plane.audit_log, namespace=namespace)))
            await kube.delete(f"/api/v1/namespaces/{namespace}/pods/{names[0]}", grace_seconds=0)
            within = dice.randint(0, 4)
            await written(control_plane, namespace, before + within)
            await process.kill()
            await kube.delete(f"/api/v1/namespaces/{namespace}/pods/{names[1]}", grace_seconds=0)
            lost += 2
            await process.start()
            await counted(job, workers, lost)
        pods = await job.pods()
        assert active(pods) == [("ps", "0"), *(("worker", str(i)) for i in range(workers))]
        status = await job.status()
        assert status["restarts"]["failures"] == 0
        assert status["parameterServers"]["restarts"] == 0
        made_names = [w.name for w in creates(control_plane.audit_log, "pods", namespace=namespace)]
        assert len(made_names) == len(set(made_names)) == 1 + workers + lost


async def test_manifest_as_long_as_one_can_be_ends_neither_the_operator_nor_its_work(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet, tmp_path: Path
) -> None:
    """etcd keeps 1.3 MB of `<`, each of which is six bytes of a watch: a stranger's pod ended the operator, always."""
    job, pods = Job(kube, namespace), f"/api/v1/namespaces/{namespace}/pods"
    long = {"name": "main", "image": "none", "env": [{"name": "LONG", "value": "<" * 1_300_000}]}
    strangers = {
        "metadata": {"name": "long", "labels": {"shoal.dev/job": "of-a-stranger"}},
        "spec": {"nodeSelector": {"example.com/pool": "none"}, "containers": [long]},
    }
    manifest = io.BytesIO(
        json.dumps(strangers).encode()
    )  # kubectl sends `<` as six bytes, too, which is refused

    async def loses_a_worker(restarts: int) -> None:
        [name] = [name for name in await job.pods() if name.startswith("digits-worker-0-")]
        await kube.delete(f"{pods}/{name}", grace_seconds=0)
        await counted(job, 2, restarts)

    async with OperatorProcess(control_plane.kubeconfig, namespace, tmp_path) as process:
        await job.apply()
        await job.runs()
        async with kube.session.post(pods, data=manifest, headers={"Content-Type": JSON}) as answer:
            assert answer.status == 201, await answer.text()
        await kube.patch(f"{pods}/long", {"metadata": {"labels": {"again": "yes"}}})
        await loses_a_worker(1)
        assert await process.stop() == 0  # it has not ended by itself
        await process.start()  # and lists the pod
        await loses_a_worker(2)
        assert await process.stop() == 0


async def written(plane: ControlPlane, namespace: str, count: int) -> None:
    """Wait until there are this many writes, or no more arrive."""

    async def enough() -> bool:
        return len(list(writes(plane.audit_log, namespace=namespace))) >= count

    with contextlib.suppress(AssertionError):
        await eventually(enough, seconds=1)


async def counted(job: Job, workers: int, lost: int) -> None:
    async def reached() -> bool:
        status = await job.status()
        return status["workers"]["ready"] == workers and status["restarts"]["disruptions"] >= lost

    try:
        await eventually(reached)
    except AssertionError as error:
        raise AssertionError(f"{error}: {await job.status()}") from None
    assert (await job.status())["restarts"]["disruptions"] == lost


class Cutter:
    """A transport whose watches can be silenced and then ended with 410 Gone."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._silent = False
        self._cut = asyncio.Event()
        self.lists = 0

    def silence(self) -> None:
        """Drop all further events."""
        self._silent = True

    def cut(self) -> None:
        """End every watch with 410."""
        self._cut.set()

    async def request(self, method: str, path: str, **options: Any) -> Answer:
        if "limit" in (options.get("query") or {}):
            self.lists += 1
        return await self._inner.request(method, path, **options)

    def stream(self, path: str, query: Query) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        return self._stream(path, query)

    @contextlib.asynccontextmanager
    async def _stream(self, path: str, query: Query) -> AsyncIterator[AsyncIterator[bytes]]:
        async with self._inner.stream(path, query) as lines:
            yield self._lines(lines)

    async def _lines(self, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        if self._cut.is_set():
            async for line in lines:
                yield line
            return
        cut = asyncio.ensure_future(self._cut.wait())
        try:
            while True:
                coming = asyncio.ensure_future(anext(lines))
                await asyncio.wait({cut, coming}, return_when=asyncio.FIRST_COMPLETED)
                if cut.done():
                    coming.cancel()
                    await asyncio.gather(coming, return_exceptions=True)
                    gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                    yield json.dumps({"type": "ERROR", "object": gone}, separators=(",", ":")).encode()
                    return
                try:
                    event = coming.result()
                except StopAsyncIteration:
                    return
                if not self._silent:
                    yield event
        finally:
            cut.cancel()


async def test_objects_deleted_during_a_cut_watch_are_dropped(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    job, other = Job(kube, namespace), Job(kube, namespace, "other")
    cutters: list[Cutter] = []

    def through(inner: Transport) -> Transport:
        cutters.append(Cutter(inner))
        return cutters[0]

    async with running_operator(control_plane.kubeconfig, namespace, through=through) as operator:
        await job.apply()
        await other.apply(workers={"replicas": 1})
        await job.runs()
        await other.runs(1)
        cutters[0].silence()
        await kube.delete(f"/api/v1/namespaces/{namespace}/pods/digits-worker-0-0", grace_seconds=0)
        await kube.delete(other.path)

        async def other_gone() -> bool:
            return not await other.pods()

        await eventually(other_gone, COLLECTED_SECONDS)
        assert operator.state.jobs.get("other", namespace) is not None
        cutters[0].cut()
        await job.pod_runs("digits-worker-0-1")
        await counted(job, 2, 1)

        async def caches_match() -> bool:  # each kind of object is relisted separately
            known = {p.metadata.name for p in operator.state.pods.all()}
            return operator.state.jobs.get("other", namespace) is None and known == set(await job.pods())

        await eventually(caches_match)
        assert not await other.pods()


async def test_standby_takes_over_from_a_disconnected_leader(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, nodes: FakeKubelet
) -> None:
    job = Job(kube, namespace)
    first = Disconnectable()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(losing_the_lease())
        one = await stack.enter_async_context(
            running_operator(
                control_plane.kubeconfig,
                namespace,
                identity="one",
                through=first.before,
                lease_times=QUICK_LEASE,
            )
        )
        await job.apply()
        await job.runs()
        two = await stack.enter_async_context(
            running_operator(control_plane.kubeconfig, namespace, identity="two", lease_times=QUICK_LEASE)
        )
        assert one.lease.held
        assert not two.lease.held
        first.off = True  # it no longer reaches the API server

        async def taken_over() -> bool:
            assert not (one.lease.held and two.lease.held)
            return two.lease.held

        await eventually(taken_over)
        first.off = False
        before = first.writes
        await kube.delete(f"/api/v1/namespaces/{namespace}/pods/digits-worker-0-0", grace_seconds=0)
        await job.slot_runs_again(0)
        await counted(job, 2, 1)
        assert first.writes == before
        lease = await kube.get(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/shoal")
        assert lease["spec"]["holderIdentity"] == "two"
        assert lease["spec"]["leaseTransitions"] == 1


class Disconnectable:
    """A transport that can be disconnected and counts its writes."""

    def __init__(self) -> None:
        self.off = False
        self.writes = 0
        self._inner: Transport | None = None

    def before(self, inner: Transport) -> Transport:
        self._inner = inner
        return self

    async def request(self, method: str, path: str, **options: Any) -> Answer:
        assert self._inner is not None
        if self.off:
            await asyncio.Event().wait()
        self.writes += method != "GET"
        return await self._inner.request(method, path, **options)

    def stream(self, path: str, query: Query) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        assert self._inner is not None
        return self._inner.stream(path, query)


async def test_lost_lease_ends_the_process_with_1(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, tmp_path: Path
) -> None:
    async with OperatorProcess(control_plane.kubeconfig, namespace, tmp_path) as process:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/shoal"

        async def leads() -> bool:
            return (await kube.get(path))["spec"]["holderIdentity"] == "operator-0"

        await eventually(leads)
        await kube.patch(path, {"spec": {"holderIdentity": "another", "leaseDurationSeconds": 60}})
        assert await asyncio.wait_for(process.wait(), 20) == 1


async def test_invalid_environment_ends_the_process_with_2(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with OperatorProcess(
        control_plane.kubeconfig, namespace, tmp_path, {"SHOAL_INSTALL_KEY_FILE": "/no/such/key"}
    ) as process:
        assert await asyncio.wait_for(process.wait(), 30) == 2
        assert "SHOAL_INSTALL_KEY_FILE=/no/such/key cannot be read" in process.log.read_text()
