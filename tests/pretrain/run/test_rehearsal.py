"""The pack that a run is observed on before its first step."""

from __future__ import annotations

import numpy as np

from packing.arrow import Pack
from packing.batch import build_microbatch
from pretrain.run.assembly import beginning_of


def test_the_beginning_of_a_pack_is_a_shorter_pack_of_the_same_documents() -> None:
    tokens = np.arange(24, dtype=np.uint32)
    whole = build_microbatch([Pack(tokens, np.array([5, 11, 6], dtype=np.int32))], mask_boundaries=True)
    cut = beginning_of(whole, 10)
    assert cut.max_seqlen == 10 and sorted(set(cut.cu_seqlens.tolist())) == [0, 5, 10]
    for name in ("input_ids", "position_ids", "labels"):
        assert getattr(cut, name).tolist() == [getattr(whole, name)[0, :10].tolist()]
    assert beginning_of(whole, 100).labels.tolist() == whole.labels.tolist()
