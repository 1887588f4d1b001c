"""What `make demo` says at its end."""

from __future__ import annotations

import json
from pathlib import Path

from demo.last_screen import last_screen
from demo.parts import Demo
from pretrain.settings.config import load_recipe


def test_the_last_screen_names_the_newest_checkpoint_that_counts_and_how_long_parts_took(tmp_path: Path):
    demo = Demo(load_recipe("recipes/smoke.yaml", [f"run_dir={tmp_path}"]))
    figures = {"held_out_loss": 4.0, "held_out_perplexity": 54.6, "steps": 700, "tokens": 716_800, "tokens_per_second": 3000.0}
    (tmp_path / "summary.json").write_text(json.dumps(figures))
    demo.sample.write_text("def f(): pass")
    seconds = {"Packs": None, "Training": 119.7}
    assert "checkpoint       none is kept\n" in last_screen(demo, seconds)
    for name in ("step-00000600", "step-00000700", "step-00000700.replaced-1"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    said = last_screen(demo, seconds)
    assert f"checkpoint       {tmp_path / 'checkpoints' / 'step-00000700'}\n" in said
    assert "Time: packs done before, training 2 m 00 s\n" in said
