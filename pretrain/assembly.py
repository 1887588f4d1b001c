"""The model in memory, in its precision and on its devices, with its optimizer and the proof of what runs in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from pretrain import model, optimizer
from pretrain.distributed import prepare, sharded_like, unwrapped
from pretrain.exact_adamw import ExactAdamW
from pretrain.precision import audit
from pretrain.preflight import Job


@dataclass(frozen=True)
class Assembly:
    """One model under its three names: `hf` as transformers knows it, `model` as it maps packed batches to losses, wrapped for
    the topology, and `tensors` as checkpoints hold it."""

    hf: PreTrainedModel
    model: nn.Module
    optimizer: ExactAdamW
    audit: dict[str, Any]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return model.named_tensors(self.hf)

    @property
    def optimizer_tensors(self) -> dict[str, Tensor]:
        return optimizer.named_state(self.optimizer, self.hf)


def assemble(job: Job, accelerator: Accelerator) -> Assembly:
    """Build the model of `job`, put its precision around its layers, wrap it for the topology, observe what it computes in."""
    recipe, device, backend = job.recipe, accelerator.device, job.backend.name
    exact = recipe.weights == "bf16_exact"
    weights = torch.float32 if exact else job.weight_dtype
    hf = model.build(recipe.model, job.model_config, weights=weights, seed=recipe.seed, device=device, backend=backend)
    masters = model.round_weights(hf, job.weight_dtype) if exact else {}
    packed = model.PackedLanguageModel(hf, backend, recipe.loss)
    # FSDP2 gathers parameters in the compute dtype: its working copies are made by the gathering.
    cast_to = job.compute_dtype if job.compute_dtype != job.weight_dtype and not accelerator.is_fsdp2 else None
    compiled = recipe.model.compile == "layer" or (recipe.model.compile == "auto" and device.type == "cuda")
    model.wrap_layers(hf, recipe.model, cast_to=cast_to, compile_layers=compiled)
    adamw = optimizer.build_optimizer(packed, recipe.optimizer, exact=exact)
    prepared, adamw = prepare(accelerator, packed, adamw, job.compute_dtype)
    adamw.materialise()
    for name, parameter in hf.named_parameters():
        if name in masters:  # taken out one by one, so that the FP32 weights go as the remainders come
            adamw.set_master(parameter, sharded_like(masters.pop(name), parameter))

    one_pack = model.inputs_of(job.data.trial_batch(1), device)
    products = audit.observe(unwrapped(prepared), one_pack, job.precision)
    if isinstance(prepared, DistributedDataParallel):
        lay_gradients_into_buckets(prepared, adamw, one_pack)
    found = {
        "precision": job.precision.name,
        "computes": job.precision.description,
        "weights": recipe.weights,
        "attention": {"kind": backend, "reason": job.backend.reason},
        "loss": hf.get_output_embeddings().describe(),
        "compiled": "each layer" if compiled else "nothing",
        "products": products,
    }
    return Assembly(hf, prepared, adamw, found)


def lay_gradients_into_buckets(ddp: DistributedDataParallel, adamw: torch.optim.Optimizer, inputs: dict[str, Any]) -> None:
    """Let every gradient be a view into the communication buckets before the first step, and these be the final ones.

    DistributedDataParallel lays its buckets out anew after the first backward that it has seen, and a gradient becomes a view at
    the end of one. In training that would hold a second copy of all gradients, in the first step and for good in the peak; and
    the sums over three ranks and more would come in another order after a resume than without one.
    """
    with torch.compiler.set_stance("force_eager"):  # of a shape that never comes again
        for _ in range(2):
            ddp(**inputs).backward()
    optimizer.clear_gradients(adamw, ddp)
