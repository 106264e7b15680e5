"""A simulated parameter server: the real shard, coordinator, reconciler, snapshotter and rollback."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace
from unittest import mock

import numpy as np

from shoal_trainer.contract import JobIdentity, SnapshotPolicy, Staleness, StopAfter
from shoal_trainer.coordinator.coordinator import Coordinator
from shoal_trainer.coordinator.follower import Follower
from shoal_trainer.coordinator.other_shard import OtherShard
from shoal_trainer.coordinator.protocol import DataSpec, FenceWorkers, Join
from shoal_trainer.coordinator.reconciler import Reconciler
from shoal_trainer.coordinator.rollback import Rollback
from shoal_trainer.coordinator.snapshotter import Snapshotter
from shoal_trainer.coordinator.stuck import Stuck
from shoal_trainer.errors import Fenced, SnapshotError, Unreachable
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.shard import LARGE_VALUES, ShardStore, State
from shoal_trainer.snapshot import initial
from shoal_trainer.snapshot.claims import LOOK_SECONDS, Claim
from shoal_trainer.snapshot.store import SnapshotStore
from tests.unit.trainer.coordinator.remote_shard import RemoteShard
from tests.unit.trainer.simulation.invariants import (
    check_claim,
    check_contents,
    check_heard,
    check_told,
    steps_in,
)
from tests.unit.trainer.simulation.job import BATCH, EPOCHS, MODEL_FILE, PIECE, SAMPLES, STEPS_AT, model
from tests.unit.trainer.simulation.losses import Losses
from tests.unit.trainer.simulation.storage import AtOnce, MemoryStorage


class Other(RemoteShard):
    """Another shard of the world."""

    def __init__(self, world, index):
        self.world, self.index = world, index
        self.connected = None

    def pushes(self, wanted):
        self.world.interleave()
        return super().pushes(wanted)

    def snapshot(self, *request):
        self.world.interleave()
        return super().snapshot(*request)

    def fence(self, epoch, older, left):
        super().fence(epoch, older, left)
        check_told(self.connected.shard, FenceWorkers(epoch=epoch, older=older, left=left))

    def reach(self):
        """A connection stays open while its server runs, even after the server was replaced."""
        if self.world.clock() < self.world.cut_until[self.index]:
            raise Unreachable("the link is down")
        if self.connected not in self.world.cut_off:
            self.connected = self.world.servers[self.index]
        if self.connected is None:
            raise Unreachable("the shard is down")
        return self.connected.follower.handlers()


class Turns(threading.Condition):
    """Of a shard: who waits lets the other workers run, in virtual time."""

    def __init__(self, lock, world):
        super().__init__(lock)
        self._world = world

    def wait(self, timeout=None):
        thread = threading.current_thread()
        worker = next(worker for worker in self._world.workers if worker.thread is thread)
        state = self._release_save()
        try:
            self._world.sleep(worker, min(timeout, 0.1))
        finally:
            self._acquire_restore(state)


class SlowStore:
    """The snapshots of a rollback: other workers run during each call."""

    def __init__(self, server):
        self._server = server

    def __getattr__(self, name):
        def call(*arguments):
            result = getattr(self._server.store, name)(*arguments)
            self._server.storage_pause()
            return result

        return call


class Server:
    """One incarnation of a parameter server. Number 0 also runs the coordinator."""

    def __init__(self, world, index, epoch, *, follows=None):
        world.boots += 1
        self.shard = ShardStore(
            index, world.shards, epoch, boot=world.boots, follows=follows, clock=world.clock,
            large=0 if world.streams else LARGE_VALUES, piece=PIECE, staleness=Staleness(max=world.bound),
        )  # fmt: skip
        self.shard.workers._changed = Turns(self.shard.lock, world)
        self.gave_up = False
        """Whether a push waited so long for another one that it waits for it no more."""
        give_up, self.shard.workers._permits.give_up = self.shard.workers._permits.give_up, self.give_up
        self._give_up = give_up
        self.world, self.index, self.looks_at = world, index, 0.0
        self.storage_pause = lambda: None
        """Set by the worker whose report causes a rollback."""
        self.store = SnapshotStore(world.storage)
        self.follower = Follower(self.shard, self.store, world.interleave)
        self.claim = Claim(world.storage, index, epoch)
        self.claim.make()
        check_claim(world.storage, index, epoch)
        found = self.store.load_settled(index, world.shards)
        world.losses.begins(self, found)
        begun = None if found or not world.begins_with else world.begins_with.initial(self, world.storage)
        if found is not None:
            self.shard.restore(found[1])
        if begun is not None:
            self.shard.restore(begun[1], other_run=True)
        self.snapshot_due = False
        self.compare_due = self.shard.follows or found is not None
        if index == 0:
            self._coordinate(found, begun)
        self._weigh(self.shard.on_applied)
        self._watch_history()

    def _coordinate(self, found, begun):
        world = self.world
        self.coordinator = Coordinator(
            JobIdentity(namespace="n", name="j", uid="u"), world.stop_after, BATCH, self.shard,
            clock=world.clock, wall=world.clock,
        )  # fmt: skip
        if world.hangs:
            self.coordinator.stuck = Stuck(least=5.0, first=10.0)
        others = [Other(world, other) for other in range(1, world.shards)]
        self.others = [
            OtherShard(self.shard, index, other, self.compare_soon, self.overtaken)
            for index, other in enumerate(others, 1)
        ]
        self.reconciler = Reconciler(self.shard, others, self.coordinator, clock=world.clock)
        self.coordinator.course.compare_soon = self.compare_soon
        self.coordinator.course.snapshot_soon = self.snapshot_soon
        self.snapshotter = Snapshotter(
            self.shard, others, self.coordinator, self.reconciler, self.store,
            SnapshotPolicy(every_seconds=60, retain=2), fenced=self.fenced, wall=world.clock, executor=AtOnce,
            sleep=lambda _: None, between=world.interleave,
        )  # fmt: skip
        self.shard.on_ready = self.ready
        self.rollback = Rollback(
            self.shard, self.coordinator, SlowStore(self), self.snapshotter,
            fenced=self.fenced, wall=world.clock,
        )  # fmt: skip
        if found is not None:
            self.coordinator.load(found[0].ledger)
            if found[0].ledger:
                self.snapshotter.set_latest(found[0], found[1].version)
        if begun is not None:
            self.coordinator.load(begun[0].ledger, other_run=True)
        if MODEL_FILE in world.storage.files:
            self.coordinator.end(world.final.coordinator.finished)

    def give_up(self, *arguments):
        self.gave_up = True
        self._give_up(*arguments)

    def overtaken(self, generation):
        """Another shard is of a later generation: shard 0 has just committed one, or was replaced."""
        if self.snapshotter.taking.locked():  # threads would wait here
            raise Unreachable("it will be tried again")
        self.rollback.overtaken(generation)

    def _weigh(self, then):
        """Record the weight of each push that is applied, and check its staleness, and that its worker may push."""

        def applied(push):
            identity = push.slot, push.incarnation, push.seq
            if self.index == 0:
                member = self.coordinator.members.known.get(identity[:2])
                assert member is None or member.present, f"{identity} of a worker that is {member.state}"
            self.world.weighed(identity, push.weight)
            if (self.shard.boot, *identity) in self.world.awaited and not (push.delta or self.gave_up):
                # The oldest gradients wait for nothing, and each other worker may have two of them.
                most = self.world.bound + 2 * (len(self.world.slots) - 1)
                assert push.staleness <= most, f"{identity}: {push.staleness}"
            if then is not None:
                then(push)

        self.shard.on_applied = applied

    def _watch_history(self):
        """Check who is greeted and who pushes, and what a worker's copy brings."""
        shard, begin, adopt = self.shard, self.shard.history.begin, self.shard.history.adopt
        become_ready, hello = shard._become_ready, shard.hello

        def greets(slot, incarnation, *arguments):
            welcome = hello(slot, incarnation, *arguments)
            check_heard(shard, (slot, incarnation))
            return welcome

        def begins(worker, seq, meta):
            check_heard(shard, worker)
            return begin(worker, seq, meta)

        def adopts(version, generation, meta):
            assert generation >= shard.history.generation, "a copy from before a rollback"
            adopt(version, generation, meta)
            check_contents(self.world, shard)

        def begins_anew():
            become_ready()
            if shard.history.version == 0 and (steps := np.flatnonzero(steps_in(self.world, shard)).tolist()):
                assert self.world.overflows or self.world.worn, "a copy that has trained, without its pushes"
                self.world.unnamed |= {(shard.index, step) for step in steps}

        shard.history.begin, shard.history.adopt = begins, adopts
        shard._become_ready, shard.hello = begins_anew, greets

    def ready(self, version, applied):
        """Record the steps with which a generation begins; a rollback makes the shard ready again."""
        self.coordinator.ready(version, applied)
        steps = self.shard.model.parameters.reshape(-1, PIECE)[:, STEPS_AT : STEPS_AT + self.world.steps]
        self.world.kept.setdefault(
            self.shard.history.generation, set(np.flatnonzero(steps.any(axis=0)).tolist())
        )

    @property
    def may_have_left_copies(self):
        """Whether workers may have copies of its parameters, or of a predecessor's."""
        return self.shard.follows or self.shard.state is State.READY

    def compare_soon(self):
        """Reconcile the shards in the next turn."""
        self.compare_due = True

    def snapshot_soon(self):
        """Take a snapshot in the next turn."""
        self.snapshot_due = True

    def fenced(self, error):
        """A newer incarnation has claimed the shard."""
        if self not in self.world.cut_off:
            raise AssertionError(f"the newest server {self.index} was fenced: {error}")
        self.world.cut_off.remove(self)

    def look(self):
        """Check for a newer incarnation, like `Watch`."""
        self.looks_at = self.world.now + LOOK_SECONDS
        try:
            self.claim.check()
        except Unreachable:
            pass
        except Fenced as error:
            self.fenced(error)
        else:
            check_claim(self.world.storage, self.index, self.shard.epoch)


class AnotherRun:
    """A run of `shards` that trained nothing: a run of `new` shards started from it counts only its own samples.

    It goes on publishing snapshots, and removes older ones, of which one may be that with which this run began: but not
    before each shard has had its parameters, as the job would have to end if one began anew.
    """

    def __init__(self, shards, new, seed):
        self._random = random.Random(seed)
        self._chosen, self._left = None, set(range(new))
        """The snapshot that the new run begins with, and the shards that have had no parameters yet."""
        world = SimpleNamespace(
            boots=0, shards=shards, streams=False, bound=None, hangs=False, forks=False, worn=False, overflows=False,
            unnamed=set(), steps=0, kept={}, bf16=False, resized_at=0,
            clock=lambda: 0.0, weighed=lambda *_: None, storage=MemoryStorage(),
            begins_with=None, servers=[], cut_off=(), cut_until=[0.0] * shards, interleave=lambda: None,
            stop_after=StopAfter(epochs=EPOCHS),
        )  # fmt: skip
        world.losses = Losses(world)
        world.servers += [Server(world, index, 0) for index in range(shards)]
        for server in world.servers:
            server.shard.hello(0, 0, model(new))
            server.shard.offer(0, 0, aligned(server.shard.size))
        world.servers[0].coordinator.join(
            Join(slot=0, incarnation=0, data=DataSpec(size=SAMPLES), batch_size=BATCH)
        )
        self._newest = world.servers[0].snapshotter.take()
        self._store, self._storage = world.servers[0].store, world.storage

    def initial(self, server, own):
        """What a server of the new run begins with: all shards with the same snapshot, also after a restart."""
        self._left -= {each.index for each in server.world.servers if each and each.may_have_left_copies}
        self._go_on()
        shard = server.shard
        with mock.patch.object(initial, "open_storage", side_effect=lambda _: self._opened()):
            found = initial.load_initial(
                own, "memory://other", shard.index, shard.shards, follows=shard.follows
            )
        self._chosen = self._chosen or found[0].number
        assert found[0].number == self._chosen or (shard.follows and self._removed(self._chosen))
        return found

    def _opened(self):
        self._go_on()
        return self._storage

    def _go_on(self):
        for _ in range(self._random.randrange(3)):
            self._newest = self._newest.model_copy(update={"number": self._store.next_number()})
            self._store.publish(self._newest)
        if not self._left:
            self._store.prune(2, 0)

    def _removed(self, number):
        try:
            self._store.load_number(number, 0, 1)
        except SnapshotError:
            return True
        return False
