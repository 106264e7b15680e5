"""The epochs of a job as its coordinator logs them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.client.history import History
from shoal_trainer.contract import EPOCH_LINE, EpochReport


def line(epoch: int, **metrics: float) -> str:
    return (
        f"2026-11-24 03:00:00 INFO shoal: {EPOCH_LINE}{EpochReport(epoch=epoch, metrics=metrics).to_json()}"
    )


def test_epochs_among_other_lines() -> None:
    history = History.from_lines(
        ["starting", line(0, loss=2.0), "saved", line(1, loss=1.0, val_loss=1.5), line(2)[:-3]]
    )
    assert history.metric("loss") == [2.0, 1.0]
    assert history.rows() == [
        {"epoch": 0, "loss": 2.0, "val_loss": None},
        {"epoch": 1, "loss": 1.0, "val_loss": 1.5},
    ]


def test_frame_is_indexed_by_epoch() -> None:
    frame = History.from_lines([line(0, loss=2.0), line(1, loss=1.0)]).frame()
    assert list(frame.index) == [0, 1]
    assert list(frame["loss"]) == [2.0, 1.0]


@given(st.lists(st.tuples(st.integers(0, 8), st.floats(0, 9)), max_size=30))
def test_a_rollback_takes_back_what_came_after(logged: list[tuple[int, float]]) -> None:
    history = History.from_lines(line(epoch, loss=loss) for epoch, loss in logged)
    last = {epoch: position for position, (epoch, _) in enumerate(logged)}
    kept = [e for e in last if not any(epoch < e and position > last[e] for epoch, position in last.items())]
    assert [each.epoch for each in history] == sorted(kept)
    assert all(each.metrics["loss"] == logged[last[each.epoch]][1] for each in history)
