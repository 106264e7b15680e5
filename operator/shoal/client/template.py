"""The pod template of `submit`: one for both roles, with what options do not say. Service account, env, resources."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import UsageError

Json = dict[str, Any]
ROLES = ("ps", "worker")


def read(given: Mapping[str, Any] | str | Path | None) -> Json:
    """The template as a dict, read from a YAML file where it is a path; empty without one.

    Raises:
        UsageError: the file cannot be read, or it is no pod template.
    """
    if given is None:
        return {}
    template: Any = given
    if isinstance(given, str | Path):
        import yaml

        try:
            template = yaml.safe_load(Path(given).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UsageError(f"cannot read the template {given}: {' '.join(str(error).split())}") from error
    if not isinstance(template, Mapping):
        raise UsageError("a pod template is a map of metadata and spec, as in any Deployment")
    if other := sorted(template.keys() - {"metadata", "spec"}):
        raise UsageError(
            f"the template has {', '.join(other)}, which a pod template has not: put it under spec"
        )
    found = dict(template)
    spec = found.get("spec") or {}
    containers = spec.get("containers", []) if isinstance(spec, Mapping) else None
    if not isinstance(containers, list) or not all(
        isinstance(e, Mapping) and e.get("name") for e in containers
    ):
        raise UsageError("spec.containers of the template must be a list of containers with a name")
    return found


def of_role(template: Json, role: str, image: str | None = None) -> Json:
    """The part for one role: containers `ps` and `worker` are of one each, all others of both.

    `image` replaces the role's own. Empty where nothing is left.
    """
    spec = dict(template.get("spec") or {})
    containers = [
        each for each in spec.pop("containers", []) if each["name"] == role or each["name"] not in ROLES
    ]
    if (containers or image) and not any(each["name"] == role for each in containers):
        containers.insert(0, {"name": role})
    if image is not None:
        containers = [{**each, "image": image} if each["name"] == role else each for each in containers]
    if containers:
        spec["containers"] = containers
    rest = {key: value for key, value in template.items() if key != "spec" and value}
    return rest | ({"spec": spec} if spec else {})


def image_in(template: Json, role: str = "worker") -> str | None:
    """The image of a role's container, if the template names one."""
    containers = (template.get("spec") or {}).get("containers") or ()
    return next((each.get("image") for each in containers if each["name"] == role), None)
