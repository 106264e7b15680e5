"""docs/reasons.md lists the reasons that the operator knows: of losses, and of Degraded."""

from __future__ import annotations

import re

from shoal.policy.facts.signals import CONDITIONS, DISRUPTION_REASONS, EVICTED_BY_KUEUE, TAINTS, Meaning
from tests.unit.docs.pages import ROOT, read, section


def test_disruption_reasons_are_documented() -> None:
    text = section(read("docs/reasons.md"), "Reasons of losses")
    signals = [*TAINTS.values(), *CONDITIONS.values()]
    reasons = {signal.reason for signal in signals if signal.meaning >= Meaning.LEAVING}
    reasons |= DISRUPTION_REASONS | {EVICTED_BY_KUEUE}
    assert {reason for reason in reasons if f"`{reason}`" not in text} == set()


def test_reasons_of_degraded_are_documented() -> None:
    """Those that the code of the policies names; a few of them are of other conditions, which the page has too."""
    code = "".join(path.read_text() for path in (ROOT / "operator/shoal/policy").rglob("*.py"))
    reasons = set(re.findall(r'Reason\(\s*"([A-Z][A-Za-z]+)"', code))
    assert len(reasons) > 20
    assert {reason for reason in reasons if f"`{reason}`" not in read("docs/reasons.md")} == set()
