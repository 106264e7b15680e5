"""Unequal workers: the batch size follows the accelerator, and the weight of a push follows the batch."""

import csv
from pathlib import Path

import keras
import numpy as np
import pytest

from shoal_trainer.contract import AcceleratorBatch
from shoal_trainer.data.source import Part
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.damping import Damped
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.wire.messages import ModelSpec, PushMeta
from shoal_trainer.worker.flat_model import FlatModel
from shoal_trainer.worker.hardware import (
    accelerators_of,
    catalogue_name,
    cores,
    device_name,
    equipment,
    fitted,
    shared_by,
)
from shoal_trainer.worker.loop import End
from shoal_trainer.worker.optimizers import place
from tests.unit.trainer.configs import pod_config
from tests.unit.trainer.ps.shards import push_to
from tests.unit.trainer.worker.fakes import FakeCoordinator, Servers
from tests.unit.trainer.worker.models import DATA, functional, job
from tests.unit.trainer.worker.running import Running, on_host

RATE, REFERENCE = 0.5, 8


def config(*sizes):
    given = tuple(AcceleratorBatch(accelerator=name, batch_size=size) for name, size in sizes)
    return pod_config(batch_size=32, batch_sizes=given)


@pytest.mark.parametrize(
    ("device", "size"),
    [
        ("Tesla T4", 16),
        ("NVIDIA A100-SXM4-80GB", 256),
        ("NVIDIA A100-SXM4-40GB", 128),
        ("NVIDIA A10", 64),  # whole words match, not prefixes
        ("NVIDIA H200", 32),
        ("CPU", 4),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 8),
        ("NVIDIA A100-SXM4-40GB MIG 2g.10gb", 32),  # none for this part, and that of the card would not fit
    ],
)
def test_first_matching_accelerator_entry_decides(device, size):
    sizes = (("A100 1g-5gb", 8), ("T4", 16), ("a100 80GB", 256), ("A100", 128), ("A10", 64), ("CPU", 4))
    found = fitted(config(*sizes), device)
    assert (found.batch_size, found.reference_batch_size or found.batch_size) == (size, 32)
    assert fitted(found, device) == found


@pytest.mark.parametrize(
    "device",
    [
        "NVIDIA H200", "NVIDIA H100 PCIe", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "NVIDIA A100-SXM4-40GB",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "CPU",
    ],
)  # fmt: skip
def test_the_name_that_shoal_gives_an_accelerator_matches_it(device):
    assert fitted(config((catalogue_name(device), 512)), device).batch_size == 512


def test_config_without_entries_is_unchanged():
    assert fitted(config(), device_name()) == config()


def test_worker_whose_device_matches_no_entry_says_so(caplog):
    caplog.set_level("INFO")
    fitted(config(), "NVIDIA L4")
    assert not caplog.text
    fitted(config(("T4", 64)), "NVIDIA L4")
    assert "none of batchSizes (T4) matches NVIDIA L4 (L4): batches of 32" in caplog.text


def test_a_limit_caps_the_cores_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: range(8))
    assert cores(0, tmp_path) == 8
    (tmp_path / "cpu.max").write_text("6400000 100000")
    assert cores(0, tmp_path) == 8
    (tmp_path / "cpu.max").write_text("150000 100000")
    assert cores(0, tmp_path) == 1.5


def test_the_share_of_a_limited_node_is_what_its_pool_says(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: range(8))
    (tmp_path / "cpu.max").write_text("200000 100000")
    assert cores(0.3, tmp_path) == 0.3
    assert cores(4, tmp_path) == 2.0


def test_processes_share_cores_unless_configured(monkeypatch):
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    monkeypatch.setattr("shoal_trainer.worker.hardware.cores", lambda _node: 6.0)
    assert [shared_by(n)["TF_NUM_INTRAOP_THREADS"] for n in (1, 2, 4, 100)] == ["6", "3", "1", "1"]
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "5")
    assert shared_by(2) == {"TF_NUM_INTRAOP_THREADS": "5"}


@pytest.mark.parametrize(
    ("gpus", "workers", "visible", "divided"),
    [
        (0, 3, None, [None] * 3),
        (1, 2, None, ["0", "0"]),
        (2, 3, None, ["0", "1", "0"]),
        (4, 2, None, ["0,2", "1,3"]),
        (11, 10, None, ["0,10", *map(str, range(1, 10))]),
        (4, 2, "2,GPU-7", ["2", "GPU-7"]),
        (4, 2, "", [None] * 2),
    ],
)
def test_local_workers_divide_the_gpus_or_share_them(tmp_path, gpus, workers, visible, divided):
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(gpus))):
        (tmp_path / name).touch()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = [accelerators_of(index, workers, tmp_path, environment) for index in range(workers)]
    assert [each.get("CUDA_VISIBLE_DEVICES") for each in found] == divided
    assert {each.get("TF_FORCE_GPU_ALLOW_GROWTH") for each in found} == {"true" if divided[0] else None}


def gradients(size, start):
    """The model, placement and update of a worker for the batch of `size` samples at `start`."""
    batch = next(iter(DATA.read(Part(start, start + size), size)))
    flat_model = FlatModel(functional(keras.optimizers.SGD(RATE)), batch, "fp32")
    placement = place(flat_model.model, flat_model.layout, REFERENCE)
    flat = aligned(flat_model.layout.size)
    flat[:] = flat_model.initial()
    return flat_model, placement, flat_model.step(flat_model.vector.alias(flat), batch).update.copy()


@on_host  # it pushes by hand, from the host's memory
def test_unequal_workers_move_by_the_mean_over_all_samples():
    """HetSeq's update for (8, 16): sum of s_i mean_i / sum of s_i, at the learning rate of 24 samples."""
    flat_model, placement, small = gradients(8, 0)
    _, _, large = gradients(16, 8)
    _, _, together = gradients(24, 0)
    np.testing.assert_allclose((8 * small + 16 * large) / 24, together, atol=1e-6)

    shard = ShardStore(0, 1, 0)
    model = ModelSpec(fingerprint="0" * 64, parameters=flat_model.layout.size, optimizer=placement.config)
    for slot in (0, 1):
        shard.workers.connect(slot, 0)
        shard.hello(slot, 0, model)
    shard.offer(0, 0, flat_model.initial())
    base = shard.history.version
    for slot, (samples, update) in enumerate(((8, small), (16, large))):
        io = aligned(update.size)
        io[:] = update
        push_to(shard, slot, 0, 1, base, PushMeta(samples=samples), io)
    expected = flat_model.initial() - RATE * (24 / REFERENCE) * together
    np.testing.assert_allclose(io, expected, atol=1e-6)


@pytest.mark.nightly
def test_workers_with_different_batch_sizes_share_a_job(tmp_path):
    halves = (FakeCoordinator(240, size=48, tasks=()), FakeCoordinator(480, size=48, start=240, tasks=()))
    servers = Servers(tmp_path)
    servers.stores[0].damping.apply = lambda *_: Damped(1.0, 1.0)  # before staleness
    pushed = []

    def applied(push):
        pushed.append((push.slot, push.meta.samples, push.weight))
        halves[push.slot].on_applied(push)

    servers.stores[0].on_applied = applied
    try:
        workers = [
            Running(job(), servers, halves[slot], slot=slot, batch_size=size, reference_batch_size=REFERENCE)
            for slot, size in enumerate((8, 16))
        ]
        for worker in workers:
            worker.start()
        assert [worker.join() for worker in workers] == [End.FINISHED] * 2
    finally:
        servers.close()
    assert {(slot, samples) for slot, samples, _ in pushed} == {(0, 8), (1, 16)}
    for _, samples, weight in pushed:
        assert weight == pytest.approx(samples / REFERENCE)


SHEETS = Path(__file__).parents[4] / "operator/shoal/sizing/accelerators.csv"


def test_devices_have_the_names_of_the_operators_catalogue():
    """The trainer may not import it; every name and alias in it is found by the words of a driver's name."""
    for row in csv.DictReader(SHEETS.read_text().splitlines()):
        for name in (row["name"], *(row["aliases"] or "").split()):
            assert catalogue_name(name) == row["name"], name


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H200", "H200-141GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000-Blackwell-SE"),
        ("NVIDIA GeForce RTX 3090", "GeForce-RTX-3090"),
        ("NVIDIA A10", "A10"),
        ("GPU", "GPU"),
        ("", "GPU"),
        ("x" * 200, "x" * 63),
        ("CPU", "CPU"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "A100-40GB-MIG-1g-5gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "H100-80GB-MIG-1g-10gb"),
        ("x" * 200 + " MIG 1g.10gb", "x" * 51 + "-MIG-1g-10gb"),
    ],
)
def test_driver_names_become_names_of_the_catalogue(driver, name):
    assert catalogue_name(driver) == name


def test_a_worker_without_an_accelerator_is_one_device_with_its_cores():
    found = equipment(device_name(), 1, 4, precision="float32")
    assert found == ("CPU", "CPU", 1, cores(), 4, "float32")
