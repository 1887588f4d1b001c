"""What several tests need: small packs that a model can learn from, and the launcher started as a user starts it."""

from __future__ import annotations

import atexit
import gc
import io
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import settings

from packing import pack_maker
from packing.arrow import Pack, PackWriter
from tests.moments import fork_context, start_server

# Two cores shared by several workers: how long one example takes says nothing.
# A suite that passed passes again: what is drawn is the same each time. `pytest --hypothesis-profile explore` draws anew.
settings.register_profile("explore", deadline=None)
settings.register_profile("shared machine", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("shared machine")

# Whoever starts the tests in the background, or under nohup, lets them ignore signals, and what they start would inherit that.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Collecting imports torch and all else that the tests need: a million objects that stay. Looking for garbage among them costs
# seconds then, and later a third of each small run.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-golden", action="store_true", help="write tests/golden/expected.json anew"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, then modules that start several processes: no worker then waits for them at the end."""

    def late(item: pytest.Item) -> tuple[bool, bool]:
        module = item.getparent(pytest.Module)
        return item.get_closest_marker("long") is None, module is None or module.get_closest_marker(
            "multi"
        ) is None

    items.sort(key=late)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    if session.items:  # none where workers run them
        start_server()


def pytest_configure(config: pytest.Config) -> None:
    """At the end neither pytest, which looks for garbage, nor Python takes apart all that was imported: of a worker's last three
    seconds nearly all. A worker's exit status says nothing; what is registered from here on runs before."""
    if hasattr(config, "workerinput"):
        atexit.register(os._exit, 0)
    else:
        atexit.register(gc.unfreeze)  # or Triton's library reports as leaked what it holds


ROOT = Path(__file__).resolve().parents[1]
PACK_LENGTH = 32
BLOCK_LENGTH = 128
VOCABULARY = 61


@pytest.fixture(scope="session", autouse=True)
def forked_tokenizers() -> Iterator[None]:
    """Processes that tokenise are forked, where it is this process that starts them: they spend nine tenths of their time in
    importing. Those of commands and runs in processes of their own are spawned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack_maker, "SPAWN", fork_context)
        yield


@pytest.fixture(scope="session")
def small_packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 training and 10 held-out packs of 32 tokens; each document counts upwards from a random token, which can be learnt."""
    return write_packs(tmp_path_factory.mktemp("packs") / "small", PACK_LENGTH)


@pytest.fixture(scope="session")
def block_packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in packs of 128 tokens, which every low-precision recipe can take. Documents have multiples of 8 tokens: on a CPU
    torch builds attention in BF16 anew for each length."""
    return write_packs(tmp_path_factory.mktemp("packs") / "block", BLOCK_LENGTH, multiple=8)


def write_packs(folder: Path, length: int, multiple: int = 1) -> Path:
    rng = np.random.default_rng(0)
    with PackWriter(folder, length) as writer:
        for split, count in (("train", 120), ("held_out", 10)):
            for _ in range(count):
                cuts = np.sort(rng.choice(np.arange(multiple, length, multiple), 3, replace=False))
                lengths = np.diff([0, *cuts, length])
                tokens = np.concatenate(
                    [(rng.integers(VOCABULARY) + np.arange(n)) % VOCABULARY for n in lengths]
                )
                writer.add(split, Pack(tokens.astype(np.uint32), lengths.astype(np.int32)))
        writer.finish(settings={}, statistics={}, tokenizer=None)
    return folder


@pytest.fixture
def low_precision_recipe(small_recipe: dict[str, Any], block_packs: Path) -> dict[str, Any]:
    """One whose every linear fits every recipe; emulated where the device has none of them."""
    config = small_recipe["model"]["config"] | {
        "vocab_size": 128,
        "hidden_size": 128,
        "intermediate_size": 256,
        "head_dim": 32,
    }
    return small_recipe | {
        "model": {
            "config": config | {"num_key_value_heads": 4, "max_position_embeddings": BLOCK_LENGTH}
        },
        "data": {"packs": str(block_packs), "length": BLOCK_LENGTH},
        "batch": {"tokens": 8 * BLOCK_LENGTH, "microbatch": 2},
        "precision": "current",
        "fp8_config": {"on_unsupported": "emulate"},
        "log": {"fp8_statistics": 5},
    }


@pytest.fixture
def small_recipe(recipe_for: Callable[[Path], dict[str, Any]], tmp_path: Path) -> dict[str, Any]:
    """A recipe that trains in seconds; a step is 8 packs."""
    return recipe_for(tmp_path / "run")


@pytest.fixture(scope="session")
def recipe_for(small_packs: Path) -> Callable[[Path], dict[str, Any]]:
    """`small_recipe` for any run folder, for runs that several tests look at."""
    return lambda run_dir: {
        "name": "small",
        "model": {
            "config": {
                "model_type": "qwen3",
                "vocab_size": VOCABULARY,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "max_position_embeddings": 64,
                "tie_word_embeddings": True,
            }
        },
        "data": {"packs": str(small_packs), "length": PACK_LENGTH},
        "batch": {"tokens": 8 * PACK_LENGTH, "microbatch": 2},
        "optimizer": {"learning_rate": 0.01},
        "schedule": {"kind": "cosine", "warmup": 2},
        "train": {"steps": 12},
        "evaluate": {"every": 5},
        "checkpoint": {"every": 4},
        "parity": False,
        "run_dir": str(run_dir),
    }


@pytest.fixture(scope="session")
def references() -> Path:
    """The folder of published packages that ours is compared with, which `make test` installs beside the environment and not into
    it: there, transformers would find them and load them into every run."""
    folder = Path(os.environ.get("REFERENCES", ROOT / ".venv" / "references"))
    if not folder.is_dir():
        pytest.skip(
            f"needs the packages of requirements-references.txt in {folder}: `make test` installs them"
        )
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(path)], capture_output=True
    ).returncode:
        pytest.skip("mounting a small file system needs root")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@dataclass(frozen=True)
class Finished:
    """What one start of the launcher came to."""

    status: int
    out: str
    err: str
    run_dir: Path

    @property
    def output(self) -> str:
        return self.out + self.err

    @property
    def refusal(self) -> str:
        """The message with which it refused, after checking that it refused as it should: status 2 and one message, on stderr."""
        assert self.status == 2, self
        assert self.err.count("error: ") == 1 and "Traceback" not in self.output, self
        assert self.out == "", self
        return self.err.partition("error: ")[2].rstrip("\n")

    def records(self) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()
        ]

    def steps(self) -> list[dict[str, Any]]:
        return [record for record in self.records() if "loss" in record]

    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps()]

    def audit(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "audit.json").read_text())


def write_recipe(recipe: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(yaml_of(recipe))
    return path


def yaml_of(values: dict[str, Any]) -> str:
    """As `yaml.safe_dump`, in a fifth of its time where there is libyaml."""
    return yaml.dump(values, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` with its bytes; the lock file left out."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def flip(path: Path, position: int = -1) -> None:
    """Change a bit of the byte at `position`."""
    data, before = bytearray(path.read_bytes()), path.stat().st_mtime_ns
    data[position] ^= 1
    path.write_bytes(data)
    # clocks of file systems tick slower than a test writes twice
    os.utime(path, ns=(before, before + 10**9))


def run_dir_of(recipe: dict[str, Any], arguments: tuple[str, ...]) -> Path:
    named = (
        argument.removeprefix("run_dir=")
        for argument in arguments
        if argument.startswith("run_dir=")
    )
    return Path(next(named, recipe["run_dir"]))


@pytest.fixture(scope="session")
def start_in_processes() -> Callable[..., Finished]:
    """Train `recipe`, written into `folder`, in processes of its own, which `accelerate launch` starts with the options `launch`
    where these are given; further keywords are environment variables."""

    def run(
        recipe: dict[str, Any],
        folder: Path,
        *arguments: str,
        launch: list[str] | None = None,
        **environment: str,
    ) -> Finished:
        accelerate = [] if launch is None else ["-m", "accelerate.commands.launch", *launch]
        command = [
            sys.executable,
            *accelerate,
            "train_accelerate.py",
            str(write_recipe(recipe, folder)),
            *arguments,
        ]
        clean = {
            key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")
        }
        environment = clean | {"OMP_NUM_THREADS": "1"} | environment
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        return Finished(done.returncode, done.stdout, done.stderr, run_dir_of(recipe, arguments))

    return run


@pytest.fixture(scope="session")
def start_as_ranks() -> Callable[..., Finished]:
    """As `start_in_processes` with these options of `accelerate launch`, in two forked `processes` by default; tests/ranks.py."""

    def run(
        recipe: dict[str, Any], folder: Path, *arguments: str, launch: list[str], **options: Any
    ) -> Finished:
        from tests.ranks import start_ranks

        ended = start_ranks(
            [str(write_recipe(recipe, folder)), *arguments], launch, folder, **options
        )
        return Finished(*ended, run_dir_of(recipe, arguments))

    return run


@pytest.fixture(scope="session")
def start_here() -> Callable[..., Finished]:
    """As `start_in_processes`, in this process and on its CPU. With "evaluate" among the arguments, that command of
    `python -m pretrain`. Of a small run in a process of its own, nine tenths are the import of torch."""
    import torch  # not above: tests of packing do without
    from accelerate.state import AcceleratorState

    import train_accelerate
    from pretrain import __main__ as pretrain

    def run(recipe: dict[str, Any], folder: Path, *settings: str) -> Finished:
        out, err, threads = io.StringIO(), io.StringIO(), torch.get_num_threads()
        arguments = [str(write_recipe(recipe, folder)), *settings]
        # where the launcher finds logging set up, as it is under pytest, it adds none
        warnings = logging.StreamHandler(err)
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "argv", ["train_accelerate.py", *arguments])
            # drawing takes longer than such a run
            patch.setattr(train_accelerate, "picture_of_run", lambda run: b"")
            patch.setenv("ACCELERATE_USE_CPU", "true")
            # accelerate keeps its state in the process
            AcceleratorState._reset_state(reset_partial_state=True)
            torch.set_num_threads(1)  # sums as in the processes that `start_in_processes` starts
            logging.getLogger().addHandler(warnings)
            try:
                if "evaluate" in arguments:
                    status = pretrain.main(
                        ["evaluate", *(each for each in arguments if each != "evaluate")]
                    )
                else:
                    status = train_accelerate.main()
            finally:
                logging.getLogger().removeHandler(warnings)
                torch.set_num_threads(threads)
                AcceleratorState._reset_state(reset_partial_state=True)
        if status == 0:
            # a run collects garbage at its end; what is left stays, and the next ones look through
            # it no more
            gc.freeze()
        return Finished(status, out.getvalue(), err.getvalue(), run_dir_of(recipe, settings))

    return run


@pytest.fixture
def train(
    start_in_processes: Callable[..., Finished], small_recipe: dict[str, Any], tmp_path: Path
) -> Callable[..., Finished]:
    """Run the launcher on a recipe, `small_recipe` if none is given, as a user starts it, and wait for its end."""
    return lambda *arguments, recipe=None, **options: start_in_processes(
        recipe or small_recipe, tmp_path, *arguments, **options
    )


@pytest.fixture
def train_here(
    start_here: Callable[..., Finished], small_recipe: dict[str, Any], tmp_path: Path
) -> Callable[..., Finished]:
    """As `train`, in this process."""
    return lambda *arguments, recipe=None: start_here(recipe or small_recipe, tmp_path, *arguments)


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer of 61 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("words")
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w60").save_pretrained(folder)
    return folder
