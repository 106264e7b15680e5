"""Convergence and the time of snapshots: known truth and invalid input."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import NotEnoughData, UsageError
from shoal.sizing.predict.convergence import LossCurve
from shoal.sizing.predict.durations import SnapshotTime


def curve(steps: np.ndarray, workers: float = 1) -> np.ndarray:
    return 1500 * np.sqrt(workers) / (steps + 900) + 0.5


class TestConvergence:
    def test_steps_to_a_target(self) -> None:
        rng = np.random.default_rng(0)
        steps = np.arange(50, 4000, 50)
        losses = curve(steps) * np.exp(rng.normal(0, 0.02, len(steps)))
        losses[::17] *= 3  # a spike now and then
        answer = LossCurve().fit(steps, losses).steps_to(0.7)
        truth = 1500 / 0.2 - 900 - steps[-1]
        assert answer.reachable
        assert answer.steps is not None
        assert answer.steps.low <= truth <= answer.steps.high
        assert answer.steps.mean == pytest.approx(truth, rel=0.35)

    def test_more_workers_need_more_steps(self) -> None:
        steps = np.arange(50, 4000, 50)
        fit = LossCurve().fit(steps, curve(steps, 4), workers=4)
        one, four = (fit.steps_to(0.8, workers=n, done=0).steps for n in (1, 4))
        assert one is not None
        assert four is not None
        assert four.mean == pytest.approx(1500 * 2 / 0.3 - 900, rel=0.05)
        assert one.mean < four.mean

    def test_unreachable_or_distant_target_is_reported(self) -> None:
        steps = np.arange(50, 4000, 50)
        fit = LossCurve().fit(steps, curve(steps))
        low = fit.steps_to(0.4)
        assert (low.reachable, low.steps) == (False, None)
        assert "levels off at 0.5" in low.note
        done = fit.steps_to(2.0).steps
        assert done is not None
        assert done.mean == 0
        assert "bound" in fit.steps_to(0.501).note
        with pytest.raises(UsageError, match="must be a number"):
            fit.steps_to(float("nan"))

    def test_too_few_losses(self) -> None:
        with pytest.raises(NotEnoughData, match="known at 3 steps"):
            LossCurve().fit([1, 2, 3, 4], [3, 2, 1, float("nan")])
        with pytest.raises(UsageError, match="as many losses"):
            LossCurve().fit([1, 2], [1])

    @pytest.mark.timeout(300)
    @settings(max_examples=6, deadline=None)
    @given(st.integers(0, 1000), st.sampled_from(["flat", "rising", "noise", "negative"]))
    def test_arbitrary_losses_give_finite_answers(self, seed: int, kind: str) -> None:
        rng = np.random.default_rng(seed)
        steps = np.arange(1, 40)
        losses = {
            "flat": np.full(39, 2.0),
            "rising": steps * 0.1,
            "noise": np.abs(rng.standard_cauchy(39)),
            "negative": -np.log(steps + 1.0),
        }[kind]
        fit = LossCurve().fit(steps, losses)
        for target in (-5.0, 0.0, 1.0):
            answer = fit.steps_to(target)
            if answer.steps is not None:
                assert 0 <= answer.steps.low <= answer.steps.mean <= answer.steps.high < 1e6


class TestDurations:
    def test_few_snapshots_widen_interval(self) -> None:
        rows = pd.DataFrame({"model": ["a"], "params": [1e6], "num_tensors": [10.0], "measured": [2.0]})
        fit = SnapshotTime().fit(rows)
        low, mean, high = fit.predict(rows)[0]
        assert 0 < low < mean < high
        assert mean == pytest.approx(2.0, rel=0.1)
        assert high / low > 1.15
        assert fit.notes
        with pytest.raises(NotEnoughData):
            SnapshotTime().predict(rows)
