"""What the coordinator tells: the status report, and the message that ends a job that succeeded.

Call these inside the coordinator's lock: they read, and change nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from shoal_trainer.contract import DataReport, Outcome, Phase, Ranges, StatusReport, TerminationMessage
from shoal_trainer.coordinator.members import Member

if TYPE_CHECKING:
    from shoal_trainer.coordinator.coordinator import Coordinator

MAX_WORKERS = 1024
"""As many slots as a job may have, at least."""


def status(of: Coordinator, now: float) -> StatusReport:
    """The job as it is now, without its shards and its storage."""
    ledger, counters, samples = of.ledger, of.counters, of.shard.samples
    done, leased = ledger.counts() if ledger else (0, 0)
    rate, share = of.pace.samples_per_second(now), progress(of)
    remaining = None
    if rate and share is not None and samples and 0 < share < 1:
        remaining = samples * (1 / share - 1) / rate
    computed = counters.steps + counters.wasted_steps
    return StatusReport(
        job_uid=of.job.uid,
        phase=phase(of),
        epoch=ledger.current if ledger else 0,
        epochs_total=of.stop_after.epochs,
        step=counters.steps,
        samples=samples,
        loss=of.pace.loss,
        metrics=metrics(of),
        samples_per_second=rate,
        progress_percent=None if share is None else round(100 * share, 2),
        remaining_seconds=remaining,
        wasted_steps=counters.wasted_steps,
        rollbacks=counters.rollbacks,
        goodput=None if not computed else round(counters.steps / computed, 4),
        input_wait=of.members.input_wait(),
        data=DataReport(
            done=done,
            leased=leased,
            total=ledger.total() if ledger else None,
            repeated=counters.repeated,
            partial=counters.partial,
            lost=counters.lost,
        ),
        workers=tuple(member.report(now) for member in newest_first(of.members.known.values())[:MAX_WORKERS]),
        message=of.stopping,
    )


def newest_first(members: Iterable[Member]) -> list[Member]:
    """The newest incarnation of every slot, then the one before it of every slot, and so on."""
    turn: Counter[int] = Counter()
    ranked = []
    for member in sorted(members, key=lambda m: -m.incarnation):
        turn[member.slot] += 1
        ranked.append((turn[member.slot], member.slot, member))
    return [member for *_, member in sorted(ranked, key=lambda r: r[:2])]


def succeeded(of: Coordinator, now: float, note: str) -> TerminationMessage:
    """The message that ends the job: why it stopped, and a note on its model."""
    told = status(of, now)
    why = of.stopping or "all passes over the data are complete"
    return TerminationMessage(
        outcome=Outcome.SUCCEEDED,
        reason="Succeeded",
        message=f"{why}; {note}" if note else why,
        step=told.step,
        epoch=told.epoch,
        samples=told.samples,
        loss=told.loss,
        metrics=told.metrics,
        wasted_steps=told.wasted_steps,
        data=told.data,
        ranges=ranges(of),
    )


def metrics(of: Coordinator) -> dict[str, float]:
    """The newest evaluation's."""
    for logs in reversed(of.tasks.history):
        found = {name: value for name, value in logs.items() if name.startswith("val_")}
        if found:
            return found
    return {}


def ranges(of: Coordinator) -> Ranges:
    """How often each range was trained, over the passes that are complete; `never`: of the passes asked for.

    A job that ended by steps, by a metric or by a callback did not ask for whole passes: nothing of it is `never`.
    """
    if of.ledger is None:
        return Ranges()
    complete = of.ledger.completed * of.ledger.ranges_in_a_pass()
    repeated = len(of.counters.repeated_ranges)
    partial = len(of.counters.partial_ranges - of.counters.repeated_ranges)
    never = 0
    if not of.stopping and of.ledger.epochs is not None:
        never = max(0, of.ledger.epochs * of.ledger.ranges_in_a_pass() - complete)
    return Ranges(once=max(0, complete - repeated - partial), repeated=repeated, partial=partial, never=never)


def phase(of: Coordinator) -> Phase:
    """Where the job is in its life."""
    if of.finished is not None:
        return Phase.SUCCEEDED if of.finished.outcome is Outcome.SUCCEEDED else Phase.FAILED
    if not of.begun:
        return Phase.STARTING
    over = of.stopping or (of.ledger is not None and of.ledger.finished)
    return Phase.FINISHING if over else Phase.TRAINING


def progress(of: Coordinator) -> float | None:
    """Share of the work done, 0 to 1; None where it is not known how much there is."""
    if of.finished is not None or of.stopping:
        return 1.0
    shares = []
    if of.stop_after.steps:
        shares.append(of.counters.steps / of.stop_after.steps)
    if of.stop_after.epochs and of.ledger is not None and (total := of.ledger.total()):
        shares.append(of.ledger.done_samples / (total * of.stop_after.epochs))
    return min(1.0, max(shares)) if shares else None
