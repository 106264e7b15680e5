"""Writes the status of any custom resource: one PUT with the resource version that the decision was based on.

If the object changed meanwhile it is a 409, and the next plan counts from the same status again. The answer goes into
the cache, so that the watch's own event about it is not news. A status with a second writer is applied (server-side
apply) by that one, each with fields of its own: with the version, too, since what is read of it is what is decided by.

What a server does not keep, as fields that its CRD, of an older version, has not, would differ from each plan, and be
forgotten by it: it is known as it was sent (`known`), so that it is not written again and again. The next process does
not know it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from shoal.api.base import API_VERSION, ObjectMeta, Resource
from shoal.cluster.cache import Cache
from shoal.cluster.transport import MERGE_PATCH, Answer, Transport, apply
from shoal.errors import Refused, Unavailable

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=Resource)

MANY_CONFLICTS = 16
"""Of one version, after which the log says so: lists did not help, and nothing of the object is recorded."""


def collection_path(model: type[Resource], namespace: str) -> str:
    """The path of the objects of a custom resource."""
    within = f"/namespaces/{namespace}" if model.NAMESPACED else ""
    return f"/apis/{API_VERSION}{within}/{model.PLURAL}"


def object_path(about: Resource) -> str:
    """The path of an object of a custom resource."""
    return f"{collection_path(type(about), about.metadata.namespace)}/{about.metadata.name}"


class StatusWriter(Generic[R]):
    """Writes statuses of one kind. `on_result` is told the result of each write: written, cut, or the HTTP status.

    Cut: the API server does not keep all of it.

    `on_stale`: the cache is behind, and its watch does not say so: the same version conflicted, or was not there, again
    (twice, and where that did not help, after twice as many times each time).
    """

    def __init__(
        self,
        transport: Transport,
        cache: Cache[R],
        model: type[R],
        *,
        on_result: Callable[[str], None] = lambda _result: None,
        on_stale: Callable[[], None] = lambda: None,
    ) -> None:
        self._transport = transport
        self._cache = cache
        self._model = model
        self._on_result = on_result
        self._on_stale = on_stale
        self._conflicting: dict[str, tuple[str, int]] = {}
        """Versions that conflicted, by uid, and how often."""
        self._cut: dict[str, tuple[BaseModel, BaseModel]] = {}
        """By uid: a status as it was sent, and what the server kept of it, where that is less."""
        self._told_of_cuts = False

    def can_write(self, about: R) -> bool:
        """Whether the object is known as it is: no write follows what cannot be parsed."""
        return not self._cache.is_unread(about.metadata.uid)

    def known(self, about: R) -> Any:
        """The status of an object; each field as it was sent, where what is stored is what the server kept of that.

        What is planned is compared with it. Others may have written other fields meanwhile.
        """
        stored: Any = getattr(about, "status", None)
        if about.metadata.uid not in self._cut:
            return stored
        sent, kept = self._cut[about.metadata.uid]
        if stored == kept:
            return sent
        as_sent = {name: mine for name, mine in sent if getattr(stored, name) == getattr(kept, name)}
        return stored.model_copy(update=as_sent)

    def as_known(self, about: R) -> R:
        """An object with the status that is known of it."""
        known = self.known(about)
        return (
            about if known is getattr(about, "status", None) else about.model_copy(update={"status": known})
        )

    def forget(self, uid: str) -> None:
        """Drop what is known of an object that is gone."""
        self._conflicting.pop(uid, None)
        self._cut.pop(uid, None)

    async def write(self, about: R, status: BaseModel, *, urgent: bool = False) -> R | None:
        """Write the status; the object as stored, or None if it changed meanwhile, cannot be parsed, or may be gone.

        `urgent`: a replacement waits for it (see `Limited`).

        Raises:
            Unavailable: the write failed and may succeed on retry.
            Refused: the API server rejects the status.
        """
        if not self.can_write(about):
            return None
        spec: Any = getattr(about, "spec", None)
        body = {
            "apiVersion": API_VERSION,
            "kind": about.kind,
            "metadata": _as_known(about),
            # The server keeps the stored spec, but mutating webhooks are shown this one.
            "spec": spec.model_dump(mode="json", by_alias=True, exclude_none=True),
            "status": status.model_dump(mode="json", by_alias=True, exclude_none=True),
        }
        path = f"{object_path(about)}/status"
        return self._stored(
            about, await self._transport.request("PUT", path, body=body, urgent=urgent), status
        )

    def _is_cut(self, sent: BaseModel, stored: R) -> bool:
        """Whether the server does not keep all of a status; what was sent is remembered then."""
        kept: Any = getattr(stored, "status", None)
        if kept == sent:
            self._cut.pop(stored.metadata.uid, None)
            return False
        self._cut[stored.metadata.uid] = sent, kept
        if not self._told_of_cuts:
            self._told_of_cuts = True
            whole, rest = (each.model_dump(mode="json", by_alias=True) for each in (sent, kept))
            logger.warning(
                "the API server does not keep of the status of a %s: %s. Apply the CustomResourceDefinitions of this "
                "version",
                stored.kind,
                ", ".join(_changed(whole, rest)),
            )
        return True

    async def apply(self, about: R, fields: Mapping[str, Any], manager: str) -> R | None:
        """Apply only some fields of the status (server-side), those of one writer of several; else as `write`.

        Fields that `manager` applied before and are not among these are removed.
        """
        body = {"apiVersion": API_VERSION, "kind": about.kind, "metadata": _as_known(about), "status": fields}
        path = f"{object_path(about)}/status"
        return self._stored(about, await apply(self._transport, path, body, manager))

    async def remove(self, about: R, field: str) -> R | None:
        """Remove a field of the status, whoever has it, of an object that has not changed since; else as `write`.

        Applied no more, what another manager has of it, as who restored it, would stay: all of it, or some, without
        what it needs, which the API server refuses.
        """
        body = {"metadata": _version(about), "status": {field: None}}
        path = f"{object_path(about)}/status"
        answer = await self._transport.request("PATCH", path, body=body, content_type=MERGE_PATCH)
        return self._stored(about, answer)

    async def write_finalizers(self, about: R, finalizers: Sequence[str]) -> R | None:
        """Write all finalizers, of an object that has not changed since; else as `write`.

        Applied, ours would stay where another manager has it, too: that of a restored object is of who restored it.
        """
        meta = {**_version(about), "finalizers": list(finalizers)}
        answer = await self._transport.request(
            "PATCH", object_path(about), body={"metadata": meta}, content_type=MERGE_PATCH
        )
        return self._stored(about, answer)

    def _stored(self, about: R, answer: Answer, sent: BaseModel | None = None) -> R | None:
        meta = about.metadata
        times = self._conflicts(meta) if answer.status in {404, 409} else 0
        if times == MANY_CONFLICTS:
            words = (
                "cannot update the status of %s: version %s, as this process knows it, conflicted %d times"
            )
            logger.warning(words, _name(about), meta.resource_version, times)
        if not times:
            self._conflicting.pop(meta.uid, None)
        if answer.ok:
            stored = self._model.model_validate_json(answer.body, extra="ignore")
            self._cache.put(stored, ours=True)
            self._on_result("cut" if sent is not None and self._is_cut(sent, stored) else "written")
            return stored
        self._on_result(str(answer.status))
        # A 404 is no proof that the object is gone, which its watch, or a list, says: so answer a CRD that has lost
        # its subresource, and a server that does not know the CRD yet.
        if answer.status == 409 or times == 1:
            return None
        words = f"cannot update the status of {_name(about)}: {answer.status} {answer.message}"
        raise Refused(words) if answer.status in {400, 422} else Unavailable(words)

    def _conflicts(self, meta: ObjectMeta) -> int:
        """Note that this version is not the newest, or not there any more; how often that was so."""
        known, times = self._conflicting.get(meta.uid, ("", 0))
        times = times + 1 if known == meta.resource_version else 1
        self._conflicting[meta.uid] = meta.resource_version, times
        if times > 1 and times.bit_count() == 1:
            self._on_stale()
        return times


def _name(about: Resource) -> str:
    return f"{about.metadata.namespace}/{about.metadata.name}" if about.NAMESPACED else about.metadata.name


def _version(about: Resource) -> dict[str, str]:
    """What makes a write a 409 if the object is another, or has changed."""
    return {"uid": about.metadata.uid, "resourceVersion": about.metadata.resource_version}


def _as_known(about: Resource) -> dict[str, str]:
    """What says of which object a status is, and of which state of it."""
    within = {"namespace": about.metadata.namespace} if about.NAMESPACED else {}
    return {"name": about.metadata.name, **within, **_version(about)}


def _changed(sent: Any, kept: Any, path: str = "") -> Iterator[str]:
    """The paths of the fields that are not as they were sent. Of a list, it is the list."""
    if isinstance(sent, dict) and isinstance(kept, dict):
        for name, value in sent.items():
            yield from _changed(value, kept.get(name), f"{path}.{name}" if path else name)
    elif sent != kept:
        yield path
