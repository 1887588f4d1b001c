"""A parity that has passed is remembered, for what it was measured on alone, and a damaged memory is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pretrain.verify.kept import KeptResult, folder

PASSED = {"failures": [], "plain": {"loss": 1.0}}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_was_kept_is_read_and_says_where_it_comes_from(cache: Path) -> None:
    kept = KeptResult({"device": "CPU", "precision": "bf16"})
    assert kept.read() is None
    kept.write(PASSED)
    found = kept.read()
    assert found["plain"] == PASSED["plain"] and found["source"].startswith("kept from 20")
    assert Path(found["kept_in"]).is_relative_to(cache)


def test_another_subject_or_other_code_is_not_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    KeptResult({"device": "CPU"}).write(PASSED)
    assert KeptResult({"device": "H200"}).read() is None
    monkeypatch.setattr("pretrain.verify.kept.code_hash", lambda: "other")
    assert KeptResult({"device": "CPU"}).read() is None
    monkeypatch.undo()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b"{}", b'{"version": 1, "date": "x", "parity": 3}', b"null"])
def test_a_damaged_file_is_as_none(content: bytes) -> None:
    kept = KeptResult({})
    kept.write(PASSED)
    kept.path.write_bytes(content)
    assert kept.read() is None


def test_a_failure_in_the_file_is_never_taken_for_a_pass() -> None:
    kept = KeptResult({})
    kept.write(PASSED | {"failures": ["loss"]})
    assert kept.read() is None


def test_a_folder_that_cannot_be_read_or_written_is_no_error(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    kept = KeptResult({})
    kept.write(PASSED)
    assert kept.read() is None


def test_a_relative_cache_home_is_ignored_as_the_specification_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert folder() == Path.home() / ".cache" / "pretrain" / "parity"


def test_nothing_half_written_is_left(cache: Path) -> None:
    kept = KeptResult({})
    kept.write(PASSED)
    kept.write(PASSED)
    (file,) = [path for path in cache.rglob("*") if path.is_file()]
    assert json.loads(file.read_text())["parity"] == PASSED
