"""What `make demo` does with the commands that it runs, and says at its end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from demo.__main__ import CommandFailed, last_screen, run
from pretrain.settings.config import load_recipe


@pytest.mark.parametrize(("code", "expected"), [("sys.exit(2)", 2), ("os.kill(os.getpid(), 9)", 137)])
def test_the_exit_code_of_a_failed_command_passes_through(code: str, expected: int):
    with pytest.raises(CommandFailed) as failure:
        run([sys.executable, "-c", f"import os, sys; {code}"])
    assert failure.value.exit_code == expected


def test_ctrl_c_waits_until_the_command_has_ended(tmp_path: Path):
    code = "import os, signal, sys; signal.signal(2, lambda *_: open(sys.argv[1], 'w').close()); os.kill(os.getppid(), 2)"
    with pytest.raises(KeyboardInterrupt):
        run([sys.executable, "-c", f"{code}; os.kill(os.getpid(), 2)", str(tmp_path / "saved")])
    assert (tmp_path / "saved").exists()


def test_the_last_screen_has_the_held_out_loss_and_the_times(tmp_path: Path):
    recipe = load_recipe("recipes/smoke.yaml", [f"run_dir={tmp_path}"])
    figures = {"held_out_loss": 4.0, "held_out_perplexity": 54.6, "steps": 700, "tokens": 716_800, "tokens_per_second": 3000.0}
    (tmp_path / "summary.json").write_text(json.dumps(figures))
    said = last_screen(recipe, "packs done before")
    assert "Held-out loss 4.000" in said and "Time: packs done before\n" in said
