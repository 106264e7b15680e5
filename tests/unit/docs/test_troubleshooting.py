"""docs/reasons.md lists the reasons that the operator knows: of losses, and of Degraded. Each has its advice."""

from __future__ import annotations

import re

from shoal.client.explain import remedies
from shoal.policy.facts.losses import LOSSES
from shoal.policy.facts.signals import CONDITIONS, DISRUPTION_REASONS, EVICTED_BY_KUEUE, TAINTS, Meaning
from tests.unit.docs.pages import ROOT, read, section


def test_disruption_reasons_are_documented() -> None:
    text = section(read("docs/reasons.md"), "Reasons of losses")
    signals = [*TAINTS.values(), *CONDITIONS.values()]
    reasons = {signal.reason for signal in signals if signal.meaning >= Meaning.LEAVING}
    reasons |= DISRUPTION_REASONS | {EVICTED_BY_KUEUE}
    assert {reason for reason in reasons if f"`{reason}`" not in text} == set()


def test_the_reasons_of_losses_are_those_of_the_page() -> None:
    """A series of each begins at 0: see the metrics of jobs."""
    text = section(read("docs/reasons.md"), "Reasons of losses")
    listed = "".join(each for each in text.split("\n\n") if each.startswith("- "))
    assert set(re.findall(r"`([A-Z][A-Za-z]+)`", listed)) == LOSSES


def test_reasons_of_degraded_are_documented() -> None:
    """Those that the code of the policies names; a few of them are of other conditions, which the page has too."""
    code = "".join(path.read_text() for path in (ROOT / "operator/shoal/policy").rglob("*.py"))
    reasons = set(re.findall(r'Reason\(\s*"([A-Z][A-Za-z]+)"', code))
    assert len(reasons) > 20
    assert {reason for reason in reasons if f"`{reason}`" not in read("docs/reasons.md")} == set()


def told() -> dict[str, str]:
    """What the page says of each condition that is True."""
    conditions = section(read("docs/reasons.md"), "Conditions").split("\n- ")
    return {
        each.split("`")[1]: each.partition("`True`: ")[2].partition("`False`:")[0] for each in conditions[1:]
    }


def test_each_reason_that_has_advice_is_listed() -> None:
    pages = read("docs/troubleshooting.md") + read("docs/troubleshooting-running.md")
    advised = re.findall(r"`(Degraded|Stalled|Failed): ([A-Z][A-Za-z]+)`", pages)
    assert len(advised) > 25
    assert [(kind, reason) for kind, reason in advised if f"`{reason}`" not in told()[kind]] == []


def test_each_reason_of_a_job_in_trouble_has_advice() -> None:
    """On the page, from which `shoal explain` has it."""
    reasons = {
        reason
        for kind in ("Degraded", "QuotaExceeded", "Stalled", "Failed")
        for reason in re.findall(r"`([A-Z][A-Za-z]+)`", told()[kind].partition("\n\n")[0])
    } - {"Failed"}  # the name of the condition
    failures = (
        section(read("docs/reasons.md"), "Reasons of losses").partition("**failure**")[2].partition("\n\n")[0]
    )
    reasons |= set(re.findall(r"`([A-Z][A-Za-z]+)`", failures))
    assert len(reasons) > 35
    assert sorted(reasons - remedies().keys()) == []
    advice = [words for told in remedies().values() for words in told.values()]
    assert not [words for words in advice if set("`*[]") & set(words)]


def test_in_advice_name_is_the_job() -> None:
    """`shoal explain` prints its name there: a pod, a node and a claim have other ones."""
    advice = "\n".join(words for told in remedies().values() for words in told.values())
    before = re.findall(r"(\S+ \S+) NAME\b", advice)
    assert before
    assert [words for words in before if not re.fullmatch(r"shoal \w+|(get|describe) etj", words)] == []
