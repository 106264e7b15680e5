"""One place, several incarnations that hold it: which of them stays."""

from __future__ import annotations

from shoal.api.training_job_status import Slot
from shoal.policy.counters import Counters
from shoal.policy.incarnations import SILENT, TAKEN_BACK, Incarnation
from shoal.policy.model import Observation
from shoal.policy.names import Place
from shoal.policy.times import whole
from shoal.policy.verdict import PodOutcome, Verdict


def settle(of: tuple[Incarnation, ...], seen: Observation, counters: Counters) -> tuple[Incarnation, ...]:
    """Several incarnations hold one place: a worker that was silent, or had a notice, and its replacements.

    The newest stays if it runs, else the oldest that is not silent. Replacements after it are taken back; those before
    it go when it runs.
    """
    holding = [h for h in of if h.staying]
    if len(holding) < 2:
        return of
    newest = holding[-1]
    stays = newest if newest.running else next((h for h in holding if h.slot.state != "Silent"), newest)
    gone: dict[Place, Slot] = {}
    for each in holding:
        if each.place > stays.place:
            gone[each.place] = _leaving(each.slot, TAKEN_BACK, seen)
        elif each.place < stays.place and stays.running:
            assert each.pod is not None
            counters.lost(each.slot, each.pod.metadata.name, Verdict(PodOutcome.LEAVING, SILENT))
            gone[each.place] = _leaving(each.slot, SILENT, seen)
    return tuple(
        Incarnation(h.place, gone[h.place], h.pod, h.verdict, settled=False) if h.place in gone else h
        for h in of
    )


def _leaving(slot: Slot, cause: str, seen: Observation) -> Slot:
    return slot.model_copy(update={"cause": cause, "state": "Draining", "ended_at": whole(seen.now)})
