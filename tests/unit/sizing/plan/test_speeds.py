"""The speeds of workers and parameter servers in the planner, with their uncertainty."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.api.speed_profile import SpeedProfile
from shoal.sizing.accelerators import catalogue
from shoal.sizing.plan.speeds import GUESS_SIGMA, Z90, Speeds
from shoal.sizing.predict.contention import CAP_SIGMA
from shoal.sizing.predict.worker_speed import Measurement, WorkerSpeed
from shoal.sizing.types import ModelFeatures


def row(seconds: float, batch: int = 128, accelerator: str = "K80", **more: Any) -> dict[str, Any]:
    return {"accelerator": accelerator, "batchSize": batch, "stepSeconds": f"{seconds:.6f}", **more}


def speeds(*rows: dict[str, Any]) -> Speeds:
    model = {"flopsPerSample": "5.5e8", "parameters": 1_857_722, "tensors": 104}
    profile = {"metadata": {"name": "m"}, "spec": {"model": model, "rows": list(rows)}}
    return Speeds(SpeedProfile.model_validate(profile), catalogue())


def test_one_measured_batch_size_gives_wide_interval_for_others() -> None:
    # ResNet-32 on a K80 in CM-DARE: 0.218 s for 128 samples, and 0.143 s for 32 by a fit to all models.
    found = speeds(row(0.218)).of("K80", 1, 32)
    assert found.step_seconds == pytest.approx(0.143, rel=0.1)
    assert found.sigma >= math.log(128 / 32) / (2 * Z90)
    assert "may lie between" in found.note
    # The standard deviation is of logarithms: relative to the mean the upper end would be twice as far.
    assert speeds(row(0.218)).of("K80", 1, 4096).sigma >= math.log(4096 / 128) / (2 * Z90)


def test_two_batch_sizes_determine_constant_part_of_step() -> None:
    measured = speeds(row(0.143, batch=32), row(0.218))
    between = measured.of("K80", 1, 64)
    assert between.step_seconds == pytest.approx(0.143 + (0.218 - 0.143) / 3, rel=0.02)
    assert between.sigma < 0.2
    beyond = measured.of("K80", 1, 512)
    assert beyond.step_seconds == pytest.approx(0.143 + (0.218 - 0.143) * 5, rel=0.03)
    assert beyond.sigma < 0.25


@settings(max_examples=30, deadline=None)
@given(share=st.floats(0, 1), batch=st.integers(1, 4096))
def test_interval_covers_any_share_of_work_in_step(share: float, batch: int) -> None:
    features = ModelFeatures(1e9, 1_000_000, 100, "m")
    found = WorkerSpeed().add(Measurement("m", "T4", features, 0.2, 128)).step_seconds(features, "T4", batch)
    assert found.low <= 0.2 * (share * batch / 128 + 1 - share) <= found.high


def test_accelerator_with_several_batch_sizes_shapes_other_fits() -> None:
    measured = speeds(row(0.2, batch=128, accelerator="K80"), row(0.065, batch=32, accelerator="P100"),
                      row(0.08, batch=128, accelerator="P100"))  # fmt: skip
    found = measured.of("K80", 1, 32)
    assert found.step_seconds == pytest.approx(0.2 * 0.065 / 0.08, rel=0.05)


def test_server_sigma_follows_from_measured_clusters() -> None:
    guessed = speeds(row(0.2)).servers()
    assert (guessed.sigma, guessed.measured) == (GUESS_SIGMA, 1)
    assert "not measured together" in guessed.note
    idle = speeds(row(0.2), row(0.2, workers=2), row(0.2, workers=3)).servers()
    assert CAP_SIGMA / 2 < idle.sigma <= CAP_SIGMA
    full = speeds(row(0.2), row(0.21, workers=4), row(0.4, workers=8), row(0.8, workers=16)).servers()
    assert full.sigma < idle.sigma / 2
    assert full.measured == 1
    two = speeds(row(0.2), row(0.4, workers=8), row(0.2, workers=8, parameterServers=2)).servers()
    assert two.measured == 2
