"""Run external commands: errors contain their output, and Ctrl-C ends them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dev.errors import DevError

_running: set[subprocess.Popen[str]] = set()
_stopping = threading.Event()


def command(
    *words: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
    check: bool = True,
    timeout: float = 3600,
) -> str:
    """Run a command and return what it prints on stdout.

    Raises:
        DevError: it failed and `check` is set, or it took longer than `timeout` seconds.
    """
    if _stopping.is_set():
        raise DevError("interrupted")
    with subprocess.Popen(
        words,
        env=None if env is None else dict(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        _running.add(process)
        if _stopping.is_set():  # meanwhile: what ends the others may have looked before this one was there
            process.terminate()
        try:
            out, err = process.communicate(stdin, timeout)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise DevError(f"`{' '.join(words)}` did not end in {timeout:.0f} s.") from error
        finally:
            _running.discard(process)
    if check and process.returncode != 0:
        raise DevError(f"`{' '.join(words)}` failed:\n{(err.strip() or out)[-3000:]}")
    return out


def pause(seconds: float) -> None:
    """Wait. Raises DevError as soon as Ctrl-C, or a failure of what runs beside this, ends the rest."""
    if _stopping.wait(seconds):
        raise DevError("interrupted")


def exports(env: Mapping[str, str]) -> str:
    """The line of a shell that sets KUBECONFIG, and what PATH begins with: as in `env`, and `shoal`."""
    here = os.environ.get("PATH", "")
    added = [part for part in env["PATH"].removesuffix(here).split(os.pathsep) if part]
    if (shoal := sysconfig.get_path("scripts")) not in here.split(os.pathsep):
        added.append(shoal)
    path = f" PATH={shlex.quote(os.pathsep.join(added))}:$PATH" if added else ""
    return f"export KUBECONFIG={shlex.quote(env['KUBECONFIG'])}{path}"


def side_by_side(*work: Callable[[], Any]) -> None:
    """Run functions in threads. If one fails, or at Ctrl-C, the commands of the others are ended."""
    with ThreadPoolExecutor() as pool:
        try:
            for future in [pool.submit(each) for each in work]:
                future.result()
        except BaseException:
            _stopping.set()
            for process in list(_running):
                process.terminate()
            raise
        finally:
            pool.shutdown()
            _stopping.clear()
