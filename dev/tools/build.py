"""Build the missing Go tools, one after another.

Go compiles packages in parallel and caches them, so after the first tool the others take seconds. A lock file lets
concurrent commands share one build.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dev.commands import command
from dev.console import alone, say, step
from dev.errors import DevError
from dev.paths import cache

MODULE = Path(__file__).resolve().parent
KUBERNETES = "v1.36.2"

PACKAGES = {
    "pause": "shoal.dev/tools/pause",
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "etcd": "go.etcd.io/etcd/server/v3",
    "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
    "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
    "kubectl": "k8s.io/kubernetes/cmd/kubectl",
    "helm": "helm.sh/helm/v4/cmd/helm",
    "kubelet": "k8s.io/kubernetes/cmd/kubelet",
    "kube-proxy": "k8s.io/kubernetes/cmd/kube-proxy",
    "coredns": "shoal.dev/tools/coredns",
}
CONTROL_PLANE = ("kube-apiserver", "etcd", "kube-controller-manager", "kube-scheduler", "kubectl", "helm")
NODES = tuple(PACKAGES)

_VERSION = "k8s.io/component-base/version"
LDFLAGS = (
    f"-s -w -X {_VERSION}.gitVersion={KUBERNETES} -X {_VERSION}.gitMajor=1 "
    f"-X {_VERSION}.gitMinor={KUBERNETES.split('.')[1]} -X {_VERSION}.gitTreeState=clean"
)
NO_GO = (
    "Go is needed to build Kubernetes, and no `go` of version 1.24 or newer is on the PATH. "
    "Install it from https://go.dev/dl (Debian's `golang` package is too old), then run the command again."
)


@dataclass(frozen=True)
class Tools:
    """The folder that holds the built commands."""

    folder: Path

    def __getitem__(self, name: str) -> str:
        """The path of one command."""
        return str(self.folder / name)


def pinned() -> str:
    """A short digest of the sources of this module, without Go itself. A folder with a go.mod is another module."""
    ours = [path for path in MODULE.glob("*/*.go") if not (path.parent / "go.mod").exists()]
    return _digest(MODULE, ours, LDFLAGS.encode())


def _digest(module: Path, sources: Iterable[Path], more: bytes = b"") -> str:
    files = [module / "go.mod", module / "go.sum", *sorted(sources)]
    return hashlib.sha256(b"".join([path.read_bytes() for path in files]) + more).hexdigest()[:16]


def go_version() -> str | None:
    """Such as `go1.26.8`, or None if no usable Go is on the PATH."""
    if shutil.which("go") is None:
        return None
    answer = subprocess.run(
        ["go", "env", "GOVERSION"],
        cwd=MODULE,
        env=go_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    version = answer.stdout.strip()
    number = re.match(r"go1\.(\d+)", version)
    return version if answer.returncode == 0 and number and int(number[1]) >= 24 else None


def locate() -> Tools:
    """The folder of the commands, without building them."""
    ready = sorted((cache() / "tools").glob(f"{pinned()}-*"))
    return Tools(ready[-1] if ready else cache() / "tools" / f"{pinned()}-unbuilt")


def ensure(names: tuple[str, ...] = NODES) -> Tools:
    """The named commands, built if missing.

    Raises:
        DevError: a build is needed but Go is missing, or the build failed.
    """
    ready = sorted((cache() / "tools").glob(f"{pinned()}-*"))
    for folder in ready:
        if all((folder / name).exists() for name in names):
            return Tools(folder)
    version = go_version()
    if version is None:
        raise DevError(NO_GO)
    folder = cache() / "tools" / f"{pinned()}-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder / ".lock", "building the tools"):
        missing = [name for name in PACKAGES if name in names and not (folder / name).exists()]
        if missing:
            first = "kube-apiserver" in missing
            patience = ": about 10 minutes on 2 idle cores; kube-apiserver takes longest" if first else ""
            say(f"building {', '.join(missing)} into {folder}{patience}")
        for number, name in enumerate(missing, 1):
            with step(f"building {name} ({number} of {len(missing)})", every=20):
                _build(name, folder)
    return Tools(folder)


def go_environment() -> dict[str, str]:
    """The environment of Go's command: also for what is built beside the tools, which then shares their cache."""
    # GOTOOLCHAIN=auto lets a Go of 1.21 or newer fetch the one that go.mod asks for, through the module
    # proxy.
    return {
        **os.environ,
        "CGO_ENABLED": "0",
        "GOTOOLCHAIN": "auto",
        "GOFLAGS": "-buildvcs=false -mod=readonly",
    }


def ensure_apart(name: str, package: str = ".") -> Path:
    """A command of the module in the folder `name` beside this file, built if missing.

    It is a module of its own because it needs other versions of the dependencies than Kubernetes does.

    Raises:
        DevError: the build failed.
    """
    folder = MODULE / name
    built = cache() / "tools" / f"{name}-{_digest(folder, folder.glob('*.go'))}"
    built.parent.mkdir(parents=True, exist_ok=True)
    with alone(built.with_suffix(".lock"), "building the tools"):
        if not built.exists():
            unfinished = built.with_suffix(".new")
            with step(f"building {name}", every=20):
                flags = ["-trimpath", "-ldflags", "-s -w", "-o", str(unfinished)]
                _go("build", *flags, package, folder=folder)
            unfinished.rename(built)
    return built


def source_of(name: str, module: str) -> Path:
    """The downloaded sources of a module that the one in the folder `name` requires: its manifests, for example."""
    words = ["go", "list", "-m", "-f", "{{.Dir}}", module]
    return Path(command(*words, cwd=MODULE / name, env=go_environment()).strip())


def _build(name: str, folder: Path) -> None:
    unfinished = folder / f".{name}.new"
    flags = ["-trimpath", "-ldflags", LDFLAGS, "-o", str(unfinished)]
    _go("build", *flags, PACKAGES[name], folder=MODULE)
    unfinished.rename(folder / name)


def _go(*words: str, folder: Path) -> None:
    """Go's command. What it writes on the way goes with it, also where it is ended: it leaves up to 350 MB then."""
    at = cache() / "tools"
    with tempfile.TemporaryDirectory(dir=at, prefix=".work-", ignore_cleanup_errors=True) as work:
        command("go", *words, cwd=folder, env={**go_environment(), "GOTMPDIR": work})
