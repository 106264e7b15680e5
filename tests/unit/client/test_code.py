"""The code that travels: files as they are, packages and much code as an archive, and what is refused."""

from __future__ import annotations

import base64
import io
import os
import re
import secrets
import zipfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.client.code import MAX_BYTES, MAX_FILE, content, read
from shoal.client.manifest import Submission, manifests
from shoal.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "digits.py").write_text("import layers.wide\njob = 1\n")
    (tmp_path / "layers" / "deep").mkdir(parents=True)
    for name in ("__init__.py", "wide.py", "deep/__init__.py"):
        (tmp_path / "layers" / name).write_text(f"# {name}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def unpacked(of: dict[str, object] | bytes) -> dict[str, str]:
    assert isinstance(of, dict)
    data = of["binaryData"]
    assert isinstance(data, dict)
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(data["code.zip"]))) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_a_package_travels_with_the_script(folder: Path) -> None:
    made = manifests(
        Submission(entrypoint="digits.py:job", storage="s3://bucket/runs", files=["layers"], name="mine")
    )
    assert made.code is not None
    assert sorted(unpacked(made.code)) == [
        "digits.py",
        "layers/__init__.py",
        "layers/deep/__init__.py",
        "layers/wide.py",
    ]
    again = manifests(
        Submission(entrypoint="digits.py:job", storage="s3://bucket/runs", files=["layers"], name="mine")
    )
    assert made == again


def test_a_folder_that_is_no_package_is_its_files(folder: Path) -> None:
    assert content(read(["."])) == {"data": {"digits.py": "import layers.wide\njob = 1\n"}}


def test_the_mark_of_an_editor_of_windows_does_not_travel(folder: Path) -> None:
    """A manifest with it would have the code as one quoted string."""
    (folder / "digits.py").write_text("\ufeffjob = 1\n")
    assert read(["digits.py"]) == {"digits.py": "job = 1\n"}


def test_much_code_is_compressed_and_too_much_is_an_archive_alone(folder: Path) -> None:
    much = {"digits.py": "job = 1\n" + "x = 'a line of code like the others'\n" * 40_000}
    assert len(much["digits.py"]) > MAX_BYTES
    assert unpacked(content(much)) == much
    archive = content({"digits.py": secrets.token_hex(MAX_BYTES)[:-1] * 3})
    assert isinstance(archive, bytes)
    assert len(archive) > MAX_BYTES


@given(st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=260))
@example("größe.py")
@example("..data")
@example(".")
@example("a" * 254)
def test_a_config_map_gets_only_keys_that_it_may_have(name: str) -> None:
    """As Kubernetes validates them (IsConfigMapKey). Python imports other names from an archive."""
    may = re.fullmatch("[-._a-zA-Z0-9]{1,253}", name) and name != "." and not name.startswith("..")
    made = content({name: "job = 1\n"})
    assert made == {"data": {name: "job = 1\n"}} if may else unpacked(made) == {name: "job = 1\n"}


def test_a_file_that_could_not_be_opened_there_is_to_be_renamed(folder: Path) -> None:
    (folder / "my notes.txt").write_text("notes")
    with pytest.raises(UsageError, match=r"cannot take my notes.txt along: .* rename it"):
        read(["my notes.txt"])


def test_two_files_of_one_name(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "digits.py").write_text("job = 2\n")
    with pytest.raises(UsageError, match=r"two files are named digits.py"):
        read(["digits.py", "sub"])
    assert read(["sub"]) == {"digits.py": "job = 2\n"}


def test_code_in_another_encoding_is_to_be_saved_anew(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_bytes("# coding: latin-1\nname = 'größe'\n".encode("latin-1"))
    with pytest.raises(
        UsageError, match=r"old.py along: code travels in UTF-8: save it so, without a coding line$"
    ):
        read([str(tmp_path / "old.py")])


@pytest.mark.parametrize("what", ["/dev/zero", "a pipe", "a large file"])
def test_what_has_no_end_or_is_too_large_for_code_is_not_read(tmp_path: Path, what: str) -> None:
    path = Path(what) if what.startswith("/") else tmp_path / "a.py"
    if what == "a pipe":
        os.mkfifo(path)
    elif what == "a large file":
        with path.open("wb") as file:
            file.truncate(MAX_FILE + 1)
    with pytest.raises(
        UsageError, match=r"along: it is no file of at most 64 MiB\. .* data and models belong"
    ):
        read([path])


def test_what_is_no_code_is_sent_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"\xff\x00")
    with pytest.raises(UsageError, match=r"weights.bin along: .* data and models belong in a bucket"):
        read([str(tmp_path / "weights.bin")])
