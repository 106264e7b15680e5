"""One pool's reconcile: what it remembers when something fails, and when it lets go of a pool."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from shoal.api.capacity_pool import CapacityPool
from shoal.api.capacity_pool_scaling import Subject
from shoal.cluster.cache import Cache
from shoal.cluster.transport import Answer
from shoal.errors import Busy, ScalingError, Unavailable
from shoal.pools.metrics import PoolMetrics
from shoal.pools.rules import Pace, Target
from shoal.pools.scaler import FINALIZER, PoolScaler
from shoal.runtime.metrics import Metrics
from shoal.runtime.status_writer import StatusWriter

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
KEY = ("", "spot")
BLUE = {"apiVersion": "a/v1", "kind": "Fleet", "name": "blue"}
SCALE = {"minNodes": 0, "mode": "Scale", "target": BLUE}


class Writer:
    """Applies to the cache, as the API server does to the object."""

    def __init__(self, pools: Cache[CapacityPool]) -> None:
        self.pools = pools

    async def apply(
        self, about: CapacityPool, fields: Mapping[str, Any], _manager: str
    ) -> CapacityPool | None:
        now = self.pools.get(about.metadata.name)
        if now is None or now.metadata.resource_version != about.metadata.resource_version:
            return None
        status = about.status.model_dump(by_alias=True)
        kept = [c for c in status["conditions"] if c["type"] not in {"Scaled", "FieldConflict"}]
        conditions = [*kept, *fields.get("conditions", ())]
        return self.store(about, status={**status, "scaling": None, **fields, "conditions": conditions})

    async def remove(self, about: CapacityPool, field: str) -> CapacityPool:
        return self.store(about, status={**about.status.model_dump(by_alias=True), field: None})

    async def write_finalizers(self, about: CapacityPool, finalizers: Sequence[str]) -> CapacityPool:
        return self.store(about, metadata={"finalizers": list(finalizers)})

    def store(self, about: CapacityPool, **changes: Any) -> CapacityPool:
        whole = about.model_dump(by_alias=True)
        meta = {
            **whole["metadata"],
            **changes.pop("metadata", {}),
            "resourceVersion": str(int(about.metadata.resource_version) + 1),
        }
        stored = CapacityPool.model_validate({**whole, **changes, "metadata": meta})
        self.pools.put(stored, ours=True)
        return stored


class Events:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def record(self, _about: CapacityPool, events: Sequence[Any]) -> None:
        self.reasons += [event.reason for event in events]


class World:
    """One pool, and as the driver of its fleet a size and errors."""

    pace = Pace()

    def __init__(self) -> None:
        self.now = NOW
        self.nodes, self.busy = 2, ""
        self.read_fails: Exception | None = None
        self.resize_fails: Exception | None = None
        self.is_done_all_the_same = False
        self.meanwhile: Callable[[], object] = lambda: None
        """What happens until the cloud answers."""
        self.fleets = {"blue": self}
        self.pools: Cache[CapacityPool] = Cache(lambda *_: None)
        self.writer = Writer(self.pools)
        self.events = Events()
        self.metrics = Metrics()
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": NOW, "reason": "Valid"}
        self.pools.put(
            CapacityPool.model_validate(
                {
                    "metadata": {"name": "spot", "uid": "p", "generation": 1, "resourceVersion": "1"},
                    "spec": {"limits": {"nodes": 8}, "scaling": SCALE},
                    "status": {
                        "observedGeneration": 1,
                        "recommended": {"nodes": 5},
                        "shares": [{"operator": "a/shoal", "at": NOW}],
                        "conditions": [ready],
                    },
                }
            )
        )
        self.scaler = PoolScaler(
            self.pools,
            self.driver,
            self.writer,  # type: ignore[arg-type]
            self.events,  # type: ignore[arg-type]
            PoolMetrics(self.metrics),
            wall=lambda: self.now,
        )

    def driver(self, _pool: CapacityPool, subject: Subject) -> World:
        assert subject.target is not None
        return self.fleets[subject.target.name]

    async def read(self) -> Target:
        self.meanwhile()
        if self.read_fails is not None:
            raise self.read_fails
        return Target(self.nodes, busy=self.busy)

    async def resize(self, nodes: int, _seen: Target, /) -> None:
        self.meanwhile()
        if self.resize_fails is None or self.is_done_all_the_same:
            self.nodes = nodes
        if self.resize_fails is not None:
            raise self.resize_fails

    async def let_go(self) -> None:
        self.meanwhile()

    @property
    def pool(self) -> CapacityPool:
        found = self.pools.get("spot")
        assert found is not None
        return found

    def condition(self, kind: str) -> tuple[str, str]:
        found = next(c for c in self.pool.status.conditions if c.type == kind)
        return found.status, found.reason

    def resizes(self) -> dict[str, float]:
        """How many were sent, by result."""
        samples = [s for m in self.metrics.registry.collect() for s in m.samples]
        return {s.labels["result"]: s.value for s in samples if s.name == "shoal_pool_resizes_total"}

    def change(self, **scaling: Any) -> None:
        """The user changes `spec.scaling`, and the operator has read it."""
        spec = self.pool.spec.model_dump(by_alias=True)
        self.writer.store(self.pool, spec={**spec, "scaling": scaling})

    def recommend(self, nodes: int) -> None:
        """An operator writes its status."""
        status = self.pool.status.model_dump(by_alias=True)
        self.writer.store(self.pool, status={**status, "recommended": {"nodes": nodes}})

    def delete(self) -> None:
        self.writer.store(self.pool, metadata={"deletionTimestamp": "2026-01-01T12:00:00Z"})


@pytest.fixture
def world() -> World:
    return World()


async def test_the_finalizer_is_there_before_the_first_node(world: World) -> None:
    world.resize_fails = Unavailable("no answer")
    with pytest.raises(Unavailable):
        await world.scaler(KEY)
    assert world.pool.metadata.finalizers == (FINALIZER,)


@pytest.mark.parametrize("done", [True, False])
async def test_a_lost_answer_is_neither_a_conflict_nor_repeated_too_soon(world: World, done: bool) -> None:
    world.resize_fails, world.is_done_all_the_same = Unavailable("no answer"), done
    with pytest.raises(Unavailable):
        await world.scaler(KEY)
    world.resize_fails = None
    world.now += timedelta(seconds=60)
    await world.scaler(KEY)
    assert world.condition("FieldConflict") == ("False", "NoConflict")
    assert world.nodes == (5 if done else 2)
    world.now += timedelta(seconds=60)
    await world.scaler(KEY)
    assert world.nodes == 5


async def test_a_refused_resize_is_forgotten_and_tried_again(world: World) -> None:
    world.resize_fails = Busy("Changed", "it changed")
    assert await world.scaler(KEY) == pytest.approx(5)
    assert world.condition("Scaled") == ("False", "Changed")
    world.resize_fails = None
    await world.scaler(KEY)
    assert world.nodes == 5
    assert world.events.reasons == ["Resized"]


async def test_a_write_that_failed_is_no_resize(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was to be remembered of it was remembered with the next write: a pool waited two minutes to grow."""
    world.writer.store(world.pool, metadata={"finalizers": [FINALIZER]})
    apply, failures = world.writer.apply, [Unavailable("429")]

    async def fails_once(*of: Any) -> CapacityPool | None:
        if failures:
            raise failures.pop()
        return await apply(*of)

    monkeypatch.setattr(world.writer, "apply", fails_once)
    with pytest.raises(Unavailable):
        await world.scaler(KEY)
    assert (world.condition("Scaled"), world.pool.status.scaling) == (("False", "Unavailable"), None)
    await world.scaler(KEY)
    assert world.nodes == 5
    assert world.resizes() == {"done": 1}


async def test_a_deleted_pool_is_let_go_after_ten_minutes_without_an_answer(world: World) -> None:
    await world.scaler(KEY)
    world.delete()
    world.read_fails = Unavailable("no route")
    await world.scaler(KEY)
    assert world.condition("Scaled") == ("False", "Unavailable")
    world.now += timedelta(minutes=9, seconds=59)
    await world.scaler(KEY)
    assert world.pool.metadata.finalizers == (FINALIZER,)
    world.now += timedelta(seconds=1)
    await world.scaler(KEY)
    assert world.pool.metadata.finalizers == ()
    assert world.events.reasons == ["Resized", "NotReleased"]


async def test_a_deleted_pool_is_let_go_though_a_clock_was_ahead_when_that_began(world: World) -> None:
    """For as long as it had been ahead, and ten minutes, a cloud that did not answer held the finalizer."""
    await world.scaler(KEY)
    world.delete()
    world.read_fails = Unavailable("no route")
    world.now += timedelta(days=400)
    await world.scaler(KEY)
    world.now = NOW
    for _ in range(11):
        assert world.pool.metadata.finalizers == (FINALIZER,)
        await world.scaler(KEY)
        world.now += timedelta(minutes=1)
    assert world.pool.metadata.finalizers == ()


@pytest.mark.parametrize(
    "error", [RuntimeError("of a library"), ScalingError("Forbidden", "no"), Unavailable("no")]
)
@pytest.mark.parametrize("fails", ["read", "resize", "let_go"])
async def test_no_error_keeps_a_deleted_pool_for_more_than_ten_minutes(
    world: World, monkeypatch: pytest.MonkeyPatch, fails: str, error: Exception
) -> None:
    """An error that was none of the expected ones went on to the queue, and the ten minutes never began."""

    async def fail(*_: Any) -> None:
        raise error

    await world.scaler(KEY)
    world.delete()
    monkeypatch.setattr(world, fails, fail)
    if fails == "let_go":
        world.nodes = 2
    for minutes in (3, 6, 4):
        assert world.pool.metadata.finalizers == (FINALIZER,)
        world.now += timedelta(minutes=minutes)
        with contextlib.suppress(RuntimeError):
            await world.scaler(KEY)
    assert world.pool.metadata.finalizers == ()
    assert world.events.reasons[-1] == "NotReleased"


async def test_an_unexpected_error_is_told_and_logged(world: World) -> None:
    world.read_fails = RuntimeError("of a library")
    with pytest.raises(RuntimeError):  # the queue logs it
        await world.scaler(KEY)
    assert world.condition("Scaled") == ("False", "Unavailable")


async def test_a_size_of_somebody_else_is_left_and_the_user_is_warned(world: World) -> None:
    """It was a normal event, "Released", and the nodes were paid for ever."""
    await world.scaler(KEY)
    world.nodes = 7
    world.delete()
    await world.scaler(KEY)
    assert (world.pool.metadata.finalizers, world.nodes) == ((FINALIZER,), 7)
    assert world.condition("FieldConflict") == ("True", "SizeChanged")
    world.now += timedelta(minutes=10)
    await world.scaler(KEY)
    assert world.pool.metadata.finalizers == ()
    assert world.events.reasons[-1] == "NotReleased"


async def test_a_conflict_stays_one_while_nothing_can_be_seen(world: World) -> None:
    await world.scaler(KEY)
    world.nodes = 7
    await world.scaler(KEY)
    told = world.condition("FieldConflict")
    assert told == ("True", "SizeChanged")
    world.busy = "RECONCILING"
    await world.scaler(KEY)
    assert (world.condition("FieldConflict"), world.condition("Scaled")) == (told, ("False", "Busy"))
    assert world.events.reasons == ["Resized", "FieldConflict"]


async def test_a_conflict_ends_with_the_size_that_was_set(world: World) -> None:
    await world.scaler(KEY)
    world.nodes = 7
    await world.scaler(KEY)
    world.nodes = 5
    await world.scaler(KEY)
    assert world.condition("FieldConflict") == ("False", "NoConflict")
    assert world.events.reasons == ["Resized", "FieldConflict", "ConflictResolved"]


async def test_another_mode_gives_the_size_back_and_leaves_nothing(world: World) -> None:
    await world.scaler(KEY)
    world.now += timedelta(minutes=2)
    world.change(mode="Pods")
    assert await world.scaler(KEY) is not None
    assert (world.nodes, world.pool.metadata.finalizers) == (2, (FINALIZER,))
    assert await world.scaler(KEY) is not None
    assert await world.scaler(KEY) is None
    assert world.events.reasons == ["Resized", "Resized", "Released"]
    assert (world.nodes, world.pool.status.scaling, world.pool.metadata.finalizers) == (2, None, ())
    assert [each.type for each in world.pool.status.conditions] == ["Ready"]


@pytest.mark.parametrize("deleted", [True, False])
async def test_a_pool_whose_memory_another_manager_has_too_is_released_once(
    world: World, monkeypatch: pytest.MonkeyPatch, deleted: bool
) -> None:
    """Restored with its status: what is applied no more stays. Its cloud was read, and it was released, for ever."""
    await world.scaler(KEY)
    world.now += timedelta(minutes=2)
    apply = world.writer.apply

    async def leaves(about: CapacityPool, fields: Mapping[str, Any], manager: str) -> CapacityPool | None:
        scaling = about.status.scaling
        theirs = {"scaling": scaling.model_dump(by_alias=True)} if scaling is not None else {}
        return await apply(about, {**theirs, **fields}, manager)

    monkeypatch.setattr(world.writer, "apply", leaves)
    if deleted:
        world.delete()
    else:
        world.change(mode="Pods")
    for _ in range(4):
        await world.scaler(KEY)
    assert world.events.reasons == ["Resized", "Resized", "Released"]
    assert (world.pool.status.scaling, world.pool.metadata.finalizers) == (None, ())


async def test_another_target_is_sized_when_the_former_has_its_size_again(world: World) -> None:
    red = world.fleets["red"] = World()
    red.nodes = 3
    await world.scaler(KEY)
    world.now += timedelta(minutes=2)
    world.change(mode="Scale", target={**BLUE, "name": "red"}, minNodes=0)
    await world.scaler(KEY)
    assert (world.nodes, red.nodes) == (2, 3)
    await world.scaler(KEY)
    await world.scaler(KEY)
    assert world.events.reasons == ["Resized", "Resized", "Released", "Resized"]
    assert (world.nodes, red.nodes) == (2, 5)
    scaling = world.pool.status.scaling
    assert scaling is not None
    assert scaling.original_nodes == 3


async def test_a_deleted_pool_whose_target_is_gone_is_let_go_at_once(world: World) -> None:
    await world.scaler(KEY)
    world.delete()
    world.read_fails = ScalingError("TargetNotFound", "it is gone")
    await world.scaler(KEY)
    assert world.pool.metadata.finalizers == ()
    assert world.pool.status.scaling is None


async def test_a_steady_pool_is_not_written_again(world: World) -> None:
    await world.scaler(KEY)
    await world.scaler(KEY)
    version = world.pool.metadata.resource_version
    for _ in range(3):
        world.now += timedelta(seconds=30)
        await world.scaler(KEY)
    assert world.pool.metadata.resource_version == version


async def test_a_pool_that_changes_whenever_its_cloud_is_asked_grows(world: World) -> None:
    """Each write was a conflict: a pool in use, of a cloud that takes seconds, never got a node."""
    world.meanwhile = lambda: world.recommend(6)
    await world.scaler(KEY)
    assert world.nodes == 6
    world.now += timedelta(minutes=2)
    await world.scaler(KEY)
    assert world.condition("Scaled") == ("True", "AsRecommended")


@pytest.mark.parametrize("fails", ["read", "resize"])
async def test_a_cloud_that_does_not_answer_is_told_though_the_pool_changes_meanwhile(
    world: World, fails: str
) -> None:
    setattr(world, f"{fails}_fails", Unavailable("no route"))
    world.meanwhile = lambda: world.recommend(6)
    with pytest.raises(Unavailable):
        await world.scaler(KEY)
    assert world.condition("Scaled") == ("False", "Unavailable")


async def test_a_pool_is_let_go_though_it_changes_whenever_its_cloud_is_asked(world: World) -> None:
    await world.scaler(KEY)
    world.meanwhile = lambda: world.recommend(6)
    world.change(mode="Pods")
    world.now += timedelta(minutes=2)
    for _ in range(3):
        await world.scaler(KEY)
    assert world.events.reasons == ["Resized", "Resized", "Released"]
    assert (world.nodes, world.pool.status.scaling, world.pool.metadata.finalizers) == (2, None, ())


async def test_a_release_gives_up_though_the_pool_changes_whenever_its_cloud_is_asked(world: World) -> None:
    """It never began: since when it is released was not stored."""
    await world.scaler(KEY)
    world.meanwhile = lambda: world.recommend(6)
    world.change(mode="Pods")
    world.read_fails = Unavailable("no route")
    for _ in range(2):
        await world.scaler(KEY)
        world.now += timedelta(minutes=10)
    assert world.events.reasons == ["Resized", "NotReleased"]


@pytest.mark.parametrize("change", ["mode", "deleted", "gone"])
async def test_nothing_is_resized_that_is_not_to_be_by_the_time_the_cloud_answers(
    world: World, change: str
) -> None:
    changes = {
        "mode": lambda: world.change(mode="Pods"),
        "deleted": world.delete,
        "gone": lambda: world.pools.drop("p"),
    }
    world.meanwhile = changes[change]
    assert await world.scaler(KEY) == pytest.approx(5)
    assert (world.nodes, world.events.reasons) == (2, [])


class Changed:
    """An API server that has had the pool in a newer version for long."""

    def __init__(self, pool: CapacityPool) -> None:
        self.pool = pool

    async def request(self, _method: str, _path: str, **options: Any) -> Answer:
        if options["body"]["metadata"].get("resourceVersion", "9") != "9":
            return Answer(409, b'{"reason": "Conflict", "message": "the object has been modified"}')
        meta = self.pool.metadata.model_copy(update={"resource_version": "9"})
        stored = self.pool.model_copy(update={"metadata": meta})
        return Answer(200, stored.model_dump_json(by_alias=True).encode())

    def stream(self, path: str, query: Any) -> Any:
        raise NotImplementedError


async def test_nothing_is_resized_by_an_old_recommendation(world: World) -> None:
    """The watch of pools was half-open: nodes with workers and servers went as those of a pool that had been idle."""
    world.writer.store(world.pool, metadata={"finalizers": [FINALIZER]})
    writer = StatusWriter(Changed(world.pool), world.pools, CapacityPool)
    metrics = PoolMetrics(Metrics())
    scaler = PoolScaler(world.pools, world.driver, writer, world.events, metrics, wall=lambda: world.now)  # type: ignore[arg-type]
    assert await scaler(KEY) == pytest.approx(5)
    assert (world.nodes, world.events.reasons) == (2, [])
