"""Requests to the API server with the kubeconfig of kubectl, as JSON in and out; errors that say what to do.

The official client is imported when it is first used: what needs no cluster neither waits for it nor needs it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from shoal import __version__
from shoal.api.base import API_VERSION, GROUP, Resource
from shoal.api.capacity_pool import CapacityPool
from shoal.api.mistakes import mistakes
from shoal.client.connect import login, short
from shoal.errors import ClusterError, Forbidden, NotFound, Refused, Unavailable, UsageError

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

log = logging.getLogger(__name__)

Json = dict[str, Any]
Kind = TypeVar("Kind", bound=Resource)
PAGE = 500
"""Objects in one answer of the API server, as kubectl asks."""
EXEC_SECONDS = 60.0
"""A command in a pod that writes nothing for so long is given up."""
STDOUT, STDERR, ERROR = 1, 2, 3
"""Channels of a command in a pod."""
APPLY_JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
MOST_TRIES, LONGEST_WAIT = 4, 5.0
"""A request that an API server with too much to do sends away, so often, after at most so many seconds each time."""


class Api:
    """One API server and a namespace that is the default."""

    _ahead = timedelta()
    """By how much its clock is ahead of this machine's."""

    def __init__(
        self, api: ApiClient, namespace: str, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._api = api
        self.namespace = namespace
        self._sleep = sleep

    def now(self) -> datetime:
        """The time by the cluster's clock, as its last answer told it: a laptop's may be minutes off."""
        return datetime.now(UTC) + self._ahead

    @classmethod
    def connect(
        cls, kubeconfig: str | None = None, context: str | None = None, namespace: str | None = None
    ) -> Api:
        """Connect as kubectl does: KUBECONFIG or ~/.kube/config, or in a pod with its service account.

        Raises:
            Unavailable: neither is there, the context does not exist, or the login fails.
            UsageError: the packages for it are not installed.
        """
        found = login(kubeconfig, context)
        from kubernetes import client

        found.configuration.retries = False
        api = client.ApiClient(found.configuration)
        for name, value in found.headers.items():
            api.set_default_header(name, value)
        return cls(api, namespace or found.namespace or "default")

    def get(self, path: str, **query: str) -> Json:
        """GET one object or a list. Raises NotFound."""
        return self._json("GET", path, query=query)

    def list(self, path: str, **query: str) -> list[Json]:
        """The items of a list, asked in pages. `resourceVersion="0"`: from the API server's memory, which is cheap."""
        found: list[Json] = []
        page = self.get(path, **query, limit=str(PAGE))
        query.pop("resourceVersion", None)  # that of the pages that follow is in `continue`
        while True:
            found += page.get("items") or []
            go_on = (page.get("metadata") or {}).get("continue")
            if not go_on:
                return found
            page = self.get(path, **query, limit=str(PAGE), **{"continue": go_on})

    def create(self, path: str, body: Json, *, dry_run: bool = False) -> Json:
        """POST an object; unknown fields are refused. Raises Refused with the server's words."""
        query = {"fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        return self._json("POST", path, query=query, body=body)

    def patch(self, path: str, body: Json) -> Json:
        """Merge a patch into an object."""
        return self._json(
            "PATCH", path, query={"fieldValidation": "Strict"}, body=body, content_type=MERGE_PATCH
        )

    def delete(self, path: str, uid: str | None = None) -> None:
        """DELETE an object, `uid`: only if it is this one; its dependents follow in the background."""
        body = {"preconditions": {"uid": uid}} if uid is not None else None
        self._json("DELETE", path, query={"propagationPolicy": "Background"}, body=body)

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

    def run(self, pod: str, command: Sequence[str]) -> Iterator[bytes]:
        """What a command in the pod of this path writes, as it comes.

        Raises:
            Forbidden: this user may not run anything there, or asks as another one (`as` in the kubeconfig), which the
                official client does not tell to a WebSocket.
            Unavailable: the command fails, or the connection breaks.
        """
        if any(name.startswith("Impersonate-") for name in self._api.default_headers):
            raise Forbidden(
                f"nothing can be run in the pod {pod.rpartition('/')[2]} as another user: choose a context without `as`"
            )
        from kubernetes import client, stream
        from kubernetes.client.exceptions import ApiException
        from websocket import ABNF, WebSocketException

        namespace, name = pod.split("/")[-3::2]
        wanted = {"command": list(command), "stdout": True, "stderr": True, "binary": True}
        said: dict[int, bytes] = {}
        try:
            socket = stream.stream(
                client.CoreV1Api(self._api).connect_get_namespaced_pod_exec,
                name, namespace, **wanted, _preload_content=False,
            ).sock  # fmt: skip
            with contextlib.closing(socket):
                socket.settimeout(EXEC_SECONDS)
                while True:  # WSClient's own loop would add up all that is there, in quadratic time
                    kind, frame = socket.recv_data_frame(True)
                    if kind == ABNF.OPCODE_CLOSE:
                        break
                    channel, chunk = (frame.data[0], frame.data[1:]) if frame.data else (0, b"")
                    if channel == STDOUT:
                        yield chunk
                    else:
                        said[channel] = said.get(channel, b"") + chunk
        except ApiException as error:
            if "Handshake status 403" in str(error.reason):
                raise Forbidden(
                    f"you may not run {command[0]} in the pod {name}: it needs the right pods/exec"
                ) from error
            raise Unavailable(
                f"nothing can be run in the pod {name}: {short(error).partition(' -+-+- ')[0]}"
            ) from error
        except (WebSocketException, OSError) as error:
            raise Unavailable(f"the connection to the pod {name} broke: {short(error)}") from error
        if json.loads(said.get(ERROR, b"{}") or b"{}").get("status") != "Success":
            words = " ".join(said.get(STDERR, said.get(ERROR, b"")).decode(errors="replace").split())
            raise Unavailable(f"{' '.join(command)} failed in the pod {name}: {words}")

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
        for tries in range(MOST_TRIES):
            try:
                answer = self._api.call_api(*serialized, _request_timeout=timeout)
            except (urllib3.exceptions.HTTPError, OSError, ApiException) as error:
                raise Unavailable(
                    f"the API server does not answer: {short(error)}. Does `kubectl get nodes` work? --context and "
                    "KUBECONFIG choose another cluster."
                ) from error
            headers = answer.response.headers
            if (date := headers.get("Date")) is not None:
                with contextlib.suppress(ValueError):
                    there = parsedate_to_datetime(date)  # without a zone where that is "-0000", or not said
                    self._ahead = (there if there.tzinfo else there.replace(tzinfo=UTC)) - datetime.now(UTC)
            if answer.status != 429 or tries == MOST_TRIES - 1:
                break
            answer.read()
            asked = headers.get("Retry-After", "")
            seconds = min(float(asked) if asked.isdecimal() else 1.0, LONGEST_WAIT)
            log.info("the API server has too much to do, and is asked again in %g s", seconds)
            self._sleep(seconds)
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
        metadata = manifest.get("metadata", {})
        name = "/".join(metadata[part] for part in ("namespace", "name") if metadata.get(part))
        raise UsageError(
            f"shoal {__version__} cannot read {kind.PLURAL} {name}: {found}: correct it, or, if the "
            "cluster's Shoal is newer, upgrade this one"
        ) from error


def without_unknown_status(kind: type[Kind], manifest: Json) -> Json:
    """An object without the fields of its status that have a value that `kind` does not know: nobody can correct it."""
    try:
        kind.model_validate(manifest, extra="ignore")
    except ValidationError as error:
        wrong = [each["loc"] for each in error.errors() if each["loc"][:1] == ("status",)]
        status = {} if ("status",) in wrong else manifest.get("status", {})
        names = {name for _, name, *_ in wrong} if status else set()
        return {**manifest, "status": {name: value for name, value in status.items() if name not in names}}
    return manifest


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
        who = "`kubectl auth whoami` shows who you are"
        if f"{CapacityPool.PLURAL}.{GROUP} is forbidden" in words:
            return Forbidden(
                f"{words}. No role of a namespace includes them: name pools with --pool, give a file with --pools, or "
                f"ask for a ClusterRoleBinding of the ClusterRole shoal-capacitypools-view; {who}"
            )
        if "at the cluster scope" in words:
            return Forbidden(f"{words}. Choose one namespace with -n; {who}")
        return Forbidden(f"{words}. A namespace's role edit includes its jobs; {who}")
    return Unavailable(f"the API server answered {status}: {words}")
