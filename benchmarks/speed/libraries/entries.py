"""The ways to compare, by name.

Ways of the launcher are overrides of its recipe. Other ways are modules of this folder. The ways of
`pretrain.api` have a module and overrides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# All other ways are compared with the losses and gradient norms of this way.
BASELINE = "hf_eager"


@dataclass(frozen=True)
class Entry:
    """A way.

    Attributes:
        precision: The precision of its GEMMs.
        weights: fp32, bf16 or bf16_exact.
        module: The module of another trainer, or None for the launcher.
        packs: The first number of packs per microbatch that is tried, or None for the recipe's.
            Ways that compile for minutes start with the number that eager needs.
    """

    name: str
    label: str
    precision: str
    weights: str
    module: str | None = None
    overrides: tuple[str, ...] = ()
    packs: int | None = None

    @property
    def ours(self) -> bool:
        return self.module is None

    @property
    def floor(self) -> str:
        """Return the name of this way's limit in the results of benchmarks.speed.limits."""
        if self.precision in ("fp32", "bf16", "mxfp8", "nvfp4"):
            return self.precision
        return (
            "fp8+head" if any("linear+head" in override for override in self.overrides) else "fp8"
        )

    @property
    def loses_updates(self) -> bool:
        """Return True if weights lose updates of less than half a unit in the last place."""
        return self.weights == "bf16"


@dataclass(frozen=True)
class Model:
    """A model: its recipe, the accelerate configuration for the launcher, and its ways in order."""

    recipe: Path
    configuration: Path
    entries: tuple[Entry, ...]
    # True if each pack is one document.
    whole_documents: bool = False


def other(
    name: str, label: str, module: str, precision: str, weights: str, packs: int | None = None
) -> Entry:
    """Return a way of another trainer. `module` is the name of a file in this folder."""
    module = f"benchmarks.speed.libraries.{module}"
    return Entry(name, label, precision, weights, module=module, packs=packs)


def library(name: str, precision: str, *overrides: str) -> Entry:
    """Return a way that uses `pretrain.api` in a plain loop."""
    return Entry(
        name,
        f"pretrain.api, {precision}, plain loop",
        precision,
        "bf16_exact",
        module="benchmarks.speed.libraries.pretrain_api",
        overrides=(f"precision={precision}", *overrides),
    )


def ours(variants: Mapping[str, str]) -> tuple[Entry, ...]:
    """Return the ways of the launcher. `variants` has their overrides by name."""
    entries = []
    for name, text in variants.items():
        overrides = dict(part.split("=", 1) for part in text.split())
        precision = overrides["precision"]
        options = [
            part.rpartition(".")[2]
            for part in text.split()
            if not part.startswith(("precision=", "weights="))
        ]
        label = ", ".join(["ours", precision, *options])
        parts = tuple(text.split())
        entries.append(Entry(name, label, precision, overrides["weights"], overrides=parts))
    return tuple(entries)


OTHERS = (
    other("hf_eager", "Hugging Face, eager", "hf_eager", "bf16", "fp32"),
    other("hf_eager_bf16", "Hugging Face, eager", "hf_eager", "bf16", "bf16"),
    other("hf_compiled", "Hugging Face, compiled", "hf_compiled", "bf16", "fp32", packs=4),
    other("hf_compiled_bf16", "Hugging Face, compiled", "hf_compiled", "bf16", "bf16", packs=4),
    other("reference", "the reference: te.Linear + Liger", "reference", "delayed", "fp32"),
    other("reference_bf16", "the reference: te.Linear + Liger", "reference", "delayed", "bf16"),
    other("accelerate_fp8", "accelerate's own FP8 path", "accelerate_fp8", "delayed", "fp32"),
    other("torchao", "torchtitan's float8: torchao, compiled", "torchao_float8", "current", "fp32"),
    other(
        "torchao_bf16",
        "torchtitan's float8: torchao, compiled",
        "torchao_float8",
        "current",
        "bf16",
    ),
)

LIBRARY = (
    library("api_current", "current"),
    library("api_delayed", "delayed"),
    library("api_delayed_head", "delayed", "fp8_config.scope=linear+head"),
)

EXACT = "precision=delayed weights=bf16_exact"
EXACT_HEAD = f"{EXACT} fp8_config.scope=linear+head"
OURS = {
    "delayed_exact": EXACT,
    "delayed_exact_head": EXACT_HEAD,
    "delayed_fp32": "precision=delayed weights=fp32",
    "delayed_bf16": "precision=delayed weights=bf16",
    "current_exact": "precision=current weights=bf16_exact",
    "current_fp32": "precision=current weights=fp32",
    "block_exact": "precision=block weights=bf16_exact",
    "block_fp32": "precision=block weights=fp32",
    "bf16_exact": "precision=bf16 weights=bf16_exact",
    "bf16_fp32": "precision=bf16 weights=fp32",
    "bf16_bf16": "precision=bf16 weights=bf16",
    # Variants with one more option, to compare with delayed_exact or delayed_exact_head.
    "delayed_exact_bf16_moments": f"{EXACT} optimizer.moments=bf16",
    "delayed_exact_bf16_gradients": f"{EXACT} optimizer.gradients=bf16",
    "delayed_exact_16_packs": f"{EXACT} batch.microbatch=16",
    "delayed_exact_head_16_packs": f"{EXACT_HEAD} batch.microbatch=16",
    "delayed_exact_head_4_packs": f"{EXACT_HEAD} batch.microbatch=4",
    "delayed_exact_head_chunk_8192": f"{EXACT_HEAD} loss.chunk=8192",
    "delayed_exact_unfused": f"{EXACT} model.fused=off",
    "delayed_exact_varlen": f"{EXACT} model.attention=varlen",
    "bf16_exact_muon": "precision=bf16 weights=bf16_exact optimizer.name=muon",
    "delayed_exact_head_muon": f"{EXACT_HEAD} optimizer.name=muon",
}

# The recipe has BF16 gradients and recomputes every layer. With BF16 moments, FP32 gradients fit
# without recomputation.
NOT_RECOMPUTED = (
    "optimizer.moments=bf16 optimizer.gradients=fp32 model.gradient_checkpointing=none "
    "batch.microbatch=1"
)
BF16_STATE = NOT_RECOMPUTED.replace("gradients=fp32", "gradients=bf16")
OURS_8B = {
    "delayed_exact": EXACT,
    "delayed_exact_bf16_moments": f"{EXACT} {NOT_RECOMPUTED}",
    "delayed_exact_head_bf16_moments": f"{EXACT_HEAD} {NOT_RECOMPUTED}",
    "delayed_exact_bf16_state": f"{EXACT} {BF16_STATE}",
    "delayed_exact_head_bf16_state": f"{EXACT_HEAD} {BF16_STATE}",
    "bf16_exact": "precision=bf16 weights=bf16_exact",
}

OURS_TINY = {"fp32": "precision=fp32 weights=fp32"}

GPU = Path("accelerate_configs/bf16.yaml")
CPU = Path("accelerate_configs/cpu.yaml")
MODELS = {
    "qwen3_1_7b": Model(Path("benchmarks/qwen3_1_7b.yaml"), GPU, (*OTHERS, *LIBRARY, *ours(OURS))),
    "llama_8b": Model(Path("benchmarks/llama_3_1_8b.yaml"), GPU, ours(OURS_8B)),
    "llama_8b_whole": Model(
        Path("benchmarks/llama_3_1_8b.yaml"), GPU, ours(OURS_8B), whole_documents=True
    ),
    "tiny": Model(Path("benchmarks/tiny.yaml"), CPU, (*OTHERS, *LIBRARY, *ours(OURS_TINY))),
}
