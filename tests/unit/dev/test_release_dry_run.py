"""The release's own scripts, as the workflow has them, against an OCI registry on loopback with TLS and a password.

Real helm, cosign, crane and syft; what only the real place has is replaced: a key on disk for GitHub's identity (and no
public log), two empty images for those that Docker builds for two architectures, a recorder for `gh`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from dev import release
from dev.paths import ROOT, cache
from dev.tools.build import ensure, go_environment
from shoal import __version__
from tests.unit.dev.registry import PASSWORD, USER, command

pytestmark = pytest.mark.nightly  # the first run compiles the tools

JOBS: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/release.yaml").read_text())["jobs"]
COSIGN = "github.com/sigstore/cosign/v2/cmd/cosign@v2.6.5"
SYFT = "github.com/anchore/syft/cmd/syft@v1.57.0"


def step(job: str, words: str) -> dict[str, Any]:
    """The only step of a job whose script has these words."""
    [found] = [each for each in JOBS[job]["steps"] if words in each.get("run", "")]
    return dict(found)


def run(script: Mapping[str, Any], cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """A step's script, in the shell that GitHub takes for it."""
    pipefail = ["-o", "pipefail"] if script.get("shell") == "bash" else []
    words = ["bash", "--noprofile", "--norc", "-e", *pipefail, "-c", script["run"]]
    return subprocess.run(words, cwd=cwd, env=dict(env), capture_output=True, text=True, check=False)


def script(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)


def installed(package: str) -> str:
    """A public Go command, built once, outside the checkout."""
    folder = cache() / "checks" / package.rpartition("@")[2]
    name = package.partition("@")[0].rpartition("/")[2]
    if not (folder / name).exists():
        env = {**os.environ, "GOBIN": str(folder), "CGO_ENABLED": "0", "GOFLAGS": ""}
        command("go", "install", package, env=env)
    return str(folder / name)


@pytest.fixture
def env(tmp_path: Path, registry: str) -> dict[str, str]:
    """The workflow's, with helm, crane and cosign; cosign signs with the key `ours` and logs nowhere."""
    found = {
        **os.environ,
        "HOME": str(tmp_path),
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SSL_CERT_FILE": str(tmp_path / "pki" / "ca.crt"),
        "COSIGN_PASSWORD": "",
        "REGISTRY": f"{registry}/team",
        "REGISTRY_USER": USER,
        "REGISTRY_PASSWORD": PASSWORD,
    }
    cosign = installed(COSIGN)
    for name in ("ours", "others"):
        command(cosign, "generate-key-pair", "--output-key-prefix", name, cwd=tmp_path, env=found)
    signs = f"--key {tmp_path / 'ours.key'} --tlog-upload=false"
    script(
        tmp_path / "bin" / "cosign",
        f'[ "$1" = sign ] && {{ shift; exec {cosign} sign {signs} "$@"; }}',
        f'exec {cosign} "$@"',
    )
    (tmp_path / "bin" / "helm").symlink_to(ensure(("helm",))["helm"])
    crane = command("go", "tool", "-n", "crane", cwd=ROOT / "dev/checks", env=go_environment()).strip()
    (tmp_path / "bin" / "crane").symlink_to(crane)
    return found


def verified(reference: str, env: Mapping[str, str], key: Path) -> bool:
    words = ["cosign", "verify", "--insecure-ignore-tlog", "--key", str(key), reference]
    return subprocess.run(words, env=dict(env), capture_output=True, check=False).returncode == 0


def test_the_chart_is_pushed_signed_and_pulled(tmp_path: Path, env: dict[str, str]) -> None:
    push = step("chart", "helm push")
    assert run(push, tmp_path, env).returncode != 0, "there is no chart to push: the step fails"
    release.package_chart(tmp_path / "dist", env["REGISTRY"])
    done = run(push, tmp_path, env)
    assert done.returncode == 0, done.stderr
    reference = f"{env['REGISTRY']}/charts/shoal:{__version__}"
    assert verified(reference, env, tmp_path / "ours.pub")
    assert not verified(reference, env, tmp_path / "others.pub")
    command("helm", "pull", f"oci://{env['REGISTRY']}/charts/shoal", cwd=tmp_path, env=env)
    pulled = tmp_path / f"shoal-{__version__}.tgz"
    assert pulled.read_bytes() == (tmp_path / "dist" / pulled.name).read_bytes()


def test_the_step_fails_with_a_wrong_password(tmp_path: Path, env: dict[str, str]) -> None:
    release.package_chart(tmp_path / "dist", env["REGISTRY"])
    assert run(step("chart", "helm push"), tmp_path, {**env, "REGISTRY_PASSWORD": "x"}).returncode != 0


def test_an_image_of_two_architectures_is_signed_as_a_whole(tmp_path: Path, env: dict[str, str]) -> None:
    login = ["--username", USER, "--password", PASSWORD]
    command("crane", "auth", "login", env["REGISTRY"].partition("/")[0], *login, env=env)
    image = next(each for each in json.loads(release.matrix()) if each["name"] == "ps")
    name = f"{env['REGISTRY']}/shoal-{image['name']}"
    with tarfile.open(tmp_path / "layer.tar", "w") as layer:
        layer.add(ROOT / "LICENSE", "LICENSE")
    parts = []
    for platform in image["platforms"].split(","):
        part = f"{name}:{platform.rpartition('/')[2]}"
        command("crane", "append", "--new_layer", str(tmp_path / "layer.tar"), "--new_tag", part, env=env)
        command("crane", "mutate", "--set-platform", platform, "--tag", part, part, env=env)
        parts += ["--manifest", part]
    command("crane", "index", "append", *parts, "--tag", f"{name}:{__version__}", env=env)
    digest = command("crane", "digest", f"{name}:{__version__}", env=env).strip()
    index = json.loads(command("crane", "manifest", f"{name}@{digest}", env=env))
    assert [each["platform"]["architecture"] for each in index["manifests"]] == ["amd64", "arm64"]

    sign = step("images", "cosign sign")
    sign["run"] = (
        sign["run"]
        .replace("${{ matrix.image.name }}", image["name"])
        .replace("${{ steps.build.outputs.digest }}", digest)
    )
    done = run(sign, tmp_path, env)
    assert done.returncode == 0, done.stderr
    assert verified(f"{name}:{__version__}", env, tmp_path / "ours.pub")
    assert not verified(f"{name}:{__version__}", env, tmp_path / "others.pub")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the repository, whose `.venv` has this Python."""
    copy = tmp_path / "checkout"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*cache", ".git", ".venv", "build", "dist"))
    script(copy / ".venv" / "bin" / "python", f'exec {sys.executable} "$@"')
    return copy


def test_what_is_published_is_complete(tmp_path: Path, checkout: Path) -> None:
    """The scripts of the last job, on what the others made: `gh` gets the chart, the wheel, four plugins, the manifest
    for krew, and the bill of materials."""
    dist = checkout / "dist"
    release.package_chart(dist)
    for each in JOBS["plugin"]["strategy"]["matrix"]["include"]:
        (dist / f"kubectl-shoal_{each['os']}_{each['arch']}.tar.gz").write_bytes(each["os"].encode())
    script(tmp_path / "bin" / "gh", 'printf "%s\\n" "$@" >gh.txt')
    env = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{checkout}:{checkout / 'operator'}:{checkout / 'trainer_image'}",
        "GITHUB_REF_NAME": f"v{__version__}",
        "GITHUB_SERVER_URL": "https://example.com",
        "GITHUB_REPOSITORY": "team/shoal",
    }
    for each in JOBS["publish"]["steps"]:
        if each.get("run", "make install") != "make install":
            done = run(each, checkout, env)
            assert done.returncode == 0, f"{each['run']}: {done.stderr}"
        if each.get("uses", "").startswith("anchore/sbom-action"):
            wanted = each["with"]
            output = f"{wanted['format']}={wanted['output-file']}"
            command(installed(SYFT), "scan", wanted["path"], "--output", output, cwd=checkout, env=env)
    words = (checkout / "gh.txt").read_text().splitlines()
    assert words[:3] == ["release", "create", f"v{__version__}"]
    assert words[-4:] == ["--title", f"v{__version__}", "--notes-file", "notes.md"]
    files = words[3:-4]
    plugins = {f"dist/kubectl-shoal_{os}_{arch}.tar.gz" for os, arch in release.PLATFORMS}
    assert set(files) == plugins | {
        f"dist/shoal-{__version__}.tgz",
        f"dist/shoal-{__version__}-py3-none-any.whl",
        "dist/shoal.yaml",
        "dist/sbom.spdx.json",
    }
    assert all((checkout / each).stat().st_size for each in files)
    assert (checkout / "notes.md").read_text().strip() == release.notes(__version__)
    packages = {each["name"] for each in json.loads((dist / "sbom.spdx.json").read_text())["packages"]}
    locked = "".join(
        (checkout / "lock" / f"{image}.txt").read_text() for image in ("operator", "ps", "worker")
    )
    assert set(re.findall(r"^([a-z0-9-]+)==", locked, re.MULTILINE)) <= packages
