"""Several incarnations of one place are active, because a replacement was created early: which of them stays."""

from __future__ import annotations

from shoal.api.training_job_status import Slot
from shoal.policy.counters import Counters
from shoal.policy.incarnations import SILENT, TAKEN_BACK, Incarnation
from shoal.policy.model import Observation
from shoal.policy.names import Place
from shoal.policy.times import whole
from shoal.policy.verdict import PodOutcome, Verdict


def settle(
    incarnations: tuple[Incarnation, ...], seen: Observation, counters: Counters
) -> tuple[Incarnation, ...]:
    """Choose one of several active incarnations: a worker that was silent or had a notice, and its replacements.

    The newest stays if it runs, otherwise the oldest that is not silent. Later ones are taken back; earlier ones are
    deleted once the chosen one runs.
    """
    active = [each for each in incarnations if each.active]
    if len(active) < 2:
        return incarnations
    newest = active[-1]
    chosen = (
        newest if newest.running else next((each for each in active if each.slot.state != "Silent"), newest)
    )
    leaving: dict[Place, Slot] = {}
    for each in active:
        if each.place > chosen.place:
            leaving[each.place] = _draining(each.slot, TAKEN_BACK, seen)
        elif each.place < chosen.place and chosen.running:
            assert each.pod is not None
            counters.lost(each.slot, each.pod.metadata.name, Verdict(PodOutcome.LEAVING, SILENT))
            leaving[each.place] = _draining(each.slot, SILENT, seen)
    return tuple(
        Incarnation(each.place, leaving[each.place], each.pod, each.verdict, recorded=False)
        if each.place in leaving
        else each
        for each in incarnations
    )


def _draining(slot: Slot, cause: str, seen: Observation) -> Slot:
    return slot.model_copy(update={"cause": cause, "state": "Draining", "ended_at": whole(seen.now)})
