"""The pages for who installs and operates Shoal: their commands run as they stand, and print what is shown.

One story, on a cluster to which nobody has installed it: docs/kind.md installs, README.md trains a file, and
docs/operating.md removes everything. docs/kind.md makes cluster and images with Docker; here `dev` has made them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dev.cluster.local import LocalCluster
from dev.paths import ROOT
from tests.control_plane.test_chart_roles import KUEUE, crd
from tests.unit.docs.pages import Command, alike, block

PATIENCE = 1200.0
"""Seconds for a job, on a busy machine."""
WITH_DOCKER = ("docker ", "kind ")
MONITORING = [
    crd("monitoring.coreos.com", "v1", kind, f"{kind.lower()}s")
    for kind in ("ServiceMonitor", "PodMonitor", "PrometheusRule")
]


class Shell:
    """A checkout, and the kubeconfig of the cluster."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        for name in ("charts", "crds", "examples"):
            (folder / name).symlink_to(ROOT / name)
        self.folder = folder
        path = f"{Path(sys.executable).parent}:{cluster.plane.env['PATH']}"
        self.env = {**os.environ, **cluster.plane.env, "PATH": path}

    def run(self, line: str, stdin: str = "") -> str:
        """What it prints; it must succeed."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line], cwd=self.folder, env=self.env, input=stdin,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return re.sub(r" +$", "", done.stdout, flags=re.MULTILINE)

    def shows(self, command: Command) -> None:
        """It prints what the page has, after a while: pods start."""
        pattern, deadline = re.compile(alike(command.shown)), time.monotonic() + PATIENCE
        while not pattern.fullmatch(printed := self.run(command.line)):
            assert time.monotonic() < deadline, f"{command.line}\n{printed}"
            time.sleep(1)

    @contextlib.contextmanager
    def running(self, line: str) -> Iterator[Iterator[str]]:
        """A command that does not end by itself: its lines."""
        words = shlex.split(line, comments=True)
        with subprocess.Popen(
            words, cwd=self.folder, env=self.env, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            try:
                yield (f"{each.rstrip()}\n" for each in process.stdout)
            finally:
                process.kill()


@pytest.fixture
def shell(cluster: LocalCluster, tmp_path: Path) -> Iterator[Shell]:
    """The tests that follow find the cluster as it was, also after a failure."""
    shell = Shell(cluster, tmp_path)
    yield shell
    shell.run("kubectl delete etj,cpool --all --all-namespaces || true")
    shell.run("helm uninstall shoal --namespace shoal-system --ignore-not-found")
    shell.run("kubectl delete pvc --all")
    shell.run("kubectl delete --ignore-not-found -f -", yaml.safe_dump_all([*MONITORING, *KUEUE]))


@pytest.mark.nightly
@pytest.mark.timeout(3 * PATIENCE)
def test_installed_operated_and_removed(shell: Shell) -> None:
    install, apply, watch = [
        command.line
        for command in block("docs/kind.md", "docker build").commands
        if not command.line.startswith(WITH_DOCKER)
    ]
    shell.run(install)
    it_is_well(shell)
    parts_are_switched_on(shell)

    shell.run(apply)
    header, last = block("docs/kind.md", "NAME").text.splitlines(keepends=True)
    with shell.running(watch) as lines:
        assert next(lines).split() == header.split()
        ended = next(line for line in lines if " Succeeded " in line)
    assert re.fullmatch(alike(last), ended), ended

    a_file_is_trained(shell)
    a_job_waits_in_a_queue(shell, apply)
    everything_is_removed(shell)


def it_is_well(shell: Shell) -> None:
    [pods] = block("docs/install.md", "kubectl -n shoal-system get pods").commands
    shell.shows(pods)
    for command in block("docs/operating.md", "helm test").commands:
        shell.shows(command)
    for line, _ in block(
        "docs/runbooks.md", "kubectl -n shoal-system get pods -l app.kubernetes.io/name=shoal\n"
    ).commands:
        assert shell.run(line), line


def parts_are_switched_on(shell: Shell) -> None:
    """Each by its page's `helm upgrade`."""
    shell.run("kubectl apply -f -", yaml.safe_dump_all(MONITORING))
    [monitors] = block("docs/metrics.md", "helm upgrade").commands
    shell.run(monitors.line)
    for kind in ("servicemonitors", "podmonitors", "prometheusrules"):
        assert shell.run(f"kubectl -n shoal-system get {kind} -o name"), kind

    [sizing] = block("docs/pools.md", "helm upgrade").commands
    shell.run(sizing.line)
    get, logs = block(
        "docs/runbooks.md", "kubectl -n shoal-system get pods -l app.kubernetes.io/name=shoal-pools"
    ).commands
    shell.shows(Command(get.line, "NAME  READY  STATUS  RESTARTS  AGE\nshoal-pools-…  1/1  Running  0  1s\n"))
    shell.run(logs.line)  # it has nothing to say where all is well

    *with_docker, gpu = block("docs/install.md", "docker build").commands
    assert all(each.line.startswith(WITH_DOCKER) for each in with_docker)
    shell.run(gpu.line)

    upgrade, forward = block("docs/page.md", "helm upgrade").commands
    shell.run(upgrade.line)
    shell.run("kubectl -n shoal-system rollout status deploy/shoal --timeout 300s")
    with shell.running(forward.line) as lines:
        assert next(lines) == forward.shown
        with urllib.request.urlopen("http://localhost:8082", timeout=30) as answer:
            assert b"<title>Shoal" in answer.read()


def a_file_is_trained(shell: Shell) -> None:
    init, follow, explain, model = block("README.md", "shoal init").commands
    shell.run(init.line)
    assert "Succeeded" in shell.run(follow.line)
    assert "quickstart is Succeeded" in shell.run(explain.line)
    shell.run(model.line)
    assert (shell.folder / "model/model.keras").exists()


def a_job_waits_in_a_queue(shell: Shell, apply: str) -> None:
    """Kueue is played by its kinds: tests/control_plane/test_kueue.py has the real one."""
    shell.run("kubectl apply -f -", yaml.safe_dump_all(KUEUE))
    shell.run("kubectl delete etj digits")
    shell.run(apply)
    enable, *patches, workloads, explain = block("docs/sharing.md", "helm upgrade").commands
    shell.run(enable.line)
    shell.run("kubectl -n shoal-system rollout status deploy/shoal --timeout 300s")
    for each in patches:
        shell.run(each.line)
    shell.shows(Command(workloads.line, "NAME  AGE\ndigits…  1s\n"))
    assert "queue" in shell.run(explain.line)


def everything_is_removed(shell: Shell) -> None:
    for line, _ in block("docs/operating.md", "kubectl delete etj,cpool").commands:
        shell.run(line)
    assert shell.run("kubectl api-resources --api-group shoal.dev --no-headers") == ""


@pytest.mark.nightly
def test_a_cluster_of_ones_own(cluster: LocalCluster) -> None:
    """dev/README.md: beside the cluster of the other tests, as the page says."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    *commands, down = block("dev/README.md", "python -m dev up").commands
    try:
        for command in commands:
            done = subprocess.run(
                command.words, cwd=ROOT, env=env, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{command.line}\n{done.stdout}{done.stderr}"
    finally:
        subprocess.run(down.words, cwd=ROOT, env=env, check=True)
    [nodes] = re.findall(r"^local: control plane runs at \S+\n((?:  .*\n)*)", done.stdout, re.MULTILINE)
    assert re.search(r"^  spot-4  spot  \S+  runs$", nodes, re.MULTILINE)
    assert "spot-2" not in nodes, "it was killed"
    assert "KUBECONFIG=" in done.stdout
    assert not LocalCluster("local").folder.exists()
    assert cluster.plane.processes.running("kube-apiserver"), "the other cluster is left alone"
