"""The loss that published fits expect of N parameters and D tokens, and how they would divide a compute budget over the two.

Both fit `L(N, D) = E + A / N^alpha + B / D^beta`, in nats a token, to the runs of Hoffmann et al. 2022 ("Training Compute-Optimal
Large Language Models", arXiv 2203.15556, approach 3), in which N counts every parameter, embeddings too, and compute is 6 N D.
At a budget of C = 6 N D the least loss is where the derivatives of both terms are equal (their equation 4):

    N = G (C / 6)^(beta / (alpha + beta))    D = (C / 6) / N    G = (alpha A / (beta B))^(1 / (alpha + beta))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

FLOPS_EACH = 6  # a parameter and token, forward and backward
PARAMETERS_SEEN = (70e6, 16e9)  # of the runs behind both fits, as the paper's abstract says
TOKENS_SEEN = (5e9, 500e9)
# What anybody has to know who takes the figures for their own run.
LIMITS = (
    "both fits are of the same runs: English text (MassiveText) in 32,000 SentencePiece tokens, less than one epoch, a cosine "
    "that ends with the run. Another text or tokenizer has another loss: compare differences, not levels"
)


@dataclass(frozen=True)
class Fit:
    """One published fit."""

    name: str
    source: str
    E: float  # the loss that neither parameters nor tokens lower
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Nats a token."""
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    def best_for_compute(self, flops: float) -> tuple[float, float]:
        """(parameters, tokens) of the least loss that `flops` buy."""
        ratio = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        parameters = ratio * (flops / FLOPS_EACH) ** (self.beta / (self.alpha + self.beta))
        return parameters, flops / FLOPS_EACH / parameters

    def best_tokens(self, parameters: float) -> float:
        """Tokens at which a model of so many parameters is the best that its compute buys: where both derivatives, by the
        logarithms of N and of D, are equal."""
        return (self.beta * self.B / (self.alpha * self.A)) ** (1 / self.beta) * parameters ** (self.alpha / self.beta)


# Hoffmann et al. print alpha and beta rounded to 0.34 and 0.28, and E to 1.69. Their own table A3 follows from the figures in the
# source of their paper, which are given here; with the rounded ones the best tokens for a budget are a quarter off.
HOFFMANN = Fit("Hoffmann et al. 2022", "approach 3, arXiv 2203.15556", 1.6934, 406.4, 410.7, 0.3392, 0.2849)
# Besiroglu, Erdil, Barnett and You 2024 ("Chinchilla Scaling: A replication attempt") read 240 of those runs off a figure and
# fitted them again: the first fit had stopped early. Standard errors: E 0.03, A 124.58, B 1293.23, alpha 0.02, beta 0.02.
BESIROGLU = Fit("Besiroglu et al. 2024", "refit of the same runs, arXiv 2404.10102", 1.8172, 482.01, 2085.43, 0.3478, 0.3658)
FITS = (HOFFMANN, BESIROGLU)


def beyond_the_fits(parameters: float, tokens: float) -> Iterator[str]:
    """Says what of a run lies outside the runs that were fitted."""
    for what, value, (least, most) in (("parameters", parameters, PARAMETERS_SEEN), ("tokens", tokens, TOKENS_SEEN)):
        if not least <= value <= most:
            yield f"{what} {'below' if value < least else 'above'} the fitted runs' {least:.3g} to {most:.3g}"
