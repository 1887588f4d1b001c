"""Test `python -m pretrain export` and `sample` on checkpoints of interrupted runs."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from packing.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from tests.conftest import ROOT, Finished, Trainer, command_here, contents, flip
from tests.golden.runs import tensors_of


def export(source: Path, out: Path, *options: object) -> Finished:
    return command_here("export", source, "--out", out, *options)


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
    run = start_here(recipe, folder, "parity=off").done()
    shutil.move(run.run_dir / "final", folder / "final")
    return run.run_dir


@pytest.fixture(scope="module")
def exported(exact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the export of the run."""
    out = tmp_path_factory.mktemp("exported") / "out"
    before = contents(exact)
    export(exact, out).done()
    assert contents(exact) == before
    return out


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").named_parameters())


def test_an_export_has_the_stored_weights_tokenizer_and_card(exact: Path, exported: Path) -> None:
    saved = tensors_of(exact / "checkpoints/step-00000008")
    weights = loaded(exported)
    assert all(weight.dtype == torch.bfloat16 for weight in weights.values())
    assert all(torch.equal(weights[name], saved[name]) for name in saved.keys() & weights.keys())
    assert weights.keys() <= saved.keys()
    assert AutoTokenizer.from_pretrained(exported)("w1 w2").input_ids == [1, 2]
    assert json.loads((exported / "config.json").read_text())["dtype"] == "bfloat16"
    card = (exported / "README.md").read_text()
    assert "in 8 steps" in card and "mean of steps 1 to 8" in card
    # The token w59 ends an answer.
    for folder in (exact.parent / "final", exported):
        assert GenerationConfig.from_pretrained(folder).eos_token_id == [60, 59]


def test_merge_exports_the_mean_of_the_exact_weights_of_the_last_checkpoints(
    exact: Path, exported: Path, tmp_path: Path
) -> None:
    checkpoints = exact / "checkpoints"
    for step in (4, 8):
        export(checkpoints / f"step-{step:08}", tmp_path / str(step), "--dtype", "fp32").done()
    four, eight = (loaded(tmp_path / name) for name in ("4", "8"))
    for name, weight in loaded(exported).items():
        assert torch.allclose(eight[name], weight.float(), rtol=2**-8, atol=0)
    assert any((weight != weight.bfloat16()).any() for weight in eight.values())
    (link := checkpoints / "newest").symlink_to("step-00000008")
    text = "mean weights of the checkpoints of steps 8, 4; the losses are those of the run"
    for source, dtype, options in (
        (link, torch.float32, ("--dtype", "fp32")),
        (exact, torch.bfloat16, ()),
    ):
        assert text in export(source, tmp_path / str(dtype), "--merge", 2, *options).done().out
        for name, weight in loaded(tmp_path / str(dtype)).items():
            mean = (four[name].double() + eight[name].double()) / 2
            assert torch.equal(weight, mean.float().to(dtype)), name
    link.unlink()
    assert f"| merged | {text} |" in (tmp_path / str(dtype) / "README.md").read_text()
    for source, number in ((exact, 3), (checkpoints / "step-00000004", 2)):
        refusal = export(source, tmp_path / "none", "--merge", number).refusal
        assert f" can be merged instead of {number}, " in refusal and "checkpoint.keep" in refusal
        assert not (tmp_path / "none").exists()


def test_an_export_that_fails_writes_over_nothing_and_leaves_no_files(
    exact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mine := tmp_path / "mine").mkdir()
    (mine / "thesis.tex").write_text("years of work")
    assert str(mine) in export(exact, mine).refusal
    assert [*contents(mine)] == ["thesis.tex"]
    run = shutil.copytree(exact, tmp_path / "run")
    for step, options in (("4", ("--merge", 2)), ("8", ())):
        for file in (run / "checkpoints").glob(f"*{step}/model*.safetensors"):
            flip(file)
        assert "damaged" in export(run, tmp_path / "other", *options).refusal

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("foundation.files.fsync_tree", full)
    assert "No space left" in export(exact, tmp_path / "other").refusal
    assert {*tmp_path.iterdir()} == {mine, run}


def test_a_foreign_model_is_sampled_without_its_code_and_its_kernels(
    exported: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(exported, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())

    def sample(**changes: Any) -> Finished:
        (out / "config.json").write_text(json.dumps(config | changes))
        return command_here("sample", out, "w1", "--tokens", 2)

    sample(attn_implementation="kernels-community/flash-attn2").done()
    refusal = sample(model_type="unknown", auto_map={"AutoConfig": "code.Config"}).refusal
    assert f"{out} requires Python code" in refusal


def test_an_export_continues_a_text_by_its_seed_and_by_its_cards_own_code(
    exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = ("sample", exported, "w3", "w1 w2", "--tokens", 8)
    texts = [command_here(*sample, "--seed", seed).done().out for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]
    monkeypatch.chdir(exported)
    code = Path("README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_a_run_goes_on_from_its_own_export_with_its_own_packs(
    train_here: Trainer, tmp_path: Path
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
    train_here.recipe["data"] = data | {"packs": str(tmp_path / "packs"), "length": 32}
    train_here.recipe["model"]["config"].pop("vocab_size")
    settings = ("train.steps=2", "evaluate.every=null", "evaluate.samples=[one 12345]")
    first = train_here(*settings).done()
    from_export = (f"model.source={first.run_dir / 'final'}", "model.config=null")
    packs = f"data={{packs: {tmp_path / 'packs'}, length: 32}}"
    second = train_here(*settings, *from_export, packs, f"run_dir={tmp_path / 'next'}").done()
    folders = (tmp_path / "tokenizer", first.run_dir / "final", second.run_dir / "final")
    assert len({load_tokenizer(str(folder)).fingerprint for folder in folders}) == 1
    # A tokenizer that is no longer that of the training is not exported.
    for folder in ("packs", "tokenizer"):
        shutil.rmtree(tmp_path / folder)
    save_tokenizer(train_tokenizer(["three 678 four"] * 9, 300), tmp_path / "tokenizer")
    finished = export(first.run_dir, tmp_path / "out").done()
    assert "has changed since the training" in finished.out
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_harness_adds_no_bos_that_packs_lack(
    words: Path, train_here: Trainer, tmp_path: Path
) -> None:
    """Use the command of the docs with a tokenizer that adds BOS, as those of Llama 3 do."""
    pytest.importorskip("lm_eval", reason="needs lm_eval of requirements-dev.txt")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    tokenizer = shutil.copytree(words, tmp_path / "adds_bos")
    file = str(tokenizer / "tokenizer.json")
    adds_bos = Tokenizer.from_file(file)
    template = {"single": "w59 $A", "pair": "$A $B:1", "special_tokens": [("w59", 59)]}
    adds_bos.post_processor = processors.TemplateProcessing(**template)
    adds_bos.save(file)
    train_here.recipe["data"] |= {"tokenizer": str(tokenizer)}
    run = train_here("train.steps=2", "model.config.vocab_size=64").done()

    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    (arguments,) = re.findall(r"lm_eval --model hf --model_args (\S+)", page)
    options = {"device": "cpu", "dtype": "float32"}
    harness = HFLM.create_from_arg_string(arguments.replace("RUN", str(run.run_dir)), options)
    context, answer = "w1 w2 w3", " w4 w5"
    request = Instance("loglikelihood", {}, (context, answer), 0)
    ((likelihood, _),) = harness.loglikelihood([request], disable_tqdm=True)

    model = AutoModelForCausalLM.from_pretrained(run.run_dir / "final", dtype=torch.float32)
    with torch.no_grad():
        log_probabilities = model(torch.tensor([[1, 2, 3, 4, 5]])).logits.log_softmax(-1)[0]
    expected = log_probabilities[[2, 3], [4, 5]].sum().item()
    assert likelihood == pytest.approx(expected, rel=1e-5)
    assert harness.tok_encode(context) == [1, 2, 3]
