"""Compare the loss of a low-precision LM head, and its gradients, with the products of the head.

`ProductCheck` compares the products of the head with exact products. This check compares the steps
between the products, for each chunk of tokens:

* The loss and the gradient of the logits must follow from the observed logits and the labels.
* The gradients of the hidden states and of the weight must equal the observed products.

These values are rounded to BF16 and not to the low precision, so a small tolerance is sufficient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from packing.arrow import IGNORE
from packing.batch import StepBatches
from pretrain.model.packed import PackedLanguageModel
from pretrain.observe.product_check import Compared
from pretrain.precision.formats.definition import Role
from pretrain.precision.gemm import GemmKind
from pretrain.precision.product import LinearPass, Probe
from pretrain.verify.reference_model import losses_of

# Tolerance of a value relative to its norm. BF16 has a relative rounding error of 2^-9.
TOLERANCE = 2.0**-6
# Number of rows of the weight whose gradient is compared.
WORDS = 128


def compare_values(name: str, actual: Tensor, expected: Tensor) -> Compared:
    """Compare values that may differ only by roundings to BF16."""
    norm = expected.norm().clamp(min=1e-30)
    error = (torch.dist(actual.to(expected.dtype), expected) / norm).item()
    return Compared.of(name, error, error / TOLERANCE)


class HeadCheck(Probe):
    """Probe that compares the losses and gradients of the LM head in the passes of a step."""

    observes_results = True

    def __init__(self, model: PackedLanguageModel, step: StepBatches) -> None:
        """Create the check before the passes over the microbatches of `step`."""
        self._head = model.hf.get_output_embeddings()
        self._context = model.context
        self._microbatches = iter(step.microbatches)
        # Factor by which the summed loss of a microbatch is multiplied before backward.
        self._factor = 1 / max(step.valid_tokens, 1)
        # Labels of the tokens whose chunks follow. Hooks run in this order: `_start`, `result` and
        # `operand` for each chunk, `_end`, and `_compare_gradients` in backward.
        self._labels = torch.empty(0)
        # The result: one comparison for each value, microbatch and chunk.
        self.compared: list[Compared] = []

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe the passes in the caller's `with` statement."""
        with (
            self._context.probing(self),
            self._head.register_forward_pre_hook(self._start),
            self._head.register_forward_hook(self._end),
        ):
            yield

    def operand(
        self, name: str, role: Role, values: Callable[[], Tensor], call: LinearPass
    ) -> None:
        """Compare the gradient of the logits of a chunk."""
        if name == self._head.state.name and role == "grad_output":
            gradient = values()
            expected = torch.zeros_like(gradient)
            expected[self._has_label] = self._d_logits.to(gradient.dtype)
            self._compare("gradient of the logits", gradient, expected)

    def result(
        self, name: str, gemm: GemmKind, result: Tensor, bias: Tensor | None, call: LinearPass
    ) -> None:
        """Observe a product of the head for one chunk.

        From the logits, the result of the forward product, compute the loss and its gradient. The
        results of the other two products are gradients, which are stored.
        """
        if name != self._head.state.name:
            return
        if gemm != "forward":
            rows = WORDS if gemm == "wgrad" else None
            self._gradients[gemm].append(self._factor * result[:rows])
            return
        labels, self._labels = self._labels.tensor_split([len(result)])
        self._has_label = labels != IGNORE
        with torch.enable_grad():
            logits = result[self._has_label].float().requires_grad_()
            losses, _ = losses_of(
                self._head.change(logits), labels[self._has_label], self._head.settings
            )
            loss = losses.sum()
        (self._d_logits,) = torch.autograd.grad(loss, logits)
        self._loss += loss.detach()

    def _start(self, head: nn.Module, inputs: tuple[Tensor, Tensor]) -> None:
        """Prepare for the chunks of a microbatch."""
        hidden, _ = inputs
        self._labels = next(self._microbatches).labels[0].to(hidden.device)
        self._loss = torch.zeros((), device=hidden.device)
        # Gradients of hidden states and of the first rows of the weight, for each chunk.
        self._gradients: dict[GemmKind, list[Tensor]] = defaultdict(list)
        hidden.register_hook(self._compare_gradients)

    def _end(self, head: nn.Module, inputs: tuple[Tensor, Tensor], loss: Tensor) -> None:
        """Compare the loss of a microbatch."""
        if self._gradients:
            self._compare("loss", loss.detach(), self._loss)

    def _compare_gradients(self, d_hidden: Tensor) -> None:
        """Compare the gradients of a microbatch, after the backward of the head."""
        if not self._gradients:
            return
        expected = torch.cat(self._gradients["dgrad"])
        self._compare("gradient of the hidden states", d_hidden.flatten(0, -2), expected)
        weight = self._head.weight
        # Later, the main gradient also contains that of a tied embedding.
        if self._context.first_microbatch and weight.requires_grad:
            expected = torch.stack(self._gradients["wgrad"]).sum(0)
            self._compare("gradient of the weight", weight.main_grad[:WORDS], expected)

    def _compare(self, what: str, actual: Tensor, expected: Tensor) -> None:
        self.compared.append(compare_values(f"{self._head.state.name}: {what}", actual, expected))
