"""Text and packs that cannot be trained on: the file, the place in it and the remedy are named before a model is built."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from packing.arrow import Pack, PackWriter
from packing.packer import prepare_stream
from packing.prepare import prepare
from packing.settings import DataSettings
from packing.sources import FileSource
from packing.tokenizer import load_tokenizer

MDS = Path(__file__).parents[1] / "data" / "mds" / "reference"
DOCUMENT = json.dumps({"text": "one two three " * 40})


def write_tokenizer(folder: Path, words: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {word: index for index, word in enumerate(["<|endoftext|>", *words.split()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer", "one two three")


@pytest.fixture
def source(small_recipe: dict[str, Any], tokenizer: Path, tmp_path: Path) -> Path:
    """Where the text of `small_recipe` is to lie; its packs are not prepared yet."""
    path = tmp_path / "text.jsonl"
    packs = tmp_path / "prepared" / "packs"
    small_recipe["data"] |= {
        "source": str(path),
        "tokenizer": str(tokenizer),
        "packs": str(packs),
        "held_out": 0.2,
        "processes": 1,
    }
    return path


@pytest.fixture
def model_folder(small_recipe: dict[str, Any], tmp_path: Path) -> Path:
    """A folder with a config and a tokenizer, as `model.source`; no check here gets as far as its weights."""
    folder = tmp_path / "model"
    write_tokenizer(folder, "three two one")
    (folder / "config.json").write_text(json.dumps(small_recipe["model"]["config"]))
    small_recipe["model"] = {"source": str(folder)}
    return folder


def write_packs(folder: Path, *, highest: int = 60, at: int = 0, tokenizer: dict[str, Any] | None = None) -> Path:
    """20 training packs of 32 tokens; the last token of pack `at` is `highest`."""
    with PackWriter(folder, 32) as writer:
        for index in range(20):
            tokens = np.arange(32, dtype=np.uint32) % 40
            tokens[-1] = highest if index == at else 0
            writer.add("train", Pack(tokens, np.array([32], np.int32)))
        writer.finish(settings={}, statistics={}, tokenizer=tokenizer)
    return folder


# ── Text ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "content, override, says",
    [
        ("", "data.text=text", r"data.source: .*text.jsonl: no document .*empty"),
        ('{"text": ""}\n\n', "data.text=text", r"data.source: .*text.jsonl: no document .*: 1 record"),
        (
            f'{DOCUMENT}\n{{"text": \n',
            "data.text=text",
            r"text.jsonl:2: .*JSON.*data.on_bad_line: skip",
        ),
        (f'{DOCUMENT}\n{{"text": 5}}\n', "data.text=text", r"text.jsonl:2: .*`text`.* int"),
        (DOCUMENT, "data.text=body", r"text.jsonl:1: .*`body`.* text\b.*data.text"),
        (DOCUMENT, "data.text={title} {text}", r"text.jsonl:1: .*`title`.* text\b"),
        (
            DOCUMENT,
            "data.held_out=0.5",
            r"data.held_out: 0.5 of 1 document.*none to train on; ",
        ),
        (
            "nonsense\n",
            "data.on_bad_line=skip",
            r"no document .*: 1 malformed .*text.jsonl:1",
        ),
    ],
)
def test_text_that_gives_no_packs_is_refused_with_its_place(content, override, says, source, refusal):
    source.write_text(content)
    assert re.search(says, refusal(override))
    assert not Path(source.parent / "prepared" / "packs").exists()


CHAT = '{"p": "one two", "r": "three"}'


@pytest.mark.parametrize(
    "data, says",
    [
        ({"prompt": "p", "response": "r"}, r"data.chat_template: the tokenizer .* has no chat template .*set data.chat_template"),
        ({"prompt": "p"}, r"`prompt` is set but `response` is not"),
        ({"messages": "m", "chat_template": "{{ messages }}"}, r"text.jsonl:1: no column `m`; the columns are: p, r"),
        ({"input_ids": "p"}, r"text.jsonl:1: column `p` holds no list of whole numbers"),
        ({"source": None, "sources": [{"source": "a", "weight": 0.5}]}, r"weights add up to 0.5"),
        ({"source": None, "sources": [{"source": "a", "weight": -1}, {"source": "b", "weight": 2}]}, r"sources.0.weight.* is -1"),
        ({"text": "r", "held_out": 0.0, "validation": {"text": "{r}"}}, r"data.validation: .*text.jsonl is also trained on"),
    ],
)
def test_what_a_source_is_said_to_hold_and_does_not_is_refused_before_packs(data, says, source, small_recipe, refusal):
    source.write_text(f"{CHAT}\n" * 8)
    small_recipe["data"] |= data
    assert re.search(says, refusal())
    assert not Path(source.parent / "prepared" / "packs").exists()


def test_lines_left_out_are_counted_and_the_rest_is_packed(source, small_recipe, capfd):
    source.write_text("\n".join([DOCUMENT, "{", DOCUMENT, '{"text": 5}', *[DOCUMENT] * 8]))
    prepare(DataSettings(**small_recipe["data"], on_bad_line="skip"))
    said = capfd.readouterr().err
    assert re.search(r"left out +2 malformed records", said) and re.search(r"first left out +.*text.jsonl:2", said)


def test_sources_that_cannot_be_read_are_refused(source, refusal, tmp_path):
    assert re.search(r"data.source: .*text.jsonl: no such file or folder", refusal())
    (tmp_path / "folder").mkdir()
    assert re.search(r"data.source: .*folder: no file", refusal(f"data.source={tmp_path / 'folder'}"))
    source.write_text(DOCUMENT)
    for name in ("cut.jsonl.gz", "cut.txt.gz", "cut.parquet"):
        (tmp_path / name).write_bytes(b"\x1f\x8b\x08\x00 this is no archive")
        assert re.search(rf"{name}.*cannot be read: ", refusal(f"data.source={tmp_path / name}"))
    assert re.search(r"/proc/none: cannot be written to: .*set `data.packs`", refusal("data.packs=/proc/none/packs"))


def test_tokenizers_that_cannot_be_read_are_refused_before_any_text_is(source, tokenizer, refusal, tmp_path):
    source.write_text("not even looked at")
    assert re.search(r"data.tokenizer: /no/such: no such file .*tokenizer.json", refusal("data.tokenizer=/no/such"))
    assert re.search(rf"data.tokenizer: {tmp_path}: no tokenizer.json", refusal(f"data.tokenizer={tmp_path}"))
    assert re.search(r"nobody/nothing: no such .* hub", refusal("data.tokenizer=nobody/nothing"))
    for content, says in (("{nope", "not a readable"), ("{}", "no tokenizer")):
        tokenizer.write_text(content)
        assert re.search(rf"data.tokenizer: {tokenizer}: .*{says}.*again", refusal())


def test_a_tokenizer_that_is_not_the_models_is_refused_before_text_is_prepared(source, model_folder, refusal, small_recipe):
    source.write_text(DOCUMENT)
    assert re.search(r"`data.tokenizer`: .* not .*`model.source`.*`data.tokenizer: .*model`", refusal())
    small_recipe["data"]["tokenizer"] = str(model_folder)
    says = r"`data.tokenizer`: .* 4 ids, .*vocabulary 3; "
    assert re.search(says, refusal("model.config.vocab_size=3"))
    assert not (source.parent / "prepared").exists()


def test_packs_serve_runs_of_every_seed_and_are_refused_to_another_seed_of_theirs(source, launch, refusal, small_recipe):
    source.write_text(f"{DOCUMENT}\n" * 20)
    assert "`python -m packing prepare RECIPE` prepares it" in refusal("--plan", "train={epochs: 2}")
    planned = launch("--plan")
    for horizon, steps in (("train.tokens=1000", "4 steps = "), ("train.steps=7", "7 steps = ")):
        assert steps in launch("--plan", horizon).out
    previewed = launch("--preview-schedule", str(source.parent / "rate.png"))
    assert previewed.status == 0 and "12 steps" in previewed.out and (source.parent / "rate.png").is_file()
    assert planned.status == 0 and "not prepared yet" in planned.out and not Path(small_recipe["data"]["packs"]).exists()
    prepare(DataSettings(**small_recipe["data"]))
    assert launch("--plan").status == 0
    assert launch("--plan", "seed=43").status == 0
    assert re.search(r"other settings \(seed: 42 -> 43\).*data.packs", refusal("data.seed=43"))


@pytest.mark.parametrize(
    "overrides, says",
    [
        (["data.length=128", "batch.tokens=1024"], "64 positions"),
        (["schedule.warmup=1000"], "`schedule.warmup: 1000`"),
        (["evaluate.every=5", "data.held_out=0"], "`evaluate.every: 5` needs held-out packs"),
    ],
)
def test_what_packs_cannot_change_is_refused_before_they_are_prepared(overrides, says, source, refusal, small_recipe):
    source.write_text(f"{DOCUMENT}\n" * 20)
    assert says in refusal(*overrides)
    assert not Path(small_recipe["data"]["packs"]).exists()


# ── Packs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_packs_that_are_not_there_are_refused(refusal, tmp_path):
    remedy = "`data.source` and `data.tokenizer` .* `data.packs` to packs that exist"
    assert re.search(rf"^/no/such: no such file or folder \(`data.packs`\); .*{remedy}", refusal("data.packs=/no/such"))
    (tmp_path / "empty").mkdir()
    assert re.search(rf"empty: an empty folder \(`data.packs`\); .*{remedy}", refusal(f"data.packs={tmp_path / 'empty'}"))


def test_a_plan_comes_before_packs_and_tokenizer_and_says_what_is_unknown(launch, refusal, small_recipe, tmp_path):
    planned = launch("--plan", "data.packs=/no/such")
    said = " ".join(planned.out.split())
    assert planned.status == 0 and "12 steps" in said, planned
    assert "/no/such is not prepared yet, and no `data.source` says from what: a run would refuse that" in said
    assert "Not known: how many epochs the steps are; whether there are held-out packs to evaluate on" in said
    assert launch("--plan", "data.packs=/no/such", "evaluate.samples=[one]").status == 0, "the packs may bring a tokenizer"
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("not even looked at")
    sources = f"data.sources=[{{source: {tmp_path}/a.jsonl, weight: 0.5}}, {{source: {tmp_path}/b.jsonl, weight: 0.5}}]"
    said = " ".join(launch("--plan", sources, "data.packs=/no/such", "data.tokenizer=/no/such", "data.held_out=0.1").out.split())
    assert "/no/such is not prepared yet. Not known: how many epochs the steps are." in said
    tokenizer = ("data.packs=/no/such", "data.tokenizer=/no/such/tokenizer", "evaluate.samples=[one]")
    said = " ".join(launch("--plan", *tokenizer).out.split())
    assert "vocabulary set by the recipe, not checked: `data.tokenizer: /no/such/tokenizer` is not there yet" in said
    del small_recipe["model"]["config"]["vocab_size"]
    assert "/no/such/tokenizer: no such file or folder" in (says := refusal("--plan", *tokenizer))
    assert says.endswith("or plan without it, with model.config.vocab_size=N on the command line")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["data.source=/no/such"], r"^data.source: /no/such: no such file or folder"),
        (["data.format=text", "data.text=body"], r"^data.text: .*text.jsonl is read as text: a text file is one document"),
        (["data.subset=en", "data.split=test"], r"^data.subset: .*: only Hugging Face datasets have that"),
        (["data.streaming=true"], r"^data.streaming: .*: only Hugging Face datasets have that; a mapping, as \{disk_gb: 20\}"),
        (["data.validation.text={text}", "data.held_out=0"], r"^data.validation: .*text.jsonl is also trained on"),
        (["data.prompt=p", "data.response=r"], r"^data.chat_template: the tokenizer .* has no chat template"),
        (["data.add_bos=true"], r"^data.add_bos is true, but the tokenizer .* names no BOS token"),
        (["data.packs=/proc/none/packs"], r"^/proc/none/packs: cannot be written to: .*set `data.packs`"),
        (["data.packs={here}", "data.streaming.window=4096"], r"holds recipe.yaml, which is of no stream of packs"),
        (["data.streaming={window: 4096, disk_gb: 1e9}"], r"^data.streaming.disk_gb: 1e\+09, and the disk of "),
        (["run_dir=/dev/null/run"], r"^/dev/null/run: cannot be used as the run folder: Not a directory; set another `run_dir`"),
        (["run_dir=/proc/run"], r"^/proc/run: cannot be used as the run folder: .*; set another `run_dir`"),
    ],
)
def test_a_plan_before_packs_refuses_what_the_run_would_by_names_alone(arguments, says, source, refusal, monkeypatch):
    source.write_text("not even looked at")
    monkeypatch.setattr(FileSource, "chunks", lambda *_: pytest.fail("the text was read"))
    assert re.search(says, refusal("--plan", *(each.replace("{here}", str(source.parent)) for each in arguments)))
    assert not (source.parent / "prepared").exists()


def test_a_plan_before_packs_are_all_there_holds_those_there_to_their_settings(source, refusal, small_recipe):
    source.write_text(f"{DOCUMENT}\n" * 20)
    small_recipe["data"]["held_out"] = 0.0
    prepare(DataSettings(**small_recipe["data"]), progress=False)
    validation = f"data.validation.source={source.with_name('other.jsonl')}"
    source.with_name("other.jsonl").write_text(DOCUMENT)
    assert "other settings (shuffle: True -> False)" in refusal("--plan", validation, "data.shuffle=false")


def test_an_empty_folder_for_packs_is_left_empty_by_a_plan(source, launch, small_recipe):
    source.write_text(f"{DOCUMENT}\n" * 20)
    packs = Path(small_recipe["data"]["packs"])
    packs.mkdir(parents=True)
    assert "not prepared yet" in launch("--plan").out and not any(packs.iterdir())


def test_a_plan_for_other_gpus_checks_the_batch_against_those(launch, refusal):
    planned = launch("--plan", "--gpus", "3", "--tokens-per-second", "1000", "batch.microbatch=3")
    said = " ".join(planned.out.split())
    assert planned.status == 0 and "a launch on 1 device would refuse `batch.microbatch: 3`, which does not divide the 8" in said
    assert "3 GPUs on 1 machine" in said and "does not divide the 8 packs" in refusal("--plan", "batch.microbatch=3")
    assert "too few for 9 processes" in refusal("--plan", "--gpus", "9", "batch.microbatch=1")
    there = ("data.packs=/no/packs", "data.source=/no/such", "data.tokenizer=/no/tokenizer", "run_dir=/no/run")
    other = ("--plan", "--gpus", "4", "--tokens-per-second", "1000", "model.config.vocab_size=61", "data.held_out=0.1", *there)
    assert "what is said of it is not checked" in launch(*other).out, "text and disk may be on the machine that is planned for"


def test_a_plan_counts_the_packs_there_are_and_names_the_validation_to_come(source, tokenizer, launch, small_recipe):
    source.write_text(f"{DOCUMENT}\n" * 40)
    small_recipe["data"] |= {"held_out": 0.0}
    small_recipe["train"] = {"epochs": 2}
    prepare(DataSettings(**small_recipe["data"]), progress=False)
    small_recipe["data"]["validation"] = {"source": str(source.with_name("other.jsonl"))}
    source.with_name("other.jsonl").write_text(DOCUMENT)
    to_come = f"`data.validation`: {small_recipe['data']['packs']}-validation is not prepared yet."
    planned = [launch("--plan", *more) for more in ([], ["evaluate.every=5"], ["data.source=null"], ["train={steps: 20}"])]
    tokenizer.unlink()
    planned.append(launch("--plan", "model.config.vocab_size=61"))
    for each in planned:
        said = " ".join(each.out.split()).replace("- ", "-")
        assert each.status == 0 and to_come in said and "`data.packs`" not in said, each
        assert re.search(r"epochs of \d+ packs", said), each
    assert not Path(f"{small_recipe['data']['packs']}-validation").exists()


@pytest.mark.parametrize("streaming", [False, {"window": 256, "disk_gb": 1}], ids=["prepared", "streamed"])
def test_text_that_packs_were_made_of_is_not_validated_on_later(streaming, source, refusal, small_recipe):
    source.write_text(f"{DOCUMENT}\n" * 40)
    small_recipe["data"] |= {"held_out": 0.0, "streaming": streaming}
    (prepare_stream if streaming else prepare)(DataSettings(**small_recipe["data"]), progress=False)
    again = f"data.validation={{source: {source}}}"
    said = f"data.validation: {source} is also trained on (data.source), so its loss says nothing of unseen text"
    assert refusal("--plan", again).startswith(said) and refusal(again).startswith(said)
    assert not source.with_name("prepared").joinpath("packs-validation").exists()


def test_that_text_to_validate_on_is_not_known_to_be_trained_on_is_said(source, launch, small_recipe, tmp_path):
    source.write_text(f"{DOCUMENT}\n" * 40)
    small_recipe["data"] |= {"held_out": 0.0}
    prepare(DataSettings(**small_recipe["data"]), progress=False)
    other = source.with_name("other.jsonl")
    other.write_text(DOCUMENT)
    packs, validation = small_recipe["data"]["packs"], f"data.validation={{source: {other}}}"
    unknown = f"`data.validation`: whether it is also trained on is not checked, as the text of {packs} is not known here"

    def said(*arguments: str) -> str:
        started = launch(validation, *arguments)
        assert started.status == 0, started
        return " ".join(started.output.split()).replace("- ", "-")

    assert unknown not in said("--plan") and unknown in said("--plan", "data.source=null")
    source.unlink()
    short = ("train.steps=1", "schedule.warmup=0", "parity=off", f"run_dir={tmp_path / 'short'}")
    assert unknown in said("--plan") and unknown in said(*short)
    assert "not checked" not in said("--plan"), "both are packed by now, and are used as they are"


def test_a_share_to_hold_out_of_packs_that_have_held_out_packs_is_said_to_have_no_effect(
    source, launch, small_recipe, small_packs
):
    source.write_text(f"{DOCUMENT}\n" * 40)
    prepare(DataSettings(**small_recipe["data"]), progress=False)
    exist = ("data.source=null", "data.processes=null")
    for asked in ((), exist):
        assert "no effect" not in launch("--plan", *asked).out, "it was prepared with this share"
    for asked in (("data.held_out=0.3",), (f"data.packs={small_packs}",)):
        planned = launch("--plan", *exist, *asked)
        assert planned.status == 0
        said = " ".join(planned.out.split())
        assert re.search(r"`data.held_out: 0.[23]` has no effect: .* has held-out packs of its own.*; leave it out", said), said


def test_packs_of_their_own_that_text_for_validation_takes_the_place_of_are_named(source, launch, small_packs):
    source.write_text(f"{DOCUMENT}\n" * 40)
    exist = ("data.source=null", "data.processes=null", "data.held_out=0", f"data.packs={small_packs}")
    assert "not evaluated on" not in launch("--plan", *exist).out
    planned = launch("--plan", *exist, f"data.validation={{source: {source}}}")
    said = " ".join(planned.out.split())
    assert planned.status == 0 and f"the held-out packs of {small_packs} are not evaluated on: `data.validation`" in said


def test_where_other_sources_need_the_share_nobody_is_told_to_leave_it_out(launch, small_packs, tmp_path):
    (tmp_path / "own").symlink_to(small_packs)
    (tmp_path / "bins").mkdir()
    (np.arange(4096) % 16).astype(np.uint16).tofile(tmp_path / "bins/train.bin")
    sources = "data.sources=[{name: own, weight: 0.5}, {name: bins, weight: 0.5}]"
    planned = launch("--plan", f"data.packs={tmp_path}", sources, "data.source=null", "data.processes=null", "data.held_out=0.3")
    said = " ".join(planned.out.split())
    assert planned.status == 0 and "no effect on" in said and "own, which has held-out packs of its own" in said, planned.out
    assert "leave it out" not in said and said.count("no effect") == 1


def test_packs_of_another_tokenizer_or_vocabulary_than_the_models_are_refused(model_folder, refusal, small_recipe, tmp_path):
    other = load_tokenizer(str(write_tokenizer(tmp_path / "other", "one two three"))).describe()
    small_recipe["data"]["packs"] = str(write_packs(tmp_path / "packs", tokenizer=other))
    says = r"packs: made with another tokenizer .*other.*; prepare the packs with the model's"
    assert re.search(says, refusal("evaluate.every=null"))
    (model_folder / "tokenizer.json").unlink()
    larger = write_packs(tmp_path / "larger", tokenizer=other | {"vocab_size": 99})
    says = r"larger: .* 99 tokens .*the model has 61; "
    assert re.search(says, refusal(f"data.packs={larger}", "evaluate.every=null"))


@pytest.mark.parametrize("at", [0, 19])
def test_a_token_beyond_the_vocabulary_is_found_before_the_model_is_built_wherever_it_is(at, refusal, tmp_path):
    path = write_packs(tmp_path / "packs", highest=61, at=at)
    message = refusal(f"data.packs={path}", "evaluate.every=null")
    assert re.search(rf"{path}: pack {at} .*token id 61\b.* 61 tokens; ", message)


def test_so_it_is_in_mds_and_in_token_files(refusal, tmp_path):
    message = refusal(f"data.packs={MDS}", "model.config.vocab_size=10", "evaluate.every=null")
    assert re.search(r"reference: pack \d+ .*token id \d+.* 10 tokens", message)
    np.full(320, 61, "<u2").tofile(tmp_path / "train.bin")
    message = refusal(f"data.packs={tmp_path / 'train.bin'}", "evaluate.every=null")
    assert re.search(r"train.bin: pack 0 .*token id 61\b", message)


def test_an_evaluation_of_packs_without_a_label_is_refused_where_others_have_some(refusal, tmp_path):
    with PackWriter(tmp_path / "packs", 32) as writer:
        for split, trained in (*[("train", True)] * 20, ("held_out", False), ("held_out", True)):
            writer.add(split, Pack(np.zeros(32, np.uint32), np.array([32], np.int32), trained=np.full(32, trained)))
        writer.finish(settings={}, statistics={}, tokenizer=None)
    message = refusal(f"data.packs={tmp_path / 'packs'}", "evaluate.packs=1")
    assert "packs: no token that is held out and in the first 1 pack" in message and "raise `evaluate.packs`" in message


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage, says", [(cut, "truncated: [0-9]+ bytes"), (flip_a_bit, "damaged: its sha")])
@pytest.mark.parametrize("format", ["arrow", "mds"])
def test_a_damaged_shard_is_named_with_a_remedy(format: str, damage: Callable, says: str, small_packs, refusal, tmp_path):
    packs = shutil.copytree(small_packs if format == "arrow" else MDS, tmp_path / "packs")
    shard = next((packs / "train").glob("*.arrow")) if format == "arrow" else packs / "shard.00001.mds"
    damage(shard)
    message = refusal(f"data.packs={packs}", "evaluate.every=null", "model.config.vocab_size=70000")
    assert re.search(rf"{shard}: {says}.*; .*again", message)


def test_a_tokenizer_may_be_named_for_packs_that_exist(launch, tokenizer):
    assert launch(f"data.tokenizer={tokenizer}", "evaluate.samples=[one]", "--plan").status == 0
