"""Processes that outlive the command that started them, and that a later command can end.

A cluster must be removable after its command was killed, without ending any other process. So each process records
its identity in a file *before* it executes its command. The identity is (boot id, pid, start time in clock ticks
since boot), which is unique; a pid alone is reused.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dev.errors import DevError

# $1 is the record, $2 the log; the rest is the command. /proc/$$/stat keeps its start time over exec.
_SHIM = """
read -r boot < /proc/sys/kernel/random/boot_id
read -r stat < /proc/$$/stat
printf '%s\\n%s\\n' "$boot" "$stat" > "$1.new" && mv -f "$1.new" "$1" || exit 125
exec > "$2" 2>&1 < /dev/null
shift 2
exec "$@"
"""


@dataclass(frozen=True)
class Identity:
    """The unique identity of a process."""

    boot: str
    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """The identity of a running process, or None (a zombie does not run)."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if _fields(stat)[0] == "Z" else cls.parse(f"{_boot()}\n{stat}")

    @classmethod
    def parse(cls, record: str) -> Identity:
        """From the record: the boot id, then a line of `/proc/PID/stat`."""
        boot, stat = record.strip().split("\n", 1)
        return cls(boot.strip(), int(stat.split(" ", 1)[0]), int(_fields(stat)[19]))

    @property
    def running(self) -> bool:
        """Whether this very process still runs."""
        return Identity.of(self.pid) == self

    def signal(self, number: int) -> bool:
        """Send a signal to this process only. Returns whether it was running."""
        if not self.running:
            return False
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.running:  # the pid was reused before the descriptor was opened
                return False
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True


def _fields(stat: str) -> list[str]:
    """The fields from the third one (the state) on; the second may contain spaces and brackets."""
    return stat[stat.rindex(")") + 2 :].split()


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class ProcessTable:
    """The processes of one cluster: a record for each in `folder`, a log for each in `logs`."""

    def __init__(self, folder: Path, logs: Path) -> None:
        self.folder = folder
        self.logs = logs

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        netns: str | None = None,
    ) -> Identity:
        """Start a process in a new session, optionally in a network namespace.

        The network namespace is entered with nsenter: `ip netns exec` would also remount /sys and hide the
        cgroups.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(parents=True, exist_ok=True)
        record = self.folder / name
        record.unlink(missing_ok=True)
        if netns is not None:
            command = ["nsenter", f"--net=/run/netns/{netns}", *command]
        # The process is reparented, so that it outlives its starter.
        shim = [
            "setsid",
            "--fork",
            "/bin/sh",
            "-c",
            _SHIM,
            "shoal",
            str(record),
            str(self.log(name)),
            *command,
        ]
        subprocess.run(shim, env=None if env is None else dict(env), cwd="/", check=True)
        deadline = time.monotonic() + 20
        while (found := self.find(name)) is None:
            if time.monotonic() > deadline:
                raise DevError(f"{command[0]} could not be started: see {self.log(name)}")
            time.sleep(0.002)
        return found

    def log(self, name: str) -> Path:
        """Where a process writes."""
        return self.logs / f"{name}.log"

    def find(self, name: str) -> Identity | None:
        """The identity that a process recorded."""
        try:
            return Identity.parse((self.folder / name).read_text())
        except (FileNotFoundError, ValueError):
            return None

    def names(self) -> list[str]:
        """The names of all processes that were started and not stopped."""
        return sorted(p.name for p in self.folder.glob("*") if p.suffix != ".new")

    def running(self, name: str) -> bool:
        """Whether a process of this table runs."""
        found = self.find(name)
        return found is not None and found.running

    def stop(self, *names: str, number: int = signal.SIGTERM, seconds: float = 5.0) -> None:
        """End processes: the signal, then SIGKILL after `seconds`. Ignores those that have ended."""
        ending = {name: found for name in names if (found := self.find(name))}
        for found in ending.values():
            found.signal(number)
        _await_end(list(ending.values()), seconds)
        for found in ending.values():
            found.signal(signal.SIGKILL)
        _await_end(list(ending.values()), 10.0)
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def tail(self, name: str, lines: int = 8) -> str:
        """The end of a log, for an error message."""
        try:
            return "\n".join(self.log(name).read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""


def _await_end(processes: Sequence[Identity], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(p.running for p in processes) and time.monotonic() < deadline:
        time.sleep(0.01)
