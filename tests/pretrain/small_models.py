"""Tiny packed models as the launcher builds them, their plain copies, and random packs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from packing.arrow import Pack
from pretrain.model import huggingface as model
from pretrain.model.configuration import load_config
from pretrain.model.packed import PackedLanguageModel
from pretrain.model.wrapping import convert, wrap_layers
from pretrain.precision.product import PrecisionContext
from pretrain.settings.recipe import LossSettings, ModelSettings

VOCABULARY = 61
_SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
_SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
_SHAPES = {
    "qwen3": _SIZES | {"tie_word_embeddings": True, "initializer_range": 0.2},
    "qwen3_moe": {"initializer_range": 0.2},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    | {"attn_pdrop": 0.0, "initializer_range": 0.2},
}


def build_model(
    kind: str = "qwen3",
    *,
    weights: torch.dtype = torch.float32,
    cast_to: torch.dtype | None = None,
    seed: int = 1,
    backend: str = "packed_sdpa",
    recompute: str | int = "none",
    **changes: object,
) -> PackedLanguageModel:
    config = {"model_type": kind, "vocab_size": VOCABULARY, **_SHAPES.get(kind, {}), **changes}
    settings = ModelSettings(config=config, gradient_checkpointing=recompute)
    options = {"weights": weights, "seed": seed, "device": torch.device("cpu"), "backend": backend}
    hf = model.build(settings, load_config(settings), **options)
    context = PrecisionContext(cast_to or weights)
    packed = PackedLanguageModel(hf, backend, LossSettings(chunk=16), context)
    convert(hf, {}, context)
    wrap_layers(packed, settings, cast_to=cast_to, compile_layers=False)
    return packed


def plain_copy(packed: PackedLanguageModel) -> PreTrainedModel:
    """Return a plain transformers model with the weights of `packed`.

    The copy has eager attention and is in evaluation mode.
    """
    plain = AutoModelForCausalLM.from_config(packed.hf.config, attn_implementation="eager")
    plain.load_state_dict(packed.hf.state_dict())
    return plain.eval()


def plain_loss(plain: PreTrainedModel, packs: Sequence[Pack]) -> Tensor:
    """Return the mean next-token loss of the documents of packs, one document at a time."""
    losses = []
    for pack in packs:
        documents = np.split(pack.input_ids.astype(np.int64), np.cumsum(pack.lengths))
        for ids in map(torch.from_numpy, documents[: len(pack.lengths)]):
            if len(ids) > 1:
                logits = plain(input_ids=ids[None]).logits[0, :-1]
                losses.append(F.cross_entropy(logits, ids[1:], reduction="none"))
    return torch.cat(losses).mean() if losses else torch.zeros(())


def random_packs(lengths: Sequence[Sequence[int]], length: int, seed: int = 0) -> list[Pack]:
    """Return packs of random tokens with documents of the given lengths.

    The rest of `length` is padding.
    """
    rng = np.random.default_rng(seed)
    return [
        Pack(rng.integers(VOCABULARY, size=length).astype(np.uint32), np.array(sizes, np.int32))
        for sizes in lengths
    ]
