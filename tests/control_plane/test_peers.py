"""The operator beside TFJob and JobSet, briefly: each system makes its jobs and replaces what it loses."""

from __future__ import annotations

import pytest

from benchmarks.operator import beside_peers
from benchmarks.operator.peers import DELETED, FAILED
from benchmarks.operator.systems import LIMITED, TUNED

# It builds the peers' controllers when they are missing.
pytestmark = pytest.mark.nightly


def test_every_system_is_measured() -> None:
    rows = {row.name: row.value for row in beside_peers(quick=True)}
    for system in ("Shoal", LIMITED, TUNED, "JobSet"):
        assert rows[f"{system}: 4 jobs of 5 pods: pods a second"] > 0
        assert 0 < rows[f"{system}: 4 jobs of 5 pods: pods a second, ratio"] < 2
        assert rows[f"{system}: resident memory, 20 pods"] > 10
        if system != LIMITED:
            assert rows[f"{system}: worker {DELETED} to CREATE: replaced of 2"] == 2
            assert rows[f"{system}: worker {FAILED} to CREATE: replaced of 2"] == 2
            assert rows[f"{system}: worker {FAILED}: writes for it"] >= 2
            assert rows[f"{system}: 4 of 8 workers lost at once: replaced within 60 s"] == 4
