"""What somebody has changed since a run began: the config.json in the folder of `model.source`, or the tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.bad_input.test_bad_data import write_tokenizer
from tests.fuzz.files import forge_checkpoint
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from foundation.errors import InputError
from packing.tokenizer import load_tokenizer
from pretrain.__main__ import main
from pretrain.checkpoint.folders import step_folder
from pretrain.compare.fairness import check_comparable, describe_unfairness
from pretrain.metrics.run_record import read_run
from tests.conftest import contents

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0}


def change(source: Path, **values: Any) -> None:
    config = source / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | values))


@pytest.fixture
def source(small_recipe: dict[str, Any], tmp_path: Path) -> Path:
    """The folder of a small Llama with which `small_recipe` begins."""
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, max_position_embeddings=64)).save_pretrained(tmp_path / "base")
    small_recipe |= {"model": {"source": str(tmp_path / "base")}, "train": {"steps": 6}, "evaluate": {"every": None}}
    return tmp_path / "base"


def interrupted(run: Path, to: Path) -> Path:
    """A copy of a run of six steps as it would be if it had been killed after step 4."""
    shutil.copytree(run, to)
    shutil.rmtree(to / "final")
    shutil.rmtree(step_folder(to / "checkpoints", 6))
    return to


def test_a_checkpoint_is_not_taken_for_another_model_whose_config_json_has_come_there(
    source: Path, train_here: Callable, tmp_path: Path, capsys: Any
):
    whole = train_here()
    assert whole.status == 0, whole.output
    again = interrupted(whole.run_dir, tmp_path / "again")
    before = (source / "config.json").read_bytes()
    change(source, rms_norm_eps=0.5, use_cache=False, architectures=["LlamaModel"], dtype="float16")

    refused = train_here(f"run_dir={again}").refusal
    assert "another recipe:\n  model.source.rms_norm_eps: saved 1e-06, now 0.5\nWhat begins with" in refused
    assert f"is in the config.json of {source}: put that file back as it was. " in refused and "--accept-changes" in refused
    assert "model.source.rms_norm_eps: saved 1e-06" in train_here(f"run_dir={again}", "--plan").refusal
    said = (
        f"checkpoints/step-00000004: was trained with another config.json in {source}, the `model.source`, than is there now:\n"
    )
    said += "  model.source.rms_norm_eps: saved 1e-06, now 0.5\nWith these values"
    evaluated = train_here(f"run_dir={again}", "--eval-only")
    assert evaluated.status == 2 and said in evaluated.err and "held-out loss of" not in evaluated.out
    for command in (["export", str(again), str(tmp_path / "out")], ["sample", str(again), "one"]):
        assert main(command) == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

    (source / "config.json").write_bytes(before)
    files = contents(again)
    assert train_here(f"run_dir={again}", "--eval-only").status == 0 and contents(again) == files
    assert (
        train_here(f"run_dir={again}").status == 0 and read_run(again).summary["loss"] == read_run(whole.run_dir).summary["loss"]
    )
    assert main(["export", str(again), str(tmp_path / "out")]) == 0
    assert describe_unfairness(read_run(whole.run_dir), read_run(again)) is None


def test_an_accepted_change_of_the_source_is_told_and_runs_of_two_models_are_not_compared(
    source: Path, train_here: Callable, tmp_path: Path
):
    first = train_here().run_dir
    resumed = interrupted(first, tmp_path / "resumed")
    change(source, rms_norm_eps=0.5)
    accepted = train_here(f"run_dir={resumed}", "--accept-changes")
    assert accepted.status == 0 and "the recipe has changed: model.source.rms_norm_eps: saved 1e-06, now 0.5" in accepted.output
    second = train_here(f"run_dir={tmp_path / 'second'}").run_dir

    runs = [read_run(folder) for folder in (first, second, resumed)]
    assert describe_unfairness(*runs[:2]) == "`model.source.rms_norm_eps`: 1e-06 and 0.5"
    assert describe_unfairness(*runs[::2]) == "`model.source.rms_norm_eps`: 1e-06 and 1e-06 to step 4, then 0.5"
    with pytest.raises(InputError, match=r"add --vary model\.source\.rms_norm_eps"):
        check_comparable(runs[:2])
    check_comparable(runs[:2], ["model.source.rms_norm_eps"])
    check_comparable(runs[:2], ["model.source"])


def test_runs_that_began_with_other_weights_of_one_folder_are_told_apart(source: Path, train_here: Callable, tmp_path: Path):
    first = train_here().run_dir
    again = interrupted(first, tmp_path / "again")
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, max_position_embeddings=64)).save_pretrained(source)
    second = train_here(f"run_dir={tmp_path / 'second'}").run_dir
    assert train_here(f"run_dir={again}").status == 0  # its weights are the checkpoint's
    runs = [read_run(folder) for folder in (first, again, second)]
    began = [run.past.source_weights[:10] for run in runs]
    assert describe_unfairness(*runs[:2]) is None and began[0] == began[1] != began[2]
    assert describe_unfairness(*runs[::2]) == f"`model.source`: {source}, {began[0]} and {source}, {began[2]}"


def test_of_gpt2_too_and_a_checkpoint_of_before_the_record_is_taken_as_it_is(
    source: Path, train_here: Callable, tmp_path: Path, capsys: Any
):
    AutoModelForCausalLM.from_config(GPT2Config(**GPT2)).save_pretrained(source)
    run = interrupted(train_here().run_dir, tmp_path / "again")
    change(source, activation_function="relu")
    refused = train_here(f"run_dir={run}").refusal
    assert 'model.source.activation_function: saved "gelu_new", now "relu"\nWhat begins' in refused

    now, checkpoint = read_run(run), step_folder(run / "checkpoints", 4)
    for file in (run / "environment.json", checkpoint / "state.json"):
        content = json.loads(file.read_text())
        content.pop("source_config", None)
        if identity := content.get("identity"):
            content["identity"] = {key: value for key, value in identity.items() if not key.startswith("model.source.")}
        file.write_text(json.dumps(content))
    forge_checkpoint(checkpoint, "nothing", {})  # with the hashes that it had then
    assert describe_unfairness(now, read_run(run)) is None
    assert main(["export", str(run), str(tmp_path / "out")]) == 0 and "step-00000004 is exported" in capsys.readouterr().out
    resumed = train_here(f"run_dir={run}")
    assert resumed.status == 0 and "at step 4" in resumed.out and "the recipe has changed" not in resumed.output
    assert read_run(run).source_config["model.source.activation_function"] == "relu"


def test_a_tokenizer_that_has_replaced_the_runs_is_not_exported_nor_sampled_with(
    small_recipe: dict[str, Any], train_here: Callable, tmp_path: Path, capsys: Any
):
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "one two three two one three"}\n' * 200)
    named, packs = write_tokenizer(tmp_path / "named", "one two three").parent, tmp_path / "packs"
    small_recipe["data"] = {"source": str(text), "tokenizer": str(named), "packs": str(packs), "length": 32, "processes": 1}
    small_recipe |= {"train": {"steps": 2}, "evaluate": {"every": None}}
    run = train_here().run_dir
    recorded = read_run(run).environment["tokenizer_fingerprint"]
    assert recorded == load_tokenizer(str(named)).fingerprint

    write_tokenizer(named, "three two one")
    for out in (tmp_path / "with_packs", tmp_path / "without_packs"):
        assert main(["export", str(run), str(out)]) == 0
        said = capsys.readouterr().out
        assert f"; WITHOUT a tokenizer: {named} (" in said and not (out / "tokenizer.json").exists()
        assert f") is not the one it was trained with ({recorded[:12]}); put that one back" in said
        card = (out / "README.md").read_text()
        assert f"No tokenizer lies beside it: the run's, of `{named}` (fingerprint {recorded[:12]}), was not found" in card
        assert main(["sample", str(run), "one"]) == 2
        refused = capsys.readouterr().err
        assert f"its prompts cannot be read: {named} (" in refused
        assert f"{run / 'final'} holds the run's tokenizer: sample from there, or set `data.tokenizer` in" in refused
        shutil.rmtree(packs, ignore_errors=True)

    write_tokenizer(named, "one two three")
    assert main(["export", str(run), str(tmp_path / "same")]) == 0 and "a tokenizer" not in capsys.readouterr().out
    assert load_tokenizer(str(tmp_path / "same")).fingerprint == recorded
    assert main(["sample", str(run), "one", "--tokens", "2"]) == 0


def test_from_another_folder_a_tokenizer_that_is_not_there_is_said_with_the_folder(
    small_recipe: dict[str, Any], train_here: Callable, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    Path("text.jsonl").write_text('{"text": "one two three two one three"}\n' * 200)
    write_tokenizer(tmp_path / "named", "one two three")
    small_recipe["data"] = {"source": "text.jsonl", "tokenizer": "named", "packs": "packs", "length": 32, "processes": 1}
    run = train_here(recipe=small_recipe | {"train": {"steps": 2}, "evaluate": {"every": None}}).run_dir

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    not_there = f": `data.tokenizer: named` is not in {elsewhere}, from where it was looked for, nor found on the hub"
    assert main(["sample", str(run), "one"]) == 2
    refused = capsys.readouterr().err
    assert f"its prompts cannot be read{not_there}; {run / 'final'} holds the run's tokenizer" in refused
    assert main(["export", str(run), "out"]) == 0 and f"; WITHOUT a tokenizer{not_there}" in capsys.readouterr().out
    assert "of `named` (fingerprint" in Path("out/README.md").read_text()
    assert main(["sample", str(run / "final"), "one", "--tokens", "2"]) == 0
