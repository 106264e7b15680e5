"""Writes the status of any custom resource: one PUT with the resource version that the decision was based on.

If the object changed meanwhile it is a 409, and the next plan counts from the same status again. The answer goes into
the cache, so that the watch's own event about it is not news.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from shoal.api.base import API_VERSION, Resource
from shoal.cluster.cache import Cache
from shoal.cluster.transport import Transport
from shoal.errors import Refused, Unavailable

R = TypeVar("R", bound=Resource)


def collection_path(model: type[Resource], namespace: str) -> str:
    """The path of the objects of a custom resource."""
    within = f"/namespaces/{namespace}" if model.NAMESPACED else ""
    return f"/apis/{API_VERSION}{within}/{model.PLURAL}"


def object_path(about: Resource) -> str:
    """The path of an object of a custom resource."""
    return f"{collection_path(type(about), about.metadata.namespace)}/{about.metadata.name}"


class StatusWriter(Generic[R]):
    """Writes statuses of one kind. `on_result` is told the result of each write: written, or the HTTP status."""

    def __init__(
        self,
        transport: Transport,
        cache: Cache[R],
        model: type[R],
        *,
        on_result: Callable[[str], None] = lambda _result: None,
    ) -> None:
        self._transport = transport
        self._cache = cache
        self._model = model
        self._on_result = on_result

    async def write(self, about: R, status: BaseModel) -> R | None:
        """Write the status; the object as stored, or None if it changed meanwhile or is gone.

        Raises:
            Unavailable: the write failed and may succeed on retry.
            Refused: the API server rejects the status.
        """
        meta = about.metadata
        spec: Any = getattr(about, "spec", None)
        body = {
            "apiVersion": API_VERSION,
            "kind": about.kind,
            "metadata": {
                "name": meta.name,
                **({"namespace": meta.namespace} if about.NAMESPACED else {}),
                "uid": meta.uid,
                "resourceVersion": meta.resource_version,
            },
            # The server ignores the spec, yet validates it.
            "spec": spec.model_dump(mode="json", by_alias=True, exclude_none=True),
            "status": status.model_dump(mode="json", by_alias=True, exclude_none=True),
        }
        answer = await self._transport.request("PUT", f"{object_path(about)}/status", body=body)
        self._on_result("written" if answer.ok else str(answer.status))
        if answer.ok:
            stored = self._model.model_validate_json(answer.body, extra="ignore")
            self._cache.put(stored, ours=True)
            return stored
        if answer.status == 404:
            self._cache.drop(meta.uid)
        if answer.status in {404, 409}:
            return None
        name = f"{meta.namespace}/{meta.name}" if about.NAMESPACED else meta.name
        words = f"cannot update the status of {name}: {answer.status} {answer.message}"
        raise Refused(words) if answer.status in {400, 422} else Unavailable(words)
