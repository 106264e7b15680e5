"""The command line as a user has it, on real nodes: code in a file, `submit --follow`, and what tells about the job."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from dev.cluster.local import LocalCluster
from dev.demo.local import Local
from dev.demo.losses import MANIFEST
from dev.images import IMAGES
from shoal_trainer.contract import EPOCH_LINE

EPOCHS = 30
"""Long enough to be seen while it runs."""
CODE = """
import keras
from keras.layers import Dense
from sklearn.datasets import load_digits

from shoal_trainer import Indexed, Training


def build():
    model = keras.Sequential([Dense(128, activation="relu"), Dense(10, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


x, y = load_digits(return_X_y=True)
print("the code of this test is running", flush=True)
job = Training(model=build, data=Indexed.from_arrays(x / 16, y))
"""


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_a_file_is_submitted_and_followed_to_its_end(
    cluster: LocalCluster, backend: Local, namespace: str, tmp_path: Path
) -> None:
    claim = next(d for d in yaml.safe_load_all(MANIFEST.read_text()) if d["kind"] == "PersistentVolumeClaim")
    cluster.plane.kubectl("-n", namespace, "apply", "-f", "-", stdin=yaml.safe_dump(claim))
    (tmp_path / "mine.py").write_text(CODE)

    def command(*words: str) -> list[str]:
        return [
            sys.executable,
            "-c",
            "from shoal.cli import main; main()",
            words[0],
            "-n",
            namespace,
            *words[1:],
        ]

    def shoal(*words: str, code: int = 0) -> str:
        done = subprocess.run(
            command(*words), env=backend.env, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    words = ["mine.py:job", "--name=mine", f"--image={IMAGES['digits'].reference}", "--workers=2"]
    words += [
        f"--storage=claim:{claim['metadata']['name']}",
        f"--epochs={EPOCHS}",
        "--batch-size=16",
        "--follow",
    ]
    with subprocess.Popen(
        command("submit", *words),
        env=backend.env,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as following:
        try:
            deadline = time.monotonic() + 600
            while "Running" not in shoal("list"):
                assert time.monotonic() < deadline, shoal("status", "mine")
                assert following.poll() is None, following.communicate()[0]
                time.sleep(0.5)
            checks = {each["name"]: each for each in json.loads(shoal("doctor", "-o", "json"))}
            log = shoal("logs", "mine", "--slot", "0", "--follow")  # ends with the worker
            said, _ = following.communicate(timeout=900)
        finally:
            following.kill()
    assert following.returncode == 0, said
    assert {name: each["state"] for name, each in checks.items() if name != "storage"} == dict.fromkeys(
        ("kubernetes", "crds", "permissions", "operator", "leader", "nodes", "pools", "coordinators"), "ok"
    )
    assert checks["coordinators"]["message"] == "mine: the operator reads parameter server 0"
    assert "3 spot nodes for workers, 1 without a spot label" in checks["nodes"]["message"]
    assert "the code of this test is running" in log
    assert "job mine was created" in said
    assert re.search(r"Running.*samples/s", said), said
    assert "the model is in file://" in said
    assert "Succeeded" in said

    rows = json.loads(shoal("history", "mine", "-o", "json"))
    assert [row["epoch"] for row in rows] == list(range(EPOCHS))
    assert rows[-1]["accuracy"] > 0.9 > rows[0]["accuracy"]
    assert EPOCH_LINE in shoal("logs", "mine", "--tail", "200")
    told = shoal("status", "mine")
    assert re.search(r"worker 0-0 runs on spot-\d", told), told
    assert str(tmp_path / "model") in shoal("model", "mine", str(tmp_path / "model"))
    assert {"model.keras", "manifest.json", "saved_model"} == {
        each.name for each in (tmp_path / "model").iterdir()
    }
    assert "mine-model-" not in cluster.plane.kubectl("-n", namespace, "get", "pods")
    assert "no pod of worker 7" in shoal("logs", "mine", "--slot", "7", code=2)
    shoal("delete", "mine", "--yes")
    assert "no jobs in the namespace" in shoal("list")
