"""Register torchtitan's Qwen3-1.7B with random sequences in place of a tokenizer and a corpus.

torchtitan imports this module by its option `experimental.custom_import`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.models import qwen3
from torchtitan.protocols.train_spec import register_train_spec

VOCABULARY = 151_936


class Sequences(IterableDataset[Any]):
    """Whole sequences of frequent and rare tokens."""

    def __init__(self, length: int, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        uniform = torch.rand(512, length + 1, generator=generator)
        self.rows = (3 / (uniform + 1e-6)).long() % (VOCABULARY - 1936)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            for row in self.rows:
                yield {"input": row[:-1]}, row[1:]


def build_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any, infinite: bool = True
) -> ParallelAwareDataloader:
    """Return the dataloader of a rank, with the arguments that torchtitan passes."""
    return ParallelAwareDataloader(
        Sequences(job_config.training.seq_len, dp_rank),
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        batch_size=job_config.training.local_batch_size,
    )


register_train_spec(
    "qwen3_benchmark",
    dataclasses.replace(
        qwen3.get_train_spec(),
        build_tokenizer_fn=None,
        build_dataloader_fn=build_dataloader,
        build_validator_fn=None,
        state_dict_adapter=None,
    ),
)
