"""What follows a checkpoint of a trained model goes on as the run did: nothing of the weights with which it was built is left.

A model of a few steps does not show it, as its largest values are still those of its first weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from safetensors.torch import load_file

from pretrain.run.assembly import REHEARSALS
from tests.conftest import Finished
from tests.launcher.test_evaluation_run import said_of

SWITCH, LATER, LAST = 36, 40, 42


@pytest.fixture(scope="module")
def trained(start_here: Callable, recipe_for: Callable, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Finished]:
    """A run that went over to delayed scaling after step 36 and back after 40, and how to branch off after a step of it. Dropout
    makes all that draws random numbers count."""
    folder = tmp_path_factory.mktemp("trained")
    model = {
        "model_type": "gpt2",
        "vocab_size": 61,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 32,
        "attn_pdrop": 0.0,
    }
    recipe: dict[str, Any] = recipe_for(folder / "run") | {
        "model": {"config": model | {"resid_pdrop": 0.1, "embd_pdrop": 0.1}},
        "optimizer": {"learning_rate": 0.03},
        "schedule": {"kind": "constant"},
        "train": {"steps": LAST},
        "evaluate": {"every": LATER},
        "checkpoint": {"every": 4, "keep": 9, "at_end": True},
        "precision": [{"until": SWITCH, "use": "bf16"}, {"until": LATER, "use": "delayed"}, {"use": "bf16"}],
        "fp8_config": {"on_unsupported": "emulate"},
        "log": {"fp8_statistics": None},
        "batch": {"tokens": 256, "microbatch": 8},
        "parity": "off",
    }

    def started(*arguments: str, after: int | None = None, evaluates: bool = False) -> Finished:
        """The run itself; or a branch `after` a step, or an evaluation of what it was then."""
        origin = f"{folder}/run/checkpoints/step-{after:08}" if after else None
        begins = ["--eval-only", "--resume", origin] if evaluates else [f"train.begin_with={origin}"]
        run_dir = [f"run_dir={folder}/{len(list(folder.iterdir()))}", "checkpoint.every=null", "evaluate.every=null"]
        found = start_here(recipe, folder, *arguments, *([*begins, *run_dir] if after else []))
        assert found.status == 0, found.output
        return found

    started.run = started()
    return started


def steps(run: Finished) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each step."""
    return {record["step"]: (record["loss"], record["gradient_norm"]) for record in run.records() if "loss" in record}


def test_a_run_resumed_where_its_precision_changes_has_the_bits_of_the_unbroken_one(trained: Callable) -> None:
    """Though histories begin there with passes that draw random numbers."""
    whole, again = steps(trained.run), steps(trained(after=SWITCH))
    assert again == {step: whole[step] for step in range(SWITCH + 1, LAST + 1)}


def test_a_branch_goes_on_with_the_histories_of_the_precision_that_the_last_step_had(trained: Callable) -> None:
    """Where its own schedule changes there or nowhere. Those of a phase to come are of the weights before training."""
    whole = steps(trained.run)
    early = steps(trained("precision=delayed", after=SWITCH))
    assert all(early[step] == whole[step] for step in range(SWITCH + 1, LATER + 1))
    late = steps(trained("precision=[{until: 41, use: delayed}, {use: bf16}]", after=LATER))
    assert late[LATER + 1] == early[LATER + 1] != whole[LATER + 1]


@pytest.mark.parametrize("after", [SWITCH, LATER, LAST])
def test_an_evaluation_in_another_precision_than_the_last_steps_has_scales_of_the_weights(trained: Callable, after: int) -> None:
    found = said_of(trained("precision=delayed", after=after, evaluates=True))
    assert found["delayed"] == pytest.approx(found["bf16"], abs=0.02) and found["bf16"] < 1


@pytest.mark.parametrize("changed", ["fp8_config.fp8_format=E4M3", "batch.tokens=32"])
def test_gradients_of_other_size_or_to_another_largest_code_have_their_histories_anew(trained: Callable, changed: str) -> None:
    """Under the scales as they were those of the first step would be cut off. Inputs and weights are what they were."""
    branch = trained("precision=delayed", changed, "batch.microbatch=auto", after=LATER)
    key = changed.partition("=")[0]
    assert f"16 of 32 tensors of delayed scaling begin with packs under the checkpoint's weights: {key}: saved" in branch.out
    files = (branch.run_dir / "checkpoints" / f"step-{LAST:08}").glob("optimizer-*")
    histories = {name: each for file in files for name, each in load_file(file).items() if name.endswith("/amax_history")}
    entries = {"forward": REHEARSALS + LAST - SWITCH, "backward": REHEARSALS + LAST - LATER}
    assert len(histories) == 16
    for name, each in histories.items():  # of gradients the first may be missing: under a scale of one all round to zero
        assert 0 <= entries[name.split("/")[-2]] - (each[:, 0] > 0).sum() <= ("backward" in name), name
