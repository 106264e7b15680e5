"""The schema of a pod template inside a TrainingJob.

The whole PodTemplateSpec would be 10,000 lines of CRD and would drop fields newer than itself, so below `spec` unknown
fields are kept and the API server checks them when the pod is made (`fieldValidation=Strict`). What Shoal reads or
must refuse is spelled out, since CEL sees nothing else.
"""

from __future__ import annotations

from typing import Any

from shoal.api.rules import rules

_OWNED_SPEC_FIELDS = {
    "restartPolicy": "restartPolicy is Shoal's (workers Never, parameter servers OnFailure): remove it",
    "hostname": "hostname is Shoal's: remove it",
    "subdomain": "subdomain is Shoal's: remove it",
    "nodeName": "nodeName would go round the scheduler: use nodeSelector",
}


def _metadata() -> dict[str, Any]:
    text = {
        "type": "object",
        "maxProperties": 64,
        "additionalProperties": {"type": "string", "maxLength": 262144},
    }
    refuse = rules(
        (
            "self.all(k, !k.startsWith('shoal.dev/'))",
            "keys under shoal.dev/ are the operator's: use another prefix",
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
            },
        },
        **rules(
            (
                f"self.exists(c, c.name == '{container}')",
                f"one container must be named {container}: it is the one that trains, others run beside it",
            ),
            (
                "self.all(c, self.exists_one(d, d.name == c.name))",
                "two containers have the same name: give each its own",
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
                "description": "A PodSpec: what it says is merged over Shoal's defaults.",
                "properties": {
                    "containers": _containers(container),
                    **{
                        name: {"type": "string", "maxLength": 253, "description": "Not to be set."}
                        for name in _OWNED_SPEC_FIELDS
                    },
                    "hostNetwork": {"type": "boolean", "description": "Not to be set."},
                },
                **rules(
                    *((f"!has(self.{name})", message) for name, message in _OWNED_SPEC_FIELDS.items()),
                    (
                        "!has(self.hostNetwork) || !self.hostNetwork",
                        "hostNetwork would put the job's ports on the node: remove it",
                    ),
                ),
            },
        },
    }
