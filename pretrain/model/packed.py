"""A training step on packed documents: the language model that turns a microbatch into its loss, and its forward and backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from packing.batch import Microbatch, StepBatches
from pretrain.model import attention
from pretrain.model.distributed import take_from_first_rank
from pretrain.model.fused.layers import FusedLayers
from pretrain.model.gradients import RankSums
from pretrain.model.huggingface import is_mixture
from pretrain.model.loss.head import LossHead
from pretrain.model.routing import Routing
from pretrain.model.sharding import Sharding
from pretrain.precision.product import PrecisionContext
from pretrain.settings.recipe import LossSettings


class PackedLanguageModel(nn.Module):
    """A causal language model that maps a packed microbatch to its summed loss.

    `hf` keeps its parameter names; everything the launcher adds is in wrapped forwards (pretrain.model.wrapping), in the LM
    head's class and in the modules that compute in low precision. `context`: what these share; by default nothing is quantized.
    `backend`: of attention.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        backend: str,
        loss: LossSettings,
        context: PrecisionContext | None = None,
    ) -> None:
        super().__init__()
        self.hf = hf
        self.backend = backend
        self.context = context or PrecisionContext(None, hf.dtype)
        self.fused: FusedLayers | None = None
        self.rank_sums: RankSums | None = None  # where several processes hold the whole model each
        self.sharding: Sharding | None = None  # under FSDP2
        self.routing = Routing.of(hf) if is_mixture(hf) else None  # None where there are no experts
        if self.routing is not None:
            self.routing.in_fp32()
        head = hf.get_output_embeddings()
        name = next(name for name, module in hf.named_modules() if module is head)
        hf.set_output_embeddings(LossHead.replacing(head, loss, self.context, name))
        # GPT-2 looks in each forward for padding that no mask hides, waits for the device to do so, and warns of a pack's EOS. A
        # pack's padding is a document of its own without labels, so it needs no mask.
        hf.base_model.warn_if_padding_and_no_attention_mask = lambda input_ids, attention_mask: None

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
    ) -> Tensor:
        """Summed loss (FP32 scalar) over the labels that are not -100: in training of what is trained, a penalty included and
        the balance of experts; in evaluation cross-entropy.

        `input_ids`, `position_ids`, `labels`: [1, T] int64, labels already shifted. `cu_seqlens`: [bucket] int32, 0, the ends of
        the documents, then T. `max_seqlen`: the pack length.
        """
        documents: dict[str, Any] = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        if self.routing is not None:  # which keeps them itself
            documents["output_router_logits"] = False
        if self.backend == "packed_sdpa":
            documents["document_mask"] = attention.document_mask(
                cu_seqlens, max_seqlen, input_ids.shape[1]
            )
        with self.context.forward(training=self.training):
            output = self.hf.base_model(
                input_ids=input_ids, position_ids=position_ids, use_cache=False, **documents
            )
            with torch.profiler.record_function("loss"):
                loss = self.hf.get_output_embeddings()(output.last_hidden_state, labels)
        return (
            loss
            if self.routing is None
            else self.routing.add_loss(loss, labels, training=self.training)
        )

    # accelerate's FSDP2 preparation asks for these to keep tied weights in one shard group.
    def get_input_embeddings(self) -> nn.Module:
        return self.hf.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.hf.get_output_embeddings()

    def take_sums(self) -> dict[str, Tensor]:
        """What losses and routers have added up in training on this rank since this was last called: sums over labels, FP32
        scalars by the names that metrics have for them."""
        parts = self.hf.get_output_embeddings().take_parts()
        sums = {} if parts is None else dict(zip(("loss", "penalty"), parts, strict=True))
        return sums if self.routing is None else sums | self.routing.take_sums()

    def mean_losses(
        self, accelerator: Accelerator, tokens: int, trained: Tensor
    ) -> dict[str, Tensor]:
        """`loss`, the cross-entropy within a step's mean loss `trained`; the means over the `tokens` of all ranks of what else
        `take_sums` has, without the weights of penalty and router loss; and a mixture's `balance`. FP32 scalars. Collective."""
        balance = self.routing.balance(accelerator) if self.routing else {}
        sums = self.take_sums()
        names = ["loss", "penalty"] if self.hf.get_output_embeddings().penalty else []
        names += self.routing.names if self.routing else []
        if not names:
            return {"loss": trained}
        nothing = torch.zeros((), device=trained.device)
        means = accelerator.reduce(
            torch.stack([sums.get(name, nothing) for name in names]), reduction="sum"
        ) / max(tokens, 1)
        losses = {"loss": trained} | dict(zip(names, means, strict=True))
        if "router_loss" in losses and "penalty" not in losses:
            losses["loss"] = trained - self.routing.coefficient * losses["router_loss"]
        return losses | balance


def inputs_of(batch: Microbatch, device: torch.device) -> dict[str, Any]:
    """What `PackedLanguageModel` takes, on `device`; the copies do not wait."""
    names = ("input_ids", "position_ids", "labels", "cu_seqlens")
    tensors = {name: getattr(batch, name).to(device, non_blocking=True) for name in names}
    # the one shape that varies recompiles nothing
    torch._dynamo.mark_dynamic(tensors["cu_seqlens"], 0)
    return {**tensors, "max_seqlen": batch.max_seqlen}


def forward_backward(
    model: PackedLanguageModel,
    batches: StepBatches,
    accelerator: Accelerator,
    around_first: AbstractContextManager[Any] | None = None,
    *,
    first_apart: bool = False,
) -> Tensor:
    """Accumulate the gradient of the step's mean loss; returns that loss, an FP32 scalar, the same on every rank.

    It is the sum over all valid tokens of the step divided by their number over all ranks, and the gradients of all ranks are
    added up, by `rank_sums` or by FSDP2: so a token's gradient is the same on any number of ranks. `around_first` is entered
    around the first microbatch, the one in which weights are quantized, by what looks on. `first_apart`: when it is left, the
    gradients are still this rank's and this microbatch's alone.
    """
    context, sums, sharding = model.context, model.rank_sums, model.sharding
    model.take_sums()  # of what was forwarded before the step
    tokens = max(batches.valid_tokens, 1)
    total = torch.zeros((), device=accelerator.device)
    for index, microbatch in enumerate(batches.microbatches):
        context.first_microbatch = index == 0  # in which weights are cast or quantized again
        watched = around_first if around_first and index == 0 else nullcontext()
        if index == len(batches.microbatches) - 1:
            exchanging = (
                sums.starting_early()
                if sums and not (first_apart and index == 0)
                else nullcontext()
            )
        else:
            exchanging = sharding.accumulating() if sharding else nullcontext()
        with watched, exchanging:
            loss_sum = model(**inputs_of(microbatch, accelerator.device))
            accelerator.backward(loss_sum * (1 / tokens))
        total += loss_sum.detach()
    context.first_microbatch = True  # for whatever forward comes before the next step
    if sums:
        sums.finish()
    return accelerator.reduce(total, reduction="sum") / tokens


def same_on_all_ranks(accelerator: Accelerator, *figures: Tensor) -> list[float]:
    """The first rank's scalars, as numbers on every rank: what is decided by them is decided alike. Waits for the device."""
    stacked = torch.stack([figure.to(accelerator.device) for figure in figures])
    if accelerator.num_processes > 1:
        take_from_first_rank(accelerator, [stacked])
    return stacked.tolist()
