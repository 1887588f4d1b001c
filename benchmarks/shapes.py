"""The models of the documents that this project began with: their speed on one GPU, in BF16, in FP8, and with the head in FP8.

    python -m benchmarks.shapes --out benchmarks/results/speed/h200_shapes.json
    python -m benchmarks.shapes --out benchmarks/results/speed/h200_shapes.json --shapes "Qwen3 1.83B" --ways hf_eager
    python -m benchmarks.shapes --report benchmarks/results/speed/h200_shapes.json

Each is built from its shape with random weights and trains on the packs of `benchmarks.throughput_packs`: what the weights are
does not decide how fast a product is. Microbatches have 32,768 tokens, and all else but the model and the step's tokens is as in
`benchmarks.throughput`. Llama-3.1-8B takes whole documents of 8,192 tokens, one at a time, with moments in BF16. Of the mixtures
of experts so many layers are taken as fit beside exact weights; on Hopper experts are in FP8 where gradients are E4M3 too.

Of the time that a training takes here, seconds are timed. So ways share the kernels that one of them has compiled, and leave out
parity, which the doctor and tests/gpu hold. Steps have 65,536 tokens: 131,072 halve the update's share. The first two, which
search and compile, are not timed; of the others the median is meant, and the table says how far apart they are. `hf_eager`, if
named, is plain transformers, by which the others are judged.
`--report` prints the table; `--tiny` goes through everything with a small model on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.machine import command, environment_from_elsewhere, processor
from benchmarks.throughput_run import Bench, Settings
from benchmarks.ways.entries import BASELINE, CPU, GPU, MODELS, Entry
from foundation.command import run_command
from foundation.errors import InputError
from foundation.files import write_json
from foundation.units import TERA, markdown, percent
from pretrain.metrics.flops import ModelFlops, nanogpt
from pretrain.metrics.peaks import peak
from pretrain.model.huggingface import build_on_meta, load_config
from pretrain.precision.settings import is_quantized
from pretrain.settings.config import load_recipe, resolved

WAYS = (BASELINE, "bf16_exact", "delayed_exact", "delayed_exact_head")
LABELS = ("transformers, eager", "BF16", "FP8 delayed", "and the head")


@dataclass(frozen=True)
class Shape:
    """The recipe whose model and pack length are meant; the model's configuration where it names published weights."""

    recipe: str
    config: Mapping[str, Any] | None = None
    microbatch: int = 32_768  # tokens
    more: tuple[str, ...] = ()  # settings
    low: tuple[str, ...] = ()  # and those of its low precisions
    whole_documents: bool = False
    warm_up: int = 2  # steps before those that are timed
    steps: int = 3  # timed ones

    def entries(self, model: str, ways: Sequence[str]) -> list[Entry]:
        """Those ways of `model`, with this shape's settings."""
        low = (
            replace(each, overrides=(*each.overrides, *self.low))
            if is_quantized(each.precision)
            else each
            for each in MODELS[model].entries
        )
        return [entry for entry in low if entry.name in ways]

    def settings(self, tokens: int) -> list[str]:
        """What is changed in the recipe of `benchmarks.throughput` to measure it in steps of so many `tokens`."""
        recipe = load_recipe(Path(self.recipe))
        length, config = recipe.data.length, self.config or recipe.model.config
        batch = [f"batch.tokens={tokens}", f"batch.microbatch={max(1, self.microbatch // length)}"]
        return [f"model.config={json.dumps(config)}", f"data.length={length}", *batch, *self.more]


def llama_3_2(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    """Llama-3.2's configuration: 8 heads of keys and values, tied tables."""
    shape = {
        "hidden_size": hidden,
        "intermediate_size": 8192,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    other = {
        "num_key_value_heads": 8,
        "head_dim": hidden // heads,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
    }
    return {
        "model_type": "llama",
        "vocab_size": 128256,
        **shape,
        **other,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }


E4M3 = "fp8_config.fp8_format=E4M3"
# Qwen3-30B-A3B's layers: 128 experts, of which a token takes 8.
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
    "GPT-2 124M": Shape("recipes/gpt2_fineweb_edu.yaml", warm_up=4, steps=12),
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
    ),
    "OLMoE-1B-7B (6 of 16 layers)": Shape("benchmarks/olmoe_6_layers.yaml", low=(E4M3,)),
    "Qwen3-30B-A3B (4 of 48 layers)": Shape(
        "benchmarks/olmoe_6_layers.yaml", QWEN3_MOE, low=(E4M3,)
    ),
}


def main() -> None:
    arguments = parse_arguments()
    if arguments.report:
        print(table(json.loads(arguments.report.read_text())))
    else:
        measure(arguments)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--shapes",
        type=lambda text: text.split(","),
        default=list(SHAPES),
        metavar="A,B",
        help="only these (default: all)",
    )
    add(
        "--ways",
        type=lambda text: text.split(","),
        default=WAYS[1:],
        metavar="A,B",
        help=f"of {', '.join(WAYS)}; default: ours",
    )
    add("--tokens", type=int, default=65_536, help="of a step; default: 65536")
    add("--timeout", type=float, default=150, help="seconds for one way")
    add("--tiny", action="store_true", help="one small model on the CPU: a dry run")
    add("--out", type=Path, help="the result file; what it has, and is not named now, stays")
    add("--report", type=Path, metavar="FILE", help="a result file to print the table of")
    arguments = parser.parse_args()
    if not (arguments.report or arguments.out):
        parser.error("--out FILE is needed, to hold the result")
    return arguments


def measure(arguments: argparse.Namespace) -> None:
    """Measure every shape that is asked for; `--out` is whole after each."""
    shapes = (
        {"tiny": Shape("benchmarks/tiny.yaml")}
        if arguments.tiny
        else {name: SHAPES[name] for name in arguments.shapes}
    )
    if arguments.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    arguments.environment = environment_from_elsewhere() | {"processor": processor()}
    if not (arguments.tiny or arguments.environment["gpus"]):
        raise InputError("no CUDA device is here; take --tiny for a dry run on the CPU")
    result = (
        json.loads(arguments.out.read_text())
        if arguments.out.exists()
        else {"command": command(), "shapes": {}}
    )
    for name, shape in shapes.items():
        print(f"── {name}", flush=True)
        result["shapes"][name] = measured = measure_shape(
            shape, result["shapes"].get(name, {}), arguments
        )
        measured["environment"] = arguments.environment
        write_json(arguments.out, result)
    print(table(result))


def measure_shape(
    shape: Shape, before: Mapping[str, Any], arguments: argparse.Namespace
) -> dict[str, Any]:
    """One shape's ways as `benchmarks.throughput` measures and judges them, with those of `before`; how well they use the GPU."""
    model, configuration = ("tiny", CPU) if arguments.tiny else ("qwen3_1_7b", GPU)
    changed = ["parity=false", *([] if arguments.tiny else shape.settings(arguments.tokens))]
    recipe = load_recipe(MODELS[model].recipe, changed)
    flops = ModelFlops.of(build_on_meta(load_config(recipe.model)))
    with tempfile.TemporaryDirectory(prefix="shapes-") as folder:
        (path := Path(folder, "recipe.yaml")).write_text(
            yaml.safe_dump(resolved(recipe), sort_keys=False)
        )
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
        ways = ("hf_eager", "fp32") if arguments.tiny else arguments.ways
        if before.get("settings", {}).get("recipe_text") == bench.result["settings"]["recipe_text"]:
            bench.result["ways"] = {
                name: way for name, way in before["ways"].items() if name not in ways
            }
        bench.run(shape.entries(model, ways))
        result = json.loads(json.dumps(bench.result).replace(f"{folder}/", ""))
    most = peak(next(iter(arguments.environment["gpus"]), None), "bf16")
    squares = result["packs"]["sum_squared_lengths_per_token"]
    for way in result["ways"].values():
        # those of before have theirs
        way.setdefault("commit", arguments.environment["git"]["commit"])
        if way["status"] == "ok" and most:
            speed = way["tokens_per_second"]["median"] / TERA / most
            way["mfu"] = flops.step(1, squares) * speed
            way["mfu_nanogpt"] = nanogpt(flops, recipe.data.length) * speed
    active = flops.parameters - flops.idle_weights
    result |= {
        "parameters": flops.parameters,
        "active_parameters": active,
        "length": recipe.data.length,
    }
    return {"recipe": shape.recipe, "changed": changed, **result}


def table(result: Mapping[str, Any]) -> str:
    """Tokens/s of each shape and way; what FP8 gains; utilisation of the BF16 peak by two counts of FLOPs; memory; how far apart
    the steps of a way are, at most, of its median."""
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
    ways = {key: way for key, way in shape["ways"].items() if way["status"] == "ok"}
    speeds = [ways[way]["tokens_per_second"]["median"] if way in ways else None for way in WAYS]
    _, bf16, delayed, head = speeds
    gains = [f"{fp8 / bf16:.2f} x" if fp8 and bf16 else "–" for fp8 in (delayed, head)]
    plain, low = ways.get("bf16_exact", {}), ways.get("delayed_exact", {})
    use = f"{percent(plain['mfu'])}; {percent(plain['mfu_nanogpt'])}" if "mfu" in plain else "–"
    memory = "; ".join(f"{way['memory_gib']:.1f}" if way else "–" for way in (plain, low))
    length, parameters, active = (
        shape["length"],
        shape["parameters"],
        shape.get("active_parameters", shape["parameters"]),
    )
    trained = f"{parameters / 1e6:,.0f} M" + (
        f", {active / 1e6:,.0f} M a token" if active < parameters else ""
    )
    spreads = [
        each["max"] / each["median"] - each["min"] / each["median"]
        for each in (w["tokens_per_second"] for w in ways.values())
    ]
    figures = [*(f"{speed:,.0f}" if speed else "–" for speed in speeds), *gains, use, memory]
    return [name, f"{length:,}", trained, *figures, percent(max(spreads)) if spreads else "–"]


if __name__ == "__main__":
    sys.exit(run_command(main))
