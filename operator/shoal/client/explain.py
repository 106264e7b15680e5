"""Why a job is pending, slow or costly, and what would help: `shoal explain`. Pure.

Each rule is a function of what was read that yields findings; the list of rules is the whole policy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from shoal.api.labels import JOB, ROLE
from shoal.api.training_job import TrainingJob
from shoal.api.training_job_status import PASSES, STALE
from shoal.words import count, decimal, duration, few, no_scheduler, number
from shoal_trainer.contract import StopAfter

INPUT_WAIT = 0.1
DISTANCE = 0.2
"""Workers that are slower than predicted by more than this share of it are worth a word."""

FINISH_SECONDS = 60
"""A finish is told as the end of its minute."""


@dataclass(frozen=True)
class Finding:
    """One answer. `why`: the reason; `help`: what would change it, empty if nothing would or need be."""

    topic: Literal["waiting", "stopped", "slow", "costly", "plan", "data"]
    why: str
    help: str = ""


@dataclass(frozen=True)
class Seen:
    """What the rules look at."""

    job: TrainingJob
    pods: Sequence[Mapping[str, Any]] = ()
    now: datetime = field(default_factory=lambda: datetime.now(UTC))
    """By the cluster's clock."""
    unread: str = ""
    """Why the pods could not be read, if so."""


def explain(seen: Seen) -> list[Finding]:
    """All findings, in the order of the rules: what stops the job first. In their help, NAME is the job's."""
    name = seen.job.metadata.name
    found = [finding for rule in RULES for finding in rule(seen)] or list(_starting(seen))
    return [replace(finding, help=finding.help.replace("NAME", name)) for finding in found]


def _nobody_watches(seen: Seen) -> Iterator[Finding]:
    job = seen.job
    if not job.spec.ours:
        yield Finding(
            "waiting",
            f"another controller manages this job: {job.spec.managed_by}",
            "ask its owner, or create the job without managedBy",
        )
        return
    if job.status.finished or job.status.observed_generation >= job.metadata.generation > 0:
        return
    created = job.metadata.creation_timestamp
    help_ = "shoal doctor says whether an operator is there; training that runs continues without it"
    if not job.status.observed_generation:
        words = "no operator has looked at this job: one that runs does so within a second, a new leader within 20"
        yield Finding("waiting", words, help_)
    elif created and seen.now - datetime.fromisoformat(created) > STALE:
        words = (
            "the operator has not seen the newest change of this job: none runs, or not for this namespace"
        )
        yield Finding("waiting", words, help_)


def _conditions(seen: Seen) -> Iterator[Finding]:
    status = seen.job.status
    for kind in ("Failed", "Stalled", "QuotaExceeded", "Degraded"):
        condition = status.condition(kind)
        if condition is None or condition.status != "True" or (kind == "Stalled" and status.finished):
            continue  # a failed job is stalled for the same reason
        stopped = kind in {"Failed", "Stalled"}
        help_ = _too_large(condition.message) or _remedy(condition.reason, condition.message)
        if kind == "Failed" and status.last_failure:
            help_ = help_.replace("--slot N", _slot(status.last_failure.pod))
        if kind == "Failed":
            help_ += "; to apply it again: choose another name, or kubectl delete etj NAME first"
        if kind == "Degraded" and condition.reason in PASSES:
            help_ += "; or wait: it may pass by itself"
        if condition.reason == "Unschedulable" and "persistentvolumeclaim" in condition.message.lower():
            help_ = ""  # the message says what to do
        yield Finding(
            "stopped" if stopped else "waiting", f"{kind}, {condition.reason}: {condition.message}", help_
        )


def _slot(pod: str) -> str:
    """The options of `shoal logs` for a pod. Of a job that has failed, it is the newest of its slot."""
    found = re.search(r"-(worker|ps)-(\d+)-\d+$", pod)
    if found is None:
        return "--slot N"
    return f"--slot {found[2]}" + (" --ps" if found[1] == "ps" else "")


def _queued(seen: Seen) -> Iterator[Finding]:
    quota = seen.job.status.condition("QuotaReserved")
    if seen.job.status.finished or quota is None or quota.status != "False" or quota.reason in OWN_REASONS:
        return
    queue = seen.job.spec.run_policy.scheduling_policy.queue
    yield Finding(
        "waiting",
        f"Kueue has given no quota, {quota.reason}: {quota.message}",
        f"kubectl get workloads -l {JOB}={seen.job.metadata.name} shows what it asks for, kubectl describe localqueue "
        f"{queue} who else waits; nothing is lost meanwhile",
    )


OWN_REASONS = frozenset({"Suspended", "NotQueued", "Finished"})
"""Why a job has no quota that asks for none."""


def _suspended(seen: Seen) -> Iterator[Finding]:
    job = seen.job
    if job.spec.suspend and not job.status.finished:
        yield Finding("waiting", "spec.suspend is true", f"shoal resume {job.metadata.name}")


def _nobody_works(seen: Seen) -> Iterator[Finding]:
    job = seen.job
    if job.spec.workers.replicas == 0 and not job.status.finished and job.spec.elasticity.mode != "Auto":
        yield Finding("waiting", "no workers are wanted", f"shoal scale {job.metadata.name} 1")


@cache
def remedies() -> dict[str, dict[str, str]]:
    """Reason -> words of a message -> what to do, as docs/troubleshooting*.md say it (`make generate`)."""
    found: dict[str, dict[str, str]] = json.loads(
        files("shoal.client").joinpath("remedies.json").read_text("utf-8")
    )
    return found


def _remedy(reason: str, message: str) -> str:
    """What to do about a reason, or about what its message says."""
    if (known := remedies().get(reason)) is None:
        return f"docs/reasons.md has the reason {reason}"
    return next((do for words, do in known.items() if words and words in message), known[""])


def _pending(seen: Seen) -> Iterator[Finding]:
    waiting: dict[str, list[str]] = {}
    if seen.unread and seen.job.status.phase in {"", "Pending", "Starting"}:
        yield Finding("waiting", f"its pods cannot be read, which would say why it waits: {seen.unread}")
    for pod in seen.pods:
        if pod.get("status", {}).get("phase") != "Pending":
            continue
        for words in why_pending(pod, seen.now):
            waiting.setdefault(words, []).append(pod["metadata"]["name"])
    degraded = seen.job.status.condition("Degraded")
    told = degraded.message if degraded is not None and degraded.status == "True" else ""
    for words, names in waiting.items():
        if len(names) == 1 and words in told:
            continue
        yield Finding("waiting", f"{few(sorted(names))}: {words}", _pending_help(words))


LOOKED_AT_AFTER = timedelta(minutes=1)
"""Schedulers say within seconds of a pod that they cannot place it."""


def why_pending(pod: Mapping[str, Any], now: datetime) -> Iterator[str]:
    """Why a pod has not begun, in the words of who keeps it; nothing of what passes by itself."""
    spec, status = pod.get("spec", {}), pod.get("status", {})
    scheduled = [each for each in status.get("conditions") or [] if each["type"] == "PodScheduled"]
    for condition in scheduled:
        if condition["status"] == "False":
            yield condition.get("message") or condition.get("reason", "not scheduled")
    created = datetime.fromisoformat(pod["metadata"].get("creationTimestamp") or now.isoformat())
    if not scheduled and not spec.get("nodeName") and now - created >= LOOKED_AT_AFTER:
        yield no_scheduler(spec.get("schedulerName", "default-scheduler"))
    for each in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        state = (each.get("state") or {}).get("waiting") or {}
        if state.get("reason") not in {None, "ContainerCreating", "PodInitializing"}:
            yield f"{state['reason']}: {state.get('message', '')}".rstrip(": ")


def _pending_help(words: str) -> str:
    if keys := set(re.findall(r"untolerated taint \{([^:= }]+)", words)):
        if not (own := sorted(each for each in keys if not each.startswith("node.kubernetes.io/"))):
            return "the nodes are away, full, or cordoned: kubectl describe node says why"
        tainted = f"the free nodes are tainted: add tolerations to the template: {', '.join(own)}"
    else:
        tainted = "the free nodes are tainted: add tolerations to the template"
    if too_large := _too_large(words):
        return too_large
    hints = {
        "no scheduler has looked": _remedy("Unschedulable", words),
        "nsufficient nvidia.com/gpu": "all GPUs are taken, or no node has any: add nodes, or lower workers.replicas",
        "nsufficient": "the nodes are full: add nodes, lower the requests in the template, or lower workers.replicas",
        "unbound immediate": "the claim has no volume: kubectl describe pvc says why; where no StorageClass is the "
        "default, it has to name one",
        "volume node affinity": "its volume is in another zone than the free nodes: add a node there, or take a "
        "StorageClass with volumeBindingMode WaitForFirstConsumer, or a bucket",
        "affinity": "no node has the labels: workers.capacity and workers.pools say which are wanted (Any: "
        "every node)",
        "taint": tainted,
        "PodScheduling": "a scheduling gate holds the pod, such as a queue's: it is released when the queue admits it",
        "mage": "correct the image in the template, or name imagePullSecrets there",
    }
    return next((text for part, text in hints.items() if part in words), "")


NO_NODE_EVER = re.compile(r"preemption: 0/(\d+) nodes are available: \1 Preemption is not helpful")
"""In the scheduler's words: on no node is there room for the pod, were there no other."""


def _too_large(words: str) -> str:
    """What to do about a pod that asks for more than nodes have; empty if they are full, or that is not known."""
    if "nsufficient" not in words or "unschedulable" in words or not NO_NODE_EVER.search(words):
        return ""
    if re.search(r"nsufficient \S+/", words):  # a node without a GPU says so, too: those with one may be away
        return ""
    tolerate = ", or add tolerations for the taints of others" if "taint" in words else ""
    return (
        "none of the nodes that are there, and that it may run on, has as much as it requests: wait for larger ones, "
        f"or add them, or lower the requests in the template{tolerate}"
    )


def _starting(seen: Seen) -> Iterator[Finding]:
    """What a job waits for that is on its way: of its pods, the one that is least far."""
    if seen.job.status.phase not in {"Pending", "Starting"}:
        return
    pods = {
        each["metadata"]["name"]: each
        for each in seen.pods
        if each.get("status", {}).get("phase") in {"Pending", "Running"}
    }
    made = sorted(name for name, pod in pods.items() if pod["status"]["phase"] == "Pending")
    homeless = [name for name in made if not pods[name].get("spec", {}).get("nodeName")]
    servers = [
        each["metadata"]["name"]
        for each in seen.pods
        if each["metadata"].get("labels", {}).get(ROLE) == "ps"
        and not any(one.get("ready") for one in each.get("status", {}).get("containerStatuses") or [])
    ]
    if not pods:
        words = "its pods are about to be created"
    elif homeless:
        words = f"{few(homeless)}: it waits for a scheduler to give it a node"
    elif made:
        words = f"{few(made)}: its node pulls the image and mounts the volumes"
    elif servers:
        words = f"{few(sorted(servers))}: it reads the job's storage before it serves"
    else:
        words = WORKERS_START
    yield Finding("waiting", words, _if_it_lasts(seen))


WORKERS_START = "workers import TensorFlow and the code, build and trace the model; no step is done yet"
LONG = timedelta(minutes=3)
"""Longer than this few jobs take to their first step, once the image is on the node."""


def _if_it_lasts(seen: Seen) -> str:
    """What to do about a job that makes no step, once it has made none for long."""
    start = seen.job.status.resumed_at or seen.job.status.start_time
    if start is None or seen.now - start < LONG:
        return ""
    return (
        f"that is {duration((seen.now - start).total_seconds())} now: shoal logs NAME --slot 0 shows what a worker "
        "does. Code at the top of the file that waits or never ends keeps it from the first step, and so does a large "
        "model or a slow download; runPolicy.progressDeadlineSeconds reports it"
    )


def _not_training(seen: Seen) -> Iterator[Finding]:
    status = seen.job.status
    if status.finished or status.workers.ready == 0 or status.phase != "Running":
        return
    if not status.training.phase:
        yield Finding("waiting", "workers run, but the operator has no report from parameter server 0",
                      "after a minute: a NetworkPolicy may block port 7071 from the operator "
                      "(docs/operating.md)")  # fmt: skip
    elif status.training.step == 0 or (status.starts_again and not status.is_old(seen.now)):
        yield Finding("waiting", WORKERS_START, _if_it_lasts(seen))
    elif standing := status.standing(seen.now):
        stands, help_ = f"{standing}: training stands", "shoal logs NAME --slot N says what a worker does"
        if status.is_old(seen.now):
            stands += ", or no operator runs: a status has no age of its own"
            help_ = f"shoal doctor says whether an operator works, {help_}"
        yield Finding("waiting", stands, help_)
    if status.training.message:
        yield Finding("waiting", f"the trainer says: {status.training.message}")


def _slow(seen: Seen) -> Iterator[Finding]:
    status = seen.job.status
    training, prediction = status.training, status.prediction
    if status.finished or training.samples_per_second is None:
        return
    if (waited := number(training.input_wait) or 0.0) > INPUT_WAIT:
        yield Finding("slow", f"workers wait {waited:.0%} of their time for input",
                      "give workers more CPU, do less in the data function, or store the data decoded")  # fmt: skip
    if prediction is not None:  # of its workers; other ones may be planned, and start
        error = number(prediction.relative_error) or 0.0
        if error > 0 and error / (1 + error) > DISTANCE:
            yield Finding("slow", f"its workers are {error / (1 + error):.0%} slower than expected "
                                  f"({prediction.basis or 'by the model'})",
                          "look at input wait, at the servers' load in the metrics, and at workers that are "
                          "slower than others")  # fmt: skip
    missing = seen.job.spec.workers.replicas - status.workers.ready
    if missing > 0 and seen.job.spec.elasticity.mode != "Auto":  # there it is Shoal that wants them
        yield Finding("slow", f"{count(missing, 'worker')} of {seen.job.spec.workers.replicas} are not there")
    if (goodput := number(training.goodput)) is not None and goodput < 1 - INPUT_WAIT:
        yield Finding("slow", f"only {goodput:.0%} of the computed steps count; the others "
                              f"were lost with their pods or too stale",
                      "give workers more time to drain, or take a pool that is interrupted less")  # fmt: skip


def _costly(seen: Seen) -> Iterator[Finding]:
    cost = seen.job.status.cost
    if cost is None:
        return
    saved = number(cost.saved_versus_on_demand) or 0.0
    words = f"{decimal(cost.accumulated, 2)} so far, {decimal(cost.per_hour, 2)} an hour now"
    yield Finding(
        "costly", words + (f"; on-demand nodes would have cost {saved:.2f} more" if saved > 0 else "")
    )


def _plan(seen: Seen) -> Iterator[Finding]:
    status = seen.job.status
    if status.plan is None or not status.plan.reason:
        return
    why, help_ = status.plan.reason, ""
    ready = status.condition("PlanReady")
    if ready is not None and ready.reason == "NotFeasible" and not status.finished:
        why, help_ = ready.message, _remedy(ready.reason, ready.message)
    yield Finding("plan", f"{status.plan.summary or 'no workers'}: {why}", help_)
    deadline = seen.job.spec.elasticity.objective.deadline_seconds
    if deadline is None or status.plan.finish_time is None or status.start_time is None or status.finished:
        return
    late = (status.plan.finish_time - status.start_time).total_seconds() - deadline
    if late >= FINISH_SECONDS:
        yield Finding(
            "plan",
            f"it is expected {duration(late)} after its deadline",
            "more pools, more nodes in them, or a later deadline",
        )


def _goal(seen: Seen) -> Iterator[Finding]:
    stop, training = seen.job.spec.training.stop_after, seen.job.status.training
    if seen.job.status.finished or not training.step or stop.metric is None or stop.value is None:
        return
    if stop.epochs or stop.steps:
        return
    falls = StopAfter(metric=stop.metric, value=stop.value, mode=stop.mode).direction == "Min"
    evaluated = stop.metric if stop.metric.startswith("val_") else f"val_{stop.metric}"
    now = training.metrics.get(evaluated)
    so_far = f"; after {count(training.epoch, 'epoch')} it is {now}" if now else ", and was not evaluated yet"
    yield Finding(
        "plan",
        f"training ends when {evaluated} {'falls' if falls else 'rises'} to {stop.value:.15g}{so_far}",
        f"shoal history {seen.job.metadata.name} shows whether it still moves; stopAfter.epochs, in a new job, ends "
        "training in any case",
    )


def _data(seen: Seen) -> Iterator[Finding]:
    data = seen.job.status.data
    if words := seen.job.spec.training.short_epoch(data.total):
        yield Finding("data", words, "a smaller training.batchSize, in a new job")
    shorter = "docs/guarantees.md says when; a shorter snapshot interval makes them fewer"
    if data.repeated:
        yield Finding(
            "data",
            f"{data.repeated:,} samples were trained twice, after the loss of a parameter server",
            shorter,
        )
    if data.partial:
        yield Finding(
            "data",
            f"{data.partial:,} samples were trained on some shards only, after the loss of a server, or of a worker "
            "in a push",
            shorter,
        )
    if data.lost:
        yield Finding(
            "data",
            f"{data.lost:,} samples were left out: their loss or gradient was not finite, and on_nan says so",
            f"shoal logs {seen.job.metadata.name} names the batches of a rollback; look for what is not finite in the "
            "data, or lower the learning rate (docs/keras.md)",
        )


RULES: tuple[Callable[[Seen], Iterable[Finding]], ...] = (
    _nobody_watches, _suspended, _nobody_works, _queued, _conditions, _pending, _not_training, _slow, _costly, _plan,
    _goal, _data,
)  # fmt: skip
