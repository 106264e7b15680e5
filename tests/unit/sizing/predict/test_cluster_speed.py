"""The sum of workers up to the parameter servers' capacity, and the fit of the cost of an update."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import NotEnoughData, UsageError
from shoal.sizing.predict.cluster_speed import cluster_samples, cluster_throughput
from shoal.sizing.predict.contention import ClusterSpeed, Contention, _series_alone, alone_speeds
from shoal.sizing.types import ModelFeatures, PsModel


def test_speeds_of_unequal_workers_add_up() -> None:
    counts = [[1, 0], [2, 3], [0, 0]]
    free = PsModel(0.0)
    assert cluster_throughput(counts, [0.5, 0.25], [32, 64], free) == pytest.approx([2, 16, 0])
    assert cluster_samples(counts, [0.5, 0.25], [32, 64], free) == pytest.approx([64, 4 * 32 + 12 * 64, 0])


@given(
    st.lists(st.integers(0, 1000), min_size=2, max_size=2),
    st.floats(1e-4, 10),
    st.floats(1, 200),
    st.integers(1, 16),
)
def test_speed_is_bounded_by_workers_and_servers(
    counts: list[int], update: float, p: float, servers: int
) -> None:
    steps = cluster_throughput([counts], [0.5, 0.1], [1, 1], PsModel(update, p), servers)[0]
    alone = counts[0] / 0.5 + counts[1] / 0.1
    assert 0 <= steps <= min(alone, servers / update) * (1 + 1e-12)
    if sum(counts):
        assert steps >= min(alone, servers / update) * 2 ** (-1 / p) * (1 - 1e-12)


def test_more_servers_raise_cap_and_infinite_sharpness_is_minimum() -> None:
    one, two = (cluster_throughput([[100]], [0.1], [1], PsModel(0.01), n)[0] for n in (1, 2))
    assert two > 1.9 * one
    assert cluster_throughput([[3]], [0.1], [1], PsModel(0.01, np.inf))[0] == pytest.approx(30)


def test_million_combinations_are_fast() -> None:
    counts = np.random.default_rng(0).integers(0, 10, (1_000_000, 5))
    assert cluster_throughput(counts, np.full(5, 0.2), np.ones(5), PsModel(0.01), 2).shape == (1_000_000,)


TRUE = Contention(1e-4, 8e-10, 4.0, 1.0)


def clusters(count: int = 8, servers: tuple[int, ...] = (1,), noise: float = 0.02) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows = []
    for m in range(count):
        params, tensors = float(10 ** rng.uniform(5.5, 7.5)), float(rng.integers(30, 300))
        flops = params * 500
        step = 0.01 + flops * 1e-11 + tensors * 2e-4
        for ps in servers:
            for n in (1, 2, 4, 8, 16):
                features = ModelFeatures(flops, params, tensors)
                speed = cluster_throughput([[n]], [step], [1], TRUE.of(features), ps)[0]
                rows.append(
                    (f"m{m}", "T4", n, ps, flops, params, tensors, 1.0, speed * np.exp(rng.normal(0, noise)))
                )
    names = [
        "model",
        "accelerator",
        "num_workers",
        "num_ps",
        "flops",
        "params",
        "num_tensors",
        "batch_size",
        "measured",
    ]
    return pd.DataFrame(rows, columns=names)


def test_fit_recovers_costs_and_sharpness() -> None:
    rows = clusters()
    alone = alone_speeds(rows)
    assert alone is not None
    found = Contention.fit(rows, alone)
    assert found.seconds_per_tensor == pytest.approx(TRUE.seconds_per_tensor, rel=0.2)
    assert found.seconds_per_byte == pytest.approx(TRUE.seconds_per_byte, rel=0.2)
    assert found.scaling == 1


def test_unseen_model_and_more_servers_are_predicted() -> None:
    rows = clusters(12, (1, 2))
    held = (rows["model"] == "m3").to_numpy()
    found = ClusterSpeed().fit(rows[~held]).predict(rows[held])
    truth = rows[held]["measured"].to_numpy()
    assert found[:, 1] == pytest.approx(truth, rel=0.2)
    assert ((found[:, 0] <= truth) & (truth <= found[:, 2])).mean() >= 0.7


def test_single_model_widens_interval_and_adds_note() -> None:
    fit = ClusterSpeed().fit(clusters(1))
    assert "1 models only" in " ".join(fit.notes)
    found = fit.predict(clusters(2))
    assert np.isfinite(found).all()
    assert (found > 0).all()
    assert (found[:, 2] / found[:, 0] > 3).all()


def test_invalid_numbers_raise_error() -> None:
    with pytest.raises(NotEnoughData, match="at least one"):
        ClusterSpeed().fit(clusters()[:0])
    with pytest.raises(UsageError, match="bandwidth"):
        PsModel.of(ModelFeatures(1, 1, 1), bandwidth=0)
    with pytest.raises(UsageError, match="sharpness"):
        PsModel(0.1, 0.5)


def test_series_of_other_batches_are_apart() -> None:
    rows = pd.DataFrame(
        {
            "model": "m",
            "accelerator": "P100",
            "num_workers": [1, 1, 2, 4],
            "batch_size": [64, 256, 256, 256],
            "measured": [20.0, 6.0, 12.0, 24.0],
        }
    )
    assert alone_speeds(rows) == pytest.approx([20, 6, 6, 6])
    assert _series_alone(rows) == pytest.approx([20, 6, 6, 6])
    assert alone_speeds(rows.drop(1)) is None
