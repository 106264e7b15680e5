"""Where the API server is and who asks: a kubeconfig, as kubectl reads it, or in a pod its service account.

The official client is imported when it is first used: what needs no cluster neither waits for it nor needs it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import Unavailable, UsageError

if TYPE_CHECKING:
    from kubernetes.client import Configuration

HOME = "~/.kube/config"


def configuration(kubeconfig: str | None, context: str | None) -> tuple[Configuration, str | None]:
    """The official client's configuration, and the namespace that goes with it, if there is one.

    Raises:
        Unavailable: there is neither a kubeconfig nor a service account, no such context, or the login fails.
        UsageError: the packages for it are not installed.
    """
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise UsageError(
            f"a cluster needs more packages ({error}): pip install '.[client]' in a checkout of Shoal"
        ) from error
    made = client.Configuration()
    files = kubeconfig or os.environ.get("KUBECONFIG") or HOME
    there = any(Path(each).expanduser().exists() for each in files.split(os.pathsep) if each)
    if not there and kubeconfig is None and context is None and (namespace := _in_a_pod(made)):
        return made, namespace
    try:
        if not there:
            raise FileNotFoundError(f"there is no {files}")
        with _logged() as words:
            config.load_kube_config(config_file=files, context=context, client_configuration=made)
    except Exception as error:  # each way to log in raises its own classes
        known = [each["name"] for each in _contexts(files)[0]]
        if context and known and context not in known:
            raise Unavailable(
                f"the kubeconfig has no context {context!r}: it has {', '.join(known)}"
            ) from error
        raise Unavailable(
            f"no cluster to talk to ({short(error).rstrip('.')}). Make `kubectl get nodes` work, or set "
            "KUBECONFIG."
        ) from error
    if words and not (made.api_key or made.cert_file or made.username):
        raise Unavailable(
            f"the kubeconfig's credentials cannot be had: {words[0]}. Log in, so that `kubectl get nodes` works."
        )
    return made, _namespace(files, context)


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


def _namespace(files: str, context: str | None) -> str | None:
    """The namespace of the kubeconfig's context."""
    contexts, active = _contexts(files)
    chosen = next((each for each in contexts if each["name"] == context), None) if context else active
    return ((chosen or {}).get("context") or {}).get("namespace")


def _contexts(files: str) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The contexts of the kubeconfig, and the current one; none where it cannot be read."""
    import yaml
    from kubernetes import config

    try:
        contexts, active = config.list_kube_config_contexts(config_file=files)
    except (config.ConfigException, OSError, TypeError, yaml.YAMLError):
        return [], None
    return contexts, active
