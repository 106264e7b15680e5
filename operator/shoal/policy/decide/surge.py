"""Several incarnations of one place are active, because a replacement was created early: which of them stays."""

from __future__ import annotations

from dataclasses import replace

from shoal.api.labels import Place
from shoal.api.training_job_status import Slot
from shoal.policy.decide.counters import Counters
from shoal.policy.decide.members import SILENT, TAKEN_BACK, Member
from shoal.policy.facts.read import Facts
from shoal.policy.facts.verdict import PodOutcome, Verdict


def settle(members: list[Member], facts: Facts, counters: Counters) -> list[Member]:
    """Choose one of several active incarnations: a worker that was silent or had a notice, and its replacements.

    The newest stays if it runs, otherwise the oldest that is not silent. Later ones are taken back; earlier ones are
    deleted once the chosen one runs.
    """
    active = [each for each in members if each.active]
    if len(active) < 2:
        return members
    newest = active[-1]
    chosen = (
        newest if newest.running else next((each for each in active if each.slot.state != "Silent"), newest)
    )
    leaving: dict[Place, Slot] = {}
    for each in active:
        if each.place > chosen.place:
            leaving[each.place] = _draining(each.slot, TAKEN_BACK, facts)
        elif each.place < chosen.place and chosen.running:
            assert each.pod is not None
            counters.lost(each.slot, each.pod.metadata.name, Verdict(PodOutcome.LEAVING, SILENT))
            leaving[each.place] = _draining(each.slot, SILENT, facts)
    return [
        replace(each, slot=leaving[each.place], recorded=False) if each.place in leaving else each
        for each in members
    ]


def _draining(slot: Slot, cause: str, facts: Facts) -> Slot:
    update = {"cause": cause, "state": "Draining", "ran": slot.has_run, "ended_at": facts.now}
    return slot.model_copy(update=update)
