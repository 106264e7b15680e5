"""Where the API server is and who asks: a kubeconfig, as kubectl reads it, or in a pod its service account.

The official client is imported when it is first used: what needs no cluster neither waits for it nor needs it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from shoal.errors import Unavailable, UsageError

if TYPE_CHECKING:
    from kubernetes.client import Configuration

HOME = "~/.kube/config"
Json = dict[str, Any]


@dataclass(frozen=True)
class Login:
    """How to talk to a cluster."""

    configuration: Configuration
    """The official client's."""
    namespace: str | None
    """That of the context or of the pod, if there is one."""
    headers: dict[str, str] = field(default_factory=dict)
    """Of each request: as whom the user asks (`as` in the kubeconfig)."""


def login(kubeconfig: str | None, context: str | None) -> Login:
    """The cluster of a kubeconfig's context, or that of the pod where there is no kubeconfig.

    Raises:
        Unavailable: there is neither a kubeconfig nor a service account, no such context, or the login fails.
        UsageError: the packages for it are not installed, or the context asks as several groups.
    """
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise UsageError(
            f"a cluster needs more packages ({error}): pip install '.[client]' in a checkout of Shoal"
        ) from error
    made = client.Configuration()
    given = kubeconfig or os.environ.get("KUBECONFIG") or HOME
    files = [each for each in given.split(os.pathsep) if each and Path(each).expanduser().exists()]
    if not files and kubeconfig is None and context is None and (namespace := _in_a_pod(made)):
        return Login(made, namespace)
    found = _read(files)
    context = context or found.current
    try:
        if not files:
            raise FileNotFoundError(f"there is no {given}")
        with _logged() as words:
            config.load_kube_config(
                config_file=os.pathsep.join(found.files), context=context, client_configuration=made
            )
    except Exception as error:  # each way to log in raises its own classes
        if context and found.contexts and context not in found.contexts:
            raise Unavailable(
                f"the kubeconfig has no context {context!r}: it has {', '.join(found.contexts)}"
            ) from error
        raise Unavailable(
            f"no cluster to talk to ({short(error).rstrip('.')}). Make `kubectl get nodes` work, or set "
            "KUBECONFIG."
        ) from error
    if words and not (made.api_key or made.cert_file or made.username):
        raise Unavailable(
            f"the kubeconfig's credentials cannot be had: {words[0]}. Log in, so that `kubectl get nodes` works."
        )
    chosen = found.contexts.get(context or "", {})
    return Login(made, chosen.get("namespace"), _impersonation(found.users.get(chosen.get("user", ""), {})))


@dataclass(frozen=True)
class _Kubeconfig:
    """What a kubeconfig of several files says, of those that can be read. As in kubectl, the first that says it counts.

    For the official client the last one's current context counts, and an empty file is an error.
    """

    files: list[str]
    contexts: dict[str, Json]
    users: dict[str, Json]
    current: str | None


def _read(files: Sequence[str]) -> _Kubeconfig:
    import yaml

    found = _Kubeconfig([], {}, {}, None)
    current = None
    for each in files:
        try:
            said = yaml.safe_load(Path(each).expanduser().read_text(encoding="utf-8"))
            if said is not None:
                for kind, all_of_them in (("context", found.contexts), ("user", found.users)):
                    for one in said.get(f"{kind}s") or ():
                        all_of_them.setdefault(one["name"], one.get(kind) or {})
                current = current or said.get("current-context")
        except (OSError, UnicodeError, AttributeError, TypeError, KeyError, yaml.YAMLError):
            said = each  # the official client says what is wrong
        if said is not None:
            found.files.append(each)
    return replace(found, current=current)


def _impersonation(user: Json) -> dict[str, str]:
    """The headers by which the API server knows as whom a user asks. Raises UsageError for several groups."""
    groups = user.get("as-groups") or []
    extra = {key: values for key, values in (user.get("as-user-extra") or {}).items() if values}
    if len(groups) > 1 or any(len(values) > 1 for values in extra.values()):
        raise UsageError(
            "the kubeconfig's user asks as several groups (as-groups, as-user-extra), which shoal cannot: choose a "
            "context with one at most"
        )
    headers = {"User": user.get("as"), "Uid": user.get("as-uid"), "Group": next(iter(groups), None)}
    headers |= {f"Extra-{quote(key, safe='')}": values[0] for key, values in extra.items()}
    return {f"Impersonate-{name}": value for name, value in headers.items() if value}


def short(error: BaseException) -> str:
    """What an error says, in one line."""
    reason = getattr(error, "reason", None)
    return " ".join(str(reason or error).split())[:300]


def _in_a_pod(made: Configuration) -> str | None:
    """The namespace of the pod that this process runs in, whose service account `made` now has; None outside."""
    from kubernetes.config import ConfigException, incluster_config

    try:
        incluster_config.load_incluster_config(client_configuration=made)
    except ConfigException:
        return None
    folder = Path(incluster_config.SERVICE_TOKEN_FILENAME).parent
    with contextlib.suppress(OSError):
        return (folder / "namespace").read_text(encoding="utf-8").strip() or "default"
    return "default"


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """What the official client logs, in one line each. A credential plugin that fails is logged, not raised."""
    words: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: words.append(" ".join(record.getMessage().split())[:300])  # type: ignore[method-assign]
    logger = logging.getLogger()
    logger.addHandler(handler)
    try:
        yield words
    finally:
        logger.removeHandler(handler)
