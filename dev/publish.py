"""Build the images for a registry and push them: `make images REGISTRY=registry.example.com/team`.

With Docker where an engine answers, else with buildah. Prints the `helm install` that uses them.
"""

from __future__ import annotations

import platform
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from dev.commands import command
from dev.console import step
from dev.demo.backend import docker_answers
from dev.errors import DevError
from dev.images import GPU, IMAGES, Image
from dev.paths import ROOT
from shoal import __version__

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""As nodes name what Python calls so."""


def reference(image: Image, registry: str, tag: str) -> str:
    """The name of an image in the registry."""
    return f"{registry.rstrip('/')}/shoal-{image.name}:{tag}"


def commands(tool: str, registry: str, tag: str) -> Iterator[list[str]]:
    """The commands that build and push all images, bases first. `tool` is docker or buildah: both know these words."""
    for image in IMAGES.values():
        context = ROOT / image.context
        words = [tool, "build", "-f", str(context / image.dockerfile), "-t", reference(image, registry, tag)]
        if image.target:
            words += ["--target", image.target]
        if image.after:
            words += ["--build-arg", f"BASE={reference(IMAGES[image.after], registry, tag)}"]
        yield [*words, str(context)]
        yield [tool, "push", reference(image, registry, tag)]


def values(registry: str, tag: str) -> dict[str, str]:
    """The chart's values for these images, wherever they are pulled."""
    return {
        "image.repository": reference(IMAGES["operator"], registry, tag).rpartition(":")[0],
        "image.tag": tag,
        "trainer.psImage": reference(IMAGES["ps"], registry, tag),
        "trainer.workerImage": reference(IMAGES["worker"], registry, tag),
    }


def built_here() -> str:
    """The chart's values for images that this machine built: their nodes are of its architecture."""
    architecture = ARCHITECTURES.get(platform.machine(), platform.machine())
    label = r"kubernetes\.io/arch"  # in a path of values a dot separates
    return f"nodeSelector.{label}={architecture},trainer.nodeSelector.{label}={architecture}"


def install_command(registry: str, tag: str) -> str:
    """The `helm install` that uses them, to copy."""
    return _helm("install shoal charts/shoal --namespace shoal-system --create-namespace", registry, tag)


def upgrade_command(registry: str, tag: str) -> str:
    """The same where Shoal is installed: all else stays as it was set, which Helm forgets if it is not told."""
    return _helm(
        "upgrade shoal charts/shoal --namespace shoal-system --reset-then-reuse-values", registry, tag
    )


def next_steps(registry: str, tag: str) -> str:
    """What to run when the images are there."""
    return "\n\n".join((
        install_command(registry, tag),
        "or, to upgrade what is installed:",
        upgrade_command(registry, tag),
        "Not built: the image for workers with GPUs, of which an upgrade keeps the old one. Build it of the same tag\n"
        "(docs/install.md, GPU nodes), and add:",
        f"    --set-string trainer.workerGpuImage={reference(GPU, registry, tag)}",
    ))  # fmt: skip


def _helm(what: str, registry: str, tag: str) -> str:
    words = [f"{name}={value}" for name, value in values(registry, tag).items()]
    sets = [f"--set-string {shlex.quote(each)}" for each in (*words, built_here())]
    return " \\\n    ".join([f"helm {what}", *sets])


def tag_of(clone: Path) -> str:
    """VERSION-COMMIT, and `-dirty` with what is in no commit: a node keeps the image of a tag that it has."""
    try:
        commit = command("git", "rev-parse", "--short", "HEAD", cwd=clone).strip()
        changed = command("git", "status", "--porcelain", cwd=clone).strip()
    except (DevError, OSError):  # no git, or an archive without its history
        return __version__
    return f"{__version__}-{commit}" + ("-dirty" if changed else "")


def publish(registry: str, tag: str | None = None) -> str:
    """Build and push; returns what to run next, to install Shoal or to upgrade it.

    Raises:
        DevError: neither Docker nor buildah is there, or a build or push failed.
    """
    if docker_answers():
        tool = "docker"
    elif shutil.which("buildah"):
        tool = "buildah"
    else:
        raise DevError("Building images needs a Docker engine that answers, or buildah: install one of them.")
    tag = tag or tag_of(ROOT)
    for words in commands(tool, registry, tag):
        with step(shlex.join(words[:2] + words[-1:]), every=30):
            command(*words, cwd=ROOT)
    return next_steps(registry, tag)
