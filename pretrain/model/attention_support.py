"""Models that packed attention supports, and the error messages for all others."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from foundation.errors import InputError
from pretrain.model.hybrids.families import separated_kinds
from pretrain.model.scores import WITH_SINKS, sink_in, unsupported_cap


def check_documents(model: PreTrainedModel, separated: Collection[str] = ()) -> None:
    """Raise InputError if the model has parts that mix the tokens of packed documents.

    This holds for the attention functions of this project and of transformers. The functions of
    transformers separate documents by their positions or by the arguments of FlashAttention. Hybrid
    models are refused, because only `PackedLanguageModel` separates documents in their layers.

    model: the model, on the meta device or not.
    separated: kinds of layers, other than attention, that keep documents apart.
    """
    if refusal := _mixing_part(model, separated):
        raise InputError(f"model: {type(model).__name__} {refusal}; choose another model")


def _mixing_part(model: PreTrainedModel, separated: Collection[str]) -> str | None:
    """Return the reason why `check_documents` raises InputError, or None."""
    config: Any = model.config
    sees_later = any(getattr(module, "is_causal", None) is False for module in model.modules())
    if config.is_encoder_decoder or sees_later:
        return "has tokens that attend to later tokens"
    # The kind of each layer, or None if all layers are of one kind. For example, all layers of
    # Mistral have the same sliding window.
    layer_types = getattr(config, "layer_types", None)
    supported = {"full_attention", "sliding_attention", "mlp", "moe", *separated}
    unsupported = sorted({*(layer_types or ())} - supported)
    # A model with a state whose configuration has no list of layers is recurrent.
    if unsupported or (model._is_stateful and layer_types is None):
        return (
            f"has layers other than attention ({', '.join(unsupported) or 'recurrent'}); they need "
            "kernels that reset their state at each document"
        )
    # A model that does not use the registry ignores the attention function that is chosen, and
    # tokens attend to other documents. Some hybrid models use the registry, but do not declare it.
    if not model._supports_attention_backend and not separated:
        return "does not use transformers' attention registry, which keeps documents apart"
    return None


def check(model: PreTrainedModel, length: int) -> None:
    """Raise InputError if packed attention does not support the model.

    The message names the unsupported part of the model.

    Args:
        model: The model, on the meta device or not.
        length: Pack length in tokens.
    """
    check_documents(model, separated_kinds(model))
    if refusal := _unsupported_scores(model) or _unsupported_value(model.config, length):
        raise InputError(f"model: {type(model).__name__} {refusal}")


def _unsupported_scores(model: PreTrainedModel) -> str | None:
    """Return the reason why no kernel computes the attention of the architecture, or None."""
    config: Any = model.config
    other = "choose another model"
    sink = sink_in(model)
    if sink is not None and config.model_type not in WITH_SINKS:
        return (
            f"has attention sinks ({sink}), which are computed only for the types "
            f"{', '.join(WITH_SINKS)}; {other}"
        )
    if getattr(config, "kv_lora_rank", None):
        return f"has latent keys; they need kernels for keys wider than values; {other}"
    if getattr(config, "keep_window_size", None):
        return f"adds learned biases to its scores, which no attention backend computes; {other}"
    # transformers declares no SDPA for models with sinks, and for models with a cap, such as Gemma
    # 2, even if the cap is null.
    has_own_formula = sink is not None or hasattr(config, "attn_logit_softcapping")
    if not model._supports_sdpa and not has_own_formula:
        return f"has attention scores that torch's own attention does not compute; {other}"
    return unsupported_cap(config)


def _unsupported_value(config: Any, length: int) -> str | None:
    """Return the reason why a value of the configuration is not supported, or None."""
    text_config = config.get_text_config()
    heads = getattr(text_config, "num_attention_heads", None)
    kv = getattr(text_config, "num_key_value_heads", None)
    if heads and kv and heads % kv:
        return (
            f"has `num_attention_heads: {heads}`, which is not a multiple of "
            f"`num_key_value_heads: {kv}`; change one of them in `model.config`"
        )
    for key in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if dropout := getattr(config, key, None):
            return (
                f"has {key} {dropout}, but packed attention does not compute dropout; set "
                f"`model.config.{key}: 0.0` (dropout elsewhere, such as resid_pdrop and embd_pdrop "
                "of GPT-2, has keys of its own)"
            )
    longest = longest_rotated(text_config)
    if longest is not None and length > longest:
        return (
            f"has a longrope or dynamic rotation, which a document of more than {longest} tokens "
            f"would change for all documents in its batch; set `data.length` to {longest} or less"
        )
    return None


def longest_rotated(config: PretrainedConfig) -> int | None:
    """Return the maximum document length that does not change the rotation frequencies.

    With longrope or dynamic rotation, one longer document changes the frequencies for all documents
    of a batch. Return None if the frequencies do not depend on the document length.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") not in ("longrope", "dynamic"):
        return None
    return parameters.get("original_max_position_embeddings") or config.max_position_embeddings
