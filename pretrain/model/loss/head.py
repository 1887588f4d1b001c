"""The LM head as the loss: hidden states and labels in, the sum of cross-entropies out, without ever holding all logits.

The head computes the loss itself, and evaluation takes the same path: what fits in training fits there.

Every loss is a SUM over the tokens whose label is not -100, an FP32 scalar; the caller divides by the step's valid tokens over
all microbatches and ranks. Labels are already shifted: `labels[i]` is what token i is to predict.

* `chunked`: ours, any device (pretrain.model.loss.chunked). Softmax in FP32; the head's weight gradient is summed over chunks in FP32.
* `cce`: the cut-cross-entropy package, CUDA only. Less memory still; it may skip gradient blocks too small to count.
* `reference`: torch's cross_entropy on all logits in FP32. For comparison.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from foundation.errors import InputError
from packing.batch import IGNORE
from pretrain.model.loss.chunked import LowPrecisionHead, chunked_cross_entropy, in_dtype, products_sum_in_fp32
from pretrain.settings.recipe import LossSettings

LOSS_SCOPE = "loss"  # what a profile calls the part of the forward that is the head's

# What some architectures do to their logits after the head. Only the head is replaced, so their loss would be another model's.
LOGIT_TRANSFORMS = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "output_logit_soft_cap",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
)


def check(config: PretrainedConfig, settings: LossSettings, device_type: str) -> None:
    """Refuse what would train wrongly or cannot run here. Raises InputError."""
    for key in LOGIT_TRANSFORMS:
        if getattr(config, key, None) not in (None, 0, 1):
            raise InputError(
                f"model: {config.model_type} changes its logits ({key}: {getattr(config, key)}), which no loss here does"
            )
    if settings.kind != "cce":
        return
    remedy = "set loss.kind: chunked"
    if importlib.util.find_spec("cut_cross_entropy") is None:  # an extra of requirements-cuda.txt
        raise InputError(f"loss.kind: cce needs the cut-cross-entropy package: pip install cut-cross-entropy, or {remedy}")
    if device_type != "cuda":
        raise InputError(f"loss.kind: cce needs a CUDA device and this run is on {device_type}; {remedy}")


class LossHead(nn.Linear):
    """A model's LM head that turns hidden states and labels into the loss; called without labels it is the head it replaced.

    It computes in the autocast dtype where autocast is on, else in the hidden states' dtype; the weight may have another.
    """

    settings: LossSettings
    low_precision: LowPrecisionHead | None = None  # set where the precision's scope has the head

    @classmethod
    def replacing(cls, linear: nn.Linear, settings: LossSettings) -> LossHead:
        """A head on the very same Parameters, so a weight tied to the embedding stays tied."""
        if settings.kind == "cce" and linear.bias is not None:
            raise InputError("loss.kind: cce takes no bias and this model's head has one; set loss.kind: chunked")
        head = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        head.weight, head.bias, head.settings = linear.weight, linear.bias, settings
        return head.train(linear.training)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Hidden states [..., hidden] to logits [..., vocabulary]; with labels [...] int64, to the sum of losses, FP32."""
        if labels is None:
            return F.linear(hidden, *in_dtype(hidden.dtype, self.weight, self.bias))
        low_precision = self.low_precision if self.low_precision and self.low_precision.active else None
        hidden, labels = hidden.flatten(0, -2), labels.flatten()
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            hidden = hidden.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            if self.settings.kind == "chunked":
                return chunked_cross_entropy(hidden, self.weight, self.bias, labels, self.settings.chunk, low_precision)
            if self.settings.kind == "cce":
                return cut_cross_entropy(hidden, self.weight, labels)
            return reference_cross_entropy(hidden, self.weight, self.bias, labels, low_precision)

    def describe(self) -> dict[str, Any]:
        """What computes the loss, for the audit."""
        if self.settings.kind == "cce":
            skipped_below = inspect.signature(_cce()).parameters["filter_eps"].default
            return {"kind": "cce", "options": cut_cross_entropy_options(), "gradient_filter": skipped_below}
        if self.settings.kind == "reference":
            return {"kind": "reference", "softmax": "fp32", "logits": "all at once"}
        softmax = "Triton kernel" if self.weight.is_cuda else "torch"
        summed = "each chunk's product added"
        if self.low_precision is not None and self.low_precision.fuses:
            softmax, summed = "Triton kernels that write the gradient as fp8 operands", "summed by the fp8 products"
        elif self.low_precision is None and self.weight.is_cuda and products_sum_in_fp32():
            summed = "summed by the products"
        return {
            "kind": "chunked",
            "chunk": self.settings.chunk,
            "softmax": f"fp32, {softmax}",
            "weight_gradient": f"fp32, {summed}",
        }

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, loss={self.settings.kind}"


def reference_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, low_precision: LowPrecisionHead | None = None
) -> Tensor:
    multiply = low_precision.multiply if low_precision else F.linear
    logits = multiply(hidden, *in_dtype(hidden.dtype, weight, bias))
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum")


def cut_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024 (arXiv:2411.09009)."""
    if not (labels != IGNORE).any():  # its kernels take no empty batch; it reads the labels back from the device anyway
        return (hidden.sum() * 0 + weight.sum() * 0).float()
    options = cut_cross_entropy_options()
    return _cce()(hidden, weight.to(hidden.dtype), labels, ignore_index=IGNORE, reduction="sum", **options).float()


def _cce() -> Callable[..., Tensor]:
    """Imported by the runs that use it: it brings Triton, which takes a third of a second."""
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy


@functools.cache
def cut_cross_entropy_options() -> dict[str, bool]:
    """The most exact accumulation that the installed version offers; the release 25.1.1 has none of it."""
    parameters = inspect.signature(_cce()).parameters
    fp32 = {name: True for name in ("accum_e_fp32", "accum_c_fp32") if name in parameters}
    return fp32 or {name: True for name in ("use_kahan",) if name in parameters}
