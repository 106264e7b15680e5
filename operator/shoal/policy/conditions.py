"""The conditions of a job, and the one word that sums them up.

Each is a metav1.Condition; none is remembered for its position. Those that tell of something out of the ordinary
appear when it first happens and stay, False, when it is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from shoal.api.training_job_status import JobCondition
from shoal.policy.times import whole
from shoal.policy.wording import short

ALWAYS = ("Initialized", "ParameterServersReady", "WorkersReady", "Running")
WHEN_IT_HAPPENS = (
    "Disrupted",
    "Degraded",
    "QuotaExceeded",
    "NodeSignalsUnavailable",
    "Suspended",
    "Reconciling",
    "Stalled",
    "Complete",
    "Failed",
)

Phase = Literal["", "Pending", "Starting", "Running", "Suspended", "Succeeded", "Failed"]


class Conditions:
    """The conditions of one plan: begun from the status, with the times of what does not change kept."""

    def __init__(self, before: tuple[JobCondition, ...], generation: int, now: datetime) -> None:
        self._found = {condition.type: condition for condition in before}
        self._generation, self._now = generation, whole(now)

    def set(self, kind: str, holds: bool, reason: str, message: str = "") -> None:
        """Say that a condition holds, or not."""
        before = self._found.get(kind)
        status: Literal["True", "False"] = "True" if holds else "False"
        self._found[kind] = JobCondition(
            type=kind,
            status=status,
            observed_generation=self._generation,
            last_transition_time=before.last_transition_time
            if before and before.status == status
            else self._now,
            reason=reason,
            message=short(message, 2000),
        )

    def happened(self, kind: str, what: tuple[str, str] | None, over: str) -> None:
        """Something out of the ordinary: (reason, message), or None when it is not (any more)."""
        if what is not None:
            self.set(kind, True, *what)
        elif kind in self._found:
            self.set(kind, False, over)

    def get(self, kind: str) -> JobCondition | None:
        """The condition as it now stands."""
        return self._found.get(kind)

    def done(self) -> tuple[JobCondition, ...]:
        """All of them, in an order that does not jump about."""
        return tuple(self._found[kind] for kind in (*ALWAYS, *WHEN_IT_HAPPENS) if kind in self._found)

    def reason(self) -> str:
        """Why the job is not simply running: the reason of the condition that matters most."""
        for kind in ("Failed", "Complete", "Stalled", "QuotaExceeded", "Degraded", "Suspended", "Disrupted"):
            found = self._found.get(kind)
            if found is not None and found.status == "True":
                return found.reason
        return ""


@dataclass(frozen=True)
class Census:
    """How many there are of each role, for the conditions and the phase."""

    servers_wanted: int
    servers_ready: int
    workers_wanted: int
    workers_ready: int
    workers_pending: int
    least_workers: int

    @property
    def servers_complete(self) -> bool:
        """Every shard is ready."""
        return self.servers_ready >= self.servers_wanted > 0

    @property
    def enough_workers(self) -> bool:
        """As many workers run as the job asks for at least."""
        return self.workers_ready >= max(1, min(self.least_workers, self.workers_wanted))


def of_pods(conditions: Conditions, census: Census) -> None:
    """ParameterServersReady, WorkersReady, Running."""
    servers = f"{census.servers_ready} of {census.servers_wanted} ready"
    conditions.set(
        "ParameterServersReady",
        census.servers_complete,
        "AllReady" if census.servers_complete else "NotReady",
        servers,
    )
    workers = f"{census.workers_ready} of {census.workers_wanted} running, {census.workers_pending} starting"
    conditions.set(
        "WorkersReady", census.enough_workers, "EnoughRunning" if census.enough_workers else "TooFew", workers
    )
    runs = census.servers_complete and census.workers_ready > 0
    words = f"parameter servers: {servers}; workers: {workers}"
    conditions.set("Running", runs, "Training" if runs else "Waiting", words)


def phase(before: str, census: Census) -> Phase:
    """Pending, Starting or Running. A job that ran is Running until it ends, whatever it has just lost."""
    if before == "Running" or (census.servers_complete and census.workers_ready > 0):
        return "Running"
    if census.servers_ready or census.workers_ready:
        return "Starting"
    return "Pending"
