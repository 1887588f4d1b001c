"""How the heads of an attention layer lie in the rows of its stacked query, key and value product, and what normalises them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """A row holds `query` heads, then `kv` key heads, then `kv` value heads, of `dim` values each."""

    query: int
    kv: int
    dim: int

    @property
    def rotated(self) -> int:
        """Heads that carry a position: the queries' and the keys'."""
        return self.query + self.kv

    @property
    def count(self) -> int:
        return self.query + 2 * self.kv

    @property
    def width(self) -> int:
        """Values in a row."""
        return self.count * self.dim

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of `rows` [T, width]: queries [T, query, dim], keys and values [T, kv, dim]."""
        queries, keys, values = rows.unflatten(1, (self.count, self.dim)).split((self.query, self.kv, self.kv), dim=1)
        return queries, keys, values


@dataclass(frozen=True)
class HeadNorms:
    """The root-mean-square norms that Qwen3 puts on every query and key head: their weights [dim], any float dtype."""

    query: Tensor
    key: Tensor
    eps: float
