"""Jobs and pools as the JSON that the page draws. Pure. Times are Unix seconds, money and speeds numbers."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from shoal.api.capacity_pool import CapacityPool
from shoal.api.training_job import TrainingJob
from shoal.page.memory import JobMemory, Span
from shoal.words import number

Json = dict[str, Any]


def overview(jobs: Iterable[TrainingJob], pools: Iterable[CapacityPool], now: datetime) -> Json:
    """One row for each job, those that run first, and one for each pool."""
    rows = sorted((row(job, now) for job in jobs), key=lambda r: (r["finished"], r["namespace"], r["name"]))
    return {
        "now": now.timestamp(),
        "jobs": rows,
        "pools": [pool(each) for each in sorted(pools, key=lambda p: p.metadata.name)],
    }


def row(job: TrainingJob, now: datetime) -> Json:
    """A job in the list. A status has no age of its own: of a job that stands no speed is told."""
    status, training = job.status, job.status.training
    standing = status.standing(now)
    still = status.finished or bool(standing)
    return {
        "namespace": job.metadata.namespace,
        "name": job.metadata.name,
        "phase": status.phase or "New",
        "finished": status.finished,
        "reason": status.reason or standing,
        "message": status.words or standing,
        "ready": status.workers.ready,
        "wanted": job.wanted,
        "samplesPerSecond": None if still else number(training.samples_per_second),
        "loss": number(training.loss),
        "progress": training.progress_percent,
        "remaining": None if still else training.remaining_seconds,
        "disruptions": status.restarts.disruptions,
        "failures": status.restarts.failures,
        "serverRestarts": status.parameter_servers.restarts,
        "cost": number(status.cost.accumulated) if status.cost else None,
        "created": job.metadata.creation_timestamp,
    }


def detail(job: TrainingJob, memory: JobMemory | None, now: datetime) -> Json:
    """Everything about one job."""
    status, training = job.status, job.status.training
    return {
        "now": now.timestamp(),
        **row(job, now),
        "step": training.step,
        "epoch": training.epoch,
        "metrics": {name: number(value) for name, value in sorted(training.metrics.items())},
        "waitsFor": training.message,
        "goodput": number(training.goodput),
        "inputWait": number(training.input_wait),
        "data": status.data.model_dump(by_alias=True),
        "start": seconds(status.start_time),
        "end": seconds(status.completion_time),
        "deadline": deadline(job),
        "finish": finish(job, now),
        "plan": plan(job),
        "plans": [
            {"at": each.at.timestamp(), "summary": each.summary, "reason": each.reason}
            for each in memory.plans
        ]
        if memory
        else [],
        "money": money(job),
        "conditions": [
            {
                "type": each.type,
                "reason": each.reason,
                "message": each.message,
                "since": each.last_transition_time.timestamp(),
            }
            for each in status.conditions
            if each.status == "True"
        ],
        "lastFailure": f"{status.last_failure.pod}: "
        f"{status.last_failure.message or status.last_failure.reason}"
        if status.last_failure
        else "",
        "model": status.output.uri if status.output else "",
        "spans": [span(each) for each in sorted(memory.spans.values(), key=lambda s: s.place)]
        if memory
        else [],
        "curves": memory.metrics if memory else [],
        "samples": [
            [s.at.timestamp(), s.workers, s.samples_per_second, s.loss, *s.metrics] for s in memory.samples
        ]
        if memory
        else [],
    }


def deadline(job: TrainingJob) -> float | None:
    """When the job should be finished."""
    wanted, start = job.spec.elasticity.objective.deadline_seconds, job.status.start_time
    return start.timestamp() + wanted if wanted is not None and start is not None else None


def finish(job: TrainingJob, now: datetime) -> Json | None:
    """When it is expected to be finished, and a band as wide as the prediction of its speed was wrong so far."""
    status = job.status
    left = status.training.remaining_seconds
    basis = "its speed now"
    if left is None and status.prediction is not None:
        left, basis = status.prediction.remaining_seconds, status.prediction.basis or "its predicted speed"
    if status.finished or left is None or status.standing(now):
        return None
    wrong = number(status.prediction.relative_error) if status.prediction else None
    at = now.timestamp()
    band = None if wrong is None else [at + left * max(0.0, 1 - abs(wrong)), at + left * (1 + abs(wrong))]
    return {"at": at + left, "band": band, "basis": basis}


def plan(job: TrainingJob) -> Json | None:
    """What is planned, in words."""
    found = job.status.plan
    if found is None or not found.summary:
        return None
    return {
        "summary": found.summary,
        "reason": found.reason,
        "confidence": number(found.confidence),
        "cost": number(found.cost),
        "finish": seconds(found.finish_time),
        "mode": job.spec.elasticity.mode,
    }


def money(job: TrainingJob) -> Json | None:
    """What was spent, and what on-demand nodes would have cost."""
    cost = job.status.cost
    if cost is None:
        return None
    spent, saved = number(cost.accumulated), number(cost.saved_versus_on_demand)
    known = None if spent is None or saved is None else spent + saved
    return {"spent": spent, "perHour": number(cost.per_hour), "onDemand": known}


def span(each: Span) -> Json:
    """A bar of the time line."""
    role, index, incarnation = each.place
    return {
        "role": role, "index": index, "incarnation": incarnation, "start": each.start.timestamp(),
        "end": seconds(each.end), "state": each.state, "pool": each.pool, "node": each.node, "cause": each.cause,
        "known": each.known,
    }  # fmt: skip


def pool(each: CapacityPool) -> Json:
    """A pool in the list."""
    spec, status = each.spec, each.status
    return {
        "name": each.metadata.name,
        "accelerator": f"{spec.accelerator.count} x {spec.accelerator.name}" if spec.accelerator else "none",
        "capacityType": spec.capacity_type,
        "zone": spec.zone,
        "price": spec.price.per_hour if spec.price else None,
        "limit": spec.limits.nodes,
        "nodes": status.nodes,
        "used": status.used,
        "free": max(0, status.nodes - status.used),
        "interruptionsPerHour": number(status.interruptions.per_hour)
        if status.interruptions.seen
        else spec.interruptions_per_hour,
        "measured": bool(status.interruptions.seen),
        "recommended": status.recommended.nodes if status.recommended.reason else None,
        "reason": status.recommended.reason,
    }


def seconds(moment: datetime | None) -> float | None:
    """A moment as Unix seconds."""
    return None if moment is None else moment.timestamp()
