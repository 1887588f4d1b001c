"""Replace the experts of transformers by two grouped products in the current precision.

A grouped product multiplies the tokens of each expert by the weight matrix of this expert, for all
experts of a layer in one call. `GroupedExperts` has the Parameters of the module that it replaces,
under the same names. It sorts the tokens by expert (`arrange`), and computes one grouped product,
the activation, and a second grouped product. The output of a token is the weighted sum of the
outputs of its experts. The routers of transformers are not replaced. A router chooses the experts
of each token, and computes the weight of each chosen expert's output. `GroupedExperts.forward` gets
the chosen experts and the weights as arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.stateless import _reparametrize_module
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from foundation.overrides import overridden
from pretrain.precision.grouped import ROW_MULTIPLE, STACKS, Groups, arrange, stacked_experts
from pretrain.precision.product import LinearState, PrecisionContext


def group_experts(hf: PreTrainedModel, context: PrecisionContext) -> None:
    """Replace the experts of each layer by `GroupedExperts`, in place.

    Only modules that `stacked_experts` yields are replaced. Each of them has two parameters, and
    each parameter has the weights of all experts of the layer. Experts with biases keep the code of
    transformers. They also record the choices of tokens, and sum the gradients of biases in FP32.
    """
    for name, module in list(stacked_experts(hf, biased=True)):
        if hasattr(module, "choice_log"):  # an earlier call has changed this module
            continue
        if getattr(module, "has_bias", False):
            _wrap_biased(module)
        else:
            hf.set_submodule(name, GroupedExperts(module, name, context))


def _wrap_biased(experts: Any) -> None:
    """Replace the forward of transformers' experts with biases, in place.

    It records choices as `GroupedExperts` does, and sums the gradients of biases over tokens in
    FP32. The code of transformers would sum them in the dtype of the biases.
    """
    experts.choice_log = None

    @torch.compiler.disable
    def forward(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if experts.choice_log is not None:
            experts.choice_log.append(chosen)
        biases = {
            name: bias.float() for name, bias in experts.named_parameters() if name.endswith("bias")
        }
        with _reparametrize_module(experts, biases):
            return type(experts).forward(experts, hidden, chosen, weights)

    # A copy of the module has a copy of the method, with its own weights.
    experts.forward = MethodType(forward, experts)


@contextmanager
def recording_choices(model: nn.Module) -> Iterator[list[list[Tensor]]]:
    """Context manager that records the experts that each token chooses.

    It yields one list for each module of experts, in order. While the context is entered, each
    forward of the module appends the experts of its tokens, int64 [tokens, choices], to the list.
    """
    modules = [module for module in model.modules() if hasattr(module, "choice_log")]
    recorded: list[list[Tensor]] = [[] for _ in modules]
    with ExitStack() as recording:
        for module, choice_log in zip(modules, recorded, strict=True):
            recording.enter_context(overridden(module, choice_log=choice_log))
        yield recorded


class GroupedExperts(nn.Module):
    """The experts of one layer, computed by two grouped products.

    Args:
        experts: The module of transformers to replace.
        name: Name of this module in the model.
        context: Precision shared by all low-precision modules.
    """

    def __init__(self, experts: Any, name: str, context: PrecisionContext) -> None:
        super().__init__()
        self.gate_up_proj = experts.gate_up_proj
        self.down_proj = experts.down_proj
        # Method of transformers that maps gate and up [rows, 2 width] to activated values
        # [rows, width].
        self._apply_gate = experts._apply_gate
        # Some architectures replace transformers' method by another formula.
        is_default = experts._apply_gate.__func__.__module__ == "transformers.integrations.moe"
        self._is_swiglu = is_default and isinstance(experts.act_fn, nn.SiLU | SiLUActivation)
        # int64 [experts]: number of tokens of each expert in training since the last reset by
        # `Routing.take_sums`.
        self.load: Tensor | None = None
        # List to which each forward appends the chosen experts, or None if they are not recorded.
        self.choice_log: list[Tensor] | None = None
        self.stacks = {key: LinearState(f"{name}.{key}", context) for key in STACKS}

    @torch.compiler.disable
    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the experts' output [tokens, hidden].

        Args:
            hidden: Hidden states [tokens, hidden].
            chosen: Indices of the experts of each token, int64 [tokens, choices].
            weights: Factor of each chosen expert's output in the sum [tokens, choices].
        """
        gate_up, down = self.stacks.values()
        multiples = [gemm.row_multiple for gemm in (gate_up.low, down.low) if gemm]
        groups = arrange(chosen, len(self.down_proj), max(multiples, default=ROW_MULTIPLE))
        if self.choice_log is not None:
            self.choice_log.append(chosen)
        # If the layer is recomputed in backward, the tokens of all experts are counted twice. This
        # does not matter, because only the ratios between the experts are used.
        if self.training and torch.is_grad_enabled():
            self.load = groups.load if self.load is None else self.load + groups.load
        rows = Dispatched.apply(hidden, groups)
        rows = gate_up(rows, self.gate_up_proj, ends=groups.ends)
        activate = _SwiGLU.apply if self._is_swiglu and in_bf16_on_a_gpu(rows) else self._apply_gate
        rows = down(activate(rows), self.down_proj, ends=groups.ends)
        return Combined.apply(rows, weights, groups).to(hidden.dtype)


# ── Tokens to rows, and back ────────────────────────────────────────────────────────────────────
#
# Forward and backward read all summands of a result and write the result once, instead of adding to
# the same result from several threads. Therefore the order of each sum is fixed.


class Dispatched(torch.autograd.Function):
    """Copy tokens [tokens, features] to rows sorted by expert [rows, features].

    Empty rows (`Groups`) are zero. The gradient of a token is the sum over its choices.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Groups) -> Tensor:
        ctx.row_of_choice = groups.row_of_choice
        ctx.tokens = len(x)
        choices_per_token = len(groups.row_of_choice) // len(x)
        token_of_row = groups.choice_of_row // choices_per_token
        return x.index_select(0, token_of_row).index_fill_(0, groups.empty_rows, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        row_of_choice = ctx.row_of_choice
        if in_bf16_on_a_gpu(dy):
            return _kernels().combine(dy.contiguous(), row_of_choice, None, ctx.tokens), None
        gradients_of_choices = dy.index_select(0, row_of_choice).view(ctx.tokens, -1, dy.shape[1])
        return gradients_of_choices.sum(1), None


class Combined(torch.autograd.Function):
    """Return the weighted sum of the rows of each token [tokens, features].

    `rows` [rows, features] are the outputs of the experts, sorted by expert. `weights` are the
    factors of the rows [tokens, choices]. The sum is computed in FP32 and rounded to the dtype of
    `rows`.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, groups: Groups) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.groups = groups
        if in_bf16_on_a_gpu(rows):
            return _kernels().combine(rows, groups.row_of_choice, weights, len(weights))
        choices = _choices_in_fp32(rows, groups, weights)
        return (choices * weights.float()[..., None]).sum(1).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights = ctx.saved_tensors
        groups = ctx.groups
        if in_bf16_on_a_gpu(rows):
            d_rows, d_weights = _kernels().combine_backward(
                dy.contiguous(), rows, groups.row_of_choice, weights
            )
        else:
            dy = dy[:, None].float()
            d_weights = (_choices_in_fp32(rows, groups, weights) * dy).sum(-1)
            d_choices = (dy * weights.float()[..., None]).flatten(0, 1)
            d_rows = d_choices.to(rows.dtype).index_select(0, groups.choice_of_row)
        return d_rows.index_fill_(0, groups.empty_rows, 0), d_weights.to(weights.dtype), None


def _kernels() -> ModuleType:
    """Import and return the Triton kernels. The import of Triton is slow."""
    from pretrain.model import experts_kernel

    return experts_kernel


def _choices_in_fp32(rows: Tensor, groups: Groups, weights: Tensor) -> Tensor:
    """Return the row of each choice of each token, FP32 [tokens, choices, features]."""
    return rows.index_select(0, groups.row_of_choice).view(*weights.shape, -1).float()


def in_bf16_on_a_gpu(x: Tensor) -> bool:
    """Return True if x is BF16 and on a GPU, as the Triton kernels require."""
    return x.is_cuda and x.dtype == torch.bfloat16


class _SwiGLU(torch.autograd.Function):
    """Compute silu(gate) * up [rows, width] from gate and up [rows, 2 width], BF16 on a GPU.

    Forward and backward are one kernel each.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        from pretrain.model.fused import activation_kernel

        ctx.save_for_backward(hidden)
        return activation_kernel.activate(hidden, gated=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        from pretrain.model.fused import activation_kernel

        hidden = ctx.saved_tensors[0]
        options = {"gated": True, "summed": False}
        return activation_kernel.activate_backward(dy.contiguous(), hidden, **options)[0]
