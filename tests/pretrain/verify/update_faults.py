"""Faults of the optimizer's update and of cached weights in the next step.

Importing this module registers them with `faults.FAULTS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from packing.batch import StepBatches
from pretrain.model import gradients, packed
from pretrain.model.gradients import gradient_of
from pretrain.optimizer import adamw, muon
from pretrain.optimizer.adamw import Hyperparameters
from pretrain.optimizer.muon import Hidden, Muon
from pretrain.precision import delayed_state, emulation
from pretrain.precision.gemm import Gemm
from pretrain.settings.recipe import LossSettings
from tests.pretrain.verify import small_runs
from tests.pretrain.verify.faults import (
    Make,
    Patch,
    delayed,
    emulated,
    fault,
    patching,
    quantized,
)
from tests.pretrain.verify.small_runs import SmallRun

fault_of_update = partial(fault, weights=("fp32", "bf16", "bf16_exact"))


def after_update(run: SmallRun, patch: Patch, then: Callable[[int], object]) -> None:
    """Call `then` after every update with the number of updates so far."""
    step = run.optimizer.step
    count = itertools.count(1)

    def stepped(**options: Any) -> None:
        step(**options)
        then(next(count))

    patch.setattr(run.optimizer, "step", stepped)


@fault_of_update("the norm is not clipped")
def not_clipped(run: SmallRun, patch: Patch) -> None:
    patch.setattr(adamw, "clip_coefficient", lambda norm, limit: None)


@fault_of_update("the second moment is not corrected for bias")
def no_bias_correction(run: SmallRun, patch: Patch) -> None:
    patch.setattr(adamw.Hyperparameters, "bias_correction2_sqrt", 1.0)


@fault_of_update("each update is applied twice")
def each_update_twice(run: SmallRun, patch: Patch) -> None:
    step = run.optimizer.step
    after_update(run, patch, lambda _: step())


@fault_of_update("one weight is never updated")
def one_weight_never_updated(run: SmallRun, patch: Patch) -> None:
    weight = run.layers[0].mlp.down_proj.weight
    before = weight.detach().clone()
    after_update(run, patch, lambda _: weight.data.copy_(before))


@fault_of_update("the weights of norms decay")
def norms_decay(run: SmallRun, patch: Patch) -> None:
    patch.setitem(run.optimizer.param_groups[1], "weight_decay", 0.1)


def in_bf16_on_a_cpu(run: SmallRun) -> bool:
    """Return whether the run computes in BF16 on a CPU. A GPU's kernel splits weights itself."""
    return (
        run.accelerator.device.type == "cpu" and run.packed.context.compute_dtype == torch.bfloat16
    )


@fault("an exact weight's low bits are dropped", in_bf16_on_a_cpu, weights=("bf16_exact",))
def low_bits_dropped(run: SmallRun, patch: Patch) -> None:
    split = adamw.split
    patch.setattr(
        adamw, "split", lambda master: (split(master)[0], torch.zeros_like(split(master)[1]))
    )


@fault_of_update(
    "a weight's cached copy is stale in every second step",
    lambda run: quantized(run) or bool(run.packed.fused and run.has_copies),
)
def stale_copy(run: SmallRun, patch: Patch) -> None:
    updates = [0]
    after_update(run, patch, lambda done: updates.append(done))
    patching(Gemm, "weight_operand")(
        lambda run, real, *args, refresh, **options: real(
            *args, refresh=refresh and updates[-1] % 2 == 0, **options
        )
    )(run, patch)


@fault("a weight's cached copy is stale from the second microbatch of a step on", emulated)
def stale_later(run: SmallRun, patch: Patch) -> None:
    before: dict[str, Any] = {}
    last: dict[str, Any] = {}

    @patching(emulation.EmulatedGemm, "weight_operand")
    def later(
        run: SmallRun, real: Any, gemm: Any, *args: Any, refresh: bool, **options: Any
    ) -> Any:
        operand = real(gemm, *args, refresh=refresh, **options)
        if refresh:
            before[gemm.name] = last.pop(gemm.name, operand)
            last[gemm.name] = operand
        return operand if refresh else before[gemm.name]

    later(run, patch)


def changing_passes(change: Callable[[SmallRun, Callable[..., Tensor], StepBatches], Any]) -> Make:
    """Return a fault of the passes in training, which parity does not use.

    `change(run, passes, step)` replaces the passes of a step. `passes` runs them on a step's
    batches.
    """

    return patching(packed, "forward_backward")(
        lambda run, real, model, step, *rest: change(
            run, lambda batches: real(model, batches, *rest), step
        )
    )


@fault_of_update("the last microbatch of a step is dropped")
@changing_passes
def last_microbatch_dropped(
    run: SmallRun, passes: Callable[..., Tensor], step: StepBatches
) -> Tensor:
    return passes(replace(step, microbatches=step.microbatches[:-1]))


@fault_of_update(
    "gradients are accumulated in BF16, not in FP32", lambda run: not run.accelerator.is_fsdp2
)
def sums_in_bf16(run: SmallRun, patch: Patch) -> None:
    table = run.packed.get_input_embeddings()
    if table.weight.dtype == torch.bfloat16:
        # The replaced forward adds an embedding's rows to FP32 sums only.
        vars(table).pop("forward", None)
    gradients.attach_main_gradients(
        run.packed, torch.bfloat16, run.packed.fused.stacks if run.packed.fused else ()
    )


def round_to_bf16(run: SmallRun) -> None:
    for gradient in map(gradient_of, run.packed.parameters()):
        if gradient is not None:
            gradient.copy_(gradient.bfloat16())


@fault_of_update("FP32 gradient sums are rounded to BF16")
@changing_passes
def sums_rounded_to_bf16(run: SmallRun, passes: Callable[..., Tensor], step: StepBatches) -> Tensor:
    loss = passes(step)
    round_to_bf16(run)
    return loss


@fault_of_update(
    "FP32 gradient sums are rounded to BF16 before each microbatch",
    lambda run: len(run.step.microbatches) > 2,
)
@changing_passes
def sums_rounded_between(run: SmallRun, passes: Callable[..., Tensor], step: StepBatches) -> Tensor:
    with run.packed.register_forward_pre_hook(lambda *_: round_to_bf16(run)):
        return passes(step)


@fault_of_update("gradients are not cleared after a step")
def not_cleared(run: SmallRun, patch: Patch) -> None:
    patch.setattr(small_runs, "clear_gradients", lambda optimizer, model: None)


@fault_of_update(
    "a tenth of each gradient remains after a step",
    lambda run: not run.accelerator.is_fsdp2,
)
def tenth_stays(run: SmallRun, patch: Patch) -> None:
    patch.setattr(gradients, "empty_sums", lambda sums: sums.mul_(0.1))


@fault_of_update("a step is trained in evaluation mode")
@changing_passes
def in_evaluation_mode(run: SmallRun, passes: Callable[..., Tensor], step: StepBatches) -> Tensor:
    run.packed.eval()
    return passes(step)


@fault("moments are BF16, not FP32", weights=("fp32", "bf16_exact"))
def moments_in_bf16(run: SmallRun, patch: Patch) -> None:
    @patching(run.optimizer, "materialise")
    def rounded(run: SmallRun, real: Any) -> None:
        real()
        for state in run.optimizer.state.values():
            state |= {name: state[name].bfloat16() for name in adamw.MOMENTS}

    rounded(run, patch)


PENALIZED = LossSettings(chunk=256, penalty="non_max_sum", penalty_weight=0.1)


@fault("the loss of earlier steps is added to the loss that is logged", loss=PENALIZED)
def logged_sums_kept(run: SmallRun, patch: Patch) -> None:
    head = run.packed.hf.get_output_embeddings()
    patch.setattr(head, "take_parts", lambda: head._parts)


@fault("the loss that is logged includes the penalty twice", loss=PENALIZED)
@patching(lambda run: run.packed, "mean_losses")
def penalty_logged_twice(run: SmallRun, real: Any, *arguments: Any) -> dict[str, Tensor]:
    losses = real(*arguments)
    return losses | {"loss": losses["loss"] + 0.1 * losses["penalty"]}


@fault_of_update("the loss that is logged is the last microbatch's")
@changing_passes
def last_loss_logged(run: SmallRun, passes: Callable[..., Tensor], step: StepBatches) -> Tensor:
    losses = []
    with run.packed.register_forward_hook(lambda module, args, loss: losses.append(loss.detach())):
        passes(step)
    return losses[-1] * len(losses) / step.valid_tokens


# ── Muon ────────────────────────────────────────────────────────────────────────────────


def fault_of_muon(what: str, **options: Any) -> Callable[[Make], Make]:
    """Return a decorator as `fault`, for a fault of a run that trains with Muon.

    The decorated function may patch the code that builds the optimizer.
    """

    def decorated(make: Make) -> Make:
        def with_muon(run: SmallRun, patch: Patch) -> None:
            make(run, patch)
            settings = run.recipe.optimizer.model_copy(update={"name": "muon"})
            run.recipe = run.recipe.model_copy(update={"optimizer": settings})
            exact = run.recipe.weights == "bf16_exact"
            run.optimizer = muon.build_muon(run.packed, settings, exact=exact)

        return fault(what, **options)(with_muon)

    return decorated


@fault_of_muon("Muon's update is 8 % too large")
def scale_too_large(run: SmallRun, patch: Patch) -> None:
    scale = muon.SCALES["match_rms_adamw"]
    patch.setitem(muon.SCALES, "match_rms_adamw", lambda *shape: 1.08 * scale(*shape))


def changing_decay(change: Callable[[Hyperparameters], float]) -> Make:
    """Return a fault of the weight decay of Muon's matrices."""
    return patching(Muon, "_update")(
        lambda run, real, *batch: real(
            *batch[:-1], batch[-1]._replace(weight_decay=change(batch[-1]))
        )
    )


fault_of_muon("Muon's weight decay is omitted")(changing_decay(lambda hyper: 0.0))
fault_of_muon("Muon's weight decay is multiplied by the scale of the update")(
    changing_decay(lambda hyper: hyper.weight_decay * hyper.scale)
)


@fault_of_muon("the momentum of one matrix of Muon stays zero")
@patching(Muon, "_direction")
def momentum_stays_zero(
    run: SmallRun, real: Any, optimizer: Muon, item: Hidden, *rest: Any
) -> Tensor:
    result = real(optimizer, item, *rest)
    if item.parameter is run.layers[0].self_attn.k_proj.weight:
        optimizer.state[item.parameter]["momentum"].zero_()
    return result


@fault("no scale is updated from the second step on", delayed)
def scales_stand_still(run: SmallRun, patch: Patch) -> None:
    after_update(
        run, patch, lambda _: patch.setattr(delayed_state.DelayedState, "_update", lambda *_: None)
    )
