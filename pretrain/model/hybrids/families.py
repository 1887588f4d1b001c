"""List the supported hybrid models, and keep packed documents apart in their layers.

A hybrid model has layers with a state. For example, three of four layers of Qwen3.5 compute a gated
delta rule instead of attention. Its state, and the short convolution before it, would pass from a
packed document to the next one. `separate_documents` replaces transformers' functions for states
and convolutions. The new functions begin each document with an empty state:

    separate_documents(hf)
    hf.base_model(input_ids=..., position_ids=..., use_cache=False,
                  cu_seqlens=..., max_seqlen=..., documents=...)

The arguments are the same as in packed attention (`pretrain.model.attention`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pretrain.model.hybrids.mixing import MIXING

_CONVOLUTION = ("causal_conv1d_fn",)
_GATED_DELTA = (*_CONVOLUTION, "torch_chunk_gated_delta_rule")
_SCAN = (*_CONVOLUTION, "mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined")
# Map `model_type` to the functions that mix the tokens of a row. They are global names of the
# module of transformers in which the model is defined.
FAMILIES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"), _GATED_DELTA
    ),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _CONVOLUTION),
    **dict.fromkeys(("falcon_h1", "bamba", "nemotron_h", "granitemoehybrid"), _SCAN),
}
# The kinds of layers in `layer_types` that these functions compute.
_KINDS = frozenset({"linear_attention", "conv", "hybrid"})


def mixing_functions(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the functions that mix tokens. The tuple is empty for other models."""
    return FAMILIES.get(model.config.model_type, ())


def separated_kinds(model: PreTrainedModel) -> frozenset[str]:
    """Return the kinds of layers, other than attention, that `separate_documents` supports."""
    return _KINDS if mixing_functions(model) else frozenset()


def mixers(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """Yield the name and the module of each part of a hybrid model with a state or a convolution.

    Other models have no such part.
    """
    if not mixing_functions(model):
        return
    for name, module in model.named_modules():
        if any(isinstance(child, nn.Conv1d) for child in module.children()):
            yield name, module


def separate_documents(model: PreTrainedModel) -> None:
    """Keep packed documents apart in the layers of a hybrid model. Other models do not change.

    The functions of transformers' module are replaced once for the process. If a call has no
    boundaries of documents, as in the reference of parity, the replacements call transformers'
    functions in torch.
    """
    functions = mixing_functions(model)
    if not functions:
        return
    module = sys.modules[type(model).__module__]
    for name in functions:
        function = getattr(module, name)
        if not hasattr(function, "separates_documents"):
            # `unwrap` removes transformers' decorator, which may call a kernel of the hub instead.
            setattr(module, name, _separating(name, inspect.unwrap(function)))
    for _, mixer in mixers(model):
        mixer.forward = partial(_with_boundaries, mixer.forward)


def _with_boundaries(
    forward: Callable[..., Any],
    *args: Any,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    documents: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Call the forward of a mixer, with `cu_seqlens` under the name that transformers reads.

    The other arguments of packed attention are dropped.
    """
    return forward(*args, cu_seq_lens_q=cu_seqlens, **kwargs)


def _separating(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that replaces `plain`, transformers' function in torch."""

    @torch.compiler.disable
    def function(
        *args: Any,
        cu_seqlens: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **options: Any,
    ) -> Any:
        # transformers passes `cu_seq_lens_q` to some of the functions under the name `cu_seqlens`.
        cu_seqlens = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
        if cu_seqlens is None:
            return plain(*args, **options)
        return MIXING[name](plain, cu_seqlens, *args, **options)

    vars(function)["separates_documents"] = True
    return function
