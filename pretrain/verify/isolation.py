"""Check that a document of a pack does not see the document before it in a hybrid model.

The states of a new model are so small that a leak of them hardly changes losses and gradients. So
this check requires equal bits: other tokens in the first document must change nothing after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from packing.batch import Microbatch
from pretrain.model.experts import GroupedExperts
from pretrain.model.huggingface import is_mixture
from pretrain.model.hybrids.families import mixing_functions
from pretrain.model.packed import PackedLanguageModel


def leaks(
    model: PackedLanguageModel,
    batch: Microbatch,
    evaluate: Callable[[Sequence[Microbatch]], float],
) -> Iterator[str]:
    """Yield a line if the first document of `batch` changes hidden states after it.

    Models without states are not checked. On a GPU, mixtures of experts are not checked either: the
    number of tokens of an expert may change the roundings of its products. On a CPU, this holds for
    experts that are not grouped. All ranks must call this function.

    evaluate: function that computes the loss of microbatches without gradients.
    """
    head = model.hf.get_output_embeddings()
    is_grouped = any(isinstance(module, GroupedExperts) for module in model.hf.modules())
    depends_on_counts = head.weight.is_cuda or not is_grouped
    if not mixing_functions(model.hf) or (is_mixture(model.hf) and depends_on_counts):
        return
    first = int(batch.cu_seqlens[1])
    other_tokens = batch.input_ids.clone()
    other_tokens[:, :first] = 0
    states: list[Tensor] = []

    def record(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        states.append(inputs[0].flatten(0, -2)[first:])

    hook = head.register_forward_pre_hook(record)
    for input_ids in (batch.input_ids, other_tokens):
        evaluate([replace(batch, input_ids=input_ids)])
    hook.remove()
    if not torch.equal(*states):
        yield (
            "documents: the tokens of a document change hidden states of the next one, so a state "
            "or a convolution passes from document to document"
        )
