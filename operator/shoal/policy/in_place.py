"""Parameter servers that were restarted by the kubelet in the same pod.

That is the quickest way back, so their restartPolicy is OnFailure; but a restart is a restart, and a server that ends
by its own fault must not go on for ever. The record remembers how many restarts of the container were counted.
"""

from __future__ import annotations

from shoal.api.kube import Pod, Terminated
from shoal.api.training_job import FailureRule
from shoal.api.training_job_status import Slot
from shoal.policy.counters import Counters
from shoal.policy.verdict import PodOutcome, judge_exit

KILLS_FORGIVEN = 3


def restarted_in_place(slot: Slot, pod: Pod, rules: list[FailureRule], counters: Counters) -> Slot:
    """Count the ends of the server's container that the record does not hold yet."""
    container = next((c for c in pod.status.container_statuses if c.name == slot.role), None)
    if container is None or pod.status.phase in {"Failed", "Succeeded"} or pod.metadata.deletion_timestamp:
        return slot
    ends = container.restart_count
    last: Terminated | None = container.last_state.terminated
    if container.state.terminated is not None and container.state.terminated.exit_code != 0:
        ends, last = ends + 1, container.state.terminated  # it ended, and is not yet started again
    elif container.state.waiting is not None and container.state.waiting.reason == "CrashLoopBackOff":
        ends += 1  # the same, and the kubelet lets it wait
    new = ends - slot.restarts
    if new <= 0:
        return slot
    counters.server_restarts += new
    if last is not None:
        verdict = judge_exit(last, slot, rules)
        if verdict.outcome is PodOutcome.FAILED or (
            verdict.outcome is PodOutcome.KILLED and ends > KILLS_FORGIVEN
        ):
            counters.failed(slot, pod.metadata.name, verdict, times=new)
    return slot.model_copy(update={"restarts": ends})
