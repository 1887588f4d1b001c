"""Models from configs and folders, packed: the same losses and gradients as plain transformers on separate documents."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from foundation.errors import InputError
from packing.arrow import Pack
from packing.batch import build_microbatch
from pretrain.model import huggingface as model
from pretrain.model.fused.arithmetic import Arithmetic
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.model.wrapping import fuse, wrap_layers
from pretrain.settings.recipe import LossSettings, ModelSettings

CPU = torch.device("cpu")
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPES = {
    "qwen3": SMALL | {"head_dim": 8},
    "llama": SMALL,
    "qwen2": SMALL | {"use_sliding_window": False},
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    },
}
VOCABULARY = 97


def settings(kind: str, **changes: object) -> ModelSettings:
    tied = {"tie_word_embeddings": True} if kind in ("qwen3", "gpt2") else {"tie_word_embeddings": False}
    return ModelSettings(config={"model_type": kind, "vocab_size": VOCABULARY, **tied, **SHAPES[kind]}, **changes)


def packed_model(
    chosen: ModelSettings,
    *,
    weights: torch.dtype = torch.float32,
    cast_to: torch.dtype | None = None,
    compile_layers: bool = False,
    seed: int = 1,
    backend: str = "packed_sdpa",
) -> PackedLanguageModel:
    config = model.load_config(chosen)
    hf = model.build(chosen, config, weights=weights, seed=seed, device=CPU, backend=backend)
    packed = PackedLanguageModel(hf, backend, LossSettings(chunk=16))
    wrap_layers(packed, chosen, cast_to=cast_to, compile_layers=compile_layers)
    return packed


def two_packs() -> tuple[list[np.ndarray], dict]:
    """Documents, and the microbatch of two packs of 32 tokens that holds them; the second has a tail of padding."""
    lengths = [[5, 1, 26], [17, 9]]
    rng = np.random.default_rng(3)
    documents = [[rng.integers(0, VOCABULARY, size) for size in sizes] for sizes in lengths]
    packs = [
        Pack(
            np.concatenate([*pack, np.zeros(32 - sum(map(len, pack)), dtype=int)]).astype(np.uint32),
            np.array(list(map(len, pack)), dtype=np.int32),
        )
        for pack in documents
    ]
    return [document for pack in documents for document in pack], inputs_of(build_microbatch(packs, mask_boundaries=True), CPU)


def plain_loss(hf: torch.nn.Module, documents: list[np.ndarray]) -> torch.Tensor:
    """Summed next-token loss of the unmodified forward, one document at a time."""
    total = torch.zeros(())
    for document in documents:
        if len(document) > 1:
            ids = torch.from_numpy(document)[None]
            logits = hf(input_ids=ids).logits[0, :-1].float()
            total = total + torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
    return total


WINDOWS = {
    "gemma3_text": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8},
    "mistral": {"sliding_window": 6},
    "qwen3": {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]},
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("backend", ["packed_sdpa", "packed_documents"])
@pytest.mark.parametrize("kind", WINDOWS)
def test_layers_with_a_window_shorter_than_a_pack_attend_as_transformers_eager_ones(kind: str, backend: str, fused: bool) -> None:
    if fused and kind == "gemma3_text":
        pytest.skip("has no fused form")
    chosen = ModelSettings(config={"model_type": kind, "vocab_size": VOCABULARY, **SHAPES["llama"], **WINDOWS[kind]})
    _agrees_with_plain_transformers(chosen, backend, fused=fused)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("recompute", ["none", "full", 2])
def test_packed_loss_and_gradients_are_those_of_separate_documents(kind: str, recompute: object) -> None:
    _agrees_with_plain_transformers(settings(kind, gradient_checkpointing=recompute), "packed_sdpa")


def _agrees_with_plain_transformers(chosen: ModelSettings, backend: str, *, fused: bool = False) -> None:
    documents, inputs = two_packs()
    packed = packed_model(chosen, backend=backend).train()
    model.check_architecture(packed.hf, 32, LossSettings())
    if fused:
        packed.fused = fuse(model.decoder_layers(packed.hf), {}, Arithmetic(packed.context))
        assert not packed.fused.left_out
    loss = packed(**inputs)
    loss.backward()

    plain = AutoModelForCausalLM.from_config(model.load_config(chosen), attn_implementation="eager")
    plain.load_state_dict(packed.hf.state_dict())
    expected = plain_loss(plain, documents)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-5)
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    assert gradients.keys() == {name for name, _ in packed.hf.named_parameters()}
    for name, parameter in packed.hf.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_working_copies_compute_what_a_bf16_model_computes_with_gradients_in_fp32(recompute: str) -> None:
    chosen = settings("qwen3", gradient_checkpointing=recompute)
    _, inputs = two_packs()
    copies = packed_model(chosen, cast_to=torch.bfloat16).train()
    rounded = packed_model(settings("qwen3"), weights=torch.bfloat16).train()
    losses = copies(**inputs), rounded(**inputs)
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for (name, a), (_, b) in zip(copies.hf.named_parameters(), rounded.hf.named_parameters(), strict=True):
        assert a.grad.dtype == torch.float32
        # What reaches an embedding or a head is summed in FP32 here and rounded to BF16 there; layers' gradients are the same
        # bits.
        error = (a.grad - b.grad.float()).norm() / a.grad.norm()
        assert error <= (2**-8 if "embed" in name else 0), name


@pytest.mark.parametrize("kind", SHAPES)
def test_tied_heads_stay_tied_and_exports_load_as_plain_transformers_models(kind: str, tmp_path: Path) -> None:
    packed = packed_model(settings(kind), cast_to=torch.bfloat16)
    tied = packed.hf.get_output_embeddings().weight is packed.hf.get_input_embeddings().weight
    assert tied == (kind in ("qwen3", "gpt2"))
    model.export(packed.hf, packed.hf.state_dict().__getitem__, None, tmp_path / "final")
    (tmp_path / ".final.writing").mkdir()  # as an export that was killed leaves it
    model.export(packed.hf, packed.hf.state_dict().__getitem__, None, tmp_path / "final")  # writing again replaces
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert [p.name for p in tmp_path.iterdir()] == ["final"]
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == tied
    for (name, a), (_, b) in zip(packed.hf.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(a, b), name

    again = packed_model(ModelSettings(source=str(tmp_path / "final")))
    assert all(torch.equal(a, b) for a, b in zip(packed.hf.parameters(), again.hf.parameters(), strict=True))


def test_a_folder_that_holds_something_else_is_not_replaced(tmp_path: Path) -> None:
    hf = packed_model(settings("llama")).hf
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match=r"final: .*mine\.txt"):
        model.export(hf, hf.state_dict().__getitem__, None, tmp_path / "final")
    assert [path.name for path in (tmp_path / "final").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("origin", ["scratch", "folder"])
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
@pytest.mark.parametrize(("kept", "weights"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)])
def test_under_fsdp2_the_first_rank_has_what_is_built_whole_and_the_model_no_memory(
    origin: str, kind: str, kept: torch.dtype, weights: torch.dtype, tmp_path: Path
) -> None:
    chosen = settings(kind)
    if origin == "folder":
        torch.manual_seed(3)
        drawn = AutoModelForCausalLM.from_config(model.load_config(chosen))
        drawn.generation_config.temperature, drawn.generation_config.do_sample = 0.5, True
        drawn.save_pretrained(tmp_path / "model", max_shard_size="10KB")
        chosen = ModelSettings(source=str(tmp_path / "model"))
    options = {"seed": 7, "backend": "packed_sdpa"}
    whole = model.build(chosen, model.load_config(chosen), weights=kept, device=CPU, **options)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        first = SimpleNamespace(is_main_process=True, device=CPU)
        hf, values = model.build_on_first_rank(chosen, model.load_config(chosen), first, kept=kept, weights=weights, **options)
    finally:
        torch.distributed.destroy_process_group()
    assert list(values) == list(dict(hf.named_parameters())) == list(dict(whole.named_parameters()))
    for name, parameter in hf.named_parameters():
        assert parameter.is_meta and parameter.dtype == weights and parameter.requires_grad
        assert parameter.shape == values[name].shape and torch.equal(values[name], whole.get_parameter(name)), name
    assert all(torch.equal(buffer, whole.get_buffer(name)) for name, buffer in hf.named_buffers())
    assert hf.generation_config.to_dict() == whole.generation_config.to_dict()
    assert (hf.get_output_embeddings().weight is hf.get_input_embeddings().weight) == (kind in ("qwen3", "gpt2"))


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (ModelSettings(source="no/such/folder/anywhere"), "`model.source`"),
        (ModelSettings(config={"model_type": "qwen33"}), "`model.config.model_type`"),
        (ModelSettings(config={"model_type": "qwen3", "hiden_size": 8}), "`hidden_size`"),
    ],
)
def test_unusable_models_are_refused_with_their_key(chosen: ModelSettings, said: str) -> None:
    with pytest.raises(InputError) as error:
        model.load_config(chosen)
    assert said in str(error.value)


def test_a_source_that_lacks_weights_is_refused_and_not_filled_up_at_random(tmp_path: Path) -> None:
    packed_model(settings("llama")).hf.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"`model.source`.* 1 of .*layers\.1\.mlp\.up_proj"):
        packed_model(ModelSettings(source=str(tmp_path)))


def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "with_code"
    packed_model(settings("qwen3")).hf.save_pretrained(folder)
    (folder / "modeling_own.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\n")
    classes = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": classes}))
    with pytest.raises(InputError, match=r"`model.source`.* code of its own"):
        model.load_config(ModelSettings(source=str(folder)))
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("gpt2", {"attn_pdrop": 0.1}, "attn_pdrop"),
        ("gemma2", {}, "softcap"),
        ("llama4_text", {}, "Llama4ForCausalLM"),
    ],
)
def test_architectures_that_packing_would_change_are_refused(kind: str, changes: dict, said: str) -> None:
    known = dir(AutoConfig.for_model(kind))
    shape = {key: value for key, value in SHAPES.get(kind, SHAPES["llama"]).items() if key in known} | changes
    shapes = model.build_on_meta(model.load_config(ModelSettings(config={"model_type": kind, "vocab_size": VOCABULARY, **shape})))
    with pytest.raises(InputError) as error:
        model.check_architecture(shapes, 64, LossSettings())
    assert said in str(error.value)
