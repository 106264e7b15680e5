"""The poller in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections import Counter

import pytest

from shoal.errors import Unavailable
from shoal.policy.decide.records import DONE_PATIENCE
from shoal.policy.facts.coordinator import FRESH_REPORT_SECONDS
from shoal.telemetry.coordinator import TIMEOUT_SECONDS, Endpoint, NoReport
from shoal.telemetry.poller import (
    POLLS_PER_SECOND,
    SLOWEST_POLL_SECONDS,
    STALE_SECONDS,
    TICK_SECONDS,
    Poller,
)
from shoal_trainer.contract import Phase, StatusReport, WorkerReport, WorkerState

pytestmark = pytest.mark.looptime


class Coordinator:
    def __init__(self) -> None:
        self.report: StatusReport | None = None
        self.requests: list[str] = []
        self.forgotten: list[str] = []
        self.words = "unreachable"

    async def read(self, endpoint: Endpoint) -> StatusReport:
        self.requests.append(endpoint.address)
        if self.report is None:
            raise Unavailable(self.words)
        return self.report

    def forget(self, job_uid: str) -> None:
        self.forgotten.append(job_uid)


def report(step: int, state: WorkerState = WorkerState.ACTIVE) -> StatusReport:
    workers = (WorkerReport(slot=0, incarnation=0, state=state),)
    return StatusReport(job_uid="u", phase=Phase.TRAINING, step=step, workers=workers)


def endpoint(address: str = "10.0.0.1") -> Endpoint:
    return Endpoint("u", address, "token", "certificate")


async def test_report_that_stays_the_same_wakes_once() -> None:
    """1,000 jobs in which nothing happens are not planned again and again."""
    coordinator = Coordinator()
    poller = Poller(coordinator, poll_seconds=2, show_every=30)
    wakes: list[bool] = []
    coordinator.report = report(1)
    poller.follow(endpoint(), wakes.append)
    await asyncio.sleep(600)
    assert wakes == [True]
    coordinator.report = report(2)
    await asyncio.sleep(2.01)
    assert wakes == [True, False]
    await poller.close()


@pytest.mark.parametrize("goes_on", [False, True], ids=["idle", "training"])
async def test_only_the_newest_report_is_kept(goes_on: bool) -> None:
    """One of nine workers takes 9 KiB."""
    read: list[weakref.ref[StatusReport]] = []
    steps = itertools.count()

    class Reading(Coordinator):
        async def read(self, endpoint: Endpoint) -> StatusReport:
            fresh = report(next(steps) if goes_on else 1)
            read.append(weakref.ref(fresh))
            return fresh

    poller = Poller(Reading(), poll_seconds=2, show_every=30)
    poller.follow(endpoint(), lambda _urgent: None)
    await asyncio.sleep(11)
    assert len(read) >= 5
    assert len([each for each in read if each() is not None]) == 1
    await poller.close()


async def test_state_change_wakes_at_once_and_progress_rarely() -> None:
    coordinator = Coordinator()
    poller = Poller(coordinator, poll_seconds=2, show_every=30)
    wakes: list[bool] = []
    poller.follow(endpoint(), wakes.append)
    await asyncio.sleep(10)
    assert wakes == []
    assert poller.latest("u") == (None, 0.0)
    coordinator.report = report(1)
    await asyncio.sleep(2)
    assert wakes == [True]
    for step in range(2, 32):
        coordinator.report = report(step)
        await asyncio.sleep(2)
    assert wakes == [True, False, False]
    coordinator.report = report(40, WorkerState.SILENT)
    await asyncio.sleep(2.01)
    assert wakes[-1] is True
    seen, age = poller.latest("u")
    assert seen is not None
    assert seen.step == 40
    assert age <= 2.01
    await poller.close()


async def test_coordinator_that_serves_by_now_is_asked_at_once_and_its_silence_told() -> None:
    """Until then nobody knows whether the job trains."""
    coordinator = Coordinator()
    poller = Poller(coordinator, poll_seconds=2)
    wakes: list[bool] = []
    poller.follow(endpoint(), wakes.append)  # it runs, and does not serve yet
    await asyncio.sleep(0.5)
    assert (len(coordinator.requests), wakes) == (1, [])
    poller.follow(endpoint(), wakes.append, awaited=True)
    assert poller.unreachable("u") == (0.0, ""), "it could not answer before"
    await asyncio.sleep(0.01)
    poller.follow(endpoint(), wakes.append, awaited=True)
    poller.follow(endpoint(), wakes.append)
    await asyncio.sleep(0.01)
    assert (len(coordinator.requests), wakes) == (2, [False])
    assert poller.unreachable("u")[1] == "unreachable"
    await asyncio.sleep(20)
    assert wakes == [False]
    await poller.close()


async def test_first_report_is_not_delayed_however_many_jobs_there_are() -> None:
    coordinator = Coordinator()
    coordinator.report = report(1)
    poller = Poller(coordinator)
    for number in range(1000):
        poller.follow(Endpoint(str(number), "10.0.0.1", "token", "certificate"), lambda _urgent: None)
    coordinator.requests.clear()
    poller.follow(Endpoint("new", "10.0.0.9", "token", "certificate"), lambda _urgent: None, awaited=True)
    await asyncio.sleep(0.01)
    assert "10.0.0.9" in coordinator.requests
    await poller.close()


async def test_report_ages_while_the_coordinator_is_unreachable() -> None:
    coordinator = Coordinator()
    coordinator.report = report(7)
    poller = Poller(coordinator, poll_seconds=2)
    poller.follow(endpoint(), lambda _urgent: None)
    await asyncio.sleep(1)
    coordinator.report = None
    await asyncio.sleep(99)
    seen, age = poller.latest("u")
    assert seen is not None
    assert age == pytest.approx(100, abs=0.1)
    assert coordinator.forgotten == []
    poller.forget("u")
    assert poller.latest("u") == (None, 0.0)
    assert coordinator.forgotten == ["u"]
    await poller.close()


async def test_following_again_restarts_only_for_another_address() -> None:
    coordinator = Coordinator()
    poller = Poller(coordinator, poll_seconds=2)
    for _ in range(5):
        poller.follow(endpoint(), lambda _urgent: None)
        await asyncio.sleep(0.1)
    assert coordinator.requests == ["10.0.0.1"]
    poller.follow(endpoint("10.0.0.2"), lambda _urgent: None)
    await asyncio.sleep(5)
    assert coordinator.requests == ["10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.2"]
    poller.pause("u")
    await asyncio.sleep(20)
    assert len(coordinator.requests) == 4
    await poller.close()


async def test_coordinator_that_stays_unreachable_is_told_once() -> None:
    """B14: nothing woke the job when its report became old, so its last speed stayed in the status."""
    coordinator, results = Coordinator(), Counter[str]()
    coordinator.report = report(7)
    poller = Poller(coordinator, on_result=lambda result: results.update([result]))
    wakes: list[bool] = []
    poller.follow(endpoint(), wakes.append)
    await asyncio.sleep(1)
    coordinator.report = None
    wakes.clear()
    await asyncio.sleep(STALE_SECONDS - 1)
    assert wakes == []
    await asyncio.sleep(120)
    assert wakes == [False]
    seconds, why = poller.unreachable("u")
    assert seconds == pytest.approx(STALE_SECONDS + 118, abs=1)
    assert why == "unreachable"
    assert results["unreachable"] > 50
    coordinator.report = report(8)
    await asyncio.sleep(3)
    assert poller.unreachable("u") == (0.0, "")
    await poller.close()


async def test_other_words_of_a_coordinator_that_stays_unreachable_are_told_as_rarely_as_progress() -> None:
    """The condition kept the first trouble of the storage, though that was mended and another one was left."""
    coordinator = Coordinator()
    poller = Poller(coordinator, show_every=30)
    wakes: list[float] = []
    poller.follow(endpoint(), lambda _urgent: wakes.append(asyncio.get_running_loop().time()))
    await asyncio.sleep(STALE_SECONDS + 60)
    assert len(wakes) == 1
    coordinator.words = "no such bucket"
    await asyncio.sleep(3)
    assert (len(wakes), poller.unreachable("u")[1]) == (2, "no such bucket")
    await asyncio.sleep(60)
    assert len(wakes) == 2
    for number in range(60):
        coordinator.words = f"request {number} was denied"
        await asyncio.sleep(2)
    assert len(wakes) in {6, 7}
    assert all(later - earlier >= 30 for earlier, later in itertools.pairwise(wakes))
    await poller.close()


async def test_polls_of_very_many_quiet_jobs_are_bounded_and_suspicion_is_polled_fast() -> None:
    """B15: 1,000 jobs were 500 polls a second."""
    suspicious = report(1, WorkerState.SILENT)

    class Many(Coordinator):
        async def read(self, endpoint: Endpoint) -> StatusReport:
            self.requests.append(endpoint.job_uid)
            return suspicious if endpoint.job_uid == "0" else report(1)

    coordinator = Many()
    poller = Poller(coordinator)
    for number in range(1000):
        poller.follow(Endpoint(str(number), "10.0.0.1", "token", "certificate"), lambda _urgent: None)
    await asyncio.sleep(60)
    coordinator.requests.clear()
    await asyncio.sleep(60)
    assert len(coordinator.requests) <= 60 * 80
    assert coordinator.requests.count("0") >= 28
    await poller.close()


async def test_coordinators_that_hang_hold_up_no_other_one() -> None:
    """B15: they waited for the same few places."""

    class Hanging(Coordinator):
        async def read(self, endpoint: Endpoint) -> StatusReport:
            if endpoint.job_uid == "well":
                return report(1)
            await asyncio.sleep(TIMEOUT_SECONDS)
            raise Unavailable("timed out")

    poller = Poller(Hanging())
    for uid in (*map(str, range(200)), "well"):
        poller.follow(Endpoint(uid, "10.0.0.1", "token", "certificate"), lambda _urgent: None)
    await asyncio.sleep(SLOWEST_POLL_SECONDS)
    share = 201 / POLLS_PER_SECOND
    for _ in range(60):
        assert poller.latest("well")[0] is not None
        assert poller.latest("well")[1] <= share + TICK_SECONDS
        await asyncio.sleep(1.0)
    await poller.close()


async def test_coordinator_that_answers_with_no_report_is_asked_ever_more_rarely() -> None:
    """To find out that it is none costs the event loop of all jobs as much as a report of a thousand workers."""

    class Useless(Coordinator):
        async def read(self, endpoint: Endpoint) -> StatusReport:
            self.requests.append(endpoint.address)
            raise NoReport("no report")

    for coordinator, most in ((Useless(), 10), (Coordinator(), 61)):
        poller = Poller(coordinator)
        poller.follow(endpoint(), lambda _urgent: None)
        await asyncio.sleep(120)
        assert most // 2 < len(coordinator.requests) <= most
        assert poller.unreachable("u")[0] > 100
        await poller.close()


async def test_polls_of_very_many_jobs_begin_together() -> None:
    """Each by itself took three times the processor time."""
    asked: list[float] = []

    class Many(Coordinator):
        async def read(self, endpoint: Endpoint) -> StatusReport:
            asked.append(asyncio.get_running_loop().time())
            return report(1)

    poller = Poller(Many())
    for number in range(1000):
        poller.follow(Endpoint(str(number), "10.0.0.1", "token", "certificate"), lambda _urgent: None)
    await asyncio.sleep(60)
    asked.clear()
    await asyncio.sleep(60)
    assert len(asked) > 60 * 40
    assert len(set(asked)) <= 60 / TICK_SECONDS + 1
    await poller.close()


@pytest.mark.nightly
async def test_report_of_a_coordinator_that_answers_is_evidence_however_many_jobs_there_are() -> None:
    """With 600 jobs and more it was regularly too old, and workers that were heard were replaced.

    A read may take its time-out twice, while the install key is rotated. What was reported before a worker's exit says
    nothing about it.
    """
    assert SLOWEST_POLL_SECONDS + 2 * TIMEOUT_SECONDS < FRESH_REPORT_SECONDS <= DONE_PATIENCE.total_seconds()
    coordinator = Coordinator()
    coordinator.report = report(1)
    poller = Poller(coordinator)
    for number in range(2000):
        poller.follow(Endpoint(str(number), "10.0.0.1", "token", "certificate"), lambda _urgent: None)
    await asyncio.sleep(SLOWEST_POLL_SECONDS + 1)
    for _ in range(60):
        await asyncio.sleep(1)
        assert max(poller.latest(str(number))[1] for number in range(2000)) <= SLOWEST_POLL_SECONDS
    await poller.close()


@pytest.mark.nightly
async def test_very_many_coordinators_that_cannot_be_reached_are_asked_ever_less_often() -> None:
    """A NetworkPolicy without the coordinators' port was 330 attempts a second for 1,000 jobs, for ever."""
    coordinator = Coordinator()
    poller = Poller(coordinator)
    for number in range(1000):
        poller.follow(Endpoint(str(number), "10.0.0.1", "token", "certificate"), lambda _urgent: None)
    most = 0
    for _ in range(10):
        coordinator.requests.clear()
        await asyncio.sleep(1)
        most = max(most, len(coordinator.requests))
    assert most < 300, "a new leader does not ask all at once"
    await asyncio.sleep(60)
    coordinator.requests.clear()
    await asyncio.sleep(60)
    assert len(coordinator.requests) <= 60 * 60
    await poller.close()
