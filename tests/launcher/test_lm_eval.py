"""lm-evaluation-harness scores an exported model as docs/serving.md says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]


def test_harness_adds_no_bos_that_packs_lack(
    words: Path, train_here: Callable, small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    """The command of the docs is used with a tokenizer that adds BOS, as those of Llama 3 do."""
    pytest.importorskip("lm_eval", reason="needs lm_eval of requirements-dev.txt")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    tokenizer = tmp_path / "adds_bos"
    tokenizer.mkdir()
    for file in words.iterdir():
        (tokenizer / file.name).write_bytes(file.read_bytes())
    content = json.loads((tokenizer / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "w59", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"w59": {"id": "w59", "ids": [59], "tokens": ["w59"]}},
    }
    (tokenizer / "tokenizer.json").write_text(json.dumps(content))
    small_recipe["model"]["config"] |= {"vocab_size": 64}
    small_recipe["data"] |= {"tokenizer": str(tokenizer)}
    run = train_here("train.steps=2", "parity=off")
    assert run.status == 0, run.output

    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    (arguments,) = re.findall(r"lm_eval --model hf --model_args (\S+)", page)
    harness = HFLM.create_from_arg_string(
        arguments.replace("RUN", str(run.run_dir)), {"device": "cpu", "dtype": "float32"}
    )
    context, answer = "w1 w2 w3", " w4 w5"
    request = Instance("loglikelihood", {}, (context, answer), 0)
    ((likelihood, _),) = harness.loglikelihood([request], disable_tqdm=True)

    model = AutoModelForCausalLM.from_pretrained(run.run_dir / "final", dtype=torch.float32)
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.no_grad():
        log_probabilities = model(ids).logits.log_softmax(-1)[0]
    expected = log_probabilities[[2, 3], [4, 5]].sum().item()
    assert likelihood == pytest.approx(expected, rel=1e-5)
    assert harness.tok_encode(context) == [1, 2, 3]
