"""Whether a fresh run is held to parity before its first step, and on what: `parity: true | false`."""

from __future__ import annotations

import math

import torch
from accelerate import Accelerator

from pretrain.model.distributed import largest_over_ranks
from pretrain.model.packed import PackedLanguageModel
from pretrain.plan.preflight import Job
from pretrain.run.running import Run
from pretrain.verify.parity import PLAIN_BYTES, Parity, check_parity

MICROBATCH = 2  # packs laid end to end, where a smaller shape than training's costs no compilation


def find_parity(run: Run) -> list[Parity | str]:
    """Compares step 0 with plain transformers in each of the run's precisions, or says why not; the audit holds the results.
    Empty where `parity` is off, and where the run resumes. Collective."""
    if not run.job.recipe.parity or not run.begins:
        return []
    assembly, results = run.assembly, []
    comparisons = sum(3 if active.precision.quantized else 2 for active in run.job.plan.actives)
    with run.waited.on("checks", "parity with plain transformers", "comparisons", total=comparisons):
        for each in assembly.precisions.values():
            with assembly.using(each.active):
                result = _in_one_precision(run, run.job.in_precision(each.active))
            results.append(result)
            record = {"left_out": result} if isinstance(result, str) else result.record()
            each.found["parity"] = {"source": "this run"} | record
        assembly.use(assembly.active)
    return results


def require_parity(run: Run, parity: list[Parity | str]) -> None:
    """Says what the comparisons have found; raises TrainingHalted where one failed."""
    for active, result in zip(run.job.plan.actives, parity, strict=False):
        if active in run.job.plan.in_use:
            name = f"{active.precision.name}: " if run.job.plan.phases else ""
            run.console.notice(name + (f"parity left out: {result}" if isinstance(result, str) else result.summary()))
        if isinstance(result, Parity):
            result.require()


def _in_one_precision(run: Run, job: Job) -> Parity | str:
    """Returns the comparison in the precision of `job`, or why it was left out; the same on every rank."""
    model, accelerator = run.assembly.model, run.accelerator
    if run.state.step:
        return f"step 0 is compared only, and this run begins with the weights of step {run.state.step:,}"
    if largest_over_ranks(accelerator, int(not _fits(model, accelerator.device))):
        return f"plain transformers in FP32 does not fit beside the run ({PLAIN_BYTES} bytes a parameter)"
    if run.assembly.audit["compiled"] == "nothing":
        job = job.with_microbatch(math.gcd(job.plan.microbatch, MICROBATCH))
    return compare_step_0(job, model, run.assembly.optimizer, accelerator)


def compare_step_0(job: Job, model: PackedLanguageModel, optimizer: torch.optim.Optimizer, accelerator: Accelerator) -> Parity:
    """Some of the run's step 0 in microbatches of the plan's size; collective."""
    batches, mask_boundaries = job.batches(accelerator), job.recipe.data.mask_boundaries
    packs = [batches.packs[index] for index in batches.order.packs_of_step(0).tolist()]
    return check_parity(model, optimizer, batches.step(0), packs, job.active, accelerator, mask_boundaries=mask_boundaries)


def _fits(model: PackedLanguageModel, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return PLAIN_BYTES * sum(p.numel() for p in model.hf.parameters()) < 0.8 * free
