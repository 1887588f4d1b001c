"""The public API: conversion, packs, exact AdamW and parity in loops of others."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from foundation.errors import InputError
from packing import arrow
from packing.batch import BatchStream
from packing.order import Mixture, Order
from pretrain import api
from pretrain.precision.product import LowPrecisionLinear
from tests.pretrain.conftest import batch_of, llama
from tests.pretrain.small_models import plain_loss, random_packs
from tests.ranks import in_ranks

LENGTH = 32
pytestmark = pytest.mark.filterwarnings("ignore:.*so the precision is emulated")


def gradients_of(model: PreTrainedModel, batch: dict[str, Any]) -> dict[str, Tensor]:
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def kinds(model: nn.Module, name: str) -> set[str]:
    return {p.left for p in api.audit(model, batch_of()) if name in p.name}


# ── convert ──


def test_a_converted_model_quantizes_and_keeps_its_names_and_its_export(tmp_path: Path):
    model = llama(tie_word_embeddings=True)
    names = list(model.state_dict())
    signature = inspect.signature(model.forward)
    conversion = api.convert(model, "current")
    assert list(model.state_dict()) == names
    assert inspect.signature(model.forward) == signature
    assert kinds(model, "proj") == {"e4m3 tensor-scaled", "e5m2 tensor-scaled"}
    assert kinds(model, "lm_head") == {"bfloat16"}
    assert repr(conversion).startswith("14 linear layers in current, emulated")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert equal(loaded.state_dict(), model.state_dict())


def test_the_head_is_quantized_on_request_and_kept_layers_are_not():
    model = llama(tie_word_embeddings=True)
    api.convert(model, "current+head", keep_bf16=["layers.0.mlp.*"])
    assert "bfloat16" not in kinds(model, "lm_head") | kinds(model, "layers.1")
    assert kinds(model, "layers.0.mlp") == {"bfloat16"}
    assert model.lm_head.weight is model.model.embed_tokens.weight


UPDATES: dict[str, Callable[[PreTrainedModel], None]] = {
    "exact": lambda model: api.exact_adamw(model, lr=0.1).step(),
    "torch": lambda model: torch.optim.SGD(model.parameters(), lr=10.0).step(),
    "data": lambda model: [setattr(p, "data", p.data + 0.1) for p in model.parameters()],
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_quantized_weights_are_never_stale(update: Callable[[PreTrainedModel], None]):
    """An update by any means is seen by the next forward, without a call to the conversion."""
    model = llama()
    api.convert(model, "current")
    gradients_of(model, batch_of())
    update(model)
    fresh = llama()
    fresh.load_state_dict(model.state_dict())
    api.convert(fresh, "current")
    assert equal(gradients_of(model, batch_of()), gradients_of(fresh, batch_of()))


def test_accumulated_gradients_are_the_sum_of_microbatches():
    model = llama(torch.float32)
    api.convert(model, "current")
    separate = [gradients_of(model, batch_of(seed=seed)) for seed in (1, 2)]
    model.zero_grad()
    for seed in (1, 2):
        model(**batch_of(seed=seed)).loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, separate[0][name] + separate[1][name])


def test_evaluation_is_unquantized_and_training_in_eval_mode_is_not():
    model, plain = llama(), llama()
    api.convert(model, "current")
    with torch.no_grad():
        assert model.eval()(**batch_of()).loss == plain.eval()(**batch_of()).loss
    assert not equal(gradients_of(model, batch_of()), gradients_of(plain, batch_of()))


def checkpoints(model: Any, *options: Any) -> None:
    model.gradient_checkpointing_enable(*options)


def compiles(model: Any) -> None:
    model.compile(backend="eager")


def compiles_layers(model: Any) -> None:
    for layer in model.model.layers:
        layer.compile(backend="eager")


@pytest.mark.parametrize(
    ("precision", "wrap", "dtype"),
    [
        ("current", checkpoints, torch.bfloat16),
        ("delayed", checkpoints, torch.bfloat16),
        ("delayed", lambda model: checkpoints(model, {"use_reentrant": True}), torch.bfloat16),
        # Tracing a layer takes a third of the time of tracing the model.
        ("delayed", compiles_layers, torch.bfloat16),
        *(
            pytest.param(precision, compiles, torch.bfloat16, marks=pytest.mark.nightly)
            for precision in ("current", "delayed")
        ),
        # torch.compile changes the order in which gradients are summed, and BF16 rounds the sums.
        *(
            pytest.param(
                precision,
                lambda model: [checkpoints(model), compiles(model)],
                torch.float32,
                marks=pytest.mark.nightly,
            )
            for precision in ("current", "delayed")
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_recomputed_and_compiled_models_have_the_same_gradients(precision, wrap, dtype):
    model = llama(dtype, num_hidden_layers=1)
    conversion = api.convert(model, precision, calibrate_on=batch_of(seed=1))
    state = conversion.state_dict()
    expected = gradients_of(model, batch_of())
    histories = conversion.state_dict()
    conversion.load_state_dict(state)
    wrap(model)
    assert equal(gradients_of(model, batch_of()), expected)
    assert equal(conversion.state_dict(), histories)


def test_autocast_computes_the_same_products():
    """An autocast would round the FP32 operands of the emulation, also in backward."""
    model = llama(torch.float32)
    api.convert(model, "current")
    inside: list[Tensor] = []
    outside: list[Tensor] = []
    linear = model.get_submodule("model.layers.0.mlp.up_proj")
    x = torch.randn(16, 32).bfloat16()
    for results, enabled in ((inside, True), (outside, False)):
        with model.precision_context.forward(training=True), torch.autocast("cpu", enabled=enabled):
            y = linear(x.requires_grad_())
            results += [y, *torch.autograd.grad(y.sum(), [x, linear.weight])]
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


def test_a_saved_state_continues_bit_for_bit(tmp_path: Path):
    model = llama()
    conversion = api.convert(model, "delayed", calibrate_on=batch_of(seed=1))
    torch.save([model.state_dict(), conversion.state_dict()], tmp_path / "saved")
    expected = gradients_of(model, batch_of(seed=2))
    weights, histories = torch.load(tmp_path / "saved")
    model = llama()
    conversion = api.convert(model, "delayed", calibrate_on=batch_of(seed=3))
    model.load_state_dict(weights)
    conversion.load_state_dict(histories)
    assert equal(gradients_of(model, batch_of(seed=2)), expected)
    with pytest.raises(KeyError):
        conversion.load_state_dict({})


def gpt_oss() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 16, "head_dim": 16, "num_local_experts": 4}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = AutoConfig.for_model("gpt_oss", vocab_size=64, **sizes)
    return AutoModelForCausalLM.from_config(config).train()


@pytest.mark.parametrize("build", [llama, gpt_oss])
def test_a_copy_of_a_converted_model_trains_alone(build: Callable[[], PreTrainedModel]):
    model = build()
    conversion = api.convert(model, "delayed", calibrate_on=batch_of(seed=1))
    twin = copy.deepcopy(model)
    before = conversion.state_dict()
    gradients = gradients_of(twin, batch_of())
    assert equal(conversion.state_dict(), before)
    assert equal(gradients, gradients_of(model, batch_of()))


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


CHANGES: dict[str, Callable[[nn.Linear], None]] = {
    "class": lambda linear: setattr(linear, "__class__", Scaled),
    "hook": lambda linear: linear.register_forward_hook(lambda *_: None),
    "forward": lambda linear: setattr(linear, "forward", lambda x: x),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_linears_that_do_more_are_refused_unless_they_are_kept(change):
    model = llama()
    linear = model.model.layers[0].mlp.up_proj
    change(linear)
    with pytest.raises(InputError, match=r"keep_bf16=\['model.layers.0.mlp.up_proj'\]"):
        api.convert(model, "current")
    api.convert(model, "current", keep_bf16=["model.layers.0.mlp.up_proj"])
    assert type(linear) is not LowPrecisionLinear


def test_training_a_part_of_a_converted_model_is_refused():
    model = llama()
    api.convert(model, "current")
    with pytest.raises(InputError, match="outside of a forward of its model"):
        model.model(**{"input_ids": batch_of()["input_ids"]})


@pytest.mark.parametrize(("precision", "multiple"), [("current", 16), ("mxfp8", 32)])
def test_a_number_of_tokens_that_gpus_cannot_multiply_is_refused(precision: str, multiple: int):
    model = llama()
    # 48 values are no multiple of 32.
    api.convert(model, precision, keep_bf16=["mlp.*"])
    ids = torch.ones(1, multiple + 8, dtype=torch.int64)
    with pytest.raises(
        InputError, match=f"has {multiple + 8} tokens.* multiple of {multiple}; .* `keep_bf16`"
    ):
        model(input_ids=ids, labels=ids)
    with torch.no_grad():
        model.eval()(input_ids=ids)
    model.train()(input_ids=ids.repeat(4, 1), labels=ids.repeat(4, 1)).loss.backward()


@pytest.mark.parametrize(
    ("precision", "options", "message"),
    [
        ("fp8", {}, "none of the precisions delayed.*; fp8 is delayed, current or block"),
        ("bf16", {}, "none of the precisions delayed"),
        ("current", {"margin": 1}, "`current` accepts fp8_format; either remove all other"),
        ("delayed", {}, "calibrate_on"),
        ("current", {"keep": 1}, "`keep`: unknown key"),
        ("current", {"keep_bf16": ["nothing"]}, "matches no linear layer"),
        ("current", {"on_unsupported": "fallback"}, "would train in"),
        ("current", {"on_unsupported": "error"}, "needs a GPU"),
    ],
)
def test_mistakes_in_a_conversion_change_nothing(precision: str, options: Any, message: str):
    model = llama()
    with pytest.raises(InputError, match=message):
        api.convert(model, precision, **options)
    assert not any(isinstance(module, LowPrecisionLinear) for module in model.modules())
    api.convert(model, "current")
    with pytest.raises(InputError, match=r"converted already.* `get_base_model\(\)`"):
        api.convert(model, "current")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": None}, "no loss"),
        ({key: ids[:, :15] for key, ids in batch_of().items()}, "has 30 tokens"),
    ],
    ids=["no labels", "number of tokens"],
)
def test_an_unsuitable_batch_does_not_convert_the_model(change: dict[str, Any], message: str):
    model, plain = llama(), llama()
    with pytest.raises(InputError, match=message):
        api.convert(model, "delayed", calibrate_on=batch_of() | change)
    assert vars(model).keys() == vars(plain).keys()
    assert equal(gradients_of(model, batch_of()), gradients_of(plain, batch_of()))


def test_emulation_is_announced_by_a_warning():
    with pytest.warns(UserWarning, match="so the precision is emulated"):
        api.convert(llama(), "current")


# ── open_packs ──


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packs with documents of many lengths, the last of them padded, and one held-out pack."""
    path = tmp_path_factory.mktemp("data") / "packs"
    lengths = ([10, 22], [5, 20, 7], [32], [1, 31], [16, 16], [3, 3, 3])
    packs = random_packs(lengths, LENGTH)
    splits = {"train": [packs], "held_out": [packs[:1]]}
    arrow.write_packs(path, LENGTH, splits, settings={}, statistics={}, tokenizer=None)
    return path


def loader(packs: api.PackedDataset, start: int, stop: int, **options: Any) -> DataLoader:
    places = packs.places(start, stop)
    return DataLoader(packs, 2, sampler=places, collate_fn=packs.collate, **options)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_packed_documents_have_the_losses_of_separate_documents(folder, attention, kind):
    if kind == "llama":
        model = llama(torch.float32, attn_implementation=attention).eval()
    else:
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 64}
        config = AutoConfig.for_model("gpt2", **sizes, bos_token_id=None, eos_token_id=None)
        config._attn_implementation = attention
        model = AutoModelForCausalLM.from_config(config).eval()
    packs = api.open_packs(folder)
    chosen = [packs.packs[index] for index in (1, 3, 5)]
    torch.testing.assert_close(model(**packs.collate(chosen)).loss, plain_loss(model, chosen))


# Models with layers that have a state, and models whose attention has biases of its own.
OTHER_LAYERS = ("lfm2", "mamba", "jamba", "bamba", "falcon_h1", "recurrent_gemma")
OTHER_ATTENTION = ("bloom", "mpt", "falcon")


@pytest.mark.parametrize("kind", [*OTHER_LAYERS, *OTHER_ATTENTION])
def test_models_that_would_mix_documents_are_refused(folder: Path, kind: str):
    packs = api.open_packs(folder)
    batch = packs.collate([packs[0]])
    layers: dict[str, Any] = {"num_hidden_layers": 2}
    if kind == "lfm2":
        layers["layer_types"] = ["conv", "full_attention"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **layers))
    reason = "layers other than" if kind in OTHER_LAYERS else "attention registry"
    with pytest.raises(InputError, match=f"^model: {type(model).__name__} .*{reason}"):
        api.parity(model, batch)
    if kind == "bloom":
        api.convert(model, "current")
        with pytest.raises(InputError, match=reason):
            model(**batch)


def test_places_are_those_of_the_launcher_and_resume_exactly(folder: Path):
    packs = api.open_packs(folder, seed=5)
    assert len(packs) == 6
    first_epoch = [tuple(packs[place].input_ids) for place in range(6)]
    assert [tuple(pack.input_ids) for pack in islice(packs, 7)] == first_epoch
    batches = list(loader(packs, 0, 16))
    options = {"microbatch": 2, "packs_per_step": 2, "mask_boundaries": True}
    order = Order(Mixture.alone(6), 5)
    stream = BatchStream(rank=0, world_size=1, packs=packs.packs, order=order, **options)
    for step, batch in enumerate(batches):
        (microbatch,) = stream.step(2 * step).microbatches
        expected = sorted(map(tuple, microbatch.input_ids.view(2, -1).tolist()))
        assert sorted(map(tuple, batch["input_ids"].view(2, -1).tolist())) == expected
    resumed = list(loader(packs, 6, 16, num_workers=2))
    for batch, expected in zip(resumed, batches[3:], strict=True):
        assert all(torch.equal(batch[name], expected[name]) for name in ("input_ids", "labels"))


def places_of_rank(rank: int, folder: Path) -> list[int]:
    return list(api.open_packs(folder).places(3, 8))


def test_ranks_take_turns(folder: Path):
    assert in_ranks(places_of_rank, folder) == [[3, 5, 7], [4, 6]]


def test_a_recipe_and_a_token_file_are_opened(folder: Path, tmp_path: Path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "name: x\nseed: 7\nmodel: {config: {model_type: llama}}\n"
        f"data: {{packs: {folder}, length: {LENGTH}}}\nbatch: {{tokens: {LENGTH}}}\n"
        "train: {steps: 1}\n"
    )
    assert api.open_packs(recipe).order.seed == 7
    assert len(api.open_packs(folder, split="held_out")) == 1
    np.save(tmp_path / "tokens.npy", np.arange(64, dtype=np.uint16))
    tokens = api.open_packs(tmp_path / "tokens.npy", length=16)
    assert len(tokens) == 4 and tokens[0].input_ids.shape == (16,)
    # Workers of a DataLoader open the packs themselves, instead of receiving a copy.
    pickled = pickle.dumps(tokens)
    assert len(pickled) < 1000 and tokens[1].input_ids.tobytes() not in pickled
    assert pickle.loads(pickled)[5].input_ids.tolist() == tokens[5].input_ids.tolist()
    with pytest.raises(InputError, match="held_out"):
        api.open_packs(tmp_path / "tokens.npy", length=16, split="held_out")
    with pytest.raises(InputError, match="no such file"):
        api.open_packs(tmp_path / "missing")


# ── parity ──


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parity_passes_for_correct_models_and_changes_nothing(dtype: torch.dtype, folder: Path):
    packs = api.open_packs(folder)
    batch = packs.collate([packs[0], packs[1]])
    model = llama(dtype)
    conversion = api.convert(model, "delayed", calibrate_on=batch)
    state, weights = conversion.state_dict(), copy.deepcopy(model.state_dict())
    result = api.parity(model, batch)
    assert not result.failures, result.summary()
    assert result.tokens == int((batch["labels"] != -100).sum())
    assert equal(conversion.state_dict(), state) and equal(model.state_dict(), weights)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_parity_needs_labels_and_a_reference_for_a_changed_model():
    model = llama()
    for labels in ({}, {"labels": None}):
        with pytest.raises(InputError, match="add `labels`"):
            api.parity(model, {"input_ids": batch_of()["input_ids"]} | labels)
    with pytest.raises(InputError, match=r"no OptimizedModule .* compiled"):
        api.parity(torch.compile(model), batch_of())
    reference = llama()
    for changed in (model, reference):
        attention = changed.model.layers[1].self_attn
        attention.q_proj = nn.Sequential(attention.q_proj)
    with pytest.raises(InputError, match=r"q_proj\.weight.* set `reference`"):
        api.parity(model, batch_of())
    assert not api.parity(model, batch_of(), reference).failures


@pytest.mark.parametrize(("tokens", "frozen"), [(600, False), (16, True)])
def test_parity_compares_long_documents_and_frozen_embeddings(tokens: int, frozen: bool):
    model = llama()
    model.get_input_embeddings().weight.requires_grad_(not frozen)
    result = api.parity(model, batch_of(1, tokens))
    assert not result.failures, result.summary()
    names = {name for name, _ in model.named_parameters()}
    assert {compared.name for compared in result.tensors} >= names


def test_parity_finds_a_wrong_gradient_and_a_wrong_loss():
    model, reference = llama(torch.float32), llama(torch.float32)
    up = model.model.layers[0].mlp.up_proj
    up.register_forward_hook(lambda module, args, y: y + 0.01 * (y - y.detach()))
    result = api.parity(model, batch_of(), reference)
    assert any("up_proj" in line for line in result.failures)
    assert not any(line.startswith("loss") for line in result.failures)
    model.lm_head.register_forward_hook(lambda module, args, y: 1.01 * y)
    assert any(line.startswith("loss") for line in api.parity(model, batch_of()).failures)
