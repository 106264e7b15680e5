"""Reads objects from what an API server answers, straight into slim models.

An object that cannot be read keeps no others from being read: it may be of a user's own making. Fields that the models
do not know are ignored, since the CRD may be newer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Generic, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic.alias_generators import to_camel

from shoal.cluster.cache import T
from shoal.cluster.deep_json import loads
from shoal.errors import Expired, Unavailable

EventType = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]


@dataclass(frozen=True)
class Unread:
    """An object that cannot be parsed: its metadata and conditions, and why.

    Nothing of the error is kept: it holds all of the object, in a cycle that no garbage collection sees.
    """

    meta: Mapping[str, Any]
    status: Mapping[str, Any]
    why: str


@dataclass(frozen=True)
class Page(Generic[T]):
    """A page of a list: the list's version, the token of the next page ("": this is the last), and its objects."""

    version: str
    token: str
    items: Sequence[T | Unread]


class _Wire(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore")


class _ListMeta(_Wire):
    """metav1.ListMeta."""

    resource_version: str = ""
    continue_: str = Field("", alias="continue")


class _LoosePage(_Wire):
    metadata: _ListMeta = _ListMeta()
    items: list[dict[str, Any]] = []


class _LooseEvent(_Wire):
    type: str
    object: dict[str, Any]


class Reader(Generic[T]):
    """Reads the lists and watches of one model."""

    def __init__(self, model: type[T]) -> None:
        self._page, self._tolerant_page, self._event = _forms(model)

    def page(self, body: bytes) -> Page[T]:
        """Read a page of a list.

        Raises:
            Unavailable: it is none.
        """
        for form in (self._page, self._tolerant_page):
            try:
                page = form.model_validate_json(body, extra="ignore")
            except ValidationError:
                continue
            return Page(page.metadata.resource_version, page.metadata.continue_, page.items)
        try:
            loose = _LoosePage.model_validate(loads(body))
        except ValueError as broken:  # also of pydantic
            raise Unavailable(f"an answer that is no list: {body[:100]!r}") from broken
        items = [self._alone(each) for each in loose.items]
        return Page(loose.metadata.resource_version, loose.metadata.continue_, items)

    def event(self, line: bytes) -> tuple[str, T | Unread]:
        """The type of a watch's event, and its object. That of a bookmark has only metadata.

        Raises:
            Expired: the server cannot continue from the version that the watch asked for.
            Unavailable: another error of the server, or no event.
        """
        try:
            event = self._event.model_validate_json(line, extra="ignore")
        except ValidationError as error:
            return _other_event(line, error)
        return event.type, event.object

    def _alone(self, item: dict[str, Any]) -> T | Unread:
        try:
            alone: T = self._page.model_validate_json(json.dumps({"items": [item]}), extra="ignore").items[0]
            return alone
        except ValidationError as error:
            return _unread(item, error)


def _other_event(line: bytes, error: ValidationError) -> tuple[str, Unread]:
    """An error of the server, or an object that cannot be parsed."""
    try:
        try:
            event = _LooseEvent.model_validate_json(line)
        except ValidationError:
            event = _LooseEvent.model_validate(loads(line))
    except ValueError as broken:  # also of pydantic
        raise Unavailable(f"watch: a line that is no event: {line[:100]!r}") from broken
    if event.type == "ERROR":
        said = event.object.get("message")
        if event.object.get("code") == 410:
            raise Expired(said or "")
        raise Unavailable(f"watch: {said or event.object}")
    return event.type, _unread(event.object, error)


def _tolerant(value: Any, read: ValidatorFunctionWrapHandler) -> object:
    """One object of a page. Those that cannot be parsed are Python's objects one by one, since each may be large."""
    try:
        return read(value)
    except ValidationError as error:
        return _unread(value, error)


def _unread(found: Any, error: ValidationError) -> Unread:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = [str(part) for part in first["loc"]]
    field = ".".join(place[2:] if place[:1] == ["items"] else place[place[:1] == ["object"] :])
    why = f"{field or 'the object'}: {first['msg'].removeprefix('Value error, ')}"
    parts = ((found.get(name) if isinstance(found, dict) else None) for name in ("metadata", "status"))
    meta, status = (part if isinstance(part, dict) else {} for part in parts)
    return Unread(
        {
            **{name: meta.get(name, "") for name in ("name", "namespace", "uid", "resourceVersion")},
            "generation": meta.get("generation", 0),
        },
        {"conditions": status.get("conditions") or []},
        why,
    )


@cache  # they are made again for each reader else, which takes longer than to read a page
def _forms(model: Any) -> tuple[Any, Any, Any]:
    """Of a model: a page of its objects, one where some cannot be parsed, and an event."""
    tolerant: Any = Annotated[model, WrapValidator(_tolerant)]

    class Known(_Wire):
        metadata: _ListMeta = _ListMeta()
        items: list[model] = []

    class Tolerant(_Wire):
        metadata: _ListMeta = _ListMeta()
        items: list[tolerant] = []

    class Event(_Wire):
        type: EventType
        object: model

    return Known, Tolerant, Event
