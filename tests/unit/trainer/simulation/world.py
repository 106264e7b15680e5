"""A job in virtual time: real worker loops, shards, coordinator and snapshots; simulated network and scheduler.

Each worker's loop has a thread, but only one thread runs at a time, until it uses the network; then the scheduler
chooses the next one. All random draws come from one seed, so the same seed gives the same run.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import traceback

import numpy as np

from shoal_trainer.contract import StopAfter
from shoal_trainer.errors import FaultyDevice, Fenced, TrainerError, Unreachable
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.shard import State
from shoal_trainer.ps.shard_bounds import bounds
from shoal_trainer.worker.loop import End
from tests.unit.trainer.simulation.faults import Faults
from tests.unit.trainer.simulation.invariants import check_fences, check_leases, check_lost
from tests.unit.trainer.simulation.job import EPOCHS, SAMPLES, decoded, encoded, lengths, model
from tests.unit.trainer.simulation.losses import Losses
from tests.unit.trainer.simulation.server import Server
from tests.unit.trainer.simulation.storage import MeanStorage, MemoryStorage, WornStorage
from tests.unit.trainer.simulation.worker import Killed, Worker, baton

CALM_AFTER = 30_000 if "SHOAL_SEEDS" in os.environ else 10_000
"""Turns with faults, more in a night: few jobs last so long, and those that make no progress took half of the time."""
HUNG_SECONDS = 120
"""For so long a worker's thread may run, of real time: it computes nothing."""


class World:
    """Runs a job to its end, with random faults from `seed`.

    `faults`, `ps_faults`, `safe`, `survival`: see `Faults`. `begins_with`: another run, whose snapshots the servers
    look for when the faults have begun. `steps`: training stops after this many. `gradients`: see `job`. `streams`:
    whether shards are so large that pushes and pulls are streams. `files`: the samples are in files, whose lengths the
    job learns, and whose list each worker leaves out until it is asked for it. `mean`: answers of the storage are lost,
    parameter server 0 dies while it writes, and losses of servers do not end an outage of the storage. `bound`: of the
    staleness. `hangs`: reads hang, for ever or for a while, and workers are cut off from one shard for good, of which
    their heartbeats tell. `forks`: all copies
    but one are lost with server 0, and that one comes back when its replacement has gone another way. `worn`: see
    `WornStorage`; no step diverges, as a rollback to a damaged snapshot ends the job. `overflows`: journals do, so that
    a copy's pushes may not be known. `bf16`: requests and answers are coded so. `resizes`: the numbers of shards with
    which the job is resumed after it was suspended.
    """

    def __init__(  # noqa: PLR0915  # what a world has is said in one place
        self,
        seed,
        *,
        workers=3,
        faults=1.0,
        ps_faults=1.0,
        shards=1,
        safe=False,
        begins_with=None,
        survival=0.0,
        steps=None,
        steps_per_push=1,
        gradients=False,
        streams=False,
        mean=False,
        files=False,
        bound=None,
        hangs=False,
        forks=False,
        worn=False,
        overflows=False,
        bf16=False,
        resizes=(),
    ):
        self.random, self.beats = random.Random(seed), random.Random(~seed)
        self.block = seed % 2 * (SAMPLES // 4)
        """So many samples are read together (`Source.block`)."""
        self.now = 0.0
        self.loss = 0.01 * faults * self.random.random()
        self.storage = MeanStorage(seed) if mean else WornStorage(seed) if worn else MemoryStorage()
        self.begins_with = begins_with
        self.stop_after = StopAfter(epochs=EPOCHS, steps=steps)
        self.steps_per_push = steps_per_push
        self.rounds = seed % 4 < 2
        """Whether workers wait for each other after their pushes."""
        self.steady = seed % 3 == 0
        """Whether pushes may be answered without parameters, which are pulled later (`Cadence`)."""
        self.unpulled = 0
        """The steps of pushes that were applied, and whose worker then did not reach the server."""
        self.unheard = 0
        """The workers whose last words did not arrive, with what they had wasted."""
        self.shards, self.streams = shards, streams
        self.model = model(max(shards, *resizes, 1), gradients=gradients)
        self.gradients, self.bound, self.hangs, self.forks = gradients, bound, hangs, forks
        self.bf16, self.overflows, self.unnamed = bf16, overflows, set()
        """The steps, as (shard, step), in a copy that a shard began with where nothing tells their pushes."""
        self.awaited = set()
        """The pushes for which others wait, with their shards: each worker has pulled their base since it connected."""
        self.weights = {}
        """The weights with which each push was applied: in another shard, or after a loss, it has another one."""
        self.pushes = {}
        """The push of each step that was sent as a gradient."""
        self.sent, self.granted = {}, {}
        """The pushes in which each step was sent, and the worker and place of each lease by its token."""
        self.bounds = bounds(self.model.size, shards)
        self.resizes, self.resized, self.resized_at = list(resizes), False, 0
        """`resized`: whether the job was resumed so; `resized_at`: the step with which it was last."""
        self.counts_with = []
        """Of each step: the piece of the model with which its push counts, the last one of shard 0."""
        self.losses = Losses(self)
        self.faults = Faults(self, faults, ps_faults, safe=safe, survival=survival)
        self.yielded, self.hung = baton(), False
        """Released by a worker's thread when it stops running; whether one did not for `HUNG_SECONDS`."""
        self.scheduler = threading.current_thread()
        self.interleaving = False
        """Whether workers run during a call of shard 0."""
        self.wakes_at = {}
        self.steps = self.diverged = 0
        """The steps that were finite, and those that were not."""
        self.covers, self.computed_in = [], []
        """Of each step: the samples, as (epoch, position), and the generation of the parameters."""
        self.kept = {}
        """The steps in the snapshot with which each generation begins."""
        self.final = None
        """The server that published the model."""
        self.boots, self.epochs = 0, [0] * shards
        self.cut_off = []
        """Replaced servers that keep running."""
        self.in_flight = []
        """What servers read late, as (time, server, request)."""
        self.cut_until = [0.0] * shards
        """When the link from server 0 to each shard works again."""
        self.servers = [None] * shards
        if begins_with is None:
            self.servers = [Server(self, index, 0) for index in range(shards)]
        else:
            self.faults.start_servers()
        self.lengths = lengths(random.Random(seed)) if files else None
        self.slots = {}
        self.workers = []
        """All incarnations; `slots` contains the newest of each slot."""
        for slot in range(workers):
            self.start(slot, 0)

    def resize(self, shards):
        """Of a job of which nothing runs: its servers and workers start next with so many shards."""
        new = [0] * (shards - len(self.epochs))
        self.epochs = [*(epoch + 1 for epoch in self.epochs), *new]
        self.shards, self.bounds = shards, bounds(self.model.size, shards)
        self.servers, self.cut_until = [None] * shards, [0.0] * shards
        self.in_flight, self.resized, self.resized_at = [], True, self.steps

    def file_of(self, sample):
        """The file that a sample is in."""
        return next(file for file, end in enumerate(np.cumsum(self.lengths)) if sample < end)

    @property
    def worn(self):
        """Whether snapshots may be damaged."""
        return isinstance(self.storage, WornStorage)

    @property
    def server(self):
        """Server 0, which runs the coordinator; None while it is lost."""
        return self.servers[0]

    def weighed(self, push, weight):
        """Record a weight of a push (slot, incarnation, sequence number)."""
        exact = np.array([weight], np.float32)
        found = self.weights.setdefault(push, set())
        found.add(float(exact[0]))
        if self.bf16:  # of it, a lost server's successor has what a worker's copy says
            found.add(float(decoded(encoded(exact))[0]))

    def clock(self):
        return self.now

    def sleep(self, worker, seconds):
        self.wakes_at[worker] = self.now + seconds
        worker.pause()

    def start(self, slot, incarnation):
        self.slots[slot] = worker = Worker(self, slot, incarnation)
        self.workers.append(worker)

    def run(self, turns=60_000, calm_after=CALM_AFTER):
        """Run until every slot has finished, without faults after `calm_after` turns.

        With a lost server every other second, some jobs make no progress.
        Raises AssertionError if the job does not end within `turns`.
        """
        self.storage.calm = False
        try:
            for turn in range(turns):
                if all(worker.end is End.FINISHED for worker in self.slots.values()):
                    return
                if turn == calm_after:
                    self.faults.stop()
                self.turn()
            raise AssertionError(f"no end after {turns} turns: {self.describe()}")
        finally:
            if not self.hung:  # it may have a lock that the others need to end
                self._stop_workers()

    def _stop_workers(self):
        for worker in self.workers:
            worker.killed = True
            if worker.end is None:
                worker.resumed.release()
                self.yielded.acquire()
        for worker in self.workers:
            worker.thread.join(5)

    def end(self):
        """Restart every shard, and count the samples in some shards only, as at the end of a job."""
        self.storage.down, self.storage.calm = False, True
        self.cut_until = [0.0] * self.shards
        self.cut_off = [server for server in self.cut_off if server is self.final]
        for index in range(1, self.shards):
            if self.servers[index] is None:
                self.servers[index] = Server(self, index, self.epochs[index] + 1)
            shard = self.servers[index].shard
            if shard.state is not State.READY:  # no worker is left to initialize it
                shard.hello(0, 1_000_000, self.model)
                self.now += 10.0
                if shard.state is not State.READY:
                    shard.offer(0, 1_000_000, aligned(shard.size))
        # At the end no worker is expected to push: one whose `leave` was lost still looks connected.
        self.final.reconciler.compare(at_end=True)

    def turn(self):
        self.now += self.random.expovariate(50)
        self.faults.turn()
        self.deliver()
        if self.server is not None:
            self.server.coordinator.tick()
            self.reconcile_shards()
            if (ledger := self.server.coordinator.record.ledger) is not None:
                check_leases(ledger)
            check_lost(self.server.coordinator)
        for server in filter(None, self.servers):
            check_fences(server.shard)
            if self.now >= server.looks_at:
                server.look()
        for server in list(self.cut_off):
            if self.now >= server.looks_at:
                server.look()
            if server in self.cut_off and server.index == 0:
                server.coordinator.tick()
                self.tell_others(server)
        for slot, worker in list(self.slots.items()):
            if worker.end is not None and worker.end is not End.FINISHED:
                if worker.end not in {Killed, Fenced, End.DRAINED} and not isinstance(
                    worker.end, FaultyDevice
                ):
                    raise AssertionError(f"worker {slot} ended with {worker.end!r}") from worker.end
                self.start(slot, worker.incarnation + 1)
        self.heartbeats()
        self.run_one_worker()

    def heartbeats(self):
        """Each running worker sends a heartbeat a second, also while its loop computes or waits."""
        for worker in self.workers:
            if worker.end is None and self.now >= worker.beats_at and not worker.killed:
                worker.beats_at = self.now + 1.0
                worker.beat()

    def later(self, server, request):
        """Have a server read a request some seconds later, if it runs by then."""
        self.in_flight.append((self.now + self.random.expovariate(1), server, request))

    def deliver(self):
        """Deliver the late requests that are due."""
        due = [one for one in self.in_flight if one[0] <= self.now]
        self.in_flight = [one for one in self.in_flight if one[0] > self.now]
        for _, server, request in due:
            if server in self.servers or server in self.cut_off:
                with contextlib.suppress(TrainerError):
                    request(server)

    def run_one_worker(self):
        ready = [w for w in self.workers if w.end is None and self.wakes_at.get(w, 0.0) <= self.now]
        if ready:
            self.resume(self.random.choice(ready))

    def resume(self, worker):
        """Let a worker run until it uses the network."""
        worker.resumed.release()
        if not self.yielded.acquire(timeout=HUNG_SECONDS):
            self.hung = True
            name = f"worker {worker.slot}, incarnation {worker.incarnation}"
            frames = sys._current_frames()
            where = "".join(traceback.format_stack(frames[worker.thread.ident])[-8:])
            raise AssertionError(f"{name} does not yield, t={self.now:.1f}. It is here:\n{where}")

    def interleave(self):
        """Run workers and lose shards while shard 0 calls another shard, or copies its parameters."""
        if threading.current_thread() is not self.scheduler:  # a worker's own request
            return
        self.interleaving = True
        for _ in range(self.random.randrange(4)):
            self.run_one_worker()
        self.interleaving = False
        self.faults.lose_during_call()

    def reconcile_shards(self):
        """Tell all shards what holds for all, and compare them if one has restarted or the end waits for it."""
        self.tell_others(self.server)
        if self.server.snapshot_due and not self.server.snapshotter.taking.locked():
            with contextlib.suppress(Unreachable):
                self.server.snapshotter.take()
                self.server.snapshot_due = False
        if self.server.compare_due and self.server.shard.state is State.READY:
            with contextlib.suppress(Unreachable):
                self.server.reconciler.compare()
                self.server.compare_due = False

    def tell_others(self, server):
        """Server 0, or one that was replaced and still runs, tells the other shards what holds for all."""
        for other in server.others:
            with contextlib.suppress(TrainerError):
                other.tell()

    def describe(self):
        server = self.server
        head = f"t={self.now:.1f} ps_losses={self.faults.ps_losses} kills={self.faults.kills} "
        if server is None:
            return head + "server down"
        coordinator = server.coordinator
        return head + (
            f"{server.shard.state} gathering={coordinator.course.gathering.on} "
            f"ledger={coordinator.record.ledger and coordinator.record.ledger.dump()} "
            f"tasks={coordinator.record.tasks.queue} "
            f"workers={[(w.slot, w.incarnation, w.end) for w in self.slots.values()]}"
        )
