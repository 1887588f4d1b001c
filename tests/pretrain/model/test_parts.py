"""A model built in parts beside the whole one."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from pretrain.model import huggingface as model
from pretrain.model.parts import NotInParts, Part, build_in_parts
from pretrain.settings.recipe import ModelSettings
from tests.pretrain.conftest import _SHAPES, VOCABULARY

CPU = torch.device("cpu")
LLAMA = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 3, "attention_bias": True}


def settings_of(kind: str, **changes: object) -> ModelSettings:
    shape = LLAMA if kind == "llama" else _SHAPES[kind]
    return ModelSettings(config={"model_type": kind, "vocab_size": VOCABULARY, **shape, **changes})


def both(settings: ModelSettings, part: Part, kept: torch.dtype, weights: torch.dtype) -> tuple:
    options = {"seed": 7, "device": CPU, "backend": "packed_sdpa"}
    whole = model.build(settings, model.load_config(settings), weights=kept, **options)
    after = torch.rand(3)
    in_parts = build_in_parts(settings, model.load_config(settings), part, kept=kept, weights=weights, **options)
    if settings.source is None:
        assert torch.equal(after, torch.rand(3)), "the generator stands where it stood"
    return whole, in_parts


@pytest.mark.parametrize("origin", ["scratch", "folder"])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize(("kept", "weights"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_the_parts_together_are_the_whole_bit_for_bit(origin: str, kind: str, kept: str, weights: str, tmp_path: Path) -> None:
    settings, processes = settings_of(kind), 4
    if origin == "folder":
        torch.manual_seed(3)
        drawn = AutoModelForCausalLM.from_config(model.load_config(settings))
        drawn.generation_config.temperature = 0.5
        drawn.generation_config.do_sample = True
        drawn.save_pretrained(tmp_path, max_shard_size="10KB")
        settings = ModelSettings(source=str(tmp_path))
    found: dict[str, list[Tensor]] = {}
    for index in range(processes):
        whole, built = both(settings, Part(index, processes), getattr(torch, kept), getattr(torch, weights))
        expected = dict(whole.named_parameters())
        assert list(built.parts) == list(dict(built.hf.named_parameters())) == list(expected)
        for name, parameter in built.hf.named_parameters():
            assert parameter.is_meta and parameter.dtype == getattr(torch, weights) and parameter.requires_grad
            assert built.parts[name].dtype == getattr(torch, kept)
            found.setdefault(name, []).append(built.parts[name])
        buffers = dict(built.hf.named_buffers())
        for name, buffer in whole.named_buffers():
            assert torch.equal(buffer, buffers[name]), name
        assert built.hf.training == whole.training
        assert built.hf.generation_config.to_dict() == whole.generation_config.to_dict()
        assert built.hf.config.to_dict() == whole.config.to_dict()
        tied = built.hf.get_output_embeddings().weight is built.hf.get_input_embeddings().weight
        assert tied == (kind == "qwen3")
    for name, parts in found.items():
        assert torch.equal(torch.cat(parts), expected[name]), name
        chunks = torch.chunk(expected[name], processes)
        assert all(torch.equal(one, other) for one, other in zip(parts, chunks, strict=False)), name


class Living(TorchDispatchMode):
    """The most bytes that were alive at once in tensors made within it."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, function: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and not tensor.is_meta and tensor.untyped_storage()._cdata not in self.alive:
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = 0 if storage.filename else storage.nbytes()  # a mapped file takes none
                weakref.finalize(storage, self.alive.pop, storage._cdata)
        self.most = max(self.most, sum(self.alive.values()))
        return result


@pytest.mark.parametrize("origin", ["scratch", "folder"])
def test_beside_its_part_a_process_holds_no_more_than_the_largest_tensor(origin: str, tmp_path: Path) -> None:
    settings, part = settings_of("llama", num_hidden_layers=24, tie_word_embeddings=False), Part(1, 8)
    config = model.load_config(settings)
    if origin == "folder":
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        settings = ModelSettings(source=str(tmp_path))
    options = {"seed": 7, "device": CPU, "backend": "packed_sdpa"}
    with Living() as living:
        whole = model.build(settings, config, weights=torch.float32, **options)
    sizes = [parameter.nbytes for parameter in whole.parameters()]
    if origin == "scratch":  # from a folder, what was read is no tensor that torch made
        assert living.most >= sum(sizes), "what is alive is seen"
    del whole
    with Living() as living:
        build_in_parts(settings, config, part, kept=torch.float32, weights=torch.bfloat16, **options)
    small = 4096  # checksums, rotary tables, first rows
    assert living.most <= sum(sizes) / 8 + 2 * max(sizes) + small < sum(sizes) / 3


def test_what_is_not_drawn_by_modules_is_built_whole() -> None:
    with pytest.raises(NotInParts, match="weights of other modules"):
        both(settings_of("gpt2"), Part(0, 2), torch.float32, torch.float32)
    linear = nn.Sequential(nn.Linear(2, 2))[0]
    assert linear.weight.device == CPU, "nothing is left behind that empties modules"


def test_a_folder_whose_tensors_are_named_otherwise_is_read_whole(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(model.load_config(settings_of("qwen3"))).base_model.save_pretrained(tmp_path)
    with pytest.raises(NotInParts, match="embed_tokens"):
        both(
            ModelSettings(source=str(tmp_path), config={"architectures": ["Qwen3ForCausalLM"]}), Part(0, 2), *[torch.float32] * 2
        )
