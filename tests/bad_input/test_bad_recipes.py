"""Recipes, command lines and launch environments that cannot be trained: one message that names key and remedy, and status 2."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# What is given on the command line, and what the message must say, in this order.
SETTINGS = {
    "optimizer.learnin_rate=1": r"command line, over .*recipe.yaml: unknown key `optimizer.learnin_rate`; did you mean `opt",
    "weigths=bf16": r"unknown key `weigths`; did you mean `weights`\?",
    "Seed=3 --plan": r"unknown key `Seed`; did you mean `seed`\?",
    "data.Seed=1": r"unknown key `data.Seed`; did you mean `data.seed`\?",
    "int=3": r"unknown key `int`; did you mean ",
    "a[0]=3": r"unknown key `a\[0\]`; known keys here: batch, ",
    "model.gradient_checkpointing={Every: 2}": r"unknown key `model.gradient_checkpointing.Every`; did you mean ",
    "optimizer={2: 3}": r"unknown key `optimizer.2`, which is no text; keys are words",
    "train.steps.x=3": r"`train.steps.x` cannot be set: `steps` holds 12, not keys of its own",
    "seed=[[[": r"the value of `seed=\[\[\[` is not valid YAML",
    "seed=99999999999999999999": r"`seed`: too large; the most that a count can be is",
    "run_dir=": r"command line: `run_dir=` is empty; write a value, or leave it out",
    "--plan --profile": r"command line: --profile records a step of training, and --plan trains none; leave one of them out",
    "--plan --preview-schedule x.png": r"command line: --plan and --preview-schedule each do one thing and stop; give one of",
    "run_dir=runs/{name!r}": r"`run_dir`: 'runs/{name!r}' cannot be filled in",
    "data.end_token=99999999999": r"`data.end_token` is 99999999999; it should be less than 4294967296",
    "--plan optimizer.learning_rate=1e39": r"`optimizer.learning_rate` is '1e39'; it should be less than or equal to 100",
    "--plan optimizer.learning_rate=1e38": r"`optimizer`: `learning_rate: 1e\+38` over 1 minus.*set a `learning_rate` of 1e\+37",
    "--plan optimizer.eps=1e-60": r"`optimizer`: `eps: 1e-60` is as good as zero in FP32, .*; set it to 1e-37 or more",
    "--plan batch.tokens=9223372036854775776": r"`batch.tokens` is 9223372036854775776; it should be less than or equal to 1099",
    "weights": r"command line: 'weights' is not of the form key=value",
    "fp8_config.keep_bf16=down_proj": r"`fp8_config.keep_bf16` is 'down_proj'; it should be a valid list$",
    "train.steps=many": r"`train.steps` is 'many'; it should be a valid integer$",
    "optimizer.learning_rate=-1": r"`optimizer.learning_rate` is -1; it should be greater than 0",
    "train={steps: 3, tokens: 5}": r"`train`: set exactly one of `steps`, `tokens` and `epochs`",
    "precision=delayd": r"command line, .*: `precision`: unknown precision 'delayd'; did you mean 'delayed'\? known: fp32, ",
    "precision=delayed": r"`precision: delayed` needs a GPU .* this run is on cpu. Set `fp8_config.on_unsupported: emulate`",
    "precision=bf16 fp8_config.margin=2": r"`fp8_config: {margin: 2}` and `precision: bf16` contradict each other",
    "precision=mxfp8 fp8_config.margin=2": r"`precision: mxfp8` contradict.*takes fp8_format \(HYBRID or E4M3\), enable_2d_quant",
    "fp8_config.recipe=mxfp8": r"`fp8_config`: `recipe` is a key of accelerate configurations; .* `precision` names it",
    "fp8_config.keep_bf16_layers.frist=1": r"unknown key `fp8_config.keep_bf16_layers.frist`; did you mean `.*first`\?",
    "precision=block fp8_config.backend=emulation": r"`data.length: 32` is not a multiple of 128, .*`precision: block`.*is 128$",
    "precision=mxfp8 fp8_config.backend=emulation fp8_config.keep_bf16_layers.last=2": (
        r"`fp8_config.keep_bf16_layers`: the first 0 and the last 2 of 2 layers are all of them; keep fewer"
    ),
    "precision=delayed fp8_config.backend=emulation fp8_config.keep_bf16=[layers.9.*]": (
        r"`fp8_config.keep_bf16`: 'layers.9.\*' matches no linear of Qwen3ForCausalLM; near it are layers"
    ),
    "precision=[{until:0.5,use:bf16}]": r"`precision`: a schedule has two phases or more; write `precision: bf16`",
    "precision=[{until:0.5,use:delayed},{use:bf16}]": r"`precision: delayed` needs a GPU .* this run is on cpu",
    "--plan precision=[{until:12,use:delayed},{use:bf16}] fp8_config.backend=emulation": (
        r"`precision`: of 12 steps, phase 1 of 2 would end with step 12 and the one before it with step 0; every phase needs"
    ),
    "precision=fp32 weights=bf16": r"`weights: bf16` and `precision: fp32` contradict.*set `precision: bf16`, or `weights: fp32`",
    "batch.tokens=250": r"`batch.tokens: 250` is not a multiple of `data.length: 32`; the nearest are 224 and 256",
    "batch.microbatch=3": r"`batch.microbatch: 3` does not divide the 8 packs.*set it to one of 1, 2, 4, 8, or to `auto`",
    "schedule.warmup=100": r"`schedule.warmup: 100` takes 100 steps, but the run has 12.*train longer",
    "--plan optimizer.clip=.inf": r"`optimizer.clip`: inf is no norm to clip at; for no clipping set it to null",
    "--plan optimizer.clip=1e-300": r"`optimizer.clip: 1e-300` is as good as zero in FP32.*for no clipping, set null",
    "optimizer.learning_rate=30": r"`optimizer.learning_rate: 30` times `optimizer.weight_decay: 0.1` is 3,.*lower one of",
    "--plan optimizer.eps=.inf": r"`optimizer.eps` is inf; it should be a finite number",
    "--plan optimizer.learning_rate=.nan": r"`optimizer.learning_rate` is nan; it should be a finite number",
    "optimizer.weight_decay=1e999": r"`optimizer.weight_decay` is '1e999'; it should be a finite number",
    "optimizer.betas=[0.9,.nan]": r"`optimizer.betas.1` is nan; it should be a finite number",
    "train={epochs: .inf}": r"`train.epochs` is inf; it should be a finite number",
    "--plan train.epochs=1e300": r"`train.epochs: 1e\+300` are more steps than can be counted",
    "--plan train.steps=1e308": r"`train.steps`: too large; the most that a count can be is",
    "log.trackers=[wandbb]": r"`log.trackers`: there is no tracker 'wandbb'; did you mean 'wandb'\?",
    "run_dir=runs/{nmae}": r"`run_dir`: 'runs/{nmae}' cannot be filled in; did you mean {name}\?",
    "run_dir=runs/{}": r"`run_dir`: 'runs/{}' cannot be filled in; known fields: {name}, {seed}, .*every other key of the recipe",
    "run_dir=runs/{optimizer.learningrate}": r"cannot be filled in; did you mean {optimizer.learning_rate}\?",
    "run_dir=runs/" + 20 * "{data.packs}": r"too long for a folder's name",
    "--optimizer.learnin_rate=3": r"command line, .*: unknown key `optimizer.learnin_rate`; did you mean ",
    "--seed 3": r"command line: unrecognized arguments: --seed 3; a setting is key=value or --key=value, and --help lists",
    "--gpus=0": r"command line: argument --gpus: 0: a whole number of 1 or more is wanted; a setting is",
    "--plan --gpus=1.5": r"argument --gpus: 1.5: a whole number of 1 or more is wanted",
    "--plan --gpus=8 --network-gbps=inf": r"argument --network-gbps: inf: a finite number above 0 is wanted",
    "run_dir=runs/{name.x}": r"`run_dir`: 'runs/{name.x}' cannot be filled in",
    "run_dir=runs/{seed:>2000000000}": r"`run_dir`: .* cannot be filled in",
    "loss.kind=cce": r"loss.kind: cce needs .*set loss.kind: chunked",
    "loss.penalty_weight=0.1": r"`loss`: `penalty_weight` is set and `penalty` is not; set it to one of non_max_sum, neg_",
    "loss.penalty=neg_entropy": r"`loss`: `penalty: neg_entropy` needs `penalty_weight`; 0.01 is usual, and 0 only measures",
    "loss.penalty=entropy": r"`loss.penalty` is 'entropy'; it should be 'non_max_sum', 'neg_entropy', 'neg_max_prob'",
    "loss={penalty: non_max_sum, penalty_weight: -1}": r"`loss.penalty_weight` is -1; it should be greater than or equal to 0",
    "loss={penalty: top_k_mass, penalty_weight: 1}": r"`loss`: `penalty: top_k_mass` needs `top_k`, how many .*; 5 is usual",
    "loss={penalty: top_k_mass, penalty_weight: 1, top_k: 0}": r"`loss.top_k` is 0; it should be greater than 0",
    "loss={penalty: top_k_mass, penalty_weight: 1, top_k: 61}": r"`loss.top_k: 61`: .* sum to 1, .*; set it to 60 at most",
    "loss.top_k=5": r"`loss`: `top_k` is for `penalty: top_k_mass`; leave it out",
    "loss={kind: cce, penalty: non_max_sum, penalty_weight: 1}": r"`loss`: `kind: cce` keeps its .* no `penalty`; set `kind: chu",
    "evaluate.samples=[Once]": r"`evaluate.samples`: no tokenizer is known.*set `data.tokenizer`",
    "data.length=64": r"small: packs of 32 tokens, but `data.length` is 64; set it to fit, or prepare other packs",
    "--resume nowhere": r"--resume nowhere: no such checkpoint; .*checkpoints holds no checkpoint; name a step-\*",
    "--resume tests": r"tests: cannot be used: not a complete checkpoint.*--resume takes a step-\* folder.*or auto",
    "--preview-schedule x.jpeg": r"x.jpeg: the schedule is drawn as a PNG; .* ends in .png",
}
MODELS = {
    "model.config.hiden_size=32": r"`model.config.hiden_size`: Qwen3Config has no such key; did you mean `hidden_size`\?",
    "model.config.hidden_size=wide": r"`model.config`: Qwen3Config does not take .*'hidden_size' expected int, got str",
    "--plan model.config.hidden_act=swiglu": r"`model`: Qwen3Config makes no causal language model .*: KeyError: 'swiglu'",
    "--plan model.config.dtype=bf16": r"`model.config`: Qwen3Config does not take these values: .* no attribute 'bf16'",
    "--plan model.config.pad_token_id=200": r"`model.config.pad_token_id: 200` is beyond the model's vocabulary of 61 tokens",
    "--plan model.config.num_hidden_layers=100000": r"`model.config`: `num_hidden_layers: 100000`: a model of more than 1024",
    "model.config={model_type: gpt2, n_layer: 100000}": r"`model.config`: `n_layer: 100000`: a model of more than 1024",
    "model.config.model_type=qwen33": r"`model.config.model_type`: transformers has no .* 'qwen33'; did you mean `qwen3`\?",
    "--plan model.config.hidden_size=0": r"`model.config.hidden_size: 0`: a model needs at least 1",
    "--plan model.config.num_hidden_layers=0": r"`model.config.num_hidden_layers: 0`: a model needs at least 1",
    "--plan model.config.rope_theta=0": r"`model.config.rope_theta: 0`: rotary positions need a number above 0",
    '--plan model.config.rope_parameters={"rope_type":"linear","factor":"b"}': r"`model.config.rope_parameters.factor: b`: ",
    "--plan model.config.vocab_size=0": r"`model.config.vocab_size: 0`: a model needs at least 1",
    "model.config.pad_token_id=61": r"`model.config.pad_token_id: 61` is beyond the model's vocabulary of 61 tokens",
    "model.config.rms_norm_eps=.inf": r"`model.config`: infinity, not-a-number and dates cannot stand in a config.json",
    "--plan model.config.output_attentions=true": r"`model\.config\.output_attentions`: packed attention hands out no .*; set it",
    "model.config.num_attention_heads=3": r"`num_attention_heads: 3` is not a multiple of `num_key_value_heads: 2`; change one",
    "model.config.max_position_embeddings=16": r"`data.length: 32` is beyond the model's 16 positions; prepare packs of at ",
    "model.config.use_sliding_window=true model.config.sliding_window=16 model.config.max_window_layers=0": (
        r"data.length: 32 is longer than the sliding window of Qwen3ForCausalLM, 16; set it to 16 or less"
    ),
    "model.source=/no/such/model": r"`model.source`: /no/such/model: no such folder; name a folder that holds a model",
    "model.source=tests": r"`model.source`: tests is no folder with a config.json; name a folder that holds a model",
    "model.source=nobody/nothing": r"`model.source`: no model can be read from 'nobody/nothing'",
    "model.attention=varlen": r"model.attention: varlen needs a CUDA device, this is cpu; or set model.attention: auto",
    "model.config={model_type: gpt2, vocab_size: 61, attn_pdrop: 0.1}": (
        r"GPT2LMHeadModel has attn_pdrop 0.1, which packed attention does not compute; set `model.config.attn_pdrop: 0.0`"
    ),
    "model.from_scratch=true": r"`model`: `from_scratch: true` is for the architecture of a `source`, and none is set",
    "model.config={model_type: mamba, vocab_size: 61}": r"MambaForCausalLM does not use transformers' attention registry",
    "model.config={model_type: bert, vocab_size: 61}": r"in BertLMHeadModel, tokens see those after them; name a causal",
    "model.config={model_type: bert, vocab_size: 61, is_decoder: true}": r"BertLMHeadModel computes `cls` after its layers",
    "model.config={model_type: gemma4_text, vocab_size: 61}": r"`model`: Gemma4TextConfig is not one .* equal layers: 'head_dim'",
    "model.config={model_type: musicgen}": r"`model`: MusicgenConfig is not one language model of equal layers: .*; name another",
    "model.config={model_type: fuyu}": r"`model`: FuyuConfig has no vocabulary of its own, as it is of more than text; name a",
    "model.config={model_type: gemma4_assistant}": r"`model.config.model_type`: transformers has no .* by itself: .*must be",
    "model.config={model_type: qwen3_moe, vocab_size: 61, num_experts: 4, num_hidden_layers: 2, mlp_only_layers: [0]}": (
        r"`model.config.num_experts: 4`: each token chooses 8 experts \(`num_experts_per_tok`\), more than there are; set "
    ),
    "model.config={model_type: t5, vocab_size: 61}": r"T5Config makes no causal language model",
}


@pytest.mark.parametrize("given", [*SETTINGS, *MODELS])
def test_what_cannot_be_trained_is_refused_with_key_and_remedy(given, refusal):
    arguments = given.split(" ") if "{" not in given or given.startswith("--") else [given]
    assert re.search((SETTINGS | MODELS)[given], refusal(*arguments))


def test_a_warmup_that_is_longer_than_the_epochs_is_refused(refusal):
    assert re.search(
        r"`schedule.warmup: 100` takes 100 steps, but the run has 15", refusal("train={epochs: 1}", "schedule.warmup=100")
    )


def test_every_mistake_of_a_recipe_file_is_named_at_once(refusal, small_recipe, tmp_path):
    small_recipe["modle"] = small_recipe.pop("model")
    small_recipe["batch"]["microbatch"] = 0
    lines = refusal().splitlines()
    assert all(line.startswith(f"{tmp_path / 'recipe.yaml'}: ") for line in lines)
    assert any("unknown key `modle`; did you mean `model`?" in line for line in lines)
    assert any("`model` is required and missing" in line for line in lines)
    assert any("`batch.microbatch` is 0; it should be 'auto', or greater than 0" in line for line in lines)


@pytest.mark.parametrize(
    "content, says",
    [
        ("name: [small", r"recipe.yaml: not valid YAML: .*line 1"),
        ("- small", r"recipe.yaml: a mapping of keys to values is wanted, the file holds list"),
        ("name: a\nname: b", r"recipe.yaml: not valid YAML: key `name` stands twice.*line 2"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(content, says, refusal, monkeypatch):
    monkeypatch.setattr("tests.conftest.yaml_of", lambda recipe: content)
    assert re.search(says, refusal())


def test_a_recipe_that_does_not_exist_is_refused_with_the_nearest_that_does(train, small_recipe, tmp_path, monkeypatch, capfd):
    import train_accelerate

    (tmp_path / "small.yaml").touch()
    monkeypatch.setattr("sys.argv", ["train_accelerate.py", str(tmp_path / "smal.yaml")])
    assert train_accelerate.main() == 2
    assert re.search(r"error: .*smal.yaml: no such file; did you mean .*small.yaml\?", capfd.readouterr().err)


@pytest.mark.parametrize(
    "mixed_precision, says",
    [
        ("fp16", r"accelerate configuration: `mixed_precision: fp16` is not supported; use 'bf16'.*'no' for FP32, or 'fp8'"),
        (
            "fp8",
            r"`precision: delayed` needs a GPU of compute capability 8.9 or higher \(L40S, H100, H200, B200\); this run is on ",
        ),
    ],
)
def test_a_precision_of_the_launch_environment_that_no_recipe_stands_for_is_refused(mixed_precision, says, refusal, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", mixed_precision)
    assert re.search(says, refusal())


def test_several_processes_of_which_accelerate_starts_one_are_refused(refusal, launch, monkeypatch):
    """`num_processes: 2` with `distributed_type: NO`: accelerate then sets the address to meet at, and no WORLD_SIZE."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert launch("--plan").status == 0, "started without accelerate, as in a job that sets the variable for others"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    assert re.search(
        r"`num_processes` is more than 1 and `distributed_type: NO` \(or MULTI_CPU, or `--cpu`\) starts one; set "
        r".*MULTI_GPU.*ACCELERATE_USE_CPU=true",
        refusal("--plan"),
    )


def test_a_variable_that_accelerate_does_not_take_is_one_message(refusal, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "many")
    assert re.search(r"^accelerate configuration: accelerate does not take it: (?i:.*many)", refusal("--plan"))


@pytest.mark.parametrize(
    ("variable", "says"),
    [
        ("LOCAL_RANK=", "is no whole number"),
        ("MASTER_PORT=many", "is no whole number"),
        ("ACCELERATE_USE_CPU=", "is neither true nor false"),
        ("ACCELERATE_DEBUG_MODE=", "is neither true nor false"),
        ("ACCELERATE_USE_MEGATRON_LM=", "is neither true nor false"),
        ("ACCELERATE_ENABLE_RICH=x", "is neither true nor false"),
        ("USE_TORCH_XLA=x", "is neither true nor false"),
        ("ACCELERATE_MIXED_PRECISION=", "is none of no, bf16, fp16, fp8"),
        ("ACCELERATE_LOG_LEVEL=", "is none of critical, "),
    ],
)
def test_a_variable_that_accelerate_or_torch_cannot_use_is_named_before_they_are_imported(variable: str, says: str):
    name, _, value = variable.partition("=")
    command = [sys.executable, "train_accelerate.py", "my.yaml"]
    ended = subprocess.run(command, env=os.environ | {name: value}, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith(f"error: environment: {variable} {says}")
    assert ended.stderr.endswith("; correct it, or unset it\n")


@pytest.mark.parametrize("device", ["x", "", "meta", "cpu:1", "cuda:99"])
def test_a_device_that_is_none_or_not_here_is_one_message(device: str, refusal, monkeypatch):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", device)
    said = f"environment: ACCELERATE_TORCH_DEVICE={device} is no device of this machine; correct it, or unset it"
    assert refusal("--plan") == said


@pytest.mark.parametrize("asked", [(), ("--plan",)])
def test_a_run_and_its_packs_do_not_share_a_folder(asked: tuple[str, ...], refusal, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "one")
    for packs in ("one", "link"):
        said = refusal(f"run_dir={tmp_path}/one", f"data.packs={tmp_path}/{packs}", *asked)
        assert said.startswith(f"`run_dir` and `data.packs` are both {tmp_path}/one: ") and "change one of them" in said
    assert not (tmp_path / "one").exists()


def test_a_number_of_processes_that_is_none_is_one_message(refusal, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert refusal("--plan") == "environment: WORLD_SIZE=many is no whole number; correct it, or unset it"


def test_a_mistake_in_an_fp8_config_names_the_accelerate_configuration(refusal, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_RECPIE", "nvfp4")
    assert refusal().startswith("accelerate configuration: unknown key `fp8_config.recpie`; did you mean `fp8_config.recipe`?")


def test_the_command_itself_refuses_on_stderr_without_a_traceback(train):
    finished = train("optimizer.learnin_rate=1")
    assert finished.status == 2 and not finished.run_dir.exists()
    assert finished.output.startswith("error: command line, over ") and finished.output.count("\n") == 1


def test_a_plan_and_a_preview_come_without_a_run_folder(launch, small_recipe, tmp_path):
    planned = launch("--plan", "--tokens-per-second", "1000")
    assert planned.status == 0 and planned.err == ""
    assert "12 steps" in planned.out and "memory" in planned.out and "1,000 tokens/s" in planned.out
    scaled = launch("--plan", "--tokens-per-second", "1000", "--gpus", "4", "--nodes", "2", "--network-gbps", "100")
    assert scaled.status == 0 and "4 GPUs on 2 machines, ddp; one GPU 1,000 tokens/s" in scaled.out
    assert "100 Gbit/s a GPU" in scaled.out
    refused = launch("--gpus", "16")
    assert refused.status == 2 and refused.err.startswith("error: --gpus: say how") and refused.err.count("\n") == 1
    picture = tmp_path / "schedule.png"
    previewed = launch("--preview-schedule", str(picture))
    assert previewed.status == 0 and "cosine: warmup 2" in previewed.out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not Path(small_recipe["run_dir"]).exists()


def test_a_plan_says_which_precision_a_run_would_get(launch):
    assert "small: nvfp4 compute" in launch("--plan", "precision=nvfp4", "fp8_config.on_unsupported=emulate").out
    assert "small: bf16 compute" in launch("--plan", "precision=nvfp4", "fp8_config.on_unsupported=fallback").out


def test_a_plan_refuses_what_the_run_would_refuse(refusal):
    assert "model.attention: varlen needs a CUDA device" in refusal("--plan", "model.attention=varlen")
