"""Whether a fresh run is held to parity before its first step, and on what: `parity: auto | on | off`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from pretrain.model.distributed import describe_topology, largest_over_ranks
from pretrain.model.packed import PackedLanguageModel
from pretrain.plan.preflight import Job
from pretrain.run.running import Run
from pretrain.verify.kept import KeptResult
from pretrain.verify.parity import MICROBATCHES, PLAIN_BYTES, TOKENS, Parity, check_parity

SMALL_SHARE = 0.01  # of what a run computes, that a check may cost under `auto`
# What the check costs, in tokens trained: each packed pass by its tokens (two of them, with a microbatch before each, and the
# draws of noise), and plain FP32 and BF16 over a document at a time as twelve times as much.
PACKED_PASSES, PLAIN_TOKENS = 5, 12
MICROBATCH = 2  # packs laid end to end, where a smaller shape than training's costs no compilation


@dataclass(frozen=True)
class LeftOut:
    """Stands in place of a comparison and says why there was none. `kept`: the record of an earlier one that passed."""

    reason: str
    kept: dict[str, Any] | None = None

    def summary(self) -> str:
        return f"parity left out: {self.reason}"

    def record(self) -> dict[str, Any]:
        return self.kept or {"left_out": self.reason}

    def require(self) -> None:
        """Does nothing: parity that was left out cannot fail."""


def find_parity(run: Run) -> list[Parity | LeftOut]:
    """Compares step 0 with plain transformers in each of the run's precisions, or says why not; the audit holds what came of it.
    Empty where it is not asked for, and where the run resumes. Collective."""
    if run.job.recipe.parity == "off" or not run.begins:
        return []
    assembly, found = run.assembly, []
    comparisons = sum(4 if active.precision.quantized else 2 for active in run.job.plan.actives)
    with run.waited.on("checks", "parity with plain transformers", "comparisons", total=comparisons):
        for each in assembly.precisions.values():
            with assembly.using(each.active):
                found.append(_in_one_precision(run, run.job.in_precision(each.active)))
            each.found["parity"] = {"source": "this run"} | found[-1].record()
        assembly.use(assembly.active)
    return found


def require_parity(run: Run, parity: list[Parity | LeftOut]) -> None:
    """Says what the comparisons have found; raises TrainingHalted where one failed."""
    for active, found in zip(run.job.plan.actives, parity, strict=False):
        if active in run.job.plan.in_use:
            run.console.notice(f"{active.precision.name}: {found.summary()}" if run.job.plan.phases else found.summary())
        found.require()


def _in_one_precision(run: Run, job: Job) -> Parity | LeftOut:
    """Returns the comparison in the precision of `job`, or why it was left out; the same on every rank.

    A run that begins at a later step, with another run's weights, is not compared: what is compared is code, which a run from
    step 0 shares.
    """
    model, accelerator, compiled, step = run.assembly.model, run.accelerator, run.assembly.audit["compiled"], run.state.step
    setting, kept = job.recipe.parity, KeptResult(subject_of(job, accelerator, compiled))
    if compiled == "nothing":
        job = job.with_microbatch(math.gcd(job.plan.microbatch, MICROBATCH))
    if setting == "auto" or step:
        known = kept.read() if accelerator.is_main_process else None
        if largest_over_ranks(accelerator, int(known is not None)):  # the main process's answer is everybody's
            return LeftOut("the same code has passed on this device before", known or {"source": "kept"})
    if step:
        return LeftOut(
            f"it is checked at step 0 only, and this run begins with the weights of step {step:,}; to check the same code, run "
            "the same recipe without `train.begin_with`, with `parity=on`, `train.steps=1` and another `run_dir`"
        )
    if setting == "auto":
        of_microbatches = MICROBATCHES * job.plan.microbatch * job.recipe.data.length
        cost = PACKED_PASSES * of_microbatches + PLAIN_TOKENS * min(TOKENS, of_microbatches)
        share = cost * accelerator.num_processes / (job.plan.steps * job.plan.tokens_per_step)
        if share > SMALL_SHARE:
            return LeftOut(f"it would cost {share:.0%} of this short run; `parity=on` checks it all the same")
        if largest_over_ranks(accelerator, int(not _fits(model, accelerator.device))):
            return LeftOut(f"plain transformers in FP32 does not fit beside the run ({PLAIN_BYTES} bytes a parameter)")
    found = compare_step_0(job, model, run.assembly.optimizer, accelerator)
    if accelerator.is_main_process and not found.failures and found.text.tells_all:
        kept.write(found.record())
    return found


def compare_step_0(job: Job, model: PackedLanguageModel, optimizer: torch.optim.Optimizer, accelerator: Accelerator) -> Parity:
    """The beginning of the run's step 0 in microbatches of the plan's size; collective."""
    batches, mask_boundaries = job.batches(accelerator), job.recipe.data.mask_boundaries
    packs = [batches.packs[index] for index in batches.order.packs_of_step(0).tolist()]
    return check_parity(model, optimizer, batches.step(0), packs, job.active, accelerator, mask_boundaries=mask_boundaries)


def _fits(model: PackedLanguageModel, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return PLAIN_BYTES * sum(p.numel() for p in model.hf.parameters()) < 0.8 * free


def subject_of(job: Job, accelerator: Accelerator, compiled: str) -> dict[str, Any]:
    """All that decides what is computed, beside the code and its libraries."""
    recipe = job.recipe
    return {
        "device": job.plan.devices.name,
        "topology": describe_topology(accelerator),
        "model": job.model_config.to_dict() | {"model_type": job.model_config.model_type},
        "settings": recipe.model.model_dump(mode="json", exclude={"config"}),
        "attention": job.attention.name,
        "compiled": compiled,
        "deterministic": recipe.deterministic,
        "loss": recipe.loss.model_dump(mode="json"),
        "weights": recipe.weights,
        "gradients": recipe.gradients_kept_in,
        "precision": job.precision.name,
        "backend": job.active.backend,
        "fp8_config": job.active.settings.model_dump(mode="json") if job.precision.quantized else None,
        "length": recipe.data.length,
        "mask_boundaries": recipe.data.mask_boundaries,
        "microbatch": job.plan.microbatch,
    }
