"""Clusters from tables: the fit of the servers' costs, unseen models, more servers."""

import numpy as np
import pandas as pd
import pytest

from shoal.errors import NotEnoughData, UsageError
from shoal.sizing.predict.cluster_speed import ClusterSpeed, alone_speeds, series_alone
from shoal.sizing.speed.servers import PsModel, soft_min

TENSOR, PARAMETER, SHARPNESS = 1e-4, 6.4e-9, 4.0


def clusters(count: int = 8, servers: tuple[int, ...] = (1,), noise: float = 0.02) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows = []
    for m in range(count):
        params, tensors = float(10 ** rng.uniform(5.5, 7.5)), float(rng.integers(30, 300))
        flops = params * 500
        step = 0.01 + flops * 1e-11 + tensors * 2e-4
        for ps in servers:
            for n in (1, 2, 4, 8, 16):
                cap = ps / (TENSOR * tensors + PARAMETER * params)
                speed = float(soft_min(np.array([n / step]), cap, SHARPNESS)[0])
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
    fit = ClusterSpeed().fit(clusters())
    assert np.exp(fit.servers_.theta[0]) == pytest.approx(TENSOR, rel=0.2)
    assert np.exp(fit.servers_.theta[1]) == pytest.approx(PARAMETER, rel=0.2)
    assert 2.5 < fit.servers_.sharpness < 6


def test_unseen_model_and_more_servers_are_predicted() -> None:
    rows = clusters(12, (1, 2))
    held = (rows["model"] == "m3").to_numpy()
    found = ClusterSpeed().fit(rows[~held]).predict(rows[held])
    truth = rows[held]["measured"].to_numpy()
    assert found[:, 1] == pytest.approx(truth, rel=0.2)
    assert ((found[:, 0] <= truth) & (truth <= found[:, 2])).mean() >= 0.7


def test_two_servers_are_less_sure_than_the_one_that_was_measured() -> None:
    fit = ClusterSpeed().fit(clusters())
    rows = clusters(8, (1, 4))
    busy = (rows["num_workers"] == 16).to_numpy()
    found = fit.predict(rows[busy], alone_speeds(rows)[busy])
    width = np.log(found[:, 2] / found[:, 0])
    four = (rows[busy]["num_ps"] == 4).to_numpy()
    assert width[four].mean() > 1.3 * width[~four].mean()


def test_single_model_widens_interval_and_adds_note() -> None:
    fit = ClusterSpeed().fit(clusters(1))
    assert "1 models only" in " ".join(fit.notes_)
    found, several = fit.predict(clusters(2)), ClusterSpeed().fit(clusters(8)).predict(clusters(2))
    assert np.isfinite(found).all()
    assert (found > 0).all()
    truth, new = clusters(2)["measured"].to_numpy(), 5  # rows of the model that was not measured begin here
    assert ((found[:, 0] <= truth) & (truth <= found[:, 2])).mean() >= 0.8
    assert (np.log(found[new:, 2] / found[new:, 0]) > 1.4 * np.log(several[new:, 2] / several[new:, 0])).all()


def test_invalid_numbers_raise_error() -> None:
    with pytest.raises(NotEnoughData, match="at least one"):
        ClusterSpeed().fit(clusters()[:0])
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
    assert series_alone(rows) == pytest.approx([20, 6, 6, 6])
    assert alone_speeds(rows.drop(1)) is None
