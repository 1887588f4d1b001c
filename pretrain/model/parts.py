"""A model under FSDP2: the first process builds or reads it whole, the others hold nothing until they get their shards of it."""

from __future__ import annotations

import torch
from accelerate import Accelerator, init_empty_weights
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from pretrain.model.attention import backends as attention
from pretrain.model.distributed import from_all_ranks, refused_together
from pretrain.model.huggingface import build
from pretrain.settings.recipe import ModelSettings


def build_on_first_rank(
    settings: ModelSettings,
    config: PretrainedConfig,
    accelerator: Accelerator,
    *,
    kept: torch.dtype,
    weights: torch.dtype,
    seed: int,
    backend: str,
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The model with parameters of dtype `weights` on the meta device and buffers on their own, and on the first rank, in host
    memory, what the parameters are to be: what `build` gives them, by name, in `kept`. `part_from_first` hands it out.
    Collective; InputError on all ranks where the first cannot build it."""
    attention.register()
    reads = settings.weights_source is not None
    device = torch.device("cpu") if reads else accelerator.device  # what is drawn depends on the device that draws

    def build_whole() -> PreTrainedModel | None:
        options = {"weights": kept, "seed": seed, "device": device, "backend": backend}
        return build(settings, config, **options).cpu() if accelerator.is_main_process else None

    whole = refused_together(build_whole)
    with accelerator.device, init_empty_weights(include_buffers=False):
        hf = AutoModelForCausalLM.from_config(config, dtype=kept if reads else torch.float32, attn_implementation=backend)
    hf.tie_weights()
    for parameter in hf.parameters():
        parameter.data = parameter.data.to(weights)
    drawn = dict(whole.named_buffers()) if whole else {}
    for name, buffer in hf.named_buffers():
        if whole:
            buffer.copy_(drawn[name])
        torch.distributed.broadcast(buffer, src=0)
    hf.generation_config = from_all_ranks(whole and whole.generation_config)[0]
    return hf, {name: parameter.data.to(kept) for name, parameter in whole.named_parameters()} if whole else {}
