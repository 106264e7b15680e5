"""Tell a story: a cluster, the chart, what the story plays on it; then its figures and its picture.

The cluster is removed at the end, also after an error or Ctrl-C, unless KEEP=1.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from rich.live import Live

from dev.commands import command, exports
from dev.console import console, say, step, tables
from dev.demo.backend import Backend, choose
from dev.demo.table import render
from dev.demo.watch import Picture, Watcher
from dev.errors import DevError
from dev.images import IMAGES
from dev.paths import ROOT

NAMESPACE = "default"
LOOK_SECONDS = 0.5
SPEAK_SECONDS = 5.0
VALUES = {
    "image.repository": IMAGES["operator"].reference.rsplit(":", 1)[0],
    "image.tag": "dev",
    "image.pullPolicy": "Never",
    "trainer.psImage": IMAGES["ps"].reference,
    # The worker image and one file. It is on the nodes, so that jobs of others run there, too.
    "trainer.workerImage": IMAGES["digits"].reference,
    "page.enabled": "true",
}


@dataclass
class Stage:
    """Where a story is played. `seconds`: how long each of its parts took; `report` takes a line of output."""

    backend: Backend
    begin: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def part(self, name: str) -> None:
        """What happened since the end of the last part was of this one."""
        took = time.monotonic() - self.begin - sum(self.seconds.values())
        self.seconds[name] = self.seconds.get(name, 0.0) + took

    def report(self, text: str) -> None:
        """Say what happened, and keep it below the live table."""
        self.lines.append(f"{time.monotonic() - self.begin - self.seconds.get('setUp', 0.0):5.0f} s  {text}")
        if not console.is_terminal:
            say(self.lines[-1])

    def install(self, values: Mapping[str, str]) -> None:
        """Install the chart; the cluster is set up then."""
        with step("helm install shoal"):
            install(self.backend, values)
        self.part("setUp")

    def apply(self, manifest: Path) -> None:
        """`kubectl apply -f`."""
        command("kubectl", "--namespace", NAMESPACE, "apply", "-f", str(manifest), env=self.backend.env)

    def follow(
        self,
        watcher: Watcher,
        advance: Callable[[Picture], None],
        line: Callable[[Picture], str],
        limit: float,
    ) -> Picture:
        """Watch a job to its end. `advance` gets each picture, the last one too; `line` says it in a log.

        Raises:
            DevError: it failed, or had not ended after `limit` seconds.
        """
        begin = time.monotonic()
        spoken = begin
        with Live(console=tables, auto_refresh=False, transient=True) as live:
            while True:
                picture, now = watcher.look(), time.monotonic()
                advance(picture)
                if picture.job.status.finished:
                    break
                if console.is_terminal:
                    live.update(render(picture, self.lines, now - begin), refresh=True)
                elif now - spoken >= SPEAK_SECONDS:
                    say(line(picture))
                    spoken = now
                if now - begin > limit:
                    raise DevError(f"{watcher.name} had not ended after {limit:.0f} s. {_state(watcher)}")
                time.sleep(LOOK_SECONDS)
        tables.print(render(picture, self.lines, time.monotonic() - begin))
        if picture.job.status.phase != "Succeeded":
            raise DevError(f"{watcher.name} ended as {picture.job.status.phase}. {_state(watcher)}")
        return picture


@dataclass(frozen=True)
class Told:
    """What came of a story. `draw` writes its picture, `words` are said of it."""

    figures: dict[str, Any]
    draw: Callable[[Path], None]
    well: bool = True
    words: Sequence[str] = ()


def tell(name: str, play: Callable[[Stage], Told]) -> int:
    """Play a story; write build/NAME.json and build/NAME.png. Returns the exit code: 130 after Ctrl-C."""
    stage = Stage(choose())
    stage.backend.check()
    try:
        with _ended(stage.backend, keep=os.environ.get("KEEP") == "1"), _interruptible():
            told = play(stage)
    except KeyboardInterrupt:
        say("interrupted; the tools and images are kept for the next run")
        return 130
    stage.seconds["total"] = time.monotonic() - stage.begin
    figures = {**told.figures, "seconds": {part: round(took, 1) for part, took in stage.seconds.items()}}
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    (build / f"{name}.json").write_text(json.dumps(figures, indent=2) + "\n")
    told.draw(build / f"{name}.png")
    console.print_json(data=figures)
    for line in told.words:
        say(line)
    took = stage.seconds["total"]
    say(f"written to build/{name}.json and build/{name}.png; the demo took {took:.0f} s")
    return 0 if told.well else 1


def install(backend: Backend, chosen: Mapping[str, str] = VALUES) -> None:
    """Install the chart with the images of this checkout, and wait for it."""
    values = [
        word
        for name, value in chosen.items()
        for word in ("--set-string" if name.startswith("extraEnv") else "--set", f"{name}={value}")
    ]
    chart = str(ROOT / "charts" / "shoal")
    where = ["--namespace", "shoal-system", "--create-namespace", "--wait", "--timeout", "3m"]
    command("helm", "upgrade", "--install", "shoal", chart, *where, *values, env=backend.env)


def _state(watcher: Watcher) -> str:
    """The state of the job and its pods, for an error message."""
    try:
        description = watcher.kubectl("describe", "trainingjob", watcher.name)
        pods = watcher.kubectl("get", "pods", "-o", "wide")
    except (DevError, OSError) as error:
        return str(error)
    return f"Run with KEEP=1 to keep the cluster for inspection.\n{description[-4000:]}\n{pods}"


@contextmanager
def _ended(backend: Backend, *, keep: bool) -> Iterator[None]:
    """Remove the cluster at the end, also after an error."""
    try:
        yield
    finally:
        if keep:
            say("KEEP=1: the cluster is kept; `make demo-down` removes it. In a shell of yours:")
            print(exports(backend.env))  # on one line, however long
            forward = "kubectl --namespace shoal-system port-forward deploy/shoal 8082"
            say(f"the web page is at http://localhost:8082 while `{forward}` runs")
            if lacks := backend.left():
                say(lacks)
        else:
            with step("removing the cluster"):
                backend.down()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
