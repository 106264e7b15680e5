"""A job leaves the pool that is too slow for it, though it is not sure that the next one is fast enough, or slower."""

from __future__ import annotations

import pytest

from shoal_trainer.contract import ModelReport
from tests.virtual.hidden import HiddenJob, HiddenPool, Scenario
from tests.virtual.hidden_story import Story

SLOW = HiddenPool("slow", "T4", spot=True, limit=3, price=0.2, boot=20.0, pull=20.0)
FAST = HiddenPool("fast", "V100", spot=False, limit=3, price=2.5, boot=20.0, pull=20.0)
MODEL = ModelReport(fingerprint="cd" * 32, parameters=3_000_000, tensors=60, flops_per_sample=2e9)
SOON = 240.0
"""Seconds: two to start and be measured, one to plan, and one in which the plan holds."""


@pytest.mark.nightly
def test_job_that_was_measured_waits_for_no_measurement_that_never_comes() -> None:
    """Where it runs teaches nothing more of where it is to move: it stood there for ten minutes, and was late."""
    steps = {"T4": 0.5, "V100": 0.14}
    job = HiddenJob("job", 0.0, MODEL, batch=128, samples=4.6e6, workers=3, deadline=2100, seconds=steps)
    told = Story(Scenario(1, (SLOW, FAST), (job,), ()), kills=False).play()
    assert not told.broken
    first = next(change for change in told.changes if "fast" in change.after)
    assert set(first.before) == {"slow"}
    assert first.at < SOON
    assert told.seconds[job.name] < job.deadline


@pytest.mark.nightly
def test_job_that_is_late_wherever_it_was_measured_finds_the_pool_that_is_fast_enough() -> None:
    """The data sheets say that a T4 is slower than an L4; for this model it is not."""
    near = HiddenPool("near", "L4", spot=True, limit=6, price=0.28, boot=20.0, pull=20.0)
    steady = HiddenPool("steady", "L4", spot=False, limit=6, price=0.8, boot=20.0, pull=20.0)
    other = HiddenPool("other", "T4", spot=True, limit=6, price=0.3, boot=20.0, pull=20.0)
    steps = {"L4": 0.5, "T4": 0.2}
    job = HiddenJob("job", 0.0, MODEL, batch=128, samples=4.6e6, workers=4, deadline=3600, seconds=steps)
    told = Story(Scenario(1, (near, other, steady), (job,), ()), kills=False).play()
    assert not told.broken
    assert next(change.after["other"] for change in told.changes if "other" in change.after) == 1
    assert told.seconds[job.name] < job.deadline
