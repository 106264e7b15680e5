"""What a release publishes, step by step: `python -m dev release STEP`. .github/workflows/release.yaml runs the steps.

Each step works on any machine and writes into a folder; only the workflow has the rights to push, and signs what it
pushed.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

import yaml

from dev.commands import command
from dev.errors import DevError
from dev.images import GPU, IMAGES
from dev.paths import ROOT
from dev.publish import reference, values
from dev.tools import ensure
from shoal import __version__

CHART = ROOT / "charts" / "shoal"
PLUGIN = "kubectl-shoal"
PLATFORMS = {("linux", "amd64"), ("linux", "arm64"), ("darwin", "amd64"), ("darwin", "arm64")}
EVERYWHERE, X86 = "linux/amd64,linux/arm64", "linux/amd64"


def check(tag: str) -> None:
    """Refuse a tag that is not this version, or a version that nothing says anything about.

    Raises:
        DevError: tag, package, chart and CHANGELOG.md do not agree.
    """
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    versions = {
        "the tag": tag.removeprefix("v"),
        "shoal": __version__,
        "the chart": chart["version"],
        "the chart's appVersion": chart["appVersion"],
    }
    if len(set(versions.values())) > 1:
        told = ", ".join(f"{what} is {version}" for what, version in versions.items())
        raise DevError(f"these must be one version: {told}")
    notes(__version__)


def notes(version: str) -> str:
    """The section of a version in CHANGELOG.md. Raises DevError if there is none."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(version)}\b[^\n]*\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None or not found[1].strip():
        raise DevError(f"CHANGELOG.md says nothing about {version}")
    return found[1].strip()


def matrix() -> str:
    """The images that are published, as a matrix of the workflow. CUDA's libraries are taken for x86-64 only."""
    published = [IMAGES["operator"], IMAGES["ps"], IMAGES["worker"], GPU]
    return json.dumps(
        [
            {
                "name": image.name,
                "context": image.context,
                "file": image.dockerfile,
                "target": image.target or "",
                "platforms": X86 if image is GPU else EVERYWHERE,
            }
            for image in published
        ]
    )


def package_chart(folder: Path, registry: str = "") -> Path:
    """The chart as an archive, with the images of this version in `registry` as its defaults."""
    helm = ensure(("helm",))["helm"]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        chart = Path(shutil.copytree(CHART, Path(work) / "shoal"))
        if registry:
            text = (chart / "values.yaml").read_text(encoding="utf-8")
            (chart / "values.yaml").write_text(published_values(text, registry), encoding="utf-8")
        command(helm, "package", str(chart), "--destination", str(folder))
    return folder / f"shoal-{__version__}.tgz"


def published_values(text: str, registry: str) -> str:
    """values.yaml with the published images, which are of all architectures; else as it is, with its comments.

    Raises:
        DevError: values.yaml no longer has a line that is to be replaced.
    """
    images = values(registry, __version__)
    selector = r"{kubernetes\.io/arch: amd64, kubernetes\.io/os: linux}"
    for line, by in (
        (r"# No image is published yet: .*\n", ""),
        (r'repository: "" *# required', f"repository: {images['image.repository']}"),
        (r'psImage: "" *# required', f"psImage: {images['trainer.psImage']}"),
        (r'workerImage: "" *# required', f"workerImage: {images['trainer.workerImage']}"),
        (r'workerGpuImage: "" ', f"workerGpuImage: {reference(GPU, registry, __version__)} "),
        (
            rf"  # Labels of the nodes .*\n  # images. builds .*\n  nodeSelector: {selector}",
            "  # Labels of the nodes of jobs' pods, where neither CapacityPool nor template has the key. Shoal's\n"
            "  # images run on amd64 and arm64; where yours run on one only: {kubernetes.io/arch: amd64}.\n"
            "  nodeSelector: {kubernetes.io/os: linux}",
        ),
        (
            rf"\nnodeSelector: {selector} .*",
            "\nnodeSelector: {kubernetes.io/os: linux}   # of both processes",
        ),
    ):
        text, found = re.subn(line, by, text)
        if found != 1:
            raise DevError(f"values.yaml has {found} times what a release replaces: {line}")
    return text


def build_wheel(folder: Path) -> Path:
    """The Python package."""
    words = ("-m", "hatchling", "build", "-t", "wheel", "-d", str(folder))
    command(sys.executable, *words, cwd=ROOT)
    return folder / f"shoal-{__version__}-py3-none-any.whl"


def build_plugin(folder: Path, os_name: str, architecture: str) -> Path:
    """`kubectl-shoal` with its Python, for this machine. Needs what `lock/plugin.txt` has."""
    if (os_name, architecture) not in PLATFORMS:
        raise DevError(f"krew knows no platform {os_name}/{architecture}")
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / f"{PLUGIN}_{os_name}_{architecture}.tar.gz"
    with tempfile.TemporaryDirectory() as work:
        start = Path(work) / "start.py"
        start.write_text("from shoal.cli import main\nmain()\n")
        command(
            sys.executable, "-m", "PyInstaller", "--noconfirm", "--log-level=ERROR", f"--name={PLUGIN}",
            "--hidden-import=s3fs", "--hidden-import=gcsfs",  # which fsspec imports by their names
            "--collect-submodules=shoal.cli", "--collect-data=shoal", "--collect-data=plotext",
            f"--distpath={work}/dist", f"--workpath={work}/build", f"--specpath={work}", str(start),
        )  # fmt: skip
        shutil.copy(ROOT / "LICENSE", Path(work) / "dist" / PLUGIN)
        with tarfile.open(archive, "w:gz") as packed:
            packed.add(Path(work) / "dist" / PLUGIN, arcname=".")
    return archive


def krew_manifest(folder: Path, base: str, homepage: str) -> Path:
    """The manifest for krew of the archives in a folder, which will be at `base`/NAME.

    Raises:
        DevError: there is no archive.
    """
    platforms = []
    for archive in sorted(folder.glob(f"{PLUGIN}_*_*.tar.gz")):
        _, os_name, architecture = archive.name.removesuffix(".tar.gz").rsplit("_", 2)
        platforms.append(
            {
                "selector": {"matchLabels": {"os": os_name, "arch": architecture}},
                "uri": f"{base.rstrip('/')}/{archive.name}",
                "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
                "bin": PLUGIN,
            }
        )
    if not platforms:
        raise DevError(f"{folder} has no archive of {PLUGIN}")
    manifest = {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "shoal"},
        "spec": {
            "version": f"v{__version__}",
            "homepage": homepage,
            "shortDescription": "Submit, follow and explain training jobs",
            "description": "Submits, lists, follows, scales and explains the TrainingJobs of Shoal, which train Keras\n"
            "models on spot nodes, and finds the cheapest nodes for a deadline.\n",
            "caveats": "The cluster needs the Shoal operator. `kubectl shoal doctor` says what is missing.\n",
            "platforms": platforms,
        },
    }
    path = folder / "shoal.yaml"
    path.write_text(yaml.safe_dump(manifest, sort_keys=False), encoding="utf-8")
    return path
