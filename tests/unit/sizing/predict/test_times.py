"""The time of snapshots: known truth and invalid input."""

import pandas as pd
import pytest

from shoal.errors import NotEnoughData
from shoal.sizing.predict.durations import SnapshotTime


class TestDurations:
    def test_few_snapshots_widen_interval(self) -> None:
        rows = pd.DataFrame({"model": ["a"], "params": [1e6], "num_tensors": [10.0], "measured": [2.0]})
        fit = SnapshotTime().fit(rows)
        low, mean, high = fit.predict(rows)[0]
        assert 0 < low < mean < high
        assert mean == pytest.approx(2.0, rel=0.1)
        assert high / low > 1.15
        assert fit.notes_
        with pytest.raises(NotEnoughData):
            SnapshotTime().predict(rows)

    def test_interval_of_another_store_holds_a_shift_of_all_times(self) -> None:
        measured = [3.8, 3.6, 4.4, 5.1, 6.2, 7.7]
        rows = pd.DataFrame(
            {
                "model": list("abcdef"),
                "params": [0.7e6, 1.2e6, 3e6, 6.5e6, 18e6, 26e6],
                "num_tensors": [50.0, 74.0, 170.0, 216.0, 216.0, 216.0],
                "measured": measured,
            }
        )
        here, there = (SnapshotTime(elsewhere=away).fit(rows).predict(rows) for away in (False, True))
        for shift in (0.88, 1.14):
            later = rows["measured"].to_numpy() * shift
            assert ((there[:, 0] <= later) & (later <= there[:, 2])).all()
            assert not ((here[:, 0] <= later) & (later <= here[:, 2])).all()
        assert there[:, 1] == pytest.approx(here[:, 1])
