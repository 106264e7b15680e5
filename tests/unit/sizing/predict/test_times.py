"""Convergence, durations, lifetimes and the whole job: known truth and invalid input."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import NotEnoughData, UsageError
from shoal.sizing.predict.convergence import LossCurve
from shoal.sizing.predict.durations import DurationHistory, SnapshotTime
from shoal.sizing.predict.end_to_end import end_to_end
from shoal.sizing.predict.lifetimes import Lifetimes, kaplan_meier
from shoal.sizing.types import Interval

DATA = Path(__file__).parents[3] / "data" / "cmdare"


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
    def test_history_outweighs_prior(self) -> None:
        seen = pd.read_csv(DATA / "startup_times.csv")
        times = seen[(seen["gpu"] == "K80") & (seen["tier"] == "preemptible")]["total_s"].to_numpy()
        assert len(times) > 10
        history = DurationHistory(300.0)
        before = history.predict()
        after = history.extend(times[:-5]).predict()
        assert before.low < 300 < before.high
        assert after.mean == pytest.approx(times.mean(), rel=0.15)
        assert after.high / after.low < before.high / before.low
        assert np.mean((after.low <= times) & (times <= after.high)) >= 0.9

    def test_invalid_durations_raise_error(self) -> None:
        with pytest.raises(UsageError, match="positive number of seconds"):
            DurationHistory(0)
        with pytest.raises(UsageError, match="positive number of seconds"):
            DurationHistory(10).add(float("inf"))

    def test_few_snapshots_widen_interval(self) -> None:
        rows = pd.DataFrame({"model": ["a"], "params": [1e6], "num_tensors": [10.0], "measured": [2.0]})
        fit = SnapshotTime().fit(rows)
        low, mean, high = fit.predict(rows)[0]
        assert 0 < low < mean < high
        assert mean == pytest.approx(2.0, rel=0.1)
        assert fit.notes
        with pytest.raises(NotEnoughData):
            SnapshotTime().predict(rows)


class TestLifetimes:
    def test_kaplan_meier_matches_hand_calculation(self) -> None:
        lost = np.array([True, False, True, True])
        times, survival = kaplan_meier(np.array([1.0, 2.0, 3.0, 4.0]), lost)
        assert times.tolist() == [1, 3, 4]
        assert survival == pytest.approx([3 / 4, 3 / 8, 0])

    def test_weibull_is_used_only_if_it_fits(self) -> None:
        rng = np.random.default_rng(0)
        lives = 3600 * 5 * rng.weibull(0.6, 300)
        fit = Lifetimes().fit(lives, np.ones(300, dtype=bool))
        assert fit.weibull is not None
        assert fit.weibull[0] == pytest.approx(0.6, rel=0.15)
        assert fit.survival(7200.0) == pytest.approx(np.mean(lives > 7200), abs=0.07)
        bimodal = np.concatenate([rng.uniform(100, 900, 150), rng.uniform(80_000, 86_400, 150)])
        other = Lifetimes().fit(bimodal, np.ones(300, dtype=bool))
        assert other.weibull is None
        assert "misses the lifetimes" in " ".join(other.notes)
        assert other.survival(1000.0) == pytest.approx(0.5, abs=0.01)

    def test_samples_follow_survival_curve(self) -> None:
        rng = np.random.default_rng(1)
        lives = rng.uniform(100, 10_000, 60)
        fit = Lifetimes().fit(lives, lives < 8000)
        drawn = fit.sample(4, 5000)
        for t in (1000.0, 5000.0):
            assert np.mean(drawn > t) == pytest.approx(float(fit.survival(t)), abs=0.03)

    def test_curve_that_ends_at_zero_is_sampled_without_warning(self) -> None:
        bimodal = np.concatenate([np.linspace(100, 900, 30), np.linspace(80_000, 86_400, 30)])
        fit = Lifetimes().fit(bimodal, np.ones(60, dtype=bool))
        drawn = fit.sample(4, 2000)
        assert fit.weibull is None
        assert drawn.min() >= 100
        assert drawn.max() <= 86_400

    def test_survival_is_conditional_on_age(self) -> None:
        lives = np.concatenate([np.full(20, 600.0), np.full(20, 86_400.0)])
        fit = Lifetimes().fit(lives, lives < 1000)
        assert fit.survival(3600.0, age=1200.0) > fit.survival(3600.0) + 0.3

    def test_simultaneous_losses_are_a_shock(self) -> None:
        ended = np.concatenate([np.full(12, 7200.0) + np.arange(12), np.full(8, 72_000.0)])
        lives, lost = ended.copy(), ended < 10_000
        fit = Lifetimes().fit(lives, lost, ended_at=ended)
        assert fit.shock_per_hour == pytest.approx(1 / 20, rel=0.05)
        assert fit.shock_share == pytest.approx(0.6)
        drawn = fit.sample(10, 4000, seed=3)
        together = np.mean((drawn < 20 * 3600).sum(axis=1) >= 4)
        assert together > 0.4

    def test_few_revocations_add_note(self) -> None:
        fit = Lifetimes(prior_per_hour=0.1).fit([3600.0] * 3, [False] * 3)
        assert "too few" in " ".join(fit.notes)
        assert 0.8 < fit.survival(3600.0) < 1
        with pytest.raises(NotEnoughData):
            Lifetimes().fit([], [])
        with pytest.raises(UsageError, match="positive number of seconds"):
            Lifetimes().fit([0.0], [True])


class TestEndToEnd:
    def test_total_time_is_sum_of_parts(self) -> None:
        exact = Interval(10_000, 10_000, 10_000)
        found = end_to_end(
            exact, Interval(9, 10, 11), workers=4, startup=Interval(60, 80, 120), revocations_per_hour=0.5,
            recovery=Interval(60, 90, 150), snapshot=Interval(4, 5, 6), snapshot_every=100, snapshot_blocks=1,
        )  # fmt: skip
        parts = found.startup + found.training + found.snapshots + found.recoveries
        assert found.total.mean == pytest.approx(parts)
        assert (found.training, found.startup, found.snapshots) == pytest.approx((1000, 80, 50))
        assert found.revocations == pytest.approx(4 * 0.5 * 1050 / 3600, rel=0.05)
        assert found.total.low < found.total.mean < found.total.high
        assert found.total.low > 950

    def test_exact_inputs_give_exact_total(self) -> None:
        one = Interval(100, 100, 100)
        assert end_to_end(one, Interval(2, 2, 2), workers=1).total == Interval(50, 50, 50)

    def test_invalid_input_raises_error(self) -> None:
        one = Interval(100, 100, 100)
        with pytest.raises(UsageError, match="at least one worker"):
            end_to_end(one, one, workers=0)
        with pytest.raises(UsageError, match="speed must be positive"):
            end_to_end(one, Interval(0, 1, 2), workers=1)
        with pytest.raises(UsageError, match="low <= mean"):
            Interval(2, 1, 3)
