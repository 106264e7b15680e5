"""The reports of the other shards in the status."""

from __future__ import annotations

from shoal_trainer.contract import ShardReport
from shoal_trainer.coordinator.shard_reports import ShardReports
from shoal_trainer.errors import Unreachable


class Other:
    """Another shard; None: it does not answer."""

    def __init__(self, answer: ShardReport | None) -> None:
        self.answer = answer

    def report(self) -> ShardReport:
        if self.answer is None:
            raise Unreachable("no answer")
        return self.answer


def test_a_shard_that_never_answered_is_left_out() -> None:
    second = ShardReport(index=2, epoch=4, busy_seconds=1.5, updates=3, bytes_received=99)
    reports = ShardReports({1: Other(None), 2: Other(second)})
    assert reports.newest() == []
    reports.ask()
    assert reports.newest() == [second]


def test_a_shard_that_stops_answering_keeps_its_counters_and_is_not_ready() -> None:
    other = Other(ShardReport(index=1, epoch=0, updates=3, snapshot_idle_seconds=40.0))
    reports = ShardReports({1: other})
    reports.ask()
    other.answer = None
    reports.ask()
    assert reports.newest() == [ShardReport(index=1, epoch=0, updates=3, ready=False)]
    other.answer = ShardReport(index=1, epoch=1, boot=7, updates=1)
    reports.ask()
    assert reports.newest() == [other.answer]
