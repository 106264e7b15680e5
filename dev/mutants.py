"""Mutants of the trainer's exactly-once core and of the operator: one line is wrong, and some test must fail.

`python -m dev.mutants` runs, for each mutant, the tests of the room it is in, and then, for the trainer, the simulation
with many seeds, until one fails. A mutant that survives is a missing invariant, or code that nobody needs. Of one whose
seeds run out of time nobody knows: the run fails with it as well, as a busy machine would else hide what survives.
`python -m dev.mutants rooms` leaves the simulation out, `seeds` the rooms: then the trainer's are judged by the
simulation alone. Further arguments select mutants by their file or name.

A mutant (in mutants.toml) names a line by its text, which must be there exactly once: a change of the code that makes
one stale fails a test. One that the simulation does not find says why: it is `beyond` the seeds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {"shoal_trainer": ROOT / "trainer_image", "shoal": ROOT / "operator"}
"""Where each package lies."""
TABLE = Path(__file__).with_suffix(".toml")
TESTS = "tests/unit/"
SIMULATION = TESTS + "trainer/simulation"
SEEDS = int(os.environ.get("SHOAL_SEEDS", "2000"))
FEW_SEEDS = 6, 30, 150, 600
"""Played before all of them: a test plays all its seeds before the next one begins, and most mutants need few."""
LONGEST_SECONDS = 4 * 3600
"""For the tests of one mutant. A test that hangs fails long before: what lasts so long has not been caught."""
HUNG_SECONDS = 150
"""For one of the rooms' tests, which take a second: many a mutant is killed by what waits for ever."""
SLOW_SECONDS = 1800
"""For one of the simulation's tests, of a hundred seeds: minutes beside others. Virtual time waits for nothing, and a
thread that does fails its seed: what lasts so long is slow."""
JUDGES = "rooms", "seeds"
SURVIVES = "SURVIVES"
UNKNOWN = "UNKNOWN: out of time"


@dataclass(frozen=True)
class Mutant:
    """One line that is wrong: in `file`, which begins with its package, `old` becomes `new`.

    `tests`: the folders or files that are run first. `beyond`: why the simulation does not find it, if so.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    beyond: str = ""

    @property
    def package(self) -> str:
        """The package of the file."""
        return self.file.partition("/")[0]


def load(path: Path = TABLE) -> tuple[Mutant, ...]:
    """The mutants of the table."""
    table = tomllib.loads(path.read_text())
    tests = {file: tuple(TESTS + test for test in names) for file, names in table["tests"].items()}
    return tuple(Mutant(**each, tests=tests[each["file"]]) for each in table["mutant"])


def mutate(mutant: Mutant, folder: Path) -> None:
    """Write the mutant into a folder with a copy of its package.

    Raises:
        SystemExit: its line is not there exactly once.
    """
    path = folder / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(
            f"{mutant.name}: {mutant.file} contains this text {text.count(mutant.old)} times: {mutant.old!r}"
        )
    path.write_text(text.replace(mutant.old, mutant.new))


@dataclass(frozen=True)
class Stage:
    """Tests to run, and for how long each may."""

    tests: tuple[str, ...]
    seconds: int
    hangs_kill: bool
    """Whether a test that lasts longer has found the mutant."""
    seeds: int = SEEDS


def stages(mutant: Mutant, judges: Sequence[str]) -> Iterator[Stage]:
    """What to run, one after the other until a test fails."""
    if "rooms" in judges:
        yield Stage(mutant.tests, HUNG_SECONDS, hangs_kill=True)
        if "seeds" in judges and mutant.package == "shoal_trainer":
            yield Stage((SIMULATION,), SLOW_SECONDS, hangs_kill=False)
    else:
        for seeds in sorted({min(few, SEEDS) for few in (*FEW_SEEDS, SEEDS)}):
            yield Stage((SIMULATION + "/test_simulation.py",), SLOW_SECONDS, hangs_kill=False, seeds=seeds)


def verdict(mutant: Mutant, judges: Sequence[str]) -> str:
    """The first test that fails with this mutant, SURVIVES, or UNKNOWN; or why it is not for the seeds."""
    if mutant.beyond and "rooms" not in judges:
        return f"beyond the seeds: {mutant.beyond}"
    with tempfile.TemporaryDirectory(prefix="shoal-mutant-") as folder:
        source, copy = PACKAGES[mutant.package] / mutant.package, Path(folder) / mutant.package
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        mutate(mutant, Path(folder))
        environment = os.environ | {
            "PYTHONPATH": folder,
            "SHOAL_NIGHT": "",
            # A mutant is judged by all tests of its room, not by those of a day.
            "SHOAL_NIGHTLY": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        for stage in stages(mutant, judges):
            found = outcome(mutant.name, stage, environment | {"SHOAL_SEEDS": str(stage.seeds)})
            if found is not None:
                return found
    return SURVIVES


def outcome(name: str, stage: Stage, environment: Mapping[str, str]) -> str | None:
    """The first test of a stage that fails; UNKNOWN if one ran out of time; None if all pass."""
    options = ["-x", "-q", "--no-header", "--tb=line", f"--timeout={stage.seconds}"]
    options.append("--hypothesis-profile=any-example")
    command = [sys.executable, "-m", "pytest", *options, *stage.tests]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LONGEST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return UNKNOWN
    if done.returncode not in {0, 1}:
        raise SystemExit(
            f"{name}: pytest exited {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    if done.returncode == 0:
        return None
    if not stage.hangs_kill and "from pytest-timeout" in done.stdout:
        return UNKNOWN
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (failed or ["a test"])[0].split(" - ")[0]


def main(arguments: Sequence[str]) -> int:
    """Run the mutants, print what killed each, and return 1 if one survives, or nobody knows whether it does."""
    judges = [judge for judge in JUDGES if judge in arguments] or JUDGES
    parts = [argument for argument in arguments if argument not in JUDGES]
    chosen = [m for m in load() if not parts or any(part in f"{m.file} {m.name}" for part in parts)]
    if "rooms" not in judges:
        chosen = [mutant for mutant in chosen if mutant.package == "shoal_trainer"]
    told = Counter[str]()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for mutant, found in zip(chosen, pool.map(partial(verdict, judges=judges), chosen), strict=True):
            told[found] += 1
            print(f"{mutant.file:44} {mutant.name:55} {found}", flush=True)
    print(f"{len(chosen)} mutants, {told[SURVIVES]} survive, {told[UNKNOWN]} unknown")
    return told[SURVIVES] + told[UNKNOWN] > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
