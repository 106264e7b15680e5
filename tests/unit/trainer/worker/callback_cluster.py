"""A parameter server and two workers whose callbacks write files, without a network."""

import errno
import itertools
import os

from shoal_trainer.contract import StopAfter
from shoal_trainer.coordinator.protocol import DataSpec, Leave, TaskDone, UnsentFiles
from shoal_trainer.errors import ProtocolError, Unreachable
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.serve import ParameterServer
from shoal_trainer.snapshot.storage import LocalStorage
from shoal_trainer.wire.messages import Held, Progress, PushMeta
from shoal_trainer.worker.coordination import ControlPlane
from shoal_trainer.worker.work import TaskWork, Wasted
from tests.unit.trainer.configs import pod_config
from tests.unit.trainer.coordinator.bench import next_work
from tests.unit.trainer.ps.shards import push_to
from tests.unit.trainer.test_serve import MODEL, config
from tests.unit.trainer.worker.models import job

EPOCHS = 4
FULL = "cannot write it: No space left on device"
LOST = "logs/best_weights.npz went with the worker that had written them"


class Line:
    """What a worker sends reaches the parameter server of the moment, without a network."""

    def __init__(self, cluster, slot):
        self.cluster, self.slot, self.identity = cluster, slot, {"slot": slot, "incarnation": 0}
        self.old, self.words, self.said = False, itertools.count(1), []

    def upload(self, token, name, path):
        self.cluster.service.upload(self.slot, 0, token, name, iter([path.read_bytes()]))

    def join(self, request):
        data = {"data": self.cluster.data, "batch_size": 2, "number": next(self.words)}
        return self.cluster.service.coordinator.join(request.model_copy(update=data))

    def send(self, request, seconds=None):
        if self.old and isinstance(request, UnsentFiles):
            raise ProtocolError("unknown path /v1/unsent-files")
        if isinstance(request, UnsentFiles):
            request = request.model_copy(update={"number": next(self.words)})
            self.said.append(request)
        name = {UnsentFiles: "unsent-files", TaskDone: "task-done", Leave: "leave"}[type(request)]
        self.cluster.service.handlers()[name](request)

    def close(self):
        pass


class Cluster:
    """Parameter server 0 of a job with callbacks, and two workers. The volume is `full`, or so for `refused` names."""

    def __init__(self, tmp_path, monkeypatch, *, validation=False):
        self.tmp_path, self.full, self.seq = tmp_path, False, {}
        self.server, self.validation, self.refused = None, validation, ()
        self.data = DataSpec(size=8, callbacks=True, validation=validation)
        write = LocalStorage.write

        def attempt(storage, name, chunks, *confirm):
            if self.full or name.endswith(self.refused):
                raise Unreachable(FULL)
            write(storage, name, chunks, *confirm)

        monkeypatch.setattr(LocalStorage, "write", attempt)
        self.folder = tmp_path / "callbacks"
        self.folder.mkdir()
        self.planes = []
        self.start()

    @property
    def service(self):
        return self.server.service

    @property
    def tasks(self):
        return self.service.coordinator.record.tasks

    def start(self):
        """Start the parameter server, with the state of the one before it."""
        before = self.server
        chosen = config(self.tmp_path)
        self.server = ParameterServer(chosen.model_copy(update={"stop_after": StopAfter(epochs=EPOCHS)}))
        shard = self.server.shard
        if before is not None:
            shard.restore(before.shard.copy())
            self.service.coordinator.load(before.service.coordinator.record.dump())
            with shard.lock:
                shard._become_ready()  # the snapshot is as new as any copy
        self.planes = self.planes or [self.plane(slot) for slot in (0, 1)]
        for slot, plane in enumerate(self.planes):
            shard.workers.connect(slot, 0)
            if shard.hello(slot, 0, MODEL, Held()).wants_copy:
                shard.offer(slot, 0, aligned(shard.size))
            plane.join({}, Wasted())

    def plane(self, slot):
        plane = ControlPlane(pod_config(index=slot, batch_size=2), self.server._credentials, job())
        plane._client.close()
        plane._client = Line(self, slot)
        plane._late.stopped.set()  # no thread is started, and no attempt waits
        return plane

    def next(self, slot):
        return next_work(self.service.coordinator, slot, 0)

    def train(self, slot):
        """Train all that there is; returns the work that is no data."""
        shard = self.server.shard
        while (work := self.next(slot)).kind == "data":
            for at in range(work.lease.start, work.lease.stop, 2):
                self.seq[slot] = self.seq.get(slot, 0) + 1
                meta = PushMeta(samples=2, progress=(Progress(work.lease.epoch, -1, at, at + 2),))
                version = shard.history.version
                push_to(shard, slot, 0, self.seq[slot], version, meta, aligned(shard.size), delta=True)
        return work

    def call(self, work, *, slot=0, stop=False, **files):
        """Run the callbacks: they write these files, with `.` for `__`."""
        for name, text in files.items():
            (self.folder / name.replace("__", ".")).write_text(text)
        task = TaskWork(work.token, work.task, work.epoch, work.history, work.learning_rate)
        written = {f"logs/{path.name}": path for path in sorted(self.folder.iterdir())}
        self.planes[slot].task_done(task, {}, written, stop=stop, message="")

    def send(self, slot=0):
        self.planes[slot]._late._send()

    def stored(self):
        storage = self.server._storage
        return {name: storage.read(f"logs/{name}").decode() for name in storage.names("logs")}

    def work(self, slot):
        """What this worker gets once both have trained all."""
        while (work := self.train(slot)).kind == "idle":
            self.train(1 - slot)
        return work

    def epoch(self, **files):
        """One epoch of both workers, whose callbacks write these files on worker 0."""
        work = self.work(0)
        if self.validation:
            assert (work.kind, work.task) == ("task", "evaluate")
            evaluation = TaskWork(work.token, "evaluate", work.epoch)
            self.planes[0].task_done(evaluation, {"val_loss": 1.0}, {}, stop=False, message="")
            work = self.train(0)
        assert (work.kind, work.task) == ("task", "callbacks")
        self.call(work, **files)


def restarted_from(cluster, monkeypatch, saved):
    """The next parameter server 0, whose newest snapshot has this record."""
    monkeypatch.setattr(cluster.service.coordinator.record, "dump", lambda: saved)
    cluster.start()


def exported(cluster, slot):
    """What the export gets as the best weights, after all callbacks that are left, which write nothing."""
    for path in cluster.folder.iterdir():
        path.unlink()
    while (work := cluster.work(slot)).task != "export":
        cluster.call(work, slot=slot)
    with cluster.service.download(slot, 0, work.token, "logs/best_weights.npz") as (_, content):
        return content.read()


def fail_once(monkeypatch, line):
    """One read of `a` fails for its disk, and one of `b` since too much is open."""
    upload, errors = line.upload, {"logs/a": [errno.ESTALE], "logs/b": [errno.EMFILE]}

    def read(token, name, path):
        if errors.get(name):
            raise OSError(found := errors[name].pop(), os.strerror(found))
        upload(token, name, path)

    monkeypatch.setattr(line, "upload", read)
