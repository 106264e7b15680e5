"""Random events of a simulated job: snapshots, and faults of workers, the storage and parameter servers.

A change in the order of the random draws changes the run of every seed.
"""

from __future__ import annotations

import contextlib
import math

from shoal_trainer.coordinator.rollback import MAX_IN_A_ROW
from shoal_trainer.coordinator.snapshotter import IN_A_ROW
from shoal_trainer.errors import Fenced, Unreachable
from shoal_trainer.ps.shard import State
from shoal_trainer.snapshot.claims import LOOK_SECONDS
from tests.unit.trainer.simulation.server import Server
from tests.unit.trainer.simulation.storage import Crash, MeanStorage


class Faults:
    """Draws faults. `rate` scales the frequency of all faults, `ps_rate` that of losses of parameter servers.

    `safe`: no worker is lost, and at most one server. `survival`: the probability that a replaced server keeps running,
    reachable over its open connections.
    """

    def __init__(self, world, rate, ps_rate, *, safe, survival):
        self.world, self.random = world, world.random
        self.rate, self.ps_rate = rate, ps_rate
        self.safe, self.survival = safe, survival
        self.ps_losses = self.kills = 0
        self.had_parameters = [False] * world.shards
        self.restarts_at = [math.inf] * world.shards
        self.starting = set()
        """The servers that have claimed their shard, perhaps, and wait for the storage."""
        self.apart = None
        """The worker that alone has kept its copy of what server 0 has lost, and does not reach it."""
        self.diverged_after = None
        """The newest snapshot when a step last diverged."""
        self.resize_at = 30
        """The step at which the job is next suspended."""
        self.events = (
            (0.004, self.take_snapshot),
            (0.001, self.kill_worker),
            (0.001, self.drain_worker),
            (0.002, self.cut_off_worker),
            (0.001, self.cut_off_shard),
            (0.001, self.replace_worker),
            (0.001, self.toggle_storage),
            (0.0003, self.pause_worker),
            (0.001 * ps_rate, self.lose_servers),
            *([(0.003, self.hang_read), (0.001, self.cut_off_for_good)] if world.hangs else []),
            *([(0.01, self.set_apart)] if world.forks else []),
        )
        """(probability per turn at `rate` 1, event). An event returns whether it was possible."""

    def stop(self):
        """Stop all faults."""
        self.rate = self.ps_rate = self.world.loss = 0.0
        self.world.storage.down, self.world.storage.calm = False, True
        if self.apart is not None:
            self.apart.exchange.cut_until[:] = [self.world.now] * (self.world.shards + 1)
            self.apart = None

    def turn(self):
        """Restart a server that is due, or trigger at most one event."""
        if self.apart is not None:
            self.bring_back()
        if self.world.resizes and self.world.steps >= self.resize_at and self.resize():
            return
        roll = self.random.random() / max(1e-9, self.rate)
        if self.restart_server():
            return
        limit = 0.0
        for probability, event in self.events:
            limit += probability
            if roll < limit and event():
                return

    # --- snapshots and workers

    def take_snapshot(self):
        world = self.world
        if world.server is None:
            return False
        with contextlib.suppress(Unreachable):
            if not world.server.snapshotter.taking.locked():  # by a rollback
                self._take(world.server)
        for server in [server for server in world.cut_off if server.index == 0]:
            if server.snapshotter.taking.locked():
                continue
            try:
                server.snapshotter.take()
            except Unreachable:
                pass
            except Fenced as error:
                server.fenced(error)
        return True

    def _take(self, server):
        """Take a snapshot; of a mean storage, maybe lose the server meanwhile, at any step of it."""
        storage = self.world.storage
        if (
            not isinstance(storage, MeanStorage)
            or not self.may_lose()
            or storage.random.random() > 0.1 * self.ps_rate
        ):
            server.snapshotter.take()
            return
        storage.dies_after = storage.random.randrange(9)
        try:
            server.snapshotter.take()
        except Crash:
            self.lose(0, survives=False)
        finally:
            storage.dies_after = None

    def faulty_workers(self):
        """The running workers to which a fault may happen."""
        workers = self.world.slots.values()
        return [each for each in workers if each.end is None and each is not self.apart and not self.safe]

    def kill_worker(self):
        if workers := self.faulty_workers():
            self.kill(self.random.choice(workers))
        return bool(workers)

    def kill(self, worker):
        self.kills += 1
        worker.killed = True
        self.world.resume(worker)

    def drain_worker(self):
        if workers := self.faulty_workers():
            self.random.choice(workers).drain.set()
        return bool(workers)

    def pause_worker(self):
        """Stop a worker's process for a while (SIGSTOP, a node that swaps): longer than a silent one is waited for."""
        if workers := self.faulty_workers():
            worker = self.random.choice(workers)
            until = self.world.now + self.random.choice([2.0, 10.0, 90.0]) * self.random.random()
            self.world.wakes_at[worker] = worker.beats_at = max(until, self.world.wakes_at.get(worker, 0.0))
        return bool(workers)

    def hang_read(self):
        """The next read of a worker takes long, or has no end. It still sends heartbeats."""
        if workers := self.faulty_workers():
            seconds = self.random.choice([2.0, 10.0, 60.0, math.inf]) * (1 - self.random.random())
            self.random.choice(workers).hangs_for = seconds
        return bool(workers)

    def cut_off_worker(self):
        if workers := self.faulty_workers():
            until = self.world.now + self.random.expovariate(1 / 4)
            cut = self.random.choice(workers).exchange.cut_until
            whole = self.random.random() < 0.5
            for link in range(len(cut)) if whole else [self.random.randrange(len(cut))]:
                cut[link] = until
        return bool(workers)

    def cut_off_for_good(self):
        """Cut the link between a worker and one shard until the worker ends, unless no other worker is left then."""
        free = [each for each in self.faulty_workers() if math.inf not in each.exchange.cut_until]
        if len(free) > 1:
            self.random.choice(free).exchange.cut_until[self.random.randrange(self.world.shards)] = math.inf
        return len(free) > 1

    def cut_off_data(self):
        """Cut the link between a worker and shard 0, and not that to the coordinator."""
        if workers := self.faulty_workers():
            until = self.world.now + self.random.expovariate(1 / 4)
            self.random.choice(workers).exchange.cut_until[0] = until
        return bool(workers)

    def cut_off_shard(self):
        """Cut the link between server 0 and another shard."""
        if (shards := self.world.shards) > 1:
            until = self.world.now + self.random.expovariate(1 / 4)
            self.world.cut_until[self.random.randrange(1, shards)] = until
        return shards > 1

    def replace_worker(self):
        """Start a successor while the worker keeps running behind a half-open connection."""
        if workers := self.faulty_workers():
            worker = self.random.choice(workers)
            self.world.start(worker.slot, worker.incarnation + 1)
        return bool(workers)

    def makes_step_diverge(self):
        """Whether a step becomes non-finite; never so often that the limit of consecutive rollbacks is reached."""
        world = self.world
        last = None if world.server is None else world.server.snapshotter.last
        untrained = last is not None and last.shards[0].version == world.server.shard.history.version
        often = 0.1 if self.apart is not None or (untrained and IN_A_ROW in last.ledger) else 0.003
        if (
            world.worn
            or world.server is None
            or self.random.random() > often * self.rate
            or world.interleaving
        ):
            return False
        found = None if world.storage.down else world.server.store.load_newest(0, world.shards)
        if found is None or found[0].number == self.diverged_after:
            return False
        if not found[0].ledger or found[0].ledger.get(IN_A_ROW, 0) + 1 >= MAX_IN_A_ROW:
            return False
        self.diverged_after = found[0].number
        return True

    def resize(self):
        """Suspend the job, and resume it with another number of shards, from the newest snapshot."""
        world = self.world
        if not self.may_lose():
            return False
        if self.random.random() < 0.5 or not any("/manifest-" in name for name in world.storage.files):
            self.take_snapshot()
        self.resize_at += 20 + self.random.randrange(20)
        for worker in [worker for worker in world.workers if worker.end is None]:
            self.kill(worker)
        for index in range(world.shards):
            self.lose(index, survives=False)
        world.resize(world.resizes.pop(0))
        self.had_parameters = [False] * world.shards
        self.starting = set()
        self.start_servers()
        return True

    # --- copies that another history has overtaken

    def set_apart(self):
        """Server 0 is lost with all workers but one, which does not reach its replacement, and keeps its copy."""
        workers = self.faulty_workers()
        saved = any("/manifest-" in name for name in self.world.storage.files)
        if self.apart is not None or not workers or not saved or not self.may_lose():
            return False
        self.apart = self.random.choice(workers)
        self.apart.exchange.cut_until[:] = [math.inf] * (self.world.shards + 1)
        for worker in workers:
            if worker is not self.apart:
                self.kill(worker)
        self.lose(0, survives=False)
        return True

    def bring_back(self):
        """It returns when the replacement has trained or rolled back, and maybe was lost: its copy may be the newer."""
        server, pulled = self.world.server, self.apart.loop.upstream.pulled
        if self.apart.end is None:
            if server is None or server.shard.state is not State.READY or self.random.random() > 0.02:
                return
            history, generation = server.shard.history, self.apart.loop.upstream.generation
            if history.version <= history.journal.snapshot and history.generation == generation:
                return
            if pulled is not None and history.version < pulled.versions[0] and self.may_lose():
                self.take_snapshot()
                self.lose(0, survives=False)
        self.apart.exchange.cut_until[:] = [self.world.now] * (self.world.shards + 1)
        self.apart = None

    # --- storage and parameter servers

    def toggle_storage(self):
        self.world.storage.down = not self.world.storage.down
        return True

    def start_servers(self):
        """Start all servers soon, while faults happen."""
        shards = range(self.world.shards)
        self.starting |= set(shards)
        self.restarts_at = [self.world.now + self.random.uniform(0.0, 2.0) for _ in shards]

    def restart_server(self):
        """Restart one server that is due: in place, or in another pod with the next epoch."""
        world = self.world
        due = [
            i for i, server in enumerate(world.servers) if server is None and world.now >= self.restarts_at[i]
        ]
        if not due:
            return False
        index = due[0]
        self._restore_storage()
        if index not in self.starting:
            survived = any(server.index == index for server in world.cut_off)
            in_place = self.random.random() < 0.4 and not survived
            world.epochs[index] += not in_place
            self.starting.add(index)
        follows = self.had_parameters[index] or world.epochs[index] > 0
        try:
            world.servers[index] = Server(world, index, world.epochs[index], follows=follows)
        except Unreachable:  # it tries again
            self.restarts_at[index] = world.now + 0.5
        else:
            self.starting.remove(index)
        return True

    def _restore_storage(self):
        """End an outage of the storage, which few runs would outlive otherwise; of a mean one, now and then."""
        storage = self.world.storage
        if not isinstance(storage, MeanStorage) or storage.random.random() < 0.2:
            storage.down = False

    def lose_servers(self):
        shards = self.world.shards
        if not self.may_lose():
            return False
        if shards == 1:
            self.lose(0)
        elif self.random.random() < 0.25:
            for index in self.random.sample(range(shards), self.random.randint(2, shards)):
                self.lose(index)
        else:
            self.lose(self.random.randrange(shards))
        return True

    def lose_during_call(self):
        """Maybe lose a shard other than 0 while shard 0 calls it, or copies its own parameters."""
        if self.world.shards > 1 and self.may_lose() and self.random.random() < 0.01 * self.ps_rate:
            self.lose(self.random.randrange(1, self.world.shards))

    def may_lose(self):
        world = self.world
        return world.server is not None and world.final is None and not (self.safe and self.ps_losses)

    def lose(self, index, *, survives=True):
        world, server = self.world, self.world.servers[index]
        if server is None:
            return
        self.ps_losses += 1
        world.losses.lost(server)
        self._restore_storage()
        self.had_parameters[index] |= server.shard.state is State.READY
        if survives and self.survival and self.random.random() < self.survival:
            world.cut_off.append(server)
            server.looks_at = world.now + self.random.uniform(0.0, LOOK_SECONDS)
        world.servers[index] = None
        self.restarts_at[index] = world.now + self.random.uniform(0.1, 6.0)
