"""Held-out loss and samples agree with plain transformers."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from foundation.errors import InputError
from packing.arrow import Packs
from packing.order import MixedPacks
from packing.settings import DataSettings
from packing.store import open_packs
from pretrain.metrics.run_record import best_evaluation
from pretrain.model.loss.head import LossHead
from pretrain.run.evaluate import held_out_metrics, held_out_sums
from pretrain.run.sampling import sample
from pretrain.settings.recipe import LossSettings
from tests.pretrain.small_models import build_model, plain_copy, plain_loss
from tests.pretrain.verify.small_runs import build_run


@pytest.fixture(scope="session")
def held_out(small_packs: Path) -> Packs:
    return open_packs(DataSettings(packs=small_packs, length=32), "held_out")


@pytest.fixture
def tokenizer(words: Path) -> PreTrainedTokenizerBase:
    """Return a tokenizer with a word for every id of the tiny models, without a padding token."""
    return AutoTokenizer.from_pretrained(words)


def evaluate(
    packed: torch.nn.Module, packs: Packs, accelerator: Accelerator, microbatch: int = 3
) -> dict[str, float]:
    batching = {"microbatch": microbatch, "rank": 0, "world_size": 1, "mask_boundaries": True}
    job = SimpleNamespace(
        data=SimpleNamespace(held_out=packs),
        recipe=SimpleNamespace(evaluate=SimpleNamespace(packs=None)),
        batching=lambda accelerator: batching,
    )
    return held_out_metrics(job, packed, accelerator)


# 10 packs do not fill microbatches of 3 and 16, which are padded.
@pytest.mark.parametrize(
    ("kind", "microbatch"), [("qwen3", 1), ("qwen3", 3), ("gpt2", 10), ("gpt2", 16)]
)
def test_held_out_loss_is_the_plain_mean_for_any_microbatch(
    kind: str,
    microbatch: int,
    held_out: Packs,
    accelerator: Accelerator,
) -> None:
    packed = build_model(kind)
    result = evaluate(packed, held_out, accelerator, microbatch)
    packs = [held_out[index] for index in range(len(held_out))]
    with torch.no_grad():
        expected = plain_loss(plain_copy(packed), packs)
    assert result["held_out_loss"] == pytest.approx(expected.item(), rel=1e-6)
    labels = sum(len(pack.input_ids) - len(pack.lengths) for pack in packs)
    assert result["held_out_tokens"] == labels
    assert result["held_out_perplexity"] == pytest.approx(expected.exp().item(), rel=1e-5)


@pytest.mark.parametrize("penalty", [None, "non_max_sum"])
def test_the_figures_of_several_sources_are_means_over_tokens(
    penalty: str | None,
    small_packs: Path,
    held_out: Packs,
    accelerator: Accelerator,
) -> None:
    parts = {"a": held_out, "b": open_packs(DataSettings(packs=small_packs, length=32), "train")}
    packed = build_model()
    loss = LossSettings(chunk=16, penalty=penalty, penalty_weight=penalty and 0.1)
    packed.hf.set_output_embeddings(LossHead(packed.hf.get_output_embeddings(), loss))
    packs_of_both = MixedPacks(held_out.path, parts, dict.fromkeys(parts, 1.0))
    mixed = evaluate(packed, packs_of_both, accelerator)
    by_source = {name: evaluate(packed, packs, accelerator) for name, packs in parts.items()}
    a, b = by_source["a"]["held_out_tokens"], by_source["b"]["held_out_tokens"]
    assert mixed["held_out_tokens"] == a + b > b > a
    for name, figures in by_source.items():
        assert mixed[f"held_out_loss/{name}"] == figures["held_out_loss"]
    for key in ("held_out_loss", "held_out_penalty")[: 2 if penalty else 1]:
        mean = (by_source["a"][key] * a + by_source["b"][key] * b) / (a + b)
        assert mixed[key] == pytest.approx(mean, rel=1e-12)
    perplexity = math.exp(mixed["held_out_loss"])
    assert mixed["held_out_perplexity"] == pytest.approx(perplexity, rel=1e-12)
    assert ("held_out_penalty" in mixed) == bool(penalty)


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_keeps_mode_and_gradients(
    training: bool, held_out: Packs, accelerator: Accelerator
) -> None:
    packed = build_model().train(training)
    for parameter in packed.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    evaluate(packed, held_out, accelerator, 4)
    assert all(module.training == training for module in packed.modules())
    assert all((parameter.grad == 7.0).all() for parameter in packed.parameters())


@pytest.mark.parametrize(("precision", "fused"), [("bf16", True), ("mxfp8", False)])
def test_an_evaluation_uses_the_weights_after_the_last_update(
    precision: str, fused: bool, accelerator: Accelerator
) -> None:
    """Training computes with cached copies of the weights, which an update makes stale."""
    trained, other = (build_run(accelerator, precision, layers=1, fused=fused) for _ in range(2))
    trained.train()
    other.packed.load_state_dict(trained.packed.state_dict())
    sums = []
    for run in (trained, other):
        run.packed.context.evaluates_low = True
        sums.append(held_out_sums(run.packed, run.step.microbatches, accelerator))
    assert torch.equal(*sums)


# transformers has no cache for a model without attention.
NO_ATTENTION = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
NO_ATTENTION |= {"num_hidden_layers": 1, "layer_types": ["conv"], "initializer_range": 0.2}


@pytest.mark.parametrize(("kind", "sizes"), [("qwen3", {}), ("gpt2", {}), ("lfm2", NO_ATTENTION)])
def test_samples_equal_those_of_plain_transformers(
    kind: str, sizes: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> None:
    packed = build_model(kind, **sizes)
    settings = {"temperature": 0.7, "top_p": 0.9}
    text = sample(packed.hf, tokenizer, "w3 w4 w5", tokens=12, seed=5, **settings)
    plain = plain_copy(packed)
    torch.manual_seed(5)
    prompt = tokenizer("w3 w4 w5", return_tensors="pt", return_token_type_ids=False)
    settings |= {"max_new_tokens": 12, "do_sample": True, "top_k": 0, "pad_token_id": 60}
    settings["use_cache"] = not sizes
    with torch.no_grad():
        ids = plain.generate(**prompt, **settings)
    assert text == tokenizer.decode(ids[0, 3:], skip_special_tokens=True)


def test_temperature_zero_takes_the_likeliest_token(tokenizer: PreTrainedTokenizerBase) -> None:
    hf = build_model("gpt2", n_positions=8).hf
    greedy = [
        sample(hf, tokenizer, "w1 w2", tokens=60, seed=seed, temperature=temperature, top_p=top_p)
        for seed, temperature, top_p in ((1, 0.0, 0.9), (2, 1e-6, 0.9), (3, 1.0, 1e-6))
    ]
    assert greedy[0] == greedy[1] == greedy[2]
    assert len(greedy[0].split()) <= 6
    with pytest.raises(InputError, match=r"the model .*8 positions"):
        sample(hf, tokenizer, " ".join(["w1"] * 8), tokens=1, seed=0, temperature=1.0, top_p=1.0)


@pytest.mark.parametrize(
    ("evaluations", "best"),
    [
        ([], None),
        ([(5, 3.0, 9), (10, 2.0, 9), (15, 2.0, 9), (20, None, 9), (25, 2.5, 9)], 10),
        # Other held-out packs start a new comparison.
        ([(5, 1.0, 9), (10, 2.0, 8), (15, 3.0, 8)], 10),
    ],
)
def test_the_best_evaluation_is_the_first_lowest_of_the_same_packs(
    evaluations: list[tuple], best: int | None
) -> None:
    keys = ("step", "held_out_loss", "held_out_tokens")
    found = best_evaluation(dict(zip(keys, values, strict=True)) for values in evaluations)
    assert (found and found["step"]) == best
