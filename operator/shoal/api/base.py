"""Base classes of the custom resources: API group, camelCase aliases, strict parsing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from shoal_trainer.contract import lean

GROUP = "shoal.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"


@lean
class Strict(BaseModel):
    """A part of a spec: camelCase in JSON, snake_case in Python; unknown fields are an error."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
    )


@lean
class Status(BaseModel):
    """A part of a status: as `Strict`, but unknown fields (of a newer version) are ignored."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="ignore",
        frozen=True,
    )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's, in a fifth of the time: a plan of a job that ramps up makes thousands of them.

        What pydantic copies beside the fields, a part of a status does not have.
        """
        if deep:
            return super().model_copy(update=update, deep=True)
        fresh = self.__new__(type(self))
        object.__setattr__(fresh, "__dict__", {**self.__dict__, **(update or {})})
        object.__setattr__(fresh, "__pydantic_extra__", None)
        object.__setattr__(fresh, "__pydantic_private__", None)
        return fresh


class ObjectMeta(Status):
    """The parts of metav1.ObjectMeta that Shoal reads."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    finalizers: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Reason(NamedTuple):
    """Why a condition is set: one word for programs, and a message for people."""

    reason: str
    message: str


class Condition(Status):
    """A metav1.Condition."""

    type: str
    """Its name, in CamelCase."""
    status: Literal["True", "False", "Unknown"]
    """True, False or Unknown."""
    observed_generation: int = 0
    """The generation of the spec that the condition was set for."""
    last_transition_time: AwareDatetime
    """When `status` last changed."""
    reason: str
    """Why, in one CamelCase word."""
    message: str = ""
    """Details for people."""

    @classmethod
    def after(
        cls,
        before: Condition | None,
        kind: str,
        holds: bool | None,
        reason: str,
        message: str = "",
        *,
        generation: int,
        now: datetime,
    ) -> Condition:
        """The condition that follows `before`. Where the status stays the same, so does the time of its transition.

        `holds`: None where nobody knows.
        """
        status: Literal["True", "False", "Unknown"] = (
            "Unknown" if holds is None else "True" if holds else "False"
        )
        return cls(
            type=kind,
            status=status,
            observed_generation=generation,
            last_transition_time=before.last_transition_time
            if before is not None and before.status == status
            else now.replace(microsecond=0),
            reason=reason,
            message=message,
        )


@dataclass(frozen=True)
class Column:
    """A column of `kubectl get`. `wide`: shown only with `-o wide`."""

    name: str
    path: str
    kind: str = "string"
    wide: bool = False
    description: str = ""


@dataclass(frozen=True)
class Scale:
    """The paths of the `scale` subresource, which `kubectl scale` and autoscalers use."""

    spec_replicas: str
    status_replicas: str
    label_selector: str


class Resource(Strict):
    """A custom resource: subclasses add `spec`, perhaps `status`, and how the API server presents the kind."""

    PLURAL: ClassVar[str]
    SHORT_NAMES: ClassVar[tuple[str, ...]] = ()
    NAMESPACED: ClassVar[bool] = True
    COLUMNS: ClassVar[tuple[Column, ...]] = ()
    SCALE: ClassVar[Scale | None] = None

    api_version: str = API_VERSION
    kind: str
    metadata: ObjectMeta
