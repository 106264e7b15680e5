"""Which cluster the client talks to: that of a kubeconfig, as kubectl does, or the one that its own pod runs in."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from shoal.client.api import Api
from shoal.errors import Unavailable

KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [{"name": "c", "cluster": {"server": "https://from-a-file:6443"}}],
    "users": [{"name": "u", "user": {"token": "t"}}],
    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "of-the-context"}}],
    "current-context": "x",
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without a kubeconfig, outside any pod."""
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the kubelet gives to a pod: two variables, and the folder of its service account."""
    folder = tmp_path / "serviceaccount"
    folder.mkdir()
    for name, text in {"token": "of-the-pod", "ca.crt": "CA", "namespace": "notebooks\n"}.items():
        (folder / name).write_text(text)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setattr("kubernetes.config.incluster_config.SERVICE_TOKEN_FILENAME", str(folder / "token"))
    monkeypatch.setattr("kubernetes.config.incluster_config.SERVICE_CERT_FILENAME", str(folder / "ca.crt"))
    monkeypatch.setattr("kubernetes.client.ApiClient", Recorded)  # "CA" is no certificate
    return folder


class Recorded:
    """An ApiClient that is never called."""

    def __init__(self, configuration: object) -> None:
        self.configuration = configuration


def connected(api: Api) -> tuple[str, str, str]:
    configuration = api._api.configuration
    credentials = configuration.auth_settings()["BearerToken"]["value"]
    return configuration.host, credentials, api.namespace


@pytest.mark.parametrize("named", [False, True])
def test_a_pod_uses_its_service_account(pod: Path, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    if named:  # as kubectl: a list of files of which there is none
        monkeypatch.setenv("KUBECONFIG", f"{pod}/nowhere:{pod}/neither")
    assert connected(Api.connect()) == ("https://10.0.0.1:443", "bearer of-the-pod", "notebooks")
    assert Api.connect(namespace="team").namespace == "team"


def test_a_kubeconfig_comes_before_the_service_account(pod: Path, home: Path) -> None:
    del pod
    (home / ".kube").mkdir()
    (home / ".kube" / "config").write_text(yaml.safe_dump(KUBECONFIG))
    assert connected(Api.connect()) == ("https://from-a-file:6443", "Bearer t", "of-the-context")


def test_what_is_asked_for_is_not_replaced_by_the_service_account(pod: Path) -> None:
    with pytest.raises(Unavailable, match="no cluster to talk to"):
        Api.connect(context="x")
    with pytest.raises(Unavailable, match=f"no cluster to talk to .*{pod}/nowhere"):
        Api.connect(kubeconfig=f"{pod}/nowhere")


def test_a_login_that_has_expired_is_no_traceback(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The official client lets through what Google's library, or one of OpenID, raises."""

    def refused(**_: object) -> None:
        raise RuntimeError("Your default credentials were not found.\nSee https://cloud.google.com")

    monkeypatch.setattr("google.auth.default", refused)
    user = {"name": "u", "user": {"auth-provider": {"name": "gcp", "config": {}}}}
    (home / "old").write_text(yaml.safe_dump({**KUBECONFIG, "users": [user]}))
    words = r"no cluster to talk to \(Your default credentials were not found. See .*Make `kubectl get nodes` work"
    with pytest.raises(Unavailable, match=words):
        Api.connect(kubeconfig=str(home / "old"))


def test_a_kubeconfig_that_is_missing_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match=r"there is no ~/.kube/config"):
        Api.connect()
    monkeypatch.setenv("KUBECONFIG", f"{home}/nowhere")
    with pytest.raises(Unavailable, match=f"there is no {home}/nowhere"):
        Api.connect()
