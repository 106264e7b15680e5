"""Jobs are small here, and what a plan remembers of them counts all the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.policy.facts import sightings


@pytest.fixture(scope="module", autouse=True)
def remembered() -> Iterator[None]:
    """Have few workers at rest remembered as many are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sightings, "FEWEST_REMEMBERED", 1)
        yield
