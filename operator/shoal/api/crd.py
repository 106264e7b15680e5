"""Generates the CRDs from the pydantic models: `python -m shoal.api.crd FOLDER…`.

A CRD's schema is *structural*: OpenAPI v3.0 without references, nulls, `const` or `additionalProperties: false`
(Kubernetes documentation, "Specifying a structural schema"). A test compares the checked-in files with the generated
ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from inspect import cleandoc
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from shoal.api.base import GROUP, VERSION, Column, Resource
from shoal.api.capacity_pool import CapacityPool
from shoal.api.field_texts import field_texts
from shoal.api.speed_profile import SpeedProfile
from shoal.api.training_job import TrainingJob

KINDS: tuple[type[Resource], ...] = (TrainingJob, CapacityPool, SpeedProfile)
"""Every custom resource of the group."""

Schema = dict[str, Any]

_NO_MEANING_IN_A_CRD = {"title", "examples", "discriminator", "$defs"}
_VERBATIM = {"default", "enum", "required", "x-kubernetes-validations"}


class _Structural(GenerateJsonSchema):
    """Generates the OpenAPI subset that CRDs allow."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        """Each field is described by the text under it."""
        result = super().model_schema(schema)
        model: type[BaseModel] = schema["cls"]
        texts = field_texts(model)
        for name, field in model.model_fields.items():
            if name in texts:
                result["properties"][field.alias or name]["description"] = texts[name]
        return result

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        """An optional field may be absent; Kubernetes drops nulls."""
        return self.generate_inner(schema["schema"])

    def literal_schema(self, schema: core_schema.LiteralSchema) -> JsonSchemaValue:
        """A single value becomes an enum with one element."""
        result = super().literal_schema(schema)
        return {"type": "string", "enum": [result["const"]]} if "const" in result else result

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """Omit null and empty defaults. The default of an object is `{}`: its fields have defaults themselves."""
        result = super().default_schema(schema)
        if isinstance(result.get("default"), dict):
            result["default"] = {}
        elif result.get("default", ...) in (None, []):
            result.pop("default")
        return result


@cache  # 0.1 s of computing, which `shoal doctor` and each refused object would ask for again
def structural(model: type[BaseModel]) -> Schema:
    """The structural schema of a model, with references resolved. Nobody changes it: it is made once."""
    root = model.model_json_schema(by_alias=True, schema_generator=_Structural, ref_template="{model}")
    definitions: Mapping[str, Schema] = root.get("$defs", {})

    def walk(node: Any) -> Any:
        if isinstance(node, list):
            return [walk(each) for each in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            node = definitions[node["$ref"]] | {k: v for k, v in node.items() if k != "$ref"}
        result: Schema = {}
        for key, value in node.items():
            if key in _NO_MEANING_IN_A_CRD or (key == "additionalProperties" and value is False):
                continue
            if key == "properties":
                result[key] = {name: walk(field) for name, field in value.items()}
            elif key == "description":
                result[key] = _flow(value)
            else:
                result[key] = value if key in _VERBATIM else walk(value)
        if result.get("x-kubernetes-int-or-string"):
            result.pop("type", None)
        elif _is_int_or_string(result):
            result = {**result, "x-kubernetes-int-or-string": True}
        if result.get("type") == "object" and "properties" in result:
            result.pop("additionalProperties", None)
        if not result.get("properties", True):
            del result[
                "properties"
            ]  # the API server drops it, and Argo CD would call the CRD out of sync for ever
        return result

    schema: Schema = walk(root)
    return schema


def _flow(text: str) -> str:
    """A docstring without the line breaks inside its paragraphs."""
    return "\n\n".join(" ".join(part.split()) for part in cleandoc(text).split("\n\n"))


def _is_int_or_string(schema: Schema) -> bool:
    return [choice.get("type") for choice in schema.get("anyOf", [])] == ["integer", "string"]


def _without_defaults(schema: Schema) -> Schema:
    """The schema of a status, which must not be filled with defaults."""
    kept: Schema = {}
    for key, value in schema.items():
        if key == "properties":
            kept[key] = {name: _without_defaults(field) for name, field in value.items()}
        elif key != "default":
            kept[key] = _without_defaults(value) if isinstance(value, dict) else value
    return kept


def _columns(columns: Sequence[Column]) -> list[Schema]:
    """The additionalPrinterColumns of a version."""
    return [
        {
            "name": column.name,
            "type": column.kind,
            "jsonPath": column.path,
            **({"description": column.description} if column.description else {}),
            **({"priority": 1} if column.wide else {}),
        }
        for column in columns
    ]


def _subresources(model: type[Resource]) -> Schema:
    found: Schema = {"status": {}} if "status" in model.model_fields else {}
    if (scale := model.SCALE) is not None:
        found["scale"] = {
            "specReplicasPath": scale.spec_replicas,
            "statusReplicasPath": scale.status_replicas,
            "labelSelectorPath": scale.label_selector,
        }
    return found


def custom_resource_definition(model: type[Resource]) -> Schema:
    """The CustomResourceDefinition of a resource, as its model describes it."""
    properties = structural(model)["properties"] | {
        "apiVersion": {"type": "string", "description": f"Always {GROUP}/{VERSION}."},
        "kind": {"type": "string", "description": f"Always {model.__name__}."},
        "metadata": {"type": "object"},
    }
    if "status" in properties:
        properties["status"] = _without_defaults(properties["status"])
    schema = {**structural(model), "properties": properties}
    schema.pop("required", None)
    if model.model_fields["spec"].is_required():
        schema["required"] = ["spec"]
    kind = model.__name__
    names = {
        "kind": kind,
        "listKind": f"{kind}List",
        "plural": model.PLURAL,
        "singular": kind.lower(),
        **({"shortNames": list(model.SHORT_NAMES)} if model.SHORT_NAMES else {}),
        "categories": ["training"],
    }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": _subresources(model),
        "additionalPrinterColumns": _columns(model.COLUMNS),
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{model.PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced" if model.NAMESPACED else "Cluster",
            "names": names,
            "versions": [version],
        },
    }


def published(model: type[Resource]) -> str:
    """What the API server calls the schema of a resource in its OpenAPI documents."""
    return ".".join([*reversed(GROUP.split(".")), VERSION, model.__name__])


def not_kept(model: type[Resource], served: Schema) -> list[str]:
    """The fields of a resource that the schema of a CRD has not, so that what is written there is dropped."""
    [version] = custom_resource_definition(model)["spec"]["versions"]
    ours = version["schema"]["openAPIV3Schema"]["properties"]
    parts = {name: part for name, part in ours.items() if name in {"spec", "status"}}
    return [f"{model.__name__}.{path}" for path in _beyond({"properties": parts}, served)]


def _beyond(ours: Schema, theirs: Schema, path: str = "") -> Iterator[str]:
    """The paths of properties that the other schema has not; of what is in one, only that one."""
    for name, part in ours.get("properties", {}).items():
        at = f"{path}.{name}" if path else name
        if name in theirs.get("properties", {}):
            yield from _beyond(part, theirs["properties"][name], at)
        elif not theirs.get("x-kubernetes-preserve-unknown-fields"):
            yield at
    for inner in ("items", "additionalProperties"):
        if isinstance(ours.get(inner), dict) and isinstance(theirs.get(inner), dict):
            yield from _beyond(ours[inner], theirs[inner], f"{path}[]")


def files() -> dict[str, str]:
    """File name -> content of every CRD."""
    head = "# Generated by `python -m shoal.api.crd` from operator/shoal/api. Do not edit.\n"
    return {
        f"{GROUP}_{model.PLURAL}.yaml": head
        + yaml.safe_dump(custom_resource_definition(model), sort_keys=False, width=110)
        for model in KINDS
    }


def main(folders: list[str]) -> None:
    """Write the CRDs into each of the folders."""
    for folder in folders:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in files().items():
            (Path(folder) / name).write_text(content)


if __name__ == "__main__":
    main(sys.argv[1:] or ["crds"])
