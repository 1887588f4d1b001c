"""Measure the speed of several model shapes on one GPU: BF16, FP8, and FP8 with the head in FP8.

    python -m benchmarks.speed shapes --out FILE.json
    python -m benchmarks.speed shapes --out FILE.json --shapes "Qwen3 1.83B" --ways hf_eager

Each model is built from its shape with random weights, which do not affect the speed, and trains on
the packs of `generated_packs.py`. Microbatches have 32,768 tokens. Everything except the model and
the tokens per step is as in `benchmarks.speed ways`. Llama-3.1-8B uses one document of 8,192 tokens
at a time, with moments in BF16. The shapes of long contexts, 32k and 128k, use one
document of 32,768 or 131,072 tokens at a time. Mixtures of experts have the number of layers that
fits into memory with exact weights. On Hopper, their experts are in FP8 with gradients in E4M3 too.

Starting takes most of a training's time here, and only seconds are timed. So ways share compiled
kernels, and skip parity, which the doctor and tests/gpu check. Steps have 65,536 tokens. With
131,072 tokens, the optimizer would have half this share of the time. The first steps search,
compile and capture CUDA graphs, and are not timed. The result is the median of the other steps, and
the table shows the spread of these steps. `hf_eager` and `hf_compiled` are plain transformers. If
`hf_eager` is requested, the other ways are compared with it.

`--tiny` runs everything with a small model on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.machine import command, environment_from_elsewhere, processor
from benchmarks.speed.bench import Bench, Settings
from benchmarks.speed.libraries.entries import BASELINE, CPU, GPU, MODELS, Entry
from foundation.errors import InputError
from foundation.files import write_json
from foundation.units import TERA, markdown, percent
from pretrain.metrics.cards import bf16_peak
from pretrain.metrics.flops import ModelFlops, flops_of_nanogpt
from pretrain.model.configuration import load_config
from pretrain.model.huggingface import build_on_meta
from pretrain.precision.settings import is_quantized
from pretrain.settings.config import load_recipe, resolved

WAYS = (BASELINE, "hf_compiled", "bf16_exact", "delayed_exact", "delayed_exact_head")
LABELS = (
    *("transformers, eager", "transformers, compiled"),
    *("BF16", "FP8 delayed", "and the head"),
)


@dataclass(frozen=True)
class Shape:
    """A model shape to measure."""

    # Recipe with the model and the pack length.
    recipe: str
    # Configuration of the model, if the recipe names published weights.
    config: Mapping[str, Any] | None = None
    # Tokens of a pack, if it is not the length of the recipe.
    length: int | None = None
    # Tokens of a microbatch.
    microbatch: int = 32_768
    # Overrides of all ways.
    more: tuple[str, ...] = ()
    # Overrides of ways in low precision.
    low: tuple[str, ...] = ()
    whole_documents: bool = False
    # Steps before the timed ones. Most CUDA graphs are captured in these steps.
    warm_up: int = 8
    # Number of timed steps.
    steps: int = 3

    def entries(self, model: str, ways: Sequence[str]) -> list[Entry]:
        """Return the entries of `model` for `ways`, with the overrides of this shape."""
        entries = []
        for entry in MODELS[model].entries:
            if entry.name in ways:
                low = self.low if is_quantized(entry.precision) else ()
                entries.append(replace(entry, overrides=(*entry.overrides, *low)))
        return entries

    def settings(self, tokens: int) -> list[str]:
        """Return overrides of the recipe of `ways`, for steps with `tokens` tokens."""
        recipe = load_recipe(Path(self.recipe))
        length = self.length or recipe.data.length
        config = self.config or recipe.model.config
        batch = [f"batch.tokens={tokens}", f"batch.microbatch={max(1, self.microbatch // length)}"]
        return [f"model.config={json.dumps(config)}", f"data.length={length}", *batch, *self.more]


def llama_3_2(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    """Return Llama-3.2's configuration: 8 heads of keys and values, and a tied head."""
    return {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": 8192,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": hidden // heads,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }


def qwen2_5(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    *,
    tied: bool,
    **more: Any,
) -> Shape:
    """Return a shape of Qwen2.5 with one document per pack. `more` are other fields of the shape.

    The head is tied up to 3 billion parameters.
    """
    config = {
        "model_type": "qwen2",
        "vocab_size": 151936 if tied else 152064,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
    }
    return Shape("benchmarks/qwen2_5.yaml", config, whole_documents=True, **more)


def long_context(recipe: str, length: int, *more: str) -> Shape:
    """Return a shape with one document of `length` tokens per microbatch.

    The shape is that of `recipe`, whose packs are shorter. `more` are overrides of all ways.
    """
    return Shape(
        recipe,
        length=length,
        microbatch=length,
        more=("model.config.max_position_embeddings=131072", *more),
        whole_documents=True,
        warm_up=2 if length < 131_072 else 1,
        steps=2 if length < 131_072 else 1,
    )


def qwen3_5(
    hidden: int, intermediate: int, layers: int, heads: int, value_heads: int, **more: Any
) -> Shape:
    """Return a shape of Qwen3.5's text model. Three of four layers compute a gated delta rule."""
    config = {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(2, heads // 4),
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    }
    return Shape("recipes/qwen3_slimpajama.yaml", config, warm_up=3, **more)


E4M3 = "fp8_config.fp8_format=E4M3"
RECOMPUTED = "model.gradient_checkpointing=full"
# Fields of the shapes that need AdamW's moments in host memory, and gradient sums in BF16.
LARGE = {
    "microbatch": 4096,
    "more": ("optimizer.offload=moments", "optimizer.gradients=bf16"),
    "warm_up": 2,
    "steps": 2,
}
# Layers of Qwen3-30B-A3B: 128 experts, 8 of them for each token.
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}

SHAPES = {
    # Use `--tokens 524288` with these two shapes.
    "GPT-2 124M": Shape("recipes/gpt2_fineweb_edu.yaml", microbatch=65_536, steps=10),
    "Qwen3 101M": Shape("benchmarks/qwen3_101m.yaml", microbatch=65_536, steps=10),
    "GPT-2 1.27B": Shape("recipes/gpt2_slimpajama.yaml"),
    "LLaMA-2 1.29B": Shape("recipes/llama2_slimpajama.yaml"),
    "LLaMA-3 1.54B": Shape("recipes/llama3_1_5b_slimpajama.yaml"),
    "Qwen3 1.83B": Shape("recipes/qwen3_slimpajama.yaml"),
    "LLaMA-3 2.22B": Shape("recipes/llama3_2_2b_slimpajama.yaml"),
    "Llama-3.2-1B": Shape("recipes/llama3_2_1b_openmath.yaml", llama_3_2(2048, 16, 32)),
    "Llama-3.2-3B": Shape("recipes/llama3_2_3b_openmath.yaml", llama_3_2(3072, 28, 24)),
    "Llama-3.1-8B": Shape(
        "benchmarks/llama_3_1_8b.yaml",
        microbatch=8192,
        more=("optimizer.moments=bf16",),
        whole_documents=True,
        # The memory does not suffice for CUDA graphs.
        warm_up=2,
    ),
    "OLMoE-1B-7B (6 of 16 layers)": Shape("benchmarks/olmoe_6_layers.yaml", low=(E4M3,)),
    "Qwen3-30B-A3B (4 of 48 layers)": Shape(
        "benchmarks/olmoe_6_layers.yaml", QWEN3_MOE, low=(E4M3,)
    ),
    "Qwen3.5-0.8B": qwen3_5(1024, 3584, 24, 8, 16, microbatch=16_384),
    "Qwen3.5-0.8B whole documents": qwen3_5(
        1024, 3584, 24, 8, 16, microbatch=16_384, whole_documents=True
    ),
    "Qwen3.5-4B": qwen3_5(2560, 9216, 32, 16, 32, microbatch=4096),
    # Use `--tokens 524288` with these shapes. From 1.5 billion parameters on, the microbatches are
    # the largest ones that fit into 80 GB without recomputed activations. Qwen2.5-0.5B leaves
    # memory for larger chunks of the loss. Qwen2.5-14B needs 141 GB, and 55 GiB of host memory for
    # moments in BF16.
    "Qwen2.5-0.5B": qwen2_5(896, 4864, 24, 14, 2, tied=True, more=("loss.chunk=8192",)),
    "Qwen2.5-1.5B": qwen2_5(1536, 8960, 28, 12, 2, tied=True, warm_up=3),
    "Qwen2.5-3B": qwen2_5(2048, 11008, 36, 16, 2, tied=True, microbatch=8192, warm_up=2),
    "Qwen2.5-7B": qwen2_5(3584, 18944, 28, 28, 4, tied=False, **LARGE),
    "Qwen2.5-14B": qwen2_5(
        *(5120, 13824, 48, 40, 8),
        tied=False,
        **(LARGE | {"more": (*LARGE["more"], "optimizer.moments=bf16"), "warm_up": 1}),
    ),
    # These shapes need 141 GB. Use `--tokens 131072` with the documents of 131,072 tokens. The last
    # shape needs 75 GiB of host memory for the state of the optimizer.
    "Qwen3-1.7B 32k": long_context("benchmarks/qwen3_1_7b.yaml", 32_768),
    "Qwen3-1.7B 128k": long_context("benchmarks/qwen3_1_7b.yaml", 131_072, RECOMPUTED),
    "Llama-3.1-8B 32k": long_context(
        "benchmarks/llama_3_1_8b.yaml", 32_768, RECOMPUTED, "optimizer.moments=bf16"
    ),
    "Llama-3.1-8B 128k": long_context(
        "benchmarks/llama_3_1_8b.yaml", 131_072, RECOMPUTED, "optimizer.offload=state"
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add(
        "--shapes",
        type=lambda text: text.split(","),
        default=list(SHAPES),
        metavar="A,B",
        help="shapes to measure; default: all",
    )
    add(
        "--ways",
        type=lambda text: text.split(","),
        default=WAYS[2:],
        metavar="A,B",
        help=f"ways to measure, of {', '.join(WAYS)}; default: the last three",
    )
    add("--tokens", type=int, default=65_536, help="tokens per step; default: 65536")
    add("--timeout", type=float, default=150, help="maximum seconds of one way")
    add("--tiny", action="store_true", help="dry run with a small model on the CPU")
    add("--out", type=Path, required=True, help="result file; other results in it stay")


def measure(arguments: argparse.Namespace) -> None:
    """Measure the requested shapes. The result file is written after each shape."""
    shapes = {name: SHAPES[name] for name in arguments.shapes}
    if arguments.tiny:
        shapes = {"tiny": Shape("benchmarks/tiny.yaml")}
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    arguments.environment = environment_from_elsewhere() | {"processor": processor()}
    if not (arguments.tiny or arguments.environment["gpus"]):
        raise InputError("there is no CUDA device; use --tiny for a dry run on the CPU")
    result = {"command": command(), "shapes": {}}
    if arguments.out.exists():
        result = json.loads(arguments.out.read_text())
    for name, shape in shapes.items():
        print(f"── {name}", flush=True)
        measured = measure_shape(shape, result["shapes"].get(name, {}), arguments)
        measured["environment"] = arguments.environment
        result["shapes"][name] = measured
        write_json(arguments.out, result)
    print(table(result))


def measure_shape(
    shape: Shape, earlier: Mapping[str, Any], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Measure the ways of a shape like `benchmarks.speed ways`, and add their MFU.

    If the `earlier` result has the same recipe, its ways that are not measured again are kept.
    """
    if arguments.tiny:
        model = "tiny"
        configuration = CPU
        ways = ("hf_eager", "fp32")
        changed = ["parity=false"]
    else:
        model = "qwen3_1_7b"
        configuration = GPU
        ways = arguments.ways
        changed = ["parity=false", *shape.settings(arguments.tokens)]
    recipe = load_recipe(MODELS[model].recipe, changed)
    flops = ModelFlops.of(build_on_meta(load_config(recipe.model)))
    with tempfile.TemporaryDirectory(prefix="shapes-") as folder:
        path = Path(folder, "recipe.yaml")
        path.write_text(yaml.safe_dump(resolved(recipe), sort_keys=False))
        settings = Settings(
            model,
            path,
            configuration,
            shape.warm_up,
            shape.steps,
            arguments.timeout,
            shape.whole_documents,
        )
        bench = Bench(settings, Path(folder, "result.json"), command(), brief=True)
        recipe_text = bench.result["settings"]["recipe_text"]
        if earlier.get("settings", {}).get("recipe_text") == recipe_text:
            bench.result["ways"] = {
                name: way for name, way in earlier["ways"].items() if name not in ways
            }
        bench.run(shape.entries(model, ways))
        result = json.loads(json.dumps(bench.result).replace(f"{folder}/", ""))
    add_mfu(result, flops, recipe.data.length, arguments.environment)
    result |= {
        "parameters": flops.parameters,
        "active_parameters": flops.parameters - flops.idle_weights,
        "length": recipe.data.length,
    }
    return {"recipe": shape.recipe, "changed": changed, **result}


def add_mfu(
    result: dict[str, Any], flops: ModelFlops, length: int, environment: Mapping[str, Any]
) -> None:
    """Add the MFU to each way of a result, and the commit to new ways."""
    peak_tflops = bf16_peak(next(iter(environment["gpus"]), None))
    squared_lengths = result["packs"]["sum_squared_lengths_per_token"]
    for way in result["ways"].values():
        # Ways of an earlier result already have their commit.
        way.setdefault("commit", environment["git"]["commit"])
        if way["status"] == "ok" and peak_tflops:
            speed = way["tokens_per_second"]["median"] / TERA / peak_tflops
            way["mfu"] = flops.step(1, squared_lengths) * speed
            way["mfu_nanogpt"] = flops_of_nanogpt(flops, length) * speed


def table(result: Mapping[str, Any]) -> str:
    """Return the Markdown table of a result.

    It has the tokens/s of each shape and way, the gain of FP8, the MFU by two counts of FLOPs, the
    memory, and the largest spread of a way's steps relative to the median.
    """
    header = [
        "model",
        "length",
        "weights trained",
        *(f"{label}, tokens/s" for label in LABELS),
        "FP8 gains",
        "with the head",
    ]
    rows = [row(name, shape) for name, shape in result["shapes"].items()]
    return markdown(
        [*header, "MFU in BF16, ours; nanoGPT's", "GiB in BF16; FP8", "spread"], rows, names=1
    )


def row(name: str, shape: Mapping[str, Any]) -> Sequence[str]:
    """Return the table's row of a shape."""
    ways = {key: way for key, way in shape["ways"].items() if way["status"] == "ok"}
    speeds = [ways[way]["tokens_per_second"]["median"] if way in ways else None for way in WAYS]
    bf16, delayed, head = speeds[2:]
    gains = [f"{fp8 / bf16:.2f} x" if fp8 and bf16 else "–" for fp8 in (delayed, head)]
    bf16_way = ways.get("bf16_exact", {})
    fp8_way = ways.get("delayed_exact", {})
    mfu = "–"
    if "mfu" in bf16_way:
        mfu = f"{percent(bf16_way['mfu'])}; {percent(bf16_way['mfu_nanogpt'])}"
    memory = "; ".join(f"{way['memory_gib']:.1f}" if way else "–" for way in (bf16_way, fp8_way))
    parameters = shape["parameters"]
    active = shape.get("active_parameters", parameters)
    trained = f"{parameters / 1e6:,.0f} M"
    if active < parameters:
        trained += f", {active / 1e6:,.0f} M a token"
    spreads = []
    for way in ways.values():
        speed = way["tokens_per_second"]
        spreads.append(speed["max"] / speed["median"] - speed["min"] / speed["median"])
    figures = [*(f"{speed:,.0f}" if speed else "–" for speed in speeds), *gains, mfu, memory]
    spread = percent(max(spreads)) if spreads else "–"
    return [name, f"{shape['length']:,}", trained, *figures, spread]
