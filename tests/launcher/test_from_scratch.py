"""A model from scratch has the tokens of its data: in its vocabulary, in its exported folder, and where `generate` stops."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from pretrain.__main__ import main
from pretrain.metrics.run_record import read_run
from pretrain.run.card import model_card

PAD, EOS = "<|pad|>", "<|end|>"  # ids 0 and 1: not what any architecture has by default
TEXTS = ["one two three", "four five six", "seven eight nine"]


@pytest.fixture(scope="module")
def made_here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of 300 ids and a corpus of three sentences, again and again."""
    folder = tmp_path_factory.mktemp("from_scratch")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = " ".join(TEXTS) + " ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty hundred"
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[PAD, EOS], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([words] * 20, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD).save_pretrained(folder / "tokenizer")
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 60))
    return folder


@pytest.fixture(scope="module")
def recipe(made_here: Path) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {
        "name": "scratch",
        "model": {"config": {"model_type": "llama", "num_key_value_heads": 2, "max_position_embeddings": 64, **sizes}},
        "data": {
            "source": str(made_here / "corpus.jsonl"),
            "tokenizer": str(made_here / "tokenizer"),
            "packs": str(made_here / "packs"),
            "length": 32,
            "processes": 1,
        },
        "batch": {"tokens": 256, "microbatch": 8},
        "optimizer": {"learning_rate": 0.02},
        "schedule": {"kind": "constant"},
        "train": {"steps": 60},
        "run_dir": str(made_here / "run"),
    }


@pytest.fixture(scope="module")
def trained(start_here: Callable, recipe: dict[str, Any], made_here: Path) -> Any:
    finished = start_here(recipe, made_here)
    assert finished.status == 0, finished.output
    return finished


def test_the_vocabulary_is_the_tokenizers_rounded_up_and_the_plan_says_so(trained):
    config = json.loads((trained.run_dir / "final" / "config.json").read_text())
    assert config["vocab_size"] == 384
    assert (config["eos_token_id"], config["pad_token_id"], config.get("bos_token_id")) == (1, 0, None)
    said = " ".join(trained.output.split())
    assert "rounded up to a multiple of 128 from the tokenizer's 300 ids; EOS 1, BOS none, padding 0" in said


def test_generate_on_the_exported_model_stops_where_documents_end(trained):
    final = trained.run_dir / "final"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 1
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == 0
    output = model.generate(**tokenizer("four five", return_tensors="pt", return_token_type_ids=False), max_new_tokens=40)
    assert tokenizer.decode(output[0]) == f"four five six{EOS}"


def test_a_resumed_run_repeats_the_resolved_tokens(trained, start_here, recipe, made_here, tmp_path):
    written = yaml.safe_load((trained.run_dir / "config.yaml").read_text())
    tokens = {"vocab_size": 384, "eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}
    assert tokens.items() <= written["model"]["config"].items()
    for each in (recipe, written):
        again = start_here(each, tmp_path)
        assert again.status == 0 and "at step 60" in again.output, again.output


@pytest.mark.parametrize("source", ["data", "packs"])
def test_what_contradicts_the_tokenizer_is_one_message(source, trained, start_here, recipe, tmp_path):
    data = recipe["data"] if source == "data" else {"packs": recipe["data"]["packs"], "length": 32}
    changes = ["model.config.vocab_size=200", "model.config.eos_token_id=[2]", "model.config.bos_token_id=5"]
    said = start_here(recipe | {"data": data}, tmp_path, "--plan", *changes).refusal
    assert "`model.config` contradicts the tokenizer of the data" in said and "leave these keys out" in said.lower()
    assert "`vocab_size: 200`, but it has 300 ids" in said and "`eos_token_id: [2]`, but its EOS token is 1" in said
    assert "bos_token_id" not in said, "the tokenizer has none to contradict"


def test_packs_that_were_prepared_here_bring_the_tokenizer_along(trained, start_here, recipe, made_here, tmp_path):
    data = {"packs": recipe["data"]["packs"], "length": 32}
    changed = recipe | {"data": data, "run_dir": str(tmp_path / "run"), "train": {"steps": 2}, "evaluate": {"samples": ["one"]}}
    finished = start_here(changed, tmp_path)
    assert finished.status == 0, finished.output
    model, tokenizer = (auto.from_pretrained(tmp_path / "run" / "final") for auto in (AutoModelForCausalLM, AutoTokenizer))
    assert (model.config.vocab_size, model.generation_config.eos_token_id) == (384, 1)
    assert (tokenizer.eos_token, tokenizer.pad_token) == (EOS, PAD)
    own = AutoTokenizer.from_pretrained(made_here / "tokenizer")
    assert tokenizer("one two three")["input_ids"] == own("one two three")["input_ids"] != []


def test_another_tokenizer_than_that_of_the_packs_is_refused(trained, start_here, recipe, made_here, tmp_path):
    other = tmp_path / "other.json"
    Tokenizer(models.WordLevel({PAD: 0, EOS: 1, "one": 2}, unk_token=PAD)).save(str(other))
    data = {"packs": recipe["data"]["packs"], "length": 32, "tokenizer": str(other)}
    said = start_here(recipe | {"data": data}, tmp_path, "--plan").refusal
    assert "`data.tokenizer`" in said and "is not the tokenizer of" in said


# What is exported says what it is, and continues a text by a command


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main([*map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("where", ["", "checkpoints/step-00000060", "final"])
def test_a_run_a_checkpoint_and_an_exported_folder_continue_a_text_alike(where: str, trained, capsys):
    status, said, _ = command(capsys, "sample", trained.run_dir / where, "one two", "four five", "--temperature", 0)
    assert status == 0, said
    assert said == "  sample after one two\n  │  three\n  sample after four five\n  │  six\n"
    heat = ("--temperature=9", "--tokens=8", "--seed")
    hot = [command(capsys, "sample", trained.run_dir / where, "", "", *heat, seed)[1] for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2], "the seed decides"
    first, second = hot[0].split("  sample after ")[1:]
    assert first != second, "each prompt has a seed of its own"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere", "one"], "nowhere: is no run folder, no checkpoint, and no folder of a model with a config.json; name one"),
        (["RUN", "one", "--temperature=-1"], "--temperature: -1: a number of 0 to 100 is wanted"),
        (["RUN", "one", f"--seed={2**63}"], f"--seed: {2**63}: a whole number of 0 to {2**63 - 1} is wanted"),
        (["RUN", "one", "--top-p=0"], "--top-p: 0: a number above 0 and of at most 1 is wanted"),
        (["RUN", "one", "--tokens=0"], "--tokens: 0: a whole number of 1 or more is wanted"),
        (["RUN", "one " * 70], "a prompt has 140 tokens and the model 64 positions; shorten 'one one"),
        (["BARE", "one"], "holds a model without a tokenizer, so prompts cannot be read"),
    ],
)
def test_what_cannot_be_sampled_is_one_message(arguments: list[str], says: str, trained, tmp_path, capsys):
    bare = shutil.copytree(trained.run_dir / "final", tmp_path / "bare", ignore=shutil.ignore_patterns("token*"))
    places = {"RUN": trained.run_dir, "BARE": bare}
    status, out, error = command(capsys, "sample", *(places.get(each, each) for each in arguments))
    assert status == 2 and out == "" and error.count("error: ") == 1 and says in error


def test_the_model_card_says_what_the_runs_records_say(trained, recipe):
    final, summary = trained.run_dir / "final", json.loads((trained.run_dir / "summary.json").read_text())
    card = (final / "README.md").read_text()
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "model_name": "scratch",
    }
    rows = dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", body, re.MULTILINE))
    model = AutoModelForCausalLM.from_pretrained(final)
    assert rows["model"].startswith("LlamaForCausalLM") and "2 layers of 32, vocabulary 384" in rows["model"]
    assert f"{sum(p.numel() for p in model.parameters()) / 1e3:.1f}".split(".")[0] in rows["model"]
    assert rows["started from"] == "random weights, seed 42" and rows["data"] == recipe["data"]["source"]
    assert rows["tokens"].startswith("15,360, padding included") and rows["precision"].startswith("fp32: FP32 products")
    assert rows["loss"].startswith(f"{summary['loss_last_50']:.4f}, mean of the last 50") and "held-out loss" not in rows
    assert yaml.safe_load(body.split("```yaml\n")[1].split("```")[0]) == yaml.safe_load(
        (trained.run_dir / "config.yaml").read_text()
    )
    assert (final / "loss.png").read_bytes() == (trained.run_dir / "loss.png").read_bytes()


def test_the_cards_own_code_loads_the_model_and_continues_a_text(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained.run_dir / "final")
    code = Path("README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("Once upon a time")


def test_an_exported_model_that_somebody_has_changed_is_kept(trained, start_here, recipe, tmp_path):
    run = shutil.copytree(trained.run_dir, tmp_path / "run")
    (run / "final" / "README.md").write_text((run / "final" / "README.md").read_text().replace("# scratch", "# My model"))
    assert start_here(recipe | {"run_dir": str(run)}, tmp_path).status == 0
    assert "# My model" in (run / "final" / "README.md").read_text(), "a run that has ended leaves it as it is"
    (run / "summary.json").unlink()  # as if it had been killed before its end
    again = start_here(recipe | {"run_dir": str(run)}, tmp_path)
    assert again.status == 0 and f"{run / 'final'} holds what no export has written, and is kept as final.replaced-1" in again.err
    assert "# My model" in (run / "final.replaced-1" / "README.md").read_text()
    assert "# scratch" in (run / "final" / "README.md").read_text()
    changed = AutoModelForCausalLM.from_pretrained(run / "final")
    changed.lm_head.weight.data.zero_()
    changed.save_pretrained(run / "final")
    (run / "summary.json").unlink()
    assert start_here(recipe | {"run_dir": str(run)}, tmp_path).status == 0
    kept = [AutoModelForCausalLM.from_pretrained(run / name) for name in ("final.replaced-2", "final")]
    assert [bool(model.lm_head.weight.any()) for model in kept] == [False, True], "weights that somebody has changed"
    (run / "summary.json").unlink()
    assert start_here(recipe | {"run_dir": str(run)}, tmp_path).status == 0
    assert not (run / "final.replaced-3").exists(), "the run's own is written over"


# Of a model, the architecture and the tokenizer only


def test_from_scratch_in_the_shape_of_a_source_is_what_its_configuration_alone_trains(trained, start_here, recipe, tmp_path):
    shape = {"source": str(trained.run_dir / "final"), "from_scratch": True}
    again = start_here(recipe | {"model": shape, "run_dir": str(tmp_path / "run")}, tmp_path)
    assert again.status == 0, again.output
    assert again.losses() == trained.losses(), "the same weights drawn, and none of those that were trained"
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    assert f"random weights, seed 42, in the shape of {trained.run_dir / 'final'}" in card and "base_model" not in card


@pytest.mark.parametrize("from_scratch", [True, False])
def test_a_base_model_is_named_only_where_its_weights_were_trained_on(trained, from_scratch):
    run = read_run(trained.run_dir)
    of_hub = replace(run, config=run.config | {"model": {"source": "org/shape", "from_scratch": from_scratch}})
    hf = AutoModelForCausalLM.from_pretrained(trained.run_dir / "final")
    front = yaml.safe_load(model_card(of_hub, hf, tokenizer=True).split("---\n", 2)[1])
    assert front.get("base_model") == (None if from_scratch else "org/shape")


def test_from_scratch_with_another_tokenizer_has_that_ones_vocabulary(trained, start_here, recipe, made_here, tmp_path):
    small = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "<end>": 2, "one": 3, "two": 4}, unk_token="<pad>"))
    small.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=small, eos_token="<end>", bos_token="<s>").save_pretrained(tmp_path / "small")
    data = recipe["data"] | {"tokenizer": str(tmp_path / "small"), "packs": str(tmp_path / "packs")}
    changed = {"data": data, "run_dir": str(tmp_path / "run"), "train": {"steps": 2}}
    source = {"source": str(trained.run_dir / "final")}
    refused = start_here(recipe | changed | {"model": source}, tmp_path).refusal
    assert "is not the tokenizer of `model.source`" in refused, "whose weights mean other ids"
    run = start_here(recipe | changed | {"model": source | {"from_scratch": True}}, tmp_path)
    assert run.status == 0, run.output
    config = json.loads((run.run_dir / "final" / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"], config["bos_token_id"]) == (128, 2, 1)
    assert AutoTokenizer.from_pretrained(run.run_dir / "final")("one two").input_ids == [3, 4]


def test_gpt2_as_published_trains_with_a_notice_of_the_dropout_that_is_left_out(trained, start_here, recipe, tmp_path):
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    changed = {"model": {"config": config}, "train": {"steps": 2}, "run_dir": str(tmp_path / "run")}
    run = start_here(recipe | changed, tmp_path)
    assert run.status == 0, run.output
    notice = next(line for line in run.out.splitlines() if "attn_pdrop" in line)
    assert notice == (
        "model: GPT2Config has attn_pdrop 0.1, and packed attention computes no dropout: it is 0 in this run, as with "
        "model.config.attn_pdrop=0.0; resid_pdrop 0.1, embd_pdrop 0.1 stay as published"
    )
    final = json.loads((run.run_dir / "final" / "config.json").read_text())
    assert (final["attn_pdrop"], final["resid_pdrop"], final["embd_pdrop"]) == (0.0, 0.1, 0.1)
    changed = {"model": {"config": config | {"attn_pdrop": 0}}, "run_dir": str(tmp_path / "other")}
    quiet = start_here(recipe | changed, tmp_path, "--plan")
    assert quiet.status == 0 and "attn_pdrop" not in quiet.out
