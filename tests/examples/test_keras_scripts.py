"""Eight scripts as Keras users have them become jobs by the lines below, and lose a worker and their server.

They end with what plain Keras ends with, and no sample was left out or lost. docs/benchmarks/log.md counts the
lines, and has the results of larger ones.
"""

from __future__ import annotations

import ast
import csv
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from dev.paths import ROOT
from shoal_trainer.contract import Outcome, Role, StopAfter, TerminationMessage
from shoal_trainer.run.processes import LocalJob, LocalRun, tail
from tests.unit.docs.pages import read, rows, section

SCRIPTS = ROOT / "tests/data/keras_scripts"
PROGRAM = '\nif __name__ == "__main__":'
BATCH, WORKERS = 16, 2
PATIENCE = 900.0
"""Seconds for a run, on a busy machine."""


class Port(NamedTuple):
    """What is added at the top level of a script, and what is compared."""

    lines: str
    steps: int
    """Of an epoch."""
    epochs: Mapping[str, int]
    """Of each Training of the file; one after the first gets the model of the one before, as `source`."""
    metric: str = "val_accuracy"
    within: float = 0.04
    """How far from plain Keras the metric may end."""


def job(epochs: int) -> Mapping[str, int]:
    return MappingProxyType({"job": epochs})


ARRAYS = "data=(x_train, y_train), validation=(x_val, y_val)"
PORTS = {
    "images": Port("job = Training(model=build, data=train_ds, validation=val_ds)", 88, job(8)),
    "table": Port(
        "job = Training(model=build, data=(x_train, y_train, weights), validation=(x_val, y_val))",
        *(200, job(8), "val_churn_auc"),
    ),
    "text": Port("job = Training(model=build, data=train_ds, validation=val_ds)", 125, job(8)),
    "series": Port(f"job = Training(model=build, {ARRAYS}, callbacks=lambda: callbacks)", 75, job(10)),
    "gan": Port(
        "job = Training(model=build, data=x, callbacks=lambda: [SaveImages()])",
        *(100, job(6), "d_loss", 0.2),
    ),
    "transfer": Port(
        f"""\
job = Training(model=build, {ARRAYS})

def fine_tune(source):
    model = keras.models.load_model(source)
    model.get_layer("backbone").trainable = True
    model.compile(keras.optimizers.Adam(1e-4), keras.losses.SparseCategoricalCrossentropy(True), metrics=["accuracy"])
    return model

def tuning(source):
    return Training(model=lambda: fine_tune(source), data=job.data, validation=job.validation)""",
        *(88, MappingProxyType({"job": 6, "tuning": 4})),
    ),
    "language": Port(
        "job = Training(model=build, data=(x[:k], y[:k], w[:k]), validation=(x[k:], y[k:], w[k:]))",
        106,
        job(6),
    ),
    "files": Port(
        "job = Training(model=build, data=Shards(range(88)), validation=Shards(range(88, 110)))", 88, job(8)
    ),
}


def ported(name: str) -> str:
    """The script with the import and the lines of its port, and all that it had."""
    text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    imported = text.replace("import keras\n", "import keras\nfrom shoal_trainer import Training\n", 1)
    return imported.replace(PROGRAM, f"\n{PORTS[name].lines}\n{PROGRAM}", 1)


def added(name: str) -> int:
    before, after = ((SCRIPTS / f"{name}.py").read_text(encoding="utf-8"), ported(name))
    return sum(map(bool, after.splitlines())) - sum(map(bool, before.splitlines()))


def plain(script: Path) -> dict[str, list[float]]:
    """The history of the last `fit` of a script that is run as a program."""
    done = subprocess.run(
        [sys.executable, script.name], cwd=script.parent, capture_output=True, text=True, timeout=PATIENCE,
        check=True,
    )  # fmt: skip
    history: dict[str, list[float]] = ast.literal_eval(done.stdout.splitlines()[-1])
    return history


def with_losses(local: LocalJob, total: int) -> TerminationMessage:
    """Train, and kill a worker after a fifth of all steps, and the server after half of them."""
    losses = [(total // 2, Role.PS), (total // 5, Role.WORKER)]
    deadline, turn = time.monotonic() + PATIENCE, threading.Event()
    with LocalRun(local) as run:
        while (outcome := run.poll()) is None:
            assert time.monotonic() < deadline, {each.name: tail(each.log) for each in run.processes}
            report = run.status() if losses else None
            if report is not None and report.step >= losses[-1][0]:
                run.kill(losses.pop()[1])
            turn.wait(0.05)
        assert run.kills == 2, "it ended before both were lost"
        assert run.failures == 0
        with (Path(urlsplit(run.run_uri).path) / "logs/history.csv").open(encoding="utf-8") as file:
            assert len(list(csv.DictReader(file))) == outcome.epoch
    return outcome


@pytest.mark.nightly
@pytest.mark.timeout(3 * PATIENCE)
@pytest.mark.parametrize("name", PORTS)
def test_a_script_ends_as_in_keras_with_a_worker_and_its_server_lost(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, script = PORTS[name], tmp_path / f"{name}_script.py"
    script.write_text(ported(name), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *sys.path])))
    history, source = plain(script), dict[str, str]()
    for entrypoint, epochs in port.epochs.items():
        outcome = with_losses(
            LocalJob(
                f"{name}_script:{entrypoint}", workers=WORKERS, batch_size=BATCH, stop_after=StopAfter(epochs=epochs),
                args=dict(source), storage_uri=(tmp_path / "runs").as_uri(), snapshot_seconds=1, seed=0,
            ),
            port.steps * epochs,
        )  # fmt: skip
        assert outcome.outcome is Outcome.SUCCEEDED, outcome
        assert (outcome.ranges.never, outcome.data.lost) == (0, 0), outcome
        assert outcome.epoch == epochs or "a callback stopped training" in outcome.message, outcome
        source["source"] = f"{urlsplit(str(outcome.model_uri)).path}/model.keras"
    assert outcome.metrics[port.metric] == pytest.approx(history[port.metric][-1], abs=port.within)


def test_the_page_counts_the_lines() -> None:
    page = rows(section(read("docs/benchmarks/log.md"), "Eight Keras scripts"))
    told = {re.findall(r"`(\w+)`", row[0])[0]: int(row[1]) for row in page}
    assert told == {name: added(name) for name in PORTS}
