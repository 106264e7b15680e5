"""The report is complete and deterministic, and an invalid folder writes nothing."""

import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from shoal.cli import main

DATA = Path(__file__).parents[3] / "data" / "cmdare"


@pytest.mark.timeout(240)  # it computes every table of the page
def test_report_compares_with_published_regressors(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        main, ["predict", "report", "--data", str(DATA), "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    page = (tmp_path / "out" / "predictor.md").read_text()
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "predictor.md",
        "predictor-worker-speed.png",
        "predictor-cluster-speed.png",
        "predictor-checkpoint.png",
    }
    for line in (
        "| **ours** | 32 |",
        "| SVR RBF, C_m, per accelerator | 32 |",
        "| sum of the measured workers",
    ):
        assert line in page
    assert (tmp_path / "out" / "predictor-checkpoint.png").read_bytes().startswith(b"\x89PNG")
    kept = (Path(__file__).parents[4] / "docs" / "benchmarks" / "predictor.md").read_text()
    number = r"\d+\.?\d*"
    assert re.sub(number, "#", page) == re.sub(number, "#", kept), (
        "run `shoal predict report`: the page is old"
    )
    figures = [[float(found) for found in re.findall(number, text)] for text in (page, kept)]
    assert figures[0] == pytest.approx(figures[1], rel=0.02)


def test_invalid_folder_leaves_no_partial_files(tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    shutil.copytree(DATA, data)
    (data / "checkpoint_models.csv").write_text("model,params,num_tensors\na,1,1\n")
    result = CliRunner().invoke(main, ["predict", "report", "--data", str(data), "--out", str(out)])
    assert result.exit_code == 2
    assert "no column total_s" in result.output
    assert not out.exists()
    (data / "checkpoint_models.csv").unlink()
    result = CliRunner().invoke(main, ["predict", "report", "--data", str(data), "--out", str(out)])
    assert "has no checkpoint_models.csv" in result.output
