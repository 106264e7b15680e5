"""The quickest benchmarks run to their end with `--quick`."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.__main__ import ORDER

FIELDS = {"name", "value", "unit", "against", "goal", "at_most", "low", "high", "met"}


@pytest.mark.nightly
def test_quick_benchmarks_write_the_documented_fields_with_unique_names(tmp_path):
    output = tmp_path / "build" / "bench.json"
    names = ["kernels", "scale"]
    assert set(names) < set(ORDER)
    subprocess.run(
        [sys.executable, "-m", "benchmarks", *names, "--quick", "--output", str(output)],
        check=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    rows = json.loads(output.read_text())
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        assert row.keys() == FIELDS
        assert row["value"] > 0
        assert row["low"] <= row["value"] <= row["high"]
        assert (row["goal"] is None) == (row["met"] is None)
    starts = {row["name"].split()[0] for row in rows}
    assert {"kernel", "push+pull,", "push-pulls/s,"} <= starts
