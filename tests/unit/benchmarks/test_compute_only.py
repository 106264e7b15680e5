"""Processes that compute without a parameter server."""

import pytest

from benchmarks import compute_only

ARGS = {"parameters": 1000, "milliseconds": 20}


@pytest.mark.nightly
def test_rate_is_bounded_by_the_step_and_a_dead_process_is_noticed():
    with compute_only.computing("sleeping", 4, 2, **ARGS) as found:
        assert 0 < found.system().rate(0.5) <= 2 * 50 + 4  # whole steps are counted: two more of each process
        found.children[0].kill()
        found.children[0].wait()
        with pytest.raises(RuntimeError, match="has ended"):
            found.system().steps()
    assert all(child.returncode is not None for child in found.children)
