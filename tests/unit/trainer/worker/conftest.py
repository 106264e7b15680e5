"""Starts parameter servers and closes them after the test; runs tests with the program that Keras chooses on a GPU."""

import os

import pytest

from shoal_trainer.worker import flat_model
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.xla import as_on_gpu
from tests.unit.trainer.worker.callback_cluster import Cluster
from tests.unit.trainer.worker.fakes import Servers


@pytest.fixture
def start_servers(tmp_path):
    started = []

    def make(coordinator, **options):
        servers = Servers(tmp_path / f"secret{len(started)}", coordinator, **options)
        started.append(servers)
        return servers

    yield make
    for servers in started:
        servers.close()


@pytest.fixture
def cluster(tmp_path, monkeypatch, request):
    cluster = Cluster(tmp_path, monkeypatch, validation=getattr(request, "param", False))
    yield cluster
    for plane in cluster.planes:
        plane.close()


MATRIX = {
    "test_anticipation", "test_best_weights", "test_compose", "test_embedding", "test_end_of_training",
    "test_evaluation", "test_export", "test_flat_model", "test_forward_pass", "test_gpu_program", "test_hardware",
    "test_hooks", "test_idle", "test_input_wait", "test_iterations", "test_joining", "test_keras_equivalence",
    "test_label_check", "test_learning_rate", "test_local_optimizer", "test_logits", "test_loop",
    "test_loop_data", "test_loop_outages", "test_lora", "test_losses", "test_losses_per_output",
    "test_lost_server_during_task", "test_moving_statistics", "test_non_finite", "test_overflow",
    "test_randomness", "test_refusals", "test_rounds", "test_scalar_loss", "test_skipped_statistics",
    "test_target", "test_tasks", "test_training_metrics", "test_weighing", "test_whole_step", "test_without_call",
}  # fmt: skip
"""The modules whose tests run a model: nightly both ways, because XLA compiles each model. A test that XLA cannot pass
is marked `on_host`, with its reason."""

ONE_WAY = {
    "test_check": "it tries the step of a GPU itself",
    "test_gpu_kernels": "it looks for the kernels of a GPU",
    "test_keras_hub": "of what KerasHub does, test_lora has both",
    "test_layout": "its step is that of the host",
    "test_on_device": "its tests say where they compute",
}
"""The other modules whose tests run a model, and why one way is enough. A test of any other module that traces a step
fails."""


def name_of(module):
    return module.__name__.rpartition(".")[2]


def pytest_generate_tests(metafunc):
    nightly = os.environ.get("SHOAL_NIGHTLY") and name_of(metafunc.module) in MATRIX
    chosen = any("engine" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if nightly and not chosen:
        both = ["host", pytest.param("gpu", marks=pytest.mark.nightly)]  # `make nightly` runs what is marked
        metafunc.parametrize("engine", both, indirect=True)


@pytest.fixture(autouse=True)
def engine(request, monkeypatch):
    """`gpu`: XLA as on a machine with a GPU, and parameters and updates that are not in the host's memory."""
    kind = getattr(request, "param", None)
    if kind is None and name_of(request.module) not in MATRIX | ONE_WAY.keys():

        def trace(_):
            raise AssertionError(
                f"{name_of(request.module)} runs a model: it belongs in MATRIX, or in ONE_WAY"
            )

        monkeypatch.setattr(FlatModel, "trace", trace)
    if kind != "gpu":
        yield "host"
        return
    monkeypatch.setattr(flat_model, "device_name", lambda: "a GPU")
    with as_on_gpu():
        yield kind
