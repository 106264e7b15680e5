"""The data sheets of accelerators.

A data sheet is a prior with a wide interval: how much of the peak a training step achieves depends on the model. It
transfers speeds to an accelerator without measurements (`speed.worker`).
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from shoal.errors import UsageError

__all__ = ["CPU", "Accelerator", "Catalogue", "catalogue"]

CPU = "CPU"
# A core of a cloud's processor: half of a physical core with AVX2 at 3 GHz, and its share of the memory.
_CORE_TFLOPS, _CORE_BANDWIDTH, _CORE_MEMORY = 0.05, 5.0, 4.0


@dataclass(frozen=True)
class Accelerator:
    """One row of the catalogue. TFLOPS are dense peaks; `nan`: not in the sheet."""

    name: str
    fp32_tflops: float
    tf32_tflops: float
    bf16_tflops: float
    memory_gb: float
    bandwidth_gbs: float
    source: str = ""

    @property
    def is_cpu(self) -> bool:
        """Whether this is a processor, whose speed is given by its cores."""
        return self.name == CPU

    @property
    def arithmetic_tflops(self) -> float:
        """Peak arithmetic of a float32 training step.

        TensorFlow multiplies float32 in TF32 where the accelerator can; other kernels stay in fp32. Which part a model
        has is unknown, so the geometric mean of both.
        """
        return math.sqrt(self.fp32_tflops * self.tf32_tflops) if self.tf32_tflops > 0 else self.fp32_tflops


class Catalogue:
    """Accelerators by case-insensitive name, including the names that clouds and device plugins use."""

    def __init__(self, rows: dict[str, Accelerator]) -> None:
        self._rows = rows

    @classmethod
    def read(cls, text: str, origin: str) -> Catalogue:
        """Read CSV with the columns name, fp32_tflops, memory_gb, bandwidth_gbs and optionally the others."""
        rows: dict[str, Accelerator] = {}
        for number, row in enumerate(csv.DictReader(text.splitlines()), start=2):
            entry = Accelerator(
                name=(row.get("name") or "").strip(),
                **{
                    key: _number(row, key, f"{origin} line {number}")
                    for key in ("fp32_tflops", "tf32_tflops", "bf16_tflops", "memory_gb", "bandwidth_gbs")
                },
                source=row.get("source") or "",
            )
            if not entry.name or not entry.fp32_tflops > 0 or not entry.bandwidth_gbs > 0:
                raise UsageError(f"{origin} line {number}: give name, fp32_tflops > 0 and bandwidth_gbs > 0")
            for name in (entry.name, *(row.get("aliases") or "").split()):
                rows[name.lower()] = entry
        return cls(rows)

    def extended(self, path: Path) -> Catalogue:
        """Add the rows of a file of the same form; they replace rows of the same name."""
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the accelerators in {path}: {error}") from error
        return Catalogue(self._rows | Catalogue.read(text, str(path))._rows)

    @property
    def names(self) -> list[str]:
        """The primary names, sorted."""
        return sorted({row.name for row in self._rows.values()})

    def find(self, name: str) -> Accelerator:
        """The accelerator of this name, or an error that lists the names."""
        entry = self._rows.get(str(name).strip().lower())
        if entry is None:
            raise UsageError(
                f"the accelerator {name!r} is not in the catalogue: use one of {', '.join(self.names)}, "
                "or add its data sheet with --accelerators"
            )
        return entry

    def knows(self, name: str) -> bool:
        """Whether there is a data sheet of this name."""
        return str(name).strip().lower() in self._rows or str(name).strip().upper() == CPU

    def sheet(self, name: str, cores: float = 0.0) -> Accelerator:
        """The data sheet of a device; of a CPU, by its number of cores (0: not known, 1)."""
        if str(name).strip().upper() != CPU:
            return self.find(name)
        number = cores if cores > 0 else 1.0
        return Accelerator(
            CPU, _CORE_TFLOPS * number, math.nan, math.nan, _CORE_MEMORY * number, _CORE_BANDWIDTH * number
        )


@cache
def catalogue() -> Catalogue:
    """The built-in catalogue (accelerators.csv in this folder, with sources)."""
    text = resources.files("shoal.sizing").joinpath("accelerators.csv").read_text(encoding="utf-8")
    return Catalogue.read(text, "accelerators.csv")


def _number(row: dict[str, str], key: str, where: str) -> float:
    text = (row.get(key) or "").strip()
    try:
        return float(text) if text else math.nan
    except ValueError as error:
        raise UsageError(f"{where}: {key} is {text!r}, which is not a number") from error
