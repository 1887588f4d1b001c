"""Every definition against figures worked out by hand for three models; docs/planning.md shows the arithmetic."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from foundation.errors import InputError
from pretrain.metrics.flop_formulas import FORMULAS
from pretrain.metrics.flops import ModelFlops
from pretrain.plan.flops_table import main, table
from pretrain.run.doctor import QWEN3_1_7B
from tests.pretrain.metrics.meta_models import on_meta

MODELS = {
    "GPT-2 124M": {"model_type": "gpt2"},
    "Qwen3-1.7B": QWEN3_1_7B,
    "Llama-3.1-8B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}

# By hand. GPT-2: 12 layers, h 768, MLP 3072, 50,257 tokens, 1,024 positions; 124,439,808 parameters, 38,597,376 of them token and
# 786,432 position embeddings. Matrices of a layer 4 h^2 + 8 h^2 = 7,077,888.
# Qwen3: a layer 2048 (2048 + 1024 + 1024) + 2048^2 + 3 * 2048 * 6144 = 50,331,648; 1,720,574,976, of them 311,164,928 embedded.
# Llama: a layer 4096 (4096 + 1024 + 1024) + 4096^2 + 3 * 4096 * 14336 = 218,103,808; 8,030,261,248, of them 525,336,576 embedded.
BY_HAND = {
    ("GPT-2 124M", 1024): {
        "ours": 6 * (12 * 7_077_888 + 38_597_376) + 6 * 12 * 768 * 1024,
        "palm": 6 * 85_056_000 + 113_246_208,
        "nanogpt": 6 * 123_653_376 + 113_246_208,
        # 8 h^2 + 4 T h = 7,864,320; MLP 4 h 3072 = 9,437,184; two LayerNorms 4 h = 3,072, the last one 2 h = 1,536
        "combined_formula": 3 * (12 * (7_864_320 + 9_437_184 + 3_072) + 1_536 + 77_194_752),
        "component_summation_v2025": 3 * (12 * (7_864_320 + 9_437_184 + 3_072) + 1_536 + 77_194_752),
        "megatron": 6 * (12 * 7_077_888 + 38_597_376) + 113_246_208,
    },
    ("Qwen3-1.7B", 4096): {
        "ours": 10_322_706_432 + 6 * 28 * 2048 * 4096,
        "palm": 6 * 1_409_410_048 + 2_818_572_288,
        "nanogpt": 6 * 1_720_574_976 + 2_818_572_288,
        # 6 h^2 + 4 T h = 58,720,256; MLP 6 h 6144 = 75,497,472; rotation 4 h = 8,192; norms 3 h = 6,144 and 1.5 h = 3,072
        "combined_formula": 3 * (28 * (58_720_256 + 75_497_472 + 8_192 + 6_144) + 3_072 + 622_329_856),
        "component_summation_v2025": 3 * (28 * (58_720_256 + 75_497_472 + 6_144) + 3_072 + 622_329_856),
        "megatron": 10_322_706_432 + 2_818_572_288,
    },
    ("Llama-3.1-8B", 8192): {
        "ours": 6 * (32 * 218_103_808 + 525_336_576) + 6 * 32 * 4096 * 8192,
        "palm": 6 * (8_030_261_248 - 525_336_576) + 12_884_901_888,
        "nanogpt": 6 * 8_030_261_248 + 12_884_901_888,
        # (4 + 4/4) h^2 + 4 T h = 218,103,808; MLP 6 h 14336 = 352,321,536; rotation 16,384; norms 12,288 and 6,144
        "combined_formula": 3 * (32 * (218_103_808 + 352_321_536 + 16_384 + 12_288) + 6_144 + 1_050_673_152),
        "component_summation_v2025": 3 * (32 * (218_103_808 + 352_321_536 + 12_288) + 6_144 + 1_050_673_152),
        "megatron": 6 * (32 * 218_103_808 + 525_336_576) + 12_884_901_888,
    },
}


@pytest.fixture(scope="module")
def counts() -> dict[str, ModelFlops]:
    return {name: ModelFlops.of(on_meta(**values)) for name, values in MODELS.items()}


@pytest.mark.parametrize(("name", "length"), BY_HAND)
def test_each_definition_gives_what_was_worked_out_by_hand(name: str, length: int, counts: dict[str, ModelFlops]) -> None:
    found = {formula.key: formula.per_token(counts[name], length) for formula in FORMULAS}
    assert found == {key: pytest.approx(value, rel=1e-12) for key, value in BY_HAND[name, length].items()}


def test_the_page_shows_the_figures_of_the_code(counts: dict[str, ModelFlops]) -> None:
    page = (Path(__file__).parents[3] / "docs/planning.md").read_text(encoding="utf-8")
    for formula in FORMULAS:
        (row,) = re.findall(rf"^\| `{formula.key}` \|(.*)\|$", page, re.MULTILINE)
        shown = [float(cell) for cell in re.findall(r"[\d.]+(?= )", row)]
        assert shown == [round(formula.per_token(counts[name], length) / 1e9, 3) for name, length in BY_HAND], formula.key


def test_the_command_prints_every_definition_for_each_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    AutoConfig.for_model(**MODELS["Qwen3-1.7B"]).save_pretrained(folder)
    assert main([str(folder), "--length", "1024", "4096", "--tokens", "1e9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (ours, _, in_all) = [line.replace("|", "").split()[1:] for line in lines if line.startswith("| ours ")]
    assert ours == ["10.68", "GFLOP", "11.73", "GFLOP"]
    assert in_all == ["10.68", "EFLOP", "11.73", "EFLOP"]
    assert all(sum(line.startswith(f"| {formula.key} ") for line in lines) == 3 for formula in FORMULAS)


def test_the_command_shows_utilisations_of_a_device_that_it_knows(counts: dict[str, ModelFlops]) -> None:
    text = table(counts["Qwen3-1.7B"], [4096], tokens_per_second=50_000, device="NVIDIA H200")
    assert re.search(r"^\| ours +\| +586\.6 TFLOP/s, 59\.3 %", text, re.MULTILINE)
    with pytest.raises(InputError, match="no BF16 peak of it is known"):
        table(counts["Qwen3-1.7B"], [4096], device="Tesla V100-SXM2-16GB")


@pytest.mark.parametrize(
    ("model_type", "said"),
    [("mamba", "has no attribute 'num_attention_heads'"), ("gemma3n_text", "`feed_forward`"), ("gemma4_text", "per-layer")],
)
def test_a_model_without_equal_layers_of_attention_is_refused_in_a_line(model_type: str, said: str, tmp_path: Path) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=f"is not of equal layers with attention: .*{said}"):
        main([str(tmp_path)])
