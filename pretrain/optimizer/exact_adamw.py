"""AdamW for every way to store weights, among them BF16 weights that lose no update.

`fp32`        an FP32 parameter is its own master.
`bf16`        a BF16 parameter is its own master: updates under half a unit in its last place are lost.
`bf16_exact`  a BF16 parameter and 16 remainder bits in the optimizer are an FP32 master (pretrain.optimizer.exact_weights), at 2 more bytes
              a parameter where a separate master takes 4, and the model computes on BF16 weights without casting them.

All three take the same update in FP32 (pretrain.optimizer.adamw_update on a CPU, pretrain.optimizer.exact_adamw_kernel on a GPU) and differ in how a
master is read and written, so bf16_exact walks the very trajectory of fp32, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor

from pretrain.model.wrapping import gradient_of
from pretrain.optimizer.adamw_update import Factors, Operands, update
from pretrain.optimizer.exact_weights import convert, local_part, mode_of

if TYPE_CHECKING:
    from pretrain.optimizer.exact_adamw_kernel import FusedUpdate

MOMENTS = ("exp_avg", "exp_avg_sq")


class ExactAdamW(torch.optim.Optimizer):
    """AdamW over FP32 and BF16 parameters, plain or DTensor, with or without the remainders that make BF16 exact.

    `exact`: keep remainders for BF16 parameters. FP32 parameters need none.
    `moments`: dtype of both moments, FP32 or BF16. None: FP32 where updates are exact; for plain BF16 parameters BF16, as in
    torch. BF16 moments halve their memory, but with beta2 at 0.999 a second moment then never shrinks: one part in a thousand is
    less than half a unit in its last place.

    State of a parameter: `exp_avg`, `exp_avg_sq`, `remainder` (mode bf16_exact), and `step` on the host, so that nothing waits.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        exact: bool = True,
        moments: torch.dtype | None = None,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"out of range: lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}")
        if moments not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"moments are FP32 or BF16, not {moments}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.exact = exact
        self.moments = moments
        self._frozen: list[Tensor] = []
        self._updated = 0

    # ── State ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def materialise(self) -> None:
        """Allocate all state now: what does not fit fails at the start, and a checkpoint has a place to load into."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._state_of(parameter)

    def _state_dtypes(self, parameter: Tensor) -> dict[str, torch.dtype]:
        """The state that this parameter has, by name."""
        bf16 = mode_of(parameter, None) == "bf16"
        moments = self.moments or (torch.bfloat16 if bf16 and not self.exact else torch.float32)
        return {
            "step": torch.float32,
            **dict.fromkeys(MOMENTS, moments),
            **({"remainder": torch.int16} if bf16 and self.exact else {}),
        }

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            for name, dtype in self._state_dtypes(parameter).items():
                like = torch.zeros(()) if name == "step" else parameter
                state[name] = torch.zeros_like(like, dtype=dtype)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but state keeps the dtypes that it has here: torch would cast moments and remainders to the parameter's.

        Raises ValueError, before anything changes, where the state is that of another weight mode.
        """
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        saved = dict(zip(parameters, (state_dict["state"].get(index) for index in indices), strict=True))
        for parameter, tensors in saved.items():
            wanted = self._state_dtypes(parameter)
            if tensors and tensors.keys() != wanted.keys():
                raise ValueError(f"a parameter's saved state is {sorted(tensors)}; this optimizer keeps {sorted(wanted)}")
        super().load_state_dict({**state_dict, "state": {}})
        for parameter, tensors in saved.items():
            for name, tensor in (tensors or {}).items():
                self._state_of(parameter)[name].copy_(tensor)

    @torch.no_grad()
    def master(self, parameter: Tensor) -> Tensor:
        """The weight that updates apply to, FP32; of a DTensor, this process's part."""
        remainder = self._state_of(parameter).get("remainder")
        return convert(local_part(parameter), None if remainder is None else local_part(remainder), "fp32")[0]

    @torch.no_grad()
    def set_master(self, parameter: Tensor, master: Tensor) -> None:
        """Store the FP32 `master`, a tensor like the parameter or its local part, as this parameter's mode does."""
        remainder = self._state_of(parameter).get("remainder")
        weight, rest = convert(local_part(master), None, mode_of(local_part(parameter), remainder))
        local_part(parameter).copy_(weight)
        if remainder is not None and rest is not None:
            local_part(remainder).copy_(rest)

    # ── Updating ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, clip_coefficient: Tensor | None = None) -> Any:
        """One update of every parameter with a gradient, each gradient times `clip_coefficient`, an FP32 scalar on its device.

        Clipping here spares reading and writing all gradients once more, and the rounding of clipped BF16 gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._frozen, self._updated = [], 0
        for factors, operands in self._updates():
            self._updated += sum(each.weight.numel() for each in operands)
            if operands[0].weight.is_cuda:
                self._frozen += self._fused(operands, factors, clip_coefficient)
            else:
                self._frozen += [update(each, factors, clip_coefficient) for each in operands]
        return loss

    def _updates(self) -> Iterator[tuple[Factors, list[Operands]]]:
        """What there is to do, gathered by the numbers that it is done with and by device."""
        for group in self.param_groups:
            gathered: dict[tuple[int, torch.device], list[Operands]] = {}
            for parameter in group["params"]:
                gradient = gradient_of(parameter)
                if gradient is None:
                    continue
                state = self._state_of(parameter)
                state["step"] += 1
                operands = _operands(parameter, gradient, state)
                if operands.weight.numel():  # a process may hold no part of a sharded parameter
                    gathered.setdefault((int(state["step"].item()), operands.weight.device), []).append(operands)
            # Floats, as Triton would compile a kernel of its own for the integers 0 and 1.
            numbers = [float(number) for number in (group["lr"], group["weight_decay"], *group["betas"], group["eps"])]
            for (step, _), operands in gathered.items():
                yield Factors(*numbers, step), operands

    @cached_property
    def _fused(self) -> FusedUpdate:
        from pretrain.optimizer.exact_adamw_kernel import FusedUpdate  # needs Triton, which machines without a GPU may lack

        return FusedUpdate()

    # ── Frozen updates ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def frozen_counts(self) -> Tensor:
        """Of the last step, on the parameters' device: int64 [2], values whose update was lost and values in all.

        Lost means that the update was not zero and the stored weight (in mode bf16_exact: the master) is what it was before. An
        update is zero where the learning rate is, or where neither its first moment nor its decay moves the weight. Values are
        this process's own: sum the counts over processes before dividing.
        """
        if not self._frozen:
            return torch.zeros(2, dtype=torch.int64)
        frozen = torch.stack([counts.sum(dtype=torch.int64) for counts in self._frozen]).sum()
        return torch.stack([frozen, torch.full_like(frozen, self._updated)])

    def frozen_updates(self) -> Tensor:
        """The fraction of this process's values whose non-zero update left the stored weight unchanged in the last step."""
        frozen, total = self.frozen_counts().double()
        return frozen / total.clamp(min=1)


def _operands(parameter: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> Operands:
    weight, gradient = local_part(parameter), local_part(gradient)
    if not weight.is_contiguous():
        raise ValueError(f"a parameter of shape {list(weight.shape)} and strides {weight.stride()} is not contiguous")
    if gradient.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"gradients are FP32 or BF16, not {gradient.dtype}")
    remainder = local_part(state["remainder"]) if "remainder" in state else None
    return Operands(weight, remainder, gradient.contiguous(), local_part(state["exp_avg"]), local_part(state["exp_avg_sq"]))


def frozen_share(optimizer: ExactAdamW, accelerator: Accelerator) -> float:
    """The fraction of all parameters whose non-zero update left their stored weight as it was, in the step just done."""
    frozen, total = accelerator.reduce(optimizer.frozen_counts().to(accelerator.device), reduction="sum").tolist()
    return frozen / max(total, 1)
