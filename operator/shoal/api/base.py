"""Base classes of the custom resources: API group, camelCase aliases, strict parsing."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

GROUP = "shoal.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"


class Strict(BaseModel):
    """A part of a spec: camelCase in JSON, snake_case in Python; unknown fields are an error."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )


class Status(BaseModel):
    """A part of a status: as `Strict`, but unknown fields (of a newer version) are ignored."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="ignore",
        frozen=True,
        use_attribute_docstrings=True,
    )


class ObjectMeta(Status):
    """The parts of metav1.ObjectMeta that Shoal reads."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Resource(Strict):
    """A custom resource: subclasses add `spec`, `status` and their names."""

    PLURAL: ClassVar[str]
    SHORT_NAMES: ClassVar[tuple[str, ...]] = ()
    NAMESPACED: ClassVar[bool] = True

    api_version: str = API_VERSION
    kind: str
    metadata: ObjectMeta
