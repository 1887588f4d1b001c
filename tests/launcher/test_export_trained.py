"""Test `python -m pretrain export --precision trained` with independent readers of its layouts.

A reader in NumPy decodes the files. It shares no code with the export. transformers also reads
block FP8. compressed-tensors reads the other layouts, if it is installed with the references.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from pretrain.precision.emulation import EmulatedGemm
from tests.conftest import BLOCK_LENGTH, Finished, command_here, in_low_precision, run_command
from tests.forked_commands import forking

# The first tests of the suite run in one worker, so that they share the trained models.
pytestmark = pytest.mark.long
PRECISIONS = ("delayed", "current", "block", "mxfp8", "mxfp4", "nvfp4")


# ── A reader in NumPy ──


def e4m3(codes: np.ndarray) -> np.ndarray:
    """Decode bytes in E4M3, from the definition in the OCP specification."""
    exponent = (codes >> 3 & 15).astype(np.int32)
    mantissa = (codes & 7).astype(np.float32)
    magnitude = np.where(
        exponent == 0,
        np.ldexp(mantissa, -9),
        np.ldexp(1 + mantissa / 8, exponent - 7),
    )
    return np.where(codes >> 7, -magnitude, magnitude).astype(np.float32)


def e2m1(packed: np.ndarray) -> np.ndarray:
    """Decode bytes [out, in / 2] with two E2M1 codes each, the lower four bits first."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    exponent = (codes >> 1 & 3).astype(np.int32)
    mantissa = (codes & 1).astype(np.float32)
    magnitude = np.where(exponent == 0, mantissa / 2, np.ldexp(1 + mantissa / 2, exponent - 1))
    return np.where(codes >> 3, -magnitude, magnitude).astype(np.float32)


def tensors_in(folder: Path) -> dict[str, np.ndarray]:
    """Return the bytes or numbers of each tensor in a safetensors file."""
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            first, last = (8 + length + offset for offset in entry["data_offsets"])
            kind = {"F32": np.float32, "BF16": np.uint16}.get(entry["dtype"], np.uint8)
            tensors[name] = np.frombuffer(data[first:last], kind).reshape(entry["shape"])
    return tensors


def decode(folder: Path, linear: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Decode the weight of a linear by the layout that config.json declares.

    Returns the codes times the scales of their blocks, and the scale of the tensor.
    """
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    part = {
        name.removeprefix(f"{linear}."): values
        for name, values in tensors_in(folder).items()
        if name.startswith(f"{linear}.")
    }
    if config["quant_method"] == "fp8":
        rows, columns = config["weight_block_size"]
        scale = part["weight_scale_inv"].repeat(rows, 0).repeat(columns, 1)
        return e4m3(part["weight"]) * scale, None
    (group,) = config["config_groups"].values()
    size = group["weights"].get("group_size")
    if config["format"] == "float-quantized":
        return e4m3(part["weight"]), part["weight_scale"]
    if config["format"] == "nvfp4-pack-quantized":
        scale = e4m3(part["weight_scale"]).repeat(size, 1)
        return e2m1(part["weight_packed"]) * scale, part["weight_global_scale"]
    codes = e2m1(part["weight_packed"]) if "weight_packed" in part else e4m3(part["weight"])
    exponents = part["weight_scale"].astype(np.int32) - 127
    return codes * np.ldexp(np.float32(1), exponents).repeat(size, 1), None


# ── Runs and their exports ──


@dataclass
class Exported:
    """A short run and its export in the trained precision."""

    run_dir: Path
    folder: Path
    # Map (linear, role) to the operand of the forward product with the weights of the checkpoint.
    operands: dict[tuple[str, str], Any]

    @property
    def linears(self) -> list[str]:
        return [name for name, role in self.operands if role == "weight"]

    def dequantized(self) -> dict[str, Tensor]:
        """Return the quantized weights as the products of the run multiply them, in FP32."""
        weights = {}
        for linear in self.linears:
            operand = self.operands[linear, "weight"]
            scale = 1 if operand.scale is None else operand.scale
            weights[f"{linear}.weight"] = operand.values * scale
        return weights


def recipe_of(recipe_for: Callable, packs: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    recipe = in_low_precision(recipe_for(run_dir), packs)
    recipe["model"]["config"]["num_hidden_layers"] = 2
    short = {"batch": {"tokens": 2 * BLOCK_LENGTH, "microbatch": 2}, "train": {"steps": 2}}
    return recipe | short | {"evaluate": {}, "log": {}} | changes


def export_as_trained(source: Path, out: Path, *options: str) -> Finished:
    return command_here("export", source, "--out", out, "--precision", "trained", *options)


@pytest.fixture(scope="module")
def exported(
    start_here: Callable, recipe_for: Callable, block_packs: Path, tmp_path_factory: Any
) -> Callable[..., Exported]:
    """Function that trains two steps in a precision and exports them, once for each argument."""

    @cache
    def export(precision: str, weights: str, scope: str) -> Exported:
        folder = tmp_path_factory.mktemp(precision)
        changes = {"precision": precision, "weights": weights, "evaluate": {"packs": 1}}
        recipe = recipe_of(recipe_for, block_packs, folder / "run", **changes)
        # The last evaluation quantizes the final weights as training does.
        recipe["fp8_config"] |= {"use_autocast_during_eval": True, "scope": scope}
        recipe["model"]["config"]["tie_word_embeddings"] = scope == "linear"
        operands: dict[tuple[str, str], Any] = {}
        quantize = EmulatedGemm.quantize

        def recorded(gemm: EmulatedGemm, role: Any, x: Tensor, **options: Any) -> Any:
            operand = quantize(gemm, role, x, **options)
            operands[gemm.name, role] = operand.features
            return operand

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EmulatedGemm, "quantize", recorded)
            run = start_here(recipe, folder).done()
        out = folder / "out"
        export_as_trained(run.run_dir, out).done()
        return Exported(run.run_dir, out, operands)

    return lambda precision, weights="bf16_exact", scope="linear": export(precision, weights, scope)


# ── Codes and scales ──


# A layout of each kind of scale has FP32 weights too: of a tensor, of blocks, and of both.
@pytest.mark.parametrize(
    ("precision", "weights", "scope"),
    [
        *((precision, "bf16_exact", "linear") for precision in PRECISIONS),
        *((precision, "bf16_exact", "linear+head") for precision in ("delayed", "block")),
        ("mxfp8", "fp32", "linear"),
        pytest.param("delayed", "fp32", "linear", marks=pytest.mark.nightly),
        pytest.param("nvfp4", "fp32", "linear", marks=pytest.mark.nightly),
    ],
)
def test_an_export_has_the_codes_and_scales_of_the_training_forward(
    exported: Callable[..., Exported], precision: str, weights: str, scope: str
) -> None:
    run = exported(precision, weights, scope)
    assert len(run.linears) == (7 if precision == "nvfp4" else 14) + (scope != "linear")
    served = load_file(run.folder / "model.safetensors")
    for linear in run.linears:
        values, scale = decode(run.folder, linear)
        operand = run.operands[linear, "weight"]
        assert values.tobytes() == operand.values.numpy().tobytes()
        assert (scale is None) == (operand.scale is None)
        if scale is not None:
            ours = operand.scale.numpy()
            assert scale == (np.float32(1) / ours if precision == "nvfp4" else ours).reshape(1)
        if precision == "delayed":
            of_input = run.operands[linear, "input"].scale
            assert torch.equal(served[f"{linear}.input_scale"], of_input.reshape(1))
    final = load_file(run.run_dir / "final" / "model.safetensors")
    others = final.keys() - {f"{linear}.weight" for linear in run.linears}
    assert {name.rpartition(".")[0] for name in served.keys() - others} == {*run.linears}
    assert all(torch.equal(served[name], final[name].bfloat16()) for name in others)


def test_the_card_names_the_precision_of_the_weights_and_what_servers_do(
    exported: Callable[..., Exported],
) -> None:
    card = (exported("delayed").folder / "README.md").read_text()
    assert "| quantized weights | 327,680 in delayed; all others are in BF16 |" in card
    assert "| layout | compressed-tensors (float-quantized), quantized as in the training" in card
    assert "| activations | quantized with the scales in the checkpoint" in card
    assert (
        "| activations | in BF16, because" in (exported("nvfp4").folder / "README.md").read_text()
    )


# ── Published readers ──


def check_parameters(run: Exported, read: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check that a reader finds `expected`, and in all other parameters those of `final/`."""
    final = load_file(run.run_dir / "final" / "model.safetensors")
    assert expected.keys() < read.keys() == final.keys() - {"lm_head.weight"}
    for name, weight in read.items():
        assert torch.equal(weight.float(), expected.get(name, final[name]).float()), name


def test_transformers_dequantizes_block_fp8_to_our_weights(exported: Callable) -> None:
    run = exported("block")
    model = AutoModelForCausalLM.from_pretrained(
        run.folder, dtype="auto", quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    check_parameters(run, dict(model.named_parameters()), run.dequantized())


@pytest.mark.parametrize("precision", ["block", "mxfp8"])
def test_a_round_trip_without_updates_changes_no_value(
    precision: str, exported: Callable, start_here: Callable, recipe_for: Callable, tmp_path: Path
) -> None:
    """Train from an export with a learning rate that changes no BF16 weight, and export again."""
    source = exported(precision)
    packs = Path(yaml.safe_load((source.run_dir / "config.yaml").read_text())["data"]["packs"])
    changes = {"model": {"source": str(source.folder)}, "optimizer": {"learning_rate": 1e-30}}
    changes |= {"precision": precision, "weights": "bf16", "schedule": {"warmup": 0}}
    run = start_here(recipe_of(recipe_for, packs, tmp_path / "run", **changes), tmp_path).done()
    final = json.loads((run.run_dir / "final" / "config.json").read_text())
    assert "quantization_config" not in final
    out = tmp_path / "out"
    export_as_trained(run.run_dir, out).done()
    before, after = (load_file(folder / "model.safetensors") for folder in (source.folder, out))
    assert before.keys() == after.keys()
    quantized = {linear: decode(source.folder, linear)[0] for linear in source.linears}
    for name, value in before.items():
        linear = name.rpartition(".")[0]
        # A block with the largest code 224 may get codes up to 448, and half of the scale.
        if linear in quantized:
            assert np.array_equal(decode(out, linear)[0], quantized[linear]), name
        else:
            assert torch.equal(after[name], value), name


READ = """
import json, sys, torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
for folder, out in json.loads(sys.argv[1]).items():
    options = {"dtype": "float32", "quantization_config": CompressedTensorsConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    torch.save(dict(model.named_parameters()), out)
"""


def test_compressed_tensors_decompresses_our_weights(
    exported: Callable, references: Path, tmp_path: Path
) -> None:
    """The package runs in another process, because transformers would load it into every run."""
    packages = [*references.glob("compressed_tensors*"), *references.glob("loguru*")]
    if not packages:
        pytest.skip(f"needs compressed-tensors in {references}; `make test` installs it")
    for package in packages:
        (tmp_path / package.name).symlink_to(package.absolute())
    names = [precision for precision in PRECISIONS if precision != "block"]
    outputs = {str(exported(name).folder): str(tmp_path / f"{name}.pt") for name in names}
    (script := tmp_path / "read.py").write_text(READ)
    command = [sys.executable, str(script), json.dumps(outputs)]
    run_command(command, env=forking() | {"FORKED_SCRIPTS": script.name}, cwd=None)
    for name in names:
        run = exported(name)
        expected = run.dequantized()
        if name == "nvfp4":
            for linear in run.linears:
                values, scale = decode(run.folder, linear)
                # The package rounds dequantized weights to BF16.
                expected[f"{linear}.weight"] = torch.from_numpy(values / scale).bfloat16()
        check_parameters(run, torch.load(tmp_path / f"{name}.pt", weights_only=True), expected)


def test_sample_reads_block_fp8_and_names_the_package_of_other_layouts(
    exported: Callable[..., Exported], words: Path, tmp_path: Path
) -> None:
    for name in ("block", "nvfp4"):
        shutil.copytree(exported(name).folder, tmp_path / name)
        shutil.copytree(words, tmp_path / name, dirs_exist_ok=True)
    command_here("sample", tmp_path / "block", "w1 w2", "--tokens", 4).done()
    assert "compressed-tensors" in command_here("sample", tmp_path / "nvfp4", "w1 w2").err


# ── Refusals ──


def test_a_phase_in_bf16_is_refused_and_the_phase_before_is_exported(
    start_here: Callable, recipe_for: Callable, block_packs: Path, tmp_path: Path
) -> None:
    phases = [{"until": 2, "use": "current"}, {"use": "bf16"}]
    changes = {"precision": phases, "train": {"steps": 3}, "checkpoint": {"every": 1}}
    recipe = recipe_of(recipe_for, block_packs, tmp_path / "run", **changes)
    run = start_here(recipe, tmp_path).done()
    out = tmp_path / "out"
    refusal = export_as_trained(run.run_dir, out).refusal
    assert refusal.startswith("--precision") and "are not quantized (bf16); omit" in refusal
    assert not out.exists()
    low = run.run_dir / "checkpoints" / "step-00000002"
    assert export_as_trained(low, out, "--dtype", "fp32").refusal.startswith("--dtype")
    export_as_trained(low, out).done()
    assert decode(out, "model.layers.1.mlp.up_proj")[1] is not None


def test_a_model_that_no_layout_holds_is_refused(
    start_here: Callable, recipe_for: Callable, block_packs: Path, tmp_path: Path
) -> None:
    fp8_config = {"on_unsupported": "emulate", "scope": "linear+head"}
    changes = {"precision": "current", "fp8_config": fp8_config}
    recipe = recipe_of(recipe_for, block_packs, tmp_path / "run", **changes)
    run = start_here(recipe, tmp_path).done()
    refusal = export_as_trained(run.run_dir, tmp_path / "out").refusal
    assert "shares its weight with the embedding" in refusal
