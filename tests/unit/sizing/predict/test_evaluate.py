"""`shoal predict evaluate` on public, synthetic and invalid measurements."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from scipy import stats

from shoal.cli import main
from shoal.errors import UsageError
from shoal.sizing.predict.tables import read_csv

DATA = Path(__file__).parents[3] / "data" / "cmdare"
WORKERS, CLUSTERS, MODELS = DATA / "worker_speed.csv", DATA / "cluster_speed.csv", DATA / "models.csv"


def run(*arguments: Any, code: int = 0) -> Any:
    result = CliRunner().invoke(main, ["predict", "evaluate", *map(str, arguments)])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return json.loads(result.stdout) if "--json" in arguments and code == 0 else result.output


def of_workers(*arguments: Any) -> Any:
    return run("--target", "worker-speed", "--json", *arguments)


def assert_interval_is_honest(found: Any) -> None:
    """0.90 lies in the 95 % interval of the coverage, each model counting once (its rows are not independent)."""
    models = len({row["model"] for row in found["rows"]})
    bounds = stats.binomtest(round(found["coverage90"] * models), models).proportion_ci(0.95)
    assert bounds.low <= 0.9 <= bounds.high


def test_worker_speed_of_unseen_models() -> None:
    found = of_workers("--train", WORKERS, "--leave-one-model-out")
    assert set(found) >= {"target", "n", "mape", "mae", "coverage90", "by_accelerator", "rows"}
    assert set(found["rows"][0]) == {"model", "accelerator", "measured", "predicted", "low", "high"}
    assert (found["target"], found["n"], set(found["by_accelerator"])) == (
        "worker-speed",
        32,
        {"K80", "P100"},
    )
    assert found["mape"] <= 5.5
    assert_interval_is_honest(found)


def test_worker_speed_of_unseen_accelerator() -> None:
    found = of_workers("--train", WORKERS, "--new-accelerator", "P100")
    assert found["n"] == 16
    assert found["mape"] <= 10
    assert "never measured" in " ".join(found["notes"])


def test_result_is_independent_of_row_order() -> None:
    assert of_workers("--train", WORKERS, "--new-accelerator", "nvidia-tesla-k80")["mape"] <= 10


def test_cluster_speed_of_unseen_models() -> None:
    common = (
        "--target",
        "cluster-speed",
        "--train",
        CLUSTERS,
        "--models",
        MODELS,
        "--leave-one-model-out",
        "--json",
    )
    found = run(*common, "--models", WORKERS)
    assert found["n"] == 64
    assert found["mape"] <= 8.5
    assert_interval_is_honest(found)
    # Without a file of worker speeds, one worker's speed is an input and not scored.
    given = run(*common)
    assert given["n"] == 56
    assert given["mape"] <= 8.5
    assert "taken as given" in " ".join(given["notes"])


def test_cluster_speed_of_unseen_accelerator_ignores_its_single_workers(tmp_path: Path) -> None:
    workers = pd.read_csv(WORKERS)[["model", "gpu", "step_time_mean_s"]]
    predicted = []
    for factor in (1, 3):
        file = tmp_path / f"{factor}.csv"
        workers.assign(
            step_time_mean_s=workers["step_time_mean_s"] * np.where(workers["gpu"] == "P100", factor, 1)
        ).to_csv(file, index=False)
        found = run(
            "--target", "cluster-speed", "--train", CLUSTERS, "--models", MODELS, "--models", file,
            "--new-accelerator", "P100", "--json",
        )  # fmt: skip
        predicted.append([row["predicted"] for row in found["rows"]])
    assert predicted[0] == predicted[1]


def test_single_workers_of_test_models_add_note(tmp_path: Path) -> None:
    rows = pd.read_csv(CLUSTERS)
    test = rows["model"] == rows["model"].iloc[0]
    rows[test].to_csv(tmp_path / "test.csv", index=False)
    rows[~test].to_csv(tmp_path / "train.csv", index=False)
    common = (
        "--target",
        "cluster-speed",
        "--train",
        tmp_path / "train.csv",
        "--test",
        tmp_path / "test.csv",
        "--json",
    )
    assert "were fitted" not in " ".join(run(*common, "--models", MODELS)["notes"])
    alone = run(*common, "--models", MODELS, "--models", WORKERS)
    assert f"{test.sum()} of {test.sum()} rows are of models that were fitted" in " ".join(alone["notes"])


def test_checkpoint_time_of_unseen_models() -> None:
    found = run(
        "--target", "checkpoint", "--train", DATA / "checkpoint_models.csv", "--leave-one-model-out", "--json"
    )
    assert found["n"] == 16
    assert found["mape"] <= 7
    assert_interval_is_honest(found)


def test_evaluation_on_test_file_prints_table(tmp_path: Path) -> None:
    rows = pd.read_csv(WORKERS)
    held = rows["model"].isin(rows["model"].unique()[-3:])
    rows[~held].to_csv(tmp_path / "train.csv", index=False)
    # Other names for the same columns, and features from another file.
    test = rows[held].rename(columns={"gpu": "accelerator", "step_time_mean_s": "step_time_s"})
    test[["model", "accelerator", "step_time_s"]].to_csv(tmp_path / "test.csv", index=False)
    table = run(
        "--target", "worker-speed", "--train", tmp_path / "train.csv", "--models", MODELS,
        "--test", tmp_path / "test.csv",
    )  # fmt: skip
    assert [line.split()[:2] for line in table.splitlines()[1:]] == [
        ["K80", "3"],
        ["P100", "3"],
        ["all", "6"],
    ]


def test_rows_of_fitted_models_add_note(tmp_path: Path) -> None:
    rows = pd.read_csv(WORKERS)
    known = rows["model"].isin(rows["model"].unique()[:13])
    rows[known].to_csv(tmp_path / "train.csv", index=False)
    rows[~known].to_csv(tmp_path / "new.csv", index=False)
    seen = " ".join(of_workers("--train", tmp_path / "train.csv", "--test", WORKERS)["notes"])
    assert "26 of 32 rows are of models that were fitted: they do not test" in seen
    new = of_workers("--train", tmp_path / "train.csv", "--test", tmp_path / "new.csv")
    assert "memory" not in " ".join(new["notes"])


def test_features_come_from_first_file_with_model(tmp_path: Path) -> None:
    models = pd.read_csv(MODELS)
    models[:9].assign(params=np.where(models.index[:9] == 3, np.nan, models["params"][:9])).to_csv(
        tmp_path / "a.csv", index=False
    )
    models[3:].to_csv(tmp_path / "b.csv", index=False)
    pd.read_csv(WORKERS)[["model", "gpu", "step_time_mean_s"]].to_csv(tmp_path / "rows.csv", index=False)
    common = ("--train", tmp_path / "rows.csv", "--leave-one-model-out")
    parts = of_workers(*common, "--models", tmp_path / "a.csv", "--models", tmp_path / "b.csv")
    assert parts["rows"] == of_workers(*common, "--models", MODELS)["rows"]
    output = run(
        "--target", "worker-speed", *common, "--models", tmp_path / "a.csv", "--models", tmp_path / "a.csv", code=2
    )  # fmt: skip
    assert "have no row for the model" in " ".join(output.split())


def synthetic(seed: int, models: int = 260) -> pd.DataFrame:
    """Two accelerators, batches of several sizes, a deviation of each model's own, noise."""
    rng = np.random.default_rng(seed)
    rows = []
    for model in range(models):
        flops, tensors, params = 10 ** rng.uniform(8, 10.5), rng.integers(20, 400), 10 ** rng.uniform(5, 8)
        own = rng.normal(0, 0.04)
        for gpu, peak, launch in (("T4", 4e12, 4e-4), ("A100", 15e12, 2e-4)):
            for batch in rng.choice([32, 64, 128, 256], 2, replace=False):
                step = 0.01 + 3 * flops * batch / peak + launch * tensors
                speed = np.exp(own + rng.normal(0, 0.06)) / step
                rows.append((f"m{model}", gpu, flops, params, tensors, batch, speed))
    names = ["model", "gpu", "flops", "params", "num_tensors", "batch_size", "steps_per_s"]
    return pd.DataFrame(rows, columns=names)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1])
def test_interval_covers_ninety_percent_of_rows(tmp_path: Path, seed: int) -> None:
    synthetic(seed).to_csv(tmp_path / "rows.csv", index=False)
    found = of_workers("--train", tmp_path / "rows.csv", "--leave-one-model-out")
    assert found["n"] >= 1000
    assert 0.88 <= found["coverage90"] <= 0.92
    assert found["mape"] < 8


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r.drop(columns="num_tensors"), "no column num_tensors"),
        (lambda r: r.drop(columns="model"), "no column model"),
        (lambda r: r.drop(columns="gpu"), "no column accelerator or gpu"),
        (lambda r: r[["model", "gpu", "flops", "params", "num_tensors"]], "no column steps_per_s"),
        (lambda r: r.assign(flops=np.where(r.index == 4, np.nan, r["flops"])), "line 6: flops is nan"),
        (lambda r: r.assign(steps_per_s_mean=0), "line 2: steps_per_s_mean is 0"),
        (lambda r: r.assign(steps_per_s_mean=-1.0), "greater than 0"),
        (lambda r: r.assign(steps_per_s_mean=np.inf), "greater than 0"),
        (lambda r: r.assign(params="many"), "params is many"),
        (lambda r: r.assign(gpu="X9000"), "'X9000' is not in the catalogue"),
        (lambda r: r.assign(model=np.where(r.index == 1, None, r["model"])), "line 3: model is empty"),
        (lambda r: r[:2], "measurements of 2 models"),
        (lambda r: r[:0], "has no rows"),
    ],
)
def test_invalid_file_raises_error(tmp_path: Path, change: Any, says: str) -> None:
    change(pd.read_csv(WORKERS)).to_csv(tmp_path / "bad.csv", index=False)
    output = run("--target", "worker-speed", "--train", tmp_path / "bad.csv", "--leave-one-model-out", code=2)
    assert says in output


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda lines: [lines[0], *(line + "," for line in lines[1:])],
            "line 2 has 16 values for 15 columns",
        ),
        (lambda lines: [*lines[:4], lines[4] + ",7", *lines[5:]], "line 5 has 16 values for 15 columns"),
        (
            lambda lines: [line + ",x" if i else line + ", model" for i, line in enumerate(lines)],
            "model 2 times",
        ),
        (lambda lines: [*lines[:3], lines[3][:9] + "\0" + lines[3][9:], *lines[4:]], "line 4 has a NUL byte"),
    ],
)
def test_a_file_that_would_be_read_as_another_one_is_refused_in_a_line(
    tmp_path: Path, change: Any, says: str
) -> None:
    """A comma at the end of the rows moved all columns by one, and the answer was a traceback."""
    (tmp_path / "bad.csv").write_text("\n".join(change(WORKERS.read_text().splitlines())))
    output = run("--target", "worker-speed", "--train", tmp_path / "bad.csv", "--leave-one-model-out", code=2)
    assert says in " ".join(output.split())


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
def test_a_compressed_table_is_read_as_the_table_and_a_broken_one_refused(
    tmp_path: Path, suffix: str
) -> None:
    path, rows = tmp_path / f"rows.csv.{suffix}", pd.read_csv(WORKERS)
    rows.to_csv(path, index=False)
    pd.testing.assert_frame_equal(read_csv(path), rows)
    whole = path.read_bytes()
    for broken in (whole[:-20], whole[:20] + bytes(20) + whole[40:], b"model,gpu\n"):
        path.write_bytes(broken)
        with pytest.raises(UsageError, match=r"cannot read .* as CSV"):
            read_csv(path)


def test_invalid_options_raise_error(tmp_path: Path) -> None:
    common = ("--target", "worker-speed", "--train", WORKERS)
    assert "exactly one of" in run(*common, code=2)
    assert "exactly one of" in run(*common, "--leave-one-model-out", "--new-accelerator", "K80", code=2)
    assert "no row V100" in run(*common, "--new-accelerator", "V100", code=2)
    empty = tmp_path / "empty.csv"
    empty.write_text("")
    assert "cannot read" in run("--target", "worker-speed", "--train", empty, "--leave-one-model-out", code=2)
    only = pd.read_csv(MODELS)[:1]
    only.to_csv(tmp_path / "models.csv", index=False)
    output = run(
        "--target", "cluster-speed", "--train", CLUSTERS, "--models", tmp_path / "models.csv", "--leave-one-model-out",
        code=2,
    )  # fmt: skip
    assert "no row for the model" in output


def test_three_models_add_note(tmp_path: Path) -> None:
    rows = pd.read_csv(WORKERS)
    rows[rows["model"].isin(rows["model"].unique()[:4])].to_csv(tmp_path / "few.csv", index=False)
    few = of_workers("--train", tmp_path / "few.csv", "--leave-one-model-out")
    all_ = of_workers("--train", WORKERS, "--leave-one-model-out")
    assert "only: its interval is widened" in " ".join(few["notes"])
    assert all(row["low"] > 0 and np.isfinite(row["high"]) for row in few["rows"])

    def width(found: Any) -> float:
        return float(np.median([row["high"] / row["low"] for row in found["rows"]]))

    assert width(few) > width(all_)


def test_additional_accelerators_are_used(tmp_path: Path) -> None:
    pd.read_csv(WORKERS).replace({"gpu": {"P100": "Npu-1"}}).to_csv(tmp_path / "rows.csv", index=False)
    (tmp_path / "sheets.csv").write_text(
        "name,fp32_tflops,memory_gb,bandwidth_gbs\nNpu-1,9.3,16,732\n", encoding="utf-8-sig"
    )
    found = of_workers(
        "--train",
        tmp_path / "rows.csv",
        "--new-accelerator",
        "npu-1",
        "--accelerators",
        tmp_path / "sheets.csv",
    )
    assert list(found["by_accelerator"]) == ["Npu-1"]
    (tmp_path / "sheets.csv").write_text("name,fp32_tflops\nNpu-1,fast\n")
    options = (
        "--train",
        tmp_path / "rows.csv",
        "--leave-one-model-out",
        "--accelerators",
        tmp_path / "sheets.csv",
    )
    assert "not a number" in run("--target", "worker-speed", *options, code=2)
