"""The schema of a pod template inside a TrainingJob.

A full PodTemplateSpec would add 10,000 lines to the CRD and drop fields of newer Kubernetes versions. So unknown fields
below `spec` are preserved, and the API server validates them when the pod is created (`fieldValidation=Strict`). Only
fields that Shoal reads or rejects are declared, since CEL sees nothing else; those of which people often mistake the
type or the unit, since the pod's own error comes later and does not name the field; and lists that are merged with
Shoal's, one element after another, for each pod, which must not take the time of other jobs.
"""

from __future__ import annotations

from typing import Any

from shoal.api.rules import MOST, rules

QUANTITY = "^[+]?([0-9]+[.]?[0-9]*|[.][0-9]+)(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][+-]?[0-9]+)?$"
"""A Kubernetes quantity. A pattern, whose error names field, value and units: a CEL rule on that many strings exceeds
the API server's cost limit, and without either the pod is refused later, with neither field nor value."""

RESERVED_FIELDS = {
    "restartPolicy": "restartPolicy is set by Shoal (workers Never, parameter servers OnFailure): remove it",
    "hostname": "hostname is set by Shoal: remove it",
    "subdomain": "subdomain is set by Shoal: remove it",
    "nodeName": "nodeName bypasses the scheduler: use nodeSelector",
}
"""Fields of a PodSpec that a template must not set, with the error message."""

MOST_ELEMENTS = 256
"""Elements of a list that is merged with Shoal's."""
MOST_VARIABLES = 1024
MOST_TERMS = 32
"""Terms for nodes, and expressions of each: all are combined with each of Shoal's."""


def _metadata() -> dict[str, Any]:
    text = {
        "type": "object",
        "maxProperties": 64,
        "additionalProperties": {"type": "string", "maxLength": 262144},
    }
    refuse = rules(
        (
            "self.all(k, !k.startsWith('shoal.dev/'))",
            "keys under shoal.dev/ are reserved for the operator: use another prefix",
        )
    )
    return {
        "type": "object",
        "description": "Labels and annotations of the pods.",
        "properties": {
            "labels": {**text, "description": "Labels to add.", **refuse},
            "annotations": {**text, "description": "Annotations to add.", **refuse},
        },
    }


_ANY = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def _most(number: int, description: str, items: dict[str, Any] | None = None) -> dict[str, Any]:
    """A list of what the pod's own schema checks. A null removes Shoal's."""
    some = {"type": "array", "nullable": True, "maxItems": number, "items": items or _ANY}
    return some | {"description": description}


def _part(description: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {**_ANY, "nullable": True, "description": description, "properties": properties}


def _affinity() -> dict[str, Any]:
    hard, soft = (f"{kind}DuringSchedulingIgnoredDuringExecution" for kind in ("required", "preferred"))
    parts = {
        name: _most(MOST_TERMS, "All of them must match.") for name in ("matchExpressions", "matchFields")
    }
    terms = _most(MOST_TERMS, "Any of them must match.", {**_ANY, "properties": parts})
    pods = {hard: _most(MOST_ELEMENTS, "All must be met."), soft: _most(MOST_ELEMENTS, "As far as possible.")}
    nodes = {
        hard: _part("Beside those of Shoal.", {"nodeSelectorTerms": terms}),
        soft: _most(MOST_ELEMENTS, "As far as possible."),
    }
    return _part(
        "Where pods run, beside Shoal's rules.",
        {
            "nodeAffinity": _part("By labels of nodes.", nodes),
            "podAffinity": _part("Near other pods.", pods),
            "podAntiAffinity": _part("Away from other pods.", pods),
        },
    )


_QUANTITY = {
    "x-kubernetes-int-or-string": True,
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "pattern": QUANTITY,
}


def _quantities(description: str) -> dict[str, Any]:
    return {"type": "object", "description": description, "additionalProperties": _QUANTITY}


def _volumes() -> dict[str, Any]:
    limit = _QUANTITY | {"description": "The most that it may hold, such as 2Gi."}
    folder = {
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": True,
        "description": "An empty folder, on the node's disk or in memory.",
        "properties": {"sizeLimit": limit},
    }
    return {
        "type": "array",
        "maxItems": MOST_ELEMENTS,
        "description": "Volumes, beside those of Shoal.",
        "items": {
            "type": "object",
            "x-kubernetes-preserve-unknown-fields": True,
            "properties": {"emptyDir": folder},
        },
    }


def _resources() -> dict[str, Any]:
    return {
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": True,
        "description": "Requests and limits, merged over Shoal's requests. Quantities such as 500m, 2 or 8Gi.",
        "properties": {
            "requests": _quantities("What the scheduler reserves."),
            "limits": _quantities("A resource with a limit and no request requests the limit."),
        },
    }


def _containers(container: str) -> dict[str, Any]:
    return {
        "type": "array",
        "maxItems": 16,
        "description": f"The container `{container}` and any sidecars.",
        "items": {
            "type": "object",
            "x-kubernetes-preserve-unknown-fields": True,
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "maxLength": 63, "description": "Name of the container."},
                "image": {"type": "string", "maxLength": 1024, "description": "Image of the container."},
                "env": {
                    "type": "array",
                    "maxItems": MOST_VARIABLES,
                    "description": "Environment variables, before those that Shoal adds.",
                    "items": {
                        "type": "object",
                        "x-kubernetes-preserve-unknown-fields": True,
                        "required": ["name"],
                        "properties": {
                            "name": {"type": "string", "description": "Name of the variable."},
                            "value": {"type": "string", "description": "Its value: a number in quotes."},
                        },
                    },
                },
                "envFrom": _most(
                    MOST_ELEMENTS, "ConfigMaps and Secrets whose keys are environment variables."
                ),
                "ports": _most(MOST_ELEMENTS, "Ports, beside those of Shoal."),
                "volumeMounts": _most(MOST_ELEMENTS, "Where volumes are mounted, beside those of Shoal."),
                "resources": _resources(),
            },
        },
        **rules(
            (
                f"self.exists(c, c.name == '{container}')",
                f"one container must be named {container}: it runs the training, the others are sidecars",
            ),
            (
                "self.all(c, self.exists_one(d, d.name == c.name))",
                "container names must be unique",
            ),
        ),
    }


def pod_template_schema(container: str) -> dict[str, Any]:
    """The structural schema of a template whose training container is called `container`."""
    return {
        "type": "object",
        "properties": {
            "metadata": _metadata(),
            "spec": {
                "type": "object",
                "x-kubernetes-preserve-unknown-fields": True,
                "description": "A PodSpec, merged over Shoal's defaults.",
                "properties": {
                    "containers": _containers(container),
                    "initContainers": {
                        "type": "array",
                        "maxItems": MOST_ELEMENTS,
                        "description": "Containers that end before the others start.",
                        "items": {
                            "type": "object",
                            "x-kubernetes-preserve-unknown-fields": True,
                            "properties": {"resources": _resources()},
                        },
                    },
                    "volumes": _volumes(),
                    "tolerations": _most(MOST_ELEMENTS, "Tolerations, beside those of Shoal."),
                    "affinity": _affinity(),
                    "terminationGracePeriodSeconds": {
                        "type": "integer",
                        "minimum": 0,
                        "maximum": MOST,
                        "nullable": True,
                        "description": "Time between the notice and the end. A null: as Kubernetes has it.",
                    },
                    "nodeSelector": {
                        "type": "object",
                        "description": "Labels of the nodes: true and numbers in quotes.",
                        "additionalProperties": {"type": "string"},
                    },
                    **{
                        name: {"type": "string", "maxLength": 253, "description": "Must not be set."}
                        for name in RESERVED_FIELDS
                    },
                    "hostNetwork": {"type": "boolean", "description": "Must not be set."},
                },
                **rules(
                    *((f"!has(self.{name})", message) for name, message in RESERVED_FIELDS.items()),
                    (
                        "!has(self.hostNetwork) || !self.hostNetwork",
                        "hostNetwork would open the job's ports on the node: remove it",
                    ),
                ),
            },
        },
    }
