"""Checkpoints on real file systems: exact, verified, never half, never lost."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from foundation.errors import InputError
from pretrain.checkpoint.checkpoint import Checkpoints, bytes_needed, check_space
from pretrain.checkpoint.folders import step_of
from pretrain.checkpoint.manifest import read_manifest


def tensors_of(step: int, rows: int = 40) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A small model and optimizer whose values tell the step they are of."""
    generator = torch.Generator().manual_seed(step)
    model = {
        "embed.weight": torch.randn(rows, 16, generator=generator).bfloat16(),
        "norm.weight": torch.randn(3, generator=generator).bfloat16(),  # an odd count of 2-byte values before wider ones
        "scale": torch.randn((), generator=generator),
    }
    optimizer = {f"exp_avg/{name}": torch.randn(tensor.shape, generator=generator) for name, tensor in model.items()}
    return model, optimizer


def blank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, 7) for name, tensor in tensors.items()}


def save(checkpoints: Checkpoints, step: int, rows: int = 40) -> Path:
    return checkpoints.save(step, *tensors_of(step, rows), {"step": step})


def assert_holds(path: Path, step: int, rows: int = 40) -> None:
    """The checkpoint at `path` verifies and holds exactly what was saved at `step`."""
    model, optimizer = tensors_of(step, rows)
    loaded_model, loaded_optimizer = blank(model), blank(optimizer)
    checkpoints = Checkpoints(path.parent, keep=1)
    notes = checkpoints.load(path, loaded_model, loaded_optimizer)
    assert checkpoints.read_state(path) == {"step": step}
    assert notes == []
    assert all(torch.equal(loaded_model[name], model[name]) for name in model)
    assert all(torch.equal(loaded_optimizer[name], optimizer[name]) for name in optimizer)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip_bit(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def test_what_was_saved_is_loaded_bit_for_bit(tmp_path):
    path = save(Checkpoints(tmp_path, keep=2), 100)
    assert names(tmp_path) == ["step-00000100"]
    assert names(path) == [
        "manifest.json",
        "model-00000-of-00001.safetensors",
        "optimizer-00000-of-00001.safetensors",
        "state.json",
    ]
    assert_holds(path, 100)


def test_a_one_process_model_file_is_plain_safetensors_under_the_parameter_names(tmp_path):
    path = save(Checkpoints(tmp_path, keep=2), 1)
    model, _ = tensors_of(1)
    loaded = load_file(path / "model-00000-of-00001.safetensors")
    assert loaded.keys() == model.keys()
    assert all(torch.equal(loaded[name], model[name]) for name in model)


def test_large_groups_are_split_into_parts_that_load_as_one(tmp_path):
    path = Checkpoints(tmp_path, keep=1, part_bytes=1000).save(3, *tensors_of(3), {"step": 3})
    assert len(list(path.glob("optimizer-00000-of-00001-part-*.safetensors"))) > 1
    assert_holds(path, 3)


def test_a_training_resumed_from_a_checkpoint_ends_with_the_same_weights_bit_for_bit(tmp_path):
    def trained(steps: range, resume: Path | None = None) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        moments = {}
        for name, parameter in model.named_parameters():
            state = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
            optimizer.state[parameter] = state
            moments |= {f"{key}/{name}": tensor for key, tensor in state.items()}
        if resume:
            Checkpoints(tmp_path, keep=1).load(resume, dict(model.named_parameters()), moments)
        for step in steps:
            data = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
            model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, moments

    straight, _ = trained(range(10))
    half, moments = trained(range(5))
    path = Checkpoints(tmp_path, keep=1).save(5, dict(half.named_parameters()), moments, {})
    resumed, _ = trained(range(5, 10), resume=path)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_weights_of_another_float_mode_are_converted_and_the_conversion_is_told(tmp_path):
    path = save(Checkpoints(tmp_path, keep=1), 1)
    model, optimizer = tensors_of(1)
    wanted = {name: torch.zeros(tensor.shape) for name, tensor in model.items()}
    notes = Checkpoints(tmp_path, keep=1).load(path, wanted, blank(optimizer))
    assert notes == ["model: 2 tensors converted from BF16 to F32"]
    assert all(torch.equal(wanted[name], model[name].float()) for name in model)


def test_tensors_that_do_not_fit_are_named_and_nothing_is_copied(tmp_path):
    path = save(Checkpoints(tmp_path, keep=1), 1)
    model, optimizer = tensors_of(1)
    wanted = blank(model)
    wanted["lm_head.weight"] = wanted.pop("norm.weight")
    wanted["embed.weight"] = torch.full((41, 16), 7.0)
    wanted["scale"] = torch.tensor(7)
    before = {name: tensor.clone() for name, tensor in wanted.items()}
    with pytest.raises(InputError) as error:
        Checkpoints(tmp_path, keep=1).load(path, wanted, blank(optimizer))
    for part in (
        str(path),
        "lacks lm_head.weight",
        "only the checkpoint has norm.weight",
        "[40, 16] there and [41, 16] here",
        "scale is F32 there and I64",
    ):
        assert part in str(error.value)
    assert all(torch.equal(wanted[name], before[name]) for name in wanted)


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: flip_bit(path / "model-00000-of-00001.safetensors", -1),
        lambda path: flip_bit(path / "state.json", 3),
        lambda path: flip_bit(path / "manifest.json", 200),
        lambda path: os.truncate(path / "optimizer-00000-of-00001.safetensors", 100),
        lambda path: (path / "optimizer-00000-of-00001.safetensors").unlink(),
        lambda path: (path / "manifest.json").unlink(),
        lambda path: (path / "manifest.json").write_text("[]"),
    ],
    ids=[
        "bit of a weight",
        "bit of the state",
        "bit of the manifest",
        "truncated",
        "missing file",
        "no manifest",
        "other manifest",
    ],
)
def test_a_damaged_newest_checkpoint_is_reported_kept_and_the_one_before_it_taken(tmp_path, caplog, harm):
    writer = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        newest = save(writer, step)
    harm(newest)
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.newest() == tmp_path / "step-00000002"
    assert list(checkpoints.damaged) == [newest]
    assert f"{newest} is DAMAGED" in caplog.text
    with pytest.raises(InputError, match="step-00000003"):
        checkpoints.load(newest, *map(blank, tensors_of(3)))

    save(checkpoints, 4)  # two intact ones are kept beside the damaged one
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]
    save(checkpoints, 5)
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000005"]


def test_a_damaged_checkpoint_is_set_aside_when_its_step_is_reached_again(tmp_path):
    save(Checkpoints(tmp_path, keep=3), 1)
    flip_bit(tmp_path / "step-00000001" / "model-00000-of-00001.safetensors", -1)
    checkpoints = Checkpoints(tmp_path, keep=3)
    assert checkpoints.newest() is None
    assert_holds(save(checkpoints, 1), 1)
    assert names(tmp_path) == ["step-00000001", "step-00000001.replaced-1"]


def test_pruning_keeps_the_newest_and_clears_what_dead_writers_left(tmp_path):
    (tmp_path / ".partial-step-00000009").mkdir()
    (tmp_path / ".removed-step-00000001").mkdir()
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (10, 20, 30):
        save(checkpoints, step)
    assert names(tmp_path) == ["step-00000020", "step-00000030"]


def test_a_checkpoint_moved_elsewhere_behind_a_link_is_kept_and_does_not_end_the_pruning(tmp_path):
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    checkpoints = Checkpoints(folder, keep=1)
    save(checkpoints, 1).rename(elsewhere)
    (folder / "step-00000001").symlink_to(elsewhere)
    for step in (2, 3, 4):
        save(checkpoints, step)
    assert names(folder) == ["step-00000004"] and (elsewhere / "manifest.json").exists()


def test_a_step_saved_again_to_be_spared_itself_lets_the_one_spared_before_it_go(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 10)
    for spared, left in ((10, ["step-00000010", "step-00000020"]), (20, ["step-00000020"])):
        checkpoints.save(20, *tensors_of(20, 40), {"step": 20}, spared=spared)
        assert names(tmp_path) == left


def test_the_last_checkpoint_before_the_decay_is_kept_however_old_it_becomes(tmp_path):
    def keeping(*steps: int) -> Checkpoints:
        checkpoints = Checkpoints(tmp_path, keep=1)
        checkpoints.early = lambda folders: {next(each for each in folders if step_of(each) <= last) for last in steps}
        return checkpoints

    checkpoints = keeping(25)
    for step in (10, 20, 30, 40):
        save(checkpoints, step)
    assert names(tmp_path) == ["step-00000020", "step-00000040"]
    save(keeping(25, 45), 50)  # the run was prolonged, so its decay begins later
    assert names(tmp_path) == ["step-00000020", "step-00000040", "step-00000050"]
    save(keeping(45), 60)
    assert names(tmp_path) == ["step-00000040", "step-00000060"]


def test_files_that_others_have_put_into_a_checkpoint_outlive_it(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path, keep=1)
    mine = save(checkpoints, 1) / "my_eval.json"
    mine.write_text("my results")
    newest = save(checkpoints, 2)
    kept = tmp_path / "step-00000001.replaced-1"
    assert names(tmp_path) == [kept.name, newest.name] and names(kept) == ["my_eval.json"]
    assert (kept / mine.name).read_text() == "my results" and f"is none of the run's: it is kept in {kept.name}" in caplog.text
    assert Checkpoints(tmp_path, keep=1).newest() == newest, "what is kept is taken for no checkpoint"


def test_a_resume_clears_what_dead_writers_left_before_it_trains(tmp_path):
    kept = save(Checkpoints(tmp_path, keep=2), 1)
    (tmp_path / ".partial-step-00000002").mkdir()
    (tmp_path / ".partial-step-00000002" / "model-00000-of-00001.safetensors").write_bytes(b"half")
    assert Checkpoints(tmp_path, keep=2).newest(look_only=True) == kept and len(names(tmp_path)) == 2
    assert Checkpoints(tmp_path, keep=2).newest() == kept and names(tmp_path) == [kept.name]


def test_going_back_to_an_earlier_step_sets_the_later_ones_aside_without_deleting_them(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=5)
    for step in (1, 2, 3):
        save(checkpoints, step)
    checkpoints.set_aside_newer(1)
    assert names(tmp_path) == ["step-00000001", "step-00000002.replaced-1", "step-00000003.replaced-1"]
    assert checkpoints.newest() == tmp_path / "step-00000001"


@pytest.mark.parametrize("trained_again", [True, False])
def test_of_two_checkpoints_of_a_step_the_one_that_is_taken_back_is_the_newest(trained_again, tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=5)
    save(checkpoints, 1)
    abandoned = save(checkpoints, 2)
    kept = (abandoned / "state.json").stat().st_ino
    [aside] = checkpoints.set_aside_newer(1)
    if trained_again:
        save(again := Checkpoints(tmp_path, keep=5), 1)
        save(again, 2)
    checkpoints = Checkpoints(tmp_path, keep=5)
    assert checkpoints.take_back(aside, 2) == checkpoints.current == abandoned == Checkpoints(tmp_path, keep=5).newest()
    assert (abandoned / "state.json").stat().st_ino == kept
    others = [name for name in names(tmp_path) if name.startswith("step-00000002.")]
    assert others == (["step-00000002.replaced-2"] if trained_again else []), "nothing that was saved is lost"


def test_a_checkpoint_whose_writer_died_just_before_naming_it_is_recovered(tmp_path):
    path = save(Checkpoints(tmp_path, keep=1), 5)
    path.rename(tmp_path / ".partial-step-00000005")
    assert Checkpoints(tmp_path, keep=1).newest() == path
    assert_holds(path, 5)


# Calls between which a process may die and leave something else behind.
FILE_CALLS = {"open", "write", "flush", "rename", "replace", "mkdir", "rmdir", "unlink"}


def _save_and_die(folder: Path, number: int) -> None:
    """Save step 3 and be killed just before the `number`-th of FILE_CALLS, in whichever thread it comes."""
    calls = itertools.count(1)

    def watch(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ in FILE_CALLS and next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    checkpoints = Checkpoints(folder, keep=2)
    threading.setprofile(watch)
    sys.setprofile(watch)
    save(checkpoints, 3, rows=2000)


def _left_behind(folder: Path) -> str:
    """How far the save of step 3 had come, by what lies in `folder`."""
    if (folder / "step-00000003").exists():
        if (folder / ".removed-step-00000001").exists():
            return "pruning"
        return "not pruned" if (folder / "step-00000001").exists() else "done"
    partial = folder / ".partial-step-00000003"
    if not partial.exists():
        return "not begun"
    whole = {path.name: path.stat().st_size for path in (folder / "step-00000002").iterdir()}
    found = {path.name: path.stat().st_size for path in partial.iterdir()}
    if any(0 < size < whole[name] for name, size in found.items() if name.endswith(".safetensors")):
        return "half a file"
    if "manifest.json" in found:
        return "not named" if found["manifest.json"] else "manifest begun"
    return f"{len(found)} of 4 files"


def test_a_save_killed_at_any_moment_leaves_an_intact_newest_checkpoint_and_no_half_one(tmp_path):
    before = tmp_path / "before"
    for step in (1, 2):
        save(Checkpoints(before, keep=2), step, rows=2000)
    stages, newest_steps, status = [], [], None
    for number in itertools.count(1):
        folder = shutil.copytree(before, tmp_path / str(number))
        writer = multiprocessing.get_context("fork").Process(target=_save_and_die, args=(folder, number))
        writer.start()
        writer.join()
        status = writer.exitcode
        stages.append(_left_behind(folder))
        for path in folder.glob("step-*"):
            assert_holds(path, int(path.name[5:]), rows=2000)
        survivor = Checkpoints(folder, keep=2)
        newest = survivor.newest()
        newest_steps.append(int(newest.name[5:]))
        assert_holds(newest, newest_steps[-1], rows=2000)
        save(survivor, 4, rows=2000)  # and the next save clears away what this one left
        assert names(folder) == [newest.name, "step-00000004"]
        shutil.rmtree(folder)
        if status != -signal.SIGKILL:
            break
    assert status == 0 and stages[-1] == "done"
    assert newest_steps == sorted(newest_steps) and set(newest_steps) == {2, 3}
    shown = {"not begun", "0 of 4 files", "half a file", "2 of 4 files", "3 of 4 files", "manifest begun", "not named"}
    assert set(stages) - {"1 of 4 files"} == shown | {"not pruned", "pruning", "done"}  # two threads may begin two files at once


def test_a_limit_of_a_files_size_is_said_with_what_raises_it_whatever_is_free(tmp_path):
    checkpoints, (soft, hard) = Checkpoints(tmp_path / "checkpoints", keep=2), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        with pytest.raises(InputError) as error:
            save(checkpoints, 3, 20_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in str(error.value) and "Raise `ulimit -f`, or move the run folder" in str(error.value)
    assert "free" not in str(error.value).lower()


def test_a_full_disk_is_one_message_and_leaves_the_previous_checkpoint_untouched(small_disk):
    folder = small_disk / "checkpoints"
    checkpoints = Checkpoints(folder, keep=2)
    rows = 20_000  # 640 kB of weights, 1.28 MB of moments: the third no longer fits
    for step in (1, 2):
        save(checkpoints, step, rows)
    with pytest.raises(InputError) as error:
        save(checkpoints, 3, rows)
    for part in (str(folder), "step 3", "No space left", "takes 3 MiB", "are free", "step-00000002 is untouched"):
        assert part in str(error.value)
    assert names(folder) == ["step-00000001", "step-00000002"]
    assert_holds(folder / "step-00000002", 2, rows)

    shutil.rmtree(folder / "step-00000001")  # the user makes room, and the same run can go on
    assert_holds(save(checkpoints, 3, rows), 3, rows)


def _save_under_a_file_size_limit(folder: Path, results: multiprocessing.SimpleQueue) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        save(Checkpoints(folder, keep=2), 2, rows=20_000)
    except InputError as error:
        results.put(str(error))


def test_a_file_system_that_refuses_large_files_is_reported_the_same_way(tmp_path):
    save(Checkpoints(tmp_path, keep=2), 1)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    writer = context.Process(target=_save_under_a_file_size_limit, args=(tmp_path, results))
    writer.start()
    writer.join()
    assert "File too large" in results.get()
    assert names(tmp_path) == ["step-00000001"]


def test_space_is_checked_against_the_bytes_a_checkpoint_really_takes(tmp_path):
    model, optimizer = tensors_of(1, rows=20_000)
    path = save(Checkpoints(tmp_path, keep=1), 1, rows=20_000)
    taken = sum(file.stat().st_size for file in path.iterdir())
    assert 0 <= bytes_needed(model, optimizer) - taken <= 2**20
    check_space(tmp_path / "not" / "there" / "yet", bytes_needed(model, optimizer))
    with pytest.raises(InputError, match=r"not/there/yet: checkpoints need .* are free"):
        check_space(tmp_path / "not" / "there" / "yet", 2**60)


def test_the_state_is_readable_without_the_tensors_and_a_folder_of_something_else_is_refused(tmp_path):
    path = save(Checkpoints(tmp_path, keep=1), 8)
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.read_state(path) == {"step": 8}
    assert read_manifest(path).step == 8
    with pytest.raises(InputError, match="not a complete checkpoint"):
        checkpoints.read_state(tmp_path)
    assert json.loads((path / "manifest.json").read_text())["world_size"] == 1


def test_a_step_just_saved_or_loaded_is_not_written_again(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    path = save(checkpoints, 4)
    resumed = Checkpoints(tmp_path, keep=1)
    resumed.load(resumed.newest(), *map(blank, tensors_of(4)))
    for same in (checkpoints, resumed):
        assert save(same, 4) == path
    assert names(tmp_path) == ["step-00000004"]


def test_a_run_that_starts_anew_in_an_old_folder_loses_neither_line(tmp_path):
    save(Checkpoints(tmp_path, keep=1), 4)
    anew = Checkpoints(tmp_path, keep=1)
    anew.newest()  # looked, but did not load
    save(anew, 4)
    assert names(tmp_path) == ["step-00000004", "step-00000004.replaced-1"]
