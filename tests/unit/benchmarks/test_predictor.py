"""The report is complete and deterministic, and an invalid folder writes nothing."""

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from benchmarks.predictor import write_report
from benchmarks.predictor_servers import PARAMETER, TENSOR, simulated
from shoal.errors import UsageError
from shoal.sizing.accelerators import catalogue

DATA = Path(__file__).parents[2] / "data" / "cmdare"


@pytest.mark.nightly
def test_report_compares_with_published_regressors(tmp_path: Path) -> None:
    write_report(DATA, tmp_path / "out", catalogue())
    page = (tmp_path / "out" / "predictor.md").read_text()
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "predictor.md",
        "predictor-worker-speed.png",
        "predictor-cluster-speed.png",
        "predictor-checkpoint.png",
    }
    for line in (
        "| **ours** | 32 |",
        "| ridge of logarithms, same features | 32 |",
        "| SVR RBF, C_m, per accelerator | 32 |",
        "| sum of the measured workers",
    ):
        assert line in page
    assert (tmp_path / "out" / "predictor-checkpoint.png").read_bytes().startswith(b"\x89PNG")
    kept = (Path(__file__).parents[3] / "docs" / "benchmarks" / "predictor.md").read_text()
    number = r"\d+\.?\d*"
    assert re.sub(number, "#", page) == re.sub(number, "#", kept), (
        "run `python -m benchmarks.predictor`: the page is old"
    )
    figures = [[float(found) for found in re.findall(number, text)] for text in (page, kept)]
    assert figures[0] == pytest.approx(figures[1], rel=0.02)


def test_simulated_second_server_brings_at_most_a_second_capacity() -> None:
    single = pd.DataFrame([{"model": "a", "params": 5e6, "num_tensors": 100.0, "measured": 50.0}])
    rows = simulated(single, range(1, 9, 7), seed=0).set_index(["num_ps", "num_workers"])["measured"]
    assert rows[1, 1] == pytest.approx(1 / (0.02 + 100 * TENSOR + 5e6 * PARAMETER), rel=0.1)
    assert rows[1, 8] == pytest.approx(1 / (100 * TENSOR + 5e6 * PARAMETER), rel=0.1)  # the server is busy
    assert 1.1 < rows[2, 8] / rows[1, 8] < 2.05


def test_invalid_folder_leaves_no_partial_files(tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    shutil.copytree(DATA, data)
    (data / "checkpoint_models.csv").write_text("model,params,num_tensors\na,1,1\n")
    with pytest.raises(UsageError, match="no column total_s"):
        write_report(data, out, catalogue())
    assert not out.exists()
    (data / "checkpoint_models.csv").unlink()
    with pytest.raises(UsageError, match=r"has no checkpoint_models\.csv"):
        write_report(data, out, catalogue())
