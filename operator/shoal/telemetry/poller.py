"""Polls the coordinators of running jobs in the background, so that no plan waits for one.

A job is woken at once when its report changes in a way that policies act on (phase, state of a worker), and otherwise
at the rate at which its status shows progress.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.errors import Unavailable
from shoal.telemetry.coordinator import Coordinator, Endpoint
from shoal_trainer.contract import StatusReport

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0


@dataclass(frozen=True)
class Seen:
    """A report, and when it arrived (the loop's clock)."""

    report: StatusReport
    at: float


@dataclass
class _Followed:
    endpoint: Endpoint
    task: asyncio.Task[None]


class Poller:
    """Polls coordinators. `show_every`: seconds between wakes that only update progress."""

    def __init__(
        self, coordinator: Coordinator, *, poll_seconds: float = POLL_SECONDS, show_every: float = 30.0
    ) -> None:
        self._coordinator = coordinator
        self._poll_seconds = poll_seconds
        self._show_every = show_every
        self._followed: dict[str, _Followed] = {}
        self._seen: dict[str, Seen] = {}

    def follow(self, endpoint: Endpoint, wake: Callable[[bool], None]) -> None:
        """Poll this endpoint until `pause` or `forget`. `wake(urgent)` is called about its reports."""
        uid = endpoint.job_uid
        known = self._followed.get(uid)
        if known is not None and known.endpoint == endpoint and not known.task.done():
            return
        self.pause(uid)
        task = asyncio.create_task(self._poll(endpoint, wake), name=f"telemetry of {uid}")
        self._followed[uid] = _Followed(endpoint, task)

    def pause(self, uid: str) -> None:
        """Stop polling, but keep the last report."""
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
        return (None, 0.0) if seen is None else (seen.report, self._now() - seen.at)

    async def close(self) -> None:
        """Stop all polling."""
        tasks = [each.task for each in self._followed.values()]
        for uid in list(self._followed):
            self.forget(uid)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _poll(self, endpoint: Endpoint, wake: Callable[[bool], None]) -> None:
        shown: float | None = None
        while True:
            began = self._now()
            try:
                report = await self._coordinator.read(endpoint)
            except Unavailable as error:
                logger.debug("%s: %s", endpoint.job_uid, error)
            else:
                old = self._seen.get(endpoint.job_uid)
                self._seen[endpoint.job_uid] = Seen(report, self._now())
                urgent = old is None or _policy_relevant(old.report) != _policy_relevant(report)
                if urgent or shown is None or self._now() - shown >= self._show_every:
                    shown = self._now()
                    wake(urgent)
            await asyncio.sleep(max(0.0, began + self._poll_seconds - self._now()))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _policy_relevant(report: StatusReport) -> Any:
    """The parts of a report that policies act on."""
    return report.phase, {(w.slot, w.incarnation): (w.state, w.first_push_at is None) for w in report.workers}
