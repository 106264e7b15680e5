"""The speed of one worker: transfer between accelerators, and updates from a running job."""

import numpy as np
import pandas as pd
import pytest

from shoal.errors import NotEnoughData, UsageError
from shoal.sizing.predict.worker_speed import WorkerSpeed
from shoal.sizing.speed.measurements import Model

COEFFICIENTS = {"T4": (0.010, 4e12, 3e-4), "A100": (0.004, 16e12, 1.2e-4)}


def step(features: Model, accelerator: str, batch: float = 64) -> float:
    constant, rate, launch = COEFFICIENTS[accelerator]
    return constant + 3 * features.flops * batch / rate + launch * features.tensors


def models(count: int, seed: int = 0) -> list[Model]:
    rng = np.random.default_rng(seed)
    return [
        Model(f"m{i}", 10.0 ** rng.uniform(8, 10), int(10 ** rng.uniform(5, 8)), int(rng.integers(20, 400)))
        for i in range(count)
    ]  # fmt: skip


def row(model: str, accelerator: str, f: Model, seconds: float, batch: float = 64) -> dict[str, object]:
    return {
        "model": model, "accelerator": accelerator, "flops": f.flops, "params": float(f.parameters),
        "num_tensors": float(f.tensors), "batch_size": batch, "measured": 1 / seconds,
    }  # fmt: skip


def table(count: int, accelerators: tuple[str, ...], noise: float = 0.03, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        row(f.fingerprint, a, f, step(f, a) * float(np.exp(rng.normal(0, noise))))
        for f in models(count, seed)
        for a in accelerators
    )


NEW = Model("new", 2e9, 5_000_000, 150)


def test_accelerator_with_rows_has_own_fit() -> None:
    speed = WorkerSpeed().fit(table(20, ("T4", "A100")))
    for accelerator in COEFFICIENTS:
        found = speed.step_seconds(NEW, accelerator, 64)
        assert found.mean == pytest.approx(step(NEW, accelerator), rel=0.05)
        assert found.low <= step(NEW, accelerator) <= found.high
    assert speed.notes_ == []


def test_accelerator_without_rows_is_transferred_and_corrected() -> None:
    rows = table(20, ("T4", "A100"))
    known, new = rows[rows["accelerator"] == "T4"], rows[rows["accelerator"] != "T4"]
    carried = WorkerSpeed().fit(known).step_seconds(NEW, "A100", 64)
    corrected = WorkerSpeed().fit(pd.concat([known, new[:3]])).step_seconds(NEW, "A100", 64)
    truth = step(NEW, "A100")
    assert carried.low <= truth <= carried.high
    assert abs(np.log(corrected.mean / truth)) < abs(np.log(carried.mean / truth))
    assert carried.high / carried.low > 1.5


def test_own_measurements_outweigh_features() -> None:
    rows = table(15, ("T4",))
    before = WorkerSpeed().fit(rows).step_seconds(NEW, "T4", 64)
    slow = 1.5 * step(NEW, "T4")  # this model is slower than its features say
    own = pd.DataFrame([row("new", "T4", NEW, slow)] * 20)
    speed = WorkerSpeed().fit(pd.concat([rows, own], ignore_index=True))
    after = speed.step_seconds(NEW, "T4", 64)
    assert abs(after.mean / slow - 1) < 0.1 < abs(before.mean / slow - 1)
    other = Model("other", 2e9, 5_000_000, 150)
    assert speed.step_seconds(other, "T4", 64).mean < 0.9 * slow


def test_single_row_gives_wide_interval_and_note() -> None:
    speed = WorkerSpeed().fit(pd.DataFrame([row("m", "T4", models(1)[0], 0.2)]))
    found = speed.step_seconds(NEW, "A100", 64)
    assert 0 < found.low < found.mean < found.high < np.inf
    assert found.high / found.low > 2
    assert "measured with 1 model only" in " ".join(speed.notes_)


def test_varying_cpu_cores_are_a_feature() -> None:
    rng = np.random.default_rng(1)
    rows = pd.DataFrame(
        row(f.fingerprint, "T4", f, step(f, "T4") + 64 / cores * 0.004) | {"cpu_cores": cores}
        for f, cores in zip(models(40), rng.choice([1.0, 2.0, 4.0, 8.0], 40), strict=True)
    )
    speed = WorkerSpeed().fit(rows)
    few, many = (speed.step_seconds(NEW, "T4", 64, cores).mean for cores in (1, 8))
    assert few - many == pytest.approx(64 * 0.004 * (1 - 1 / 8), rel=0.15)


def test_of_too_many_configurations_the_same_are_fitted_in_whatever_order_they_come() -> None:
    """The same row was predicted as 604, 1,038 or 802 steps/s, by the order of the table."""
    rng = np.random.default_rng(0)
    rows = pd.DataFrame(
        {
            "model": f"m{number}",
            "accelerator": device,
            "flops": 1e9 * (1 + number),
            "params": 1e6 * (1 + number),
            "num_tensors": 20 + number,
            "batch_size": float(batch),
            "measured": 1 / (0.01 * (1 + number) * batch / 64 * np.exp(0.1 * rng.standard_normal())),
        }
        for number in range(4)
        for device in ("T4", "V100")
        for batch in range(8, 88)
    )
    asked, found = rows.iloc[[0, 79, 80, 639]], []
    for seed in range(2):
        fitted = WorkerSpeed().fit(rows.sample(frac=1, random_state=seed))
        found.append(fitted.predict(asked))
        assert "40 of 640 configurations are left out: 600 are fitted" in fitted.notes_
    np.testing.assert_allclose(found[0], found[1], rtol=1e-3)


def test_missing_or_invalid_measurements_raise_error() -> None:
    with pytest.raises(NotEnoughData, match="call fit"):
        WorkerSpeed().step_seconds(NEW, "T4")
    with pytest.raises(UsageError, match="not in the catalogue"):
        WorkerSpeed().fit(pd.DataFrame([row("m", "abacus", NEW, 1.0)]))
    with pytest.raises(UsageError, match="number above 0"):
        Model("m", 0, 1, 1)


def test_batch_size_is_refused_where_none_was_measured() -> None:
    """Before, the same model was predicted 44 times too fast without a word."""
    plain = WorkerSpeed().fit(table(15, ("T4",)).drop(columns="batch_size"))
    with pytest.raises(UsageError, match="leave batch_size out"):
        plain.step_seconds(NEW, "T4", 128)
    with pytest.raises(UsageError, match="give the batch_size"):
        WorkerSpeed().fit(table(15, ("T4",))).step_seconds(NEW, "T4")
    assert plain.step_seconds(NEW, "T4").mean == pytest.approx(step(NEW, "T4"), rel=0.1)


def test_interval_widens_far_from_what_was_measured() -> None:
    """Before, BERT had the interval of a small convolutional network: 4.64 to 6.25 s, and no note."""
    speed = WorkerSpeed().fit(table(16, ("T4", "A100")))
    near = speed.step_seconds(NEW, "T4", 64)
    far = speed.step_seconds(Model("llm", 1e12, 7_000_000_000, 300), "T4", 64)
    assert np.log(far.high / far.low) > 2 * np.log(near.high / near.low)
