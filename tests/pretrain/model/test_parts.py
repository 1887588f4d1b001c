"""A model whose weights the first rank has, beside the whole one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from pretrain.model import huggingface as model
from pretrain.model.parts import build_on_first_rank
from pretrain.settings.recipe import ModelSettings
from tests.pretrain.conftest import _SHAPES, VOCABULARY


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("origin", ["scratch", "folder"])
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
@pytest.mark.parametrize(("kept", "weights"), [("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_the_first_rank_has_what_is_built_whole_and_the_model_has_no_memory(
    origin: str, kind: str, kept: str, weights: str, tmp_path: Path
) -> None:
    settings = ModelSettings(config={"model_type": kind, "vocab_size": VOCABULARY, **_SHAPES[kind]})
    if origin == "folder":
        torch.manual_seed(3)
        drawn = AutoModelForCausalLM.from_config(model.load_config(settings))
        drawn.generation_config.temperature, drawn.generation_config.do_sample = 0.5, True
        drawn.save_pretrained(tmp_path / "model", max_shard_size="10KB")
        settings = ModelSettings(source=str(tmp_path / "model"))
    options, dtype = {"seed": 7, "backend": "packed_sdpa"}, getattr(torch, kept)
    whole = model.build(settings, model.load_config(settings), weights=dtype, device=torch.device("cpu"), **options)
    first = SimpleNamespace(is_main_process=True, device=torch.device("cpu"))
    options |= {"kept": dtype, "weights": getattr(torch, weights)}
    hf, values = build_on_first_rank(settings, model.load_config(settings), first, **options)
    expected, buffers = dict(whole.named_parameters()), dict(whole.named_buffers())
    assert list(values) == list(dict(hf.named_parameters())) == list(expected)
    for name, parameter in hf.named_parameters():
        assert parameter.is_meta and parameter.dtype == getattr(torch, weights) and parameter.requires_grad
        assert parameter.shape == values[name].shape and torch.equal(values[name], expected[name]), name
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in hf.named_buffers())
    assert hf.generation_config.to_dict() == whole.generation_config.to_dict()
    assert hf.config.to_dict() == whole.config.to_dict()
    tied = [each.get_output_embeddings().weight is each.get_input_embeddings().weight for each in (hf, whole)]
    assert tied[0] == tied[1]
