"""The figures of the demo, from the API server's audit log, the job's status, and PS 0's termination message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dev.audit import Write
from dev.demo.faults import Fault
from dev.demo.watch import Picture


@dataclass(frozen=True)
class Replacement:
    """A worker's next incarnation: the fault that caused it, and when its pod was created."""

    fault: Fault
    place: tuple[int, int]
    created: datetime
    seconds: float


def replacements(faults: Sequence[Fault], writes: Sequence[Write], job: str) -> list[Replacement]:
    """For every worker on a lost node, the creation of its next incarnation.

    The time counts from the kubelet's first status after the notice, or from the end of the machine without notice.
    """
    found = []
    lived = {(w.namespace, w.name) for w in writes if w.resource == "pods" and w.subresource and w.code < 300}
    for fault in faults:
        start = notice_seen(fault, writes) if fault.kind == "node reclaimed with notice" else fault.at
        for slot, incarnation in fault.places:
            prefix = f"{job}-worker-{slot}-"
            made = ((w, incarnation_made(w, prefix, lived)) for w in writes if w.received >= fault.at)
            later = (
                (w.received, number) for w, number in made if number is not None and number > incarnation
            )
            if (first := next(later, None)) is not None:
                created, number = first
                seconds = (created - start).total_seconds()
                found.append(Replacement(fault, (slot, number), created, seconds))
    return found


def notice_seen(fault: Fault, writes: Sequence[Write]) -> datetime:
    """When the node's status was first written after the notice."""
    return next(
        (
            w.received
            for w in writes
            if w.resource == "nodes"
            and w.subresource == "status"
            and w.name == fault.target
            and w.received >= fault.at
        ),
        fault.at,
    )


def incarnation_made(write: Write, prefix: str, lived: Set[tuple[str, str]]) -> int | None:
    """The incarnation of the pod that this write created, if its name has the prefix.

    `lived`: pods that were bound or ran. If a client hangs up, as an operator on the node that goes, the log has 504
    whether the pod was created or not.
    """
    number = write.name.removeprefix(prefix)
    if (write.verb, write.resource, write.subresource) != ("create", "pods", "") or number == write.name:
        return None
    done = write.code < 300 or (write.code == 504 and (write.namespace, write.name) in lived)
    return int(number) if done and number.isdecimal() else None


def accuracy(metrics: Mapping[str, Any]) -> float | None:
    """The accuracy on the test set: Keras names it `val_accuracy` if there are other metrics."""
    for name in ("val_accuracy", "test_accuracy", "accuracy"):
        if name in metrics:
            return float(metrics[name])
    return None


def figures(
    picture: Picture,
    faults: Sequence[Fault],
    writes: Sequence[Write],
    first_pushes: Mapping[tuple[int, int], float],
    model: str,
) -> dict[str, Any]:
    """The content of build/demo.json but for the seconds; None for what is unknown."""
    status, evidence = picture.job.status, picture.evidence
    found = replacements(faults, writes, picture.job.metadata.name)
    noticed = [round(r.seconds, 3) for r in found if r.fault.kind == "node reclaimed with notice"]
    silent = [round(r.seconds, 3) for r in found if r.fault.kind == "node lost without notice"]
    pushes = [
        round(min(pushed) - r.created.timestamp(), 3)
        for r in found
        if (
            pushed := [
                at
                for (slot, number), at in first_pushes.items()
                if slot == r.place[0] and number >= r.place[1]
            ]
        )
    ]
    ranges = evidence.ranges if evidence else None
    return {
        "accuracy": accuracy(evidence.metrics) if evidence else None,
        "disruptions": status.restarts.disruptions,
        "failures": status.restarts.failures,
        "parameterServerRestarts": status.parameter_servers.restarts,
        "noticeToReplacementSeconds": noticed,
        "silenceToReplacementSeconds": max(silent) if silent else None,
        "replacementToFirstPushSeconds": pushes,
        "wastedSteps": evidence.wasted_steps if evidence else status.training.wasted_steps,
        "ranges": ranges.model_dump() if ranges else None,
        "model": model,
    }
