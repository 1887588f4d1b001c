"""A run whose precision is a schedule: the steps before the switch are the plain run's, those after it resume bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pretrain.compare.comparison import RunComparison
from pretrain.compare.page_differences import audits
from pretrain.metrics.run_record import read_run
from tests.conftest import Finished

SWITCH = 3  # steps before it


@pytest.fixture
def phase_recipe(small_recipe: dict[str, Any]) -> dict[str, Any]:
    changes = {"train": {"steps": 5}, "evaluate": {}, "checkpoint": {"every": 1, "keep": 9}, "weights": "bf16_exact"}
    return small_recipe | changes | {"batch": {"tokens": 128, "microbatch": 2}, "fp8_config": {"on_unsupported": "emulate"}}


@pytest.fixture
def one_layer(phase_recipe: dict[str, Any]) -> None:
    """For what is no matter of one layer or another."""
    phase_recipe["model"]["config"]["num_hidden_layers"] = 1


@pytest.fixture
def started(start_here: Callable[..., Finished], phase_recipe: dict[str, Any], tmp_path: Path) -> Callable[..., Finished]:
    def start(folder: str, *arguments: str) -> Finished:
        run = start_here(phase_recipe, tmp_path, f"run_dir={tmp_path / folder}", *arguments)
        assert run.status == 0, run.output
        return run

    return start


def saved(run: Finished, step: int) -> dict[str, torch.Tensor]:
    files = sorted((run.run_dir / "checkpoints" / f"step-{step:08}").glob("*.safetensors"))
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


@pytest.mark.usefixtures("one_layer")
@pytest.mark.parametrize(
    ("schedule", "before", "after", "resumed"),
    [
        ("[{until:0.6,use:delayed},{use:bf16}]", "delayed", "bf16", (2, 3, 4)),
        ("[{until: 3, use: bf16}, {use: delayed}]", "bf16", "delayed", (4,)),
        ("[{until: 3, use: mxfp8}, {use: delayed}]", "mxfp8", "delayed", (3,)),
    ],
)
def test_a_schedule_switches_once_and_resumes_before_at_and_after_the_switch(
    schedule: str, before: str, after: str, resumed: tuple[int, ...], started: Callable[..., Finished]
) -> None:
    plain, whole = started("plain", f"precision={before}", "train.steps=3"), started("whole", f"precision={schedule}")
    ours, theirs = saved(whole, SWITCH), saved(plain, SWITCH)
    alone = {name for name in ours if name not in theirs and name.startswith("fp8/")}  # of the phase to come
    assert whole.losses()[:SWITCH] == plain.losses()
    assert ours.keys() - alone == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)

    steps = [step["precision"] for step in whole.records() if "loss" in step]
    assert steps == [before] * SWITCH + [after] * (5 - SWITCH)
    assert whole.out.count(f"precision after step 3: {before}, then {after}, audited anew: ") == 1
    audit = json.loads((whole.run_dir / "audit.json").read_text())
    assert audit["phases"] == {"1": before, "4": after} and audit["effective"] == after
    for name, found in audit["precisions"].items():
        assert {each["effective"] for each in found["products"]} - {"bf16"} == {name} - {"bf16"}
        assert found.get("confirmed_in_step") == (None if name == "bf16" else 1 if name == before else SWITCH + 1)

    end = saved(whole, 5)
    for step in resumed:
        checkpoint = whole.run_dir / "checkpoints" / f"step-{step:08}"
        again = started(f"again-{step}", f"precision={schedule}", "--resume", str(checkpoint))
        assert again.losses() == whole.losses()[step:]
        found = json.loads((again.run_dir / "audit.json").read_text())
        for name, of_phase in audit["precisions"].items():
            assert found["precisions"][name].keys() == of_phase.keys(), name
            when = f"before the run's first step; its start from step {step} did not look again"
            assert found["precisions"][name]["parity"] == of_phase["parity"] | {"when": when}
            own = step + 1 if name == again.records()[0]["precision"] else SWITCH + 1 if name == after else 1
            assert found["precisions"][name].get("confirmed_in_step") == (None if name == "bf16" else own)
        assert found.keys() == audit.keys() and found["parity"] == found["precisions"][after]["parity"]
        last = saved(again, 5)
        assert last.keys() == end.keys() and all(torch.equal(last[name], end[name]) for name in end)


def test_a_run_with_a_schedule_is_named_and_read_by_it(started: Callable[..., Finished], tmp_path: Path) -> None:
    started(
        "runs/{name}-{precision}", "precision=[{until:4,use:nvfp4},{use:bf16}]", "fp8_config.keep_bf16=[layers.0.*, down_proj]"
    )
    record = read_run(tmp_path / "runs" / "small-nvfp4-to-4-then-bf16")
    card = (tmp_path / "runs" / "small-nvfp4-to-4-then-bf16" / "final" / "README.md").read_text()
    assert "(nvfp4), BF16 products with FP32 accumulation (bf16); emulated" in card
    assert record.precision == "nvfp4 to step 4, then bf16" and record.emulated
    products = record.audit["precisions"]["nvfp4"]["products"]
    kept = [each for each in products if (each["reason"] or "").startswith("keep_bf16: ")]
    assert len(kept) == 8 and {each["effective"] for each in kept} == {"bf16"}


@pytest.mark.usefixtures("one_layer")
def test_a_longer_run_goes_back_to_the_precision_of_its_share_and_says_so(started: Callable[..., Finished]) -> None:
    """With histories of the weights as they are: those of the phase before were forgotten at the switch."""
    schedule = "precision=[{until:0.6,use:delayed},{use:bf16}]"
    started("run", schedule)
    longer = started("run", schedule, "train.steps=10", "--accept-changes")
    said = "WARNING  after step 5 the checkpoint's `precision` was to be bf16; by the present schedule it is delayed, "
    assert said in longer.out
    assert longer.out.count("precision after step 5: bf16, then delayed, audited anew: ") == 1
    assert longer.out.count("precision after step 6: delayed, then bf16, audited anew: ") == 1
    steps = [step["precision"] for step in longer.records() if "loss" in step]
    assert steps == ["delayed"] * 3 + ["bf16"] * 2 + ["delayed"] + ["bf16"] * 4
    audit, record = json.loads((longer.run_dir / "audit.json").read_text()), read_run(longer.run_dir)
    assert audit["phases"] == {"1": "delayed", "4": "bf16", "6": "delayed", "7": "bf16"}
    ran = "delayed to step 3, then bf16 to step 5, then delayed to step 6, then bf16"
    assert record.precision == f"delayed to 60 %, then bf16 (ran {ran})" and record.emulated
    assert f"{record.precision}: FP8 products" in (longer.run_dir / "final" / "README.md").read_text()
    shown = audits(RunComparison.over([record]))
    assert [(each.label, each.asked, each.ran) for each in shown] == [
        (f"run, {steps}", name, name)
        for steps, name in (
            ("steps 1 to 3", "delayed"),
            ("steps 4 to 5", "bf16"),
            ("step 6", "delayed"),
            ("steps 7 to 10", "bf16"),
        )
    ]
    assert [each.rows.get("confirmed in step") for each in shown] == [None, None, "6", None]
    low, high = (" ".join(each.rows.values()) for each in shown[:2])
    assert "wgrad e5m2 tensor-scaled x e4m3" in low and "e4m3" not in high
    assert len({each.rows["weights"] + each.rows["parity"] for each in shown[1::2]}) == 1
    for line in ("steps 1 to 3 in delayed", "steps 4 to 5 in bf16", "steps 6 to 6 in delayed", "steps 7 to 10 in bf16"):
        assert line in longer.out


@pytest.mark.usefixtures("one_layer")
@pytest.mark.parametrize(("first", "then"), [("delayed", "bf16"), ("bf16", "delayed")])
def test_a_phase_that_begins_where_a_longer_run_goes_on_and_is_in_it_already_changes_nothing(
    first: str, then: str, started: Callable[..., Finished]
) -> None:
    """Neither is a precision told that the step before had left, nor are the histories begun anew."""
    schedule = f"precision=[{{until:0.6,use:{first}}},{{use:{then}}}]"
    started("run", schedule)
    longer = started("run", schedule, "train.steps=8", "--accept-changes")
    assert "precision after step" not in longer.out and "begin with packs under" not in longer.out
    assert [step["precision"] for step in longer.records() if "loss" in step] == [first] * 3 + [then] * 5
    assert json.loads((longer.run_dir / "audit.json").read_text())["phases"] == {"1": first, "4": then}
    alone = started("alone", f"precision={then}", "train.steps=3")
    asked = (f"precision=[{{until:3,use:{first}}},{{use:{then}}}]", "train.steps=5")
    branch = started("branch", *asked, f"train.begin_with={alone.run_dir}/checkpoints/step-00000003")
    assert "precision after step" not in branch.out and len(branch.losses()) == 2
    asked = (f"precision=[{{until:4,use:{first}}},{{use:{then}}}]", "train.steps=5", "--accept-changes")
    other = started("other", *asked, "--resume", f"{alone.run_dir}/checkpoints/step-00000003")
    said = [line.partition(", audited")[0] for line in other.out.splitlines() if line.startswith("precision after step")]
    assert said == [f"precision after step 3: {then}, then {first}", f"precision after step 4: {first}, then {then}"]


@pytest.mark.usefixtures("one_layer")
def test_a_phase_before_a_branch_begins_is_no_precision_of_it_and_the_plan_says_so(started: Callable[..., Finished]) -> None:
    trunk = started("trunk", "precision=bf16", "train.steps=3")
    asked = ("precision=[{until:2,use:nvfp4},{use:bf16}]", f"train.begin_with={trunk.run_dir}/checkpoints/step-00000003")
    said = "`precision`: phase 1 of 2, nvfp4 to step 2, never runs in this run: its first step is 4."
    plan = started("branch", *asked, "--plan")
    branch = started("branch", *asked)
    longer = started("branch", *asked, "train.steps=6", "--accept-changes")
    for run in (plan, branch, longer):
        assert said in " ".join(run.out.split()) and "small: bf16 compute, bf16_exact weights" in run.out
        assert "is emulated" not in run.output and f"steps 4 to {6 if run is longer else 5} in bf16" in run.out
    audit, record = json.loads((branch.run_dir / "audit.json").read_text()), read_run(branch.run_dir)
    assert audit["phases"] == {"4": "bf16"} and audit["schedule"] == "bf16"
    assert record.precision == "nvfp4 to step 2, then bf16 (ran bf16)"
    assert (record.backend, record.emulated) == ("torch", False)
    card = (branch.run_dir / "final" / "README.md").read_text()
    assert "| nvfp4 to step 2, then bf16 (ran bf16): BF16 products with FP32 accumulation |" in card


@pytest.mark.usefixtures("one_layer")
def test_a_precision_that_a_resume_has_changed_stays_recorded_for_the_steps_that_were_in_it(
    started: Callable[..., Finished],
) -> None:
    started("run", "precision=nvfp4", "train.steps=2")
    started("run", "precision=bf16", "train.steps=4", "--accept-changes")
    schedule = "precision=[{until:5,use:mxfp8},{use:bf16}]"
    last = started("run", schedule, "train.steps=6", "--accept-changes")
    audit, record = json.loads((last.run_dir / "audit.json").read_text()), read_run(last.run_dir)
    assert audit["phases"] == {"1": "nvfp4", "3": "bf16", "5": "mxfp8", "6": "bf16"}
    assert audit["precisions"].keys() == {"nvfp4", "bf16", "mxfp8"}
    assert audit["precisions"]["nvfp4"]["confirmed_in_step"] == 1
    assert {each["effective"] for each in audit["precisions"]["nvfp4"]["products"]} == {"nvfp4", "bf16"}
    assert record.emulated and record.precision.endswith(
        "(ran nvfp4 to step 2, then bf16 to step 4, then mxfp8 to step 5, then bf16)"
    )
    card = (last.run_dir / "final" / "README.md").read_text()
    assert all(f"({name})" in card for name in ("nvfp4", "mxfp8", "bf16"))
