"""With unexpected files or a full disk, no foreign file is overwritten, no checkpoint is lost."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from pretrain.__main__ import main
from tests.conftest import Trainer, contents
from tests.golden.runs import steps_logged, steps_saved
from tests.lab.made_runs import make_run
from tests.moments import Moment


def test_a_run_folder_that_is_somebody_elses_is_left_as_it_is(train_here: Trainer) -> None:
    folder = train_here.run_dir
    (folder / "final").mkdir(parents=True)
    (folder / "final" / "thesis.tex").write_text("years of work")
    (folder / "metrics.jsonl").write_text('{"mine": 1}\n')
    before = contents(folder)
    assert str(folder) in train_here().refusal and "run_dir" in train_here("--plan").refusal
    assert contents(folder) == before
    (empty := folder.parent / "made by hand").mkdir()
    assert train_here(f"run_dir={empty}", "train.begin_with=nowhere").refusal and empty.is_dir()


def test_a_report_is_written_over_itself_and_over_no_other_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(make_run(tmp_path / "runs" / run)) for run in ("one", "two")]
    page = tmp_path / "notes.html"
    page.write_text("<html>my thoughts</html>")
    assert main(["report", *runs, "--out", str(page)]) == 2
    assert page.name in capsys.readouterr().err
    assert page.read_text() == "<html>my thoughts</html>"
    page.unlink()
    for _ in range(2):
        assert main(["report", *runs, "--out", str(page)]) == 0, capsys.readouterr().err


def test_a_run_resumes_from_the_last_checkpoint_after_a_full_disk(
    small_disk: Path, train_here: Trainer
) -> None:
    run_dir = small_disk / "run"
    train_here.recipe |= {"run_dir": str(run_dir), "evaluate": {}}
    train_here.recipe["checkpoint"] = {"every": 2, "keep": 1}
    process = train_here.process(Moment("os.rename", r"/step-00000002$"))
    process.wait_until_it_waits()
    # A checkpoint is written in the background until the next one is due.
    process.wait_until(lambda: steps_logged(run_dir) == 4)
    with open(small_disk / "ballast", "wb", buffering=0) as ballast, suppress(OSError):
        while ballast.write(bytes(4096)):
            pass
    process.go_on()
    assert process.end() == 2, train_here.log
    assert "No space left on device" in train_here.log
    assert steps_saved(run_dir) == [2]
    (small_disk / "ballast").unlink()
    assert "step-00000002" in train_here().done().out
    assert steps_saved(run_dir) == [12] and (run_dir / "final" / "model.safetensors").is_file()


def test_a_disk_too_small_for_the_checkpoints_is_named_at_the_start(
    small_disk: Path, train_here: Trainer
) -> None:
    settings = ("checkpoint.keep=100", "checkpoint.every=1")
    message = train_here(f"run_dir={small_disk / 'run'}", *settings).refusal
    assert "`checkpoint.keep`" in message and str(small_disk) in message
