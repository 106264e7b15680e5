"""What goes wrong with `shoal` in the first hour: one line that says what to do, and the exit code of docs/cli.md.

A real API server answers; what differs is the kubeconfig, the account, and what there is on the cluster.
"""

from __future__ import annotations

import base64
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from click.testing import CliRunner

from dev.cluster import ControlPlane
from dev.kube import Json, Kube
from dev.paths import ROOT
from shoal.cli import main
from tests.unit.docs.pages import block

Fails = Callable[..., str]
Change = Callable[[Json], Any]


def invoke(words: list[str]) -> tuple[int, str]:
    result = CliRunner().invoke(main, words, env={"COLUMNS": None})  # pytest-xdist sets it
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def fails(control_plane: ControlPlane, crds: None, tmp_path: Path) -> Fails:
    """Run a command with the kubeconfig of the cluster, changed; returns the one line that it prints."""

    def run(code: int, *words: str, change: Change = lambda _: None) -> str:
        kubeconfig = yaml.safe_load(control_plane.kubeconfig.read_text())
        change(kubeconfig)
        path = tmp_path / "kubeconfig"
        path.write_text(yaml.safe_dump(kubeconfig))
        exit_code, output = invoke([words[0], "--kubeconfig", str(path), *words[1:]])
        assert exit_code == code, output
        [line] = [each for each in output.splitlines() if each]
        return line

    return run


def user(**credentials: Any) -> Change:
    """A kubeconfig with other credentials."""
    return lambda kubeconfig: kubeconfig["users"][0].update(user=credentials)


def server(url: str) -> Change:
    return lambda kubeconfig: kubeconfig["clusters"][0]["cluster"].update(server=url)


def plugin(command: str, *arguments: str) -> Change:
    return user(
        exec={
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": command,
            "args": list(arguments),
            "interactiveMode": "Never",
        }
    )


# --- no cluster ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, "", "a: [b\n", "clusters: []\n"])
def test_a_kubeconfig_that_is_none(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_text(content)
    code, said = invoke(["list", "--kubeconfig", str(path)])
    assert code == 4
    assert said.startswith("Error: no cluster to talk to (")
    assert said.endswith("Make `kubectl get nodes` work, or set KUBECONFIG.\n")
    assert len(said.splitlines()) == 1


def test_a_context_that_is_not_there(fails: Fails) -> None:
    said = fails(4, "list", "--context", "nowhere")
    assert re.fullmatch(r"Error: the kubeconfig has no context 'nowhere': it has [-\w]+", said), said


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "https://nowhere.invalid:6443"])
def test_nobody_answers(fails: Fails, url: str) -> None:
    said = fails(4, "list", change=server(url))
    assert said.startswith("Error: the API server does not answer: ")
    assert "Does `kubectl get nodes` work?" in said


# --- no rights -------------------------------------------------------------------------------------------------------


def test_a_login_that_has_expired(fails: Fails) -> None:
    assert fails(2, "list", change=user(token="expired")) == (
        "Error: the API server does not know you (Unauthorized): log in, so that `kubectl get nodes` works"
    )


@pytest.mark.parametrize("command", [("no-such-plugin",), ("sh", "-c", "echo please log in >&2; exit 1")])
def test_a_login_program_that_is_missing_or_fails(fails: Fails, command: tuple[str, ...]) -> None:
    said = fails(4, "list", change=plugin(*command))
    assert said.startswith("Error: the kubeconfig's credentials cannot be had: ")
    assert command[0] in said or "please log in" in said
    assert "Log in" in said


async def test_an_account_without_a_role(fails: Fails, kube: Kube, namespace: str) -> None:
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    await kube.create(accounts, {"metadata": {"name": "nobody"}})
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = (await kube.create(f"{accounts}/nobody/token", request))["status"]["token"]
    for words in (["list"], ["status", "digits"], ["scale", "digits", "2"]):
        said = fails(2, *words, "-n", namespace, change=user(token=token))
        assert f'User "system:serviceaccount:{namespace}:nobody" cannot' in said
        assert "A namespace's role edit includes its jobs" in said


async def test_in_a_pod_it_is_the_service_account_that_asks(
    control_plane: ControlPlane, kube: Kube, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what the kubelet gives to a pod, and no kubeconfig: the real API server knows who that is."""
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    await kube.create(accounts, {"metadata": {"name": "notebook"}})
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = (await kube.create(f"{accounts}/notebook/token", request))["status"]["token"]
    [cluster] = yaml.safe_load(control_plane.kubeconfig.read_text())["clusters"]
    authority = base64.b64decode(cluster["cluster"]["certificate-authority-data"]).decode()
    for name, text in {"token": token, "ca.crt": authority, "namespace": namespace}.items():
        (tmp_path / name).write_text(text)
    address = urlsplit(cluster["cluster"]["server"])
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", str(address.hostname))
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(address.port))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setattr("kubernetes.config.incluster_config.SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr("kubernetes.config.incluster_config.SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    code, said = invoke(["list"])
    assert code == 2, said
    assert f'User "system:serviceaccount:{namespace}:notebook" cannot list' in said
    assert f'in the namespace "{namespace}"' in said


# --- no Shoal --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["list"], ["top", "--once"], ["status", "digits"]])
def test_a_cluster_without_the_crds(fails: Fails, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    absent = "not-installed.dev/v1alpha1"  # the real server's answer about a group that it does not have
    monkeypatch.setattr("shoal.client.api.API_VERSION", absent)
    monkeypatch.setattr("shoal.client.client.API_VERSION", absent)
    monkeypatch.setattr("shoal.client.job.API_VERSION", absent)
    monkeypatch.setattr("shoal.client.client.JOBS", f"/apis/{absent}/namespaces/{{namespace}}/trainingjobs")
    said = fails(2, *words)
    assert said.startswith("Error: Shoal is not installed on this cluster")
    assert "docs/install.md" in said


async def test_no_operator(
    control_plane: ControlPlane, crds: None, fails: Fails, namespace: str, tmp_path: Path
) -> None:
    (tmp_path / "digits.py").write_text("job = None\n")
    here = ["-n", namespace]
    options = [*here, "--kubeconfig", str(control_plane.kubeconfig)]
    code, _ = invoke(
        ["submit", f"{tmp_path}/digits.py:job", "--storage", "ephemeral", "--name", "digits", *options]
    )
    assert code == 0
    unseen = "no operator has looked at it yet: shoal doctor says whether one runs"
    for command in (["list"], ["top", "--once"], ["status", "digits"]):
        code, said = invoke([command[0], *options, *command[1:]])
        assert (code, unseen in said) == (0, True), said
    code, said = invoke(["explain", *options, "digits"])
    assert (code, "no operator has looked at this job" in said) == (0, True), said
    begin = time.monotonic()
    assert unseen in fails(1, "wait", *here, "digits", "--timeout", "1")
    assert time.monotonic() - begin < 30, "not the time-out of the watch"
    assert unseen in fails(2, "logs", *here, "digits")
    assert (
        fails(1, "model", *here, "digits", str(tmp_path / "m"))
        == "Error: digits has no model: it is not started."
    )


# --- no such thing ---------------------------------------------------------------------------------------------------


async def test_a_job_that_the_cluster_cannot_take(fails: Fails, namespace: str, tmp_path: Path) -> None:
    script = tmp_path / "digits.py"
    script.write_text("from numpy import array\nif array:\n    job = [local for local in ()]\n")
    to = ["-n", namespace, "--storage"]
    for words in (["submit", f"{script}:job", "--storage", "claim:runs"], ["list"], ["status", "digits"]):
        assert fails(2, *words, "-n", "nowhere") == (
            'Error: namespaces "nowhere" not found: another is chosen with -n, and `kubectl get namespaces` lists them'
        )
    assert "no PersistentVolumeClaim 'runs': it has none. Create it" in fails(
        2, "submit", f"{script}:job", *to, "claim:runs"
    )
    assert "the cluster has no CapacityPool nosuch: there " in fails(
        2, "submit", f"{script}:job", *to, "ephemeral", "--pool", "nosuch"
    )
    assert "must be s3://BUCKET/FOLDER" in fails(2, "submit", f"{script}:job", *to, "s3:bucket")
    assert "cannot read" in fails(2, "submit", f"{tmp_path}/other.py:job", *to, "ephemeral")
    assert "did you mean job?" in fails(2, "submit", f"{script}:jobb", *to, "ephemeral")
    assert "it has array, job" in fails(2, "submit", f"{script}:training", *to, "ephemeral")
    script.write_text("job = (\n")
    assert "digits.py, line 1: '(' was never closed" in fails(2, "submit", f"{script}:job", *to, "ephemeral")


async def test_a_name_that_is_taken(
    control_plane: ControlPlane, fails: Fails, namespace: str, tmp_path: Path
) -> None:
    (tmp_path / "digits.py").write_text("job = None\n")
    words = [f"{tmp_path}/digits.py:job", "--storage", "ephemeral", "--name", "digits", "-n", namespace]
    assert invoke(["submit", "--kubeconfig", str(control_plane.kubeconfig), *words])[0] == 0
    assert fails(2, "submit", *words).endswith("already exists: choose another name, or delete it first")


async def test_the_page_shows_what_is_said(
    fails: Fails, kube: Kube, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT / "examples/digits")
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
    await kube.create(path, {"metadata": {"name": "digits-runs"}, "spec": claim})
    changes: dict[str, Change] = {"submit": lambda _: None, "list": user(token="expired")}
    for line, shown in block("docs/cli.md", "shoal submit digits.py:job --storage claim:runs").commands:
        _, name, *words = shlex.split(line)
        said = fails(2, name, "-n", namespace, *words, change=changes.pop(name))
        assert f"{said}\n".replace(namespace, "default") == shown
    assert not changes
