"""What the page remembers: a status says how a job is, a time line needs how it was. Pure; bounded; one process's life.

A new operator begins with what the status still has: when slots ended, and when the job started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from math import ceil

from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import Slot, TrainingJobStatus
from shoal.words import number

SAMPLES = 1500
"""Points of a curve. When they are used up every second one is dropped, so that the whole life of a job fits."""
SPANS = 4000
PLANS = 50
FINISHED_SAMPLES = 50
"""Of the curve of a job that has ended: it stays until the job is deleted."""
POINTS = 100_000
"""Points and spans of all jobs together, 20 to 40 MiB. Beyond, jobs that have more than their share keep half."""
METRICS = 8
"""So many have a curve: the first that a job tells. The operator reads no name of more than 128 characters."""
METRICS_OF_A_POINT = 4
"""So many values of metrics need the memory of one point more."""

Place = tuple[str, int, int]
"""(role, index, incarnation)."""


@dataclass(slots=True)
class Span:
    """One pod of a slot: when it was first and last seen, and how it ended. `known`: the start was seen."""

    place: Place
    start: datetime
    end: datetime | None = None
    state: str = "Running"
    pool: str = ""
    node: str = ""
    cause: str = ""
    known: bool = True


@dataclass(frozen=True, slots=True)
class Sample:
    """A point of the curves; None where the status had no value."""

    at: datetime
    workers: int
    samples_per_second: float | None
    loss: float | None
    metrics: tuple[float | None, ...] = ()
    """In the order of `JobMemory.metrics`; those that came later are missing. One tuple until a value changes."""


@dataclass(frozen=True)
class Decision:
    """A plan as it was decided."""

    at: datetime
    summary: str
    reason: str


@dataclass
class JobMemory:
    """One run of a job."""

    uid: str
    spans: dict[Place, Span] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    metrics: tuple[str, ...] = ()
    """Names of those that have a curve, in the order in which they came."""
    plans: deque[Decision] = field(default_factory=lambda: deque(maxlen=PLANS))
    every: int = 1
    _skipped: int = 0
    _ended: bool = False

    def see(self, job: TrainingJob, now: datetime, *, first: bool) -> None:
        """Take in the job as it is now. `first`: the process sees it for the first time, so what runs began earlier."""
        status = job.status
        seen = {_place(slot): slot for slot in status.slots}
        for place, slot in seen.items():
            self._see_slot(place, slot, status.start_time, now, first=first)
        for place, span in self.spans.items():
            if span.end is None and place not in seen:
                span.end, span.state = now, "Ended"
                span.cause = (
                    span.cause or _last(status, place) or ("Finished" if status.finished else "Replaced")
                )
        while len(self.spans) > SPANS:
            del self.spans[next(iter(self.spans))]
        plan = status.plan
        if (
            plan
            and plan.summary
            and (
                not self.plans
                or (self.plans[-1].summary, self.plans[-1].reason) != (plan.summary, plan.reason)
            )
        ):
            self.plans.append(Decision(plan.decided_at or now, plan.summary, plan.reason))
        if status.finished:
            self._end(job, now)
        elif status.phase:
            self._sample(job, now)

    @property
    def size(self) -> int:
        """Points and spans, by the memory that they need."""
        return len(self.samples) * (1 + ceil(len(self.metrics) / METRICS_OF_A_POINT)) + len(self.spans)

    def thin(self, share: int) -> None:
        """Keep about so many: every second point, and the spans of the pods that ended last."""
        while self.size > share and len(self.samples) > 1:
            self._halve_samples()
        ended = [place for place, span in self.spans.items() if span.end is not None]
        for place in ended[: max(0, self.size - share)]:
            del self.spans[place]

    def _halve_samples(self) -> None:
        self.samples, self.every = self.samples[::2], self.every * 2

    def _see_slot(
        self, place: Place, slot: Slot, began: datetime | None, now: datetime, *, first: bool
    ) -> None:
        span = self.spans.get(place)
        if span is None:
            start = slot.created_at or (began if first and began else slot.ended_at or now)
            span = self.spans[place] = Span(
                place, min(start, slot.ended_at or now), known=not first or slot.created_at is not None
            )
        span.state, span.pool, span.node = slot.state, slot.pool or span.pool, slot.node or span.node
        span.cause = slot.cause or span.cause
        if slot.state == "Ended":
            span.end = span.end or slot.ended_at or now

    def _end(self, job: TrainingJob, now: datetime) -> None:
        """Keep a rough curve, whose last point is what the job ended with: the last evaluation is told with the end."""
        if self._ended or not self.samples:
            return
        while len(self.samples) >= FINISHED_SAMPLES:
            self._halve_samples()
        self._add(job, now)
        self._ended = True

    def _sample(self, job: TrainingJob, now: datetime) -> None:
        self._skipped += 1
        if self._skipped < self.every:
            return
        self._skipped = 0
        self._add(job, now)
        if len(self.samples) >= SAMPLES:
            self._halve_samples()

    def _add(self, job: TrainingJob, now: datetime) -> None:
        training = job.status.training
        self.samples.append(
            Sample(
                now,
                job.status.workers.ready,
                number(training.samples_per_second),
                number(training.loss),
                self._metrics(training.metrics),
            )
        )

    def _metrics(self, told: Mapping[str, str]) -> tuple[float | None, ...]:
        if len(self.metrics) < METRICS:
            new = sorted(told.keys() - set(self.metrics), key=_beside_its_evaluation)
            self.metrics = (*self.metrics, *new)[:METRICS]
        values = tuple(number(told.get(name)) for name in self.metrics)
        before = self.samples[-1].metrics if self.samples else ()
        return before if values == before else values


class Memory:
    """All jobs, in bounded memory. Those that are gone are forgotten."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[str, str], JobMemory] = {}
        self._started = False

    def see(self, jobs: Iterable[TrainingJob], now: datetime) -> None:
        """Take in all jobs as they are now."""
        kept: dict[tuple[str, str], JobMemory] = {}
        for job in jobs:
            key = job.metadata.namespace, job.metadata.name
            memory = self._jobs.get(key)
            new = memory is None or memory.uid != job.metadata.uid
            if memory is None or new:
                memory = JobMemory(job.metadata.uid)
            memory.see(job, now, first=new and not self._started)
            kept[key] = memory
        self._jobs, self._started = kept, True
        if sum(memory.size for memory in kept.values()) > POINTS:
            for memory in kept.values():
                memory.thin(POINTS // len(kept))

    def of(self, namespace: str, name: str) -> JobMemory | None:
        """What is remembered of one job."""
        return self._jobs.get((namespace, name))


def _last(status: TrainingJobStatus, place: Place) -> str:
    """Why the pod ended, if its end was the last one; it may have been too quick for the slots to tell."""
    pod = "-{}-{}-{}".format(*place)
    told = (status.last_disruption, status.last_failure)
    return next((last.reason for last in told if last is not None and last.pod.endswith(pod)), "")


def _place(slot: Slot) -> Place:
    return slot.role, slot.index, slot.incarnation


def _beside_its_evaluation(name: str) -> tuple[str, str]:
    """Sorts `val_accuracy` after `accuracy`."""
    return name.removeprefix("val_"), name
