"""docs/troubleshooting.md lists the reasons of disruptions that the operator derives from nodes and pods."""

from __future__ import annotations

from shoal.policy.facts.signals import CONDITIONS, DISRUPTION_REASONS, EVICTED_BY_KUEUE, TAINTS, Meaning
from tests.unit.docs.pages import read, section


def test_disruption_reasons_are_documented() -> None:
    text = section(read("docs/troubleshooting.md"), "Reasons of losses")
    signals = [*TAINTS.values(), *CONDITIONS.values()]
    reasons = {signal.reason for signal in signals if signal.meaning >= Meaning.LEAVING}
    reasons |= DISRUPTION_REASONS | {EVICTED_BY_KUEUE}
    assert {reason for reason in reasons if f"`{reason}`" not in text} == set()
