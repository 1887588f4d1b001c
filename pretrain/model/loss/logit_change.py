"""Changes of the logits after the LM head: a factor (Granite, Cohere) and a cap (Gemma 2).

A model with a change computes the loss of z instead of the logits x:

    z = factor x                        without a cap
    z = cap tanh(factor x / cap)        with a cap

If the head is called without labels, it returns x, and the code of transformers changes it. With
labels, `LossHead` changes the logits in FP32 and computes the loss. The operands of the head's
products, which may be quantized, do not contain the change in forward. In backward, the gradient of
the logits is that of x.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor
from transformers import PretrainedConfig

from foundation.errors import InputError

# Keys of transformers' configurations. The logits are multiplied by the value of a key in FACTORS,
# divided by that of a key in DIVISORS, and capped at that of a key in CAPS.
FACTORS = ("logit_scale", "lm_head_multiplier")
DIVISORS = ("logits_scaling",)
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# Types of models that multiply logits by the values of DIVISORS instead of dividing them.
MULTIPLY_BY_DIVISORS = ("hyperclovax",)


class LogitChange(NamedTuple):
    """The factor and the cap of a model's logits. A cap of 0.0 means that there is no cap."""

    factor: float = 1.0
    cap: float = 0.0

    @classmethod
    def of(cls, config: PretrainedConfig) -> LogitChange:
        """Return the change that a configuration sets.

        Raise InputError if a value is not positive.
        """
        values = {}
        for key in (*FACTORS, *DIVISORS, *CAPS):
            # The code of a model reads no keys that its configuration does not declare.
            if not hasattr(type(config), key):
                continue
            value = getattr(config, key)
            # A cap may be null. A factor may be null only if null is the default, because all other
            # models would multiply by null.
            if value is None and (key in CAPS or getattr(type(config), key) is None):
                continue
            if value is None or not 0 < value < math.inf:
                value = "null" if value is None else value
                raise InputError(
                    f"`model.config.{key}: {value}` must be a positive number; set another value"
                )
            values[key] = float(value)
        factor = 1.0
        for key in values.keys() - {*CAPS}:
            divides = key in DIVISORS and config.model_type not in MULTIPLY_BY_DIVISORS
            factor *= 1 / values[key] if divides else values[key]
        return cls(factor, next((values[key] for key in CAPS if key in values), 0.0))

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the changed logits. Without a change, this is the tensor `logits` itself."""
        if self.factor != 1:
            logits = logits * self.factor
        if self.cap:
            logits = (logits / self.cap).tanh() * self.cap
        return logits

    def slopes(self, changed: Tensor) -> Tensor | float:
        """Return the derivative of each changed logit with respect to the original logit."""
        if not self.cap:
            return self.factor
        return self.factor * (1 - (changed / self.cap).square())


UNCHANGED = LogitChange()
