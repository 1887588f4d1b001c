"""Each script and each notebook in examples/ runs on a CPU, without the network."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, run_command
from tests.forked_commands import forking

# Script that starts a new Python, as a user does.
STARTED = "minimal.py"


def code_of(path: Path) -> str:
    """Return the code of a script, or the cells of a notebook with code, in order."""
    if path.suffix == ".py":
        return path.read_text(encoding="utf-8")
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    return "\n".join("".join(cell["source"]) for cell in cells)


def run(path: Path, folder: Path) -> str:
    """Run an example as it says, and return its output.

    A script runs in the repository's root folder, with the command of its docstring. A notebook
    runs as a script where this project is installed. The commands of notebooks and all scripts but
    `STARTED` are forked, see tests/forked_commands.py.
    """
    code = code_of(path)
    forked = forking(ROOT)
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    environment |= {key: forked[key] for key in ("PYTHONPATH", "FORKED_COMMANDS")}
    if path.suffix == ".py":
        command = re.findall(r"\n\n    (.*python .*)\n\n", ast.get_docstring(ast.parse(code)))[0]
        if path.name != STARTED:
            environment["FORKED_SCRIPTS"] = path.name
            assert command.startswith("PYTHONPATH=. ")
            command = command.removeprefix("PYTHONPATH=. ")
    else:
        (folder / "example.py").write_text(code, encoding="utf-8")
        command = f"python {folder / 'example.py'}"
    search = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment |= {"HOME": str(folder), "PATH": search}
    done = run_command(command, shell=True, env=environment)
    assert "Warning" not in done.stderr
    return done.stdout


RESULTS = {
    "first_run.ipynb": "first-current-fp32 loss",
    "hf_trainer.py": "e4m3 tensor-scaled",
    "is_my_fp8_real.py": "with_pretrain: 45 products, 0 in FP8, 42 only with values of FP8",
    "minimal.py": "step 19  loss 0.",
}


@pytest.mark.parametrize(
    "name",
    [
        name if name == "hf_trainer.py" else pytest.param(name, marks=pytest.mark.nightly)
        for name in RESULTS
    ],
)
def test_an_example_runs_and_prints_its_result(name: str, tmp_path: Path):
    assert RESULTS[name] in run(ROOT / "examples" / name, tmp_path)
    examples = (ROOT / "examples").glob("*.[pi][yp]*")
    assert {path.name for path in examples} == RESULTS.keys()


# A GPT-2 that a CPU trains in seconds.
TINY = """
    model.config.n_layer=2 model.config.n_embd=64 model.config.n_head=2 data.length=64
    batch.tokens=512 batch.microbatch=4 train.steps=2 schedule.warmup=1 evaluate.packs=4
    evaluate.samples=[] data.held_out=0.1 fp8_config.on_unsupported=emulate
"""


@pytest.mark.nightly
def test_the_speedrun_answers_through_a_server(tmp_path: Path):
    text = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": f"{n} is less than {n + 1}. " * 9}) for n in range(100)]
    text.write_text("\n".join(lines))
    tokenizer = tmp_path / "tokenizer"
    command = ["-m", "pretrain", "tokenizer", text, "--vocabulary", "300", "--out", tokenizer]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    settings = [f"data.tokenizer={tokenizer}", f"data.packs={tmp_path / 'packs'}", *TINY.split()]
    search = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", ROOT / "examples/speedrun.sh", *settings],
        env=os.environ | {"PATH": search, "TEXT": str(text), "RUN": str(tmp_path / "run")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["usage"]["completion_tokens"] == 32
