"""Train on packed documents: the model that maps a microbatch to its loss, and a step's passes."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
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

    `hf` keeps its parameter names. Everything that is added is in wrapped forwards
    (pretrain.model.wrapping), in the class of the LM head, and in modules that compute in low
    precision.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        backend: str,
        loss: LossSettings,
        context: PrecisionContext | None = None,
    ) -> None:
        """Wrap `hf`.

        backend: the name of the packed attention.
        context: the state that products share. By default nothing is quantized.
        """
        super().__init__()
        self.hf = hf
        self.backend = backend
        self.context = context or PrecisionContext(None, hf.dtype)
        self.fused: FusedLayers | None = None
        self.rank_sums: RankSums | None = None  # if each of several processes holds all weights
        self.sharding: Sharding | None = None  # under FSDP2
        self.routing = Routing.of(hf) if is_mixture(hf) else None
        if self.routing is not None:
            self.routing.in_fp32()
        hf.set_output_embeddings(LossHead.replacing(hf.get_output_embeddings(), loss, self.context))
        # In each forward GPT-2 looks for padding that no mask hides, waits for the device to do so,
        # and warns about a pack's EOS. The padding of a pack is a document without labels, so it
        # needs no mask.
        hf.base_model.warn_if_padding_and_no_attention_mask = lambda input_ids, attention_mask: None

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
    ) -> Tensor:
        """Return the summed loss over the labels that are not -100, an FP32 scalar.

        input_ids, position_ids, labels: [1, T] int64. Labels are shifted already.
        cu_seqlens: [bucket] int32: 0, the ends of the documents, then T.
        max_seqlen: the pack length.

        In training the loss includes the penalty and the loss that balances experts. In evaluation it
        is cross-entropy.
        """
        documents: dict[str, Any] = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        if self.routing is not None:  # which records them itself
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
        if self.routing is None:
            return loss
        return self.routing.add_loss(loss, labels, training=self.training)

    # accelerate's FSDP2 preparation calls these to keep tied weights in one shard group.
    def get_input_embeddings(self) -> nn.Module:
        return self.hf.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.hf.get_output_embeddings()

    def take_sums(self) -> dict[str, Tensor]:
        """Return and reset the sums of losses and routers over labels, since the last call.

        They are FP32 scalars of this rank's training, by their names in metrics.jsonl.
        """
        parts = self.hf.get_output_embeddings().take_parts()
        sums = {} if parts is None else dict(zip(("loss", "penalty"), parts, strict=True))
        return sums if self.routing is None else sums | self.routing.take_sums()

    def mean_losses(
        self, accelerator: Accelerator, tokens: int, trained: Tensor
    ) -> dict[str, Tensor]:
        """Return the losses of a step, FP32 scalars. Collective.

        tokens: valid tokens over all ranks.
        trained: the step's mean loss.

        `loss` is the cross-entropy within `trained`. Penalty and router loss are means without their
        weights. A mixture also has the figures of its balance.
        """
        balance = self.routing.balance(accelerator) if self.routing else {}
        sums = self.take_sums()
        names = ["loss", "penalty"] if self.hf.get_output_embeddings().penalty else []
        names += self.routing.names if self.routing else []
        if not names:
            return {"loss": trained}
        nothing = torch.zeros((), device=trained.device)
        stacked = torch.stack([sums.get(name, nothing) for name in names])
        means = accelerator.reduce(stacked, reduction="sum") / max(tokens, 1)
        losses = {"loss": trained} | dict(zip(names, means, strict=True))
        if "router_loss" in losses and "penalty" not in losses:
            losses["loss"] = trained - self.routing.coefficient * losses["router_loss"]
        return losses | balance


def inputs_of(batch: Microbatch, device: torch.device) -> dict[str, Any]:
    """Return the arguments of `PackedLanguageModel` on `device`. The copies do not wait."""
    names = ("input_ids", "position_ids", "labels", "cu_seqlens")
    tensors = {name: getattr(batch, name).to(device, non_blocking=True) for name in names}
    # The one shape that varies must recompile nothing.
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
    """Accumulate the gradient of the step's mean loss. Return that loss, the same on every rank.

    around_first: entered around the first microbatch, the one in which weights are quantized.
    first_apart: when `around_first` ends, the gradients are still those of this rank's first
        microbatch alone.

    The loss is an FP32 scalar: the sum over all valid tokens of the step, divided by their number over
    all ranks. The gradients of all ranks are summed by `rank_sums` or by FSDP2. So the gradient of a
    token is the same on any number of ranks.
    """
    context, rank_sums, sharding = model.context, model.rank_sums, model.sharding
    model.take_sums()  # drops those of forwards before the step
    tokens = max(batches.valid_tokens, 1)
    total = torch.zeros((), device=accelerator.device)
    last = len(batches.microbatches) - 1
    for index, microbatch in enumerate(batches.microbatches):
        context.first_microbatch = index == 0  # in which weights are cast or quantized again
        with ExitStack() as around:
            if index == 0 and around_first is not None:
                around.enter_context(around_first)
            if index < last:
                if sharding:
                    around.enter_context(sharding.accumulating())
            elif rank_sums and not (first_apart and index == 0):
                around.enter_context(rank_sums.starting_early())
            loss_sum = model(**inputs_of(microbatch, accelerator.device))
            accelerator.backward(loss_sum * (1 / tokens))
        total += loss_sum.detach()
    context.first_microbatch = True  # for any forward before the next step
    if rank_sums:
        rank_sums.finish()
    return accelerator.reduce(total, reduction="sum") / tokens


def same_on_all_ranks(accelerator: Accelerator, *figures: Tensor) -> list[float]:
    """Return the first rank's scalars as numbers, the same on every rank. Waits for the device.

    So all ranks decide alike by them.
    """
    stacked = torch.stack([figure.to(accelerator.device) for figure in figures])
    if accelerator.num_processes > 1:
        take_from_first_rank(accelerator, [stacked])
    return stacked.tolist()
