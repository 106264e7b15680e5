"""What is generated is as its sources say."""

from __future__ import annotations

import json

from dev.generate import stale
from dev.remedies import remedies


def test_nothing_that_is_generated_is_stale() -> None:
    assert stale() == [], "make generate"


def test_advice_is_by_reason_and_by_the_words_that_an_entry_quotes() -> None:
    page = (
        "- `Degraded: Alone` or `Both`: why. *Do:* see\n  [there](there.md#x), or `kubectl get x`.\n"
        '- `Degraded: Alone`, and a pod "is gone": why. *Do:* make it.\n'
        "- `Suspended: Alone`, again: why. *Do:* something else.\n"
        "- **no reason**: why. *Do:* nothing.\n"
        "- `Ready=False: Cold`: why ([here](here.md)). *Do:* wait ([how](how.md)).\n"
    )
    do = "see there (docs/there.md), or kubectl get x"
    assert json.loads(remedies(page)) == {
        "Alone": {"": do, "is gone": "make it"},
        "Both": {"": do},
        "Cold": {"": "wait (docs/how.md)"},
    }
