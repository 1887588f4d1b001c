"""Test `python -m pretrain export` and `sample` on checkpoints of interrupted runs."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from packing.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from pretrain.__main__ import main
from tests.conftest import contents, flip


@pytest.fixture(scope="module")
def exact(
    start_here: Callable,
    recipe_for: Callable,
    words: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Folder of a run in exact BF16 that was killed between its last save and its export."""
    folder = tmp_path_factory.mktemp("export")
    recipe = recipe_for(folder / "run") | {
        "precision": "bf16",
        "weights": "bf16_exact",
        "train": {"steps": 8},
    }
    # The token w59 ends an answer.
    tokenizer = AutoTokenizer.from_pretrained(words, extra_special_tokens=["w59"])
    tokenizer.save_pretrained(folder / "tokenizer")
    template = "{% for m in messages %}{{ m.role }} w1 {{ m.content }} w59 {% endfor %}"
    recipe["data"] |= {"tokenizer": str(folder / "tokenizer"), "chat_template": template}
    run = start_here(recipe, folder, "parity=off")
    assert run.status == 0, run.output
    shutil.move(run.run_dir / "final", folder / "final")
    return run.run_dir


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").named_parameters())


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    status = main([*map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_an_export_has_the_stored_weights_tokenizer_and_card(
    exact: Path, words: Path, tmp_path: Path, capsys: Any
) -> None:
    before = contents(exact)
    status, output = command(capsys, "export", exact, "--out", tmp_path / "out")
    assert status == 0
    assert "step-00000008" in output
    assert contents(exact) == before
    saved = {
        name: tensor
        for file in exact.glob("checkpoints/step-00000008/model*")
        for name, tensor in load_file(file).items()
    }
    exported = loaded(tmp_path / "out")
    assert all(weight.dtype == torch.bfloat16 for weight in exported.values())
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("w1 w2").input_ids == [1, 2]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "in 8 steps" in card and "mean of steps 1 to 8" in card


def test_the_end_of_an_answer_is_an_eos_token(exact: Path, tmp_path: Path, capsys: Any) -> None:
    status, output = command(capsys, "export", exact, "--out", tmp_path / "out")
    assert status == 0, output
    for folder in (exact.parent / "final", tmp_path / "out"):
        assert GenerationConfig.from_pretrained(folder).eos_token_id == [60, 59]


def test_fp32_of_exact_weights_rounds_to_them(exact: Path, tmp_path: Path, capsys: Any) -> None:
    checkpoint = exact / "checkpoints" / "step-00000004"
    for name, options in (("bf16", ()), ("fp32", ("--dtype", "fp32"))):
        status, _ = command(capsys, "export", checkpoint, "--out", tmp_path / name, *options)
        assert status == 0
    bf16 = loaded(tmp_path / "bf16")
    fp32 = loaded(tmp_path / "fp32")
    assert all(torch.allclose(fp32[name], bf16[name].float(), rtol=2**-8, atol=0) for name in bf16)
    assert any((weight != weight.bfloat16()).any() for weight in fp32.values())


def test_merge_exports_the_mean_of_the_last_checkpoints(
    exact: Path, tmp_path: Path, capsys: Any
) -> None:
    checkpoints = exact / "checkpoints"
    for step in (4, 8):
        source = checkpoints / f"step-{step:08}"
        assert (
            command(capsys, "export", source, "--out", tmp_path / str(step), "--dtype", "fp32")[0]
            == 0
        )
    four, eight = (loaded(tmp_path / name) for name in ("4", "8"))
    for dtype in (torch.float32, torch.bfloat16):
        options = ("--dtype", "fp32") if dtype == torch.float32 else ()
        out = tmp_path / str(dtype)
        status, output = command(capsys, "export", exact, "--out", out, "--merge", 2, *options)
        assert status == 0, output
        for name, weight in loaded(out).items():
            mean = (four[name].double() + eight[name].double()) / 2
            assert torch.equal(weight, mean.float().to(dtype)), name
    text = "mean weights of the checkpoints of steps 8, 4; the losses are those of the run"
    assert text in output
    assert f"| merged | {text} |" in (out / "README.md").read_text()
    for source, number in ((exact, 3), (checkpoints / "step-00000004", 2)):
        status, output = command(
            capsys, "export", source, "--out", tmp_path / "none", "--merge", number
        )
        assert status == 2
        assert f" can be merged instead of {number}, " in output and "checkpoint.keep" in output
        assert not (tmp_path / "none").exists()


def test_a_link_to_a_checkpoint_is_merged_with_earlier_ones(
    exact: Path, tmp_path: Path, capsys: Any
) -> None:
    link = exact / "checkpoints" / "newest"
    link.symlink_to("step-00000008")
    try:
        status, output = command(capsys, "export", link, "--out", tmp_path / "merged", "--merge", 2)
    finally:
        link.unlink()
    assert status == 0, output
    assert "checkpoints of steps 8, 4" in output


def test_what_exists_is_not_written_over_and_damage_is_named(
    exact: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    status, output = command(capsys, "export", exact, "--out", tmp_path / "out")
    assert status == 2
    assert str(tmp_path / "out") in output
    assert [*contents(tmp_path / "out")] == ["thesis.tex"]
    run = shutil.copytree(exact, tmp_path / "run")
    for file in (run / "checkpoints").glob("*/model*.safetensors"):
        flip(file)
    status, output = command(capsys, "export", run, "--out", tmp_path / "other")
    assert status == 2
    assert "damaged" in output
    assert not (tmp_path / "other").exists()


def test_a_foreign_model_is_sampled_without_its_code_and_its_kernels(
    exact: Path,
    tmp_path: Path,
    capsys: Any,
) -> None:
    assert command(capsys, "export", exact, "--out", tmp_path / "out")[0] == 0
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"attn_implementation": "kernels-community/flash-attn2"}))
    assert command(capsys, "sample", tmp_path / "out", "w1", "--tokens", 2)[0] == 0
    foreign = {"model_type": "unknown", "auto_map": {"AutoConfig": "code.Config"}}
    file.write_text(json.dumps(config | foreign))
    status, output = command(capsys, "sample", tmp_path / "out", "w1")
    assert status == 2
    assert f"{tmp_path / 'out'} requires Python code" in output


def test_an_export_that_fails_leaves_no_files(
    exact: Path,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: Any,
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("foundation.files.fsync_tree", full)
    status, output = command(capsys, "export", exact, "--out", tmp_path / "out")
    assert status == 2
    assert "No space left" in output
    assert not [*tmp_path.iterdir()]


def test_an_export_continues_a_text_by_its_seed_and_by_its_cards_own_code(
    exact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert command(capsys, "export", exact, "--out", tmp_path / "out")[0] == 0
    sample = ("sample", tmp_path / "out", "w3", "w1 w2", "--tokens", 8)
    texts = [command(capsys, *sample, "--seed", seed) for seed in (1, 2, 1)]
    assert [status for status, _ in texts] == [0] * 3
    assert texts[0] == texts[2] != texts[1]
    monkeypatch.chdir(tmp_path / "out")
    code = Path("README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_a_run_goes_on_from_its_own_export_with_its_own_packs(
    train_here: Callable, small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    """Keep the tokenizer's fingerprint.

    AutoTokenizer would rebuild the tokenizer from the class in its config, with another
    fingerprint.
    """
    save_tokenizer(train_tokenizer(["one 12345 two 12345"] * 9, 300), tmp_path / "tokenizer")
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | {"tokenizer_class": "Qwen2Tokenizer"}))
    line = json.dumps({"text": "one 12345 two " * 9}) + "\n"
    (tmp_path / "texts.jsonl").write_text(line * 200)
    data = {"source": str(tmp_path / "texts.jsonl"), "tokenizer": str(tmp_path / "tokenizer")}
    small_recipe["data"] = data | {"packs": str(tmp_path / "packs"), "length": 32}
    small_recipe["model"]["config"].pop("vocab_size")
    first = train_here("train.steps=2", "evaluate.every=null", "evaluate.samples=[one 12345]")
    assert first.status == 0, first.output
    from_export = [
        f"model.source={first.run_dir / 'final'}",
        "model.config=null",
        f"run_dir={tmp_path / 'next'}",
    ]
    packs = f"data={{packs: {tmp_path / 'packs'}, length: 32}}"
    second = train_here(
        *from_export, packs, "train.steps=2", "evaluate.every=null", "evaluate.samples=[one 12345]"
    )
    assert second.status == 0, second.output
    fingerprints = [
        load_tokenizer(str(folder)).fingerprint
        for folder in (first.run_dir / "final", second.run_dir / "final")
    ]
    assert fingerprints == [load_tokenizer(str(tmp_path / "tokenizer")).fingerprint] * 2
