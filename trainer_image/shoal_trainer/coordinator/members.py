"""The workers of a job: when each last contacted the coordinator, and the statistics of its pushes.

A worker without contact for 5 s, or for 3 of its steps up to a minute, is Silent, but keeps its leases: it may read for
long, but sends heartbeats meanwhile. It is fenced when its successor joins, when idle workers need its leases or its
last push, or after `LOST_SECONDS` or twice as long; then its pushes are refused and its leases released. One that is
heard and trains nothing may be `stuck`.

If no worker has contacted the coordinator for longer than `SILENCE_SECONDS`, the coordinator itself was unreachable or
stopped, and that time does not count as silence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from shoal_trainer.contract import WorkerReport, WorkerState
from shoal_trainer.coordinator.protocol import Assignment, Join, WithWaste
from shoal_trainer.ps.contents import Worker
from shoal_trainer.wire.messages import Timings

SILENCE_SECONDS = 5.0
SILENCE_STEPS = 3
"""A worker silent for longer than max(SILENCE_SECONDS, SILENCE_STEPS of its own steps) is reported silent, as steps and
reading may take the processor from its heartbeats; and so is one that is silent for `LOST_SECONDS`."""
LOST_SECONDS = 60.0
INPUT_SECONDS = 10.0
"""A worker that accumulates a gradient pushes what it has when a batch comes later than so (`loop.LATE_SECONDS`)."""
KEPT = 512
"""Members to keep of those that left; beyond that, those that left longest ago are removed."""
WEIGHT = 0.1
UNKNOWN_PACE = 0.25
"""Of a worker that has not pushed, to the mean."""
IDLE_TOLD_SECONDS = 30.0
PUSHES_SECONDS = 2.0
"""A worker that has not pushed for so long, and for 3 of its steps, has nothing to do or is stuck."""


@dataclass
class Member:
    """One incarnation of one slot."""

    slot: int
    incarnation: int
    node: str = ""
    batch_size: int = 0
    device: str = ""
    device_name: str = ""
    devices: int = 1
    cores: float = 0.0
    state: WorkerState = WorkerState.ACTIVE
    last_seen: float = 0.0
    first_push_at: float | None = None
    steps: int = 0
    samples: int = 0
    staleness: float | None = None
    timings: Timings | None = None
    push_seconds: float | None = None
    """Between pushes."""
    last_push: float = -math.inf
    beside_then: float = 0.0
    """Seconds in tasks and without work until its last push, as far as it had said."""
    message: str = ""
    beside: tuple[float, float] | None = None
    """Seconds in tasks, and without work, as it said last."""
    outage_seconds: float = 0.0
    """For how long it has not reached all servers, as it said last."""
    reading_seconds: float = 0.0
    """For how long it has read nothing of its lease, as it said last."""
    stuck_seconds: float = 0.0
    """For how long it has trained nothing of its lease; see `stuck`."""
    idle_since: float = math.inf
    """When it was first told that there is no work for it, since it had some."""
    wasted_steps: int = 0
    """In total, as reported to this coordinator process."""
    word_number: int = 0
    """Of its newest request to join, or word about files that come later."""
    request_number: int = 0
    assignment: Assignment | None = None
    """The answer to that request for work."""
    epochs_told: int = 0
    """The epochs whose logs it has, as it said with that request."""

    @property
    def present(self) -> bool:
        """Whether it has neither left nor been fenced."""
        return self.state in {WorkerState.ACTIVE, WorkerState.SILENT}

    @property
    def left(self) -> bool:
        """Whether it has left by itself."""
        return self.state in {WorkerState.DRAINED, WorkerState.LEFT}

    @property
    def silence_limit(self) -> float:
        """Seconds without contact after which it is Silent."""
        step = self.timings.step if self.timings else 0.0
        return max(SILENCE_SECONDS, min(LOST_SECONDS, SILENCE_STEPS * step))

    @property
    def push_limit(self) -> float:
        """Seconds within which it pushes, if it trains. Before its first push it may compile its step.

        Without long waits for data, in which it pushes what it has; in shorter ones it may accumulate.
        """
        if self.push_seconds is None or self.timings is None:
            return LOST_SECONDS
        late = max(0.0, self.timings.input - INPUT_SECONDS) / self.timings.step
        return max(SILENCE_SECONDS, SILENCE_STEPS * (1 - late) * self.push_seconds)

    @property
    def worker(self) -> Worker:
        """(slot, incarnation)."""
        return self.slot, self.incarnation

    @property
    def configuration(self) -> tuple[str, int, float, int]:
        """Its device, devices, cores and batch size."""
        return self.device, self.devices, self.cores, self.batch_size

    @property
    def rate(self) -> float:
        """Samples a second while it trains; 0 before its first push."""
        return self.batch_size / self.timings.step if self.timings and self.timings.step > 0 else 0.0

    def joins(self, request: Join) -> None:
        """It joins, perhaps again: what it has said of itself."""
        self.word_number, self.batch_size, self.node = request.number, request.batch_size, request.node
        self.device, self.device_name = request.device, request.device_name
        self.devices, self.cores = request.devices, request.cores
        if self.left:
            self.state = WorkerState.ACTIVE

    def passed_beside(self, tasks: float, waits: float) -> tuple[float, float]:
        """Seconds in tasks and without work since it last said how many there were.

        None in what it says first: it may have spent hours under the process before this one, which counted them.
        """
        if self.beside is None:
            self.beside_then = tasks + waits
        before = self.beside or (tasks, waits)
        self.beside = max(tasks, before[0]), max(waits, before[1])
        return self.beside[0] - before[0], self.beside[1] - before[1]

    def trained_until(self, now: float) -> None:
        """It has pushed, or has a task and will push again."""
        self.last_push, self.beside_then = now, sum(self.beside or ())

    def pushes(self, now: float) -> bool:
        """Whether it has pushed recently, by its own pace."""
        return now - self.last_push <= max(PUSHES_SECONDS, SILENCE_STEPS * (self.push_seconds or 0.0))

    def stalls(self, now: float) -> bool:
        """Whether it is late with a push, and at work as far as is known: heard, with work, in reach of the servers.

        Not for longer than a worker may be silent.
        """
        return (
            self.state is WorkerState.ACTIVE
            and not self.outage_seconds
            and self.idle_since == math.inf
            and not self.pushes(now)
            and now - self.last_push <= max(LOST_SECONDS, 2 * self.push_limit)
        )

    def newly_wasted(self, request: WithWaste) -> int:
        """The wasted steps that no earlier request counted; one whose answer was lost is repeated."""
        counted = max(self.wasted_steps, request.wasted_acknowledged)
        self.wasted_steps = max(counted, request.wasted_steps)
        return self.wasted_steps - counted

    def pushed(self, steps: int, samples: int, staleness: int, timings: Timings) -> None:
        """Record the statistics of a push; times are smoothed."""
        self.steps += steps
        self.samples += samples
        self.staleness = staleness if self.staleness is None else _mix(self.staleness, staleness)
        if not timings.step:  # the local steps of an outage are not timed
            return
        old = self.timings
        self.timings = timings if old is None else Timings(*map(_mix, old, timings))
        seconds = steps * timings.step
        self.push_seconds = seconds if self.push_seconds is None else _mix(self.push_seconds, seconds)

    def report(self, now: float) -> WorkerReport:
        """Its entry in the status report."""
        t = self.timings
        beside = sum(self.beside or ())
        trained = now - self.last_push - (beside - self.beside_then) if self.last_push > -math.inf else 0.0
        return WorkerReport(
            slot=self.slot,
            incarnation=self.incarnation,
            state=self.state,
            steps=self.steps,
            samples=self.samples,
            last_seen_seconds=round(now - self.last_seen, 3),
            last_push_seconds=round(max(0.0, trained), 3),
            first_push_at=self.first_push_at,
            step_seconds=t.step if t else None,
            compute_seconds=t.compute if t else None,
            pull_seconds=t.pull if t else None,
            push_seconds=t.push if t else None,
            input_seconds=t.input if t else None,
            wait_seconds=t.wait if t else None,
            staleness=self.staleness,
            batch_size=self.batch_size,
            device=self.device,
            device_name=self.device_name,
            devices=self.devices,
            cores=self.cores,
            node=self.node,
            beside_seconds=round(beside, 3),
            message=self.message,
        )


@dataclass
class Members:
    """All members, by (slot, incarnation)."""

    known: dict[Worker, Member] = field(default_factory=dict)
    last_contact: float = -math.inf
    """Of any worker."""
    live: int = 0
    """The active members, as of the last `measure`, and those that are new since then."""
    rate: float = 0.0
    """Samples a second of a member while it trains, the mean as of the last `measure`; 0 before the first push."""
    _newest: dict[int, int] = field(default_factory=dict)
    _silent: list[Member] = field(default_factory=list)
    """The result of the last `notice_silence`; some may have made contact since."""

    def newest(self, slot: int) -> int:
        """The highest known incarnation of a slot; -1 if there is none."""
        return self._newest.get(slot, -1)

    def restore_newest(self, incarnations: Iterable[Worker]) -> None:
        """Register (slot, incarnation) pairs from before a restart, so that older incarnations stay fenced."""
        for slot, incarnation in incarnations:
            self._newest[slot] = max(incarnation, self.newest(slot))

    def get(self, worker: Worker) -> Member:
        """The member; created if it is new."""
        if worker not in self.known:
            slot, incarnation = worker
            self.known[worker] = Member(slot, incarnation)
            self.live += 1
            self._newest[slot] = max(incarnation, self.newest(slot))
            left = [m for m in self.known.values() if not m.present]
            for member in sorted(left, key=lambda m: m.last_seen)[: max(0, len(left) - KEPT)]:
                del self.known[member.worker]
                if member.state is WorkerState.FENCED:  # should it call again, it is no new worker
                    self.restore_newest([(member.slot, member.incarnation + 1)])
        return self.known[worker]

    def older(self, worker: Worker) -> list[Member]:
        """The earlier incarnations of its slot that have not left."""
        slot, incarnation = worker
        return [m for m in self.present() if m.slot == slot and m.incarnation < incarnation]

    def left(self, workers: Iterable[Worker]) -> frozenset[Worker]:
        """Those of these workers that have left by themselves."""
        return frozenset(each for each in workers if each in self.known and self.known[each].left)

    def active(self) -> list[Member]:
        """The active members."""
        return [member for member in self.known.values() if member.state is WorkerState.ACTIVE]

    def measure(self) -> None:
        """Count the active members, and see how fast they are."""
        active = self.active()
        rates = [member.rate for member in active if member.rate > 0]
        self.live, self.rate = len(active), sum(rates) / len(rates) if rates else 0.0

    def rate_of(self, member: Member) -> float:
        """Samples a second of this member while it trains: if it has not pushed, the mean; 0 if nobody has."""
        return member.rate or self.rate

    def share(self, member: Member) -> float:
        """Its part of what all active members train in the same time; less before its first push, as it may be slow."""
        pace = member.rate / self.rate if member.rate and self.rate else UNKNOWN_PACE
        return min(1.0, pace / max(1, self.live))

    def silent(self) -> list[Member]:
        """The silent members, as of the last `notice_silence`."""
        return [member for member in self._silent if member.state is WorkerState.SILENT]

    def present(self) -> list[Member]:
        """The active and silent members."""
        return [m for m in self.known.values() if m.present]

    def without_work(self, now: float) -> str:
        """How many have had no work for `IDLE_TOLD_SECONDS`, in words; "" if none has."""
        active = self.active()
        idle = sum(now - member.idle_since >= IDLE_TOLD_SECONDS for member in active)
        return f"{idle} of {len(active)} workers have nothing to train" if idle else ""

    def input_wait(self) -> float | None:
        """The share of the active workers' time spent waiting for input; None before the first push."""
        measured = [member.timings for member in self.active() if member.timings is not None]
        total = sum(timings.step for timings in measured)
        return min(1.0, sum(timings.input for timings in measured) / total) if total > 0 else None

    def contact(self, member: Member, now: float) -> None:
        """Record that a member made contact."""
        if now - self.last_contact > SILENCE_SECONDS:
            for other in self.present():
                other.last_seen += min(now - self.last_contact, now - other.last_seen)
                other.state = WorkerState.ACTIVE
        self.last_contact = member.last_seen = now
        if member.state is WorkerState.SILENT:
            member.state = WorkerState.ACTIVE

    def notice_silence(self, now: float) -> list[Member]:
        """Mark the silent members; returns those that count as lost."""
        lost: list[Member] = []
        self._silent = []
        others_are_heard = now - self.last_contact <= SILENCE_SECONDS
        for member in self.present():
            silence = now - member.last_seen
            if silence > member.silence_limit:
                member.state = WorkerState.SILENT
                self._silent.append(member)
            if silence > max(LOST_SECONDS, 2 * member.silence_limit) and others_are_heard:
                lost.append(member)
        return lost


def _mix(old: float, new: float) -> float:
    return old + WEIGHT * (new - old) if math.isfinite(new) else old
