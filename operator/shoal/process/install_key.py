"""`shoal-operator install-key`: the install key from its Secret, made if absent. Runs before the operator in its pod.

The chart cannot make the key: a template with a random part renders another key each time, and GitOps would rotate it
under running jobs. Of two pods that start together one creates the Secret, and the other reads it.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from shoal.cluster.transport import Transport
from shoal.errors import ShoalError, Unavailable

KEY_BYTES = 32
FIELD = "key"
BESIDE = ("key-id", "previous-key", "previous-key-id")
"""Fields that `shoal install-key rotate` adds."""


class NoKey(ShoalError):
    """The Secret cannot be read or made; the message has the server's words."""


async def install_key(transport: Transport, namespace: str, name: str) -> Mapping[str, bytes]:
    """Read the fields of this Secret, or make the Secret.

    Raises:
        NoKey: the API server refuses, or the Secret has no key.
        Unavailable: it does not answer.
    """
    path = f"/api/v1/namespaces/{namespace}/secrets"
    for _ in range(3):  # created by another pod in between, deleted in between
        answer = await transport.request("GET", f"{path}/{name}")
        if answer.ok:
            return _fields(answer.body, name)
        if answer.status != 404:
            raise NoKey(f"cannot read the Secret {name} with the install key: {answer.message}")
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "shoal"}},
            "data": {FIELD: base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()},
        }
        answer = await transport.request("POST", path, body=body)
        if answer.ok:
            return _fields(answer.body, name)
        if answer.status != 409:
            raise NoKey(f"cannot make the Secret {name} with the install key: {answer.message}")
    raise Unavailable(f"the Secret {name} is created and deleted again")


async def write(transport: Transport, namespace: str, name: str, file: Path) -> None:
    """Write the key into a file that only this user may read, and what a rotation adds beside it.

    Raises as `install_key`.
    """
    _write_all(await install_key(transport, namespace, name), file)


def _write_all(fields: Mapping[str, bytes], file: Path) -> None:
    for field in (FIELD, *BESIDE):
        target = file if field == FIELD else file.with_name(field)
        if field in fields:
            with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as opened:  # noqa: PTH123
                opened.write(fields[field])
        else:
            target.unlink(missing_ok=True)


def _fields(body: bytes, name: str) -> Mapping[str, bytes]:
    data = json.loads(body).get("data") or {}
    if FIELD not in data:
        raise NoKey(f"the Secret {name} has no field {FIELD}: add it, or delete the Secret")
    try:
        fields = {field: base64.b64decode(data[field]) for field in (FIELD, *BESIDE) if field in data}
    except binascii.Error as error:
        raise NoKey(f"the Secret {name} cannot be read: {error}") from error
    for field in {FIELD, "previous-key"} & fields.keys():
        if len(fields[field]) < KEY_BYTES:
            words = f"has {len(fields[field])} bytes: it needs at least {KEY_BYTES}"
            raise NoKey(f"the {field} in the Secret {name} {words}")
    return fields
