"""A parity that has passed is remembered, for what it was measured on alone, and a damaged memory is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pretrain.verify.kept import KeptResult, folder

PASSED = {"failures": [], "plain": {"loss": 1.0, "tensors_compared": 3}}


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


@pytest.mark.parametrize("name", ["NVTE_FUSED_ATTN", "CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_FREEZING", "ATEN_CPU_CAPABILITY"])
def test_a_variable_that_kernels_are_chosen_by_makes_another_subject(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptResult({"device": "CPU"})
    kept.write(PASSED)
    monkeypatch.setenv(name, "default")
    assert kept.read() is None


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "TRITON_CACHE_DIR", "TORCHELASTIC_RUN_ID", "HOME_OF_TORCH"])
def test_what_says_where_things_lie_does_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptResult({"device": "CPU"})
    kept.write(PASSED)
    monkeypatch.setenv(name, "7")
    assert kept.read() is not None


def test_a_file_that_was_copied_from_another_subject_is_none() -> None:
    one, other = KeptResult({"device": "H200"}), KeptResult({"device": "CPU"})
    one.write(PASSED)
    other.path.write_bytes(one.path.read_bytes())
    assert one.read() is not None and other.read() is None


@pytest.mark.parametrize("record", [{"failures": []}, {"failures": [], "plain": {"tensors_compared": 0}}])
def test_a_result_without_figures_is_none(record: dict) -> None:
    kept = KeptResult({})
    kept.write(record)
    assert kept.read() is None


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
