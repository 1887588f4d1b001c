"""Predict the speed of a run at its start, and compare it with the speed of its first steps.

If the run is slower than predicted, the comparison names the largest cause that can be measured
without a profiler. It is made once, from the records of steps, and does not slow down any step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pretrain.metrics.run_record import Record, summary
from pretrain.plan.speed import Prediction, predict
from pretrain.run.job import Job

# The number of steps that are compared with the prediction, from the first step of a process on.
COMPARED = 20


def predict_phase(job: Job, step: int, attention: str) -> Prediction:
    """Return the predicted speed of a run in the precision of `step`, with a packed attention."""
    schedule = replace(job.plan.schedule, phases=[(None, job.plan.schedule.at(step))])
    return predict(replace(job.plan, schedule=schedule, attention=attention))


def line_about_attention(job: Job, step: int) -> str | None:
    """Return a line with the speed that a missing FlashAttention-4 would give, or None."""
    reason = job.attention.reason
    if "needs the package flash-attn-4" not in reason:
        return None
    speed = predict_phase(job, step, "packed_fa4").tokens_per_second
    if speed is None:
        return None
    return f"FlashAttention-4 would give {speed:,.0f} tokens/s; the attention is the {reason}"


def compare(
    prediction: Prediction, steps: Sequence[Record], graphs: str, processes: int, idle: float
) -> dict[str, Any]:
    """Return an event for metrics.jsonl that compares the speed of steps with its prediction.

    If the speed is lower than the bar of the prediction allows, `cause` is the cause that costs
    most of the time. Otherwise it is empty. The `text` is the line for the console.

    prediction: a prediction with a known speed.
    steps: the records of the first COMPARED steps of a process.
    graphs: the decision about CUDA graphs in audit.json.
    processes: the number of processes on the GPU.
    idle: the share of time in which the GPU computes nothing.
    """
    figures = summary(steps)
    measured, waiting = figures["tokens_per_second"], figures["data_wait_share"]
    ratio = measured * sum(prediction.parts.values()) / prediction.tokens
    cause = ""
    if ratio * (1 + (prediction.bar or 0)) < 1:
        # Each cause comes after the share of the time that it costs.
        _, cause = max(
            (waiting, f"{100 * waiting:.0f} % of the time waits for data"),
            (
                idle - waiting,
                f"the GPU is idle for {100 * (idle - waiting):.0f} % of the time, because the host "
                f"launches kernels too slowly (CUDA graphs {graphs})",
            ),
            (1 - ratio - max(idle, waiting), _cause_on_gpu(steps, processes)),
        )
    return {
        "step": steps[-1]["step"],
        "event": "speed",
        "predicted": prediction.tokens_per_second,
        "measured": measured,
        "ratio": ratio,
        "bar": prediction.bar,
        "basis": prediction.basis,
        "parts": dict(prediction.parts),
        "cause": cause,
        "text": f"speed: predicted {prediction.tokens_per_second:,.0f}, measured {measured:,.0f} "
        f"tokens/s ({round(100 * (ratio - 1)):+d} %){f': {cause}' if cause else ''}",
    }


def _cause_on_gpu(steps: Sequence[Record], processes: int) -> str:
    """Return the reason why a GPU that is not idle takes longer than predicted. See `compare`."""
    # Map each reason to a value that is true if it applies, for example to most steps.
    reasons = {
        "the GPU's memory is nearly full (memory_retries), so set a smaller `batch.microbatch`": (
            # The number of retries grows in most steps.
            len({step.get("memory_retries") for step in steps}) > COMPARED / 2
        ),
        "torch.compile compiles in most steps (recompiles)": (
            sum(step["recompiles"] > 0 for step in steps) > COMPARED / 2
        ),
        "`log.gap` or `log.fp8_statistics` measures most steps": (
            sum("gap/loss" in step or "fp8/underflow" in step for step in steps) > COMPARED / 2
        ),
        f"{processes} processes share the GPU": processes > 1,
        "the GPU computes slower than predicted, so compare it with `python -m pretrain doctor`": (
            True
        ),
    }
    return next(reason for reason, applies in reasons.items() if applies)
