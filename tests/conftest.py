"""Shared fixtures: small packs that a model can learn from, and starters of the launcher."""

from __future__ import annotations

import atexit
import functools
import gc
import io
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import settings

from foundation import storage
from packing import arrow, workers
from packing.arrow import Pack
from tests.moments import ForkedWorker, LauncherProcess, Moment, start_server
from tests.object_storage import Server, running_server

# No deadlines: the workers share two cores, so the time of one example means nothing. Examples are
# the same in every run. `pytest --hypothesis-profile explore` draws new ones.
settings.register_profile("explore", deadline=None)
settings.register_profile("shared machine", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("shared machine")

# Tests started in the background or under nohup ignore signals, and their child processes would
# inherit that.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Collection imports torch and creates a million objects that stay. Garbage collection among them
# takes seconds during collection, and later a third of each small run.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-golden", action="store_true", help="overwrite tests/golden/expected.json"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long tests first, then modules that start several processes.

    No worker then waits for such a test at the end.
    """

    def order(item: pytest.Item) -> tuple[bool, bool]:
        module = item.getparent(pytest.Module)
        is_long = item.get_closest_marker("long") is not None
        is_multi = module is not None and module.get_closest_marker("multi") is not None
        return not is_long, not is_multi

    items.sort(key=order)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    if session.items:  # Empty if workers of pytest-xdist run the tests.
        start_server()


def pytest_configure(config: pytest.Config) -> None:
    """Exit workers without the garbage collection of pytest and Python, which takes three seconds.

    Nobody reads the exit status of a worker. Exit handlers that are registered later run earlier.
    """
    if hasattr(config, "workerinput"):
        atexit.register(os._exit, 0)
    else:
        # Otherwise Triton's library reports its objects as leaked.
        atexit.register(gc.unfreeze)


ROOT = Path(__file__).resolve().parents[1]
PACK_LENGTH = 32
BLOCK_LENGTH = 128
VOCABULARY = 61


@pytest.fixture(scope="session", autouse=True)
def forked_tokenizers() -> Iterator[None]:
    """Fork the tokenizing processes of this process instead of starting Python in each.

    New processes spend nine tenths of their time importing. Commands and runs in separate processes
    still start them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "start_worker", ForkedWorker)
        yield


@pytest.fixture(scope="session")
def small_packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 training and 10 held-out packs of 32 tokens.

    Every document counts upwards from a random token, so a model can learn it.
    """
    return write_packs(tmp_path_factory.mktemp("packs") / "small", PACK_LENGTH)


@pytest.fixture(scope="session")
def block_packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same documents in packs of 128 tokens, a length that every low precision supports.

    Documents have multiples of 8 tokens, because torch on a CPU builds BF16 attention anew for
    every length.
    """
    return write_packs(tmp_path_factory.mktemp("packs") / "block", BLOCK_LENGTH, multiple=8)


def write_packs(folder: Path, length: int, multiple: int = 1) -> Path:
    """Write packs of `length` tokens whose documents have a multiple of `multiple` tokens."""
    rng = np.random.default_rng(0)
    splits = {}
    for split, count in (("train", 120), ("held_out", 10)):
        packs = []
        for _ in range(count):
            cuts = np.sort(rng.choice(np.arange(multiple, length, multiple), 3, replace=False))
            lengths = np.diff([0, *cuts, length])
            tokens = np.concatenate(
                [(rng.integers(VOCABULARY) + np.arange(n)) % VOCABULARY for n in lengths]
            )
            packs.append(Pack(tokens.astype(np.uint32), lengths.astype(np.int32)))
        splits[split] = [packs]
    arrow.write_packs(folder, length, splits, settings={}, statistics={}, tokenizer=None)
    return folder


def in_low_precision(recipe: dict[str, Any], packs: Path) -> dict[str, Any]:
    """Return a recipe whose linears and `packs` of 128 tokens fit every precision, emulated."""
    sizes = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    sizes |= {"num_key_value_heads": 4, "max_position_embeddings": BLOCK_LENGTH}
    return recipe | {
        "model": {"config": recipe["model"]["config"] | sizes},
        "data": {"packs": str(packs), "length": BLOCK_LENGTH},
        "batch": {"tokens": 8 * BLOCK_LENGTH, "microbatch": 2},
        "precision": "current",
        "fp8_config": {"on_unsupported": "emulate"},
        "log": {"fp8_statistics": 5},
    }


@pytest.fixture
def low_precision_recipe(small_recipe: dict[str, Any], block_packs: Path) -> dict[str, Any]:
    return in_low_precision(small_recipe, block_packs)


@pytest.fixture
def small_recipe(recipe_for: Callable[[Path], dict[str, Any]], tmp_path: Path) -> dict[str, Any]:
    """Recipe that trains in seconds. A step has two microbatches of 4 packs."""
    return recipe_for(tmp_path / "run")


@pytest.fixture(scope="session")
def recipe_for(small_packs: Path) -> Callable[[Path], dict[str, Any]]:
    """Function that returns `small_recipe` for a run folder, for runs that several tests share."""
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
        "batch": {"tokens": 8 * PACK_LENGTH, "microbatch": 4},
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
    """Folder of the published packages with which ours are compared.

    `make test` installs them outside the environment. In the environment, transformers would find
    them and load them into every run.
    """
    folder = Path(os.environ.get("REFERENCES", ROOT / ".venv" / "references"))
    if not folder.is_dir():
        pytest.skip(
            f"needs the packages of requirements-references.txt in {folder}. "
            "`make test` installs them."
        )
    return folder


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Server]:
    """S3 server in this process, whose clients share the description of S3 that botocore reads.

    Each test has a new client. Reading the description takes most of its time.
    """
    with pytest.MonkeyPatch.context() as patch, running_server() as server:
        from botocore import session

        patch.setattr(session, "create_loader", functools.cache(session.create_loader))
        yield server


@pytest.fixture
def bucket(s3_server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """Address of an empty bucket on `s3_server`. Copies are in this test's folder."""
    import s3fs

    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(storage, "COPIES", tmp_path / "copies")
    s3fs.S3FileSystem.clear_instance_cache()
    name = f"bucket-{secrets.token_hex(4)}"
    s3fs.S3FileSystem().mkdir(name)
    s3_server.requests.clear()
    yield f"s3://{name}"
    s3_server.fault = lambda method, path: None
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Folder on a file system of 6 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@dataclass(frozen=True)
class Finished:
    """Exit status, output and run folder of one start of the launcher."""

    status: int
    out: str
    err: str
    run_dir: Path

    @property
    def output(self) -> str:
        return self.out + self.err

    def done(self) -> Finished:
        """Assert that the run has ended with status 0, and return it."""
        assert self.status == 0, self.output
        return self

    @property
    def refusal(self) -> str:
        """Error message of a refused run. Asserts status 2 and exactly one message, on stderr."""
        assert self.status == 2, self
        assert self.err.count("error: ") == 1, self
        assert "Traceback" not in self.output, self
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


def run_command(
    command: Sequence[str] | str, status: int = 0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository's root folder, and check its exit status."""
    captured = {"cwd": ROOT, "capture_output": True, "text": True}
    done = subprocess.run(command, **captured | options)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def write_recipe(recipe: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(yaml_of(recipe))
    return path


def yaml_of(values: dict[str, Any]) -> str:
    """Do the work of `yaml.safe_dump`, with libyaml in a fifth of its time."""
    return yaml.dump(values, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper))


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below `folder` except the lock file."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def flip(path: Path, position: int = -1) -> None:
    """Change a bit of the byte at `position`."""
    data = bytearray(path.read_bytes())
    modified = path.stat().st_mtime_ns
    data[position] ^= 1
    path.write_bytes(data)
    # Clocks of file systems tick more slowly than a test writes.
    os.utime(path, ns=(modified, modified + 10**9))


def run_dir_of(recipe: dict[str, Any], arguments: tuple[str, ...]) -> Path:
    """Return the run folder, which a command-line argument may override."""
    overrides = dict(argument.partition("=")[::2] for argument in arguments)
    return Path(overrides.get("run_dir", recipe["run_dir"]))


def call_here(main: Callable[[], int], run_dir: Path = Path()) -> Finished:
    """Call `main` in this process, on its CPU. Its output is not printed."""
    import torch  # Imported late, because tests of packing do not need it.
    from accelerate.state import AcceleratorState

    out = io.StringIO()
    err = io.StringIO()
    threads = torch.get_num_threads()
    thresholds = gc.get_threshold()
    # The launcher adds no handler if logging is set up, as it is under pytest.
    warnings = logging.StreamHandler(err)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("ACCELERATE_USE_CPU", "true")
        # accelerate keeps its state in the process.
        AcceleratorState._reset_state(reset_partial_state=True)
        # Sum in the same order as processes of a launcher.
        torch.set_num_threads(1)
        logging.getLogger().addHandler(warnings)
        try:
            status = main()
        finally:
            logging.getLogger().removeHandler(warnings)
            torch.set_num_threads(threads)
            gc.set_threshold(*thresholds)
            AcceleratorState._reset_state(reset_partial_state=True)
    return Finished(status, out.getvalue(), err.getvalue(), run_dir)


def command_here(*arguments: object) -> Finished:
    """Run `python -m pretrain` with `arguments` in this process."""
    from pretrain.__main__ import main

    return call_here(lambda: main([*map(str, arguments)]))


@pytest.fixture(scope="session")
def start_here() -> Callable[..., Finished]:
    """Function that writes `recipe` into `folder` and trains it in this process, on its CPU.

    A small run in a separate process spends nine tenths of its time importing torch. With
    "evaluate" among the arguments, the function runs `python -m pretrain evaluate`. With the name
    of an Accelerate configuration as `topology`, it trains in forked ranks, see tests/ranks.py.
    `launch` are further options of `accelerate launch`.
    """
    import train_accelerate  # imported late, like torch
    from pretrain import __main__ as pretrain

    def run(
        recipe: dict[str, Any],
        folder: Path,
        *settings: str,
        topology: str | None = None,
        launch: Sequence[str] = ("--mixed_precision", "no"),
        **options: Any,
    ) -> Finished:
        arguments = [str(write_recipe(recipe, folder)), *settings]
        run_dir = run_dir_of(recipe, settings)
        if topology:
            from tests.ranks import start_ranks

            launch = ["--config_file", f"accelerate_configs/{topology}.yaml", *launch]
            return Finished(*start_ranks(arguments, launch, folder, **options), run_dir)
        if "evaluate" in arguments:
            arguments.remove("evaluate")
            return call_here(lambda: pretrain.main(["evaluate", *arguments]), run_dir)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["train_accelerate.py", *arguments])
            finished = call_here(train_accelerate.main, run_dir)
        if finished.status == 0:
            # A run collects its garbage at the end. Exclude the remaining objects from later
            # collections.
            gc.freeze()
        return finished

    return run


@pytest.fixture
def train(small_recipe: dict[str, Any], tmp_path: Path) -> Callable[..., Finished]:
    """Function that trains as a user does, by `accelerate launch` with the options `launch`."""

    def run(
        *arguments: str,
        launch: list[str],
        recipe: dict[str, Any] = small_recipe,
        env: Mapping[str, str] | None = None,
    ) -> Finished:
        script = ["train_accelerate.py", str(write_recipe(recipe, tmp_path)), *arguments]
        command = [sys.executable, "-m", "accelerate.commands.launch", *launch, *script]
        if not env:
            # Variables of Accelerate would change the launch.
            names = [name for name in os.environ if not name.startswith("ACCELERATE")]
            env = {name: os.environ[name] for name in names}
        env = {"OMP_NUM_THREADS": "1", **env}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        return Finished(done.returncode, done.stdout, done.stderr, run_dir_of(recipe, arguments))

    return run


@dataclass
class Trainer:
    """Function that trains in this process, on `recipe` or another recipe. See `start_here`.

    `recipe` is `small_recipe`, unless a test file has changed it.
    """

    start: Callable[..., Finished]
    recipe: dict[str, Any]
    folder: Path

    @property
    def run_dir(self) -> Path:
        return Path(self.recipe["run_dir"])

    @property
    def log(self) -> str:
        """Output of all processes."""
        return (self.folder / "log").read_text()

    def process(
        self, *moments: Moment, arguments: Sequence[str] = (), **environment: str
    ) -> LauncherProcess:
        """Start a process that trains `recipe`."""
        arguments = [str(write_recipe(self.recipe, self.folder)), *arguments]
        return LauncherProcess(arguments, self.folder / "log", *moments, **environment)

    def __call__(
        self, *arguments: str, recipe: dict[str, Any] | None = None, **options: Any
    ) -> Finished:
        return self.start(recipe or self.recipe, self.folder, *arguments, **options)


@pytest.fixture
def train_here(
    start_here: Callable[..., Finished], small_recipe: dict[str, Any], tmp_path: Path
) -> Trainer:
    return Trainer(start_here, small_recipe, tmp_path)


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tokenizer with 61 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("words")
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w60").save_pretrained(folder)
    return folder
