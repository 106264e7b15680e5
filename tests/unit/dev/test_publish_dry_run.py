"""`make images` as it is: real buildah builds all images and pushes them to a registry on loopback.

Layers that the local cluster's images have are not built again: the sources get the time stamp that these have, and
buildah their store and this machine's settings of pip.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dev import images, publish
from dev.console import alone
from dev.images import IMAGES
from dev.paths import ROOT
from dev.tools.build import ensure, go_environment
from tests.unit.dev.registry import PASSWORD, USER, command

BUILDAH = shutil.which("buildah")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(os.geteuid() != 0 or BUILDAH is None, reason="needs root and buildah"),
]
TAG = "published"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The sources of all images."""
    for image in IMAGES.values():
        images.stage(image, tmp_path / "checkout" / image.context)
    return tmp_path / "checkout"


@pytest.fixture
def buildah(tmp_path: Path, registry: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`buildah` with the store of the local cluster's images, logged in at the registry."""
    images.build(images.DEMO, ensure(("pause",)))  # the worker among them, as a base
    store = shlex.join(images.buildah()[1:])
    with images.pip_configuration() as volumes, alone(images.folder() / ".lock", "publishing images"):
        script = tmp_path / "bin" / "buildah"
        script.parent.mkdir()
        script.write_text(
            f"""#!/bin/sh
            case "$1" in
            build) shift; exec {BUILDAH} {store} build --layers --pull-never {shlex.join(volumes)} "$@" ;;
            *) exec {BUILDAH} {store} "$@" ;;
            esac
            """
        )
        script.chmod(0o755)
        for name, value in {
            "PATH": f"{script.parent}:{os.environ['PATH']}",
            "BUILDAH_ISOLATION": "chroot",
            "STORAGE_DRIVER": "overlay",
            "SSL_CERT_FILE": str(tmp_path / "pki" / "ca.crt"),
            "DOCKER_CONFIG": str(tmp_path),
            "REGISTRY_AUTH_FILE": str(tmp_path / "config.json"),
        }.items():
            monkeypatch.setenv(name, value)
        command("buildah", "login", "--username", USER, "--password", PASSWORD, registry)
        yield
        names = [publish.reference(image, f"{registry}/team", TAG) for image in IMAGES.values()]
        command("buildah", "rmi", *names)


def test_what_is_pushed_is_what_the_printed_install_names(
    registry: str, checkout: Path, buildah: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "ROOT", checkout)
    monkeypatch.setattr(publish, "docker_answers", lambda: False)
    printed = publish.publish(f"{registry}/team", TAG)
    pushed = {publish.reference(image, f"{registry}/team", TAG) for image in IMAGES.values()}
    crane = command("go", "tool", "-n", "crane", cwd=ROOT / "dev/checks", env=go_environment()).strip()
    for name in pushed:
        assert command(crane, "validate", "--fast", "--remote", name)

    helm, install, *rest = shlex.split(printed.partition("\n\n")[0].replace("\\\n", " "))
    assert (helm, install) == ("helm", "install")
    rendered = command(str(ensure(("helm",))["helm"]), "template", *rest, cwd=ROOT)
    named = set(_images(list(yaml.safe_load_all(rendered))))
    assert publish.reference(IMAGES["operator"], f"{registry}/team", TAG) in named
    assert {each for each in named if registry in each} <= pushed
    assert all(name in rendered for name in pushed if "digits" not in name)


def _images(part: object) -> Iterator[str]:
    """What containers of these objects are made from."""
    if isinstance(part, dict):
        if isinstance(part.get("image"), str):
            yield part["image"]
        for each in part.values():
            yield from _images(each)
    elif isinstance(part, list):
        for each in part:
            yield from _images(each)
