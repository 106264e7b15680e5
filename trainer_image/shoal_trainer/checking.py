"""The output of `shoal-trainer check`: a line for each part of the rehearsal, or JSON."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from shoal_trainer.contract import StopAfter

if TYPE_CHECKING:
    from shoal_trainer.worker.rehearsal import Finding

MARKS = {"ok": ("ok", "green"), "warning": ("warn", "yellow"), "error": ("FAIL", "bold red")}


def rehearse(
    entrypoint: str, args: dict[str, Any], batch_size: int, workers: int, stop_after: StopAfter, output: str
) -> int:
    """Try the job and print what was found. Returns the exit code: 0, or 1 if a cluster would refuse the job."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    _import_tensorflow()
    from shoal_trainer.worker.rehearsal import Rehearsal

    console = Console(highlight=False, soft_wrap=True)
    rehearsal = Rehearsal(
        entrypoint,
        args,
        batch_size=batch_size,
        stop_after=stop_after,
        workers=workers,
        folder=Path.cwd(),
        report=(lambda finding: console.print(line(finding))) if output == "text" else lambda _: None,
    )
    passed = rehearsal.run()
    if output == "json":
        print(
            json.dumps(
                {"passed": passed, "findings": [dataclasses.asdict(f) for f in rehearsal.findings]}, indent=2
            )
        )
    else:
        console.print(summary(rehearsal.findings))
    return 0 if passed else 1


def _import_tensorflow() -> None:
    """Without its greeting, which goes to descriptor 2 whatever the log level is."""
    kept = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        import tensorflow  # noqa: F401
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def line(finding: Finding) -> Text:
    """`ok    export           4 files, 1.2 MB  0.4 s`, and a line for each warning."""
    mark, style = MARKS[finding.state]
    text = Text.assemble(
        (f"{mark:<5}", style), f" {finding.part:<15} {finding.message}  ", (f"{finding.seconds:.1f} s", "dim")
    )
    for warning in finding.warnings:
        text.append(f"\n{'':<21} {warning}", "yellow")
    return text


def summary(findings: list[Finding]) -> str:
    """The last line."""
    errors = sum(finding.state == "error" for finding in findings)
    warnings = sum(len(finding.warnings) for finding in findings)
    words = "a cluster would take this job"
    if errors:
        words = f"{errors} error{'s' * (errors > 1)}: a cluster would fail this job"
    return words + (f"; {warnings} warning{'s' * (warnings > 1)}" if warnings else "") + "."
