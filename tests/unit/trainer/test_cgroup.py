from pathlib import Path

import pytest

from shoal_trainer.cgroup import cpu_limit, memory_limit


@pytest.mark.parametrize(
    ("text", "limit"),
    [("1073741824\n", 1 << 30), ("max\n", None), ("9223372036854771712\n", None), (None, None)],
)
@pytest.mark.parametrize("file", ["memory.max", "memory/memory.limit_in_bytes"])
def test_memory_limit(tmp_path: Path, text: str | None, limit: int | None, file: str) -> None:
    (tmp_path / "memory").mkdir()
    if text is not None:
        (tmp_path / file).write_text(text)
    assert memory_limit(tmp_path) == limit


@pytest.mark.parametrize(
    ("quota", "period", "limit"),
    [
        ("100000", "100000", 1.0),
        ("10000", "100000", 0.1),
        ("150000", "100000", 1.5),
        ("max", "100000", None),
        ("-1", "100000", None),
        ("100000", "0", None),
    ],
)
def test_cpu_limit(tmp_path: Path, quota: str, period: str, limit: float | None) -> None:
    assert cpu_limit(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(f"{quota}\n")
    assert cpu_limit(tmp_path) is None
    (tmp_path / "cpu/cpu.cfs_period_us").write_text(f"{period}\n")
    assert cpu_limit(tmp_path) == limit
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    assert cpu_limit(tmp_path) == 2.0
