"""Test command lines: a mistake is one message, and --help does not import torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.__main__ import COMMANDS, main
from pretrain.settings import commands


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistyped_option_is_one_line_and_exit_status_2(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--bogus"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: command line: ")
    assert "--help" in message
    assert message.count("\n") == 1


UNKNOWN = {
    "train my.yaml --learning_rate 1e-3": "did you mean optimizer.learning_rate=VALUE?",
    "train my.yaml --max_steps 10 --bf16": "did you mean train.steps=VALUE?",
    "train my.yaml --bf16 --plan": "did you mean precision=VALUE?",
    "train my.yaml --resume_from_checkpoint auto": "did you mean --resume?",
    "train my.yaml --dry-run=true": "did you mean --plan?",
    "train my.yaml --num_processes=2": "did you mean --processes?",
    "train my.yaml --resume_from_checkpoint=auto": "did you mean --resume?",
    "train my.yaml --gradient_accumulation_steps 4": "did you mean batch.tokens=VALUE?",
    "train my.yaml --mixed_precision fp8": "did you mean precision=VALUE?",
    "train my.yaml --precision mxfp8": "did you mean precision=VALUE?",
    "train my.yaml --dry-run": "did you mean --plan?",
    "train my.yaml --acept-changes": "did you mean --accept-changes?",
    "plan my.yaml --lr 1": "did you mean optimizer.learning_rate=VALUE?",
    "tokenizer my_text --vocab_size 4000 --output tok": "did you mean --vocabulary?",
    "tokenizer my_text --vocab 4000 --output tok": "did you mean --out?",
    "export runs/x --output=y": "did you mean --out?",
    "matrix my.yaml --dryrun": "did you mean --dry-run?",
    "train --data my_text --steps 10": "did you mean data.source=VALUE?",
    "train my.yaml --steps 10": "did you mean train.steps=VALUE?",
    "plan my.yaml --model gpt2": "did you mean model.source=VALUE?",
    "train my.yaml --optimizer muon": "did you mean optimizer.name=VALUE?",
    "train my.yaml --lora_r=8": (
        "LoRA and other adapters are out of scope, because this launcher trains all weights"
    ),
    "train my.yaml --deepspeed ds.json": (
        "DeepSpeed is not supported; to shard the model, use `--config zero` or `--config fsdp2`"
    ),
    "train my.yaml --eval_tasks hellaswag": (
        "to score a trained model in tasks, use `lm_eval` (docs/serving.md)"
    ),
}


@pytest.mark.parametrize(
    ("name", "command"),
    [("trian", "train"), ("evalute", "evaluate"), ("samples", "sample"), ("inspct", "inspect")],
)
def test_a_mistyped_command_is_answered_with_ours(
    name: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "my.yaml"]) == 2
    assert f"unknown command '{name}'; did you mean {command}?\n" in capsys.readouterr().err
    assert main(["generate"]) == 2
    assert "unknown command 'generate'\n" in capsys.readouterr().err


@pytest.mark.parametrize("line", UNKNOWN)
def test_an_unknown_option_is_answered_with_ours(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if required arguments are missing, and before files are read."""
    assert main(line.split()) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: command line: unknown option --")
    assert message.endswith(f"; {UNKNOWN[line]}\n")


@pytest.mark.parametrize(
    ("line", "end"),
    [
        ("report runs/a --margin=-1", "--margin: -1 is not a number above 0; "),
        ("which my.yaml --hours 0", "--hours: 0 is not a number above 0; "),
        ("which my.yaml --margin x", "--margin: x is not a number above 0; "),
        ("matrix", "required: matrix; "),
        ("sample", "required: FOLDER, PROMPT; "),
    ],
)
def test_a_mistake_in_a_value_is_found_before_files_are_read(
    line: str, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    assert end in capsys.readouterr().err


def test_arguments_after_two_dashes_are_no_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "nowhere", "--", "--prompts-like-this"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_an_option_named_like_a_recipe_key_stays_an_option() -> None:
    line = ["my.yaml", "--run_dir=folder", "--optimizer.learning_rate=1", "--weights=bf16"]
    options = commands.read("which", line)
    assert options.run_dir == Path("folder")
    assert options.overrides == ["optimizer.learning_rate=1", "weights=bf16"]


def test_help_and_mistakes_do_not_import_torch() -> None:
    code = """
import contextlib, sys
from pretrain.__main__ import COMMANDS, main
for command in COMMANDS:
    with contextlib.suppress(SystemExit):
        main([command, "--help"])
    main([command, "--bogus"])
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") == len(COMMANDS), done.stderr


def test_a_command_ends_quietly_if_nobody_reads_its_output() -> None:
    """A shell reports 141 for other programs too, which end by SIGPIPE."""
    reading_end, stdout = os.pipe()
    os.close(reading_end)
    for argument in ("--help", "--version"):
        command = [sys.executable, "-m", "pretrain", argument]
        ended = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE)
        assert (ended.returncode, ended.stderr) == (141, b"")
    os.close(stdout)


def test_a_command_runs_without_stdout(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pretrain", "inspect", str(tmp_path)]
    ended = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], capture_output=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith(b"error: ") and b"Traceback" not in ended.stderr
