"""`python -m pretrain export`: checkpoints of runs that ended or were interrupted, as folders that transformers loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from foundation.locks import FileLock
from packing.arrow import Pack, PackWriter
from pretrain.__main__ import main
from pretrain.checkpoint.folders import step_folder
from pretrain.model import huggingface
from tests.launcher.test_weights import masters, tensors

FSDP2 = ["--config_file", "accelerate_configs/fsdp2.yaml", "--mixed_precision", "no"]


def loaded(folder: Path, dtype: str = "auto") -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).named_parameters())


def export(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    status = main(["export", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> Path:
    """A tokenizer.json that knows three words."""
    Tokenizer(models.WordLevel({"[PAD]": 0, "[EOS]": 1, "one": 2}, unk_token="[PAD]")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.fixture(scope="module")
def exact(start_here: Callable, recipe_for: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in exact BF16 whose last two thirds are lost, and with them its exported model."""
    folder = tmp_path_factory.mktemp("export")
    run = start_here(recipe_for(folder / "run"), folder, "precision=bf16", "weights=bf16_exact")
    assert run.status == 0, run.output
    for step in (8, 12):
        shutil.rmtree(step_folder(run.run_dir / "checkpoints", step))
    shutil.rmtree(run.run_dir / "final")
    return run.run_dir


def test_an_interrupted_run_is_exported_as_it_stores_its_weights(
    exact: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", "/proc")  # nothing is written but into the folder
    status, said = export(capsys, exact, tmp_path / "out")
    assert status == 0 and "step-00000004 is exported" in said and "weights in bf16; without a tokenizer" in said
    found, saved = loaded(tmp_path / "out"), tensors(exact, "model")
    assert found.keys() == saved.keys() and all(torch.equal(found[name], saved[name]) for name in saved)
    assert all(weight.dtype == torch.bfloat16 for weight in found.values())
    assert "trained on 1.02k tokens in 4 steps" in (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "out" / "loss.png").stat().st_size > 1000
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_fp32_of_exact_weights_joins_each_with_its_remainder(exact: Path, tmp_path: Path, capsys: Any):
    status, said = export(capsys, step_folder(exact / "checkpoints", 4), tmp_path / "out", "--dtype", "fp32")
    assert status == 0 and "each joined with its remainder" in said
    found, expected = loaded(tmp_path / "out"), masters(exact)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert any((weight != weight.bfloat16()).any() for weight in found.values())


def test_shards_of_two_processes_sample_and_are_exported_whole_and_final_holds_the_same(
    train_as_ranks: Callable, small_recipe: dict[str, Any], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w60").save_pretrained(tmp_path / "words")
    rng = np.random.default_rng(0)
    with PackWriter(tmp_path / "packs", 32) as writer:  # nothing held out, whose evaluation would leave some parameters gathered
        for _ in range(16):
            writer.add("train", Pack(rng.integers(61, size=32).astype(np.uint32), np.array([32], dtype=np.int32)))
        writer.finish(settings={}, statistics={}, tokenizer=None)
    data = {"packs": str(tmp_path / "packs"), "length": 32, "tokenizer": str(tmp_path / "words")}
    recipe = small_recipe | {"data": data, "evaluate": {"samples": ["w1 w2", ""], "sample_tokens": 8}}
    recipe["model"]["config"]["tie_word_embeddings"] = False  # then no other group holds the embedding
    run = train_as_ranks("train.steps=4", recipe=recipe, launch=FSDP2)
    assert run.status == 0, run.output
    assert run.output.count("sample after") == 2
    monkeypatch.setattr(huggingface, "EXPORTED_BYTES", 20_000)  # several files, with an index
    assert export(capsys, run.run_dir, tmp_path / "out")[0] == 0
    assert len(list((tmp_path / "out").glob("model-0000?-of-0000?.safetensors"))) > 1
    found, final = loaded(tmp_path / "out"), loaded(run.run_dir / "final")
    assert found.keys() == final.keys() and all(torch.equal(found[name], final[name]) for name in final)


def test_experts_that_are_stored_one_by_one_are_exported_so(tmp_path: Path):
    config = {"model_type": "mixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    hf = AutoModelForCausalLM.from_config(huggingface.CONFIG_MAPPING["mixtral"](**config))
    hf.save_pretrained(tmp_path / "theirs")
    huggingface.export(hf, hf.state_dict().__getitem__, None, tmp_path / "ours")
    assert (tmp_path / "ours/model.safetensors").read_bytes() == (tmp_path / "theirs/model.safetensors").read_bytes()


def test_the_runs_tokenizer_goes_along(exact: Path, tmp_path: Path, capsys: Any, word_tokenizer: Path):
    run = shutil.copytree(exact, tmp_path / "run")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("tokenizer: null", f"tokenizer: {word_tokenizer}"))
    status, said = export(capsys, run, tmp_path / "out")
    assert status == 0 and "a tokenizer" not in said
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("one").input_ids == [2]


def test_what_exists_is_not_written_over_and_damage_is_named_with_its_file(exact: Path, tmp_path: Path, capsys: Any):
    (tmp_path / "out").mkdir()
    status, said = export(capsys, exact, tmp_path / "out")
    assert status == 2 and f"{tmp_path / 'out'}: exists" in said
    among = exact / "checkpoints" / "step-00000099"
    status, said = export(capsys, exact, among)
    assert status == 2 and f"{among}: {among.parent} is for a run's checkpoints" in said and not among.exists()
    (tmp_path / "file").write_text("")
    status, said = export(capsys, exact, tmp_path / "file" / "out")
    assert status == 2 and f"{tmp_path / 'file'} cannot be made" in said

    run = shutil.copytree(exact, tmp_path / "run")
    file = next((run / "checkpoints").glob("*/model-*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    status, said = export(capsys, run, tmp_path / "other")
    assert status == 2 and file.name in said and "damaged" in said and not (tmp_path / "other").exists()
    shutil.copytree(exact / "checkpoints" / "step-00000004", run / "checkpoints" / "step-00000002")
    status, said = export(capsys, run, tmp_path / "other")
    assert status == 0 and "the one before it is" in said and "step-00000002 is exported" in said


def test_two_exports_to_one_folder_do_not_write_over_each_other(exact: Path, tmp_path: Path, capsys: Any):
    with FileLock(tmp_path / ".out.lock", pytest.fail):  # as the first of them holds it
        status, said = export(capsys, exact, tmp_path / "out")
    assert status == 2 and f"{tmp_path / 'out'}: is being exported to by process " in said and not (tmp_path / "out").exists()
    status, said = export(capsys, exact, tmp_path / "out")
    assert status == 0 and [path.name for path in tmp_path.iterdir()] == ["out"], said


def test_a_checkpoint_of_other_shapes_than_its_runs_settings_is_no_model(exact: Path, tmp_path: Path, capsys: Any):
    run = shutil.copytree(exact, tmp_path / "run")
    config = run / "config.yaml"
    values = yaml.safe_load(config.read_text())
    values["model"]["config"]["intermediate_size"] += 1
    config.write_text(yaml.safe_dump(values))
    for command in (["export", str(run), str(tmp_path / "out")], ["sample", str(run), "one"]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert "has the shape" in said and f"in the model of {config}; put the model's settings there back" in said
    assert not (tmp_path / "out").exists()
    assert main(["sample", str(exact), "\udcff"]) == 2 and "PROMPT '\\udcff': text that is not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["nothing", "no run", "a run before its first save", "its final"])
def test_a_folder_without_a_checkpoint_or_a_run_around_it_is_refused(what: str, exact: Path, tmp_path: Path, capsys: Any):
    source = tmp_path / "nothing"
    if what == "no run":
        source = shutil.copytree(exact / "checkpoints" / "step-00000004", tmp_path / "a" / "b" / "step-00000004")
    elif what == "a run before its first save":
        source.mkdir()
        shutil.copy(exact / "config.yaml", source)
    elif what == "its final":
        (source := tmp_path / "run" / "final").mkdir(parents=True)
        (source / "config.json").touch()
    status, said = export(capsys, source, tmp_path / "out")
    assert status == 2 and ("its model is not known" in said if what == "no run" else f"{source}: no checkpoint is there" in said)


def test_the_best_is_one_of_a_runs_checkpoints_and_no_checkpoint_itself(exact: Path, tmp_path: Path, capsys: Any):
    checkpoint = step_folder(exact / "checkpoints", 4)
    status, said = export(capsys, checkpoint, tmp_path / "out", "--best")
    assert status == 2 and f"--best {checkpoint}: is no run folder" in said and "leave --best out" in said
    assert not (checkpoint / "best").exists() and not (tmp_path / "out").exists()
