"""Layout and norms of the attention heads in the stacked query, key and value product."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """Layout of a row of the stacked query, key and value product.

    A row has `query` query heads, then `kv` key heads, then `kv` value heads. Each head has `dim`
    values.
    """

    query: int
    kv: int
    dim: int

    @property
    def count(self) -> int:
        """Number of heads in a row."""
        return self.query + 2 * self.kv

    @property
    def width(self) -> int:
        """Number of values in a row."""
        return self.count * self.dim

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split `rows` [T, width] into queries [T, query, dim], keys and values [T, kv, dim].

        The results are views of `rows`.
        """
        queries, keys, values = rows.unflatten(1, (self.count, self.dim)).split(
            (self.query, self.kv, self.kv), dim=1
        )
        return queries, keys, values


@dataclass(frozen=True)
class HeadNorms:
    """Weights of the RMSNorms that Qwen3 applies to query and key heads.

    The weights `query` and `key` have shape [dim] and any floating-point dtype. `eps` is added to
    the mean square of a head.
    """

    query: Tensor
    key: Tensor
    eps: float
