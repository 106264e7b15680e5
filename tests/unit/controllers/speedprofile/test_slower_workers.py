"""What a fast worker measures beside slow ones: from its requests to the limit of the servers that is learned of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from shoal.api.speed_profile import SpeedProfile, SpeedProfileStatus
from shoal.controllers.speedprofile.learn import learn
from shoal.sizing.fleet.resources import profile_of
from shoal.sizing.speed.model import SpeedModel
from shoal_trainer.contract import ModelReport, Phase, Shard, ShardReport, SpeedSums, Staleness, StatusReport
from shoal_trainer.coordinator.speeds import Speeds
from shoal_trainer.ps.client import PSClient
from shoal_trainer.ps.server import DataServer
from shoal_trainer.security import Credentials, create_secret_dir
from shoal_trainer.wire.messages import Push, PushMeta, Timings, WorkerIdentity
from tests.unit.trainer.ps.shards import MODEL, ONE, Clock, grad, pull_from, push_to, ready

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
LASTS = 40.0
FAST, SLOW, EXCHANGE = 0.06, 0.5, 0.002
"""Seconds that a V100 computes, and a T4, and that a push takes of its server and their link."""


def steps(credentials: Credentials, *, slow: bool) -> Iterator[tuple[float, Timings]]:
    """The steps of a fast worker, in virtual time, as its server has them. `slow`: it waits for a slow one."""
    clock, told = Clock(), list[Timings]()
    store = ready(staleness=Staleness(max=0), clock=clock)
    workers, pushing, base, seq = store.workers, store.pushing, 0, 0

    def works(*push: Any, **options: Any) -> Any:
        clock.now += EXCHANGE
        return pushing(*push, **options)

    def slow_one_pushes(_seconds: float) -> None:
        nonlocal base, seq
        clock.now, seq = clock.now + SLOW, seq + 1
        workers.wait_admitted(1, base, 0.0)
        base = push_to(store, 1, 0, seq, base, ONE, grad(0.0)).version
        workers.push_ended(1)

    store.pushing, store.changed.wait = works, slow_one_pushes  # type: ignore[assignment,method-assign]
    store.on_applied = lambda push: None if push.slot else told.append(push.meta.timings)
    with closing(DataServer(store, "uid", credentials, host="127.0.0.1", clock=clock)) as server:
        server.start()
        address = Shard(host="127.0.0.1", data_port=server.port)
        with closing(PSClient([address], WorkerIdentity("uid", 0, 0), credentials, clock=clock)) as client:
            client.hello(MODEL)
            pulled, number, pushed_at = client.pull(grad(0.0)), 0, 0.0
            if slow:
                workers.connect(1, 0)
                pull_from(store, 1, grad(0.0))
            while clock.now < LASTS:
                clock.now, number = clock.now + FAST, number + 1
                parts = pulled.pull_seconds, pulled.push_seconds
                meta = PushMeta(16, timings=Timings(clock.now - pushed_at, FAST, *parts))
                pushed_at = clock.now
                pulled = client.push_pull(grad(0.0), grad(0.0), Push(number, pulled.versions, meta))
                yield clock.now, told[-1]


def measured(credentials: Credentials, *, workers: int) -> SpeedSums:
    speeds, team = Speeds(1), frozenset((slot, 0) for slot in range(workers))
    for at, timings in steps(credentials, slow=workers > 1):
        speeds.observe(at, team, timings.step)
        speeds.pushed(at, (0, 0), lambda: ("V100", 1, 4, 16), timings)
        assert timings.wait == pytest.approx(SLOW if workers > 1 and at > SLOW + 2 * FAST else 0.0)
    [row] = speeds.report()
    return row


def test_wait_for_slower_workers_is_no_limit_of_the_servers_or_of_their_link(tmp_path: Path) -> None:
    """Eight workers of two kinds were said to be 16 updates/s at most, where the servers could do a hundred."""
    credentials = create_secret_dir(tmp_path / "secret")
    alone, beside = (measured(credentials, workers=workers) for workers in (1, 8))
    exchange = (beside.pull.seconds + beside.push.seconds) / beside.pull.count
    assert exchange == pytest.approx(2 * EXCHANGE, rel=0.01), "the push that it waits for takes as long"
    assert beside.step.seconds > SLOW * beside.step.count
    report = StatusReport(
        job_uid="u",
        phase=Phase.TRAINING,
        model=ModelReport(fingerprint="f" * 64, parameters=25_600_000, tensors=161, flops_per_sample=7.7e9),
        speed=(alone, beside),
        speed_epoch="a",
        shards=(ShardReport(index=0, epoch=0, busy_seconds=600.0, updates=60_000),),
    )
    read = StatusReport.model_validate_json(report.to_json())
    status = learn(SpeedProfileStatus(), "job", read, NOW)
    assert len(status.rows) == 2
    known = SpeedProfile.model_validate({"metadata": {"name": "m"}}).model_copy(update={"status": status})
    profile = profile_of(known, NOW)
    assert profile is not None
    found, _ = SpeedModel([profile]).servers.capacity(profile.model, 1)
    assert found == pytest.approx(100, rel=0.05)
