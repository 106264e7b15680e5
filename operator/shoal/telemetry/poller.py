"""Polls the coordinators of running jobs in the background, so that no plan waits for one.

A job is woken at once when its report changes in a way that policies act on (phase, state of a worker), and otherwise
at the rate at which its status shows progress.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from shoal.cluster.clock import loop_time
from shoal.errors import Unavailable
from shoal.telemetry.coordinator import Coordinator, Endpoint, NoReport
from shoal_trainer.contract import StatusReport, WorkerState

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0
"""The interval where few jobs are polled, and of a job whose last report or silence may call for action."""
SLOWEST_POLL_SECONDS = 22.0
"""With the time that a read may take, less than `policy.facts.coordinator.FRESH_REPORT_SECONDS`: of a coordinator that
answers there is always a report that counts."""
POLLS_PER_SECOND = 40.0
"""Of all jobs together, beyond which the interval of quiet and of unreachable jobs grows."""
TICK_SECONDS = 0.25
"""Where there are very many, polls of different jobs begin together at multiples of this: one turn of the loop sends a
dozen requests, and another reads their answers. A poll by itself takes three times the processor time."""
STALE_SECONDS = 60.0
"""A coordinator that was not reached for this long is reported, and its last report is old."""


@dataclass(frozen=True)
class Seen:
    """A report, and when it arrived (the loop's clock)."""

    report: StatusReport
    at: float


@dataclass(frozen=True)
class Failing:
    """A coordinator that cannot be reached: since when (the loop's clock), the last error, and how often in a row."""

    since: float
    why: str
    answers: bool
    """It can be reached, and what it says is no report."""
    times: int = 1
    told: str = ""
    """With which words its job was woken last: others say what there is still to mend..."""
    told_at: float = -math.inf
    """... and when."""


@dataclass(frozen=True)
class _Shown:
    """When a job was last woken for a report, and whether there was another one since."""

    at: float = -math.inf
    news: bool = True


@dataclass
class _Followed:
    endpoint: Endpoint
    awaited: bool
    task: asyncio.Task[None]

    def suits(self, endpoint: Endpoint, *, awaited: bool) -> bool:
        """Whether it is what `follow` asks for."""
        return self.endpoint == endpoint and (self.awaited or not awaited)


class Poller:
    """Polls coordinators.

    `show_every`: seconds between wakes that only update progress, or words. `on_result`: told read or unreachable.
    `on_report`: told every report, with the job's uid.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        poll_seconds: float = POLL_SECONDS,
        show_every: float = 30.0,
        on_result: Callable[[str], None] = lambda _result: None,
        on_report: Callable[[str, StatusReport], None] = lambda _uid, _report: None,
    ) -> None:
        self._on_report = on_report
        self._on_result = on_result
        self._coordinator = coordinator
        self._poll_seconds = poll_seconds
        self._show_every = show_every
        self._followed: dict[str, _Followed] = {}
        self._seen: dict[str, Seen] = {}
        self._failing: dict[str, Failing] = {}

    def follow(self, endpoint: Endpoint, wake: Callable[[bool], None], *, awaited: bool = False) -> None:
        """Poll this endpoint until `pause` or `forget`. `wake(urgent)` is called about its reports.

        `awaited`: it serves by now, and its job has no report yet. It is polled at once, and if that fails the job is
        woken, too.
        """
        uid = endpoint.job_uid
        known = self._followed.get(uid)
        if known is not None and not known.task.done() and known.suits(endpoint, awaited=awaited):
            return
        self.pause(uid)
        task = asyncio.create_task(self._poll(endpoint, wake, awaited), name=f"telemetry of {uid}")
        self._followed[uid] = _Followed(endpoint, awaited, task)

    def pause(self, uid: str) -> None:
        """Stop polling, but keep the last report."""
        self._failing.pop(uid, None)
        if (known := self._followed.pop(uid, None)) is not None:
            known.task.cancel()

    def forget(self, uid: str) -> None:
        """Stop polling and drop the report of a job that finished or was deleted."""
        self.pause(uid)
        self._seen.pop(uid, None)
        self._coordinator.forget(uid)

    def latest(self, uid: str) -> tuple[StatusReport | None, float]:
        """The newest report and its age in seconds."""
        seen = self._seen.get(uid)
        return (None, 0.0) if seen is None else (seen.report, loop_time() - seen.at)

    def unreachable(self, uid: str) -> tuple[float, str]:
        """For how many seconds the coordinator of a running server could not be reached, and why; 0 if it can."""
        failing = self._failing.get(uid)
        return (0.0, "") if failing is None else (loop_time() - failing.since, failing.why)

    async def close(self) -> None:
        """Stop all polling."""
        tasks = [each.task for each in self._followed.values()]
        for uid in list(self._followed):
            self.forget(uid)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _poll(self, endpoint: Endpoint, wake: Callable[[bool], None], awaited: bool) -> None:
        shown = _Shown()
        # A new leader follows all jobs at once, and first reads are handshakes.
        if self._share > self._poll_seconds and not awaited:
            await asyncio.sleep(random.uniform(0.0, self._share))
        while True:
            began = loop_time()
            try:
                report = await self._coordinator.read(endpoint)
            except Unavailable as error:
                logger.debug("%s: %s", endpoint.job_uid, error)
                self._on_result("unreachable")
                self._fail(endpoint.job_uid, began, error, wake)
                if awaited:
                    wake(False)
            else:
                shown = self._heard(endpoint.job_uid, report, shown, wake)
                del report  # only the newest one is kept
            awaited = False
            due = began + self._interval(endpoint.job_uid)
            if self._share > self._poll_seconds:
                due = math.floor(due / TICK_SECONDS) * TICK_SECONDS
            await asyncio.sleep(max(0.0, due - loop_time()))

    def _heard(self, uid: str, report: StatusReport, shown: _Shown, wake: Callable[[bool], None]) -> _Shown:
        """Take a report. `shown`: what the job was woken for; returns the same."""
        self._on_result("read")
        self._failing.pop(uid, None)
        old = self._seen.get(uid)
        same = old is not None and (old.report is report or old.report == report)  # as while nothing goes on
        if not (same or shown.news):
            shown = replace(shown, news=True)
        self._seen[uid] = Seen(old.report if old is not None and same else report, loop_time())
        self._on_report(uid, report)
        urgent = old is None or not (same or _policy_relevant(old.report) == _policy_relevant(report))
        if urgent or (shown.news and loop_time() - shown.at >= self._show_every):
            shown = _Shown(loop_time(), news=False)
            wake(urgent)
        return shown

    @property
    def _share(self) -> float:
        """The interval at which all jobs together are polled POLLS_PER_SECOND times a second."""
        return min(SLOWEST_POLL_SECONDS, len(self._followed) / POLLS_PER_SECOND)

    def _interval(self, uid: str) -> float:
        """Seconds between polls of a job: more where there are very many, so that their sum stays bounded.

        A coordinator that cannot be reached is at first tried as often as where there are few: it may be restarting.
        One that answers with what is no report is asked ever more rarely: to read that takes the time of all jobs.
        """
        seen, failing = self._seen.get(uid), self._failing.get(uid)
        slowest = max(self._poll_seconds, self._share * random.uniform(0.8, 1.0))
        if failing is not None:
            slowest = SLOWEST_POLL_SECONDS if failing.answers else slowest
            return min(slowest, self._poll_seconds * 2.0 ** min(failing.times - 1, 10))
        return self._poll_seconds if seen is None or _suspicious(seen.report) else slowest

    def _fail(self, uid: str, began: float, error: Unavailable, wake: Callable[[bool], None]) -> None:
        known, why, answers = self._failing.get(uid), str(error) or repr(error), isinstance(error, NoReport)
        if known is None:
            self._failing[uid] = Failing(began, why, answers)
            return
        # When the last report becomes old, since nothing else may happen to the job; and as its words change.
        now, told, told_at = loop_time(), known.told, known.told_at
        news = now - known.since >= STALE_SECONDS and why != told and now - told_at >= self._show_every
        if news:
            told, told_at = why, now
        self._failing[uid] = Failing(known.since, why, answers, known.times + 1, told, told_at)
        if news:
            wake(False)


def _suspicious(report: StatusReport) -> bool:
    """Whether a worker may be lost: the next report decides what is done about it."""
    return any(worker.state is WorkerState.SILENT for worker in report.workers)


def _policy_relevant(report: StatusReport) -> Any:
    """The parts of a report that policies act on."""
    return report.phase, {(w.slot, w.incarnation): (w.state, w.first_push_at is None) for w in report.workers}
