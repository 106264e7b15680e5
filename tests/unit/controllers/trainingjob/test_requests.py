"""What is in flight while an API server is slow: nothing waits for an answer that it does not need."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from shoal.api.training_job import TrainingJob
from shoal.cluster.transport import Answer
from shoal.controllers.trainingjob.report import (
    FIRST_POD_SECONDS,
    FIRST_SECONDS,
    REPLACED_SECONDS,
    SETTLE_SECONDS,
)
from shoal.controllers.trainingjob.requests import (
    FEW,
    LONGEST_PAUSE,
    MAX_IN_FLIGHT,
    ORDINARY_IN_FLIGHT,
    SERVICES_IN_FLIGHT,
    Request,
    Requests,
)
from shoal.errors import Unavailable
from shoal.policy.actions import CreatePod, CreateService, DeletePod
from shoal.runtime.controller import Key
from shoal.runtime.tasks import Tasks
from shoal.runtime.work_queue import Priority, WorkQueue
from tests.meanwhile import during
from tests.unit.controllers.clusters import JOB_PATH, KEY, Rig
from tests.unit.policy import build

pytestmark = pytest.mark.looptime

PODS = "/api/v1/namespaces/ns/pods"


class Slow:
    """A cluster whose answers take their time, and the operator's queue before it."""

    def __init__(self, workers: int, *, post: float = 0.3, put: float = 0.8) -> None:
        self.rig = rig = Rig(settle_seconds=SETTLE_SECONDS)
        self.seconds = {"POST": post, "PUT": put, "DELETE": post}
        self.sent: list[tuple[float, str, str]] = []
        """When, the verb, and what was written."""
        self.queue: WorkQueue[Any] = WorkQueue()
        self.open, self.most = 0, 0
        self._request = rig.cluster.request
        rig.cluster.request = self._slowly  # type: ignore[method-assign]
        rig.state.nodes.put(build.node("spot-0"))
        rig.apply(workers={"replicas": workers, "maxReplicas": 1000, "maxSurge": "100%"})

    async def _slowly(self, method: str, path: str, **options: Any) -> Answer:
        made = options.get("body") or {}
        body = made() if callable(made) else made
        name = body.get("metadata", {}).get("name", "") if method == "POST" else path
        if "/events" in path:
            return await self._request(method, path, **options)
        self.sent.append((now(), method, name))
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await asyncio.sleep(self.seconds.get(method, 0.0))
            return await self._request(method, path, **options)
        finally:
            self.open -= 1

    def working(self) -> AbstractAsyncContextManager[None]:
        """The operator works."""
        rig = self.rig
        rig.on_wake = self.queue.add
        self.queue.add(KEY)
        return during(self.queue.work(rig.once), rig.tasks.run())

    async def runs(self) -> None:
        """All pods are made, bound and run."""
        await asyncio.sleep(5)
        for pod in self.rig.pods():
            self.rig.cluster.change(f"{PODS}/{pod}", spec={"nodeName": "spot-0"})
        self.rig.run_pods()
        await asyncio.sleep(5)

    def lose(self, name: str) -> float:
        """A pod is gone, as its watch says; when that was."""
        pod = self.rig.cluster.objects.pop(f"{PODS}/{name}")
        self.rig.cluster.version += 1
        self.rig.state.pods.drop(pod["metadata"]["uid"], self.rig.cluster.version)
        return now()

    def edit(self, **spec: Any) -> None:
        """The user changes the job."""
        before = self.rig.cluster.objects[JOB_PATH]
        meta = {**before["metadata"], "generation": before["metadata"]["generation"] + 1}
        self.rig.cluster.change(JOB_PATH, metadata=meta, spec={**before["spec"], **spec})
        self.rig.state.jobs.put(self.rig.job)

    def at(self, name: str) -> float:
        """When the request to create this was sent."""
        return next(when for when, verb, made in self.sent if (verb, made) == ("POST", name))

    def count(self, verb: str, words: str) -> int:
        return sum(each == verb and words in name for _, each, name in self.sent)


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_losses_one_after_the_other_do_not_wait_for_answers_about_the_first() -> None:
    slow = Slow(8)
    async with slow.working():
        await slow.runs()
        lost = {}
        for index in range(4):
            lost[index] = slow.lose(f"digits-worker-{index}-0")
            await asyncio.sleep(0.05)
        await asyncio.sleep(5)
    assert max(slow.at(f"digits-worker-{index}-1") - at for index, at in lost.items()) < 0.01
    assert slow.rig.job.status.restarts.disruptions == 4


@pytest.mark.parametrize("workers", [60, pytest.param(150, marks=pytest.mark.nightly)])
async def test_wave_of_losses_is_replaced_as_fast_as_it_comes(workers: int) -> None:
    """Of an API server that is as busy with the wave itself: 0.3 s for an answer, and 100 losses a second."""
    slow = Slow(workers)
    async with slow.working():
        await asyncio.sleep(5)
        await slow.runs()
        last = 0.0
        for index in range(workers):
            last = slow.lose(f"digits-worker-{index}-0")
            await asyncio.sleep(0.01)
        await asyncio.sleep(10)
    late = max(slow.at(f"digits-worker-{index}-1") for index in range(workers)) - last
    assert late < 0.5


async def test_job_that_ramps_sees_its_own_losses_at_once() -> None:
    """Those of its server as soon as the epoch is recorded."""
    slow = Slow(8)
    async with slow.working():
        await slow.runs()
        slow.edit(workers={"replicas": 1000, "maxReplicas": 1000, "maxSurge": "100%"})
        await asyncio.sleep(1.5)
        lost = slow.lose("digits-worker-0-0")
        await asyncio.sleep(1.5)
        server = slow.lose("digits-ps-0-0")
        await asyncio.sleep(3)
        assert slow.rig.pods() > {"digits-worker-0-1", "digits-ps-0-1"}
        assert len(slow.rig.pods()) < 300, "it still ramps"
    assert slow.at("digits-worker-0-1") - lost < 0.01
    recorded = min(when for when, verb, _ in slow.sent if verb == "PUT" and when >= server)
    assert (
        recorded + slow.seconds["PUT"] <= slow.at("digits-ps-0-1") <= server + 2 * slow.seconds["PUT"] + 0.1
    )


@pytest.mark.parametrize(
    "change", [{"suspend": True}, {"workers": {"replicas": 8}}], ids=["suspend", "shrink"]
)
async def test_job_that_is_given_up_amid_a_ramp_makes_no_more_pods(change: dict[str, Any]) -> None:
    slow = Slow(1000)
    async with slow.working():
        await asyncio.sleep(3)
        slow.edit(**change)
        made = slow.count("POST", "-worker-")
        assert 20 < made < 200
        await asyncio.sleep(5)
    assert slow.count("POST", "-worker-") <= made + ORDINARY_IN_FLIGHT


async def test_ramp_asks_once_for_each_pod() -> None:
    slow = Slow(100)
    async with slow.working():
        for _ in range(100):
            slow.queue.add(KEY)
            await asyncio.sleep(0.1)
    made = Counter(name for _, verb, name in slow.sent if verb == "POST")
    assert len(made) > 100
    assert set(made.values()) == {1}


@pytest.mark.parametrize(("pods", "at_once"), [(FEW, FEW), (FEW + 1, ORDINARY_IN_FLIGHT)])
async def test_a_few_pods_are_asked_for_at_once_and_many_some_at_a_time(pods: int, at_once: int) -> None:
    sent: list[str] = []

    async def carry_out(_job: TrainingJob, request: Request) -> bool:
        sent.append(request.name)
        await asyncio.sleep(1.0)
        return True

    requests = Requests(carry_out, Tasks(), lambda _key, _priority: None)
    requests.want(
        build.job(),
        [CreatePod(f"digits-worker-{index}-0", dict, "worker", index, 0) for index in range(pods)],
    )
    await asyncio.sleep(0.5)
    assert len(sent) == at_once
    await asyncio.sleep(5)
    assert len(sent) == pods


async def test_requests_of_a_job_are_bounded() -> None:
    slow = Slow(300, post=0.1, put=0.1)
    async with slow.working():
        await asyncio.sleep(3)
        assert slow.most <= ORDINARY_IN_FLIGHT + 2, "the status and the disruption budget beside the pods"
        await asyncio.sleep(5)
        await slow.runs()
        for index in range(100):
            slow.lose(f"digits-worker-{index}-0")
        await asyncio.sleep(0.05)
        assert slow.open == MAX_IN_FLIGHT
        await asyncio.sleep(5)
    assert slow.most <= MAX_IN_FLIGHT + 1
    assert sum(name.endswith("-1") for name in slow.rig.pods()) == 100


async def test_status_of_a_ramp_is_written_while_it_goes_on() -> None:
    slow = Slow(1000)
    async with slow.working():
        await asyncio.sleep(5)
        pending = slow.rig.job.status.workers.pending
    assert 30 < pending < 200
    assert 2 <= slow.count("PUT", "trainingjobs") <= 5


async def test_first_error_stops_what_is_like_it_and_is_tried_again_one_at_a_time() -> None:
    """A webhook that fails takes its time-out for each request."""
    slow = Slow(1000, post=0.1, put=0.1)

    def failing(method: str, path: str) -> Exception | None:
        pods = method == "POST" and path == PODS
        return Unavailable("500: failed calling webhook: context deadline exceeded") if pods else None

    slow.rig.cluster.fault = failing
    async with slow.working():
        await asyncio.sleep(2)
        early = slow.count("POST", "-worker-") + slow.count("POST", "-ps-0-")
        assert early <= MAX_IN_FLIGHT + 6
        assert slow.rig.job.status.phase == "Pending", "the status is written meanwhile"
        await asyncio.sleep(60)
        assert slow.count("POST", "-worker-") + slow.count("POST", "-ps-0-") - early <= 14
        slow.rig.cluster.fault = lambda _method, _path: None
        await asyncio.sleep(LONGEST_PAUSE * 1.2 + 0.1 * 1001 / ORDINARY_IN_FLIGHT + 5)
    assert len(slow.rig.pods()) == 1001


async def test_full_quota_is_met_by_a_handful_of_requests() -> None:
    slow = Slow(1000, post=0.1, put=0.1)
    words = b'{"message": "pods is forbidden: exceeded quota: few", "reason": "Forbidden"}'
    slow.rig.cluster.fault = lambda method, path: (
        Answer(403, words) if (method, path) == ("POST", PODS) else None
    )
    async with slow.working():
        await asyncio.sleep(4)
        assert slow.count("POST", "-worker-") <= ORDINARY_IN_FLIGHT
        condition = slow.rig.job.status.condition("QuotaExceeded")
        assert condition is not None
        assert condition.status == "True"


async def test_loss_is_recorded_with_its_replacement_unless_that_takes_long() -> None:
    for post, writes in ((REPLACED_SECONDS / 2, 1), (REPLACED_SECONDS * 2, 2)):
        slow = Slow(4, post=post, put=0.01)
        async with slow.working():
            await slow.runs()
            before = slow.count("PUT", "trainingjobs")
            slow.lose("digits-worker-1-0")
            await asyncio.sleep(4 * REPLACED_SECONDS)
            assert slow.count("PUT", "trainingjobs") - before == writes


async def test_removals_follow_the_write_of_their_reason() -> None:
    slow = Slow(4)
    async with slow.working():
        await slow.runs()
        slow.edit(workers={"replicas": 2})
        began = now()
        await asyncio.sleep(5)
    written = min(when for when, verb, _ in slow.sent if verb == "PUT" and when >= began)
    deleted = [when for when, verb, _ in slow.sent if verb == "DELETE"]
    assert len(deleted) == 2
    assert min(deleted) >= written + slow.seconds["PUT"]


@pytest.mark.parametrize(
    "begun", [False, True], ids=["before their reasons are stored", "while the first are held"]
)
async def test_removals_that_a_plan_asks_for_no_more_are_not_sent(begun: bool) -> None:
    """A suspended job is resumed: its pods stay, as far as they were not deleted yet."""
    sent: list[str] = []

    async def carry_out(_job: TrainingJob, request: Request) -> bool:
        sent.append(request.name)
        await asyncio.sleep(1.0)
        return True

    requests, job = Requests(carry_out, Tasks(), lambda _key, _priority: None), build.job()
    deletes = [DeletePod(f"digits-worker-{i}-0", f"uid-{i}") for i in range(3 * ORDINARY_IN_FLIGHT)]
    requests.want(job, deletes)
    if begun:
        requests.allow(job, deletes)
        await asyncio.sleep(0.5)
    requests.want(job, [])
    if not begun:
        requests.allow(job, deletes)
    await asyncio.sleep(10)
    assert sent == [each.name for each in deletes[:ORDINARY_IN_FLIGHT] if begun]


async def test_deleted_job_has_no_requests_left() -> None:
    slow = Slow(100)
    async with slow.working():
        await asyncio.sleep(2)
        assert slow.open
        slow.rig.cluster.objects.clear()
        slow.rig.state.jobs.drop(slow.rig.state.jobs.get("digits", "ns").metadata.uid)  # type: ignore[union-attr]
        await asyncio.sleep(0.01)
        assert not slow.open
        sent = len(slow.sent)
        await asyncio.sleep(10)
        assert len(slow.sent) == sent


async def test_process_that_ends_has_awaited_all_its_tasks() -> None:
    slow = Slow(100)
    async with slow.working():
        await asyncio.sleep(2)
        assert slow.open
    assert not slow.open
    assert {task for task in asyncio.all_tasks() if task is not asyncio.current_task()} == set()


async def test_unexpected_error_of_a_request_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow(4)
    slow.rig.cluster.fault = lambda method, path: (
        ZeroDivisionError("a bug") if method == "POST" and "budgets" in path else None
    )
    async with slow.working():
        await slow.runs()
        assert len(slow.rig.pods()) == 5
    assert "a bug" in caplog.text
    assert "Traceback" in caplog.text


async def test_pod_in_flight_is_not_asked_for_again() -> None:
    slow = Slow(2, post=2.0, put=0.01)
    async with slow.working():
        await asyncio.sleep(3)
        for _ in range(5):
            slow.queue.add(KEY)
            await asyncio.sleep(0.1)
        await asyncio.sleep(3)
    assert slow.count("POST", "digits-worker-0-0") == 1
    assert slow.count("POST", "digits-ps-0-0") == 1


async def test_services_of_many_jobs_are_made_a_few_at_a_time_and_pods_wait_only_for_their_own() -> None:
    """All at once, while 100 jobs began, they took 5 s each and a third of them timed out (504)."""
    open_now = most = 0
    sent: dict[str, float] = {}

    async def carry_out(_job: TrainingJob, request: Request) -> bool:
        nonlocal open_now, most
        sent[request.name] = now()
        if isinstance(request, CreateService):
            open_now += 1
            most = max(most, open_now)
            await asyncio.sleep(1.0)
            open_now -= 1
        return True

    def pod(name: str) -> CreatePod:
        return CreatePod(f"{name}-ps-0-0", dict, "ps", 0, 0)

    def named(name: str) -> TrainingJob:
        metadata = {**build.job_manifest()["metadata"], "name": name, "uid": name}
        return TrainingJob.model_validate({**build.job_manifest(), "metadata": metadata})

    def plan_again(key: Key, _priority: Priority) -> None:
        if f"{key[1]}-ps-0-0" not in sent:
            requests.want(named(key[1]), [pod(key[1])])

    requests, began = Requests(carry_out, Tasks(), plan_again), now()
    names = [f"job-{number}" for number in range(40)]
    for name in names:
        requests.want(named(name), [CreateService(f"{name}-ps-0", {}), pod(name)])
        await asyncio.sleep(0)
    await asyncio.sleep(60)
    assert most == SERVICES_IN_FLIGHT
    services = [sent[f"{name}-ps-0"] - began for name in names]
    assert services == [pytest.approx(number // SERVICES_IN_FLIGHT) for number in range(40)]
    pods = [sent[f"{name}-ps-0-0"] - began for name in names]
    assert pods == [pytest.approx(1.0)] * SERVICES_IN_FLIGHT + [0.0] * (40 - SERVICES_IN_FLIGHT)


async def test_job_whose_pods_are_being_made_is_not_planned_for_the_answer_about_its_service() -> None:
    """They waited for it no more than for those of other jobs; the last answer has it planned."""
    wakes: list[tuple[str, float]] = []

    async def carry_out(_job: TrainingJob, request: Request) -> bool:
        await asyncio.sleep(1.0 if isinstance(request, CreateService) else 5.0)
        return True

    def named(name: str) -> TrainingJob:
        metadata = {**build.job_manifest()["metadata"], "name": name, "uid": name}
        return TrainingJob.model_validate({**build.job_manifest(), "metadata": metadata})

    requests = Requests(carry_out, Tasks(), lambda key, _priority: wakes.append((key[1], now())))
    for number in range(SERVICES_IN_FLIGHT):
        requests.want(named(f"other-{number}"), [CreateService(f"other-{number}-ps-0", {})])
    await asyncio.sleep(0)
    pods = [CreatePod(f"late-worker-{index}-0", dict, "worker", index, 0) for index in range(2)]
    began = now()
    requests.want(named("late"), [CreateService("late-ps-0", {}), *pods])
    await asyncio.sleep(10)
    assert [when - began for name, when in wakes if name == "late"] == [pytest.approx(5.0)]


async def test_services_that_take_long_in_one_namespace_wait_for_each_other_and_those_of_another_do_not() -> (
    None
):
    """A webhook that times out in a namespace of 60 jobs: a job of another had its Service after 141 s."""
    sent: list[tuple[float, str]] = []

    async def carry_out(job: TrainingJob, _request: Request) -> bool:
        sent.append((now(), job.metadata.namespace))
        if job.metadata.namespace == "fine":
            return True
        await asyncio.sleep(10.0)
        raise Unavailable("500: failed calling webhook: context deadline exceeded")

    def of(space: str, number: int) -> TrainingJob:
        metadata = {**build.job_manifest()["metadata"], "namespace": space, "uid": f"{space}-{number}"}
        return TrainingJob.model_validate({**build.job_manifest(), "metadata": metadata})

    requests = Requests(carry_out, Tasks(), lambda _key, _priority: None)
    for number in range(60):
        requests.want(of("slow", number), [CreateService("digits-ps-0", {})])
    await asyncio.sleep(35.0)
    assert len(sent) == 4 * SERVICES_IN_FLIGHT
    requests.want(of("fine", 0), [CreateService("digits-ps-0", {})])
    asked = now()
    await asyncio.sleep(0.0)
    assert sent[-1] == (asked, "fine")


@pytest.mark.parametrize(
    ("workers", "post", "at", "times"),
    [(6, 0.5, 1.0, 1), (6, 4.0, 8.0, 1), (6, 30.0, FIRST_POD_SECONDS, 1), (64, 0.45, FIRST_SECONDS, 4)],
)
async def test_first_status_tells_of_all_pods_unless_they_take_long(
    workers: int, post: float, at: float, times: int
) -> None:
    """The Secret is asked for before the pods. Six are asked for at once; of 64, four at a time."""
    slow = Slow(workers, post=post)
    began = now()
    async with slow.working():
        await asyncio.sleep(20)
    written = [when - began for when, verb, _ in slow.sent if verb == "PUT"]
    assert written[0] == pytest.approx(at, abs=0.1)
    assert len(written) == times


async def test_a_job_that_begins_is_planned_when_its_pods_may_be_made_and_when_they_are() -> None:
    """While hundreds begin, plans are a third of what the operator does, and one for each answer was two too many."""
    slow = Slow(4)
    seconds = {"secrets": 0.1, "poddisruptionbudgets": 0.2, "services": 0.3}
    answer, once = slow.rig.cluster.request, slow.rig.once
    planned = list[float]()

    async def each_in_its_time(method: str, path: str, **options: Any) -> Answer:
        await asyncio.sleep(seconds.get(path.rpartition("/")[2], 0.0))
        return await answer(method, path, **options)

    async def counted(key: Key = KEY) -> float | None:
        planned.append(round(now(), 1))
        return await once(key)

    slow.rig.cluster.request = each_in_its_time  # type: ignore[method-assign]
    slow.rig.once = counted  # type: ignore[method-assign]
    async with slow.working():
        await asyncio.sleep(5)
    assert slow.count("POST", "digits-worker") == 4
    began = slow.at("digits-worker-0-0")
    assert planned == [0.0, round(began, 1), round(began + 0.3, 1), round(began + 0.3 + 0.8, 1)]


@pytest.mark.parametrize("protected", [1, 3])
async def test_pods_that_may_not_be_deleted_keep_no_others(protected: int) -> None:
    """A policy that refuses one DELETE, or a few: all others of the job go, and the job says which does not."""
    slow = Slow(24, post=0.05, put=0.05)
    kept = {f"digits-worker-{index}-0" for index in range(protected)}
    leaving = [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]
    denied = Answer(403, b'{"kind":"Status","message":"admission webhook \\"protect\\" denied the request"}')
    async with slow.working():
        await slow.runs()
        slow.rig.cluster.fault = lambda method, path: (
            denied if method == "DELETE" and path.rpartition("/")[2] in kept else None
        )
        for name in kept:  # they are to be deleted first, and nothing else
            pod = slow.rig.cluster.objects[f"{PODS}/{name}"]
            slow.rig.cluster.change(f"{PODS}/{name}", status={**pod["status"], "conditions": leaving})
        slow.rig.see()
        await asyncio.sleep(5)
        await slow.runs()
        await asyncio.sleep(60)
        slow.edit(suspend=True)
        await asyncio.sleep(240)
    assert {each for each in slow.rig.pods() if "-worker-" in each} == kept
    degraded = slow.rig.job.status.condition("Degraded")
    assert degraded is not None
    assert degraded.reason == "ApiServerRefuses"
    assert "digits-worker-" in degraded.message


async def test_pod_that_cannot_be_made_keeps_no_others() -> None:
    slow = Slow(6, post=0.05, put=0.05)
    async with slow.working():
        await slow.runs()
        request = slow.rig.cluster.request

        async def refuses(method: str, path: str, **options: Any) -> Answer:
            body = options.get("body") or {}
            made = body() if callable(body) else body
            if method == "POST" and path == PODS and "worker-0-" in made["metadata"]["name"]:
                return Answer(500, b'{"kind":"Status","message":"failed calling webhook"}')
            return await request(method, path, **options)

        slow.rig.cluster.request = refuses  # type: ignore[method-assign]
        slow.lose("digits-worker-0-0")
        await asyncio.sleep(60)
        for index in range(1, 6):
            slow.lose(f"digits-worker-{index}-0")
        await asyncio.sleep(2 * LONGEST_PAUSE)
        assert {each for each in slow.rig.pods() if each.endswith("-1")} == {
            f"digits-worker-{index}-1" for index in range(1, 6)
        }
