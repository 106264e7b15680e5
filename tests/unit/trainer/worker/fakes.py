"""A coordinator in memory, and parameter servers on loopback, to run the real worker against."""

import threading

from shoal_trainer.contract import Shard, Staleness
from shoal_trainer.ps.positions import Positions
from shoal_trainer.ps.server import DataServer
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.security import create_secret_dir
from shoal_trainer.worker.work import About, DataWork, Finished, Idle, TaskWork
from tests.unit.trainer.configs import JOB, pod_config


class FakeCoordinator:
    """Leases ranges of `size` samples for `epochs`, then `tasks`, then the end; observes the applied pushes."""

    def __init__(self, total, *, size=64, epochs=1, tasks=("evaluate",), start=0):
        self.free = [
            (epoch, begin, min(begin + size, total))
            for epoch in range(epochs)
            for begin in range(start, total, size)
        ]
        self.tasks = [TaskWork((0, 10_000 + n), kind, epochs - 1) for n, kind in enumerate(tasks)]
        self.leased = {}
        self.rate = None
        self.applied = {}
        self.samples = 0
        self.results = []
        self.left = 0
        self.hold = False
        self.joins = []
        self.messages, self.reported_steps = [], []
        self.counter = 0
        self.term = 0
        self.job_finished = False
        self.lock = threading.Lock()
        self.pushes = 0
        self.steps = []
        """The steps of each push."""
        self.pushed = threading.Condition(self.lock)

    def on_applied(self, push):
        with self.lock:
            self.pushes += 1
            self.steps.append(push.meta.steps)
            self.samples += push.meta.samples
            for mark in push.meta.progress:
                self.applied.setdefault(mark[:2], Positions()).add(mark.start, mark.stop)
            self.pushed.notify_all()

    def join(self, held, wasted):
        with self.lock:
            self.joins.append((dict(held), wasted))
            renamed = {}
            for old in held:
                self.counter += 1
                renamed[old] = (old[0] + 1, self.counter)
                self.leased[renamed[old]] = self.leased.pop(old)
            return renamed

    def next_work(self, generation=0, stopped=None):
        with self.lock:
            if self.free:
                epoch, start, stop = self.free.pop(0)
                self.counter += 1
                work = DataWork((self.term, self.counter), epoch, start, stop)
                self.leased[work.token] = work
                return work
            if self.hold or any(not self._done(work) for work in self.leased.values()):
                return Idle(0.01)
            return self.tasks.pop(0) if self.tasks else Finished()

    def _done(self, work):
        return not self.applied.get((work.epoch, work.number), Positions()).gaps(work.start, work.stop)

    def finished(self):
        return self.job_finished

    def learning_rate(self):
        return self.rate

    def set_message(self, message, about=About.WORK):
        if about is About.STEP:
            self.reported_steps.append(message)
        elif about is About.WORK and message not in self.messages and not callable(message):
            self.messages.append(message)

    def file_ended(self, token, length):
        self.results.append(("file", token, length))

    def task_done(self, work, metrics, files, *, stop, message, learning_rate=None):
        self.results.append(
            (work.kind, dict(metrics), {name: path.read_bytes() for name, path in files.items()}, stop)
        )

    def fetch(self, _work, _name, _path):
        return False

    def leave(self, _wasted, seconds):
        self.left += 1
        self.given = seconds


class Servers:
    """`count` shards on loopback."""

    def __init__(self, folder, coordinator=None, count=1, staleness=None):
        self.credentials = create_secret_dir(folder)
        self.coordinator = coordinator
        self.staleness = staleness or Staleness()
        self.count = count
        self.stores = [None] * count
        self.servers = [None] * count
        self.ports = [0] * count
        self.ready = []
        """(version, applied) of each shard that became ready."""
        for index in range(count):
            self.start(index)

    def start(self, index, epoch=0, restore=None):
        store = ShardStore(
            index, self.count, epoch, staleness=self.staleness, recovery_seconds=10,
            on_applied=self.coordinator.on_applied if self.coordinator and index == 0 else None,
            on_ready=lambda version, applied: self.ready.append((version, applied)),
        )  # fmt: skip
        if restore is not None:
            store.restore(restore)
        self._serve(index, store)

    def reconnect(self, index):
        """Cut every connection; the shard is kept."""
        self.stop(index)
        self._serve(index, self.stores[index])

    def _serve(self, index, store):
        server = DataServer(store, JOB.uid, self.credentials, host="127.0.0.1", port=self.ports[index])
        server.start()
        self.stores[index], self.servers[index], self.ports[index] = store, server, server.port

    def stop(self, index):
        self.servers[index].close()

    def close(self):
        for server in self.servers:
            server.close()

    def config(self, *, slot=0, incarnation=0, batch_size=16, reference_batch_size=None, sequential=False):
        return pod_config(
            index=slot,
            incarnation=incarnation,
            parameter_servers=tuple(Shard(host="127.0.0.1", data_port=port) for port in self.ports),
            batch_size=batch_size,
            reference_batch_size=reference_batch_size,
            staleness=Staleness(max=0) if sequential else Staleness(),
        )
