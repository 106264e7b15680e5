"""README.md, "Your cluster": its commands run as they stand, on a real API server.

`make images` is played by tests of dev/publish.py; `shoal follow`, without an operator, would not end, and there is no
model yet.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dev.cluster import ControlPlane
from dev.images import IMAGES
from dev.kube import Kube
from dev.paths import ROOT
from dev.publish import reference
from tests.unit.docs.pages import blocks

Shell = Callable[[str], str]


@pytest.fixture
def shell(control_plane: ControlPlane, crds: None, namespace: str, tmp_path: Path) -> Shell:
    """Run a command in a copy of the repository, with a kubeconfig that has a namespace, as a user's has."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    kubeconfig = yaml.safe_load(control_plane.kubeconfig.read_text())
    for each in kubeconfig["contexts"]:
        each["context"]["namespace"] = namespace
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
    path = f"{Path(sys.executable).parent}:{control_plane.env['PATH']}"
    env = {**os.environ, **control_plane.env, "KUBECONFIG": str(tmp_path / "kubeconfig"), "PATH": path}

    def run(command: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def block(first: str) -> list[str]:
    """The lines of the block of commands that begins with this word."""
    [found] = [each for each in blocks("README.md", "sh") if each.split()[0] == first]
    return found.splitlines()


async def test_a_job_is_applied_and_one_made_of_a_file(shell: Shell, kube: Kube, namespace: str) -> None:
    """In the order of the page."""
    sed, apply, get = block("sed")
    shell(f"{sed}\n{apply}")
    jobs = f"/apis/shoal.dev/v1alpha1/namespaces/{namespace}/trainingjobs"
    [job] = (await kube.get(jobs))["items"]
    [worker] = job["spec"]["workers"]["template"]["spec"]["containers"]
    assert worker["image"] == reference(IMAGES["digits"], "registry.example.com/team", "TAG")
    words = shlex.split(get, comments=True)
    assert words[-1] == "-w"  # it does not end
    header, line = shell(shlex.join(words[:-1])).splitlines()
    [shown] = [each for each in blocks("README.md", "") if each.startswith("NAME")]
    assert header.split() == shown.splitlines()[0].split()
    assert line.split()[0] == "digits"

    init, follow, explain, model = block("shoal")
    shell(init)
    [second] = [each for each in (await kube.get(jobs))["items"] if each["metadata"]["name"] != "digits"]
    assert second["spec"]["workers"]["replicas"] == 3
    name = second["metadata"]["name"]
    claims = [each["spec"]["storage"]["volumeClaim"]["name"] for each in (job, second)]
    made = (await kube.get(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"))["items"]
    assert sorted(claims) == sorted(each["metadata"]["name"] for each in made), "one each: it serves one node"
    for line, command in ((follow, "follow"), (explain, "explain"), (model, "model")):
        assert shlex.split(line, comments=True)[:3] == ["shoal", command, name]
    assert "no operator has looked at this job" in shell(explain)
