"""The tag of images that are built from a clone: another one for each commit, since a node keeps the image of a tag."""

from __future__ import annotations

import subprocess
from pathlib import Path

from dev.images import GPU, IMAGES
from dev.publish import next_steps, reference, tag_of
from shoal import __version__


def git(clone: Path, *words: str) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    return subprocess.run(
        ["git", *author, *words], cwd=clone, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_tag_names_the_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "--quiet", "--message", "one")
    commit = git(tmp_path, "rev-parse", "--short", "HEAD")
    assert tag_of(tmp_path) == f"{__version__}-{commit}"
    (tmp_path / "b").write_text("of nobody's concern, but perhaps part of an image")
    assert tag_of(tmp_path) == f"{__version__}-{commit}-dirty"


def test_the_next_steps_name_all_images_of_jobs_by_one_tag() -> None:
    """`make images` builds none with CUDA, and an upgrade keeps the old name: its workers would wait for ever."""
    install, upgrade, gpu = next_steps("r.io/team", "2").split("\n\n")[::2]
    assert install.startswith("helm install")
    assert upgrade.startswith("helm upgrade")
    for image in (IMAGES["ps"], IMAGES["worker"]):
        assert reference(image, "r.io/team", "2") in upgrade
    assert f"--set-string trainer.workerGpuImage={reference(GPU, 'r.io/team', '2')}" in gpu


def test_an_archive_without_history_has_the_version(tmp_path: Path) -> None:
    assert tag_of(tmp_path) == __version__
