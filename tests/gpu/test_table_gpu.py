"""The gradient of a table of tokens, added by a kernel, against sums in double precision; on a CPU under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pretrain.model.gradients import attach_main_gradients, clear_main_gradients
from tests.gpu.interpreted import DEVICE, GPU_OR_INTERPRETER, cuda_only

pytestmark = GPU_OR_INTERPRETER


def of_common_words(tokens: int, vocabulary: int) -> Tensor:
    """Half of all are one word, as no text has it, and the last word of the table comes too."""
    ids = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(0))
    ids[::2], ids[-1] = vocabulary // 3, vocabulary - 1
    return ids.to(DEVICE)


def gradient_of_rows(tokens: int, width: int) -> Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)


def summed_exactly(total: Tensor, gradient: Tensor, ids: Tensor) -> Tensor:
    return total.double().index_add(0, ids, gradient.double())


@pytest.mark.parametrize(("tokens", "vocabulary", "width"), [(1, 3, 8), (64, 5, 128), (200, 1000, 136), (130, 40, 264)])
def test_rows_of_one_word_are_summed_and_added_to_what_is_there(tokens: int, vocabulary: int, width: int) -> None:
    from pretrain.model.table_kernel import add_rows_

    ids, gradient = of_common_words(tokens, vocabulary), gradient_of_rows(tokens, width)
    total = torch.randn(vocabulary, width, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    expected = summed_exactly(total, gradient, ids)
    untouched = torch.isin(torch.arange(vocabulary, device=DEVICE), ids, invert=True)
    before = total.clone()
    add_rows_(total, gradient, ids)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=2e-5)
    assert torch.equal(total[untouched], before[untouched])


@cuda_only
@pytest.mark.parametrize("tied", [False, True])
def test_microbatches_of_a_bf16_table_add_up_in_fp32(tied: bool) -> None:
    """At real sizes, beside the order of sums that `deterministic: true` takes."""
    vocabulary, width, tokens = 151_936, 256, 32_768
    table = nn.Embedding(vocabulary, width, device="cuda", dtype=torch.bfloat16)
    head = nn.Linear(width, vocabulary, bias=False, device="cuda", dtype=torch.bfloat16) if tied else None
    model = nn.ModuleList([table, head] if tied else [table])
    if tied:
        head.weight = table.weight
    attach_main_gradients(model, torch.float32)
    ids, gradients = of_common_words(tokens, vocabulary), [gradient_of_rows(tokens, width) for _ in range(2)]
    expected = torch.zeros(vocabulary, width, device="cuda", dtype=torch.float64)
    found = []
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            clear_main_gradients(model.parameters())
            for gradient in gradients:
                table(ids[None])[0].backward(gradient)
        finally:
            torch.use_deterministic_algorithms(False)
        assert table.weight.grad is None
        found.append(table.weight.main_grad.clone())
    for gradient in gradients:
        expected = summed_exactly(expected, gradient, ids)
    for each in found:
        assert (each.double() - expected).norm() < 1e-6 * expected.norm()


@cuda_only
def test_offsets_beyond_32_bits() -> None:
    from pretrain.model.table_kernel import add_rows_

    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB")
    vocabulary, width = 2**31 // 1024 + 5, 1024
    total = torch.zeros(vocabulary, width, device="cuda")
    ids, gradient = torch.tensor([vocabulary - 1, 0, vocabulary - 1], device="cuda"), gradient_of_rows(3, width)
    add_rows_(total, gradient, ids)
    torch.testing.assert_close(total[-1], gradient[0].float() + gradient[2].float())
    assert torch.equal(total[0], gradient[1].float()) and not total[1:-1].any()
