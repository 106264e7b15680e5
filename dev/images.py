"""Build the images from their Dockerfiles with buildah, without Docker and if necessary without a registry.

The base image is pulled, or else made of Debian packages by mmdebstrap under the same name. An image is rebuilt when
one of its sources has changed. Everything is kept in the user's cache.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dev.commands import command
from dev.console import alone, say, step
from dev.errors import DevError
from dev.paths import ROOT, cache
from dev.tools import Tools

BASE = "docker.io/library/python:3.11-slim-bookworm"
PAUSE = "localhost/shoal-pause:dev"
CERTIFICATES = Path("/etc/ssl/certs")
_EPOCH = 1_577_836_800
"""The time stamp of every file in a build context, so that a fresh clone does not look like a change."""


@dataclass(frozen=True)
class Image:
    """One image. `sources` are its files and folders in the repository; `after` is built first."""

    name: str
    dockerfile: str
    sources: tuple[str, ...]
    target: str | None = None
    context: str = "."
    after: str | None = None

    @property
    def reference(self) -> str:
        """The name that pods use."""
        return f"localhost/shoal-{self.name}:dev"


_TRAINER = ("trainer_image/shoal_trainer", "trainer_image/shoal-trainer", "trainer_image/Dockerfile")
IMAGES = {
    image.name: image
    for image in (
        Image("ps", "trainer_image/Dockerfile", ("lock/ps.txt", *_TRAINER), "ps"),
        Image("worker", "trainer_image/Dockerfile", ("lock/ps.txt", "lock/worker.txt", *_TRAINER), "worker"),
        Image(
            "operator",
            "operator/Dockerfile",
            (
                "lock/operator.txt",
                "operator",
                "trainer_image/shoal_trainer/contract",
                "trainer_image/shoal_trainer/script.py",
                "trainer_image/shoal_trainer/py.typed",
            ),
        ),
        Image("digits", "Dockerfile", ("examples/digits",), context="examples/digits", after="worker"),
    )
}
GPU = Image("worker-gpu", IMAGES["worker"].dockerfile, ("lock/worker-gpu.txt",), "worker-gpu")
"""With gigabytes of CUDA: built by a release, else by hand (docs/install.md)."""
DEMO = ("operator", "ps", "digits")
"""The images of the demo; `worker` is built as the base of `digits`."""


def folder() -> Path:
    """The images' part of the cache."""
    return cache() / "images"


def layout(reference: str) -> Path:
    """A folder with one built image: `manifest.json` and the blobs it names, each by its hexadecimal SHA-256.

    The layers are not compressed: they only go into a containerd on this machine.
    """
    return folder() / "built" / reference.rsplit("/", 1)[1].replace(":", "_")


def built() -> dict[str, str]:
    """The manifest digests of all built images, by reference."""
    found = {}
    for reference in (PAUSE, *(image.reference for image in IMAGES.values())):
        with contextlib.suppress(FileNotFoundError):
            manifest = (layout(reference) / "manifest.json").read_bytes()
            found[reference] = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    return found


def build(names: Sequence[str], tools: Tools) -> dict[str, str]:
    """Build the named images that are not up to date, and the pause image. Returns the digests by reference.

    Raises:
        DevError: a build failed; the message holds the end of what it printed.
    """
    folder().mkdir(parents=True, exist_ok=True)
    with alone(folder() / ".lock", "building images"):
        if PAUSE not in built():
            _build_pause(tools)
        for name in names:
            image = IMAGES[name]
            if image.after:
                _build_if_stale(IMAGES[image.after])
            if _build_if_stale(image) or image.reference not in built():
                with step(f"writing out {image.reference}", every=20):
                    _export(image.reference)
    return built()


def _build_if_stale(image: Image) -> bool:
    stamps = _read_stamps()
    stamp = _stamp(image, stamps)
    if stamps.get(image.name) == stamp and _present(image.reference):
        return False
    _ensure_base()
    _run(buildah("rm", "--all"))  # containers of an interrupted build
    with step(f"building {image.reference}", every=30):
        _build(image)
        _run(buildah("rmi", "--prune"))  # layers that only the previous build used
    shutil.rmtree(layout(image.reference), ignore_errors=True)
    (folder() / "stamps.json").write_text(json.dumps({**stamps, image.name: stamp}))
    return True


def _present(reference: str) -> bool:
    words = buildah("inspect", "--type", "image", "--format", "{{.FromImageID}}", reference)
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def sources(image: Image) -> list[Path]:
    """The files of an image in a fixed order, without __pycache__."""
    found: list[Path] = []
    for source in image.sources:
        path = ROOT / source
        if not path.exists():
            raise DevError(f"{source} is missing, but the image {image.reference} is built from it.")
        found += [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    return sorted(p for p in found if "__pycache__" not in p.parts)


def buildah(*words: str) -> list[str]:
    """A buildah command with its own store, separate from the user's images."""
    store = cache() / "buildah"
    return ["buildah", "--root", str(store / "root"), "--runroot", str(store / "run"), *words]


def _stamp(image: Image, stamps: dict[str, str]) -> str:
    digest = hashlib.sha256(BASE.encode())
    for path in sources(image):
        digest.update(f"{path.relative_to(ROOT)} {path.stat().st_mode & 0o100}\n".encode())
        digest.update(path.read_bytes())
    if image.after:
        digest.update(stamps.get(image.after, "").encode())
    return digest.hexdigest()


def _read_stamps() -> dict[str, str]:
    try:
        return dict(json.loads((folder() / "stamps.json").read_text()))
    except (FileNotFoundError, ValueError):
        return {}


def stage(image: Image, context: Path) -> None:
    """Copy the sources of an image into a build context, with the modes and the time stamp that the cache knows."""
    for source in sources(image):
        target = context / source.relative_to(ROOT / image.context)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        target.chmod(0o755 if source.stat().st_mode & 0o100 else 0o644)
    for path in sorted(context.rglob("*"), reverse=True):
        if path.is_dir():
            path.chmod(0o755)
        os.utime(path, (_EPOCH, _EPOCH))


def _build(image: Image) -> None:
    with tempfile.TemporaryDirectory(dir=folder(), prefix=".context-") as name:
        context = Path(name)
        stage(image, context)
        with pip_configuration() as volumes:
            _run(
                buildah(
                    "build",
                    "--layers",
                    "--pull-never",
                    *volumes,
                    *(["--target", image.target] if image.target else []),
                    "--file",
                    str(context / image.dockerfile),
                    "--tag",
                    image.reference,
                    str(context),
                )
            )


def _build_pause(tools: Tools) -> None:
    with tempfile.TemporaryDirectory(dir=folder(), prefix=".context-") as name:
        shutil.copy(tools["pause"], name)
        dockerfile = 'FROM scratch\nCOPY pause /pause\nUSER 65535:65535\nENTRYPOINT ["/pause"]\n'
        (Path(name) / "Dockerfile").write_text(dockerfile)
        _run(buildah("build", "--tag", PAUSE, name))
    _export(PAUSE)


def _ensure_base() -> None:
    """The base image under its own name: pulled, or made of Debian packages."""
    if (
        subprocess.run(
            buildah("inspect", "--type", "image", BASE), capture_output=True, check=False
        ).returncode
        == 0
    ):
        return
    with step(f"pulling {BASE}"), contextlib.suppress(subprocess.TimeoutExpired):
        pulled = subprocess.run(
            buildah("pull", "--quiet", BASE), capture_output=True, timeout=300, check=False
        )
        if pulled.returncode == 0:
            return
    say("no registry answers: the base image is made of Debian packages instead, which does as well")
    tar = folder() / "base.tar"
    if not tar.exists():
        with step("mmdebstrap: Debian bookworm with Python 3.11", every=20):
            unfinished = folder() / ".base.tar"
            unfinished.unlink(missing_ok=True)
            packages = "python3,python3-venv,python3-pip,ca-certificates"
            _run(["mmdebstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(unfinished)])
            unfinished.rename(tar)
    with step("the base image"), tempfile.TemporaryDirectory(dir=folder(), prefix=".context-") as name:
        shutil.copy(tar, Path(name) / "base.tar")
        (Path(name) / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
        _run(buildah("build", "--tag", BASE, name))


def _export(reference: str) -> None:
    """Export an image to its folder. Blobs that images share are hard links."""
    target = layout(reference)
    unfinished = target.with_suffix(".new")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    _run(buildah("push", "--quiet", "--disable-compression", reference, f"dir:{unfinished}"))
    for blob in unfinished.iterdir():
        for twin in target.parent.glob(f"*/{blob.name}"):
            if len(blob.name) == 64 and not twin.samefile(blob):
                blob.unlink()
                blob.hardlink_to(twin)
                break
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)


def _run(words: Sequence[str]) -> None:
    command(*words, env={**os.environ, "BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "overlay"})


@contextlib.contextmanager
def pip_configuration() -> Iterator[list[str]]:
    """Mount this machine's pip settings and certificate authorities as volumes, so that no image keeps them."""
    answer = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    settings: dict[str, str] = {}
    for line in answer.stdout.splitlines():
        key, _, value = line.partition("=")
        settings[key.rsplit(".", 1)[-1]] = str(ast.literal_eval(value))
    volumes = [f"--volume={CERTIFICATES}:{CERTIFICATES}:ro"] if CERTIFICATES.is_dir() else []
    lent = [path for path in settings.get("find-links", "").split() if Path(path).is_dir()]
    certificate = settings.get("cert")
    if certificate and not Path(certificate).is_relative_to(CERTIFICATES):
        lent.append(certificate)
    volumes += [f"--volume={path}:{path}:ro" for path in lent]
    with tempfile.NamedTemporaryFile("w", dir=folder(), prefix=".pip-") as file:
        if settings:
            file.write("[global]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items()))
            file.flush()
            volumes.append(f"--volume={file.name}:/etc/pip.conf:ro")
        yield volumes
