"""The conditions of a job, and the phase that summarizes them.

Conditions about exceptional states appear when they first become True, and stay as False afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from shoal.api.base import Condition
from shoal.api.training_job_status import MOST_IMPORTANT_FIRST, Phase
from shoal.policy.common.wording import short
from shoal.policy.model import Observation, Reason

ALWAYS = ("Initialized", "ParameterServersReady", "WorkersReady", "Running")
EXCEPTIONAL = (
    "Disrupted",
    "Degraded",
    "QuotaExceeded",
    "QuotaReserved",
    "NodeSignalsUnavailable",
    "NodeSignalsSuspect",
    "PlanReady",
    "Suspended",
    "Reconciling",
    "Stalled",
    "Complete",
    "Failed",
)
NO_WORKERS = "NoWorkers"


class Conditions:
    """The conditions of one plan. A condition whose status does not change keeps its transition time."""

    def __init__(self, before: tuple[Condition, ...], generation: int, now: datetime) -> None:
        self._by_type = {condition.type: condition for condition in before}
        self._generation, self._now = generation, now

    def set(self, kind: str, holds: bool, reason: str, message: str = "") -> None:
        """Set a condition."""
        self._by_type[kind] = Condition.after(
            self._by_type.get(kind),
            kind,
            holds,
            reason,
            short(message, 2000),
            generation=self._generation,
            now=self._now,
        )

    def get(self, kind: str) -> Condition | None:
        """The condition of this type, if set."""
        return self._by_type.get(kind)

    def set_exceptional(self, kind: str, cause: Reason | None, otherwise: str) -> None:
        """Set an exceptional condition to True with its cause, or, if it ever was, to False with reason `otherwise`."""
        if cause is not None:
            self.set(kind, True, *cause)
        elif kind in self._by_type:
            self.set(kind, False, otherwise)

    def in_order(self) -> tuple[Condition, ...]:
        """All conditions, in a stable order; those that others set come last."""
        ours = (*ALWAYS, *EXCEPTIONAL)
        others = sorted(self._by_type.keys() - set(ours))
        return tuple(self._by_type[kind] for kind in (*ours, *others) if kind in self._by_type)

    def reason(self) -> str:
        """The reason of the most important condition; empty if the job is simply running."""
        for kind in MOST_IMPORTANT_FIRST:
            condition = self._by_type.get(kind)
            if condition is not None and condition.status == "True":
                return condition.reason
        running = self._by_type.get("Running")
        return running.reason if running is not None and running.reason == NO_WORKERS else ""


def api_server_refuses(seen: Observation) -> Reason | None:
    """What requests about the job have failed with for long."""
    if not seen.failing:
        return None
    return Reason("ApiServerRefuses", f"requests fail, and are tried again: {short(seen.failing, 1000)}")


@dataclass(frozen=True)
class PodCounts:
    """How many pods of each role there are, for the conditions and the phase."""

    servers_wanted: int
    servers_ready: int
    workers_asked: int
    """By the spec or the plan. Fewer are wanted where there is no place for all."""
    workers_wanted: int
    workers_ready: int
    workers_pending: int
    min_workers: int
    trains: bool | None
    """Whether a step was completed, and is not lost; None: nobody can know."""

    @property
    def all_servers_ready(self) -> bool:
        """Whether every shard is ready."""
        return self.servers_ready >= self.servers_wanted > 0

    @property
    def enough_workers(self) -> bool:
        """Whether at least minReplicas workers run."""
        return self.workers_ready >= max(1, min(self.min_workers, self.workers_wanted))

    @property
    def runs(self) -> bool:
        """Whether the job trains now, as far as can be known."""
        return self.all_servers_ready and self.workers_ready > 0 and self.trains is not False

    @property
    def settled(self) -> bool:
        """Whether all wanted pods are ready."""
        placed = self.workers_wanted > 0 or not self.workers_asked
        return placed and self.all_servers_ready and self.workers_ready >= self.workers_wanted

    @property
    def too_few(self) -> str:
        """What is said where not enough workers run."""
        return "fewer than workers.minReplicas run" if self.workers_ready else "no worker runs"


def set_pod_conditions(conditions: Conditions, counts: PodCounts) -> None:
    """Set ParameterServersReady, WorkersReady and Running.

    Messages contain no counts: each change of a condition is a write, and the counts are in the status.
    """
    ready, enough = counts.all_servers_ready, counts.enough_workers
    servers = "all parameter servers are ready" if ready else "not all parameter servers are ready"
    workers = "at least workers.minReplicas run" if enough else counts.too_few
    conditions.set("ParameterServersReady", ready, "AllReady" if ready else "NotReady", servers)
    conditions.set("WorkersReady", enough, "EnoughRunning" if enough else "TooFew", workers)
    if not counts.workers_asked:
        words = "no workers are wanted: raise workers.replicas"
        conditions.set("Running", False, NO_WORKERS, words)
    elif counts.runs:
        conditions.set("Running", True, "Training", "workers train")
    elif ready and counts.workers_ready:
        conditions.set("Running", False, "Waiting", "workers run, and have not completed a step yet")
    elif not counts.workers_wanted:
        words = "there is no place for a worker now: see the condition Degraded"
        conditions.set("Running", False, "Waiting", words)
    else:
        conditions.set("Running", False, "Waiting", f"{servers}; {workers}")


def phase(before: str, counts: PodCounts) -> Phase:
    """Pending, Starting or Running.

    A job that is Running stays so until it finishes, whatever pods it lost, unless it is heard that no step is done.
    """
    if not counts.workers_wanted:
        return "Pending"
    if (before == "Running" and counts.trains is not False) or counts.runs:
        return "Running"
    if counts.servers_ready or counts.workers_ready:
        return "Starting"
    return "Pending"
