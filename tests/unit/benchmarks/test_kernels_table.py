"""The page of the kernels has a row for each update and a column for each peer."""

from benchmarks.harness import summary
from benchmarks.kernels import table


def test_figures_of_one_update_are_one_row() -> None:
    text = table(
        [
            summary("kernel sgd, 10 values, a call", [2.7, 2.8], "µs", "numpy's in-place add: 0.32 µs"),
            summary("kernel sgd 1 M fp32 / memcpy", [0.8, 0.9], "x", "bytes/s of memcpy"),
            summary("kernel sgd 1 M fp32 / numpy", [1.5], "x", "numpy, one thread"),
            summary("kernel adam 1 M bf16 / numpy", [1.25], "x", "numpy, one thread, which casts …", 1.5),
        ]
    )
    assert "- **numpy**: numpy, one thread\n" in text
    assert "| | memcpy | numpy |\n|---|---|---|\n" in text
    assert "| sgd 1 M fp32 | 0.85 (0.8-0.9) | 1.5 (1.5-1.5) |\n" in text
    assert "| adam 1 M bf16 |  | 1.25 (1.25-1.25) ≥ 1.5: **missed** |\n" in text
