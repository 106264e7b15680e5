"""What the parameter server's process makes of requests, without its sockets."""

import pytest

from shoal_trainer.contract import InitialFrom, JobIdentity, Role, RuntimeConfig, Shard, StopAfter
from shoal_trainer.coordinator.protocol import DataSpec, Join, TaskDone
from shoal_trainer.errors import Overtaken, Unreachable
from shoal_trainer.ps.buffers import aligned
from shoal_trainer.ps.shard import State
from shoal_trainer.security import create_secret_dir
from shoal_trainer.serve import ParameterServer
from shoal_trainer.snapshot.storage import LocalStorage
from shoal_trainer.wire.messages import ModelSpec, OptimizerConfig, Progress, PushMeta

MODEL = ModelSpec(fingerprint="0" * 64, parameters=4, optimizer=OptimizerConfig(name="delta", batch_size=2))


def config(tmp_path, *, uid="u", incarnation=0, initial_from=None):
    """Of parameter server 0."""
    if not (tmp_path / "secret").exists():
        create_secret_dir(tmp_path / "secret")
    return RuntimeConfig(
        job=JobIdentity(namespace="n", name="j", uid=uid),
        role=Role.PS,
        index=0,
        incarnation=incarnation,
        parameter_servers=(Shard(host="127.0.0.1"),),
        entrypoint="a:b",
        batch_size=2,
        stop_after=StopAfter(epochs=1),
        storage_uri=(tmp_path / "storage").as_uri(),
        initial_from=initial_from,
        secret_dir=str(tmp_path / "secret"),
    )


@pytest.fixture
def server(tmp_path):
    """Parameter server 0 of a job whose one pass of two samples is trained."""
    server = ParameterServer(config(tmp_path))
    server.shard.connect(0, 0)
    server.shard.hello(0, 0, MODEL)
    server.shard.initialize(aligned(4))
    server.desk.coordinator.join(Join(slot=0, incarnation=0, data=DataSpec(size=2), batch_size=2))
    server.desk.coordinator.next_work(0, 0)
    meta = PushMeta(samples=2, progress=(Progress(0, -1, 0, 2),))
    server.shard.delta(0, 0, 1, 0, meta, aligned(4))
    return server


def test_the_job_ends_though_the_storage_was_away_when_the_model_was_to_be_published(server, monkeypatch):
    token = server.desk.coordinator.next_work(0, 0).token
    server.desk.upload(0, 0, token, "model.keras", iter([b"a model"]))
    done = TaskDone(slot=0, incarnation=0, token=token, files=("model.keras",))

    def away(*_):
        raise Unreachable("the storage is away")

    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "create", away)
        with pytest.raises(Unreachable):
            server.desk.task_done(done)
    assert server.desk.coordinator.finished is None
    server.desk.upload(0, 0, token, "model.keras", iter([b"a model"]))
    server.desk.task_done(done)
    message = server.desk.coordinator.finished
    assert message.model_digest
    server.desk.task_done(done)  # its answer was lost
    assert server.desk.coordinator.finished == message
    with pytest.raises(Overtaken, match="does not hold"):
        server.desk.upload(0, 0, token, "model.keras", iter([b"another"]))


def test_an_upload_of_one_that_was_given_up_meanwhile_replaces_nothing(server):
    token = server.desk.coordinator.next_work(0, 0).token

    def slow():
        yield b"half of "
        server.desk.coordinator.leave(0, 0)
        server.desk.coordinator.join(Join(slot=1, incarnation=0, data=DataSpec(size=2), batch_size=2))
        theirs = server.desk.coordinator.next_work(1, 0).token
        server.desk.upload(1, 0, theirs, "model.keras", iter([b"the model"]))
        yield b"another one"

    with pytest.raises(Overtaken):
        server.desk.upload(0, 0, token, "model.keras", slow())
    assert server.desk.artefacts._storage.read("model/model.keras") == b"the model"


@pytest.mark.parametrize("incarnation", [0, 1])
@pytest.mark.parametrize("weights_only", [False, True])
def test_a_server_that_begins_with_another_run_asks_the_workers_first(
    server, tmp_path, incarnation, weights_only
):
    """It may not be the first one of its run: no snapshot of its own says so yet."""
    assert server.desk.snapshotter.take() is not None
    other = InitialFrom(uri=(tmp_path / "storage" / "n" / "j" / "u").as_uri(), weights_only=weights_only)
    begun = ParameterServer(config(tmp_path, uid="v", incarnation=incarnation, initial_from=other))
    begun._restore()
    assert begun.shard.state is State.RECOVERING
    assert begun.shard.hello(0, 0, MODEL, copy_version=1).wants_copy
    assert begun.desk.coordinator.gathering == (incarnation > 0)
    assert (begun.desk.coordinator.ledger is None) == weights_only
