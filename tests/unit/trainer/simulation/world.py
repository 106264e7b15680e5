"""A job in virtual time: the real worker loop, shard, coordinator and snapshots; a simulated network and scheduler.

Every worker's loop runs in a thread of its own, but only one of them at a time: it runs until it touches the network,
and then the scheduler, which draws everything from one seed, decides who is next. So a run is the same for the same
seed.

The model is a counter: the "gradient" of a batch is 1 at each of its samples, so the parameters themselves say how
often every sample of every pass was applied.
"""

from __future__ import annotations

import contextlib
import io
import math
import random
import threading
from concurrent.futures import TimeoutError as FutureTimeout
from types import SimpleNamespace

import numpy as np

from shoal_trainer.contract import JobIdentity, StopAfter
from shoal_trainer.coordinator.coordinator import Coordinator
from shoal_trainer.coordinator.protocol import DataSpec, Join, Lease, TaskDone
from shoal_trainer.data.batch import Batch
from shoal_trainer.errors import Fenced, Unreachable
from shoal_trainer.ps.buffers import aligned
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.snapshot.manifest import Manifest
from shoal_trainer.snapshot.store import SnapshotStore
from shoal_trainer.wire.messages import AnswerMeta, ModelSpec, OptimizerConfig, Pulled, PushMeta, Welcome
from shoal_trainer.worker.feed import Ready
from shoal_trainer.worker.glue import Step
from shoal_trainer.worker.leases import Leases
from shoal_trainer.worker.loop import End, Loop, Policy
from shoal_trainer.worker.optimizers import Placement
from shoal_trainer.worker.work import DataWork, Finished, TaskWork

SAMPLES, BATCH, PASSES = 96, 2, 2
MODEL = ModelSpec(
    fingerprint="0" * 64,
    parameters=SAMPLES * PASSES,
    optimizer=OptimizerConfig(name="delta", batch_size=BATCH),
)


class Killed(BaseException):
    """The machine is gone."""


class MemoryStorage:
    """A storage in memory that can be away."""

    uri = "memory://run"

    def __init__(self):
        self.files = {}
        self.away = False

    def _there(self):
        if self.away:
            raise Unreachable("the storage is away")

    def write(self, name, chunks):
        self._there()
        self.files[name] = b"".join(bytes(chunk) for chunk in chunks)

    def create(self, name, data):
        self._there()
        return self.files.setdefault(name, data) is data

    @contextlib.contextmanager
    def open(self, name):
        yield io.BytesIO(self.read(name))

    def read(self, name):
        self._there()
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name]

    def size(self, name):
        return len(self.read(name))

    def names(self, folder):
        self._there()
        return sorted(
            {name[len(folder) + 1 :].split("/")[0] for name in self.files if name.startswith(folder + "/")}
        )

    def remove(self, name):
        self._there()
        self.files = {n: d for n, d in self.files.items() if n != name and not n.startswith(name + "/")}


class Server:
    """One incarnation of parameter server 0."""

    def __init__(self, world, epoch):
        self.epoch = epoch
        self.world = world
        self.shard = ShardStore(0, 1, epoch, boot=epoch + 1, clock=world.clock)
        job = JobIdentity(namespace="n", name="j", uid="u")
        self.coordinator = Coordinator(
            job, StopAfter(epochs=PASSES), BATCH, self.shard, clock=world.clock, wall=world.clock
        )
        self.store = SnapshotStore(world.storage)
        found = self.store.load_newest(0, 1)
        if found is not None:
            manifest, copy = found
            self.shard.restore(copy)
            self.coordinator.load(manifest.ledger)

    def snapshot(self):
        with self.shard.lock:
            copy = self.shard.copy()
            if copy is None or self.coordinator.behind:
                return
            ledger = self.coordinator.dump()
        file = self.store.write_shard(self.store.next_number(), self.epoch, copy)
        self.store.publish(
            Manifest(number=1, epoch=self.epoch, job_uid="u", shards=(file,), model=MODEL, ledger=ledger)
        )
        self.store.prune(2)
        self.shard.journal.published(copy.version)


class Answer:
    """A future that is answered when it is looked at."""

    def __init__(self, call):
        self._call = call
        self._value = None

    def result(self, timeout=None):
        while self._value is None:
            self._value = self._call()
            if self._value is None and timeout is not None:
                raise FutureTimeout
        return self._value

    def done(self):
        with contextlib.suppress(FutureTimeout):
            self.result(0)
        return self._value is not None


class Drain:
    """The event that tells a worker to stop; it is waited for in virtual time."""

    def __init__(self, worker):
        self._worker = worker
        self._event = threading.Event()
        self.is_set, self.set = self._event.is_set, self._event.set

    def wait(self, timeout):
        self._worker.world.sleep(self._worker, timeout)
        return self.is_set()


class Worker:
    """One incarnation of one slot: the real loop over a simulated network."""

    def __init__(self, world, slot, incarnation):
        self.world, self.slot, self.incarnation = world, slot, incarnation
        self.server = None
        self.connected = False
        self.cut_until = 0.0
        self.killed = False
        self.end = None
        self.joined = False
        self.drain = Drain(self)
        self.leases = Leases()
        self.queue = []
        self.go = threading.Semaphore(0)
        glue = SimpleNamespace(
            layout=SimpleNamespace(size=MODEL.size, trainable=MODEL.size),
            dtype=np.float32,
            alias=lambda array: array,
            initial=lambda: aligned(MODEL.size),
            step=self.compute,
        )
        self.loop = Loop(
            glue, Placement(MODEL.optimizer), self, self, self, self.leases, self.task, self.drain, Policy(),
            clock=world.clock,
        )  # fmt: skip
        self.thread = threading.Thread(target=self.live, daemon=True)
        self.thread.start()

    # --- scheduling

    def live(self):
        try:
            self.go.acquire()
            if self.killed:
                raise Killed
            self.end = self.loop.run()
        except Killed:
            self.end = Killed
        except Fenced:
            self.end = Fenced
        except BaseException as error:
            self.end = error
        finally:
            try:
                self.disconnect()
            finally:
                self.world.back.release()

    def pause(self):
        self.world.back.release()
        self.go.acquire()
        if self.killed:
            raise Killed

    def call(self, what, *, of=None):
        """One request: it may be lost, or its answer, or it may arrive twice."""
        world = self.world
        self.pause()
        server = world.server
        if server is None or world.clock() < self.cut_until or world.random.random() < world.loss:
            raise Unreachable("lost")
        if of is not None and of is not server:
            raise Unreachable("the connection ended with its server")
        answer = what(server)
        if world.random.random() < world.loss:
            with contextlib.suppress(Unreachable):
                what(server)  # it arrives twice
        if world.random.random() < world.loss:
            raise Unreachable("the answer is lost")
        return answer

    def disconnect(self):
        if self.connected and self.server is not None:
            self.server.shard.disconnect(self.slot)
        self.connected = False

    # --- as `Exchange`

    def connect(self, copy):
        def hello(server):
            self.disconnect()
            server.shard.connect(self.slot, self.incarnation)
            self.server, self.connected = server, True
            offered = copy()
            version = None if offered is None else offered.pulled.versions[0]
            welcome = server.shard.hello(self.slot, self.incarnation, MODEL, version)
            if welcome.wants_copy:
                p = offered.pulled
                meta = AnswerMeta(p.shard_samples[0], p.updates[0], p.live_workers, p.applied[0], p.journal)
                welcome = server.shard.offer(self.slot, self.incarnation, version, meta, offered.flat.copy())
            return welcome

        def once():
            try:
                welcome = self.call(hello)
            except Unreachable:
                self.disconnect()
                return None
            return None if welcome.recovering else Welcome((welcome,))

        return Answer(once)

    def initialize(self, flat):
        return Answer(lambda: self.on_line(lambda s: s.shard.initialize(flat) or True))

    def pull(self, out):
        return Answer(lambda: self.pulled(self.on_line(lambda s: s.shard.pull(self.slot, out))))

    def push_pull(self, update, out, push):
        future = Answer(lambda: self.push(update, out, push))
        if self.world.random.random() < 0.5:
            error = None
            try:
                future.result()
            except Unreachable as unreachable:
                error = unreachable

            def told():
                if error is not None:
                    raise error
                return future.result()

            return Answer(told)
        return future

    def push_delta(self, delta, out, push, *, scale, merge):
        del scale, merge  # a local step counts as a whole one here
        return Answer(lambda: self.push(delta, out, push))

    def push(self, update, out, push):
        meta = PushMeta(samples=push.samples, steps=push.steps, progress=push.progress)

        def apply(server):
            out[:] = update
            return server.shard.delta(self.slot, self.incarnation, push.seq, push.base_versions[0], meta, out)

        return self.pulled(self.on_line(apply))

    def on_line(self, what):
        try:
            return self.call(what, of=self.server)
        except Unreachable:
            self.disconnect()
            raise

    @staticmethod
    def pulled(answer):
        meta = answer.meta
        return Pulled(
            (answer.version,),
            (dict(meta.applied),),
            meta.samples,
            meta.live_workers,
            (meta.updates,),
            (meta.samples,),
            journal=meta.journal,
        )

    # --- as `Feed` and `Coordinator`

    def start(self):
        """Nothing reads ahead of the loop but one lease."""

    def stop(self):
        self.queue.clear()

    def get(self, timeout):
        del timeout
        if not self.queue:
            try:
                self.queue += self.items()
            except Unreachable:
                return None
        return self.queue.pop(0) if self.queue else None

    def items(self):
        if not self.joined:
            self.join({}, 0)
            self.joined = True
        given = self.call(lambda s: s.coordinator.next_work(self.slot, self.incarnation))
        if given.kind == "idle":
            self.world.sleep(self, given.seconds)
            return []
        if given.kind == "finished":
            return [Finished()]
        if given.kind == "task":
            return [TaskWork(given.token, given.task, given.epoch)]
        lease = given.lease
        work = DataWork(lease.token, lease.epoch, lease.start, lease.stop)
        self.leases.grant(work)
        ends = [min(b + BATCH, lease.stop) for b in range(lease.start, lease.stop, BATCH)]
        starts = range(lease.start, lease.stop, BATCH)
        return [
            Ready(work, Batch(np.arange(a, b), None, np.ones(b - a), b - a, b))
            for a, b in zip(starts, ends, strict=True)
        ]

    def compute(self, parameters, batch):
        del parameters
        self.pause()
        self.world.steps += 1
        update = aligned(MODEL.size)
        update[self.epoch_of(batch) * SAMPLES + batch.x] = 1.0
        return Step(update, 0.5, True)

    def epoch_of(self, batch):
        return self.reading

    def join(self, held, wasted_steps):
        def lease(work, token):
            return Lease(
                token_epoch=token[0], counter=token[1], epoch=work.epoch, start=work.start, stop=work.stop
            )

        request = Join(
            slot=self.slot,
            incarnation=self.incarnation,
            data=DataSpec(size=SAMPLES, validation=True),
            batch_size=BATCH,
            held=tuple(lease(work, token) for token, work in held.items()),
            wasted_steps=wasted_steps,
        )
        joined = self.call(lambda s: s.coordinator.join(request))
        return {renamed.old: renamed.new for renamed in joined.renamed}

    def task(self, work):
        metrics = {"val_accuracy": 0.5} if work.kind == "evaluate" else {}
        request = TaskDone(slot=self.slot, incarnation=self.incarnation, token=work.token, metrics=metrics)

        def done(server):
            task = server.coordinator.task_done(request)
            if task is not None and task.kind == "export":
                server.coordinator.end(server.coordinator.succeeded("memory://model", "0"))
                self.world.final = server
            return True

        self.call(done)

    def leave(self):
        self.call(lambda s: s.coordinator.leave(self.slot, self.incarnation))


class World:
    """Runs a job to its end under the faults that `seed` and `faults` make."""

    def __init__(self, seed, *, workers=3, faults=1.0, ps_faults=1.0):
        self.random = random.Random(seed)
        self.now = 0.0
        self.loss = 0.01 * faults * self.random.random()
        self.faults, self.ps_faults = faults, ps_faults
        self.storage = MemoryStorage()
        self.back = threading.Semaphore(0)
        self.asleep = {}
        self.steps = 0
        self.final = None
        self.ps_losses = self.kills = 0
        self.server = Server(self, 0)
        self.server_at = math.inf
        self.epoch = 0
        self.slots = {}
        self.everyone = []
        for slot in range(workers):
            self.start(slot, 0)

    def clock(self):
        return self.now

    def sleep(self, worker, seconds):
        self.asleep[worker] = self.now + seconds
        worker.pause()

    def start(self, slot, incarnation):
        worker = Worker(self, slot, incarnation)
        # What the loop trains is told by the item that it has in hand.
        train, alone = worker.loop._train, worker.loop._step_alone

        def of(function):
            def trained(*arguments):
                ready = next(a for a in arguments if isinstance(a, Ready))
                worker.reading = ready.work.epoch
                return function(*arguments)

            return trained

        worker.loop._train, worker.loop._step_alone = of(train), of(alone)
        take = worker.loop._take

        def taken(timeout):
            item = take(timeout)
            if isinstance(item, Ready):
                worker.reading = item.work.epoch
            return item

        worker.loop._take = taken
        self.slots[slot] = worker
        self.everyone.append(worker)

    def run(self, most=60_000):
        """Until every slot has finished. Raises AssertionError where it does not come to an end."""
        try:
            for _ in range(most):
                if all(worker.end is End.FINISHED for worker in self.slots.values()):
                    return
                self.turn()
            raise AssertionError(f"no end after {most} turns: {self.describe()}")
        finally:
            for worker in self.everyone:
                worker.killed = True
                if worker.end is None:
                    worker.go.release()
                    self.back.acquire()
            for worker in self.everyone:
                worker.thread.join(5)

    def turn(self):
        self.now += self.random.expovariate(50)
        self.fault()
        if self.server is not None:
            self.server.coordinator.tick()
        for slot, worker in list(self.slots.items()):
            if worker.end is not None and worker.end is not End.FINISHED:
                if worker.end not in {Killed, Fenced, End.DRAINED}:
                    raise AssertionError(f"worker {slot} ended with {worker.end!r}") from worker.end
                self.start(slot, worker.incarnation + 1)
        ready = [w for w in self.everyone if w.end is None and self.asleep.get(w, 0.0) <= self.now]
        if ready:
            self.resume(self.random.choice(ready))

    def fault(self):
        roll = self.random.random() / max(1e-9, self.faults)
        alive = [w for w in self.slots.values() if w.end is None]
        if self.server is None and self.now >= self.server_at:
            self.epoch, self.storage.away = self.epoch + 1, False
            self.server = Server(self, self.epoch)
        elif roll < 0.004 and self.server is not None:
            with contextlib.suppress(Unreachable):
                self.server.snapshot()
        elif roll < 0.005 and alive:
            self.kills += 1
            self.kill(self.random.choice(alive))
        elif roll < 0.006 and alive:
            self.random.choice(alive).drain.set()
        elif roll < 0.008 and alive:
            self.random.choice(alive).cut_until = self.now + self.random.expovariate(1 / 4)
        elif roll < 0.009 and alive:
            # Half-open: it is given up for lost, and lives on.
            victim = self.random.choice(alive)
            self.start(victim.slot, victim.incarnation + 1)
        elif roll < 0.010:
            self.storage.away = not self.storage.away
        elif (
            self.ps_faults
            and roll < 0.010 + 0.001 * self.ps_faults
            and self.server is not None
            and self.final is None
        ):
            self.ps_losses += 1
            self.storage.away = False
            self.server = None
            self.server_at = self.now + self.random.uniform(0.1, 6.0)

    def kill(self, worker):
        worker.killed = True
        self.resume(worker)

    def resume(self, worker):
        """Let a worker run until it touches the network."""
        worker.go.release()
        if not self.back.acquire(timeout=20):
            name = f"worker {worker.slot}, incarnation {worker.incarnation}"
            raise AssertionError(f"{name} does not come back: {self.describe()}")

    def describe(self):
        server = self.server
        head = f"t={self.now:.1f} ps_losses={self.ps_losses} kills={self.kills} "
        if server is None:
            return head + "server down"
        coordinator = server.coordinator
        return head + (
            f"{server.shard.state} gathering={coordinator.gathering} "
            f"ledger={coordinator.ledger and coordinator.ledger.dump()} "
            f"tasks={coordinator.tasks.queue} workers={[(w.slot, w.incarnation, w.end) for w in self.slots.values()]}"
        )
