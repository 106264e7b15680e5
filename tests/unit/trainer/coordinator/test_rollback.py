"""Rollback with a real shard and storage: what is undone, what is lost, what is refused."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer.contract import JobIdentity, Outcome, SnapshotPolicy, StopAfter, TerminationMessage
from shoal_trainer.coordinator import report
from shoal_trainer.coordinator import rollback as rollback_module
from shoal_trainer.coordinator.coordinator import Coordinator
from shoal_trainer.coordinator.follower import Follower
from shoal_trainer.coordinator.protocol import DataSpec, Diverged, Heartbeat, Join, RollBackShard
from shoal_trainer.coordinator.reconciler import Reconciler
from shoal_trainer.coordinator.rollback import MAX_IN_A_ROW, Rollback
from shoal_trainer.coordinator.snapshotter import IN_A_ROW, Snapshotter
from shoal_trainer.errors import FaultyDevice, SnapshotError, Unreachable, UserError
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.shard import ShardStore, State
from shoal_trainer.snapshot.manifest import Manifest
from shoal_trainer.snapshot.storage import LocalStorage
from shoal_trainer.snapshot.store import SnapshotStore
from shoal_trainer.snapshot.unread import UNREAD_SECONDS
from shoal_trainer.wire.messages import Held, ModelSpec, OptimizerConfig, Progress, PushMeta
from shoal_trainer.worker.leases import Leases
from shoal_trainer.worker.work import DataWork
from tests.unit.trainer.coordinator.bench import next_work
from tests.unit.trainer.ps.shards import Clock, pull_from, push_to
from tests.unit.trainer.snapshot.saving import Alive, latest
from tests.unit.trainer.snapshot.test_unread import Worn

MODEL = ModelSpec(fingerprint="0" * 64, parameters=4, optimizer=OptimizerConfig(name="delta", batch_size=2))


class Bench:
    """A job of 16 samples in batches of 2 and one worker, whose calls the test makes."""

    def __init__(self, folder, epoch=0):
        self.shard = ShardStore(0, 1, epoch)
        job = JobIdentity(namespace="n", name="j", uid="u")
        self.coordinator = Coordinator(job, StopAfter(epochs=2), 2, self.shard, clock=lambda: 0.0)
        self.store = SnapshotStore(LocalStorage(folder))
        self.fenced = []
        reconciler = Reconciler(self.shard, [], self.coordinator)
        self.snapshotter = Snapshotter(
            self.shard,
            [],
            self.coordinator,
            reconciler,
            self.store,
            SnapshotPolicy(),
            fenced=self.fenced.append,
            sleep=lambda _: None,
        )
        self.rollback = Rollback(
            self.shard, self.coordinator, self.store, self.snapshotter, fenced=self.fenced.append
        )
        self.shard.workers.connect(0, 0)
        self.seq = 0

    def begin(self):
        self.shard.hello(0, 0, MODEL)
        self.shard.offer(0, 0, aligned(4))
        self.coordinator.join(Join(slot=0, incarnation=0, data=DataSpec(size=16), batch_size=2))
        return self

    def train(self, batches=1, slot=0):
        for _ in range(batches):
            lease = self.lease(slot)
            self.seq += 1
            values = aligned(4)
            values[:] = 1
            meta = PushMeta(samples=2, progress=(Progress(lease.epoch, -1, lease.start, lease.stop),))
            push_to(self.shard, slot, 0, self.seq, self.shard.history.version, meta, values, delta=True)

    def lease(self, slot=0):
        return next_work(self.coordinator, slot, 0, self.shard.history.generation).lease

    def diverge(self, lease=None, slot=0):
        lease = lease or self.lease(slot)
        self.rollback.diverged(
            Diverged(
                slot=slot, incarnation=0, generation=self.shard.history.generation, epoch=lease.epoch,
                start=lease.start, stop=lease.stop, reason="loss nan",
            )
        )  # fmt: skip
        return lease


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path).begin()


def test_rollback_restores_the_snapshot_and_skips_the_batch(bench):
    bench.train(2)
    bench.snapshotter.take()
    bench.train(3)
    boot, bad = bench.shard.boot, bench.diverge()
    assert (bench.shard.history.version, bench.shard.history.generation, bench.shard.state) == (
        2,
        1,
        State.READY,
    )
    assert bench.shard.boot != boot
    assert bench.shard.copy().arrays["parameters"].tolist() == [2.0] * 4
    status = report.status(bench.coordinator)
    assert (status.step, status.wasted_steps, status.rollbacks, status.data.lost) == (2, 3, 1, 2)
    assert (status.data.done, status.data.leased, status.data.repeated) == (6, 0, 0)
    seen = []
    while (lease := bench.lease()) is not None and lease.epoch == 0:
        seen.append(lease.start)
    assert len(seen) == 5
    assert bad.start not in seen


def test_a_report_says_nothing_that_a_heartbeat_says(bench):
    """It would have the worker's seconds in tasks begin at 0, after a restart of the server."""
    bench.train(1)
    bench.snapshotter.take()
    bench.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0, message="reads", task_seconds=9.0))
    before = dataclasses.replace(bench.coordinator.members.get((0, 0)))
    bench.diverge()
    after = bench.coordinator.members.get((0, 0))
    assert (after.message, after.beside) == (before.message, before.beside) == ("reads", (9.0, 0.0))


def test_repeated_report_rolls_back_once(bench):
    bench.train()
    bench.snapshotter.take()
    bench.train()
    lease = bench.lease()
    report = Diverged(
        slot=0, incarnation=0, generation=0, epoch=0, start=lease.start, stop=lease.stop, reason=""
    )
    bench.rollback.diverged(report)
    bench.train()
    bench.rollback.diverged(report)
    assert (bench.shard.history.generation, bench.coordinator.record.counters.rollbacks) == (1, 1)


def test_requests_and_leases_from_before_a_rollback_are_refused(bench):
    bench.train()
    bench.snapshotter.take()
    boot, held = bench.shard.boot, bench.lease()
    bench.diverge()
    with pytest.raises(Unreachable, match="before its restart"):
        push_to(bench.shard, 0, 0, 9, 1, PushMeta(samples=2), aligned(4), boot=boot)
    with pytest.raises(Unreachable, match="before its restart"):
        pull_from(bench.shard, 0, aligned(4), boot=boot)
    assert next_work(bench.coordinator, 0, 0, 0).kind == "idle"
    assert bench.lease().token > held.token


def test_leases_held_before_a_rollback_cannot_be_claimed(bench):
    bench.train()
    bench.snapshotter.take()
    held = bench.lease()
    bench.diverge()
    hello = Join(slot=0, incarnation=0, data=DataSpec(size=16), batch_size=2)
    with pytest.raises(Unreachable, match="rolled back"):
        bench.coordinator.join(hello.model_copy(update={"leases": (held,)}))
    assert bench.coordinator.join(hello).renamed == ()
    assert not bench.coordinator.record.ledger.leases


def test_restart_after_a_rollback_starts_from_it(bench, tmp_path):
    bench.train(2)
    bench.snapshotter.take()
    bench.train()
    bench.diverge()
    manifest, copy = bench.store.load_newest(0, 1)
    new = Bench(tmp_path, epoch=1)
    new.shard.restore(copy)
    new.coordinator.load(manifest.ledger)
    assert (new.shard.history.generation, new.shard.history.version) == (1, 2)
    status = report.status(new.coordinator)
    assert (status.step, status.wasted_steps, status.rollbacks, status.data.lost) == (2, 1, 1, 2)
    assert not new.shard.hello(
        0, 0, MODEL, Held(version=3, generation=0)
    ).wants_copy  # a copy from before the rollback


def test_interrupted_rollback_is_completed_by_the_next_report(bench):
    bench.train()
    bench.snapshotter.take()
    bench.train()
    newest = latest(bench.store)
    bench.store.publish(newest.model_copy(update={"number": 2, "generation": 1}))
    bench.diverge()
    assert (bench.shard.history.generation, latest(bench.store).number) == (1, 2)


def without_an_answer(bench, monkeypatch, happens=lambda: None):
    """A rollback that is committed, and the answer of the storage is lost; `happens` meanwhile."""
    create = LocalStorage.create

    def lost(storage, name, data):
        create(storage, name, data)
        happens()
        raise Unreachable("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "create", lost)
        with pytest.raises(Unreachable):
            bench.diverge()


def test_rollback_whose_answer_was_lost_is_finished_before_the_next_snapshot(bench, monkeypatch):
    """Else a snapshot of what it undoes would follow it, if the worker that reported is gone."""
    bench.train()
    bench.snapshotter.take()
    bench.train(2)
    without_an_answer(bench, monkeypatch)
    assert not bench.snapshotter.settled(0)
    bench.train()
    assert bench.snapshotter.take() is None  # nothing was trained since
    assert (bench.shard.history.generation, bench.shard.history.version) == (1, 1)
    assert latest(bench.store).generation == 1
    assert bench.coordinator.record.counters.lost == 2


def test_rollback_that_was_not_committed_is_not_made_up_for(bench, monkeypatch):
    bench.train()
    bench.snapshotter.take()
    bench.train(2)

    def away(*_):
        raise Unreachable("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "create", away)
        with pytest.raises(Unreachable):
            bench.diverge()
    assert bench.snapshotter.take().generation == 0
    assert bench.shard.history.version == 3


def test_job_fails_after_too_many_rollbacks_in_a_row(bench):
    bench.train()
    bench.snapshotter.take()
    for _ in range(MAX_IN_A_ROW):
        bench.diverge()
    with pytest.raises(
        UserError, match=r"epoch 1, positions .* rolled back 3 times .*Lower the learning rate"
    ):
        bench.diverge()


@pytest.fixture
def pair(bench):
    """A job with a second worker, and a snapshot."""
    bench.shard.workers.connect(1, 0)
    bench.coordinator.join(Join(slot=1, incarnation=0, data=DataSpec(size=16), batch_size=2))
    bench.train()
    bench.snapshotter.take()
    return bench


def test_worker_whose_gradients_alone_are_not_finite_ends_and_not_the_job(pair):
    for generation in (1, 2):
        pair.diverge()
        assert pair.shard.history.generation == generation
        pair.train(slot=1)
    for _ in range(2):  # its successor in the slot, on the same node
        with pytest.raises(FaultyDevice, match="of worker 0, and the gradients of the others are finite"):
            pair.diverge(pair.lease())
    assert (pair.shard.history.generation, pair.coordinator.record.counters.lost) == (2, 4)
    pair.diverge(slot=1)  # another worker says the same of a batch: it is the batch
    assert pair.shard.history.generation == 3


def test_reports_of_one_worker_roll_back_while_no_other_pushes(pair):
    for _ in range(MAX_IN_A_ROW):
        pair.diverge()
    with pytest.raises(UserError, match="rolled back 3 times"):
        pair.diverge()


@pytest.mark.parametrize("snapshots", [0, 1])
def test_where_the_job_would_end_a_worker_that_reports_alone_does_first(pair, snapshots):
    """Before the first snapshot, or at the limit; the second worker that says the same ends the job."""
    pair.train(slot=1)
    if snapshots:
        for _ in range(MAX_IN_A_ROW):
            pair.diverge()
    else:
        pair.store.load_newest = lambda *_: None
    with pytest.raises(FaultyDevice, match="All such reports are of worker 0"):
        pair.diverge(pair.lease())
    with pytest.raises(UserError, match="rolled back 3 times" if snapshots else "no snapshot yet"):
        pair.diverge(slot=1)


def test_report_of_positions_that_a_worker_does_not_hold_rolls_nothing_back(pair):
    """They would be left out for ever, and count as lost."""
    held = pair.lease()
    for batch in (held.model_copy(update={"epoch": 1}), held):
        pair.diverge(batch, slot=1)
    assert (pair.shard.history.generation, pair.coordinator.record.counters.lost) == (0, 0)


def test_reports_of_several_workers_roll_back(pair):
    for slot in (0, 1, 0):
        pair.train(slot=1 - slot)
        pair.diverge(slot=slot)
    assert pair.shard.history.generation == 3


def test_newer_snapshot_resets_the_rollback_limit(bench):
    bench.train()
    bench.snapshotter.take()
    for _ in range(MAX_IN_A_ROW + 1):
        bench.diverge()
        bench.train()
        assert bench.snapshotter.take() is not None
    assert bench.coordinator.record.counters.rollbacks == MAX_IN_A_ROW + 1


def test_divergence_without_a_snapshot_fails_the_job(bench):
    bench.train()
    with pytest.raises(UserError, match="no snapshot yet"):
        bench.diverge()


def test_divergence_waits_for_a_storage_that_fails_and_then_says_that_it_did(bench, monkeypatch):
    now, write = [0.0], bench.store._storage.write
    monkeypatch.setattr(bench.snapshotter, "_clock", lambda: now[0])

    def refuse(*_):
        raise Unreachable("cannot write: AccessDenied")

    bench.store._storage.write = refuse
    bench.train()
    lease = bench.lease()
    for now[0] in (0.0, rollback_module.FIRST_SECONDS - 1):
        bench.snapshotter._try()
        with pytest.raises(Unreachable, match="AccessDenied"):
            bench.diverge(lease)
    now[0] = rollback_module.FIRST_SECONDS
    with pytest.raises(
        UserError, match=r"no snapshot yet to roll back to: cannot write: AccessDenied\. Lower"
    ):
        bench.diverge(lease)
    bench.store._storage.write = write
    assert not bench.snapshotter.settled(0)  # it was asked for
    bench.snapshotter._take_again()
    bench.diverge(lease)
    assert bench.coordinator.record.counters.rollbacks == 1


@pytest.fixture
def continued(tmp_path):
    """A job whose parameters are another run's: the wish for a snapshot of them is open."""
    bench = Bench(tmp_path)
    bench.coordinator.course.snapshot_soon = bench.snapshotter.schedule
    bench.coordinator.load({}, other_run=True)
    return bench.begin()


def test_divergence_before_the_first_snapshot_returns_to_the_model_of_the_other_run(continued):
    assert not continued.snapshotter.settled(0)  # it is wished for before the first push
    continued.train()
    lease = continued.lease()
    with pytest.raises(Unreachable, match="the model that this run began with is not saved yet"):
        continued.diverge(lease)
    continued.snapshotter._take_again()
    continued.train(2)
    continued.diverge(lease)
    assert (continued.shard.history.version, continued.shard.history.generation) == (1, 1)


def test_divergence_ends_the_job_if_the_model_of_the_other_run_cannot_be_saved(continued, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(continued.snapshotter, "_clock", lambda: now[0])
    continued.shard.model.parameters[0] = float("nan")
    lease = continued.lease()
    for now[0] in (0.0, rollback_module.FIRST_SECONDS - 1):
        continued.snapshotter._take_again()
        with pytest.raises(Unreachable, match="not finite"):
            continued.diverge(lease)
    now[0] = rollback_module.FIRST_SECONDS
    with pytest.raises(UserError, match="no snapshot yet"):
        continued.diverge(lease)


def test_report_during_a_snapshot_is_refused_until_it_is_written(bench, monkeypatch):
    monkeypatch.setattr(rollback_module, "TAKING_SECONDS", 0.01)
    bench.train()
    bench.snapshotter.take()
    lease = bench.lease()
    with bench.snapshotter.taking, pytest.raises(Unreachable, match="a snapshot is being written"):
        bench.diverge(lease)
    assert bench.shard.history.generation == 0
    bench.diverge(lease)
    assert bench.shard.history.generation == 1
    assert not bench.snapshotter.taking.locked()


def test_rollback_to_an_older_generation_begins_a_new_one(bench, tmp_path):
    """The newer snapshots are damaged. The other shards would never return to a lower generation."""
    bench.train()
    bench.snapshotter.take()
    bench.train()
    newest = bench.snapshotter.take()
    bench.diverge()
    file = tmp_path / "snapshots" / newest.shards[0].file
    file.write_bytes(bytes(newest.shards[0].size))
    bench.diverge()
    published = latest(bench.store)
    assert (bench.shard.history.generation, bench.shard.history.version) == (2, 1)
    assert (published.number, published.generation, published.shards[0].version) == (4, 2, 1)


def test_fenced_server_neither_rolls_back_nor_fences_the_worker(bench):
    bench.train()
    bench.snapshotter.take()
    bench.store.publish(latest(bench.store).model_copy(update={"epoch": 7}))
    with pytest.raises(Unreachable):
        bench.diverge()
    assert len(bench.fenced) == 1


def test_manifest_without_generation_has_generation_zero(bench):
    bench.train()
    manifest = bench.snapshotter.take()
    old = manifest.model_dump(mode="json", exclude={"generation"})
    old["ledger"]["counters"].pop("rollbacks")
    assert Manifest.model_validate(old).generation == 0
    bench.coordinator.rewind(old["ledger"])
    assert bench.coordinator.record.counters.rollbacks == 0


@given(
    held=st.tuples(st.integers(0, 3), st.integers(0, 20)),
    offers=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), max_size=6),
)
def test_copy_of_an_older_generation_is_not_adopted(held, offers):
    first = ShardStore(0, 1, 0)
    first.workers.connect(0, 0)
    first.hello(0, 0, MODEL)
    first.offer(0, 0, aligned(4))
    copy = first.copy().model_copy(update={"generation": held[0], "version": held[1]})
    shard = ShardStore(0, 1, 1, clock=lambda: 0.0)
    shard.restore(
        copy.model_copy(update={"applied": {(99, 0): 1}})
    )  # recovery waits for worker 99, which never comes
    best = held
    for slot, (generation, version) in enumerate(offers):
        shard.workers.connect(slot, 0)
        wants = shard.hello(slot, 0, MODEL, Held(version=version, generation=generation)).wants_copy
        assert wants == ((generation, version) > best)
        values = aligned(4)
        values[:] = generation
        shard.offer(slot, 0, values, version, pull_from(first, 0, aligned(4)).meta, generation=generation)
        best = max(best, (generation, version))
        assert (shard.history.generation, shard.history.version) == best
    if best != held:
        assert np.all(shard.model.parameters == best[0])


def test_divergence_after_the_stop_rolls_nothing_back(tmp_path):
    bench = Bench(tmp_path).begin()
    bench.train(2)
    assert bench.snapshotter.take() is not None
    bench.train(1)
    lease = bench.lease()
    bench.coordinator.course.stop("the target is reached")
    version = bench.shard.history.version
    bench.diverge(lease)
    assert (bench.shard.history.generation, bench.shard.history.version) == (0, version)
    assert bench.coordinator.record.stopping == "the target is reached"


def stop_during(bench, method):
    """Training stops while the rollback calls this method of the snapshot store."""
    original = getattr(bench.store, method)

    def stops(*arguments):
        result = original(*arguments)
        if not bench.coordinator.record.stopping:
            bench.coordinator.course.stop("the target is reached")
        return result

    setattr(bench.store, method, stops)


def test_stop_while_the_snapshot_is_read_cancels_the_rollback(bench):
    bench.train(2)
    assert bench.snapshotter.take() is not None
    bench.train(1)
    lease = bench.lease()
    stop_during(bench, "load_newest")
    bench.diverge(lease)
    assert bench.coordinator.record.stopping
    assert (bench.shard.history.generation, latest(bench.store).generation) == (0, 0)


def test_stop_while_the_rollback_is_committed_is_undone(bench):
    bench.train(2)
    assert bench.snapshotter.take() is not None
    bench.train(1)
    lease, worker = bench.lease(), Leases()
    stop_during(bench, "publish")
    bench.diverge(lease)
    worker.void(lease.term)  # the answer to an earlier push
    assert (bench.shard.history.generation, bench.coordinator.record.stopping, bench.shard.stopped()) == (
        1,
        "",
        0,
    )
    worker.reset(1)
    lease = bench.lease()
    worker.grant(DataWork(lease.token, lease.epoch, lease.start, lease.stop, generation=1))
    assert list(worker.held()) == [lease.token]
    bench.coordinator.record.ledger.release(lambda _: True)
    bench.coordinator.course.stop("the target is reached again")
    assert next_work(bench.coordinator, 0, 0, 1).kind == "task"


def end(bench):
    bench.coordinator.end(TerminationMessage(outcome=Outcome.SUCCEEDED, message="trained"))


def test_job_that_ends_while_the_rollback_is_committed_stays_as_it_ended(bench):
    """The storage took minutes, and the model was exported meanwhile."""
    bench.train(2)
    assert bench.snapshotter.take() is not None
    bench.train(3)
    lease, publish = bench.lease(), bench.store.publish

    def ends(manifest):
        end(bench)
        return publish(manifest)

    bench.store.publish = ends
    with pytest.raises(Unreachable, match="has ended"):
        bench.diverge(lease)
    bench.diverge(lease)  # it is sent again
    assert (bench.shard.history.version, bench.shard.history.generation) == (5, 0)
    assert report.status(bench.coordinator).step == 5


def test_job_that_ends_before_the_answer_to_a_rollback_is_lost_has_a_snapshot_of_its_end(bench, monkeypatch):
    """The next run that begins with its newest snapshot is to have all that was trained."""
    bench.train(2)
    assert bench.snapshotter.take() is not None
    bench.train(3)
    without_an_answer(bench, monkeypatch, happens=lambda: end(bench))
    assert bench.snapshotter.take() is not None
    newest = latest(bench.store)
    assert (newest.shards[0].version, newest.generation) == (5, 0)
    assert bench.store.load_newest(0, 1)[0].number == newest.number


def test_job_that_has_ended_is_overtaken_by_no_other_shard(bench):
    """It would commit a rollback that it never makes, and read the snapshot again at each comparison."""
    bench.train(2)
    assert bench.snapshotter.take() is not None
    bench.train(1)
    end(bench)
    before = latest(bench.store)
    bench.rollback.overtaken(7)
    assert (latest(bench.store), bench.shard.history.version) == (before, 3)


def test_what_happens_to_workers_while_the_storage_takes_its_time_stays_counted(bench):
    bench.train(2)
    bench.snapshotter.take()
    bench.train(1)
    publish, counters = bench.store.publish, bench.coordinator.record.counters

    def slow(manifest):
        counters.taken_back += 1
        return publish(manifest)

    bench.store.publish = slow
    bench.diverge()
    assert (bench.shard.history.generation, report.status(bench.coordinator).leases_taken_back) == (1, 1)


def test_what_happens_to_workers_before_a_rollback_is_finished_stays_counted(bench, monkeypatch):
    bench.train()
    bench.snapshotter.take()
    bench.train(2)
    without_an_answer(bench, monkeypatch)
    bench.coordinator.record.counters.taken_back = 3
    bench.snapshotter.take()
    assert (bench.shard.history.generation, report.status(bench.coordinator).leases_taken_back) == (1, 3)


def test_what_has_happened_to_workers_and_servers_stays_counted(bench):
    bench.train(2)
    bench.snapshotter.take()
    counters = bench.coordinator.record.counters
    counters.taken_back, counters.restarted_from_nothing = 3, 1
    bench.train(1)
    bench.diverge()
    status = report.status(bench.coordinator)
    assert (status.leases_taken_back, status.restarted_from_nothing) == (3, 1)


def snapshots_of_three(bench):
    """Snapshots of the versions 1, 2 and 4; the parameters of the last one give no finite loss."""
    for batches in (1, 1, 2):
        bench.train(batches)
        assert bench.snapshotter.take() is not None


def test_snapshot_from_which_nothing_can_be_trained_gives_way_to_the_next_older_one(bench):
    snapshots_of_three(bench)
    versions = []
    for _ in range(3):
        bench.diverge()
        versions.append(bench.shard.history.version)
    assert versions == [4, 2, 1]
    assert [manifest.generation for manifest in bench.store.manifests()] == [3, 2, 1, 0, 0, 0]
    status = report.status(bench.coordinator)
    assert (status.rollbacks, status.data.lost, status.data.done) == (3, 6, 8)
    for _ in range(MAX_IN_A_ROW - 1):  # there is no older one
        bench.diverge()
    with pytest.raises(UserError, match="rolled back 3 times"):
        bench.diverge()


def test_rollback_past_a_snapshot_reads_no_other_beside_it(bench, monkeypatch):
    """A parameter server has room for two models: the one that it trains, and the one that it returns to."""
    snapshots_of_three(bench)
    bench.diverge()
    alive = Alive(monkeypatch)
    for version in (2, 1, 1):  # there is no older one than the first
        bench.diverge()
        assert bench.shard.history.version == version
    assert (alive.now, alive.most) == (0, 1)


def test_job_that_trains_on_after_an_older_snapshot_returns_to_that_one(bench):
    snapshots_of_three(bench)
    skipped = [bench.diverge().start, bench.diverge().start]
    bench.train(1)
    bench.diverge()
    assert (bench.shard.history.version, latest(bench.store).generation) == (2, 3)
    bench.train(1)
    assert IN_A_ROW not in bench.snapshotter.take().ledger
    seen = []
    while (lease := bench.lease()) is not None and lease.epoch == 0:
        seen.append(lease.start)
    assert not set(skipped) & set(seen)  # a batch that was left out stays so


def test_snapshot_of_another_shard_follows_to_the_older_one(bench, tmp_path):
    snapshots_of_three(bench)
    bench.diverge()
    bench.diverge()
    follower = Follower(bench.shard, SnapshotStore(LocalStorage(tmp_path)))
    bench.shard.history.generation = 1
    follower.handlers()["roll-back"](RollBackShard(generation=2))
    assert (bench.shard.history.version, bench.shard.history.generation) == (2, 2)


@pytest.mark.parametrize("waits", [False, True], ids=["left out", "another one each time"])
def test_file_that_the_storage_lacks_resets_no_rollback_limit(bench, waits):
    """A snapshot of the same parameters is none that was reached, and no good one is removed for it."""
    snapshots_of_three(bench)
    tasks = bench.coordinator.record.tasks
    tasks.leave_out({"logs/long.csv": "File name too long"})
    versions = []
    with pytest.raises(UserError, match="rolled back 3 times"):
        for number in range(9):
            bench.diverge()
            versions.append(bench.shard.history.version)
            tasks.leave_out({f"logs/{number}.csv": "File name too long"} if waits else {})
            assert (bench.snapshotter.take() is not None) == waits
    assert versions == [4, 2, 1, 1, 1]


def test_snapshot_that_fails_once_removes_none_that_a_rollback_needs(bench, monkeypatch):
    """A storage that refuses now and then is why files are left out. What the attempt has written is removed."""
    snapshots_of_three(bench)
    tasks, versions = bench.coordinator.record.tasks, []
    with pytest.raises(UserError, match="rolled back 3 times"):
        for number in range(9):
            bench.diverge()
            versions.append(bench.shard.history.version)
            tasks.leave_out({f"logs/{number}.csv": "File name too long"})

            def refuse(_):
                raise Unreachable("once")

            with monkeypatch.context() as patched, pytest.raises(Unreachable, match="once"):
                patched.setattr(bench.store, "publish", refuse)
                bench.snapshotter.take()
            assert bench.snapshotter.take() is not None
    assert versions == [4, 2, 1, 1, 1]


@pytest.mark.parametrize("process", ["same", "new"])
@pytest.mark.parametrize("why", ["the storage refuses it", "the parameters are not finite"])
def test_snapshot_of_new_parameters_that_fails_removes_none_that_a_rollback_needs(
    bench, tmp_path, monkeypatch, why, process
):
    """What fails is no newer snapshot. A job that diverges at once fails to take each: it lost all good ones."""
    snapshots_of_three(bench)
    for attempt in (1, 2):
        bench.diverge()
        if process == "new":
            bench = restarted(tmp_path, attempt)
            bench.seq = 100 * attempt
        bench.train()
        if why == "the parameters are not finite":
            bench.shard.model.parameters[0] = float("nan")

        def refuse(_):
            raise Unreachable("once")

        with monkeypatch.context() as patched, pytest.raises((Unreachable, SnapshotError)):
            patched.setattr(bench.store, "publish", refuse)
            bench.snapshotter.take()
    assert {manifest.shards[0].version for manifest in bench.store.manifests()} == {4, 2, 1}


def test_attempts_that_failed_leave_nothing_after_a_rollback(bench, tmp_path, monkeypatch):
    """A storage that is full would never have room again."""
    snapshots_of_three(bench)
    bench.diverge()
    left = tmp_path / "snapshots" / "0000000009-0"
    left.mkdir()
    bench.coordinator.record.tasks.leave_out({"logs/long.csv": "File name too long"})
    bench.snapshotter.take()
    bench.coordinator.record.tasks.leave_out({"logs/longer.csv": "File name too long"})

    def refuse(_):
        raise Unreachable("always")

    monkeypatch.setattr(bench.store, "publish", refuse)
    for _ in range(2):
        with pytest.raises(Unreachable, match="always"):
            bench.snapshotter.take()
    assert not left.exists()
    assert [manifest.shards[0].version for manifest in bench.store.manifests()] == [4, 4, 4, 2, 1]


def restarted(folder, epoch):
    """The next process of parameter server 0, and a worker without parameters, as after a pause of the job."""
    bench = Bench(folder, epoch=epoch)
    manifest, copy = bench.store.load_settled(0, 1)
    bench.shard.restore(copy)
    bench.coordinator.load(manifest.ledger)
    bench.snapshotter.set_latest(manifest, copy.version)
    bench.begin()
    with bench.shard.lock:
        bench.shard._become_ready()
    bench.coordinator.course.gathering.end()
    return bench


def test_a_restart_resets_no_rollback_limit(bench, tmp_path):
    """A job that diverged at once after each pause went back for ever, and removed its good snapshots."""
    snapshots_of_three(bench)
    versions = []
    with pytest.raises(UserError, match="rolled back 3 times"):
        for epoch in range(1, 10):
            bench.diverge()
            versions.append(bench.shard.history.version)
            bench = restarted(tmp_path, epoch)
            assert bench.snapshotter.take() is None
    assert versions == [4, 2, 1, 1, 1]


@pytest.mark.parametrize("when", ["before it", "while it is committed"])
def test_a_rollback_forgets_no_file_that_was_lost(bench, tmp_path, when):
    """Else a restart before the next snapshot would take it for stored, and the export that of an earlier epoch."""
    bench.train(2)
    bench.snapshotter.take()
    tasks, publish, lost = bench.coordinator.record.tasks, bench.store.publish, {"logs/best.npz": ""}
    assert tasks.sends_later((1, 0), list(lost), 0, dict.fromkeys(lost, 0))
    if when == "before it":
        tasks.release((1, 0))

    def committed(manifest):
        result = publish(manifest)
        tasks.release((1, 0))
        tasks.leave_out({"logs/long.csv": "File name too long"})
        return result

    if when == "while it is committed":
        lost |= {"logs/long.csv": "File name too long"}
        bench.store.publish = committed
    bench.diverge()
    bench.store.publish = publish
    assert tasks.files.missing == lost
    assert (bench.snapshotter.take() is None) == (when == "before it")
    assert restarted(tmp_path, 1).coordinator.record.tasks.files.missing == lost


def test_job_goes_back_to_the_snapshot_that_it_has_if_an_older_one_cannot_be_read(bench, tmp_path):
    """It waited for the older one for ever, and nobody trained."""
    for _ in range(2):
        bench.train()
        bench.snapshotter.take()
    bench.diverge()
    storage, clock = Worn(tmp_path), Clock()
    bench.rollback._store = SnapshotStore(storage, clock)
    storage.refuses = lambda name: name.endswith("manifest-0000000001.json")
    lease, began = bench.lease(), clock.now
    while clock.now < began + UNREAD_SECONDS:
        with pytest.raises(Unreachable):
            bench.diverge(lease)
        clock.now += 10.0
    bench.diverge(lease)
    assert (bench.shard.history.version, bench.shard.history.generation) == (2, 2)
