"""Requests to the API server with the kubeconfig of kubectl, as JSON in and out; errors that say what to do.

The official client is imported when it is first used: what needs no cluster neither waits for it nor needs it.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from shoal import __version__
from shoal.api.base import API_VERSION, Resource
from shoal.api.mistakes import mistakes
from shoal.errors import ClusterError, Forbidden, NotFound, Refused, Unavailable, UsageError

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

Json = dict[str, Any]
Kind = TypeVar("Kind", bound=Resource)
PAGE = 500
"""Objects in one answer of the API server, as kubectl asks."""
APPLY_JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"


class Api:
    """One API server and a namespace that is the default."""

    def __init__(self, api: ApiClient, namespace: str) -> None:
        self._api = api
        self.namespace = namespace

    @classmethod
    def connect(
        cls, kubeconfig: str | None = None, context: str | None = None, namespace: str | None = None
    ) -> Api:
        """Connect as kubectl does: KUBECONFIG or ~/.kube/config, or in a pod with its service account.

        Raises:
            Unavailable: neither is there, the context does not exist, or the login fails.
            UsageError: the packages for it are not installed.
        """
        try:
            import yaml
            from kubernetes import client, config
        except ImportError as error:
            raise UsageError(
                f"a cluster needs more packages ({error}): pip install '.[client]' in a checkout of Shoal"
            ) from error
        configuration = client.Configuration()
        try:
            with _logged() as words:
                config.load_config(
                    config_file=kubeconfig, context=context, client_configuration=configuration
                )
        except (config.ConfigException, OSError, TypeError, yaml.YAMLError) as error:
            known = [each["name"] for each in _contexts(kubeconfig)[0]]
            if context and known and context not in known:
                raise Unavailable(
                    f"the kubeconfig has no context {context!r}: it has {', '.join(known)}"
                ) from error
            raise Unavailable(
                f"no cluster to talk to ({_short(error).rstrip('.')}). Make `kubectl get nodes` work, or set "
                "KUBECONFIG."
            ) from error
        if words and not (configuration.api_key or configuration.cert_file or configuration.username):
            raise Unavailable(
                f"the kubeconfig's credentials cannot be had: {words[0]}. Log in, so that `kubectl get nodes` works."
            )
        configuration.retries = False
        found = namespace or _namespace(kubeconfig, context) or "default"
        return cls(client.ApiClient(configuration), found)

    def get(self, path: str, **query: str) -> Json:
        """GET one object or a list. Raises NotFound."""
        return self._json("GET", path, query=query)

    def list(self, path: str, **query: str) -> list[Json]:
        """The items of a list, asked in pages."""
        found: list[Json] = []
        more = {"limit": str(PAGE)}
        while more:
            page = self.get(path, **query, **more)
            found += page.get("items") or []
            go_on = (page.get("metadata") or {}).get("continue")
            more = {"limit": str(PAGE), "continue": go_on} if go_on else {}
        return found

    def create(self, path: str, body: Json, *, dry_run: bool = False) -> Json:
        """POST an object; unknown fields are refused. Raises Refused with the server's words."""
        query = {"fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        return self._json("POST", path, query=query, body=body)

    def patch(self, path: str, body: Json) -> Json:
        """Merge a patch into an object."""
        return self._json(
            "PATCH", path, query={"fieldValidation": "Strict"}, body=body, content_type=MERGE_PATCH
        )

    def delete(self, path: str) -> None:
        """DELETE an object; its dependents follow in the background."""
        self._json("DELETE", path, query={"propagationPolicy": "Background"})

    def may(self, verb: str, group: str, resource: str, *, namespace: str | None = None) -> bool:
        """Whether this user may do so, by the API server's own answer."""
        name, _, subresource = resource.partition("/")
        attributes = {"verb": verb, "group": group, "resource": name, "subresource": subresource}
        review = {
            "spec": {"resourceAttributes": attributes | ({"namespace": namespace} if namespace else {})}
        }
        answer = self._json("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body={
            "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", **review})  # fmt: skip
        return bool(answer["status"]["allowed"])

    def lines(self, path: str, query: Mapping[str, str], *, seconds: float | None = None) -> Iterator[str]:
        """The lines of a log or a watch as they come. `seconds`: without a line for so long, the stream ends."""
        import urllib3

        response = self._send("GET", path, query, None, APPLY_JSON, timeout=(10.0, seconds)).response
        pending = b""
        try:
            for chunk in response.stream(4096):
                *whole, pending = (pending + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in whole)
        except urllib3.exceptions.ReadTimeoutError:
            return
        except urllib3.exceptions.HTTPError as error:
            raise Unavailable(f"the stream of {path} broke: {error}") from error
        finally:
            response.close()
        if pending:
            yield pending.decode(errors="replace")

    def _json(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Any = None,
        content_type: str = APPLY_JSON,
    ) -> Json:  # fmt: skip
        answer = self._send(method, path, query or {}, body, content_type, timeout=30.0)
        return dict(json.loads(answer.read() or b"{}"))

    def _send(
        self, method: str, path: str, query: Mapping[str, str], body: Any, content_type: str, timeout: Any
    ) -> Any:
        import urllib3
        from kubernetes.client.exceptions import ApiException

        serialized = self._api.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params={
                "Content-Type": content_type,
                "Accept": "application/json, */*",
                "Accept-Encoding": "gzip",  # lists of many jobs repeat themselves
            },
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            answer = self._api.call_api(*serialized, _request_timeout=timeout)
        except (urllib3.exceptions.HTTPError, OSError, ApiException) as error:
            raise Unavailable(
                f"the API server does not answer: {_short(error)}. Does `kubectl get nodes` work? --context and "
                "KUBECONFIG choose another cluster."
            ) from error
        if answer.status >= 300:
            raise refusal(answer.status, bytes(answer.read()), path)
        return answer


def read_as(kind: type[Kind], manifest: Json) -> Kind:
    """An object of the API server, which may be newer than this program: fields that it does not know are left out.

    Raises:
        UsageError: a field that it knows has a value that it does not.
    """
    try:
        return kind.model_validate(manifest, extra="ignore")
    except ValidationError as error:
        found = "; ".join(mistakes(error, kind))
        name = manifest.get("metadata", {}).get("name", "")
        raise UsageError(
            f"shoal {__version__} cannot read {kind.PLURAL} {name}: {found}. Is the cluster's Shoal newer? "
            "Upgrade this one"
        ) from error


def refusal(status: int, body: bytes, path: str) -> ClusterError:
    """The error for an answer of the API server, with its words."""
    try:
        words = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        words = " ".join(body[:300].decode(errors="replace").split()) or f"HTTP {status}"
    if status == 404:
        # The API server has no object of this name, or, in one of these ways, no such kind.
        unknown = "could not find the requested resource" in words or words == "404 page not found"
        if unknown and path.startswith(f"/apis/{API_VERSION}/"):
            return NotFound(
                "Shoal is not installed on this cluster, which knows no TrainingJobs: see docs/install.md, or "
                "choose another cluster with --context"
            )
        if words.startswith("namespaces "):
            words += ": another is chosen with -n, and `kubectl get namespaces` lists them"
        return NotFound(words)
    if status == 409 and words.endswith("already exists"):
        return Refused(f"{words}: choose another name, or delete it first")
    if status in {400, 409, 422}:
        return Refused(words)
    if status == 401:
        return Forbidden(
            f"the API server does not know you ({words}): log in, so that `kubectl get nodes` works"
        )
    if status == 403:
        return Forbidden(
            f"{words}. A namespace's role edit includes its jobs; `kubectl auth whoami` shows who you are"
        )
    return Unavailable(f"the API server answered {status}: {words}")


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


def _namespace(kubeconfig: str | None, context: str | None) -> str | None:
    """The namespace of the kubeconfig's context."""
    contexts, active = _contexts(kubeconfig)
    chosen = next((each for each in contexts if each["name"] == context), None) if context else active
    return ((chosen or {}).get("context") or {}).get("namespace")


def _contexts(kubeconfig: str | None) -> tuple[list[Json], Json | None]:
    """The contexts of the kubeconfig, and the current one; none where it cannot be read."""
    import yaml
    from kubernetes import config

    try:
        contexts, active = config.list_kube_config_contexts(config_file=kubeconfig)
    except (config.ConfigException, OSError, TypeError, yaml.YAMLError):
        return [], None
    return contexts, active


def _short(error: BaseException) -> str:
    reason = getattr(error, "reason", None)
    return " ".join(str(reason or error).split())[:300]
