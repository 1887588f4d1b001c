"""The models of the documents that this project began with: their speed on one GPU, in BF16, in FP8, and with the head in FP8.

    python -m benchmarks.shapes --out benchmarks/results/speed/h200_shapes.json
    python -m benchmarks.shapes --report benchmarks/results/speed/h200_shapes.json

Each is built from its shape with random weights and trains on the packs of `benchmarks.throughput_packs`: what the weights are
does not decide how fast a product is. A step has 131,072 tokens in microbatches of 32,768, and all else but the model is as in
`benchmarks.throughput`: shapes can be held beside each other. `hf_eager` is plain transformers, and what all others are judged
against.
`--report` prints the table; `--tiny` goes through everything with a small model on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.machine import command
from benchmarks.throughput_run import Bench, Settings
from benchmarks.ways.entries import BASELINE, CPU, GPU, MODELS
from foundation.command import run_command
from foundation.files import replace_file
from foundation.units import TERA, markdown, percent
from pretrain.metrics.flops import ModelFlops, nanogpt
from pretrain.metrics.peaks import peak
from pretrain.model.huggingface import build_on_meta, load_config
from pretrain.settings.config import load_recipe, resolved

MICROBATCH = 32_768  # tokens
WAYS = (BASELINE, "bf16_exact", "delayed_exact", "delayed_exact_head")
LABELS = ("transformers, eager", "BF16", "FP8 delayed", "and the head")


@dataclass(frozen=True)
class Shape:
    """The recipe whose model and pack length are meant; the model's configuration where it names published weights."""

    recipe: str
    config: Mapping[str, Any] | None = None

    def settings(self) -> list[str]:
        """What is changed in the recipe of `benchmarks.throughput` to measure it."""
        recipe = load_recipe(Path(self.recipe))
        length, config = recipe.data.length, self.config or recipe.model.config
        microbatch = max(1, MICROBATCH // length)
        return [f"model.config={json.dumps(config)}", f"data.length={length}", f"batch.microbatch={microbatch}"]


def llama_3_2(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    """Llama-3.2's configuration: 8 heads of keys and values, tied tables."""
    shape = {"hidden_size": hidden, "intermediate_size": 8192, "num_hidden_layers": layers, "num_attention_heads": heads}
    other = {"num_key_value_heads": 8, "head_dim": hidden // heads, "max_position_embeddings": 131072, "rope_theta": 500000.0}
    return {"model_type": "llama", "vocab_size": 128256, **shape, **other, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}


SHAPES = {
    "GPT-2 124M": Shape("recipes/gpt2_fineweb_edu.yaml"),
    "Llama-3.2-1B": Shape("recipes/llama3_2_1b_openmath.yaml", llama_3_2(2048, 16, 32)),
    "Llama-3.2-3B": Shape("recipes/llama3_2_3b_openmath.yaml", llama_3_2(3072, 28, 24)),
    "GPT-2 1.27B": Shape("recipes/gpt2_slimpajama.yaml"),
    "LLaMA-2 1.29B": Shape("recipes/llama2_slimpajama.yaml"),
    "LLaMA-3 1.54B": Shape("recipes/llama3_1_5b_slimpajama.yaml"),
    "Qwen3 1.83B": Shape("recipes/qwen3_slimpajama.yaml"),
    "LLaMA-3 2.22B": Shape("recipes/llama3_2_2b_slimpajama.yaml"),
}


def main() -> None:
    arguments = parse_arguments()
    if arguments.report:
        print(table(json.loads(arguments.report.read_text())))
    else:
        measure(arguments)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shapes", type=lambda text: text.split(","), default=list(SHAPES), metavar="A,B", help="only these (default: all)")
    add("--ways", type=lambda text: text.split(","), default=WAYS, metavar="A,B", help=f"only these of {', '.join(WAYS)}")
    add("--warm-up", type=int, default=3, help="steps before those that are timed")
    add("--steps", type=int, default=5, help="timed steps")
    add("--timeout", type=float, default=200, help="seconds for one way")
    add("--tiny", action="store_true", help="one small model on the CPU: a dry run")
    add("--out", type=Path, help="the result file; shapes that it has, and that are not named now, stay")
    add("--report", type=Path, metavar="FILE", help="a result file to print the table of")
    arguments = parser.parse_args()
    if not (arguments.report or arguments.out):
        parser.error("--out FILE is needed, to hold the result")
    return arguments


def measure(arguments: argparse.Namespace) -> None:
    """Measure every shape that is asked for, each way in a process of its own; `--out` is whole after each shape."""
    if arguments.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    shapes = {"tiny": Shape("benchmarks/tiny.yaml")} if arguments.tiny else {name: SHAPES[name] for name in arguments.shapes}
    result = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"command": command(), "shapes": {}}
    for name, shape in shapes.items():
        print(f"── {name}", flush=True)
        result["shapes"][name] = measured = measure_shape(shape, arguments)
        result["environment"] = measured.pop("environment")
        replace_file(arguments.out, json.dumps(result, indent=1).encode() + b"\n")
    print(table(result))


def measure_shape(shape: Shape, arguments: argparse.Namespace) -> dict[str, Any]:
    """One shape's ways as `benchmarks.throughput` measures and judges them, and its utilisation of the device."""
    model, configuration = ("tiny", CPU) if arguments.tiny else ("qwen3_1_7b", GPU)
    with tempfile.TemporaryDirectory(prefix="shapes-") as folder:
        changed = [] if arguments.tiny else shape.settings()
        recipe = load_recipe(MODELS[model].recipe, changed)
        (path := Path(folder, "recipe.yaml")).write_text(yaml.safe_dump(resolved(recipe), sort_keys=False))
        settings = Settings(model, path, configuration, arguments.warm_up, arguments.steps, arguments.timeout)
        bench = Bench(settings, Path(folder, "result.json"), command(), go_on=False)
        ways = ("hf_eager", "fp32") if arguments.tiny else arguments.ways
        bench.run([entry for entry in MODELS[model].entries if entry.name in ways])
        result = bench.result
    flops = ModelFlops.of(build_on_meta(load_config(recipe.model)))
    gpus = result["environment"]["gpus"]
    most = peak(gpus[0], "bf16") if gpus else None
    squares = result["packs"]["sum_squared_lengths_per_token"]
    for way in result["ways"].values():
        if way["status"] == "ok" and most:
            speed = way["tokens_per_second"]["median"] / TERA / most
            way["mfu"] = flops.step(1, squares) * speed
            way["mfu_nanogpt"] = nanogpt(flops, recipe.data.length) * speed
    result |= {"parameters": flops.parameters, "length": recipe.data.length}
    return {"recipe": shape.recipe, "changed": changed, **result}


def table(result: Mapping[str, Any]) -> str:
    """Tokens/s of each shape and way; what FP8 gains; utilisation of the BF16 peak by two counts of FLOPs; memory."""
    header = ["model", "length", "weights trained", *(f"{label}, tokens/s" for label in LABELS), "FP8 gains", "with the head"]
    rows = [row(name, shape) for name, shape in result["shapes"].items()]
    return markdown([*header, "MFU in BF16, ours; nanoGPT's", "GiB in BF16; FP8"], rows, names=1)


def row(name: str, shape: Mapping[str, Any]) -> Sequence[str]:
    ways = {key: way for key, way in shape["ways"].items() if way["status"] == "ok"}
    speeds = [ways[way]["tokens_per_second"]["median"] if way in ways else None for way in WAYS]
    _, bf16, delayed, head = speeds
    gains = [f"{fp8 / bf16:.2f} x" if fp8 and bf16 else "–" for fp8 in (delayed, head)]
    plain, low = ways.get("bf16_exact", {}), ways.get("delayed_exact", {})
    use = f"{percent(plain['mfu'])}; {percent(plain['mfu_nanogpt'])}" if "mfu" in plain else "–"
    memory = "; ".join(f"{way['memory_gib']:.1f}" if way else "–" for way in (plain, low))
    length, parameters = shape["length"], f"{shape['parameters'] / 1e6:,.0f} M"
    return [name, f"{length:,}", parameters, *(f"{speed:,.0f}" if speed else "–" for speed in speeds), *gains, use, memory]


if __name__ == "__main__":
    sys.exit(run_command(main))
