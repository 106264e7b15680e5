"""Several accelerators of one worker: one step, equal to that of one device with the whole batch."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shoal.api.capacity_pool import CapacityPool
from shoal.api.labels import Place
from shoal.manifests.placement import Where
from shoal.manifests.pods import pod
from shoal.sizing.fleet.resources import fleet_pool
from shoal_trainer.contract import ACCELERATORS_ENV
from shoal_trainer.data.source import Part
from shoal_trainer.worker.hardware import equipment, promised_accelerators
from shoal_trainer.worker.several_devices import shares
from tests.unit.policy import build
from tests.unit.trainer.worker.models import DATA

ROOT = Path(__file__).parents[4]


def computed(*names):
    """The results of these cases of `several`; of all, if none is named."""
    command = [sys.executable, "-m", "tests.unit.trainer.worker.several", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.fixture(scope="module")
def one_process():
    """A process takes seconds to import TensorFlow."""
    return computed("copies", "frozen copies")


@pytest.mark.nightly
def test_devices_that_share_a_short_batch_compute_what_one_does():
    assert max(computed("weights of a part")["weights of a part"]) < 1e-5


@pytest.mark.nightly
def test_what_crosses_to_the_device_and_back_in_a_step(one_process):
    into, out = one_process["copies"]
    assert into <= 1  # a constant; the parameters and the batch are there already
    assert out == 1  # the loss with the metrics, and what is known of the update, which stays there


@pytest.mark.nightly
def test_frozen_weights_are_on_each_device_once_however_many_shapes_there_are(one_process):
    assert one_process["frozen copies"] == [
        2,
        2,
    ]  # on the second and the third; the first has the variable itself


@pytest.mark.nightly
def test_devices_compute_what_one_does_or_what_mirrored_strategy_does():
    found = computed()
    for name in ("drawn", "overflow", "fallback", "norm", "mirrored", "whole worker"):
        assert name in found
    differences = {
        name: value for name, value in found.items() if isinstance(value, list) and len(value) == 3
    }
    del differences["overflow"]
    assert len(differences) == 14
    assert found["not finite"] == [False, True]
    for name, value in differences.items():
        assert max(value) < 1e-5, name
    of_thirds, of_the_first = found["norm"]
    assert of_thirds < 1e-6 < of_the_first
    assert found["mirrored"] < 1e-6
    assert found["ramp"] == found["accumulated ramp"] == [3, 4]
    assert all(found["drawn"].values()), found["drawn"]
    skipped, first, last = found["overflow"]
    assert (first, last) == (True, False)
    assert 1 < skipped < 24
    *state, said = found["fallback"]
    assert state == [1, 1, 1, 1, 1, True, True]
    assert "variables that Keras does not know" in said[0]
    assert "its optimizer runs on the worker, and scales the loss" in said[1]
    assert "one of this worker's accelerators: the model has a custom train_step" in said[2]
    assert "variables that Keras does not know" in said[3]
    assert "one of this worker's accelerators: keras.remat or a tf.custom_gradient uses" in said[-1]
    assert found["whole worker"] == ["FINISHED", DATA.size, 3, 2]


@pytest.mark.parametrize(("samples", "size", "devices"), [(16, 16, 4), (10, 16, 3), (1, 5, 5), (16, 16, 1)])
def test_shares_are_the_batch(samples, size, devices):
    batch = next(iter(DATA.read(Part(0, samples), size)))
    found = list(shares(batch, devices))
    np.testing.assert_array_equal(np.concatenate([x for x, *_ in found]), batch.x)
    assert sum(int(n) for *_, n, _, _ in found) == samples
    sizes = [len(x) for x, *_ in found]
    assert max(sizes) - min(sizes) <= 1
    for _, _, weights, n, whole, real in found:  # as `Batch` scales them: by the rows over the real ones
        np.testing.assert_allclose(weights[:n], len(weights) / n if n else 0)
        assert not weights[n:].any()
        assert whole == pytest.approx(size / len(weights))
        assert real == pytest.approx(samples / size)


def test_planner_telemetry_and_trainer_mean_the_same_by_a_number_of_devices(monkeypatch):
    """A pool's `accelerator.count` accelerators are one worker, which divides its batch among them."""
    spec = {
        "accelerator": {"name": "A100-40GB", "count": 4},
        "capacityType": "Spot",
        "zone": "a",
        "limits": {"nodes": 1},
    }
    pool = CapacityPool.model_validate({"metadata": {"name": "pool"}, "spec": spec})
    made = pod(build.job(), Place("worker", 0, 0), build.IMAGES, Where("Spot", pool))
    (container,) = made["spec"]["containers"]
    (told,) = (each["value"] for each in container["env"] if each["name"] == ACCELERATORS_ENV)
    monkeypatch.setenv(ACCELERATORS_ENV, told)
    promised = promised_accelerators()  # a worker that sees fewer ends
    batch = next(iter(DATA.read(Part(0, 64), 64)))
    assert fleet_pool(pool).devices == promised == 4
    assert equipment("NVIDIA A100-SXM4-40GB", promised, 1)[::2][:2] == ("A100-40GB", 4)
    assert {len(x) for x, *_ in shares(batch, promised)} == {16}
