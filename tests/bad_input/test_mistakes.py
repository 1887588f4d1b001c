"""Test common mistakes: status 2, one message that names the key or the file, and no run folder."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrain.__main__ import COMMANDS as ALL
from pretrain.settings import commands
from tests.conftest import Trainer, contents, run_command

EMULATED = "precision=delayed fp8_config.backend=emulation"
# Arguments that override a correct recipe, and words of the expected message.
SETTINGS = {
    "optimizer.learnin_rate=1": "did you mean `optimizer.learning_rate`",
    "seed=[[[": "seed",
    "run_dir=": "run_dir",
    "run_dir=runs/{nmae}": "{name}",
    "data.packs=s4://bucket/packs": "s4://bucket/packs: ValueError: Protocol not known: s4; check",
    "train.begin_with=s3://bucket/step-00000004": "`train.begin_with`: s3://bucket/step-",
    "run_dir=/dev/null/run": "/dev/null/run",
    "weights": "'weights'",
    "--seed 3": "--seed",
    "--plan --profile": "--profile",
    "--plan data.packs=/no/packs": "/no/packs: no such file or folder (`data.packs`)",
    "train.steps=0": "`train.steps`",
    "train={steps: 3, tokens: 5}": "`tokens`",
    "train={}": "`train`",
    "train.begin_with=nowhere/step-00000004": "nowhere/step-00000004/manifest.json: ",
    "optimizer.learning_rate=.nan": "`optimizer.learning_rate`",
    "optimizer.betas=[0.9,1.5]": "`optimizer.betas",
    "optimizer.betas=[0.9]": "`optimizer.betas`: List should have at least 2 items",
    "precision=delayd": "'delayed'",
    "precision=fp8": "`precision`: fp8 is delayed, current or block",
    "precision=[{until: 12, use: bf16}, {use: fp32}]": "`precision`",
    "precision=[{until: 1.5, use: nvfp4}, {use: bf16}]": "`precision.0.until`: 1.5",
    "precision=delayed": "`precision: delayed`",
    "precision=fp32 weights=bf16": "`weights: bf16`",
    "weights=bf16_exact": "if the recipe sets no precision, the Accelerate configuration does",
    "precision=bf16 fp8_config.margin=2": "`precision: bf16`",
    "precision=[{until: 0.5, use: bf16}]": "`precision`: a schedule needs two phases or more",
    "precision=[{until: 0.8, use: nvfp5}, {use: bf16}]": "`precision.0.use`",
    "precision=[{until: 0.5, use: nvfp4}, {until: 0.9, use: bf16}]": "needs `until`",
    "precision=nvfp4 fp8_config.backward_override=dequantized": "known keys here: amax_",
    "fp8_config.recipe=mxfp8": "`fp8_config.recipe`",
    "precision=block fp8_config.backend=emulation": "`data.length: 32`",
    f"{EMULATED} fp8_config.keep_bf16=[layers.9.*]": "`fp8_config.keep_bf16`",
    f"{EMULATED} fp8_config.keep_bf16_layers.first=1": "`fp8_config.keep_bf16_layers`",
    "batch.tokens=250": "`batch.tokens: 250`",
    "batch.tokens=1048576": "`batch.tokens: 1048576` is more than",
    "log.trackers=[wandbb]": "`log.trackers`: 'wandbb' is no tracker of Accelerate",
    "optimizer.foreach=true": "known keys here: betas",
    "optimizer.name=sgd": "Input should be 'adamw' or 'muon'",
    "optimizer.muon.learning_rate=0.02": "set `name: muon`",
    "optimizer.name=muon optimizer.offload=state": "`offload: state` needs AdamW",
    "optimizer.learning_rate=[1e-3,3e-3]": "`optimizer.learning_rate`",
    "model=tinybase": "did you mean `model.source`?",
    "data.validation=val.txt": "did you mean `data.validation.source`?",
    "optimizer=adamw": "did you mean `optimizer.name`?",
    "n_layer=2": "`n_layer`: unknown key; the section `model.config` has the settings",
    "lora.r=8": "`lora`: unknown key; LoRA and other adapters are out of scope",
    "train_on_inputs=true": "a chat is always trained on its answers alone",
    "--eval-only": "pretrain evaluate",
    "eval.every=100": "did you mean `evaluate.every`?",
    "data.on_bad_line=skip": "drop records that cannot be read from the source",
    "schedule.warmup=100": "`schedule.warmup: 100`",
    "schedule.kind=cosin": "`schedule.kind`",
    **dict.fromkeys(("loss.penalty_weight=0.1", "loss.penalty=neg_entropy"), "`penalty_weight`"),
    "loss.kind=cce": "`loss.kind: cce`",
    "evaluate.samples=[Once]": "`evaluate.samples`",
    "checkpoint.best=true evaluate.every=null": "`checkpoint.best",
    "evaluate.merge=2": "`evaluate.merge: 2` has no effect without `evaluate.served`",
    "evaluate.served=nvfp5": "`evaluate.served`",
    "evaluate.served=bf16 evaluate.merge=2 checkpoint.keep=1": "saves and keeps, which are 1",
    "evaluate.served=bf16 evaluate.merge=4 checkpoint.keep=9": "which are 3",
    "evaluate.served=bf16 evaluate.merge=2 checkpoint.every=null": "which are 1",
    "evaluate.served=nvfp4 fp8_config.keep_bf16_layers.last=1": "none would compute in nvfp4",
    "data.length=64": "`data.length`",
    "data.held_out=1.5": "`data.held_out`",
    "--resume nowhere": "nowhere",
    "model.config.hiden_size=32": "`hidden_size`",
    "model.config.hidden_size=wide": "hidden_size",
    "model.config.vocab_size=10": "token id",
    "model.config.hidden_act=swiglu": "swiglu",
    "model.config.pad_token_id=200": "Padding_idx",
    "model.config.model_type=qwen33": "`qwen3`",
    "model.config.num_attention_heads=3": "`num_attention_heads: 3`",
    "model.config.max_position_embeddings=16": "raise `model.config.max_position_embeddings`",
    "model.config=null": "`model`",
    "model.config={model_type: bert, vocab_size: 61}": "BertLMHeadModel",
    "model.config={model_type: musicgen}": "more than text",
    "model.config={model_type: qwen3_5}": "more than text; set `model_type: qwen3_5_text`",
    "model.config={model_type: gemma4_assistant}": "hidden_size_per_layer_input",
    "model.config={model_type: lfm2_moe, vocab_size: 61}": "`model.config.layer_types` to a list",
    "model.config={model_type: nemotron_h, num_hidden_layers: 2}": "; set `layer_types` to a list",
    "model.config={model_type: qwen2_vl}": "more than text; choose a model of text only",
    "model.config._attn_implementation=eager": "no such key",
    "model.config={model_type: t5, vocab_size: 61}": "t5 is no causal language model",
    "model.config.num_hidden_layers=-1": "`model.config.num_hidden_layers: -1` is below 1",
    "model.source=/no/such/model": "/no/such/model",
    "model.source=./nowhere": "'./nowhere' is neither the folder of a model nor a model",
    "model.source=README.md": "neither the folder of a model nor",
    "model.source=tests": "`model.source`: tests: the source has no config.json",
    "model.source=nobody/nothing": "'nobody/nothing'",
    "model.attention=varlen": "model.attention",
    "model.attention=flash": "`model.attention`",
    "precision=delayed fp8_config.backend=emulation model.fused=on": "`model.fused: on`",
    "model.cuda_graphs=on": "`model.cuda_graphs: on` is impossible in this run: they need a GPU",
}

FILES = {
    "name: [small": "YAML",
    "- small": "mapping",
    "name: a\nname: b": "`name`",
    "": "recipe.yaml",
    "base: other.yaml": "other.yaml",
}

# Environment variables that accelerate sets from its YAML, and words of the expected message.
LAUNCH = {
    "ACCELERATE_MIXED_PRECISION=fp16": "mixed_precision",
    "ACCELERATE_MIXED_PRECISION=fp8": "`precision: delayed`",
    "ACCELERATE_FP8_RECPIE=nvfp4 ACCELERATE_MIXED_PRECISION=fp8": "`fp8_config.recpie`",
    "MASTER_ADDR=127.0.0.1 ACCELERATE_DYNAMO_BACKEND=NO": "`distributed_type: NO`",
}

DOCUMENT = json.dumps({"text": "one two three " * 40})
CHAT = json.dumps({"p": "one two", "r": "three", "m": [{"role": "user", "content": "one"}]})

# The content of text.jsonl, settings besides `source` and `tokenizer`, and words of the expected
# message.
TEXTS = [
    ("", "", "text.jsonl"),
    (f'{DOCUMENT}\n{{"text": \n', "", "text.jsonl:2"),
    ("nonsense\n", "", "text.jsonl:1"),
    (DOCUMENT, "data.text=body", "`body`"),
    (DOCUMENT, "data.text={title} {text}", "`title`"),
    (DOCUMENT, "data.text={text:.2f}", "'{text:.2f}'"),
    (DOCUMENT, "data.held_out=0.5", "data.held_out"),
    (DOCUMENT, "data.source=/no/such.jsonl", "/no/such.jsonl"),
    (DOCUMENT, "data.source={here}/empty", "empty"),
    (DOCUMENT, "data.subset=en", "data.subset"),
    (DOCUMENT, "data.streaming=true", "data.streaming"),
    (DOCUMENT, "data.tokenizer={here}/empty", "tokenizer.json"),
    (DOCUMENT, "data.tokenizer=nobody/nothing", "nobody/nothing"),
    (DOCUMENT, "data.tokenizer={here}/broken.json", "broken.json"),
    (DOCUMENT, "data.tokenizer=./none", "none does not exist; set another tokenizer, or make one"),
    (DOCUMENT, "data.tokenizer=null", "tokenizer"),
    (DOCUMENT, "data.packs=/proc/none/packs", "/proc/none"),
    (DOCUMENT, "data.length=128 batch.tokens=1024", "64 positions"),
    (DOCUMENT, "data.held_out=0 evaluate.every=5", "`evaluate.every: 5`"),
    (DOCUMENT, "data.held_out=0 data.validation.source={here}/text.jsonl", "`data.validation`"),
    (
        DOCUMENT,
        "data.held_out=0 data.source={here} data.validation.source={here}/text.jsonl",
        "text.jsonl is also used for training",
    ),
    (DOCUMENT, "data.source=someone/documents", "install this project with its extra `hub`"),
    (DOCUMENT, "data.packs={here}/model", "{here}/model"),
    (DOCUMENT, "model.config.vocab_size=3", "vocab"),
    (DOCUMENT, "model.config=null model.source={here}/own", "model.source"),
    (CHAT, "data.messages=[p]", "at least 2 items"),
    (CHAT, "data.input_ids=p", "`p`"),
    (CHAT, "data.messages=[p,r]", "data.chat_template"),
    (CHAT, "data.messages=[p,r] data.chat_template={here}/no.jinja", "chat_template"),
    (CHAT, "data.messages=[p,q] data.chat_template='{{ messages }}'", "`q`"),
    (CHAT, "data.messages=[p,r] data.chat_template='{{ messages'", "chat_template"),
    (
        CHAT,
        "data.source=null data.sources='[{source: a, weight: -1}, {source: b, weight: 2}]'",
        "data.sources.0.weight",
    ),
    (CHAT, "data.source=null data.sources='[{source: a}]'", "weight"),
]

# Options of other trainers, and ours. They are named before files are read.
OPTIONS = {
    "--learning_rate 1e-3": "optimizer.learning_rate=VALUE",
    "--max_steps 10 --bf16": "train.steps=VALUE",
    "--bf16 --plan": "precision=VALUE",
    "--resume_from_checkpoint auto": "--resume",
    "--resume_from_checkpoint=auto": "--resume",
    "--dry-run=true": "--plan",
    "--dry-run": "--plan",
    "--num_processes=2": "--processes",
    "--gradient_accumulation_steps 4": "batch.tokens=VALUE",
    "--mixed_precision fp8": "precision=VALUE",
    "--precision mxfp8": "precision=VALUE",
    "--acept-changes": "--accept-changes",
    "--steps 10": "train.steps=VALUE",
    "--optimizer muon": "optimizer.name=VALUE",
}
TYPOS = [("trian", "train"), ("evalute", "evaluate"), ("samples", "sample"), ("inspct", "inspect")]

# Commands other than the launcher, and words of the expected message.
COMMANDS = {
    **{f"{command} nowhere.yaml": "nowhere.yaml" for command in ("matrix", "plan", "prepare")},
    "export": "RUN_OR_CHECKPOINT",
    "evaluate {here}": "{here}: this folder is not a run folder",
    **dict.fromkeys(
        ("export nowhere --out out", "sample nowhere one", "report nowhere", "inspect nowhere"),
        "nowhere",
    ),
    **dict.fromkeys(("export {here} --out out", "report {here}"), "{here}"),
    "sample nowhere one --tokens 0": ("--tokens: 0 is not a whole number of at least 1"),
    "sample nowhere one --top-p 2": "--top-p",
    "sample nowhere one --top-p x": "--top-p: invalid float value: 'x'",
    "which nowhere.yaml --hours x": "--hours: x is not a number above 0",
    "which nowhere.yaml --config nowhere": "nowhere: there is no such Accelerate",
    "matrix nowhere.yaml --gpus 0": "--gpus: 0 is not a whole number of at least 1",
    "report": "RUN",
    "report {here} --out report.pdf": "--out report.pdf",
    "report nowhere --out page.html": "install this project with its extra `report`",
    "matrix {here}/matrix.yaml": "matrix.yaml: this file is no matrix, because it lacks `recipe`, ",
    "plan {here}/folder.yaml": "{here}/folder.yaml: cannot be read as YAML: Is a directory",
    **{
        command: "s3://bucket/x is an address, but a path on this machine is needed"
        for command in (
            "export {here} --out s3://bucket/x",
            "report {here} --out s3://bucket/x",
            "sample s3://bucket/x one",
            "which nowhere.yaml --run_dir s3://bucket/x",
            "tokenizer {here} --vocabulary 300 --out s3://bucket/x",
            "matrix s3://bucket/x",
            "evaluate {here} --resume s3://bucket/x",
            "train nowhere.yaml --resume s3://bucket/x",
        )
    },
    "prepare {here}": "data.source={here}",
    "prepare {here}/empty.txt": "data.source={here}/empty.txt",
    "prepare {here}/broken.json": "data.source={here}/broken.json",
    "prepare nowhere.yaml --source x": "data.source=",
    "reprot": "report",
    "generate": "unknown command 'generate'",
    "plan {here}/fodler.yaml": "fodler.yaml: no such file",
    "plan recipes/smoke.yaml --on Q9": "--on Q9: this device is not in the table",
    "plan recipes/smoke.yaml --on H100 --price H100=2,B200=6": "no plan on B200 is requested",
    "plan recipes/smoke.yaml train.step=1": "`train.step`: unknown key",
    "which recipes/smoke.yaml --on H100": "`python -m pretrain plan RECIPE --on H200`",
    "which recipes/smoke.yaml train.step=1": "`train.step`: unknown key",
    "train nowhere.yaml": "nowhere.yaml: no such file",
    "train recipes/smoke.yaml optimizer.lr=1": "did you mean `optimizer.learning_rate`?",
    "train recipes/smoke.yaml --config nowhere": "nowhere: there is no such Accelerate",
    "train recipes/smoke.yaml --resume nowhere": "nowhere/manifest.json",
    "train tests": "to resume a run, name its config.yaml",
    "train recipes/smoke.yaml data.source=null data.packs=nowhere": "nowhere: no such file",
    "evaluate recipes/smoke.yaml --resume nowhere": "nowhere/manifest.json",
    "evaluate recipes/smoke.yaml train.step=1": "`train.step`: unknown key",
    "evaluate recipes/smoke.yaml --tasks arc_easy": "use `lm_eval` (docs/serving.md)",
    "evaluate recipes/smoke.yaml --precisions fp7": "--precisions: fp7: unknown",
    "doctor --precisions fp7": "--precisions: fp7: unknown",
    "export nowhere --best": "nowhere",
    "export nowhere --dtype fp32 --precision trained": "omit --dtype",
    "sample {here}/model one": "{here}/model: the model has no tokenizer",
    "sample {here} one": "choose a finished run, or",
    "tokenizer nowhere --vocabulary 300 --out {here}/out": "nowhere",
    "tokenizer {here}/empty.txt --vocabulary 300 --out {here}/out": "contains no text",
    "tokenizer {here}/text.jsonl data.input_ids=m --vocabulary 300 --out none": "`data.text`",
    **{
        f"tokenizer {{here}}/text.jsonl --out {{here}}/out --vocabulary {number}": (
            f"--vocabulary: {number} is not a whole number of at least 257"
        )
        for number in ("many", "-5", "256")
    },
    **{f"train my.yaml {given}": f"; did you mean {ours}?" for given, ours in OPTIONS.items()},
    "plan my.yaml --lr 1": "did you mean optimizer.learning_rate=VALUE?",
    "tokenizer my_text --vocab_size 4000 --output tok": "did you mean --vocabulary?",
    "tokenizer my_text --vocab 4000 --output tok": "did you mean --out?",
    "export runs/x --output=y": "did you mean --out?",
    "matrix my.yaml --dryrun": "did you mean --dry-run?",
    "train --data my_text --steps 10": "did you mean data.source=VALUE?",
    "plan my.yaml --model gpt2": "did you mean model.source=VALUE?",
    "train my.yaml --lora_r=8": "LoRA and other adapters are out of scope",
    "train my.yaml --deepspeed ds.json": "`--config zero` or `--config fsdp2`",
    "train my.yaml --eval_tasks hellaswag": "use `lm_eval` (docs/serving.md)",
    **{f"{given} x": f"unknown command '{given}'; did you mean {ours}?" for given, ours in TYPOS},
    **{f"{command} --bogus": "error: command line: " for command in ALL},
    "report runs/a --margin=-1": "--margin: -1 is not a number above 0; ",
    "matrix": "required: matrix; ",
    "sample": "required: FOLDER, PROMPT; ",
    "sample nowhere -- --prompts-like-this": "nowhere",
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look up names of the hub in the local cache only."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def refusal(train_here: Trainer) -> Callable[..., str]:
    """Function that runs the launcher, and returns the message of the refusal.

    It asserts that no run folder was made.
    """

    def run(*arguments: str) -> str:
        message = train_here(*arguments).refusal
        assert not train_here.run_dir.exists()
        return message

    return run


def split(given: str) -> list[str]:
    """Split arguments as a shell does. A mapping without quotes is one argument."""
    return shlex.split(given) if "'" in given or "{" not in given else [given]


@pytest.mark.parametrize("given", SETTINGS)
def test_a_setting_that_cannot_be_trained_is_named(given: str, refusal: Callable) -> None:
    assert SETTINGS[given] in refusal(*split(given))


@pytest.mark.parametrize("content", FILES)
def test_a_file_that_is_no_recipe_is_named(
    content: str, refusal: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.conftest.yaml_of", lambda recipe: content)
    message = refusal()
    assert ".yaml" in message
    assert FILES[content] in message


@pytest.mark.parametrize("variables", LAUNCH)
def test_what_accelerate_cannot_start_is_named(
    variables: str, refusal: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("=", 1))
    assert LAUNCH[variables] in refusal()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Folder with the files that the tables above use."""
    for name in ("empty", "folder.yaml"):
        (tmp_path / name).mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "broken.json").write_text("{nope")
    (tmp_path / "matrix.yaml").write_text("name: precisions\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 97}')
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "model.py").write_text("open(__file__ + '.executed', 'w')\n")
    auto = {"AutoConfig": "model.Config", "AutoModelForCausalLM": "model.Model"}
    own = json.dumps({"auto_map": auto, "model_type": "own"})
    (tmp_path / "own" / "config.json").write_text(own)
    return tmp_path


@pytest.mark.parametrize(("content", "given", "named"), TEXTS)
def test_text_that_gives_no_packs_is_named_and_all_files_stay(
    content: str,
    given: str,
    named: str,
    here: Path,
    words: Path,
    refusal: Callable,
    train_here: Trainer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    source = here / "text.jsonl"
    source.write_text(content)
    train_here.recipe["data"] |= {"source": str(source), "tokenizer": str(words)}
    packs = here / "prepared" / "packs"
    train_here.recipe["data"] |= {"packs": str(packs), "held_out": 0.2}
    before = contents(here)
    given = given.replace("{here}", str(here))
    if given.count("=") > 1:
        arguments = shlex.split(given)
    else:
        arguments = [given] if given else []
    assert named.replace("{here}", str(here)) in refusal(*arguments)
    assert not packs.exists()
    assert before.items() <= contents(here).items()
    assert not [*here.rglob("*.executed")]


def test_what_a_command_cannot_use_is_named_without_torch(here: Path) -> None:
    lines = {given.replace("{here}", str(here)): words for given, words in COMMANDS.items()}
    code = """
import contextlib, io, json, shlex, sys
sys.modules["plotly"] = None  # as if the package were not installed
from pretrain.__main__ import COMMANDS, main
answers = []
for command in COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main([command, "--help"])
    assert "usage: " in out.getvalue()
for line in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(shlex.split(line))
    answers.append((line, status, err.getvalue(), "torch" in sys.modules))
print(json.dumps(answers))
"""
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = run_command([sys.executable, "-c", code], input=json.dumps([*lines]), env=offline)
    for line, status, message, has_torch in json.loads(done.stdout):
        assert lines[line].replace("{here}", str(here)) in message, (line, message)
        assert status == 2 and message.count("error: ") == 1, line
        assert message.count("\n") == 1 or not line.endswith("--bogus"), line
        assert not has_torch, line


def test_an_option_named_like_a_recipe_key_stays_an_option() -> None:
    line = ["my.yaml", "--run_dir=folder", "--optimizer.learning_rate=1", "--weights=bf16"]
    options = commands.read("which", line)
    assert options.run_dir == Path("folder")
    assert options.overrides == ["optimizer.learning_rate=1", "weights=bf16"]


def test_a_command_ends_quietly_if_nobody_reads_its_output() -> None:
    """A shell reports 141 for other programs too, which end by SIGPIPE."""
    reading_end, stdout = os.pipe()
    os.close(reading_end)
    for argument in ("--help", "--version"):
        command = [sys.executable, "-m", "pretrain", argument]
        ended = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE)
        assert (ended.returncode, ended.stderr) == (141, b"")
    os.close(stdout)


def test_a_command_runs_without_stdout(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pretrain", "inspect", str(tmp_path)]
    ended = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], capture_output=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith(b"error: ") and b"Traceback" not in ended.stderr
