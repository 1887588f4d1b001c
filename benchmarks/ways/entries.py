"""The ways that are compared, by name. Ours are overrides of the launcher's recipe; the others are modules of this folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BASELINE = "hf_eager"  # what every other way's loss and gradient norm are held against


@dataclass(frozen=True)
class Entry:
    """One way. `module`: of the others, None for ours. `precision`: of its products; `weights`: fp32, bf16 or bf16_exact.

    `packs`: of a microbatch to begin with, None for the recipe's; what takes minutes to compile begins where eager has ended.
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
        """Which of the machine's limits it is measured against: that of the units its products run on."""
        if self.precision in ("fp32", "bf16"):
            return self.precision
        return (
            "fp8+head" if any("linear+head" in override for override in self.overrides) else "fp8"
        )

    @property
    def loses_updates(self) -> bool:
        """BF16 weights under AdamW drop every update of less than half a unit in their last place."""
        return self.weights == "bf16"


@dataclass(frozen=True)
class Model:
    """One model to compare on: its recipe, the accelerate configuration that ours runs under, and its ways in order."""

    recipe: Path
    configuration: Path
    entries: tuple[Entry, ...]
    whole_documents: bool = False  # each pack is one


def other(
    name: str, label: str, module: str, precision: str, weights: str, packs: int | None = None
) -> Entry:
    return Entry(name, label, precision, weights, module=f"benchmarks.ways.{module}", packs=packs)


def ours(variants: Mapping[str, str]) -> tuple[Entry, ...]:
    """The launcher's variants, each a name and its overrides, from which precision, weights and label are read."""
    entries = []
    for name, text in variants.items():
        overrides = dict(part.split("=", 1) for part in text.split())
        precision, weights = overrides["precision"], overrides["weights"]
        more = [part for part in text.split() if not part.startswith(("precision=", "weights="))]
        label = ", ".join(["ours", precision, *(part.rpartition(".")[2] for part in more)])
        entries.append(Entry(name, label, precision, weights, overrides=tuple(text.split())))
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

OURS = {
    "delayed_exact": "precision=delayed weights=bf16_exact",
    "delayed_exact_head": "precision=delayed weights=bf16_exact fp8_config.scope=linear+head",
    "delayed_fp32": "precision=delayed weights=fp32",
    "delayed_bf16": "precision=delayed weights=bf16",
    "current_exact": "precision=current weights=bf16_exact",
    "current_fp32": "precision=current weights=fp32",
    "block_exact": "precision=block weights=bf16_exact",
    "block_fp32": "precision=block weights=fp32",
    "bf16_exact": "precision=bf16 weights=bf16_exact",
    "bf16_fp32": "precision=bf16 weights=fp32",
    "bf16_bf16": "precision=bf16 weights=bf16",
    # What single options give, each against delayed_exact or delayed_exact_head.
    "delayed_exact_bf16_moments": "precision=delayed weights=bf16_exact optimizer.moments=bf16",
    "delayed_exact_bf16_gradients": "precision=delayed weights=bf16_exact optimizer.gradients=bf16",
    "delayed_exact_16_packs": "precision=delayed weights=bf16_exact batch.microbatch=16",
    "delayed_exact_head_16_packs": "precision=delayed weights=bf16_exact fp8_config.scope=linear+head batch.microbatch=16",
    "delayed_exact_head_4_packs": "precision=delayed weights=bf16_exact fp8_config.scope=linear+head batch.microbatch=4",
    "delayed_exact_head_chunk_8192": "precision=delayed weights=bf16_exact fp8_config.scope=linear+head loss.chunk=8192",
    "delayed_exact_unfused": "precision=delayed weights=bf16_exact model.fused=off",
    "delayed_exact_varlen": "precision=delayed weights=bf16_exact model.attention=varlen",
}

# The recipe keeps gradients in BF16 and recomputes every layer; BF16 moments make room for all layers, and for FP32 gradients.
NOT_RECOMPUTED = "optimizer.moments=bf16 optimizer.gradients=fp32 model.gradient_checkpointing=none batch.microbatch=1"
BF16_STATE = NOT_RECOMPUTED.replace("gradients=fp32", "gradients=bf16")
OURS_8B = {
    "delayed_exact": "precision=delayed weights=bf16_exact",
    "delayed_exact_bf16_moments": f"precision=delayed weights=bf16_exact {NOT_RECOMPUTED}",
    "delayed_exact_head_bf16_moments": f"precision=delayed weights=bf16_exact fp8_config.scope=linear+head {NOT_RECOMPUTED}",
    "delayed_exact_bf16_state": f"precision=delayed weights=bf16_exact {BF16_STATE}",
    "delayed_exact_head_bf16_state": f"precision=delayed weights=bf16_exact fp8_config.scope=linear+head {BF16_STATE}",
    "bf16_exact": "precision=bf16 weights=bf16_exact",
}

OURS_TINY = {"fp32": "precision=fp32 weights=fp32"}

GPU, CPU = Path("accelerate_configs/bf16.yaml"), Path("accelerate_configs/cpu.yaml")
MODELS = {
    "qwen3_1_7b": Model(Path("benchmarks/qwen3_1_7b.yaml"), GPU, (*OTHERS, *ours(OURS))),
    "llama_8b": Model(Path("benchmarks/llama_3_1_8b.yaml"), GPU, ours(OURS_8B)),
    "llama_8b_whole": Model(
        Path("benchmarks/llama_3_1_8b.yaml"), GPU, ours(OURS_8B), whole_documents=True
    ),
    "tiny": Model(Path("benchmarks/tiny.yaml"), CPU, (*OTHERS, *ours(OURS_TINY))),
}
