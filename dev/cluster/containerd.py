"""The configuration of containerd, and the import of images.

Images are imported once, into the containerd root of a template. The root of a node links to the template's layers,
which are read-only. A running node gets a newer image through its socket, without the layers that it has.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import IO

from dev.cluster.host import cni_folder
from dev.cluster.processes import ProcessTable
from dev.commands import command
from dev.console import step
from dev.errors import DevError
from dev.images import PAUSE, built, folder, layout

NAMESPACE = "k8s.io"
CONTENT = "io.containerd.content.v1.content/blobs"
SNAPSHOTS = "io.containerd.snapshotter.v1.overlayfs/snapshots"


def config(root: Path, state: Path, socket: Path, cni: Path | None) -> str:
    """The configuration of one containerd (version 2, for 1.6 to 2.x); without `cni` for imports only.

    `restrict_oom_score_adj`: without CAP_SYS_RESOURCE every sandbox would fail.
    """
    unused = ["snapshotter.v1.btrfs", "snapshotter.v1.zfs", "snapshotter.v1.aufs", "snapshotter.v1.devmapper"]
    unused += ["snapshotter.v1.blockfile", "internal.v1.opt", "nri.v1.nri"]
    if cni is None:
        unused += ["grpc.v1.cri", "cri.v1.images", "cri.v1.runtime"]
    disabled = json.dumps([f"io.containerd.{name}" for name in unused])
    text = f"""
version = 2
root = "{root}"
state = "{state}"
oom_score = 0
disabled_plugins = {disabled}
[grpc]
  address = "{socket}"
[ttrpc]
  address = "{socket}.ttrpc"
"""
    if cni is None:
        # Running nodes use the layers of the template, so none is ever deleted.
        never = (
            'pause_threshold = 0.02\ndeletion_threshold = 0\nmutation_threshold = 0\nschedule_delay = "24h"\n'
        )
        return f'{text}[plugins."io.containerd.gc.v1.scheduler"]\n{never}startup_delay = "24h"\n'
    return f"""{text}
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni_folder()}"
    conf_dir = "{cni}"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "{shutil.which("runc", path="/usr/local/sbin:/usr/sbin:/usr/bin") or "runc"}"
        SystemdCgroup = false
"""


def template() -> Path:
    """The containerd root of the template."""
    return folder() / "containerd"


def ensure_template(references: Iterable[str]) -> None:
    """Import the images that are missing or out of date in the template."""
    wanted = {reference: digest for reference, digest in built().items() if reference in {PAUSE, *references}}
    if missing := {PAUSE, *references} - wanted.keys():
        raise DevError(
            f"These images are not built: {', '.join(sorted(missing))}. Run `python -m dev images build`."
        )
    stamp = template().with_suffix(".json")
    have = json.loads(stamp.read_text()) if stamp.exists() and template().is_dir() else {}
    if wanted.items() <= have.items():
        return
    work = folder() / ".import"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    if not have:
        shutil.rmtree(template(), ignore_errors=True)
    table = ProcessTable(work / "processes", work)
    socket = work / "containerd.sock"
    (work / "config.toml").write_text(config(template(), work / "state", socket, None))
    table.start("containerd", ["containerd", "--config", str(work / "config.toml")])
    try:
        await_containerd(socket)
        for reference, digest in wanted.items():
            if have.get(reference) != digest:
                with step(f"importing {reference}", every=20):
                    load(socket, reference)
                have[reference] = digest
                stamp.write_text(json.dumps(have))
    finally:
        table.stop("containerd", seconds=20)
        shutil.rmtree(work, ignore_errors=True)


def copy_template(root: Path) -> None:
    """Create a node's containerd root, with copies of the template's databases and links to its layers.

    A layer is only read (as the lower part of an overlay), so a symbolic link is enough.
    """
    source = template()
    for database in source.rglob("*.db"):
        target = root / database.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(database, target)
    shutil.copytree(source / CONTENT, root / CONTENT, copy_function=os.link, dirs_exist_ok=True)
    for layer in (source / SNAPSHOTS).iterdir():
        own = root / SNAPSHOTS / layer.name
        own.mkdir(parents=True, mode=0o700)
        (own / "fs").symlink_to(layer / "fs")
        (own / "work").mkdir(mode=0o711)


def load(socket: Path, reference: str) -> None:
    """Import an image of the OCI layout into a running containerd, without the layers that it has.

    Raises:
        DevError: containerd refused it.
    """
    present = set(ctr(socket, "content", "ls", "-q").split())
    process = subprocess.Popen(
        _ctr(socket, "images", "import", "--snapshotter", "overlayfs", "-"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdin is not None
    try:
        archive(reference, present, process.stdin)
        process.stdin.close()
    except BrokenPipeError:
        pass
    assert process.stdout is not None
    output = process.stdout.read().decode(errors="replace")
    process.stdout.close()
    if process.wait() != 0:
        raise DevError(f"containerd refused {reference}: {output[-1000:]}")


def archive(reference: str, present: set[str], out: IO[bytes]) -> None:
    """Write one built image as an OCI archive, without the blobs named in `present`."""
    source = layout(reference)
    text = (source / "manifest.json").read_bytes()
    manifest = json.loads(text)
    tag = {
        "org.opencontainers.image.ref.name": reference.rsplit(":", 1)[1],
        "io.containerd.image.name": reference,
    }
    digest = f"sha256:{hashlib.sha256(text).hexdigest()}"
    entry = {"mediaType": manifest["mediaType"], "digest": digest, "size": len(text), "annotations": tag}
    with tarfile.open(fileobj=out, mode="w|") as tar:
        _add(tar, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        _add(tar, "index.json", json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode())
        _add(tar, _blob(digest), text)
        tar.add(source / _hex(manifest["config"]["digest"]), _blob(manifest["config"]["digest"]))
        for layer in manifest["layers"]:
            if layer["digest"] not in present:
                tar.add(source / _hex(layer["digest"]), _blob(layer["digest"]))


def ctr(socket: Path, *args: str) -> str:
    """Run containerd's own client."""
    return command(*_ctr(socket, *args))


def await_containerd(socket: Path, seconds: float = 30.0) -> None:
    """Wait until containerd answers."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            ctr(socket, "version")
        except DevError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def _ctr(socket: Path, *args: str) -> Sequence[str]:
    return ["ctr", "--address", str(socket), "--namespace", NAMESPACE, *args]


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _blob(digest: str) -> str:
    return f"blobs/sha256/{_hex(digest)}"


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, BytesIO(data))
