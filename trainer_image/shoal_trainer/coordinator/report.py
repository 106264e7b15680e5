"""Builds the status report and the termination message of a successful job: what can be read of a coordinator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from shoal_trainer.contract import (
    MAX_EPOCHS,
    MAX_WORKERS,
    DataReport,
    EpochReport,
    Outcome,
    Phase,
    Ranges,
    StatusReport,
    TerminationMessage,
)
from shoal_trainer.coordinator.coordinator import Coordinator
from shoal_trainer.coordinator.members import Member
from shoal_trainer.coordinator.record import Record
from shoal_trainer.coordinator.task_queue import Tasks


def status(coordinator: Coordinator) -> StatusReport:
    """The status report, without shards and storage."""
    with coordinator.lock:
        now = coordinator.clock()
        record, samples = coordinator.record, coordinator.shard.history.samples
        ledger, counters = record.ledger, record.counters
        done, leased = ledger.counts() if ledger else (0, 0)
        rate, share = record.pace.samples_per_second(now), progress(coordinator)
        left = samples_left(coordinator)
        computed, model = counters.steps + counters.wasted_steps, coordinator.shard.model
        return StatusReport(
            job_uid=record.job.uid,
            phase=phase(coordinator),
            epoch=ledger.completed if ledger else 0,
            epochs_total=record.stop_after.epochs,
            step=counters.steps,
            samples=samples,
            loss=record.pace.loss,
            metrics=metrics(record),
            epochs=epochs(record.tasks, len(record.tasks.history) - MAX_EPOCHS),
            samples_per_second=rate,
            samples_left=left,
            progress_percent=None if share is None else round(100 * share, 2),
            remaining_seconds=left / rate if left and rate else None,
            wasted_steps=counters.wasted_steps,
            rollbacks=counters.rollbacks,
            restarted_from_nothing=counters.restarted_from_nothing,
            leases_taken_back=counters.taken_back,
            goodput=None if not computed else round(counters.steps / computed, 4),
            input_wait=coordinator.members.input_wait(),
            data=DataReport(
                done=done,
                leased=leased,
                total=ledger.total() if ledger else None,
                repeated=counters.repeated,
                partial=counters.partial,
                lost=counters.lost,
            ),
            workers=tuple(
                member.report(now)
                for member in newest_first(coordinator.members.known.values())[:MAX_WORKERS]
            ),
            model=None if model is None else coordinator.facts.report(model.spec),
            speed=coordinator.speeds.report(),
            beside=coordinator.course.beside,
            speed_epoch=f"{coordinator.shard.epoch}-{coordinator.shard.first_boot}",
            message=record.stopping
            or coordinator.stuck.message(now)
            or (coordinator.members.without_work(now) if coordinator.course.trains else "")
            or record.tasks.files.lacking,
        )


def epochs(tasks: Tasks, first: int) -> tuple[EpochReport, ...]:
    """The finished epochs from `first` on."""
    queued = {task.epoch for task in tasks.queue if task.kind != "export"}
    first = max(0, first)
    return tuple(
        EpochReport(epoch=epoch, metrics=logs, complete=epoch not in queued)
        for epoch, logs in enumerate(tasks.history[first:], start=first)
    )


def newest_first(members: Iterable[Member]) -> list[Member]:
    """The newest incarnation of each slot, then the second newest of each, and so on."""
    rank: Counter[int] = Counter()
    ranked = []
    for member in sorted(members, key=lambda m: -m.incarnation):
        rank[member.slot] += 1
        ranked.append((rank[member.slot], member.slot, member))
    return [member for *_, member in sorted(ranked, key=lambda r: r[:2])]


def succeeded(coordinator: Coordinator, note: str = "") -> TerminationMessage:
    """The termination message of a successful job, with a note about its model, but without the model's URI."""
    with coordinator.lock:
        report, counted = status(coordinator), ranges(coordinator.record)
        reason = coordinator.record.stopping or "all epochs are complete"
        said = "; ".join(filter(None, (reason, note, coordinator.record.tasks.files.lacking)))
    return TerminationMessage(
        outcome=Outcome.SUCCEEDED,
        reason="Succeeded",
        message=said,
        step=report.step,
        epoch=report.epoch,
        samples=report.samples,
        loss=None if report.loss is None else _short(report.loss),
        metrics={name: _short(value) for name, value in report.metrics.items()},
        wasted_steps=report.wasted_steps,
        data=report.data,
        ranges=counted,
    )


def _short(value: float) -> float:
    """With six digits: those of many metrics are to fit in the 4 KB that a kubelet keeps."""
    return float(f"{value:.6g}")


def metrics(record: Record) -> dict[str, float]:
    """The metrics of the newest training epoch, which may not be over, and those of the newest evaluation."""
    history = record.tasks.history
    trained = record.means.current() or (history[-1] if history else {})
    evaluated = (logs for logs in reversed(history) if any(map(_of_evaluation, logs)))
    return {name: value for name, value in trained.items() if name != "loss" and not _of_evaluation(name)} | {
        name: value for name, value in next(evaluated, {}).items() if _of_evaluation(name)
    }


def _of_evaluation(name: str) -> bool:
    return name.startswith("val_")


def ranges(record: Record) -> Ranges:
    """How often the ranges of the complete epochs were applied. `never`: those of the epochs that are not complete.

    `never` is 0 for a job that stopped by steps, by a metric or by a callback.
    """
    if record.ledger is None:
        return Ranges()
    epochs = record.ledger.completed
    complete = epochs * record.ledger.ranges.per_epoch
    repeated_ranges = {(epoch, at) for epoch, at in record.counters.repeated_ranges if epoch < epochs}
    partial_ranges = {(epoch, at) for epoch, at in record.counters.partial_ranges if epoch < epochs}
    repeated, partial = len(repeated_ranges), len(partial_ranges - repeated_ranges)
    never = 0
    if not record.stopping and record.ledger.epochs is not None:
        never = max(0, record.ledger.epochs * record.ledger.ranges.per_epoch - complete)
    return Ranges(once=max(0, complete - repeated - partial), repeated=repeated, partial=partial, never=never)


def phase(coordinator: Coordinator) -> Phase:
    """The job's phase."""
    record = coordinator.record
    if coordinator.finished is not None:
        return Phase.SUCCEEDED if coordinator.finished.outcome is Outcome.SUCCEEDED else Phase.FAILED
    if not record.begun:
        return Phase.STARTING
    return Phase.FINISHING if record.over else Phase.TRAINING


def progress(coordinator: Coordinator) -> float | None:
    """The share of the work that is done, 0 to 1; None if the total is unknown."""
    record = coordinator.record
    if coordinator.finished is not None or record.stopping:
        return 1.0
    shares = []
    if record.stop_after.steps:
        shares.append(record.counters.steps / record.stop_after.steps)
    if record.stop_after.epochs and record.ledger is not None and (total := record.ledger.total()):
        shares.append(record.ledger.done_samples / (total * record.stop_after.epochs))
    return min(1.0, max(shares)) if shares else None


def samples_left(coordinator: Coordinator) -> float | None:
    """Samples still to be trained, by the limit that comes first; None if unknown, or if only a metric ends the job."""
    record = coordinator.record
    if coordinator.finished is not None or record.stopping:
        return 0.0
    stop, ledger, counters = record.stop_after, record.ledger, record.counters
    left: list[float] = []
    if stop.epochs and ledger is not None and (total := ledger.total()) is not None:
        left.append(float(max(0, total * stop.epochs - ledger.done_samples)))
    if stop.steps:
        trained = ledger.done_samples / counters.steps if ledger is not None and counters.steps else 0.0
        left.append(max(0, stop.steps - counters.steps) * (trained or record.batch_size))
    return min(left, default=None)
