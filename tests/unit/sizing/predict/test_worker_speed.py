"""The speed of one worker: transfer between accelerators, and updates from a running job."""

import numpy as np
import pandas as pd
import pytest

from shoal.errors import NotEnoughData, UsageError
from shoal.sizing.accelerators import catalogue
from shoal.sizing.predict.worker_speed import Measurement, WorkerSpeed
from shoal.sizing.types import ModelFeatures

COEFFICIENTS = {"T4": (0.010, 4e12, 3e-4), "A100": (0.004, 16e12, 1.2e-4)}


def step(features: ModelFeatures, accelerator: str, batch: float = 64) -> float:
    constant, rate, launch = COEFFICIENTS[accelerator]
    return constant + 3 * features.flops_per_sample * batch / rate + launch * features.tensors


def models(count: int, seed: int = 0) -> list[ModelFeatures]:
    rng = np.random.default_rng(seed)
    return [
        ModelFeatures(10.0 ** rng.uniform(8, 10), int(10 ** rng.uniform(5, 8)), int(rng.integers(20, 400)), f"m{i}")
        for i in range(count)
    ]  # fmt: skip


def table(count: int, accelerators: tuple[str, ...], noise: float = 0.03, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        Measurement(f.fingerprint, a, f, step(f, a) * float(np.exp(rng.normal(0, noise))), 64).row()
        for f in models(count, seed)
        for a in accelerators
    )


NEW = ModelFeatures(2e9, 5_000_000, 150, "new")


def test_accelerator_with_rows_has_own_fit() -> None:
    speed = WorkerSpeed().fit(table(20, ("T4", "A100")))
    for accelerator in COEFFICIENTS:
        found = speed.step_seconds(NEW, accelerator, 64)
        assert found.mean == pytest.approx(step(NEW, accelerator), rel=0.05)
        assert found.low <= step(NEW, accelerator) <= found.high
    assert speed.notes == []


def test_accelerator_without_rows_is_transferred_and_corrected() -> None:
    rows = table(20, ("T4", "A100"))
    known, new = rows[rows["accelerator"] == "T4"], rows[rows["accelerator"] != "T4"]
    carried = WorkerSpeed().fit(known).step_seconds(NEW, "A100", 64)
    corrected = WorkerSpeed().fit(pd.concat([known, new[:3]])).step_seconds(NEW, "A100", 64)
    truth = step(NEW, "A100")
    assert carried.low <= truth <= carried.high
    assert abs(np.log(corrected.mean / truth)) < abs(np.log(carried.mean / truth))
    assert carried.high / carried.low > 1.5


def test_speed_up_between_data_sheets_is_symmetric() -> None:
    up, down = catalogue().speed_up("T4", "A100"), catalogue().speed_up("A100", "T4")
    assert up.arithmetic * down.arithmetic == pytest.approx(1)
    assert up.overhead * down.overhead == pytest.approx(1)
    assert up.overhead <= up.arithmetic
    assert catalogue().speed_up("K80", "Tesla-K80").sigma == 0


def test_measurements_of_running_job_correct_its_prediction() -> None:
    speed = WorkerSpeed().fit(table(15, ("T4",)))
    before = speed.step_seconds(NEW, "T4", 64)
    slow = 1.5 * step(NEW, "T4")  # this model is slower than its features say
    for second in range(20):
        speed.add(Measurement("new", "T4", NEW, slow, 64, at_seconds=float(second)))
    after = speed.step_seconds(NEW, "T4", 64)
    assert abs(after.mean / slow - 1) < 0.1 < abs(before.mean / slow - 1)
    other = ModelFeatures(2e9, 5_000_000, 150, "other")
    assert speed.step_seconds(other, "T4", 64).mean < 0.9 * slow


def test_recent_measurements_weigh_more() -> None:
    rows = table(15, ("T4",)).assign(at_seconds=0.0)
    speeds = {}
    for half_life in (None, 600.0):
        speed = WorkerSpeed(half_life=half_life).fit(rows)
        for n in range(10):
            speed.add(Measurement("new", "T4", NEW, 1.0, 64, at_seconds=float(n)))
        for n in range(10):
            speed.add(Measurement("new", "T4", NEW, 2.0, 64, at_seconds=36_000.0 + n))
        speeds[half_life] = speed.step_seconds(NEW, "T4", 64).mean
    assert speeds[600.0] == pytest.approx(2.0, rel=0.1)
    assert speeds[None] < 1.7


def test_single_row_gives_wide_interval_and_note() -> None:
    speed = WorkerSpeed().add(Measurement("m", "T4", models(1)[0], 0.2, 64))
    found = speed.step_seconds(NEW, "A100", 64)
    assert 0 < found.low < found.mean < found.high < np.inf
    assert found.high / found.low > 2
    assert "measured with 1 model only" in " ".join(speed.notes)


def test_varying_cpu_cores_are_a_feature() -> None:
    rng = np.random.default_rng(1)
    rows = pd.DataFrame(
        Measurement(f.fingerprint, "T4", f, step(f, "T4") + 64 / cores * 0.004, 64, cores).row()
        for f, cores in zip(models(40), rng.choice([1.0, 2.0, 4.0, 8.0], 40), strict=True)
    )
    speed = WorkerSpeed().fit(rows)
    few, many = (speed.step_seconds(NEW, "T4", 64, cores).mean for cores in (1, 8))
    assert few - many == pytest.approx(64 * 0.004 * (1 - 1 / 8), rel=0.15)


def test_missing_or_invalid_measurements_raise_error() -> None:
    with pytest.raises(NotEnoughData, match="call fit or add"):
        WorkerSpeed().step_seconds(NEW, "T4")
    with pytest.raises(UsageError, match="positive number of seconds"):
        WorkerSpeed().add(Measurement("m", "T4", NEW, float("nan"), 64))
    with pytest.raises(UsageError, match="not in the catalogue"):
        WorkerSpeed().add(Measurement("m", "abacus", NEW, 1.0, 64))
    with pytest.raises(UsageError, match="positive number"):
        ModelFeatures(0, 1, 1)
