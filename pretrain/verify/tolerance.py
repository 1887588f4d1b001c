"""What each tensor's gradient may be off in a comparison, by what was measured: BF16's rounding, or noise in the weights.

A fixed tolerance would fit no model: how far rounding takes a gradient depends on how much cancels in it. So each tensor is held
to what it was off by itself where something known was done to the model, and to what others of its kind were.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import mean, median

from pretrain.verify.comparison import NEGLIGIBLE, TOTAL, Distance, TensorParity, typical_error

# How many times its measure a tensor may be off, by BF16's rounding (and in its norm) and by quantization. The median of healthy
# tensors is at 1; the worst that was seen, of a trained model in blocks of FP8, at 1.6. With 3 in place of 2.5 parity still finds
# every fault that is made on purpose in emulation.
LEEWAY, QUANTIZED_LEEWAY = 2.0, 2.5
FEW_VALUES = 9.0  # a scalar's draw may be this many times smaller than usual, one of n values n times less often
ON_A_LINE = 0.9  # cosine, at least, of a noisy gradient with itself that has one direction only
# Tokens that BF16's rounding may send to other experts by chance, though it sent none where it was measured, and how much of such
# a token's part in all other gradients changes with it. With four one of 48 small models that were right was stopped.
ROUTED_ELSEWHERE, CHANGED_BESIDE = 6, 1 / 3


class RoundingTolerance:
    """How far BF16 took each tensor: itself, those of its kind in all layers, and the median one. For a tensor of few values, or
    one that is small because much cancels in it, its own draw may be small by chance."""

    def __init__(self, noise: Mapping[str, Distance], resolution: float, tokens: float) -> None:
        """`noise`: of plain transformers in BF16 to itself in FP32, with the total. `resolution`: how coarsely what is judged
        rounds; 1.0 is BF16. `tokens`: that are compared."""
        self._noise, self._resolution = noise, resolution
        # A token that goes elsewhere takes its whole part from one gradient and adds as much to another. FP32 hardly sends any.
        self._routed = math.sqrt(2 * ROUTED_ELSEWHERE / max(tokens, 1)) if resolution == 1.0 else 0.0
        self._mixtures = mixtures_in(noise)
        self._typical = typical_error({name: each for name, each in noise.items() if name != TOTAL})
        squares: dict[str, list[float]] = defaultdict(list)
        for name, each in noise.items():
            if each.reference > NEGLIGIBLE * noise[TOTAL].reference:
                squares[_kind(name)].append(each.error**2)
        self._kinds = {kind: math.sqrt(mean(errors)) for kind, errors in squares.items()}

    def allow(self, name: str, each: Distance) -> TensorParity:
        """`each` of the tensor `name`, with what it may be."""
        own = self._noise.get(name, Distance(0.0, each.reference, 0.0))
        usual = max(self._typical, self._kinds.get(_kind(name), 0.0))
        apart = few(each) * LEEWAY * self._resolution * max(own.apart, usual * each.reference)
        if self._mixtures:
            changed = 1.0 if name.startswith(self._mixtures) else CHANGED_BESIDE
            apart = math.hypot(apart, changed * self._routed * each.reference)
        return _tensor(name, each, apart, self._noise[TOTAL].reference)


class NoiseTolerance:
    """What noise in the weights made of each kind of tensor, over all layers: in deep models some tensors of a layer are turned
    round by a draw and others hardly touched, and which ones is chance."""

    def __init__(self, draws: list[dict[str, Distance]]) -> None:
        """`draws`: of the path with noise to the same without it, each with the total."""
        self._total = draws[0][TOTAL].reference
        self._typical = median(typical_error({n: d for n, d in draw.items() if n != TOTAL}) for draw in draws)
        self._errors: dict[str, list[float]] = defaultdict(list)
        self._ratios: dict[str, list[float]] = defaultdict(list)
        self._cosines: dict[str, list[float]] = defaultdict(list)
        for draw in draws:
            for name, each in draw.items():
                if each.reference > NEGLIGIBLE * self._total:
                    self._errors[_kind(name)].append(each.error)
                    self._ratios[_kind(name)].append(each.measured / each.reference)
                    self._cosines[_kind(name)].append(abs(each.cosine or 0.0))
                else:
                    self._errors[name].append(each.error if each.reference else 0.0)

    def allow(self, name: str, each: Distance, own: float) -> TensorParity:
        """`each` of the tensor `name`, with what it may be; `own`: the relative error of the product that makes this gradient."""
        errors, ratios = self._errors[_kind(name)] + self._errors[name], self._ratios[_kind(name)]
        apart = QUANTIZED_LEEWAY * few(each) * math.hypot(max([self._typical, *errors]), own) * each.reference
        if not ratios:
            return _tensor(name, each, apart, self._total)
        # Noise turns a gradient of many values to a side and leaves its size. One that always points along the same line, as a
        # scalar's does, may become small: then it must only be there.
        on_a_line = apart > each.reference and min(self._cosines[_kind(name)]) > ON_A_LINE
        least = NEGLIGIBLE if on_a_line else min(ratios) / LEEWAY
        return _tensor(name, each, apart, self._total, least, max(ratios) * LEEWAY)


def mixtures_in(names: Iterable[str]) -> tuple[str, ...]:
    """What the names of parameters begin with that belong to a mixture of experts: each one's router and experts."""
    found = {name.partition(part)[0] for name in names for part in (".experts.", ".router.") if part in name}
    return tuple(f"{module}." for module in sorted(found))


def few(each: Distance) -> float:
    """Returns the factor by which a tensor of so many values may be off more than its draw: large for a scalar only."""
    return 1 + FEW_VALUES / each.values


def _kind(name: str) -> str:
    """What tensors of one name in all layers share."""
    return re.sub(r"\.\d+\.", ".", name)


def _tensor(name: str, each: Distance, apart: float, total: float, least: float = 0.0, largest: float = math.inf) -> TensorParity:
    """`apart`: the norm that the difference may have; `total`: of the whole reference gradient."""
    negligible = each.reference <= NEGLIGIBLE * total
    norm = max(each.reference, NEGLIGIBLE * total) or 1.0
    ratio = None if negligible else each.measured / norm
    tolerated = (apart + NEGLIGIBLE * total) / norm
    return TensorParity(name, each.apart / norm, tolerated, each.cosine, ratio, norm / (total or 1.0), least, largest)
