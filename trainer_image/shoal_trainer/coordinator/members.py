"""Who works: the incarnations that were heard, when they last spoke, and what they told with their pushes.

A worker that says nothing for max(5 s, 3 of its steps) is Silent: that alone takes nothing from it. It is fenced when
its successor says hello, when others have nothing left to do but what it holds, or after `LOST_SECONDS`; from then on
nothing of it is taken, so its leases can be given away.

Where nobody at all was heard for longer than `SILENCE_SECONDS`, it was this server that was away (its node off the
network, its process stopped): that time is nobody's silence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from shoal_trainer.contract import SILENCE_SECONDS, SILENCE_STEPS, WorkerReport, WorkerState
from shoal_trainer.coordinator.protocol import Given
from shoal_trainer.wire.messages import Timings

LOST_SECONDS = 60.0
KEPT = 512
"""Members that are remembered; of those beyond it the ones that left longest ago are forgotten."""
WEIGHT = 0.1


@dataclass
class Member:
    """One incarnation of one slot."""

    slot: int
    incarnation: int
    node: str = ""
    pool: str = ""
    batch_size: int = 0
    state: WorkerState = WorkerState.ACTIVE
    last_seen: float = 0.0
    first_push_at: float | None = None
    steps: int = 0
    samples: int = 0
    staleness: float | None = None
    timings: Timings | None = None
    message: str = ""
    wasted_steps: int = 0
    """In all its life, as far as it told this coordinator."""
    asked: int | None = None
    given: Given | None = None
    """What it was given to do, when it asked with that number."""

    @property
    def patience(self) -> float:
        """Seconds after which its silence is told."""
        step = self.timings.step if self.timings else 0.0
        return max(SILENCE_SECONDS, SILENCE_STEPS * step)

    def pushed(self, steps: int, samples: int, staleness: int, timings: Timings) -> None:
        """Take in what came with a push; times are smoothed."""
        self.steps += steps
        self.samples += samples
        self.staleness = staleness if self.staleness is None else _mix(self.staleness, staleness)
        old = self.timings
        self.timings = (
            timings if old is None else Timings(*(_mix(a, b) for a, b in zip(old, timings, strict=True)))
        )

    def report(self, now: float) -> WorkerReport:
        """As the status tells it."""
        t = self.timings
        return WorkerReport(
            slot=self.slot,
            incarnation=self.incarnation,
            state=self.state,
            steps=self.steps,
            samples=self.samples,
            last_seen_seconds=round(now - self.last_seen, 3),
            first_push_at=self.first_push_at,
            step_seconds=t.step if t else None,
            compute_seconds=t.compute if t else None,
            pull_seconds=t.pull if t else None,
            push_seconds=t.push if t else None,
            input_seconds=t.input if t else None,
            staleness=self.staleness,
            batch_size=self.batch_size,
            node=self.node,
            pool=self.pool,
            message=self.message,
        )


@dataclass
class Members:
    """All of them, by (slot, incarnation)."""

    known: dict[tuple[int, int], Member] = field(default_factory=dict)
    heard: float = -math.inf
    """When somebody spoke last."""
    _newest: dict[int, int] = field(default_factory=dict)
    _silent: list[Member] = field(default_factory=list)
    """Those that `notice_silence` found last; some of them may have spoken since."""

    def newest(self, slot: int) -> int:
        """The highest incarnation that was heard of a slot; -1 for none."""
        return self._newest.get(slot, -1)

    def replaced(self, incarnations: Iterable[tuple[int, int]]) -> None:
        """These (slot, incarnation) took part before this process began: older ones of a slot are fenced."""
        for slot, incarnation in incarnations:
            self._newest[slot] = max(incarnation, self.newest(slot))

    def get(self, slot: int, incarnation: int) -> Member:
        """The member, new if it was not known."""
        key = (slot, incarnation)
        if key not in self.known:
            self.known[key] = Member(slot, incarnation)
            self._newest[slot] = max(incarnation, self.newest(slot))
            gone = [m for m in self.known.values() if m.state not in {WorkerState.ACTIVE, WorkerState.SILENT}]
            for member in sorted(gone, key=lambda m: m.last_seen)[: max(0, len(self.known) - KEPT)]:
                del self.known[member.slot, member.incarnation]
        return self.known[key]

    def older(self, slot: int, incarnation: int) -> list[Member]:
        """Incarnations of a slot before this one that have not left."""
        present = {WorkerState.ACTIVE, WorkerState.SILENT}
        return [
            m
            for m in self.known.values()
            if m.slot == slot and m.incarnation < incarnation and m.state in present
        ]

    def active(self) -> list[Member]:
        """Those that speak."""
        return [member for member in self.known.values() if member.state is WorkerState.ACTIVE]

    def silent(self) -> list[Member]:
        """Those that have not spoken for longer than they should."""
        return [member for member in self._silent if member.state is WorkerState.SILENT]

    def present(self) -> list[Member]:
        """Those that speak, and the silent ones."""
        return [m for m in self.known.values() if m.state in {WorkerState.ACTIVE, WorkerState.SILENT}]

    def input_wait(self) -> float | None:
        """Share of the active workers' time that they wait for input; None before the first push."""
        told = [member.timings for member in self.active() if member.timings is not None]
        total = sum(timings.step for timings in told)
        return min(1.0, sum(timings.input for timings in told) / total) if total > 0 else None

    def hear(self, member: Member, now: float) -> None:
        """It spoke."""
        if now - self.heard > SILENCE_SECONDS:
            for other in self.present():
                other.last_seen += min(now - self.heard, now - other.last_seen)
                other.state = WorkerState.ACTIVE
        self.heard = member.last_seen = now
        if member.state is WorkerState.SILENT:
            member.state = WorkerState.ACTIVE

    def notice_silence(self, now: float) -> list[Member]:
        """Mark the silent ones; returns those that have been silent for so long that they count as lost."""
        lost: list[Member] = []
        self._silent = []
        for member in self.present():
            silence = now - member.last_seen
            if silence > member.patience:
                member.state = WorkerState.SILENT
                self._silent.append(member)
            if silence > max(LOST_SECONDS, 2 * member.patience) and now - self.heard <= SILENCE_SECONDS:
                lost.append(member)
        return lost


def _mix(old: float, new: float) -> float:
    return old + WEIGHT * (new - old) if math.isfinite(new) else old
