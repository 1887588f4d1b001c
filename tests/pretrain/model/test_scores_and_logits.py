"""Models with changed scores or logits agree with plain transformers on single documents."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vjp

from foundation.errors import InputError
from packing.batch import build_microbatch
from pretrain.model import attention
from pretrain.model.attention_backends import Case, choose, refusal_of
from pretrain.model.huggingface import check_architecture
from pretrain.model.loss.logit_change import UNCHANGED, LogitChange
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.model.scores import changed_scores
from pretrain.model.wrapping import convert
from pretrain.settings.recipe import LossSettings
from tests.pretrain.small_models import (
    VOCABULARY,
    build_model,
    plain_copy,
    plain_loss,
    random_packs,
)

LENGTH = 32
# The packs end with padding. The second document has one token.
DOCUMENTS = [[5, 1, 17], [20, 9]]
WINDOW = {"sliding_window": 6, "head_dim": 8}
CAPS = WINDOW | {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 1.5}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MULTIPLIERS = {"residual_multiplier": 0.7, "attention_multiplier": 0.3, "embedding_multiplier": 2.0}
CHANGED_SCORES = {
    "gemma2": CAPS,
    "vaultgemma": CAPS,
    "gpt_oss": WINDOW | EXPERTS,
    "granite_swa": WINDOW | {"logits_scaling": 3.0},
    "granitemoe_swa": WINDOW | EXPERTS | {"logits_scaling": 3.0},
    "flint": WINDOW | {"num_experts": 4},
}
CHANGED_LOGITS = {
    "cohere": {"logit_scale": 0.3},
    "cohere2": WINDOW | {"logit_scale": 0.3},
    "cohere2_moe": WINDOW | {"logit_scale": 0.3},
    "granite": MULTIPLIERS | {"logits_scaling": 3.0},
    "granitemoe": {"logits_scaling": 3.0},
    "granitemoeshared": {"logits_scaling": 3.0},
    "hyperclovax": {"logits_scaling": 0.3},
    "nanochat": {"final_logit_softcapping": 1.5},
    "gemma3_text": CAPS,
    "gemma4_text": WINDOW
    | {"final_logit_softcapping": 1.5}
    | {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8},
    "beam": {"final_logit_softcapping": 1.5},
}
TYPES = CHANGED_SCORES | CHANGED_LOGITS


def built(name: str, backend: str, **options: Any) -> PackedLanguageModel:
    """Return a model with random biases, sinks and norms, and with grouped experts."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    packed = build_model(name, backend=backend, **options, **sizes | TYPES[name]).train()
    check_architecture(packed.hf, LENGTH, LossSettings())
    convert(packed.hf, {}, packed.context)
    with torch.no_grad():
        for parameter in packed.hf.parameters():
            if parameter.dim() < 2:
                parameter += torch.randn_like(parameter) / 4
    return packed


@pytest.fixture
def flash_attention_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the kernels of FlashAttention-4 by the formula of its documentation."""

    def output_of(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, **options: Any) -> Tensor:
        assert options.pop("causal") is True
        assert options["cu_seqlens_k"] is options["cu_seqlens_q"]
        group = q.shape[1] // k.shape[1]
        token = torch.arange(len(q))
        document = torch.bucketize(token, options["cu_seqlens_q"][1:], right=True)
        distance = token[:, None] - token
        is_seen = (document[:, None] == document) & (distance >= 0)
        if options["window_size_left"] is not None:
            is_seen &= distance <= options["window_size_left"]
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        s = torch.einsum("thd,shd->hts", q, k) * options["softmax_scale"]
        if options["softcap"]:
            s = options["softcap"] * torch.tanh(s / options["softcap"])
        p = s.exp() * is_seen
        total = p.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + sinks.exp()[:, None, None]
        return torch.einsum("hts,shd->thd", p / total, v)

    def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Any, ...]:
        assert options.pop("return_lse") is True
        output = output_of(q, k, v, options.pop("learnable_sink"), **options)
        return output, q.new_zeros(q.shape[1], len(q), dtype=torch.float32), None, None, None

    def backward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        *,
        deterministic: bool,
        learnable_sink: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        inputs = [q, k, v]
        if learnable_sink is not None:
            inputs.append(learnable_sink)

        def with_options(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
            return output_of(q, k, v, sinks, **options)

        output, gradients = vjp(with_options, *inputs)
        torch.testing.assert_close(output, out)
        return gradients(dout)

    kernels = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    monkeypatch.setattr(attention, "flash_kernels", lambda: kernels)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "packed_documents") for name in TYPES),
        *((name, "packed_fa4") for name in CHANGED_SCORES),
        ("gemma2", "packed_sdpa"),
        ("gpt_oss", "packed_sdpa"),
    ],
)
def test_packed_loss_and_gradients_equal_those_of_separate_documents(
    name: str, backend: str, flash_attention_4: None
) -> None:
    packed = built(name, backend)
    packs = random_packs(DOCUMENTS, LENGTH)
    microbatch = build_microbatch(packs, mask_boundaries=True)
    loss = packed(**inputs_of(microbatch, torch.device("cpu")))
    loss.backward()
    plain = plain_copy(packed)
    expected = plain_loss(plain, packs) * microbatch.valid_tokens
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-5)
    references = dict(plain.named_parameters())
    for key, parameter in packed.hf.named_parameters():
        reference = references[key].grad
        if reference is not None:
            error = (parameter.grad - reference).norm()
            assert error < 3e-5 * reference.norm() + 1e-5, key


@pytest.mark.parametrize("name", CHANGED_SCORES)
def test_a_document_changes_no_logit_of_the_next_one(name: str) -> None:
    packed = built(name, "packed_documents").eval()
    first, second = random_packs([[20, 12]], LENGTH), random_packs([[20, 12]], LENGTH)
    second[0].input_ids[:20] = (second[0].input_ids[:20] + 1) % VOCABULARY
    logits = []
    for packs in (first, second):
        inputs = inputs_of(build_microbatch(packs, mask_boundaries=True), torch.device("cpu"))
        labels = inputs.pop("labels")
        options = {"documents": inputs["cu_seqlens"], "use_cache": False}
        logits.append(packed.hf(**inputs, **options).logits[0, : labels.shape[1]])
    change = (logits[0] - logits[1]).abs().amax(1)
    assert change[:20].min() > 1e-2
    assert change[20:].max() < 1e-6


def test_keys_that_a_model_ignores_change_neither_scores_nor_logits() -> None:
    hf = build_model("qwen3").hf
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "logit_scale"):
        setattr(hf.config, key, 0.5)
    assert LogitChange.of(hf.config) == UNCHANGED
    assert changed_scores(hf) == ""


def test_biases_of_experts_sum_their_gradients_in_fp32() -> None:
    """The code of transformers would sum the weights of 4,096 tokens in BF16."""
    packed = built("gpt_oss", "packed_sdpa", weights=torch.bfloat16)
    experts = packed.hf.get_submodule("model.layers.0.mlp.experts")
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(4096, 4, generator=generator).argsort(1)[:, :2]
    weights = torch.rand(4096, 2, generator=generator)
    experts(torch.zeros(4096, 32, dtype=torch.bfloat16), chosen, weights).float().sum().backward()
    expected = torch.zeros(4).index_add_(0, chosen.flatten(), weights.flatten())
    gradient = experts.down_proj_bias.grad.float()
    torch.testing.assert_close(gradient, expected[:, None].expand_as(gradient), rtol=2**-7, atol=0)


@pytest.mark.parametrize(
    ("capability", "dim", "requested", "words"),
    [
        ((9, 0), 256, "auto", None),
        ((10, 0), 128, "auto", None),
        ((10, 0), 256, "auto", "only FlashAttention-4 .*no backward of capped scores"),
        ((8, 0), 64, "auto", "only FlashAttention-4 computes capped scores.*sm_90"),
        ((9, 0), 64, "cudnn", "cudnn does not compute capped scores"),
        ((8, 0), 64, "sdpa", None),
    ],
)
def test_a_gpu_computes_changed_scores_only_by_kernels_that_can(
    capability: tuple[int, int], dim: int, requested: Any, words: str | None
) -> None:
    case = Case("cuda", dim, torch.bfloat16, capability, "capped scores")
    refusal = refusal_of(requested, case)
    if words is None:
        expected = "packed_sdpa" if requested == "sdpa" else "packed_fa4"
        assert refusal is None and choose(requested, case, 300.0).name == expected
    else:
        with pytest.raises(InputError, match=words):
            raise InputError(refusal or "")
