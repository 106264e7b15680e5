"""An update that stays on the accelerator until it is sent, in pieces; what is made of it there is as on the host."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer.errors import HungStep
from shoal_trainer.ps.coding import coded, decode, encode
from shoal_trainer.worker import on_device
from shoal_trainer.worker.feed import Ready
from shoal_trainer.worker.loop import End
from shoal_trainer.worker.on_device import DeviceInclusion, DeviceMean, OnDevice, cut
from shoal_trainer.worker.on_host import HostInclusion, HostMean
from shoal_trainer.worker.send import Pile, length
from shoal_trainer.worker.vector import Lead
from tests.unit.trainer.worker.fakes import FakeCoordinator
from tests.unit.trainer.worker.models import DATA, functional, job
from tests.unit.trainer.worker.running import Running
from tests.unit.trainer.worker.trained import BATCHES, SGD, Server, pushed

TRAINABLE, SIZE = 101, 113
RNG = np.random.default_rng(0)
both_wires = pytest.mark.parametrize("dtype", [np.float32, np.uint16], ids=["fp32", "bf16"])


@pytest.fixture
def reader():
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(on_device, "READ_VALUES", 30)


def wire(values, dtype):
    out = coded(SIZE, TRAINABLE, dtype)
    encode(values.astype(np.float32), out, TRAINABLE)
    return out


def plain(update):
    out = np.empty(SIZE, np.float32)
    decode(np.asarray(update), out, TRAINABLE)
    return out


def on(values, reader):
    """A coded array on a device."""
    pieces = [tf.constant(piece) for piece in np.split(values, np.cumsum(cut(values.size, TRAINABLE))[:-1])]
    return OnDevice(pieces, length(values, TRAINABLE), reader)


def test_accelerator_that_does_not_give_an_update_hangs(reader, monkeypatch):
    """The exchange would wait for it for ever, and the worker for the exchange, while its heartbeats go on."""
    given = threading.Event()
    monkeypatch.setattr(on_device, "_read", lambda _tensor: given.wait(60))
    monkeypatch.setattr(on_device, "READ_SECONDS", 0.01)
    update = on(wire(RNG.normal(size=SIZE), np.float32), reader)
    with pytest.raises(HungStep, match="could not be read from the accelerator"):
        list(update.parts(0, SIZE))
    given.set()


@pytest.mark.parametrize("engine", ["gpu"], indirect=True)
def test_a_worker_whose_accelerator_gives_no_update_ends(start_servers, monkeypatch):
    given = threading.Event()
    monkeypatch.setattr(on_device, "_read", lambda _tensor: given.wait(60))
    monkeypatch.setattr(on_device, "READ_SECONDS", 0.05)
    coordinator = FakeCoordinator(DATA.size)
    running = Running(job(), start_servers(coordinator), coordinator)
    try:
        assert isinstance(running.start().join(), HungStep)
    finally:
        given.set()


def test_pieces_cover_the_gradients_and_then_the_statistics():
    assert cut(SIZE, TRAINABLE) == [30, 30, 30, 11, 12]
    assert cut(90, 90) == [30, 30, 30]
    assert cut(20, 10) == [10, 10]


@both_wires
def test_mean_is_that_of_the_host(reader, dtype):
    here, there = HostMean(SIZE, TRAINABLE), DeviceMean(None, TRAINABLE, reader)
    for _ in range(2):  # nothing is left of the push before, nor of steps that were dropped
        here.add(wire(RNG.normal(size=SIZE), dtype), 3)
        there.add(on(wire(RNG.normal(size=SIZE), dtype), reader), 3)
        for each in (here, there):
            each.clear()
        for samples in (16, 16, 5):
            update = wire(RNG.normal(size=SIZE), dtype)
            there.add(on(update, reader), samples)
            here.add(update, samples)
        expected, found = here.result(37), there.result(37)
        np.testing.assert_allclose(plain(found), plain(expected), rtol=1e-2 if dtype == np.uint16 else 1e-6)
        assert found.dtype == expected.dtype == dtype
        assert length(found, TRAINABLE) == pytest.approx(length(expected, TRAINABLE), rel=1e-3)


@pytest.mark.by_day(3)
@both_wires
@pytest.mark.parametrize(
    ("kind", "rest"), [("plain", ()), ("adam", (0.001, 0.3, 1e-7)), ("rmsprop", (0.9, 0.1, 1e-7))]
)
@pytest.mark.parametrize("xla", [False, True])
def test_parameters_with_an_update_are_those_of_the_host(reader, dtype, kind, rest, xla):
    lead = Lead(kind, TRAINABLE, tuple(map(np.float32, (-0.1, 0.5, *rest))))
    differences = [(TRAINABLE, TRAINABLE + 3), (TRAINABLE + 7, SIZE - 1)]
    here = HostInclusion(SIZE, lambda array: array, differences)
    there = DeviceInclusion(None, differences, xla=xla)
    for _ in range(3):  # second moments follow from all updates
        current, update = (wire(RNG.normal(size=SIZE), dtype) for _ in range(2))
        expected = here(plain(current), update, lead)
        found = there(tf.constant(current), on(update, reader), lead)
        assert found.numpy().dtype == dtype
        rtol, atol = (1e-2, 1e-2) if dtype == np.uint16 else (1e-4, 1e-5)
        np.testing.assert_allclose(plain(found), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("kind", "rest"), [("adam", (0.001, 0.5, 1e-7)), ("rmsprop", (0.9, 0.1, 1e-7))])
def test_gradient_that_the_servers_leave_out_is_in_no_second_moment(reader, kind, rest):
    """Its square is not finite: all later parameters of this worker would not be numbers."""
    lead = Lead(kind, 4, tuple(map(np.float32, (0.001, 1.0, *rest))))
    here, there = HostInclusion(4, lambda array: array), DeviceInclusion(None, (), xla=False)
    current = np.ones(4, np.float32)
    for value in (1.0, 3e19, 1.0):
        update = np.full(4, value, np.float32)
        found = there(tf.constant(current), OnDevice([tf.constant(update)], 1.0, reader), lead)
        np.testing.assert_allclose(found, here(current, update, lead), rtol=1e-6)
    assert 0.9 < float(found[0]) < 1


def test_a_piece_is_sent_while_the_next_is_read(reader, monkeypatch):
    values, read, go = np.arange(SIZE, dtype=np.float32), on_device._read, threading.Semaphore(0)
    monkeypatch.setattr(on_device, "_read", lambda tensor: (go.acquire(), read(tensor))[1])
    parts = on(values, reader).parts(10, SIZE)
    for start, stop in [(10, 30), (30, 60), (60, 90), (90, 101), (101, 113)]:
        go.release()
        where, found = next(parts)  # although those after it cannot be read yet
        assert where == slice(start, stop)
        assert np.array_equal(found, values[start:stop])
    assert next(parts, None) is None


def read_back(monkeypatch):
    """The bytes of each transfer to the host."""
    found, read = [], on_device._read
    monkeypatch.setattr(on_device, "_read", lambda tensor: (found.append(tensor.shape[0]), read(tensor))[1])
    return found


@pytest.mark.by_day(1)
@pytest.mark.parametrize("engine", ["gpu"], indirect=True)
@pytest.mark.parametrize("steps", [1, 4])
def test_parameters_and_update_cross_the_bus_once_for_a_push(start_servers, monkeypatch, steps):
    coordinator = FakeCoordinator(DATA.size, tasks=())
    model = lambda: functional("adam", norm=True)  # noqa: E731
    running = Running(job(model, batches_per_push=steps), start_servers(coordinator), coordinator)
    into, buffers, upload = [], running.worker.loop.upstream._buffers, running.flat_model.vector.upload
    host = [id(tensor) for tensor in buffers._tensors]

    def uploaded(tensor):
        into.append(id(tensor) in host)  # else it is there already
        return upload(tensor)

    running.flat_model.vector.upload = uploaded
    back = read_back(monkeypatch)
    assert running.start().join() is End.FINISHED
    assert coordinator.samples == DATA.size
    pushes, layout = DATA.size // 16 // steps, running.flat_model.layout
    assert coordinator.steps == [steps] * pushes
    assert back == cut(running.flat_model.wire_bytes // 2, layout.trainable) * pushes
    assert into.count(True) == pushes + 1  # each answer, and the first pull


@pytest.mark.nightly
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_push_of_several_batches_is_that_of_the_host_and_the_mean_of_single_ones(wire):
    def trained(on_host):
        server = Server(functional(SGD(0.1), norm=True, momentum=0.99), wire, on_host=on_host)
        for low in (0, 4):
            pushed(server, BATCHES[low : low + 4])
        return server.flat()

    rough = wire == "bf16"
    here, there = trained(on_host=True), trained(on_host=False)
    np.testing.assert_allclose(there, here, rtol=1e-2 if rough else 1e-4, atol=1e-2 if rough else 1e-6)
    server = Server(functional(SGD(0.1), norm=True, momentum=0.99), wire, on_host=False)
    server.take()
    steps = [np.asarray(server.flat_model.step(server.tensor, batch).update) for batch in BATCHES[:4]]
    pile = Pile(server.flat_model.mean())
    for batch in BATCHES[:4]:
        pile.add(server.flat_model.step(server.tensor, batch), Ready(None, batch))
    layout = server.flat_model.layout
    singles = [np.empty(layout.size, np.float32) for each in steps]
    for each, single in zip(steps, singles, strict=True):
        decode(each, single, layout.trainable)
    found = np.empty_like(singles[0])
    decode(np.asarray(pile.update()), found, layout.trainable)
    np.testing.assert_allclose(
        found, np.mean(singles, axis=0), rtol=1e-2 if rough else 1e-5, atol=1e-3 if rough else 1e-6
    )
