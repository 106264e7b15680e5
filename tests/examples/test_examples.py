"""Every example passes `shoal-trainer check` and learns; the shortest also runs as processes, as in the README."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import s3fs
import yaml
from click.testing import CliRunner
from moto.server import ThreadedMotoServer

from dev.paths import ROOT
from shoal.api.capacity_pool import CapacityPool
from shoal.api.training_job import TrainingJob
from shoal.cli import main as shoal
from shoal_trainer.contract import StopAfter
from shoal_trainer.training import as_training
from shoal_trainer.worker.rehearsal import Rehearsal
from tests.unit.docs.pages import alike, block

EXAMPLES = ROOT / "examples"
# Keras' h5 files with this numpy.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

JOBS: dict[str, tuple[int, Callable[[dict[str, list[float]]], bool]]] = {
    "quickstart/quickstart.py": (5, lambda seen: seen["accuracy"][-1] > 0.85),
    "parquet/flowers.py": (8, lambda seen: seen["val_accuracy"][-1] > 0.8),
    "inputs/patients.py": (20, lambda seen: seen["severe_accuracy"][-1] > 0.65),
    "text/reviews.py": (2, lambda seen: seen["val_accuracy"][-1] > 0.9),
    "language/lm.py": (1, lambda seen: seen["val_accuracy"][-1] > 0.15),
    "custom_step/autoencoder.py": (10, lambda seen: seen["loss"][-1] < 0.75 * seen["loss"][0]),
    "digits/digits.py": (2, lambda seen: seen["val_accuracy"][-1] > 0.8),
}
"""File -> (epochs, what was learned, from Keras' history)."""
SLOW = {"language/lm.py", "parquet/flowers.py", "custom_step/autoencoder.py", "inputs/patients.py"}
EACH = [pytest.param(file, marks=[pytest.mark.nightly] * (file in SLOW), id=file) for file in JOBS]


@pytest.fixture
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of an example, imported as from its folder."""
    file = EXAMPLES / request.param
    monkeypatch.syspath_prepend(str(file.parent))
    yield importlib.import_module(file.stem)
    sys.modules.pop(file.stem)


def test_every_python_example_is_here() -> None:
    files = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py")}
    others = {"digits/train.py", "sizing/plan.py"}  # one line (job.fit), and no job
    assert files - others == set(JOBS)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("module", EACH, indirect=True)
def test_a_cluster_would_take_it(module: Any) -> None:
    rehearsal = Rehearsal(
        f"{module.__name__}:job", {}, batch_size=16, stop_after=StopAfter(epochs=1), workers=2,
        folder=Path(module.__file__).parent,
    )  # fmt: skip
    rehearsal.run()
    assert [finding for finding in rehearsal.findings if finding.state == "error"] == []


@pytest.mark.by_day(1)
@pytest.mark.parametrize("module", EACH, indirect=True)
def test_it_learns(module: Any) -> None:
    file = str(Path(module.__file__).relative_to(EXAMPLES))
    epochs, learned = JOBS[file]
    job = as_training(module.job, {}, file)
    model = job.fit(epochs=epochs, batch_size=16, verbose=0)
    assert learned(model.history.history), model.history.history


def test_the_readme_job_runs_as_processes(tmp_path: Path) -> None:
    words = ["run", "quickstart.py", "--workers", "2", "--epochs", "1", "--storage", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "shoal_trainer.cli", *words],
        cwd=EXAMPLES / "quickstart", capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "data: every sample was trained exactly once" in done.stdout
    assert "Epoch 1/1  loss" in done.stdout


def test_the_plan_is_the_one_that_the_page_shows() -> None:
    [command] = block("docs/sizing.md", "python examples/sizing/plan.py").commands
    _, script = command.line.split()
    done = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.fullmatch(alike(command.shown, "number", "age", "space"), done.stdout), done.stdout


@pytest.mark.nightly
def test_two_servers_keep_the_run_in_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command in examples/s3/job.yaml, against an S3 server on loopback."""
    text = (EXAMPLES / "s3/job.yaml").read_text(encoding="utf-8")
    [words] = re.findall(r"shoal-trainer (run .*)", text)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        bucket = s3fs.S3FileSystem(skip_instance_cache=True)
        bucket.mkdir("bucket")
        done = subprocess.run(
            [sys.executable, "-m", "shoal_trainer.cli", *words.replace("BUCKET", "bucket").split(), "--epochs", "1"],
            cwd=EXAMPLES.parent, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "data: every sample was trained exactly once" in done.stdout
        kept = bucket.find("bucket/runs")
    finally:
        server.stop()
    assert [name for name in kept if name.endswith("model/model.keras")]
    shards = {found[1] for name in kept if (found := re.search(r"/snapshots/.*shard-?(\d+)", name))}
    assert shards == {"0", "1"}, kept


@pytest.mark.parametrize("platform", ["gke", "eks"])
def test_the_job_with_a_deadline_has_a_plan(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command in the head of examples/pools/job.yaml; tests/virtual plays the job."""
    [words] = re.findall(
        r"^#   shoal (plan .*)", (EXAMPLES / "pools/job.yaml").read_text(encoding="utf-8"), re.MULTILINE
    )
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(shoal, [*words.replace("gke.yaml", f"{platform}.yaml").split(), "-o", "json"])
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    [job] = documents("pools/job.yaml")
    objective = job["spec"]["elasticity"]["objective"]
    assert 0 < plan["timeSeconds"] <= objective["deadlineSeconds"]
    assert 0 < plan["cost"] <= objective["maxCost"]
    assert plan["deadlineKept"] >= 0.95


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text(encoding="utf-8")))


@pytest.mark.parametrize("platform", ["gke", "eks"])
def test_manifests_are_of_this_api(platform: str) -> None:
    pools = [CapacityPool.model_validate(each) for each in documents(f"pools/{platform}.yaml")]
    [job] = [TrainingJob.model_validate(each) for each in documents("pools/job.yaml")]
    assert set(job.spec.workers.pools) == {pool.metadata.name for pool in pools}
    [custom] = documents("pools/kustomization.yaml")
    assert set(custom["resources"]) == {"gke.yaml", "job.yaml"}
