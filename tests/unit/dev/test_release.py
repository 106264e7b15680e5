"""The release: each step that needs no registry is run, and the workflow is compared with what there is."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from dev import release
from dev.cli import main as dev
from dev.errors import DevError
from dev.images import IMAGES
from dev.paths import ROOT
from dev.publish import reference
from dev.tools.build import ensure, go_environment
from shoal import __version__
from tests.unit.docs.pages import block

WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/release.yaml").read_text(encoding="utf-8"))
JOBS: dict[str, dict[str, Any]] = WORKFLOW["jobs"]


def steps(name: str) -> list[dict[str, Any]]:
    return list(JOBS[name].get("steps", ()))


def commands() -> Iterator[list[str]]:
    """The commands of all steps, split into words."""
    for name in JOBS:
        for step in steps(name):
            for line in step.get("run", "").splitlines():
                yield shlex.split(line)


# --- the workflow ----------------------------------------------------------------------------------------------------


def test_its_commands_and_their_options_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = set()
    for words in commands():
        if words and words[0] == "make":
            assert words[1] in targets
        found = re.search(r"-m dev release (\w+)(.*?)(?:\)|>|$)", " ".join(words))
        if found is None:
            continue
        used.add(found[1])
        group = dev.commands["release"]
        assert isinstance(group, click.Group)
        command = group.commands[found[1]]
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"--[a-z]+", found[2])) <= known
    assert used == {"check", "images", "notes", "chart", "wheel", "plugin", "krew"}


def test_jobs_wait_for_what_they_use_and_have_no_more_rights_than_they_need() -> None:
    assert WORKFLOW[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    assert WORKFLOW["permissions"] == {"contents": "read"}
    signing = {name for name in JOBS if JOBS[name].get("permissions", {}).get("id-token") == "write"}
    assert signing == {"images", "chart", "publish"}
    assert {name for name in JOBS if JOBS[name].get("permissions", {}).get("contents") == "write"} == {
        "publish"
    }
    for name, job in JOBS.items():
        needed = job.get("needs", [])
        assert set([needed] if isinstance(needed, str) else needed) <= JOBS.keys()
        for used in re.findall(r"needs\.(\w+)\.outputs\.(\w+)", json.dumps(job)):
            assert used[0] == needed, name
            assert used[1] in JOBS[used[0]]["outputs"]
        signs = any("cosign sign" in step.get("run", "") for step in steps(name))
        assert signs == any("cosign-installer" in step.get("uses", "") for step in steps(name)), name
        for used in re.findall(r"steps\.(\w+)\.", json.dumps(job)):
            assert used in {step.get("id") for step in steps(name)}
        for used in set(re.findall(r"matrix\.image\.(\w+)", json.dumps(job))):
            assert all(used in image for image in json.loads(release.matrix()))


def test_images_are_those_of_the_dockerfiles_and_have_the_names_of_the_chart() -> None:
    published = {image["name"]: image for image in json.loads(release.matrix())}
    assert set(published) == {"operator", "ps", "worker", "worker-gpu"}
    for image in published.values():
        text = (ROOT / image["context"] / image["file"]).read_text()
        assert not image["target"] or re.search(rf"^FROM .* AS {image['target']}$", text, re.MULTILINE)
    [build] = [step for step in steps("images") if step.get("uses", "").startswith("docker/build-push")]
    assert (build["with"]["sbom"], build["with"]["provenance"]) == (True, "mode=max")
    [check] = [step for step in steps("check") if step.get("id") == "images"]
    assert "version=${GITHUB_REF_NAME#v}" in check["run"]
    tag = (
        build["with"]["tags"]
        .replace("${{ vars.REGISTRY }}", "r.io/team")
        .replace("${{ matrix.image.name }}", "operator")
        .replace("${{ needs.check.outputs.version }}", __version__)
    )
    assert tag == reference(IMAGES["operator"], "r.io/team", __version__)


def before(name: str) -> set[str]:
    """The jobs that a job waits for, and those that these wait for."""
    needed = JOBS[name].get("needs", [])
    direct = {needed} if isinstance(needed, str) else set(needed)
    return direct.union(*map(before, direct))


def test_nothing_is_published_before_all_tests_have_passed() -> None:
    assert JOBS["test"]["uses"] == "./.github/workflows/test.yaml"
    tests = yaml.safe_load((ROOT / ".github/workflows/test.yaml").read_text(encoding="utf-8"))
    assert "workflow_call" in tests[True]
    assert all("test" in before(name) for name in JOBS.keys() - {"test"})


def test_what_is_cached_is_below_a_folder_that_the_action_takes() -> None:
    """It refuses `..`, and the job's own `env` knows no runner."""
    tests = yaml.safe_load((ROOT / ".github/workflows/test.yaml").read_text(encoding="utf-8"))
    job = tests["jobs"]["all"]
    [cached] = [step["with"]["path"] for step in job["steps"] if "actions/cache" in step.get("uses", "")]
    assert cached == "${{ env.XDG_CACHE_HOME }}/shoal"
    assert "env" not in job
    assert job["steps"][0] == {"run": 'echo "XDG_CACHE_HOME=$RUNNER_TEMP/cache" >>"$GITHUB_ENV"'}


def test_all_tests_run_with_the_whole_history() -> None:
    """Without it tests/control_plane/test_upgrade.py is skipped, the only test that nothing restarts."""
    tests = yaml.safe_load((ROOT / ".github/workflows/test.yaml").read_text(encoding="utf-8"))
    [clone] = [each for each in tests["jobs"]["all"]["steps"] if "actions/checkout" in each.get("uses", "")]
    assert clone["with"]["fetch-depth"] == 0


def test_the_plugin_is_built_for_every_platform() -> None:
    built = {(each["os"], each["arch"]) for each in JOBS["plugin"]["strategy"]["matrix"]["include"]}
    assert built == release.PLATFORMS


def test_the_plugin_is_built_of_what_is_locked() -> None:
    """pip would fetch the newest hatchling into a place of its own."""
    locked, own = [words[4:] for words in commands() if words[:4] == ["python", "-m", "pip", "install"]]
    assert locked == ["--require-hashes", "-r", "lock/plugin.txt"]
    assert {"--no-deps", "--no-build-isolation"} <= set(own)
    names = re.findall(r"^([a-z0-9-]+)==", (ROOT / "lock/plugin.txt").read_text(), re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {each.partition(">")[0] for each in project["build-system"]["requires"]} <= set(names)


def in_checks(*words: str) -> subprocess.CompletedProcess[str]:
    """A command of the module of checks, compiled at its first run."""
    return subprocess.run(
        words, cwd=ROOT / "dev/checks", env=go_environment(), capture_output=True, text=True, check=False
    )


@pytest.mark.nightly  # a tool of Go is built for it
def test_actionlint_finds_nothing() -> None:
    words = ["go", "tool", "actionlint", *map(str, (ROOT / ".github/workflows").glob("*.yaml"))]
    done = in_checks(*words)
    assert done.returncode == 0, done.stdout + done.stderr


# --- its steps -------------------------------------------------------------------------------------------------------


def test_a_tag_must_be_the_version_of_everything() -> None:
    release.check(f"v{__version__}")
    with pytest.raises(DevError, match=r"the tag is 9\.9\.9, shoal is"):
        release.check("v9.9.9")


def test_notes_are_the_section_of_the_version() -> None:
    assert release.notes(__version__).startswith("**To train**")
    with pytest.raises(DevError, match=r"says nothing about 0\.0\.7"):
        release.notes("0.0.7")


def test_the_wheel_has_the_page_the_commands_and_the_trainer(tmp_path: Path) -> None:
    with zipfile.ZipFile(release.build_wheel(tmp_path)) as wheel:
        names = set(wheel.namelist())
        assert {"shoal/page/static/index.html", "shoal/cli/__init__.py", "shoal/py.typed"} <= names
        assert {"shoal/sizing/accelerators.csv", "shoal_trainer/contract/__init__.py"} <= names
        assert not [name for name in names if name.startswith(("tests/", "dev/", "benchmarks/"))]
        [entries] = [name for name in names if name.endswith("entry_points.txt")]
        assert "kubectl-shoal = shoal.cli:main" in wheel.read(entries).decode()


def test_the_packaged_chart_renders(tmp_path: Path) -> None:
    """As it is installed: without values."""
    package = release.package_chart(tmp_path, "r.io/team")
    helm = ensure(("helm",))["helm"]
    done = subprocess.run(
        [helm, "template", "shoal", str(package)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "kind: CustomResourceDefinition" in done.stdout
    [pod] = [
        document["spec"]["template"]["spec"]
        for document in yaml.safe_load_all(done.stdout)
        if document and document["kind"] == "Deployment"
    ]
    [container] = pod["containers"]
    environment = {each["name"]: each.get("value") for each in container["env"]}
    published = {image["name"]: image["platforms"] for image in json.loads(release.matrix())}
    used = {
        "operator": container["image"],
        "ps": environment["SHOAL_IMAGE_PS"],
        "worker": environment["SHOAL_IMAGE_WORKER"],
    }
    assert used == {name: reference(IMAGES[name], "r.io/team", __version__) for name in used}
    assert {published[name] for name in used} == {"linux/amd64,linux/arm64"}, "so no selector names one"
    assert pod["nodeSelector"] == {"kubernetes.io/os": "linux"}
    assert environment["SHOAL_NODE_SELECTOR"] == "kubernetes.io/os=linux"
    with tarfile.open(package) as archive:
        assert "shoal/README.md" in archive.getnames(), "`helm show readme`"


def test_a_release_replaces_each_line_of_the_values_once() -> None:
    with pytest.raises(DevError, match="has 0 times"):
        release.published_values("image: {}", "r.io/team")


@pytest.mark.nightly  # a tool of Go is built for it
def test_krew_accepts_its_manifest(tmp_path: Path) -> None:
    for os_name, architecture in release.PLATFORMS:
        (tmp_path / f"kubectl-shoal_{os_name}_{architecture}.tar.gz").write_bytes(architecture.encode())
    path = release.krew_manifest(tmp_path, "https://example.com/v1", "https://example.com")

    def accepted() -> subprocess.CompletedProcess[str]:
        return in_checks("go", "tool", "validate-krew-manifest", "-skip-install", f"-manifest={path}")

    assert accepted().returncode == 0, accepted().stderr
    path.write_text(path.read_text().replace("sha256:", "sha:"))
    assert accepted().returncode != 0
    with pytest.raises(DevError, match="has no archive"):
        release.krew_manifest(tmp_path / "nowhere", "https://example.com", "https://example.com")


@pytest.mark.nightly
def test_the_steps_on_the_page_make_a_release_whose_plugin_runs(tmp_path: Path) -> None:
    """In a copy, in an environment of its own, with what the workflow installs."""
    checkout, environment = tmp_path / "checkout", tmp_path / "venv"
    shutil.copytree(
        ROOT, checkout, ignore=shutil.ignore_patterns(".*cache", ".git", ".venv", "build", "dist")
    )
    python = str(environment / "bin" / "python")
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", str(environment)], check=True)
    installs = [words[4:] for words in commands() if words[:4] == ["python", "-m", "pip", "install"]]
    for install in installs:
        subprocess.run(
            [*uv, "pip", "install", "--quiet", "--python", python, *install], cwd=checkout, check=True
        )
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    env = {**os.environ, "PATH": f"{environment / 'bin'}:{os.environ['PATH']}"}
    for command in block("dev/README.md", "python -m dev release check").commands:
        words = [word.replace("amd64", machine) for word in command.words]
        done = subprocess.run(words, cwd=checkout, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        made = done.stdout.split()
        assert len(made) == (words[4] != "check"), "the file that it made"
        assert all((checkout / name).exists() for name in made)
    with tarfile.open(checkout / f"dist/kubectl-shoal_linux_{machine}.tar.gz") as archive:
        archive.extractall(tmp_path / "plugin", filter="data")
    plugin = str(tmp_path / "plugin" / "kubectl-shoal")
    for more in (["--version"], ["plan", "--help"], ["submit", "--help"]):
        done = subprocess.run([plugin, *more], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    view = [python, "-m", "PyInstaller.utils.cliutils.archive_viewer", "--list", "--recursive", plugin]
    listed = subprocess.run(view, capture_output=True, text=True, check=True).stdout
    for store in ("s3fs.core", "gcsfs.core", "aiobotocore.session"):
        assert f"'{store}'" in listed
