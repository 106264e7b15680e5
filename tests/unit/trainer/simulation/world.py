"""A job in virtual time: the real worker loop, shard, coordinator and snapshots; a simulated network and scheduler.

Every worker's loop runs in a thread of its own, but only one of them at a time: it runs until it touches the network,
and then the scheduler, which draws everything from one seed, decides who is next. So a run is the same for the same
seed.

The model is a counter: the "gradient" of a batch is 1 at each of its samples, so the parameters themselves say how
often every sample of every pass was applied. With several shards each of them has such counters of its own, and one
more for each step that a worker computed: so the shards themselves say which steps are in some of them only.
"""

from __future__ import annotations

import contextlib
import io
import math
import random
import threading
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as FutureTimeout
from types import SimpleNamespace

import numpy as np

from shoal_trainer.contract import JobIdentity, SnapshotPolicy, StopAfter
from shoal_trainer.coordinator.coordinator import Coordinator
from shoal_trainer.coordinator.protocol import (
    AskPushes,
    DataSpec,
    Diverged,
    Join,
    Lease,
    Pushes,
    SnapshotShard,
    TaskDone,
)
from shoal_trainer.coordinator.reconciler import Reconciler, tell
from shoal_trainer.coordinator.rollback import IN_A_ROW, RollBack
from shoal_trainer.coordinator.snapshotter import Snapshotter, write_part
from shoal_trainer.data.batch import Batch
from shoal_trainer.errors import Fenced, Unreachable
from shoal_trainer.ps.buffers import aligned
from shoal_trainer.ps.layout import GRAIN, bounds
from shoal_trainer.ps.shard import ShardStore, State
from shoal_trainer.snapshot.claims import LOOK_SECONDS, Claim
from shoal_trainer.snapshot.store import SnapshotStore
from shoal_trainer.wire.messages import (
    AnswerMeta,
    ModelSpec,
    OptimizerConfig,
    Pulled,
    PushMeta,
    Welcome,
    decode_answer,
    encode_answer,
)
from shoal_trainer.worker.feed import Ready
from shoal_trainer.worker.glue import Step
from shoal_trainer.worker.leases import Leases
from shoal_trainer.worker.loop import End, Loop, Policy
from shoal_trainer.worker.optimizers import Placement
from shoal_trainer.worker.work import DataWork, Finished, TaskWork, Wasted

SAMPLES, BATCH, PASSES = 96, 2, 2
MODEL = "model/manifest.json"
STEPS_AT = 1024
"""Where in a shard's part the counters of the steps begin."""


def model(shards):
    """Counters; one part, as large as bounds() makes it, for each of several shards."""
    parameters = SAMPLES * PASSES if shards == 1 else shards * GRAIN
    return ModelSpec(
        fingerprint="0" * 64,
        parameters=parameters,
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


class AtOnce(Executor):
    """Runs what it is given at once, in the caller's thread."""

    def __init__(self, workers):
        del workers

    def submit(self, call, *arguments):
        future = Future()
        try:
            future.set_result(call(*arguments))
        except Unreachable as error:
            future.set_exception(error)
        return future


class Other:
    """Another shard, as shard 0 talks to it."""

    def __init__(self, world, index):
        self.world, self.index = world, index
        self.kept = None

    def pushes(self, of):
        self.world.talk()
        told = tell(self._server().shard, AskPushes.model_validate_json(AskPushes(of=of).to_json()).of)
        return Pushes.model_validate_json(told.to_json())

    def snapshot(self, number, epoch, published, generation):
        self.world.talk()
        server = self._server()
        request = SnapshotShard(number=number, epoch=epoch, published=published, generation=generation)
        return write_part(server.shard, server.store, request)

    def _server(self):
        """Over the connection that was there before, as long as its other end lives."""
        if self.kept not in self.world.cut_off:
            self.kept = self.world.servers[self.index]
        if self.kept is None:
            raise Unreachable("it is away")
        return self.kept


class Server:
    """One incarnation of a parameter server; the coordinator is beside number 0."""

    def __init__(self, world, index, epoch, *, follows=None):
        world.boots += 1
        self.shard = ShardStore(
            index, world.shards, epoch, boot=world.boots, follows=follows, clock=world.clock
        )
        self.world, self.looks_at = world, 0.0
        self.store = SnapshotStore(world.storage)
        self.claim = Claim(world.storage, index, epoch)
        self.claim.make()
        found = self.store.load_settled(index, world.shards)
        begun = None if found or not world.begins_with else world.begins_with.load_newest(index, world.shards)
        if found is not None:
            self.shard.restore(found[1])
        if begun is not None:
            self.shard.restore(begun[1], other_run=True)
        self.told = not self.shard.follows and found is None
        self.index = index
        if index:
            return
        job = JobIdentity(namespace="n", name="j", uid="u")
        self.coordinator = Coordinator(
            job, StopAfter(epochs=PASSES), BATCH, self.shard, clock=world.clock, wall=world.clock
        )
        others = [Other(world, other) for other in range(1, world.shards)]
        self.reconciler = Reconciler(self.shard, others, self.coordinator, clock=world.clock)
        policy = SnapshotPolicy(every_seconds=60, retain=2)
        self.snapshotter = Snapshotter(
            self.shard, others, self.coordinator, self.reconciler, self.store, policy,
            fenced=self.fenced, wall=world.clock, executor=AtOnce,
        )  # fmt: skip
        self.rollback = RollBack(
            self.shard,
            {},
            self.coordinator,
            self.store,
            self.snapshotter,
            fenced=self.fenced,
            wall=world.clock,
        )
        if found is not None:
            self.coordinator.load(found[0].ledger)
        if begun is not None:
            self.coordinator.load(begun[0].ledger, other_run=True)
        if MODEL in world.storage.files:
            self.coordinator.end(world.final.coordinator.finished)

    def fenced(self, error):
        """The storage knows a newer incarnation."""
        if self not in self.world.cut_off:
            raise AssertionError(f"the newest server {self.index} was fenced: {error}")
        self.world.cut_off.remove(self)

    def look(self):
        """Whether there is a newer incarnation, as `Watch` looks."""
        self.looks_at = self.world.now + LOOK_SECONDS
        try:
            self.claim.check()
        except Unreachable:
            return
        except Fenced as error:
            self.fenced(error)

    def go_back(self, generation):
        """Another shard hears that the job has gone back."""
        found = self.store.load_newest(self.index, self.shard.shards)
        if found is None or found[0].generation < generation:
            raise Unreachable("the storage does not show that snapshot yet")
        self.shard.roll_back(found[1])


def another_run(shards):
    """The store of a run that trained nothing: the counters of one that begins with it tell of itself alone."""
    world = SimpleNamespace(
        boots=0, shards=shards, storage=MemoryStorage(), clock=lambda: 0.0, begins_with=None, servers=[],
        cut_off=(), talk=lambda: None,
    )  # fmt: skip
    world.servers += [Server(world, index, 0) for index in range(shards)]
    for server in world.servers:
        server.shard.hello(0, 0, model(shards))
        server.shard.initialize(aligned(server.shard.size))
    world.servers[0].coordinator.join(
        Join(slot=0, incarnation=0, data=DataSpec(size=SAMPLES), batch_size=BATCH)
    )
    assert world.servers[0].snapshotter.take() is not None
    return world.servers[0].store


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
        self.servers = [None] * world.shards
        self.connected = [False] * world.shards
        self.boots = [0] * world.shards
        self.cut_until = 0.0
        self.killed = False
        self.end = None
        self.joined = False
        self.asked = 0
        self.drain = Drain(self)
        self.leases = Leases()
        self.queue = []
        self.in_task = False
        self.go = threading.Semaphore(0)
        glue = SimpleNamespace(
            layout=SimpleNamespace(size=world.model.size, trainable=world.model.size),
            dtype=np.float32,
            alias=lambda array: array,
            initial=lambda: aligned(world.model.size),
            step=self.compute,
            reuse=lambda update: update.fill(math.nan),  # who still reads it is found
        )
        self.loop = Loop(
            glue, Placement(world.model.optimizer), self, self, self, self.leases, self.task, self.drain,
            Policy(on_nan="rollback"), clock=world.clock,
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

    def call(self, what, *, index=0, of=None, anew=False):
        """One request: it may be lost, or its answer, or it may arrive twice. `anew`: over a new connection."""
        world = self.world
        self.pause()
        kept = self.connected[index] and self.servers[index] in world.cut_off and not anew
        server = self.servers[index] if kept else world.servers[index]
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

    def disconnect(self, index=None):
        for at in range(self.world.shards) if index is None else (index,):
            if self.connected[at] and self.servers[at] is not None:
                self.servers[at].shard.disconnect(self.slot)
            self.connected[at] = False

    # --- as `Exchange`

    def connect(self, copy):
        def hello(server):
            i = server.shard.index
            self.disconnect(i)
            server.shard.connect(self.slot, self.incarnation)
            self.servers[i], self.connected[i], self.boots[i] = server, True, server.shard.boot
            offered = copy()
            version = None if offered is None else offered.pulled.versions[i]
            generation = 0 if offered is None else offered.generation
            welcome = server.shard.hello(self.slot, self.incarnation, self.world.model, version, generation)
            if welcome.wants_copy:
                p, (low, high) = offered.pulled, self.world.bounds[i]
                counts = p.shard_samples[i], p.live_workers
                meta = decode_answer(encode_answer(AnswerMeta(*counts, p.applied[i], p.journals[i])))
                part = offered.flat[low:high].copy()
                who = self.slot, self.incarnation
                welcome = server.shard.offer(*who, version, meta, part, generation=generation)
            return welcome

        def once():
            welcomes = []
            for i in range(self.world.shards):  # those that are here get the copy though others are away
                with contextlib.suppress(Unreachable):
                    welcomes.append(self.call(hello, index=i, anew=True))
            if len(welcomes) < self.world.shards:
                self.disconnect()
                return None
            welcome = Welcome(tuple(welcomes))
            return welcome if welcome.alike and not any(one.recovering for one in welcomes) else None

        return Answer(once)

    def close(self):
        self.disconnect()

    def initialize(self, flat):
        return Answer(lambda: self.on_line(lambda s, part: s.shard.initialize(flat[part]) or True))

    def pull(self, out, idle=False):
        def on(server, part):
            return server.shard.pull(self.slot, out[part], boot=self.boots[server.shard.index], idle=idle)

        return Answer(lambda: self.pulled(self.on_line(on)))

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

        def apply(server, part):
            out[part] = update[part]
            base, boot = push.base_versions[server.shard.index], self.boots[server.shard.index]
            who = self.slot, self.incarnation
            return server.shard.delta(*who, push.seq, base, meta, out[part], boot=boot)

        return self.pulled(self.on_line(apply))

    def on_line(self, what):
        """The same to every shard. Where one of them fails, it is on its way to those after it, or is not."""
        world, answers, failed = self.world, [], None
        for index, (low, high) in enumerate(world.bounds):
            try:
                answers.append(
                    self.call(lambda s: what(s, slice(low, high)), index=index, of=self.servers[index])  # noqa: B023
                )
            except (Unreachable, Fenced) as error:
                failed = failed or error
                if index + 1 == world.shards or world.random.random() < 0.5:
                    break
        if failed is None:
            return answers
        self.disconnect()
        raise failed

    @staticmethod
    def pulled(answers):
        metas = [answer.meta for answer in answers]
        return Pulled(
            tuple(answer.version for answer in answers),
            tuple(dict(meta.applied) for meta in metas),
            metas[0].samples,
            metas[0].live_workers,
            tuple(meta.samples for meta in metas),
            journals=tuple(meta.journal for meta in metas),
        )

    # --- as `Feed` and `Coordinator`

    def start(self):
        """Nothing reads ahead of the loop but one lease."""

    def stop(self):
        self.queue.clear()

    def go_on(self):
        self.in_task = False

    def get(self, timeout):
        del timeout
        if not self.queue:
            try:
                self.queue += self.items()
            except Unreachable:
                return None
        return self.queue.pop(0) if self.queue else None

    def items(self):
        if self.in_task:
            return []
        if not self.joined:
            self.join({}, Wasted())
            self.joined = True
        number, generation = self.asked + 1, self.leases.generation
        given = self.call(lambda s: s.coordinator.next_work(self.slot, self.incarnation, generation, number))
        self.asked = number
        if given.kind == "idle":
            self.world.sleep(self, given.seconds)
            return []
        if given.kind == "finished":
            return [Finished()]
        if given.kind == "task":
            self.in_task = True
            return [TaskWork(given.token, given.task, given.epoch)]
        lease = given.lease
        work = DataWork(lease.token, lease.epoch, lease.start, lease.stop, generation=generation)
        self.leases.grant(work)
        ends = [min(b + BATCH, lease.stop) for b in range(lease.start, lease.stop, BATCH)]
        starts = range(lease.start, lease.stop, BATCH)
        return [
            Ready(work, Batch(np.arange(a, b), None, np.ones(b - a), b - a, b))
            for a, b in zip(starts, ends, strict=True)
        ]

    def compute(self, parameters, batch, updates):
        del parameters, updates
        self.pause()
        world, epoch = self.world, self.epoch_of(batch)
        if world.spoils():
            return Step(aligned(world.model.size), math.nan, False)
        update = aligned(world.model.size)
        for low, _ in world.bounds:
            update[low + epoch * SAMPLES + batch.x] = 1.0
            if world.shards > 1:
                update[low + STEPS_AT + world.steps] = 1.0
        world.steps += 1
        world.covers.append([(epoch, int(at)) for at in batch.x])
        return Step(update, 0.5, True)

    def epoch_of(self, batch):
        return self.reading

    def join(self, held, wasted):
        def lease(work, token):
            return Lease(term=token[0], counter=token[1], epoch=work.epoch, start=work.start, stop=work.stop)

        request = Join(
            slot=self.slot,
            incarnation=self.incarnation,
            data=DataSpec(size=SAMPLES, validation=True),
            batch_size=BATCH,
            held=tuple(lease(work, token) for token, work in held.items()),
            generation=max((work.generation for work in held.values()), default=0),
            wasted_steps=wasted.steps,
            wasted_told=wasted.told,
        )
        joined = self.call(lambda s: s.coordinator.join(request))
        self.read_ahead()
        return {renamed.old: renamed.new for renamed in joined.renamed}

    def read_ahead(self):
        """The thread that reads ahead asks for work while the loop has its hands full."""
        if self.joined and self.world.random.random() < 0.5:
            with contextlib.suppress(Unreachable):
                self.queue += self.items()

    def diverged(self, generation, batch, what):
        place = {"epoch": batch.epoch, "start": batch.start, "stop": batch.stop}
        report = Diverged(
            slot=self.slot, incarnation=self.incarnation, generation=generation, what=what, **place
        )

        def told(server):
            if self.world.talking:  # a snapshot is being taken: in threads this one would wait for it
                raise Unreachable("it will be tried again")
            server.rollback.diverged(report)
            return True

        self.call(told)

    def task(self, work):
        metrics = {"val_accuracy": 0.5} if work.kind == "evaluate" else {}
        request = TaskDone(slot=self.slot, incarnation=self.incarnation, token=work.token, metrics=metrics)

        def done(server):
            if self.world.talking:  # the reconciler is in use: in threads this one would wait for it
                raise Unreachable("it will be tried again")
            coordinator = server.coordinator
            task = coordinator.held_task(self.slot, self.incarnation, work.token)
            if task is not None and task.kind == "export":
                with contextlib.suppress(Unreachable):
                    server.reconciler.look(at_end=True)
                try:
                    server.claim.check()
                except Fenced as error:
                    server.fenced(error)
                    raise Unreachable(str(error)) from None
                self.world.storage.create(MODEL, b"")
                coordinator.end(coordinator.succeeded())
                self.world.final = server
            coordinator.task_done(request)
            return True

        self.call(done)

    def leave(self):
        self.call(lambda s: s.coordinator.leave(self.slot, self.incarnation))
        self.read_ahead()


class World:
    """Runs a job to its end under the faults that `seed` and `faults` make.

    `safe` workers live to the end, and server 0 is lost at most once: what nobody knows of, no later fault mends.
    `begins_with`: another run's snapshots. `alive`: how often a server that is replaced lives on, reached by those who
    were connected to it.
    """

    def __init__(
        self, seed, *, workers=3, faults=1.0, ps_faults=1.0, shards=1, safe=False, begins_with=None, alive=0.0
    ):
        self.random = random.Random(seed)
        self.now = 0.0
        self.loss = 0.01 * faults * self.random.random()
        self.faults, self.ps_faults, self.safe = faults, ps_faults, safe
        self.storage = MemoryStorage()
        self.begins_with = begins_with
        self.alive = alive
        self.traced = [False] * shards
        """Which servers have had parameters."""
        self.cut_off = []
        """Servers of which the cluster knows nothing any more."""
        self.outlived = 0
        self.spoilt_at = None
        self.back = threading.Semaphore(0)
        self.scheduler = threading.current_thread()
        self.talking = False
        self.asleep = {}
        self.shards, self.model = shards, model(shards)
        self.bounds = bounds(self.model.size, shards)
        self.steps = 0
        self.covers = []
        """Of each step: the samples, as (pass, position)."""
        self.final = None
        self.ps_losses = self.kills = 0
        self.epochs, self.back_at = [0] * shards, [math.inf] * shards
        self.boots = 0
        self.servers = [None] * shards
        self.servers = [Server(self, index, 0) for index in range(shards)]
        self.slots = {}
        self.everyone = []
        for slot in range(workers):
            self.start(slot, 0)

    @property
    def server(self):
        """Number 0, with the coordinator; None while it is away."""
        return self.servers[0]

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

    def run(self, most=60_000, calm_after=math.inf):
        """Until every slot has finished; after so many turns nothing fails any more.

        Raises AssertionError where it does not come to an end.
        """
        try:
            for turn in range(most):
                if all(worker.end is End.FINISHED for worker in self.slots.values()):
                    return
                if turn == calm_after:
                    self.faults = self.ps_faults = self.loss = 0.0
                    self.storage.away = False
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

    def end(self):
        """Every shard is back, and what is in some of them only is counted as the job's end does it."""
        self.cut_off = [server for server in self.cut_off if server is self.final]
        for index in range(1, self.shards):
            if self.servers[index] is None:
                self.servers[index] = Server(self, index, self.epochs[index] + 1)
            shard = self.servers[index].shard
            if shard.state is not State.READY:  # nobody was left to say hello, nor to give it values
                shard.hello(0, 99, self.model)
                self.now += 10.0
                if shard.state is State.EMPTY:
                    shard.initialize(aligned(shard.size))
        # Whether something may yet come is not asked: one whose goodbye was lost still seems to be there.
        self.final.reconciler.look(at_end=True)

    def turn(self):
        self.now += self.random.expovariate(50)
        self.fault()
        if self.server is not None:
            self.server.coordinator.tick()
            self.hear_of_shards()
        for server in list(self.cut_off):
            if self.now >= server.looks_at:
                server.look()
            if server.index == 0:
                server.coordinator.tick()
        for slot, worker in list(self.slots.items()):
            if worker.end is not None and worker.end is not End.FINISHED:
                if worker.end not in {Killed, Fenced, End.DRAINED}:
                    raise AssertionError(f"worker {slot} ended with {worker.end!r}") from worker.end
                self.start(slot, worker.incarnation + 1)
        self.somebody()

    def somebody(self):
        """One worker goes on until it touches the network."""
        ready = [w for w in self.everyone if w.end is None and self.asleep.get(w, 0.0) <= self.now]
        if ready:
            self.resume(self.random.choice(ready))

    def talk(self):
        """While shard 0 talks to another one the workers go on, and shards are lost."""
        if threading.current_thread() is not self.scheduler:  # a worker's own request
            return
        self.talking = True
        for _ in range(self.random.randrange(4)):
            self.somebody()
        self.talking = False
        if self.may_lose() and self.random.random() < 0.01 * self.ps_faults:
            self.lose(self.random.randrange(1, self.shards))

    def spoils(self):
        """Whether a step gives what is not finite; the limit of roll backs is never met."""
        if self.server is None or self.random.random() > 0.003 * self.faults or self.talking:
            return False
        found = None if self.storage.away else self.server.store.load_newest(0, self.shards)
        if found is None or found[0].number == self.spoilt_at:
            return False
        if not found[0].ledger or found[0].ledger.get(IN_A_ROW):
            return False
        self.spoilt_at = found[0].number
        return True

    def hear_of_shards(self):
        """Shards that came back say so, and those that should go back do."""
        for server in self.servers[1:]:
            if server is not None and server.shard.generation < self.server.shard.generation:
                with contextlib.suppress(Unreachable):
                    server.go_back(self.server.shard.generation)
        for server in self.servers:
            if server is not None and not server.told and server.shard.state is State.READY:
                with contextlib.suppress(Unreachable):
                    self.server.reconciler.look()
                    server.told = True

    def fault(self):
        roll = self.random.random() / max(1e-9, self.faults)
        alive = [w for w in self.slots.values() if w.end is None and not self.safe]
        back = [i for i, server in enumerate(self.servers) if server is None and self.now >= self.back_at[i]]
        if back:
            index = back[0]
            self.storage.away = False
            # Started again in place, where it left a trace if it had parameters; or in another pod.
            lives = any(server.index == index for server in self.cut_off)
            in_place = self.random.random() < 0.4 and not lives
            self.epochs[index] += not in_place
            follows = self.traced[index] or self.epochs[index] > 0
            self.servers[index] = Server(self, index, self.epochs[index], follows=follows)
        elif roll < 0.004 and self.server is not None:
            with contextlib.suppress(Unreachable):
                self.server.snapshotter.take()
            for server in [server for server in self.cut_off if server.index == 0]:
                try:
                    server.snapshotter.take()
                except Unreachable:
                    pass
                except Fenced as error:
                    server.fenced(error)
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
        elif self.ps_faults and roll < 0.010 + 0.001 * self.ps_faults and self.may_lose():
            if self.shards == 1:
                self.lose(0)
            elif self.random.random() < 0.25:
                for index in self.random.sample(range(self.shards), self.random.randint(2, self.shards)):
                    self.lose(index)
            else:
                self.lose(self.random.randrange(self.shards))

    def may_lose(self):
        """Whether a server may be lost now."""
        return self.server is not None and self.final is None and not (self.safe and self.ps_losses)

    def lose(self, index):
        if self.servers[index] is None:
            return
        self.ps_losses += 1
        self.storage.away = False
        self.traced[index] |= self.servers[index].shard.state is State.READY
        if self.alive and self.random.random() < self.alive:
            self.cut_off.append(self.servers[index])
            self.servers[index].looks_at = self.now + self.random.uniform(0.0, LOOK_SECONDS)
            self.outlived += 1
        self.servers[index] = None
        self.back_at[index] = self.now + self.random.uniform(0.1, 6.0)

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
