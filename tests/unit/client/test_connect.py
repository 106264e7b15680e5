"""Which cluster the client talks to: that of a kubeconfig, as kubectl does, or the one that its own pod runs in."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from shoal.client.api import Api
from shoal.errors import Forbidden, Unavailable, UsageError

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


def kubeconfig(file: Path, name: str, **more: object) -> str:
    """A kubeconfig with one context of this name, which is the current one unless it is said otherwise."""
    said: dict[str, object] = {
        "clusters": [{"name": name, "cluster": {"server": f"https://{name}:6443"}}],
        "users": [{"name": name, "user": {"token": name}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": f"{name}-ns"}}],
        "current-context": name,
        **more,
    }
    file.write_text(yaml.safe_dump(said))
    return str(file)


@pytest.mark.parametrize("last", ["production", "no current context", "nothing", "missing"])
def test_of_several_kubeconfigs_the_first_current_context_counts(
    home: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """As kubectl; the official client takes the last one's."""
    first = kubeconfig(home / "a", "staging")
    second = kubeconfig(home / "b", "production", **({} if last == "production" else {"current-context": ""}))
    if last == "nothing":
        (home / "b").write_text("")
    elif last == "missing":
        (home / "b").unlink()
    monkeypatch.setenv("KUBECONFIG", f"{first}:{second}")
    assert connected(Api.connect()) == ("https://staging:6443", "Bearer staging", "staging-ns")
    if last == "production":
        chosen = Api.connect(context="production")
        assert connected(chosen) == ("https://production:6443", "Bearer production", "production-ns")
    with pytest.raises(Unavailable, match=r"no context 'other': it has staging"):
        Api.connect(context="other")


def test_a_user_asks_as_another_where_the_kubeconfig_says_so(home: Path) -> None:
    user = {
        "token": "t",
        "as": "nobody",
        "as-groups": ["few"],
        "as-user-extra": {"acme.com/reason": ["a test"]},
    }
    file = kubeconfig(home / "a", "x", users=[{"name": "x", "user": user}])
    api = Api.connect(kubeconfig=file)
    sent = {k: v for k, v in api._api.default_headers.items() if k.startswith("Impersonate-")}
    assert sent == {
        "Impersonate-User": "nobody",
        "Impersonate-Group": "few",
        "Impersonate-Extra-acme.com%2Freason": "a test",
    }
    with pytest.raises(Forbidden, match="in the pod p as another user"):
        list(api.run("/api/v1/namespaces/team/pods/p", ["cat"]))
    several = kubeconfig(
        home / "b", "x", users=[{"name": "x", "user": {**user, "as-groups": ["few", "more"]}}]
    )
    with pytest.raises(UsageError, match="several groups"):
        Api.connect(kubeconfig=several)
