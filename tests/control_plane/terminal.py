"""A user's terminal: commands of the pages run as they stand, in a copy of the examples."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import yaml
from click.testing import CliRunner

from dev.cluster import ControlPlane
from dev.paths import ROOT
from shoal.cli import main


class Terminal:
    """Its folder is `folder`, its kubeconfig has the namespace."""

    def __init__(self, plane: ControlPlane, namespace: str, folder: Path) -> None:
        shutil.copytree(ROOT / "examples", folder / "examples")
        kubeconfig = yaml.safe_load(plane.kubeconfig.read_text())
        for each in kubeconfig["contexts"]:
            each["context"]["namespace"] = namespace
        (folder / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
        self.folder, self._namespace = folder, namespace
        path = f"{Path(sys.executable).parent}:{plane.env['PATH']}"
        self._env = {**plane.env, "KUBECONFIG": str(folder / "kubeconfig"), "PATH": path}

    async def run(self, line: str) -> str:
        """What a command prints, with `default` for the namespace; it must succeed."""
        words = shlex.split(line.removeprefix("kubectl "), comments=True)
        if words[0] == "shoal" and "|" not in words:
            printed = await asyncio.to_thread(self._shoal, words[1:])
        else:
            printed = await asyncio.to_thread(self._shell, line)
        return printed.replace(self._namespace, "default")

    def _shoal(self, words: list[str]) -> str:
        """In this process, which has imported it."""
        env = {"KUBECONFIG": self._env["KUBECONFIG"], "COLUMNS": None}  # pytest-xdist sets it
        result = CliRunner().invoke(main, words, env=env)
        assert result.exit_code == 0, result.output
        return "".join(f"{line.rstrip()}\n" for line in result.output.splitlines())

    def _shell(self, script: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], cwd=self.folder, env=self._env, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return re.sub(r" +$", "", done.stdout, flags=re.MULTILINE)
