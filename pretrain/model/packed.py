"""The language model on packed documents, and the forward and backward of a training step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from packing.batch import Microbatch, StepBatches
from pretrain.model import attention
from pretrain.model.distributed import take_from_first_rank
from pretrain.model.fused.layers import NO_FUSED_LAYERS, FusedLayers
from pretrain.model.gradients import RankSums
from pretrain.model.hybrids.families import separate_documents
from pretrain.model.loss.head import LossHead
from pretrain.model.loss.logit_change import LogitChange
from pretrain.model.routing import Routing
from pretrain.model.sharding import Sharding
from pretrain.precision.gemm import Gemm
from pretrain.precision.product import PrecisionContext
from pretrain.settings.recipe import LossSettings

# Names of the tensors of a microbatch.
TENSORS = ("input_ids", "position_ids", "labels", "cu_seqlens")


class PackedLanguageModel(nn.Module):
    """A causal language model that maps a packed microbatch to its summed loss.

    The parameters of `hf` keep their names. This project changes the model only by wrapped forwards
    (`pretrain.model.wrapping`), by the class of the LM head, and by modules that compute in low
    precision.

    Args:
        hf: The model of transformers. Its LM head is replaced by a `LossHead`.
        attention: Name of the attention implementation, such as "packed_varlen".
        loss: Settings of the loss, and of the penalty on distributions that are not sharp.
        context: Precision shared by all low-precision modules. By default nothing is quantized.
        fused: The fused decoder layers.

    Attributes:
        rank_sums: Sums gradients over ranks that each have the complete model. None under FSDP2 and
            in a run with one process.
        sharding: Gradient accumulation under FSDP2, or None without FSDP2.
        routing: The routers of the model. Only a mixture of experts has routers.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        attention: str,
        loss: LossSettings,
        context: PrecisionContext | None = None,
        fused: FusedLayers = NO_FUSED_LAYERS,
    ) -> None:
        super().__init__()
        self.hf = hf
        self.attention = attention
        self.context = context or PrecisionContext(hf.dtype)
        self.fused = fused
        self.rank_sums: RankSums | None = None
        self.sharding: Sharding | None = None
        self.routing = Routing(hf)
        self.routing.compute_logits_in_fp32()
        separate_documents(hf)
        head = hf.get_output_embeddings()
        name = next(name for name, module in hf.named_modules() if module is head)
        change = LogitChange.of(hf.config)
        hf.set_output_embeddings(LossHead(head, loss, self.context, name, change))
        # Without an attention mask, GPT-2 of transformers searches each batch for padding tokens.
        # This search waits for the device, and it warns about the end-of-text tokens of a pack. The
        # method that searches is replaced by a function that does nothing. The padding of a pack
        # needs no mask, because it is a document without labels.
        base_model: Any = hf.base_model
        base_model.warn_if_padding_and_no_attention_mask = lambda input_ids, attention_mask: None

    @property
    def gemms(self) -> list[Gemm]:
        """The Gemms of the model that may cache weights.

        Gemms of engines cache quantized weights. The `plain` Gemms of fused layers, which compute
        if nothing is quantized, cache weights that are cast to the compute dtype.
        """
        engines = self.context.engines.values()
        quantized = [gemm for engine in engines for gemm in engine.gemms.values()]
        return [*quantized, *(product.plain for product in self.fused.products)]

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
    ) -> Tensor:
        """Return the summed loss over all labels that are not -100, an FP32 scalar.

        In training, the result is the loss to minimize, including the penalty and the router loss.
        In evaluation, the result is the cross-entropy.

        Args:
            input_ids: Token ids of the microbatch, [1, T] int64.
            position_ids: Position of each token in its document, [1, T] int64.
            labels: Target of each token, [1, T] int64. `labels[0, i]` belongs to token i.
            cu_seqlens: Boundaries of the documents, int32 [n], where n - 1 is at least the number
                of documents. The first entry is 0, the ends of the documents follow, and all
                remaining entries are T.
            max_seqlen: Pack length.
        """
        tokens = input_ids.shape[1]
        options: dict[str, Any] = {
            "cu_seqlens": cu_seqlens,
            "max_seqlen": max_seqlen,
            "documents": attention.documents_for(self.attention, cu_seqlens, max_seqlen, tokens),
        }
        if self.routing.routers:
            # `Routing` records the logits by hooks instead.
            options["output_router_logits"] = False
        with self.context.forward(training=self.training):
            output = self.hf.base_model(
                input_ids=input_ids, position_ids=position_ids, use_cache=False, **options
            )
            with torch.profiler.record_function("loss"):
                loss = self.hf.get_output_embeddings()(output.last_hidden_state, labels)
        return self.routing.add_loss(loss, labels, training=self.training)

    # Under FSDP2, Accelerate calls the next two methods to keep tied weights in one shard group.
    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of the model."""
        return self.hf.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        """Return the LM head."""
        return self.hf.get_output_embeddings()

    def discard_partial_gradients(self) -> None:
        """Discard gradients that FSDP2 has accumulated but not reduced.

        Such gradients remain if a backward has failed or was not the last of its step. This method
        has no effect without FSDP2. All ranks must call this method.
        """
        if self.sharding is not None:
            self.sharding.discard_partial_gradients()

    def take_sums(self) -> dict[str, Tensor]:
        """Return the sums of this rank's training losses and router statistics, and reset them.

        The result maps names in metrics.jsonl to FP32 scalars. Each scalar is a sum over all tokens
        with a label in the training forwards since the last call.
        """
        parts = self.hf.get_output_embeddings().take_parts()
        sums = {} if parts is None else dict(zip(("loss", "penalty"), parts, strict=True))
        return sums | self.routing.take_sums()

    def mean_losses(
        self, accelerator: Accelerator, tokens: int, trained: Tensor
    ) -> dict[str, Tensor]:
        """Return the mean losses and the expert balance of a step, as FP32 scalars by name.

        `loss` is the cross-entropy. `penalty` and `router_loss` are not multiplied by their
        weights. All ranks must call this method.

        Args:
            accelerator: The run's Accelerator.
            tokens: Number of tokens with a label in the step, on all ranks together.
            trained: Mean loss that the step minimizes, the same on all ranks. It is the sum of the
                cross-entropy, the penalty and the router loss, with their weights.
        """
        balance = self.routing.balance(accelerator)
        sums = self.take_sums()
        if not sums:
            return {"loss": trained}
        rank_sums = torch.stack(list(sums.values()))
        means = accelerator.reduce(rank_sums, reduction="sum") / max(tokens, 1)
        losses = {"loss": trained} | dict(zip(sums, means, strict=True))
        # With a penalty, the head has summed the cross-entropy separately. Without a penalty,
        # subtract the router loss from the minimized loss to get the cross-entropy.
        if "router_loss" in losses and "penalty" not in losses:
            losses["loss"] = trained - self.routing.coefficient * losses["router_loss"]
        return losses | balance


def inputs_of(batch: Microbatch, device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments of `PackedLanguageModel.forward`, copied to `device`.

    The tensors are copied asynchronously.
    """
    tensors = {name: getattr(batch, name).to(device, non_blocking=True) for name in TENSORS}
    # cu_seqlens is the only tensor whose shape varies. It must not trigger a recompilation.
    torch._dynamo.mark_dynamic(tensors["cu_seqlens"], 0)
    return {**tensors, "max_seqlen": batch.max_seqlen}


def compute_microbatch(
    model: PackedLanguageModel,
    accelerator: Accelerator,
    batch: Microbatch,
    scale: float | Tensor,
    rank_sums: RankSums | None = None,
) -> Tensor:
    """Run forward and backward of a microbatch. Return its summed loss, an FP32 scalar.

    Args:
        model: The model.
        accelerator: The run's Accelerator.
        batch: The microbatch.
        scale: Factor of the loss in backward, a float or an FP32 scalar on the model's device.
        rank_sums: The sums over ranks, in the last microbatch of a step. The gradients are summed
            when this function returns.
    """
    with ExitStack() as contexts:
        if rank_sums:
            contexts.enter_context(rank_sums.starting_early())
        loss_sum = model(**inputs_of(batch, accelerator.device))
        accelerator.backward(loss_sum * scale)
    if rank_sums:
        rank_sums.finish()
    return loss_sum.detach()


def forward_backward(
    model: PackedLanguageModel,
    batches: StepBatches,
    accelerator: Accelerator,
    around_first: AbstractContextManager[Any] | None = None,
    *,
    compute: Callable[..., Tensor] = compute_microbatch,
) -> Tensor:
    """Compute the gradients of a step, and return its mean loss as an FP32 scalar.

    The mean is over the labelled tokens of all ranks. All ranks must call this function, and get
    the same loss. Gradients are summed over ranks, by FSDP2 or by `model.rank_sums`.

    Args:
        model: The model, with cleared gradients.
        batches: The microbatches of this rank.
        accelerator: The run's Accelerator.
        around_first: Context manager that observes the first microbatch. Only this microbatch
            quantizes weights.
        compute: Function with the arguments and the result of `compute_microbatch`. It computes all
            microbatches, except microbatches that gather weights or reduce gradients under FSDP2.
    """
    context = model.context
    rank_sums = model.rank_sums
    model.take_sums()  # discard the sums of forwards before this step
    tokens = max(batches.valid_tokens, 1)
    total = torch.zeros((), device=accelerator.device)
    last = len(batches.microbatches) - 1
    for index, microbatch in enumerate(batches.microbatches):
        # In the first microbatch, weights are cast or quantized again.
        context.first_microbatch = index == 0
        with ExitStack() as contexts:
            if around_first is not None and index == 0:
                contexts.enter_context(around_first)
            if model.sharding and index < last:
                contexts.enter_context(model.sharding.accumulating())
            gathers_or_reduces = model.sharding and index in (0, last)
            run = compute_microbatch if gathers_or_reduces else compute
            # Sum gradients over ranks as soon as the last microbatch computes them.
            sums = rank_sums if index == last else None
            total += run(model, accelerator, microbatch, 1 / tokens, sums)
    # A forward between this step and the next one must cast or quantize the weights again.
    context.first_microbatch = True
    return accelerator.reduce(total, reduction="sum") / tokens


def same_on_all_ranks(accelerator: Accelerator, *scalars: Tensor) -> list[float]:
    """Return the values of `scalars` on the first rank, as floats.

    All ranks get the same values and therefore take the same decisions. The host waits for the
    device. All ranks must call this function.
    """
    stacked = torch.stack([scalar.to(accelerator.device) for scalar in scalars])
    take_from_first_rank(accelerator, [stacked])
    return stacked.tolist()
