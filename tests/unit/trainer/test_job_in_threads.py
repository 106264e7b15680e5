"""A whole job in this process: real servers, control plane, workers and TensorFlow, on loopback, with real faults.

Accuracy with a worker lost, another drained and the parameter server lost twice is within the spread of five clean
runs.
"""

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from shoal_trainer import Indexed, Training
from shoal_trainer.coordinator.http import ControlServer
from shoal_trainer.termination.termination_log import TERMINATION_LOG_ENV
from tests.unit.trainer.threads import Job

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
EPOCHS, BATCH, WORKERS = 8, 16, 3
IMAGES, LABELS = load_digits(return_X_y=True)
X, X_TEST, Y, Y_TEST = train_test_split(
    (IMAGES / 16).astype(np.float32), LABELS, test_size=0.2, stratify=LABELS, random_state=0
)


def model():
    import keras

    built = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")]
    )
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    built.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return built


def digits(folder, seed, *, kind=Job, epochs=EPOCHS):
    """A job on the digits with one parameter server, and no worker yet."""
    training = Training(
        model=model,
        data=Indexed.from_arrays(X, Y, seed=seed),
        validation=Indexed.from_arrays(X_TEST, Y_TEST),
        seed=seed,
    )
    return kind(folder, training, epochs=epochs, batch_size=BATCH, snapshot_seconds=1)


@pytest.fixture
def run(tmp_path, monkeypatch):
    jobs = []

    def start(seed):
        folder = tmp_path / f"run{len(jobs)}"
        folder.mkdir()
        monkeypatch.setenv(TERMINATION_LOG_ENV, str(folder / "termination"))
        job = digits(folder, seed)
        jobs.append(job)
        for slot in range(WORKERS):
            job.start_worker(slot)
        return job

    yield start
    for job in jobs:
        job.stop()


@pytest.fixture
def control_servers(monkeypatch):
    """The control servers of the job, each as a pair: the server, and a function that starts another at its port."""
    servers = []

    def open_port(*arguments, **options):
        server = ControlServer(*arguments, **options)
        servers.append((server, lambda: open_port(*arguments, **options).start()))
        return server

    monkeypatch.setattr("shoal_trainer.serve.ControlServer", open_port)
    yield servers
    for server, _ in servers:
        server.close()


@pytest.mark.nightly
def test_job_without_its_control_port_trains_on_and_counts_each_sample_once(control_servers, run):
    job = run(0)
    coordinator, loops = job.coordinator, [worker.loop for worker, *_ in job.workers.values()]
    job.wait(lambda: job.samples > len(X))
    control, reopen = control_servers[0]
    control.close()
    job.wait(lambda: not any(loop._leases.held() for loop in loops))
    assert coordinator.finished is None
    assert [loop.upstream.outage for loop in loops] == [None] * WORKERS  # the data port answers
    reopen()
    message = job.finish()
    assert message.samples == EPOCHS * len(X)
    assert (message.ranges.repeated, message.ranges.partial, message.ranges.never) == (0, 0, 0)
    assert (message.data.repeated, message.data.partial, message.data.lost) == (0, 0, 0)
    assert message.wasted_steps == 0


@pytest.mark.nightly
def test_accuracy_with_faults_is_within_the_spread_of_clean_runs(run):
    clean = [run(seed).finish() for seed in range(5)]
    accuracies = [message.metrics["val_accuracy"] for message in clean]
    for message in clean:
        assert message.samples == EPOCHS * len(X)
        assert (message.ranges.repeated, message.ranges.partial, message.ranges.never) == (0, 0, 0)
        assert (message.data.repeated, message.data.partial, message.data.lost) == (0, 0, 0)

    job = run(5)
    share = EPOCHS * len(X) // 8
    job.wait(lambda: job.samples > share)
    job.vanish(0)
    job.wait(lambda: job.samples > 2 * share)
    job.kill_server()
    job.wait(lambda: job.samples > 4 * share)
    job.drain(1)
    job.wait(lambda: job.samples > 5 * share)
    job.kill_server()
    faulty = job.finish()

    spread = max(accuracies) - min(accuracies)
    assert faulty.metrics["val_accuracy"] >= min(accuracies) - max(spread, 0.01), (accuracies, faulty)
    assert faulty.ranges.never == 0
    assert faulty.data.lost == 0
    assert faulty.samples == EPOCHS * len(X) + faulty.data.repeated
    assert (job.folder / "storage" / "test" / "digits" / job.folder.name / "model" / "manifest.json").exists()
