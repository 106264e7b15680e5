"""A simulated worker: the real loop in a thread that runs only when the scheduler resumes it."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from types import SimpleNamespace

import numpy as np

from shoal_trainer.coordinator import report
from shoal_trainer.coordinator.protocol import (
    DataSpec,
    Diverged,
    FileEnded,
    Heartbeat,
    Join,
    Lease,
    Leave,
    Next,
    TaskDone,
)
from shoal_trainer.data.batch import Batch
from shoal_trainer.errors import Fenced, Unreachable
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.worker.feed import EndOfFile, Ready
from shoal_trainer.worker.flat_model import Step
from shoal_trainer.worker.leases import Leases
from shoal_trainer.worker.loop import Loop, Policy
from shoal_trainer.worker.on_host import HostInclusion
from shoal_trainer.worker.optimizers import Placement
from shoal_trainer.worker.run_task import run_task
from shoal_trainer.worker.tasks import Outcome
from shoal_trainer.worker.work import About, DataWork, Finished, TaskWork, Wasted
from tests.unit.trainer.simulation.invariants import check_joined
from tests.unit.trainer.simulation.job import BATCH, MODEL_FILE, PIECE, SAMPLES, STEPS_AT
from tests.unit.trainer.simulation.network import Drain, Exchange


def baton():
    """A lock that is held: who waits for it goes on when another thread releases it, sooner than with a semaphore."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Killed(BaseException):
    """The worker was killed."""


class Total:
    """A push of several steps contains the sum of their updates, because the parameters are counters."""

    clips = False

    def __init__(self):
        self.clear()

    def add(self, update, samples):
        del samples
        self.sum = self.sum + update
        update.fill(math.nan)  # makes a later read of the update visible

    def result(self, samples):
        del samples
        total, self.sum = self.sum, 0.0
        return total

    def clear(self):
        self.sum = 0.0


class Worker:
    """One incarnation of one slot; also the feed and the coordinator client of its loop."""

    def __init__(self, world, slot, incarnation):
        self.world, self.slot, self.incarnation = world, slot, incarnation
        self.killed = False
        self.end = None
        self.reading = False
        self.requests, self.joins = 0, itertools.count(1)
        self.exchange = Exchange(self)
        self.drain = Drain(self)
        self.leases = Leases()
        self.queue = []
        self.in_task = False
        self.fenced = None
        self.beats_at = world.now
        self.outage_since = None
        self.hangs_for, self.hangs = 0.0, (0.0, 0.0)
        """For how long the next read hangs, and from when to when the last one."""
        self.resumed = baton()
        vector = SimpleNamespace(
            dtype=np.float32,
            alias=lambda array: array,
            upload=lambda array: array,
            upload_when=lambda _answer, _array: None,
            on_devices=lambda array: array,
            reuse=lambda update: update.fill(math.nan),  # makes a later read of the update visible
        )
        flat_model = SimpleNamespace(
            layout=SimpleNamespace(size=world.model.size, trainable=world.model.size),
            vector=vector,
            mean=Total,
            inclusion=lambda: HostInclusion(world.model.size, lambda array: array),
            averages=(),
            initial=lambda: aligned(world.model.size),
            step=self.step,
        )
        self.loop = Loop(
            flat_model, Placement(world.model.optimizer), self.exchange, self, self, self.leases, self.task, self.drain,
            Policy(on_nan="rollback", steps_per_push=world.steps_per_push, rounds=world.rounds), clock=world.clock,
        )  # fmt: skip
        self._record_epochs()
        self._check_marks()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def _check_marks(self):
        """The steps of a push keep their leases or lose them together: none has to be taken out of their sum."""
        marks = self.loop.upstream.marks

        def all_or_none():
            steps, found = len(self.loop.upstream.pending), marks()
            assert len(found) in {0, steps}, f"{len(found)} of {steps} steps kept their leases"
            return found

        self.loop.upstream.marks = all_or_none

    def _record_epochs(self):
        """Record the epoch of the current item in `epoch`: batches do not contain it."""
        train, alone, take = self.loop._train, self.loop._train_locally, self.loop._next_item

        def recording(function):
            def recorded(*arguments):
                self.epoch = next(item for item in arguments if isinstance(item, Ready)).work.epoch
                return function(*arguments)

            return recorded

        def taken(timeout):
            item = take(timeout)
            if isinstance(item, Ready):
                self.epoch = item.work.epoch
            return item

        self.loop._train, self.loop._train_locally, self.loop._next_item = (
            recording(train),
            recording(alone),
            taken,
        )

    # --- scheduling

    def run(self):
        try:
            self.resumed.acquire()
            if self.killed:
                raise Killed
            with contextlib.suppress(Unreachable):  # the heartbeats join before the model is traced
                self.join({}, Wasted())
            self.end = self.loop.run()
        except Killed:
            self.end = Killed
        except Fenced:
            self.end = Fenced
        except BaseException as error:
            self.end = error
        finally:
            try:
                self.exchange.disconnect()
            finally:
                self.world.yielded.release()

    def pause_on(self, server):
        """Let others run during a call of this server, which ends even if this worker is killed."""
        for _ in range(self.world.random.randrange(4)):
            if not self.killed:
                with contextlib.suppress(Killed):
                    self.pause()
        if server is not self.world.server and server not in self.world.cut_off:
            raise Unreachable("the server is lost")

    def pause(self):
        self.world.yielded.release()
        self.resumed.acquire()
        if self.killed:
            raise Killed

    def held(self):
        """The samples of its leases that it has no answer for."""
        lengths = self.world.lengths
        return sum((work.stop or lengths[work.number]) - work.start for work in self.leases.held().values())

    # --- as `Feed`

    def start(self):
        """Start to read ahead, at most one lease."""
        self.reading = True

    def stop(self):
        self.queue.clear()

    def task_finished(self):
        self.in_task = False

    @property
    def reading_seconds(self):
        """For how long the read in progress hangs."""
        since, until = self.hangs
        return self.world.now - since if self.world.now < until else 0.0

    def get(self, timeout):
        if self.queue and self.hangs_for and not self.in_task:
            self.hangs, self.hangs_for = (self.world.now, self.world.now + self.hangs_for), 0.0
        if self.world.now < self.hangs[1]:
            self.world.sleep(self, timeout)
            return None
        if not self.queue:
            try:
                self.queue += self.items()
            except Unreachable:
                return None
            if self.hangs_for and not self.in_task:
                return None  # it has a lease, and hangs from now on
        return self.queue.pop(0) if self.queue else None

    def upcoming(self):
        return self.queue[0].batch if self.queue and isinstance(self.queue[0], Ready) else None

    def items(self):
        if self.fenced is not None:
            raise self.fenced
        if self.in_task:
            return []
        number, generation = self.requests + 1, self.leases.generation
        request = Next(
            slot=self.slot, incarnation=self.incarnation, number=number, generation=generation,
            stopped=self.leases.stopped,
        )  # fmt: skip
        given, server = self.exchange.ask(lambda server: (server.coordinator.next_work(request), server))
        self.requests = number
        if given.kind == "idle":
            self.world.sleep(self, given.seconds)
            return []
        if given.kind == "finished":
            return [Finished()]
        if given.kind == "task":
            self.in_task = True
            return [TaskWork(given.token, given.task, given.epoch)]
        lease, first, stop = given.lease, 0, given.lease.stop
        if (lengths := self.world.lengths) is not None:
            first, stop = sum(lengths[: lease.number]), stop or lengths[lease.number]
        granted = self.slot, self.incarnation, lease.epoch, lease.number, lease.start
        assert self.world.granted.setdefault(lease.token, granted) == granted, f"{lease.token} is not unique"
        place = lease.epoch, lease.start, lease.stop, lease.file, lease.number
        work = DataWork(lease.token, *place, generation=generation)
        self.leases.grant(work)
        self.world.losses.granted(server, stop - lease.start)
        ranges = [(at, min(at + BATCH, stop)) for at in range(lease.start, stop, BATCH)]
        batches = [Batch(first + np.arange(a, b), None, np.ones(b - a), b - a, b) for a, b in ranges]
        ended = [] if lease.stop is not None else [EndOfFile(work, max(lease.start, stop))]
        return [*(Ready(work, batch) for batch in batches), *ended]

    def read_ahead(self):
        """The real feed's thread may ask for work while the loop is busy."""
        if self.reading and self.world.random.random() < 0.5:
            with contextlib.suppress(Unreachable):
                self.queue += self.items()

    # --- as `FlatModel`

    def step(self, parameters, batch, updates, upcoming):
        del parameters, updates, upcoming
        self.pause()
        world, epoch = self.world, self.epoch
        if world.faults.makes_step_diverge():
            world.diverged += 1
            return Step(aligned(world.model.size), math.nan, False)
        update = aligned(world.model.size)
        for low in range(0, update.size, PIECE):
            update[low + epoch * SAMPLES + batch.x] = -1.0 if world.gradients else 1.0
            update[low + STEPS_AT + world.steps] = -1.0 if world.gradients else 1.0
        world.steps += 1
        world.covers.append([(epoch, int(at)) for at in batch.x])
        world.computed_in.append(self.loop.upstream.generation)
        world.counts_with.append(world.bounds[0][1] // PIECE - 1)
        return Step(update, 0.5, True)

    # --- as `Coordinator`

    def join(self, held, wasted):
        def lease(work, token):
            place = {"epoch": work.epoch, "start": work.start, "stop": work.stop, "number": work.number}
            return Lease(term=token[0], counter=token[1], **place)

        data = DataSpec(size=SAMPLES, validation=True, block=self.world.block)
        if self.world.lengths is not None:
            names = tuple(f"file-{number}" for number in range(len(self.world.lengths)))
            data = DataSpec(files=names, validation=True)
        left_out = {"files": (), "left_out": len(data.files), "left_out_digest": data.digest}
        request = Join(
            slot=self.slot,
            incarnation=self.incarnation,
            data=data.model_copy(update=left_out) if data.files else data,
            batch_size=BATCH,
            leases=tuple(lease(work, token) for token, work in held.items()),
            generation=max((work.generation for work in held.values()), default=0),
            wasted_steps=wasted.steps,
            wasted_acknowledged=wasted.acknowledged,
            known_samples=wasted.known_samples,
            number=next(self.joins),
        )

        def send(request):
            def join(server):
                joined = server.coordinator.join(request)
                check_joined(server.coordinator, (self.slot, self.incarnation), joined)
                return joined

            return self.exchange.ask(join)

        joined = send(request)
        if joined.wants_files:
            joined = send(request.model_copy(update={"data": data, "number": next(self.joins)}))
        self.read_ahead()
        return {renamed.old: renamed.new for renamed in joined.renamed}

    def diverged(self, generation, batch, what):
        place = {"epoch": batch.epoch, "file": batch.file, "start": batch.start, "stop": batch.stop}
        diverged = Diverged(
            slot=self.slot, incarnation=self.incarnation, generation=generation, reason=what, **place
        )

        def send(server):
            # Threads would wait here until the snapshot is taken, or the other rollback has ended.
            if self.world.interleaving or server.snapshotter.taking.locked():
                raise Unreachable("it will be tried again")
            server.storage_pause = lambda: self.pause_on(server)
            try:
                server.rollback.diverged(diverged)
            finally:
                server.storage_pause = lambda: None
            return True

        self.exchange.ask(send, late=False)

    def file_ended(self, token, length):
        request = FileEnded(slot=self.slot, incarnation=self.incarnation, token=token, length=length)
        self.exchange.ask(lambda server: server.coordinator.file_ended(request) or True)

    def finished(self):
        """Whether a heartbeat has learned that the job has finished, or that this worker is fenced."""
        if self.fenced is not None:
            raise self.fenced
        server = self.world.server
        over = server is not None and server.coordinator.finished is not None
        return over and self.world.random.random() < 0.1

    def learning_rate(self):
        """No callback sets it."""

    def set_message(self, message, about=None):
        """Of the messages of heartbeats only the duration of an outage is simulated."""
        if about is About.OUTAGE:
            self.outage_since = (self.outage_since or self.world.now) if message else None

    def beat(self):
        """A heartbeat, which another thread sends; a fenced worker learns it at its next request for work."""
        world = self.world
        if world.server is None or world.clock() < self.exchange.cut_until[-1]:
            return
        if world.beats.random() < world.loss:
            return
        try:
            outage = 0.0 if self.outage_since is None else world.now - self.outage_since
            beat = Heartbeat(
                slot=self.slot, incarnation=self.incarnation, reading_seconds=self.reading_seconds,
                outage_seconds=outage,
            )  # fmt: skip
            world.server.coordinator.heartbeat(beat)
        except Fenced as error:
            self.fenced = error

    def task(self, work, flat):
        del flat
        metrics = {"val_accuracy": 0.5} if work.kind == "evaluate" else {}
        run_task(work, lambda: Outcome(metrics), self, self.drain)

    def task_done(self, work, metrics, files, *, stop, message, learning_rate=None):
        del files, stop, message
        request = TaskDone(slot=self.slot, incarnation=self.incarnation, token=work.token, metrics=metrics)

        def send(server):
            if self.world.interleaving:  # threads would wait here for the reconciler
                raise Unreachable("it will be tried again")
            task = server.coordinator.held_task((self.slot, self.incarnation), work.token)
            if task is not None and task.kind == "export":
                self._publish(server)
            server.coordinator.task_done(request)
            return True

        self.exchange.ask(send)

    def _publish(self, server):
        with contextlib.suppress(Unreachable):
            server.reconciler.compare(at_end=True)
        try:
            server.claim.check()
        except Fenced as error:
            server.fenced(error)
            raise Unreachable(str(error)) from None
        self.world.storage.create(MODEL_FILE, b"")
        server.coordinator.end(report.succeeded(server.coordinator))
        self.world.final = server

    def leave(self, wasted, _seconds):
        request = Leave(
            slot=self.slot, incarnation=self.incarnation,
            wasted_steps=wasted.steps, wasted_acknowledged=wasted.acknowledged,
        )  # fmt: skip
        try:
            self.exchange.ask(lambda server: server.coordinator.leave(request))
        except Unreachable:
            self.world.unheard += 1
            raise
        self.read_ahead()
