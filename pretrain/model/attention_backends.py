"""Requirements of the attention backends, and the choice of the fastest one that can run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch

from pretrain.model import attention
from pretrain.model.scores import no_kernel_message, scores_obstacle
from pretrain.precision import transformer_engine
from pretrain.settings.recipe import Attention

# Mean document lengths up to which these backends are slower than our kernels. It is the mean over
# all tokens of the length of the token's document. On an H200, FlashAttention-4 took the same time
# within 2 % at 1,178 tokens. cuDNN took 15 to 30 % more at 1,854 tokens, and the same within 6 % at
# 4,096, where `varlen` took 34 to 57 % more
# (benchmarks/results/kernels/h200_triton_attention.json). No training was measured above 1,533
# tokens.
SLOWER_UP_TO = {"flash_attn": 1152, "cudnn": 2048, "varlen": 4096}


class Case(NamedTuple):
    """The device, the head size, the compute dtype and the scores of an attention.

    `capability` is the CUDA compute capability of a GPU that this machine does not have. It is
    assumed that the machine of this GPU has all packages of requirements-cuda.txt.
    """

    device_type: str
    head_dim: int
    dtype: torch.dtype
    capability: tuple[int, int] | None = None
    # Change of the model's scores in words, such as "capped scores". "" if they are not changed.
    changed_scores: str = ""

    @property
    def gpu(self) -> tuple[int, int]:
        """CUDA compute capability of the GPU."""
        return self.capability or torch.cuda.get_device_capability()


class Backend(NamedTuple):
    """Requirements of an attention backend.

    Attributes:
        name: transformers' `attn_implementation`.
        device: Type of the device, or None if the backend runs on any device.
        head_dims: Map each supported major compute capability to the supported head sizes. Only
            for CUDA devices.
        needs: `head_dims` in words.
        is_deterministic: False if the backend has no deterministic backward.
        unavailable_because: Return the reason why the backend cannot run here, or None.
    """

    name: str
    device: str | None
    head_dims: Mapping[int, Collection[int]] = {}
    needs: str = ""
    is_deterministic: bool = True
    unavailable_because: Callable[[], str | None] = lambda: None


def _flash_unavailable_because() -> str | None:
    try:
        attention.flash_kernels()
    except (ImportError, OSError, AttributeError) as error:
        return f"needs the package flash-attn-4 (pip install -r requirements-cuda.txt): {error}"
    return None


def _cudnn_unavailable_because() -> str | None:
    need = transformer_engine.unmet_need()
    return f"needs Transformer Engine: {need}" if need else None


# Major compute capabilities from Ampere on.
_SINCE_AMPERE = range(8, 100)
# The backend for each value of `model.attention`. `auto` takes the first one that can run, but
# tries `triton` before the first one that is slower (SLOWER_UP_TO). In transformers, `flash_attn`
# is called `packed_fa4`, because transformers loads its own kernels for names with "flash".
BACKENDS: dict[str, Backend] = {
    "triton": Backend(
        "packed_triton",
        "cuda",
        {9: (64, 128)},
        "an sm_90 GPU, and heads of 64 or 128 values",
    ),
    # The speed was measured on Hopper only. Smaller heads, and on data-centre Blackwell heads
    # between 128 and 256 values, have not been measured.
    "flash_attn": Backend(
        "packed_fa4",
        "cuda",
        {9: range(64, 257, 8), 10: (*range(64, 129, 8), 256)},
        "an sm_90 or sm_100 GPU, and heads of 64 to 256 values, a multiple of 8 (on sm_100 up to "
        "128, or 256)",
        unavailable_because=_flash_unavailable_because,
    ),
    # On an H200, cuDNN was always faster than `varlen` with these heads, but with heads of 96
    # values it took up to 2.8 times as long for documents of up to 2,000 tokens. With heads of 256
    # values, its gradients of queries were wrong by a third. On Hopper, the workspace of its
    # deterministic backward grows with the square of T.
    "cudnn": Backend(
        "packed_cudnn",
        "cuda",
        {9: (64, 128), 10: (64, 128)},
        "an sm_90 or sm_100 GPU, and heads of 64 or 128 values",
        is_deterministic=False,
        unavailable_because=_cudnn_unavailable_because,
    ),
    # torch's version of FlashAttention-2.
    "varlen": Backend(
        "packed_varlen",
        "cuda",
        dict.fromkeys(_SINCE_AMPERE, range(8, 257, 8)),
        "an sm_80 GPU or newer, and heads of at most 256 values, a multiple of 8",
    ),
    "documents": Backend("packed_documents", "cpu"),
    "sdpa": Backend("packed_sdpa", None),
}


class Choice(NamedTuple):
    """An attention backend and the reason for it, for the audit."""

    name: str  # transformers' `attn_implementation`
    reason: str


def refusal_of(requested: Attention, case: Case) -> str | None:
    """Return the message for a requested backend that cannot run, or None if it can run.

    "auto" can always run, except on a GPU without a kernel for caps or sinks.
    """
    if requested != "auto":
        if reason := obstacle(requested, case):
            return (
                f"model.attention: {requested} cannot be used here: {requested} {reason}; "
                "set model.attention: auto"
            )
    elif (
        case.changed_scores
        and case.device_type == "cuda"
        and (reason := obstacle("flash_attn", case))
    ):
        return no_kernel_message(case.changed_scores, reason)
    return None


def choose(requested: Attention, case: Case, mean_length: float) -> Choice:
    """Return the attention backend for a case and for documents of a mean length.

    Return the requested backend, which `refusal_of` has checked. If `requested` is "auto", return
    the fastest one that can run. The parity check at the start of a run tests the results of the
    backend.

    mean_length: mean over all tokens of the length of the token's document.
    """
    if requested != "auto":
        return Choice(BACKENDS[requested].name, "requested")
    names = [name for name in BACKENDS if name != "triton"]
    heads = BACKENDS["triton"].head_dims
    if case.device_type == "cuda" and case.head_dim in heads.get(case.gpu[0], ()):
        # A backend that is not in SLOWER_UP_TO is slower for documents of any length.
        is_slower = [mean_length <= SLOWER_UP_TO.get(name, mean_length) for name in names]
        names.insert(is_slower.index(True), "triton")
    # The reason for the choice, and then the obstacles of faster backends.
    reasons = ["fastest that runs here"]
    for name in names:
        reason = obstacle(name, case)
        if reason is None:
            break
        reasons.append(f"{name} {reason}")
    return Choice(BACKENDS[name].name, "; ".join(reasons))


def obstacle(name: str, case: Case) -> str | None:
    """Return the reason why a backend cannot run, with a remedy if there is one.

    Example: "needs a CPU, and the device is cuda". The caller puts the name of the backend before
    this text. Return None if the backend can run.

    name: the value of `model.attention`.
    """
    backend = BACKENDS[name]
    if case.changed_scores and (reason := scores_obstacle(backend.name, case)):
        return reason
    if backend.device not in (None, case.device_type):
        needed = "a CPU" if backend.device == "cpu" else "a CUDA device"
        return f"needs {needed}, and the device is {case.device_type}"
    if backend.device != "cuda":
        return None
    generation, minor = case.gpu
    if case.head_dim not in backend.head_dims.get(generation, ()):
        return (
            f"needs {backend.needs}; the GPU is sm_{generation}{minor}, and the model's heads have "
            f"{case.head_dim} values"
        )
    if case.dtype not in (torch.bfloat16, torch.float16):
        computed = str(case.dtype).removeprefix("torch.")
        return f"needs BF16, and the run computes in {computed} (set precision: bf16)"
    if torch.are_deterministic_algorithms_enabled() and not backend.is_deterministic:
        return "has no deterministic backward (set deterministic: false)"
    # This check is the last one, because the imports take seconds.
    return None if case.capability else backend.unavailable_because()
