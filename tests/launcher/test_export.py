"""`python -m pretrain export` and `sample`: checkpoints of runs that were interrupted, as folders that transformers loads, and
`--push`, as far as what huggingface_hub is asked for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HTTPError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pretrain.__main__ import main
from tests.conftest import contents


@pytest.fixture(scope="module")
def exact(start_here: Callable, recipe_for: Callable, words: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in exact BF16 that was killed between its last save and its export."""
    folder = tmp_path_factory.mktemp("export")
    recipe = recipe_for(folder / "run") | {"precision": "bf16", "weights": "bf16_exact", "train": {"steps": 8}}
    recipe["data"] |= {"tokenizer": str(words)}
    run = start_here(recipe, folder, "parity=off")
    assert run.status == 0, run.output
    shutil.rmtree(run.run_dir / "final")
    return run.run_dir


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").named_parameters())


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    status = main([*map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_a_run_is_exported_as_it_stores_its_weights_with_its_tokenizer_and_card(
    exact: Path, words: Path, tmp_path: Path, capsys: Any
) -> None:
    before = contents(exact)
    status, output = command(capsys, "export", exact, tmp_path / "out")
    assert status == 0 and "step-00000008" in output and contents(exact) == before
    saved = {name: tensor for file in exact.glob("checkpoints/step-00000008/model*") for name, tensor in load_file(file).items()}
    exported = loaded(tmp_path / "out")
    assert all(weight.dtype == torch.bfloat16 for weight in exported.values())
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("w1 w2").input_ids == [1, 2]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert "in 8 steps" in (tmp_path / "out" / "README.md").read_text()


def test_fp32_of_exact_weights_rounds_to_them(exact: Path, tmp_path: Path, capsys: Any) -> None:
    for name, options in (("bf16", ()), ("fp32", ("--dtype", "fp32"))):
        assert command(capsys, "export", exact / "checkpoints" / "step-00000004", tmp_path / name, *options)[0] == 0
    narrow, wide = loaded(tmp_path / "bf16"), loaded(tmp_path / "fp32")
    assert all(torch.allclose(wide[name], narrow[name].float(), rtol=2**-8, atol=0) for name in narrow)
    assert any((weight != weight.bfloat16()).any() for weight in wide.values())


def test_what_exists_is_not_written_over_and_damage_is_named(exact: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    status, output = command(capsys, "export", exact, tmp_path / "out")
    assert status == 2 and str(tmp_path / "out") in output and [*contents(tmp_path / "out")] == ["thesis.tex"]
    run = shutil.copytree(exact, tmp_path / "run")
    for file in (run / "checkpoints").glob("*/model*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    status, output = command(capsys, "export", run, tmp_path / "other")
    assert status == 2 and "damaged" in output and not (tmp_path / "other").exists()


def test_an_export_continues_a_text_by_its_seed_and_by_its_cards_own_code(
    exact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert command(capsys, "export", exact, tmp_path / "out")[0] == 0
    texts = [
        command(capsys, "sample", tmp_path / "out", "w3", "--prompt", "w1 w2", "--max-new-tokens", 8, "--seed", seed)
        for seed in (1, 2, 1)
    ]
    assert [status for status, _ in texts] == [0] * 3 and texts[0] == texts[2] != texts[1]
    monkeypatch.chdir(tmp_path / "out")
    code = Path("README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


# ── To a hub ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────

REPOSITORY = "somebody/small-one"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """What somebody who is logged in asks huggingface_hub to make and to upload."""
    asked: dict[str, dict[str, Any]] = {}

    def create_repo(self: HfApi, repo_id: str, **options: Any) -> None:
        asked["made"] = {"repo_id": repo_id} | options

    def upload_folder(self: HfApi, **options: Any) -> SimpleNamespace:
        asked["pushed"] = options
        return SimpleNamespace(commit_url=f"https://hub/{REPOSITORY}/commit/1")

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    return asked


def test_what_export_wrote_is_pushed_in_place_of_an_earlier_pushs_shards(
    exact: Path, hub: dict, tmp_path: Path, capsys: Any
) -> None:
    status, output = command(capsys, "export", exact, tmp_path / "out", "--push", REPOSITORY)
    assert status == 0 and f"https://hub/{REPOSITORY}/commit/1" in output
    assert hub["made"] == {"repo_id": REPOSITORY, "private": True, "exist_ok": True}
    message = hub["pushed"].pop("commit_message")
    assert "step-00000008" in message
    asked = {"repo_id": REPOSITORY, "folder_path": tmp_path / "out", "delete_patterns": "model*.safetensors*"}
    assert hub["pushed"] == asked and (tmp_path / "out" / "model.safetensors").exists()


def test_what_the_hub_refuses_is_one_message_before_anything_is_written(
    exact: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(name: str = REPOSITORY) -> str:
        status, output = command(capsys, "export", exact, tmp_path / "out", "--push", name)
        assert status == 2 and output.startswith("error: --push") and not (tmp_path / "out").exists()
        return output

    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    for name in ("small-one", "a/b/c", "../small", "somebody/small--one"):
        assert "OWNER/NAME" in refused(name) or name in refused(name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "offline" in refused()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    assert "127.0.0.1:9" in refused()
    monkeypatch.delenv("HF_TOKEN")
    assert "HF_TOKEN" in refused()


def test_an_export_that_is_not_pushed_is_whole_and_says_how_to_push_it(
    exact: Path, hub: dict, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def upload_folder(self: HfApi, **_: Any) -> None:
        raise HTTPError("This storage is full")

    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    status, output = command(capsys, "export", exact, tmp_path / "out", "--push", REPOSITORY)
    assert status == 2 and f"hf upload {REPOSITORY} {tmp_path / 'out'}" in output and "storage is full" in output
    assert (tmp_path / "out" / "model.safetensors").exists()
