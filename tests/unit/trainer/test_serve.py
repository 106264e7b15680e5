"""The parameter server process without sockets: restarts, replacement, and uploads of the model."""

import errno
import hashlib
import json
import logging
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from shoal_trainer import serve
from shoal_trainer.contract import (
    EXIT_DRAINED,
    EXIT_FENCED,
    EXIT_OK,
    EXIT_USER,
    InitialFrom,
    JobIdentity,
    Outcome,
    Role,
    Shard,
    ShardReport,
    StopAfter,
    TerminationMessage,
)
from shoal_trainer.coordinator import report
from shoal_trainer.coordinator.artefacts import MANIFEST
from shoal_trainer.coordinator.control_client import ControlClient
from shoal_trainer.coordinator.protocol import DataSpec, Done, Heartbeat, Join, Leave, Pushes, TaskDone
from shoal_trainer.coordinator.reconciler import pushes_of
from shoal_trainer.coordinator.task_queue import Task
from shoal_trainer.errors import Fenced, Overtaken, ProtocolError, RunTaken, Unreachable, UserError
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.shard import State
from shoal_trainer.serve import ParameterServer
from shoal_trainer.snapshot import shard_file
from shoal_trainer.snapshot.manifest import sealed
from shoal_trainer.snapshot.storage import LocalStorage
from shoal_trainer.snapshot.store import SnapshotStore
from shoal_trainer.termination.exits import exit_code
from shoal_trainer.termination.termination_log import TERMINATION_LOG_ENV
from shoal_trainer.wire.messages import AnswerMeta, Held, ModelSpec, OptimizerConfig, Progress, PushMeta
from tests.unit.trainer.configs import pod_config
from tests.unit.trainer.coordinator.bench import next_work
from tests.unit.trainer.ps.shards import pull_from, push_to
from tests.unit.trainer.snapshot.saving import latest

MODEL = ModelSpec(fingerprint="0" * 64, parameters=4, optimizer=OptimizerConfig(name="delta", batch_size=2))


def config(tmp_path, *, uid="u", run="", shards=1, **fields):
    """The configuration of a parameter server."""
    job = JobIdentity(namespace="n", name="j", uid=uid, run=run)
    servers = (Shard(host="127.0.0.1", data_port=0, control_port=0),) * shards
    lengths = {"batch_size": 2, "stop_after": StopAfter(epochs=1)}
    return pod_config(Role.PS, tmp_path, job=job, parameter_servers=servers, **lengths, **fields)


@pytest.fixture
def server(tmp_path):
    return trained(tmp_path)


def trained(tmp_path, shards=1, run=""):
    """Parameter server 0 of a job that has trained its only epoch, of two samples."""
    server = ParameterServer(config(tmp_path, shards=shards, run=run))
    server.shard.workers.connect(0, 0)
    server.shard.hello(0, 0, MODEL)
    server.shard.offer(0, 0, aligned(server.shard.size))
    server.service.coordinator.join(Join(slot=0, incarnation=0, data=DataSpec(size=2), batch_size=2))
    next_work(server.service.coordinator, 0, 0)
    meta = PushMeta(samples=2, progress=(Progress(0, -1, 0, 2),))
    push_to(server.shard, 0, 0, 1, 0, meta, aligned(server.shard.size), delta=True)
    return server


def test_final_tasks_wait_until_another_shard_has_the_last_push(tmp_path):
    server = trained(tmp_path, shards=2)
    reconciler, coordinator = server.service._reconciler, server.service.coordinator
    spans, compared = [], threading.Semaphore(0)

    def pushes(_wanted):
        compared.release()
        return Pushes(spans=tuple(spans))

    reconciler._others = [SimpleNamespace(pushes=pushes)]
    reconciler.start()
    assert next_work(coordinator, 0, 0).kind == "idle"
    assert compared.acquire(timeout=60)
    assert next_work(coordinator, 0, 0).kind == "idle"
    spans += pushes_of(server.shard, ()).spans
    until = time.monotonic() + 60
    while (work := next_work(coordinator, 0, 0)).kind == "idle" and time.monotonic() < until:
        time.sleep(0.01)
    reconciler.stop()
    assert work.task == "export"


@pytest.mark.parametrize(("run", "named"), [("", "u"), ("stable", "stable")])
def test_the_manifests_of_a_run_name_it(tmp_path, run, named):
    server = trained(tmp_path, run=run)
    token = next_work(server.service.coordinator, 0, 0).token
    server.service.upload(0, 0, token, "model.keras", iter([b"a model"]))
    server.service.task_done(TaskDone(slot=0, incarnation=0, token=token, files=("model.keras",)))
    folder = tmp_path / "storage" / "n" / "j" / named
    assert server.service.snapshotter.take().run == named
    for manifest in [folder / "model" / "manifest.json", *(folder / "snapshots").glob("manifest-*.json")]:
        assert json.loads(manifest.read_text())["run"] == named


def test_why_snapshots_fail_names_a_shard_that_writes_nothing(tmp_path):
    service = trained(tmp_path, shards=2).service
    for idle, because in ((29.0, ""), (95.5, "shard 1 has written nothing of its part for 96 s")):
        report = ShardReport(index=1, epoch=0, snapshot_idle_seconds=idle)
        service._others[0].report = report
        assert service.status().snapshots_fail_because == because


def test_report_says_that_old_snapshots_stay(server, monkeypatch):
    def refuse(storage, name):
        raise Unreachable(f"cannot remove s3://b/{name}: AccessDenied")

    snapshotter = server.service.snapshotter
    snapshotter._store._storage.write("snapshots/0000000009-0.shard-0-of-1-00000000", [b"of a dead server"])
    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "remove", refuse)
        assert snapshotter.take() is not None
    told = "old snapshots are not removed: cannot remove s3://b/snapshots: AccessDenied"
    assert server.service.status().messages[-1] == told
    snapshotter._prune()
    assert told not in server.service.status().messages


def test_publication_is_retried_after_a_storage_outage(server, monkeypatch):
    token = next_work(server.service.coordinator, 0, 0).token
    server.service.upload(0, 0, token, "model.keras", iter([b"a model"]))
    done = TaskDone(slot=0, incarnation=0, token=token, files=("model.keras",))

    def unreachable(*_):
        raise Unreachable("the storage is unreachable")

    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "create", unreachable)
        with pytest.raises(Unreachable):
            server.service.task_done(done)
    assert server.service.coordinator.finished is None
    server.service.upload(0, 0, token, "model.keras", iter([b"a model"]))
    server.service.task_done(done)
    message = server.service.coordinator.finished
    assert message.model_digest
    server.service.task_done(done)  # its answer was lost
    assert server.service.coordinator.finished == message
    with pytest.raises(Overtaken, match="does not hold"):
        server.service.upload(0, 0, token, "model.keras", iter([b"another"]))


def while_the_manifest_is_put(monkeypatch, happens):
    """The storage takes its time with `model/manifest.json`, and `happens` meanwhile."""
    create = LocalStorage.create

    def slow(storage, name, data):
        if name == MANIFEST:
            happens()
        return create(storage, name, data)

    monkeypatch.setattr(LocalStorage, "create", slow)


def falls_silent(server):
    coordinator = server.service.coordinator
    coordinator.departures.fence(coordinator.members.get((0, 0)), "silent for too long")


def test_job_ends_with_its_model_though_the_exporter_fell_silent_as_it_was_published(server, monkeypatch):
    """No other worker may be there, to find out with its own export."""
    token, done = exported(server)
    server.service.upload(0, 0, token, "model.keras", iter([b"a model"]))
    while_the_manifest_is_put(monkeypatch, lambda: falls_silent(server))
    with pytest.raises(Fenced):
        server.service.task_done(done)
    assert server.service.coordinator.finished == server.service.artefacts.published()


def test_no_file_is_replaced_while_a_manifest_that_names_it_is_put(server, monkeypatch):
    token, done = exported(server)
    server.service.upload(0, 0, token, "model.keras", iter([b"a model"]))
    server.service.coordinator.join(Join(slot=1, incarnation=0, data=DataSpec(size=2), batch_size=2))

    def another_exports():
        falls_silent(server)
        theirs = next_work(server.service.coordinator, 1, 0)
        assert theirs.task == "export"
        with pytest.raises(Unreachable, match="being published"):
            server.service.upload(1, 0, theirs.token, "model.keras", iter([b"another"]))

    while_the_manifest_is_put(monkeypatch, another_exports)
    with pytest.raises(Fenced):
        server.service.task_done(done)
    assert server.service.artefacts._storage.read("model/model.keras") == b"a model"
    assert server.service.coordinator.finished is not None


def given_up(server, monkeypatch, *files):
    """Worker 0 exports and is lost, and the put of its manifest is given up; returns that manifest.

    All files but the model are the same in each export.
    """
    token, _ = exported(server)
    for name in files:
        server.service.upload(0, 0, token, name, iter([b"of worker 0" if name == "model.keras" else b"same"]))
    for slot in (1, 2):
        server.service.coordinator.join(Join(slot=slot, incarnation=0, data=DataSpec(size=2), batch_size=2))
    under_way = []

    def times_out(_storage, _name, data):
        under_way.append(data)
        raise Unreachable("timed out")

    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "create", times_out)
        with pytest.raises(Unreachable, match="timed out"):
            server.service.task_done(TaskDone(slot=0, incarnation=0, token=token, files=files))
    falls_silent(server)
    return under_way[0]


def check_model(server):
    """The job has ended, with a model whose files are those that its manifest names."""
    assert server.service.coordinator.finished is not None
    storage = server.service.artefacts._storage
    for file in json.loads(storage.read(MANIFEST))["files"]:
        assert file["sha256"] == hashlib.sha256(storage.read(f"model/{file['name']}")).hexdigest()


@pytest.mark.parametrize("files", [("model.keras",), ("model.keras", "weights.h5")])
def test_manifest_that_arrives_late_is_not_that_of_the_next_export(server, monkeypatch, files):
    manifest = given_up(server, monkeypatch, *files)
    theirs = next_work(server.service.coordinator, 1, 0).token
    for name in files:
        server.service.upload(1, 0, theirs, name, iter([b"another"]))
        server.service.artefacts._storage.create(MANIFEST, manifest)  # it arrives after the first file
    server.service.task_done(TaskDone(slot=1, incarnation=0, token=theirs, files=files))
    check_model(server)


def test_manifest_that_arrives_late_is_not_that_of_a_third_export(server, monkeypatch):
    """The first file of the third is the same in all exports: it does not tell that another one was replaced."""
    manifest = given_up(server, monkeypatch, "labels.txt", "model.keras")
    coordinator = server.service.coordinator
    second = next_work(coordinator, 1, 0).token
    server.service.upload(1, 0, second, "model.keras", iter([b"of worker 1"]))
    server.service.artefacts._storage.create(MANIFEST, manifest)
    coordinator.departures.fence(coordinator.members.get((1, 0)), "spot node reclaimed")
    third = next_work(coordinator, 2, 0).token
    server.service.upload(2, 0, third, "labels.txt", iter([b"same"]))
    server.service.upload(2, 0, third, "model.keras", iter([b"of worker 2"]))
    files = ("labels.txt", "model.keras")
    server.service.task_done(TaskDone(slot=2, incarnation=0, token=third, files=files))
    check_model(server)


@pytest.mark.parametrize("replaced", [False, True])
def test_server_that_restarts_ends_the_job_with_a_late_manifest_only_if_its_files_are_there(
    server, monkeypatch, tmp_path, replaced
):
    manifest = given_up(server, monkeypatch, "model.keras")
    if replaced:
        second = next_work(server.service.coordinator, 1, 0).token
        server.service.upload(1, 0, second, "model.keras", iter([b"of worker 1"]))
    server.service.artefacts._storage.create(MANIFEST, manifest)
    again = ParameterServer(config(tmp_path, incarnation=1))
    again._restore()
    assert (again.service.coordinator.finished is None) == replaced
    if not replaced:
        check_model(again)


def test_upload_of_a_replaced_worker_overwrites_nothing(server):
    token = next_work(server.service.coordinator, 0, 0).token

    def slow():
        yield b"half of "
        server.service.coordinator.leave(Leave(slot=0, incarnation=0))
        server.service.coordinator.join(Join(slot=1, incarnation=0, data=DataSpec(size=2), batch_size=2))
        theirs = next_work(server.service.coordinator, 1, 0).token
        server.service.upload(1, 0, theirs, "model.keras", iter([b"the model"]))
        yield b"another one"

    with pytest.raises(Overtaken):
        server.service.upload(0, 0, token, "model.keras", slow())
    assert server.service.artefacts._storage.read("model/model.keras") == b"the model"


@pytest.fixture
def termination(tmp_path, monkeypatch):
    """The file of the termination message."""
    monkeypatch.setenv(TERMINATION_LOG_ENV, str(tmp_path / "termination"))
    return tmp_path / "termination"


END = TerminationMessage(outcome=Outcome.SUCCEEDED, reason="Completed", message="2 epochs")


def test_job_ends_after_the_snapshot_of_the_end_of_training(server, termination, monkeypatch):
    writing, go = threading.Event(), threading.Event()
    write = LocalStorage.write

    def slow(storage, name, chunks):
        writing.set()
        assert go.wait(60)
        write(storage, name, chunks)

    monkeypatch.setattr(LocalStorage, "write", slow)
    server.service.snapshotter.start()
    server.service.snapshotter.schedule()
    with ThreadPoolExecutor() as pool:
        ending = pool.submit(server._ended, END)
        assert writing.wait(60)
        assert not termination.exists()
        go.set()
        assert ending.result(timeout=60) == EXIT_OK
    assert latest(SnapshotStore(LocalStorage(server._store._storage.root))).shards[0].version == 1
    assert TerminationMessage.model_validate_json(termination.read_text()) == END
    server.service.snapshotter.stop()


def test_job_ends_without_that_snapshot_if_the_storage_is_away(server, termination, monkeypatch, caplog):
    monkeypatch.setattr(serve, "SETTLE_SECONDS", 0.05)
    server.service.snapshotter.schedule()
    assert server._ended(END) == EXIT_OK
    assert "the last snapshot of this run is from before the end of training" in caplog.text
    assert TerminationMessage.model_validate_json(termination.read_text()) == END


@pytest.mark.parametrize("incarnation", [0, 1])
@pytest.mark.parametrize("weights_only", [False, True])
def test_server_starting_from_another_run_asks_workers_first(server, tmp_path, incarnation, weights_only):
    """The run has no snapshot of its own yet, but this may not be its first server."""
    assert server.service.snapshotter.take() is not None
    other = InitialFrom(uri=(tmp_path / "storage" / "n" / "j" / "u").as_uri(), weights_only=weights_only)
    started = ParameterServer(config(tmp_path, uid="v", incarnation=incarnation, initial_from=other))
    started._restore()
    assert started.shard.state is State.RECOVERING
    assert started.shard.hello(0, 0, MODEL, Held(version=1)).wants_copy
    assert started.service.coordinator.course.gathering.on == (incarnation > 0)
    assert (started.service.coordinator.record.ledger is None) == weights_only


@pytest.mark.parametrize("weights_only", [False, True])
def test_server_starting_from_another_run_soon_has_a_snapshot_of_its_model(server, tmp_path, weights_only):
    """Else a rollback before the first regular one would have nothing to return to."""
    assert server.service.snapshotter.take() is not None
    other = InitialFrom(uri=(tmp_path / "storage" / "n" / "j" / "u").as_uri(), weights_only=weights_only)
    started = ParameterServer(config(tmp_path, uid="v", initial_from=other))
    started._restore()
    service, snapshotter = started.service, started.service.snapshotter
    started.shard._recovery._seconds = 0.0
    started.shard.workers.connect(0, 0)
    assert started.shard.hello(0, 0, MODEL).ready
    assert started.shard.state is State.READY
    service.coordinator.join(Join(slot=0, incarnation=0, data=DataSpec(size=2), batch_size=2))
    assert not snapshotter.settled(0)
    snapshotter._take_again()
    assert snapshotter.settled(0)
    assert snapshotter.last.ledger
    assert snapshotter.last.shards[0].version == 0


def test_shards_start_from_one_snapshot_of_another_run_that_still_trains(server, tmp_path, caplog):
    assert server.service.snapshotter.take().number == 1
    other = InitialFrom(uri=(tmp_path / "storage" / "n" / "j" / "u").as_uri())
    started = [
        ParameterServer(config(tmp_path, uid="v", index=index, shards=2, initial_from=other))
        for index in (0, 1)
    ]
    with ThreadPoolExecutor() as pool, caplog.at_level(logging.WARNING):
        waiting = pool.submit(started[1]._restore)
        until = time.monotonic() + 60
        while "waiting for the snapshot to start from: shard 0 has not chosen it yet" not in caplog.text:
            assert time.monotonic() < until
            time.sleep(0.01)
        started[0]._restore()
        entry = PushMeta(samples=2, progress=(Progress(0, -1, 0, 2),))
        push_to(server.shard, 0, 0, 2, 1, entry, aligned(4), delta=True)
        assert server.service.snapshotter.take().number == 2
        waiting.result(timeout=60)
    assert [one.shard.history.samples for one in started] == [2, 2]


def test_restart_in_place_before_first_snapshot_asks_workers_first(server, tmp_path):
    # OOM-killed: a new worker's initial values must not replace a copy of the trained parameters.
    copy = aligned(4)
    answer = pull_from(server.shard, 0, copy)
    server._create_marker()
    again = ParameterServer(config(tmp_path))
    again._restore()
    again.shard.workers.connect(1, 0)
    welcome = again.shard.hello(1, 0, MODEL)
    assert not welcome.ready
    again.shard.workers.connect(0, 0)
    assert again.shard.hello(0, 0, MODEL, Held(version=1)).wants_copy
    again.shard.offer(0, 0, copy, 1, answer.meta)
    again.shard.offer(0, 0, aligned(4))
    assert (again.shard.state, again.shard.history.version) == (State.READY, 1)
    again.service.coordinator.join(Join(slot=0, incarnation=0, data=DataSpec(size=2), batch_size=2))
    assert again.service.coordinator.course.gathering.on
    assert again.service.coordinator.record.counters.repeated == 0
    assert again.service.coordinator.record.ledger.finished


def test_first_server_of_a_run_does_not_wait_for_workers(server, tmp_path):
    assert not ParameterServer(config(tmp_path, uid="another")).shard.follows
    server._create_marker()
    assert ParameterServer(config(tmp_path)).shard.follows
    server.stop()
    server._serve()  # drained: it exits without an error
    assert not ParameterServer(config(tmp_path)).shard.follows


# --- a replaced server --------------------------------------------------------------------------------------------


def successor_of(tmp_path, **options):
    """The next incarnation, started while its predecessor still serves."""
    successor = ParameterServer(config(tmp_path, incarnation=1, **options))
    successor._restore()
    return successor


@pytest.mark.parametrize("ledger", [True, False])
def test_server_saves_what_it_began_with_only_if_no_rollback_could_return_to_it(server, tmp_path, ledger):
    manifest = server.service.snapshotter.take()
    if not ledger:
        server._store.publish(manifest.model_copy(update={"number": 2, "ledger": {}}))
    successor = successor_of(tmp_path)
    with successor.shard.lock:
        successor.shard._become_ready()
    successor.service.coordinator.join(Join(slot=0, incarnation=0, data=DataSpec(size=2), batch_size=2))
    assert (successor.service.snapshotter.take() is None) == ledger
    assert successor.service.snapshotter.last.ledger


def test_replaced_server_exits_and_its_successor_keeps_its_updates(server, tmp_path):
    assert server.service.snapshotter.take().number == 1
    successor = successor_of(tmp_path)
    copy = aligned(4)
    copy += 3.0
    entry = PushMeta(samples=2, progress=(Progress(0, -1, 0, 2),))
    answer = push_to(
        server.shard, 0, 0, 2, 1, entry, copy, delta=True
    )  # its workers are still connected to it
    with pytest.raises(Fenced, match="incarnation 1 has claimed the storage, this is 0"):
        server.service.snapshotter.take()
    assert server._fenced is None
    assert not server._watch.look()
    assert server._serve() == EXIT_FENCED

    shard = successor.shard
    assert shard.hello(0, 0, MODEL, Held(version=answer.version)).wants_copy
    held = AnswerMeta(4, 1, {(0, 0): 2}, answer.meta.journal)
    assert shard.offer(0, 0, copy, answer.version, held).ready
    assert (shard.history.version, shard.history.samples, shard.history.applied) == (2, 4, {(0, 0): 2})
    np.testing.assert_array_equal(shard.copy().arrays["parameters"], copy)
    assert successor._watch.look()
    successor.service.coordinator.join(Join(slot=0, incarnation=0, data=DataSpec(size=2), batch_size=2))
    assert successor.service.snapshotter.take().epoch == 1


def test_replaced_server_does_not_restart_in_place(server, tmp_path):
    successor_of(tmp_path)
    with pytest.raises(Fenced, match="incarnation 1 of shard 0 exists, this is incarnation 0"):
        ParameterServer(config(tmp_path))._restore()
    assert successor_of(tmp_path)._watch.look()  # the newest server may restart


def test_job_whose_run_another_job_has_taken_ends_and_says_so(tmp_path, termination):
    """One Git folder with `storage.run`, synced by two clusters with one bucket: it would be replaced for ever."""
    here = ParameterServer(config(tmp_path, uid="here", run="main", incarnation=100))
    here._restore()
    there = ParameterServer(config(tmp_path, uid="there", run="main", incarnation=2000))
    there._restore()
    assert not here._watch.look()
    assert here._serve() == EXIT_USER
    told = TerminationMessage.model_validate_json(termination.read_text())
    assert (told.outcome, told.reason) == (Outcome.FAILED, "UserError")
    assert (
        "The job with uid there, of another cluster or an earlier object of this name, uses this"
        in told.message
    )
    with pytest.raises(RunTaken, match="uid there"):
        ParameterServer(config(tmp_path, uid="here", run="main", incarnation=101))._restore()
    # A later object of the run goes on.
    ParameterServer(config(tmp_path, uid="later", run="main", incarnation=3000))._restore()


def waits(server):
    """Restore until the storage was tried three times."""
    pauses = []

    def wait(_):
        pauses.append(1)
        return len(pauses) == 3

    server._stop = SimpleNamespace(wait=wait)
    with pytest.raises(SystemExit):
        server._restore()


@pytest.mark.parametrize("incarnation", [0, 1])
def test_server_that_follows_another_one_and_finds_no_snapshot_says_so(tmp_path, caplog, incarnation):
    """As on another node with a path of its own: training would begin anew without a word."""
    ParameterServer(config(tmp_path, incarnation=incarnation))._restore()
    said = f"no snapshot is in {(tmp_path / 'storage/n/j/u').as_uri()}"
    assert (said in caplog.text) == (incarnation > 0)


def test_server_that_waits_at_its_start_says_why_once(tmp_path, monkeypatch, caplog):
    def refuse(storage, path, chunks):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(LocalStorage, "_write_temporary", refuse)
    waits(ParameterServer(config(tmp_path, incarnation=1)))
    said = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(said) == 1, said
    assert "waiting for the storage" in said[0]


def test_server_starts_on_a_volume_that_is_full_of_what_it_has_left_itself(server, tmp_path, monkeypatch):
    """It was killed in a write of a snapshot, or of the model."""
    assert server.service.snapshotter.take() is not None
    run = server._storage.root
    for folder in ("snapshots", "model/deep"):
        (left := run / folder / ".ps-0-01234567.01234567.part").parent.mkdir(parents=True, exist_ok=True)
        left.write_bytes(b"x")
    write = LocalStorage._write_temporary

    def full(storage, path, chunks):
        if list(run.rglob("*.part")):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(storage, path, chunks)

    monkeypatch.setattr(LocalStorage, "_write_temporary", full)
    successor_of(tmp_path)


def test_server_that_was_replaced_removes_nothing_of_its_successor(tmp_path):
    successor = successor_of(tmp_path)
    with (
        successor._storage._write_temporary(successor._storage.root / "snapshots" / "a", [b"x"]) as part,
        pytest.raises(Fenced),
    ):
        ParameterServer(config(tmp_path))._restore()
        assert part.exists()


def test_process_that_ends_while_it_writes_leaves_nothing_half_written(server, termination, monkeypatch):
    """The last snapshot takes longer than the end waits for it."""
    monkeypatch.setattr(serve, "serve_metrics", lambda *_: None)
    monkeypatch.setattr(serve, "LINGER_SECONDS", 0.0)
    monkeypatch.setattr(server, "_restore", lambda: None)
    writing, go = threading.Event(), threading.Event()
    chunks = shard_file.chunks

    def slow(copy):
        yield from chunks(copy)
        writing.set()
        go.wait(60)

    monkeypatch.setattr(shard_file, "chunks", slow)
    server.service.coordinator.end(END)
    snapshotter = server.service.snapshotter
    monkeypatch.setattr(snapshotter, "settled", lambda _: not writing.wait(60))
    snapshotter.schedule()
    assert server.run() == EXIT_OK
    assert writing.is_set()
    assert not list(server._storage.root.rglob("*.part"))
    snapshotter.stop()
    go.set()


def test_replaced_shard_other_than_0_exits(tmp_path):
    older = [ParameterServer(config(tmp_path, index=index, shards=2)) for index in (0, 1)]
    for one in older:
        one._restore()
    successor = successor_of(tmp_path, index=1, shards=2)
    assert [one._watch.look() for one in (*older, successor)] == [True, False, True]
    assert older[1]._serve() == EXIT_FENCED


def test_unreachable_storage_fences_no_server(server, tmp_path, monkeypatch):
    successor_of(tmp_path)

    def unreachable(*_):
        raise Unreachable("the storage is unreachable")

    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "names", unreachable)
        assert server._watch.look()
    assert server._fenced is None
    assert not server._watch.look()


def exported(server):
    """The token of the export task, and the request that completes it."""
    token = next_work(server.service.coordinator, 0, 0).token
    return token, TaskDone(slot=0, incarnation=0, token=token, files=("model.keras",))


def test_export_gets_the_files_of_callbacks_only(server, tmp_path):
    token, _ = exported(server)
    LocalStorage(tmp_path / "storage" / "n" / "j" / "u").write("logs/best.npz", [b"weights"])
    with server.service.download(0, 0, token, "logs/best.npz") as (size, content):
        assert (size, content.read()) == (7, b"weights")
    with server.service.download(0, 0, token, "logs/absent.npz") as (size, content):
        assert (size, content.read()) == (0, b"")
    for name in ("snapshots/initial.json", "model/model.keras"):
        with (
            pytest.raises(ProtocolError, match="not below logs/"),
            server.service.download(0, 0, token, name),
        ):
            pass
    other = (token[0], token[1] + 1)
    with pytest.raises(Overtaken), server.service.download(0, 0, other, "logs/best.npz"):
        pass


def test_missing_export_format_is_in_the_termination_message(server):
    token, done = exported(server)
    server.service.upload(0, 0, token, "model.keras", iter([b"a model"]))
    server.service.task_done(done.model_copy(update={"message": "model/ holds no SavedModel"}))
    outcome = server.service.coordinator.finished
    assert outcome.message.endswith("; model/ holds no SavedModel")
    assert server.service.artefacts.published() == outcome


def test_replaced_server_exports_nothing(server, tmp_path):
    token, done = exported(server)
    server.service.upload(0, 0, token, "model.keras", iter([b"a model"]))
    successor = successor_of(tmp_path)
    # Not Fenced: the worker is valid and must connect to the successor.
    with pytest.raises(Unreachable, match="incarnation 1 of shard 0 exists"):
        server.service.upload(0, 0, token, "model.keras", iter([b"another"]))
    with pytest.raises(Unreachable, match="incarnation 1 of shard 0 exists"):
        server.service.task_done(done)
    assert isinstance(server._fenced, Fenced)
    assert server.service.coordinator.finished is None
    assert successor.service.artefacts.published() is None
    assert LocalStorage(tmp_path / "storage" / "n" / "j" / "u").read("model/model.keras") == b"a model"


def test_server_replaced_during_an_upload_overwrites_nothing(server, tmp_path):
    token, _ = exported(server)
    server.service.upload(0, 0, token, "model.keras", iter([b"a model"]))

    def slow():
        yield b"another"
        successor_of(tmp_path)

    with pytest.raises(Unreachable, match="incarnation 1"):
        server.service.upload(0, 0, token, "model.keras", slow())
    assert LocalStorage(tmp_path / "storage" / "n" / "j" / "u").read("model/model.keras") == b"a model"


def test_server_that_was_replaced_stores_no_file_of_callbacks(server, tmp_path, monkeypatch):
    task = Task("callbacks", 0, (0, 0), (7, 1))
    monkeypatch.setattr(server.service.coordinator, "held_task", lambda *_: task)
    server.service.upload(0, 0, task.token, "logs/best.npz", iter([b"mine"]))
    successor_of(tmp_path)
    with pytest.raises(Unreachable, match="incarnation 1"):
        server.service.upload(0, 0, task.token, "logs/best.npz", iter([b"another"]))
    assert LocalStorage(tmp_path / "storage" / "n" / "j" / "u").read("logs/best.npz") == b"mine"


def test_server_replaced_while_an_upload_is_synced_overwrites_nothing(server, tmp_path, monkeypatch):
    """The sync of gigabytes takes tens of seconds, after all of it was received."""
    token, _ = exported(server)
    server._storage.write("model/model.keras", [b"a model"])  # of an earlier export
    fsync, synced = os.fsync, []

    def slow(descriptor):
        fsync(descriptor)
        if not synced:
            synced.append(descriptor)
            successor_of(tmp_path)

    monkeypatch.setattr(os, "fsync", slow)
    with pytest.raises(Unreachable, match="incarnation 1"):
        server.service.upload(0, 0, token, "model.keras", iter([b"another"]))
    folder = tmp_path / "storage" / "n" / "j" / "u" / "model"
    assert [file.name for file in folder.iterdir()] == ["model.keras"]
    assert (folder / "model.keras").read_bytes() == b"a model"


def test_successor_that_finds_a_published_model_finishes(server, tmp_path):
    """The predecessor checked its claim just before the successor started, and published just after."""
    assert server.service.snapshotter.take() is not None
    token, _ = exported(server)
    server.service.upload(0, 0, token, "model.keras", iter([b"a model"]))
    successor = successor_of(tmp_path)
    outcome = server.service.artefacts.publish_model(token, report.succeeded(server.service.coordinator))

    successor.shard.hello(0, 0, MODEL, Held(version=0))
    coordinator = successor.service.coordinator
    coordinator.join(Join(slot=0, incarnation=0, data=DataSpec(size=2), batch_size=2))
    token, _ = exported(successor)
    with pytest.raises(Overtaken, match="the model is published already"):
        successor.service.upload(0, 0, token, "model.keras", iter([b"another"]))
    assert coordinator.finished == outcome
    assert next_work(coordinator, 0, 0).kind == "finished"
    assert LocalStorage(tmp_path / "storage" / "n" / "j" / "u").read("model/model.keras") == b"a model"


def named(tmp_path, *, uid, first, incarnation=None):
    """A server of a job whose run has a name."""
    base = config(tmp_path, uid=uid, incarnation=first if incarnation is None else incarnation)
    job = JobIdentity(namespace="n", name="j", uid=uid, run="nightly")
    return ParameterServer(base.model_copy(update={"job": job, "first_incarnation": first}))


def test_another_job_continues_a_run_with_the_same_name(tmp_path):
    """A GitOps controller has deleted the TrainingJob and created it again."""
    before = named(tmp_path, uid="u", first=1000)
    assert not before.shard.follows
    before._restore()
    before.shard.workers.connect(0, 1000)
    before.shard.hello(0, 1000, MODEL)
    before.shard.offer(0, 1000, aligned(before.shard.size))
    before.service.coordinator.join(Join(slot=0, incarnation=1000, data=DataSpec(size=4), batch_size=2))
    next_work(before.service.coordinator, 0, 1000)
    meta = PushMeta(samples=2, progress=(Progress(0, -1, 0, 2),))
    push_to(before.shard, 0, 1000, 1, 0, meta, aligned(before.shard.size), delta=True)
    assert before.service.snapshotter.take()

    after = named(tmp_path, uid="v", first=2000)
    after._restore()
    assert after._restored
    assert after.shard.history.samples == 2
    assert (tmp_path / "storage" / "n" / "j" / "nightly").is_dir()
    with pytest.raises(Fenced):
        before._claim.check()  # of the earlier job, if it is not gone yet
    with pytest.raises(Fenced):
        named(tmp_path, uid="u", first=1000, incarnation=1001)._restore()


def test_job_with_another_run_begins_anew(tmp_path):
    server = ParameterServer(config(tmp_path, uid="v"))
    server._restore()
    assert not server._restored
    assert (tmp_path / "storage" / "n" / "j" / "v") == tmp_path / "storage" / server.config.job.prefix


def test_snapshot_whose_ledger_cannot_be_read_gives_way_to_the_next_older_one(server, tmp_path, caplog):
    """Else parameter server 0 would end and restart for ever."""
    assert server.service.snapshotter.take().number == 1
    server.service.coordinator.record.tasks.export(0)
    assert server.service.snapshotter.take().number == 2
    file = tmp_path / "storage" / "n" / "j" / "u" / "snapshots" / "manifest-0000000002.json"
    manifest = json.loads(file.read_text())
    manifest["ledger"]["means"] = {"0": {"accuracy": [None, 1.0]}}
    del manifest["sha256"]
    file.write_bytes(sealed(json.dumps(manifest)))
    successor = ParameterServer(config(tmp_path, incarnation=1))
    successor._restore()
    assert successor.shard.history.version == 1
    assert successor.service.coordinator.record.ledger.completed == 1
    assert "snapshot 2: its ledger cannot be read" in caplog.text


def test_server_that_waits_for_the_storage_says_why_to_whoever_asks(tmp_path, monkeypatch):
    """Only the log of its pod did."""
    given = config(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = Shard(host="127.0.0.1", control_port=free.getsockname()[1])
    server = ParameterServer(
        given.model_copy(update={"parameter_servers": (address,), "bind_host": "127.0.0.1"})
    )

    def refuse(*_):
        raise Unreachable("cannot write s3://buckt/x: there is no such bucket")

    monkeypatch.setattr(server._storage, "create", refuse)
    monkeypatch.setattr(serve, "RETRY_SECONDS", 0.01)
    codes = []

    def drained():
        with pytest.raises(SystemExit) as ended:
            server.run()
        codes.append(ended.value.code)

    run = threading.Thread(target=drained, daemon=True)
    run.start()
    client = ControlClient(address, server._credentials)
    words, until = "", time.monotonic() + 60
    while "no such bucket" not in words and time.monotonic() < until:
        try:
            client.call("heartbeat", Heartbeat(slot=0, incarnation=0), Done)
        except Unreachable as error:
            words = str(error)
    client.close()
    assert "waiting for the storage: cannot write s3://buckt/x: there is no such bucket" in words
    server.stop()
    run.join(60)
    assert codes == [EXIT_DRAINED]


LATER = {
    "a format above ours": {"format": 2},
    "fields that are not ours": {"shards": [{"piece": 0}]},
    "a ledger that is not ours": {"ledger": {"means": {"0": {"accuracy": [None, 1.0]}}}},
}


@pytest.mark.parametrize("change", LATER.values(), ids=LATER)
def test_a_run_of_another_version_is_not_begun_anew(server, tmp_path, change):
    """It began from nothing, told nobody, and removed the snapshots once it had some of its own."""
    folder = tmp_path / "storage" / "n" / "j" / "u" / "snapshots"
    assert server.service.snapshotter.take().number == 1
    file = folder / "manifest-0000000001.json"
    whole = json.loads(file.read_text()) | change
    del whole["sha256"]
    file.write_bytes(sealed(json.dumps(whole)))
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError, match=r"0000000001|snapshot 1.* use that version's images") as raised:
        ParameterServer(config(tmp_path, incarnation=1)).run()
    assert exit_code(raised.value) == EXIT_USER
    assert set(before) <= set(folder.rglob("*"))


def test_a_damaged_manifest_is_none_of_another_version(server, tmp_path):
    assert server.service.snapshotter.take().number == 1
    file = tmp_path / "storage" / "n" / "j" / "u" / "snapshots" / "manifest-0000000001.json"
    file.write_bytes(file.read_bytes().replace(b'"number":1', b'"numbed":1'))
    successor = ParameterServer(config(tmp_path, incarnation=1))
    successor._restore()
    assert not successor._restored
