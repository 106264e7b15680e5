"""Counts restarts of parameter servers by the kubelet in the same pod.

Their restartPolicy is OnFailure, since a restart in place is the fastest recovery. The slot records how many restarts
were counted, so that a server that fails repeatedly still reaches backoffLimit.
"""

from __future__ import annotations

from shoal.api.kube import Pod, Terminated
from shoal.api.training_job import FailureRule
from shoal.api.training_job_status import Slot
from shoal.policy.common.times import parse_time
from shoal.policy.decide.counters import Counters
from shoal.policy.facts.verdict import KILLS_TOLERATED, STEADY, PodOutcome, judge_exit


def restarted_in_place(slot: Slot, pod: Pod, rules: list[FailureRule], counters: Counters) -> Slot:
    """Count exits of the server's container that the slot does not include yet."""
    container = next((c for c in pod.status.container_statuses if c.name == slot.role), None)
    if container is None or pod.ended or pod.metadata.deletion_timestamp:
        return slot
    exits = container.restart_count
    last: Terminated | None = container.last_state.terminated
    if container.state.terminated is not None and container.state.terminated.exit_code != 0:
        exits, last = exits + 1, container.state.terminated  # not restarted yet
    elif container.state.waiting is not None and container.state.waiting.reason == "CrashLoopBackOff":
        exits += 1  # not restarted yet, because of the kubelet's back-off
    new = exits - slot.restarts
    if new <= 0:
        return slot
    counters.server_restarts += new
    if last is not None:
        verdict = judge_exit(last, slot, rules)
        soon = exits > KILLS_TOLERATED and not _was_steady(last)
        killed_repeatedly = verdict.outcome is PodOutcome.KILLED and soon
        if verdict.outcome is PodOutcome.FAILED or killed_repeatedly:
            counters.failed(slot, pod.metadata.name, verdict, times=new)
    return slot.model_copy(update={"restarts": exits})


def _was_steady(end: Terminated) -> bool:
    """Whether the container ran for long before."""
    began, ended = parse_time(end.started_at), parse_time(end.finished_at)
    return began is not None and ended is not None and ended - began >= STEADY
