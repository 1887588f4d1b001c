"""Build a Hugging Face model.

A model is loaded from the Hugging Face hub or from a folder, or it is built from a configuration
alone.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, init_empty_weights
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from foundation.errors import InputError
from pretrain.model import attention_support, routing
from pretrain.model.configuration import explaining_transformers
from pretrain.model.distributed import from_all_ranks, raise_on_all_ranks
from pretrain.model.loss.head import check as check_loss
from pretrain.model.scores import admit_packed_sdpa
from pretrain.precision.grouped import check_experts
from pretrain.precision.layouts import stored_weights
from pretrain.settings.recipe import LossSettings, ModelSettings

# Names of buffers that older versions of transformers saved. Newer versions compute these buffers.
_OLD_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|attn\.masked_bias)$")
_ANOTHER_SOURCE = (
    "either download the source again, or change `model.config` so that the model has exactly the "
    "parameters of the source (`model.config: null` takes its configuration). If names differ in a "
    "prefix, such as `_orig_mod.` of torch.compile or `module.` of DDP, remove it from the names "
    "in the file"
)

# The progress bar of transformers would be written to log files too.
transformers_logging.disable_progress_bar()


def check_architecture(model: PreTrainedModel, length: int, loss: LossSettings) -> None:
    """Raise InputError if this project would compute the model differently from transformers.

    `model` may be on the meta device. `length` is the pack length in tokens.
    """
    supported = (model.base_model, model.get_output_embeddings())
    unsupported = [key for key, child in model.named_children() if child not in supported]
    if unsupported:
        raise InputError(
            f"`model`: {type(model).__name__} has modules besides the base model and the output "
            f"embedding: {', '.join(unsupported)}; choose another model"
        )
    attention_support.check(model, length)
    if getattr(model.config, "output_router_logits", None):
        routing.check(model)
    check_experts(model)
    check_loss(model.config, loss)


def build_on_meta(config: PretrainedConfig) -> PreTrainedModel:
    """Return the model on the meta device, which needs no memory for weights.

    The shapes of this model are used to plan memory and to count FLOPs. Raise InputError if the
    configuration has impossible shapes.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(
            f"`model`: {config.model_type} is no causal language model; choose another model"
        )
    problem = f"no causal language model can be built from this {type(config).__name__}"
    remedy = ""
    if getattr(config, "layer_types", "") is None:
        remedy = (
            "set `model.config.layer_types` to a list with the type of each layer, such as [conv, "
            "full_attention]"
        )
    with explaining_transformers(f"`model`: {problem}", remedy), torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )


def build(
    settings: ModelSettings,
    config: PretrainedConfig,
    *,
    weights: torch.dtype,
    seed: int,
    device: torch.device,
    backend: str,
) -> PreTrainedModel:
    """Return the model on `device`, with weights of dtype `weights`.

    The weights are loaded from the source. Without a source of weights, random weights are drawn in
    FP32 with `seed` and then rounded to `weights`. Therefore FP32 and BF16 runs start from the same
    random numbers, and all processes draw the same weights.

    Args:
        settings: Source and changes of the configuration.
        config: Configuration of the model.
        weights: Dtype of the weights.
        seed: Seed of random weights.
        device: Device of the model.
        backend: Name of the attention implementation, such as "packed_varlen".

    Raises:
        InputError: The weights of the source cannot be loaded or do not fit the configuration.
    """
    admit_packed_sdpa(config)
    options: dict[str, Any] = {"attn_implementation": backend, "trust_remote_code": False}
    if settings.weights_source is not None:
        return _load(settings, config, weights, device, options)
    torch.manual_seed(seed)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
    # Do not use model.to(), because it would also round buffers. With rotary frequencies in BF16,
    # the positions of tokens would be wrong.
    round_weights(model, weights)
    return model


def _load(
    settings: ModelSettings,
    config: PretrainedConfig,
    weights: torch.dtype,
    device: torch.device,
    options: dict[str, Any],
) -> PreTrainedModel:
    """Return the model on `device` with the weights of the source. See `build`.

    options: keyword arguments of transformers.
    """
    source = f"`model.source`: {settings.source}"
    quantized = quantized_weights(str(settings.repository), settings.revision)
    on_meta = build_on_meta(config)
    # transformers reads either a source, or the values of a dict by `[...]`.
    repository = None if quantized else str(settings.repository)
    model_class: Any = type(on_meta)
    with explaining_transformers(f"{source}: weights cannot be loaded", _ANOTHER_SOURCE):
        model, loading = model_class.from_pretrained(
            repository,
            state_dict=quantized or None,
            config=config,
            revision=settings.revision,
            dtype=weights,
            output_loading_info=True,
            # Weights of other sizes raise InputError below, with the sizes in the message.
            ignore_mismatched_sizes=True,
            **options,
        )
    _check_loaded(source, model, loading)
    expected = dict(on_meta.named_parameters())
    # If the file contains different values for two tied parameters, transformers unties them.
    if untied := sorted(dict(model.named_parameters()).keys() - expected.keys()):
        raise InputError(
            f"{source}: the configuration ties {untied[0]} to another parameter, but the file has "
            "different values for both; set `model.config.tie_word_embeddings: false`",
        )
    # transformers does not keep `requires_grad: false` when it loads weights.
    for name, parameter in expected.items():
        model.get_parameter(name).requires_grad_(parameter.requires_grad)
    if quantized:
        load_generation_config(model, settings)
    return model.to(device)


def _check_loaded(source: str, model: PreTrainedModel, loading: dict[str, Any]) -> None:
    """Raise InputError unless the source has exactly the parameters of the model.

    loading: the second result of `from_pretrained`.
    """
    for name, stored, expected in sorted(loading["mismatched_keys"]):
        remedy = _ANOTHER_SOURCE
        # The embedding and the head have a row for each token of the vocabulary.
        if stored[0] != expected[0] == model.config.get_text_config().vocab_size:
            remedy = f"set `model.config.vocab_size: {stored[0]}`"
        raise InputError(
            f"{source}: {name} has the shape {list(stored)}, but {list(expected)} by the "
            f"configuration; {remedy}"
        )
    # transformers initializes missing weights at random, and differently in each process.
    missing = sorted(loading["missing_keys"])
    surplus = sorted(name for name in loading["unexpected_keys"] if not _OLD_BUFFERS.search(name))
    if missing or surplus:
        missing_example = next(iter(missing), "none")
        surplus_example = next(iter(surplus), "none")
        raise InputError(
            f"{source}: the source has no weights for {len(missing)} of the model's parameters "
            f"({missing_example}), and {len(surplus)} of its weights have no place in the model "
            f"({surplus_example}); {_ANOTHER_SOURCE}"
        )
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise InputError(f"{source}: {name} contains NaN or infinity; choose another source")


def quantized_weights(repository: str, revision: str | None) -> dict[str, Any]:
    """Return a dict from names to the values of a model with quantized weights.

    `[...]` reads a value from its file, and dequantizes it. The dict is empty if the weights of the
    model are not quantized.

    repository: a folder, or a name on the Hugging Face hub.

    Raises InputError if the files do not have the layout that config.json describes.
    """
    with explaining_transformers(
        f"`model.source`: {repository}: weights cannot be read",
        "either download the source again, or choose a source with BF16 weights or with a layout "
        "in docs/serving.md",
    ):
        folder = Path(repository)
        if not folder.is_dir():
            folder = Path(
                snapshot_download(
                    repository,
                    revision=revision,
                    allow_patterns=["model.safetensors", "model-*.safetensors"],
                )
            )
        files = [safe_open(file, "pt") for file in sorted(folder.glob("model*.safetensors"))]
        config, _ = PretrainedConfig.get_config_dict(repository, revision=revision)
        return stored_weights(
            ((name, file.get_slice(name)) for file in files for name in file.keys()),  # noqa: SIM118
            config.get("quantization_config"),
        )


def load_generation_config(model: PreTrainedModel, settings: ModelSettings) -> None:
    """Set the generation config of the source, if the source has one."""
    if model.can_generate():
        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(
                str(settings.repository), revision=settings.revision or "main"
            )


def build_on_first_rank(
    settings: ModelSettings,
    config: PretrainedConfig,
    accelerator: Accelerator,
    *,
    value_dtype: torch.dtype,
    parameter_dtype: torch.dtype,
    seed: int,
    backend: str,
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Return a model for FSDP2 whose parameters have no values, and the values on the first rank.

    The parameters of the model are on the meta device in `parameter_dtype`, and its buffers are on
    the device of the process. On the first rank, the second result maps the name of each parameter
    to its value, in `value_dtype` and in host memory. These values are from `build`, which only the
    first rank calls. On the other ranks the dict is empty. `part_from_first` distributes the values
    later. All ranks must call this function. Raise InputError on all ranks if the first rank cannot
    build the model.
    """
    admit_packed_sdpa(config)
    has_source = settings.weights_source is not None
    # Draw random weights on the device of the run, because a seed gives different random numbers
    # on another device.
    device = torch.device("cpu") if has_source else accelerator.device

    def build_if_first() -> PreTrainedModel | None:
        if not accelerator.is_main_process:
            return None
        model = build(
            settings, config, weights=value_dtype, seed=seed, device=device, backend=backend
        )
        return model.cpu()

    built = raise_on_all_ranks(build_if_first)
    with accelerator.device, init_empty_weights(include_buffers=False):
        meta_model = AutoModelForCausalLM.from_config(
            config,
            # The dtype with which `build` constructs the model. Buffers have this dtype too.
            dtype=value_dtype if has_source else torch.float32,
            attn_implementation=backend,
        )
    meta_model.tie_weights()
    round_weights(meta_model, parameter_dtype)
    _broadcast_buffers(built, meta_model)
    generation_config = built.generation_config if built else None
    # All ranks get the configuration of the first rank.
    meta_model.generation_config = from_all_ranks(generation_config)[0]
    parameters = built.named_parameters() if built else ()
    values = {name: parameter.data.to(value_dtype) for name, parameter in parameters}
    return meta_model, values


def _broadcast_buffers(source: PreTrainedModel | None, target: PreTrainedModel) -> None:
    """Copy the buffers of `source`, which only the first rank has, to `target` on all ranks."""
    for name, buffer in target.named_buffers():
        if source:
            buffer.copy_(source.get_buffer(name))
        torch.distributed.broadcast(buffer, src=0)


def round_weights(hf: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Round the parameters to `dtype` in place, and return a dict from names to unrounded values.

    The remainders of exact BF16 weights are computed from the unrounded values.
    """
    masters = {name: parameter.data for name, parameter in hf.named_parameters()}
    for parameter in hf.parameters():
        parameter.data = parameter.data.to(dtype)
    return masters


def is_mixture(model: PreTrainedModel) -> bool:
    """Return True if the model is a mixture of experts."""
    has_experts = any(name.endswith(".experts") for name, _ in model.named_modules())
    return has_experts or bool(routing.routers_of(model))


def decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return a dict from the name of each transformer layer of `model` to the layer, in order."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, GradientCheckpointingLayer)
    }


def named_tensors(hf: PreTrainedModel) -> dict[str, Tensor]:
    """Return a dict from Hugging Face names to parameters and persistent buffers, not copied.

    Tied parameters are in the dict once, under their first name.
    """
    saved = hf.state_dict().keys()
    buffers = {name: buffer for name, buffer in hf.named_buffers() if name in saved}
    return {**dict(hf.named_parameters()), **buffers}
