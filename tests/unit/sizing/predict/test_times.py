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
        assert fit.notes
        with pytest.raises(NotEnoughData):
            SnapshotTime().predict(rows)
