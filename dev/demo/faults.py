"""The three faults: each is due by the progress of the job, after it has recovered from the previous one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from dev.cluster.node import GRACE_SECONDS
from dev.demo.backend import Backend
from dev.demo.watch import Picture, Watcher
from shoal_trainer.contract import Phase

PROGRESS = (10.0, 35.0, 50.0)
"""Percent of the training at which each fault is due."""


@dataclass(frozen=True)
class Fault:
    """One fault. `places` are the (slot, incarnation) of the workers on the node."""

    kind: str
    target: str
    at: datetime
    places: tuple[tuple[int, int], ...] = ()


@dataclass
class Faults:
    """Looks at each picture and triggers the faults that are due. `report` takes a line of output."""

    backend: Backend
    watcher: Watcher
    report: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    faults: list[Fault] = field(default_factory=list)
    _doomed: tuple[str, float] | None = None

    def advance(self, picture: Picture) -> None:
        """Trigger the fault that is due, if any."""
        self._end_doomed_node()
        number = len(self.faults)
        if number == len(PROGRESS) or not self._ready(picture, PROGRESS[number]):
            return
        if number == 1:
            server = picture.role("ps")[0]["metadata"]["name"]
            self.report(f"fault 2: killing the parameter server {server}")
            at = datetime.now(UTC)
            self.watcher.kubectl("delete", "pod", server, "--grace-period=0", "--force", "--wait=false")
            self.faults.append(Fault("parameter server killed", server, at))
            return
        node, places = quietest(picture, self._gone())
        if number == 0:
            self.report(f"fault 1: {node} gets the cloud's notice; it ends in {GRACE_SECONDS} s")
            at = datetime.now(UTC)
            self.backend.notice(node)
            self._doomed = (node, self.clock() + GRACE_SECONDS)
            self.faults.append(Fault("node reclaimed with notice", node, at, places))
        else:
            self.report(f"fault 3: {node} ends without notice")
            at = datetime.now(UTC)
            self.backend.kill(node)
            self.faults.append(Fault("node lost without notice", node, at, places))

    @property
    def complete(self) -> bool:
        """Whether all three have happened."""
        return len(self.faults) == len(PROGRESS)

    def _end_doomed_node(self) -> None:
        if self._doomed and self.clock() >= self._doomed[1]:
            self.report(f"{self._doomed[0]} has ended")
            self.backend.kill(self._doomed[0])
            self._doomed = None

    def _gone(self) -> set[str]:
        return {fault.target for fault in self.faults}

    def _ready(self, picture: Picture, percent: float) -> bool:
        """Due by progress, and recovered: the parameter server and every worker run."""
        report = picture.report
        if report is None or not picture.fresh or report.phase is not Phase.TRAINING:
            return False
        return (
            (report.progress_percent or 0.0) >= percent
            and len(picture.pushing) >= picture.job.spec.workers.replicas
            and len(picture.role("ps")) > 0
        )


def quietest(picture: Picture, gone: set[str]) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The spot node with the fewest workers, at least one, and their places.

    The demo loses two machines, and each should take one worker if possible.
    """
    places: dict[str, list[tuple[int, int]]] = {}
    for pod in picture.role("worker"):
        labels = pod["metadata"]["labels"]
        place = (int(labels["shoal.dev/index"]), int(labels["shoal.dev/incarnation"]))
        places.setdefault(pod["spec"]["nodeName"], []).append(place)
    candidates = sorted(places.keys() - gone, key=lambda node: (len(places[node]), node))
    return candidates[0], tuple(sorted(places[candidates[0]]))
