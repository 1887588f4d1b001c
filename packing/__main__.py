"""`python -m packing`: train a tokenizer, prepare packs from text, show packs.

    python -m packing tokenizer my_text --vocabulary 8192 --out my_tokenizer
    python -m packing prepare recipes/smoke.yaml data.length=1024
    python -m packing prepare data.source=corpus.jsonl data.tokenizer=Qwen/Qwen3-0.6B \
        data.packs=packs/corpus
    python -m packing follow my.yaml
    python -m packing inspect packs/corpus --index 0

Exit status: 0 done, 2 something given cannot be used (one message says what), 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from foundation.command import CommandParser, run_command
from foundation.errors import InputError
from foundation.progress import Progress, say
from foundation.reading import load_with_bases
from foundation.settings import Settings, parse, set_value, value_from_text
from packing.arrow import FIRST, MANIFEST, ArrowPacks, Packs, Split
from packing.chunks import Counts, read_chunk, require_documents
from packing.follow import follow
from packing.prepare import prepare, summary
from packing.records import TextTemplate
from packing.settings import DataSettings
from packing.sources import open_source
from packing.store import find_splits
from packing.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

# Most characters to train a tokenizer on. More take memory and do not make better tokens.
_MOST_TEXT = 10**9


class _Recipe(Settings):
    """The section of a recipe that these commands read."""

    UNKNOWN_KEY_HELP: ClassVar = "docs/coming_from.md has other trainers' names"

    data: DataSettings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""

    def run() -> None:
        options = _parser().parse_args(arguments)
        options.run(options)

    return run_command(run, on_ctrl_c="interrupted; the same command goes on from here")


def _parser() -> CommandParser:
    parser = CommandParser("python -m packing", __doc__)
    parser.remedy = (
        "settings are key=value before all options, as data.source=my_text; --help lists these"
    )
    commands = parser.add_subparsers(
        required=True, metavar="tokenizer | prepare | follow | inspect"
    )

    tokenizer = commands.add_parser(
        "tokenizer", help="train a byte-level BPE; its end-of-text token, id 0, ends documents"
    )
    tokenizer.add_argument("source", metavar="SOURCE", help="file, folder or Hugging Face dataset")
    tokenizer.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="keys of data, such as data.text=body"
    )
    tokenizer.add_argument(
        "--vocabulary", type=int, required=True, metavar="N", help="number of tokens, with bytes"
    )
    tokenizer.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    tokenizer.add_argument(
        "--special",
        action="append",
        default=[],
        metavar="TOKEN",
        help="such as <|im_start|>; repeatable",
    )
    tokenizer.set_defaults(run=_train_tokenizer)

    prepare = commands.add_parser(
        "prepare", help="tokenise and pack text; continues after an interruption"
    )
    prepare.add_argument(
        "recipe",
        nargs="*",
        help="RECIPE.yaml, of which the data section is read, then key=value over it",
    )
    prepare.set_defaults(run=_prepare)

    follow = commands.add_parser(
        "follow", help="pack a stream while a run trains on it (data.streaming)"
    )
    follow.add_argument("recipe", nargs="*", help="as for prepare")
    follow.add_argument(
        "--parent",
        type=int,
        metavar="PROCESS",
        help="end with this parent process instead of the run; the launcher sets it",
    )
    follow.set_defaults(run=_follow)

    inspect = commands.add_parser("inspect", help="describe Arrow, MDS or token .bin packs")
    inspect.add_argument("path", type=Path)
    inspect.add_argument("--index", type=int, help="also print the text of this training pack")
    inspect.add_argument(
        "--tokenizer", help="tokenizer.json, folder or hub name (the one with the packs)"
    )
    inspect.add_argument("--verify", action="store_true", help="hash every file again")
    inspect.set_defaults(run=_inspect)
    return parser


# ── tokenizer ─────────────────────────────────────────────────────────────────────────────────────


def _train_tokenizer(options: argparse.Namespace) -> None:
    """Train a tokenizer on a source and save it in a new folder."""
    out = options.out
    keys = [f"data.source={options.source}", f"data.packs={out}", f"data.tokenizer={out}"]
    settings = _data_settings([*keys, *options.settings])
    if out.exists():
        raise InputError(
            f"--out {out}: exists already and is never written over; "
            "name another folder or move it away"
        )
    if settings.messages or settings.input_ids:
        raise InputError(
            "command line: a tokenizer is trained on `data.text`; "
            "name a column of text, or a template of columns"
        )
    fixed = 257 + len(options.special)
    if options.vocabulary <= fixed:
        raise InputError(
            f"--vocabulary {options.vocabulary}: {fixed} are bytes, the end of a text and "
            "--special; set a larger number"
        )
    template = TextTemplate.parse(settings.text)
    source = open_source(settings, template)
    say(f"reading {source.description}")

    def texts() -> Iterator[str]:
        counts = Counts()
        with Progress("learning", "characters") as line:
            for chunk in source.chunks():
                texts, of_chunk = read_chunk(chunk, template, settings.on_bad_line == "skip")
                yield from texts
                counts += of_chunk + Counts(documents=len(texts))
                line.update(sum(map(len, texts)))
                if line.n >= _MOST_TEXT:
                    return
        require_documents(settings, counts)

    tokenizer = train_tokenizer(texts(), options.vocabulary, options.special)
    save_tokenizer(tokenizer, out)
    print(f"{out}: byte-level BPE, {tokenizer.get_vocab_size():,} tokens")


# ── prepare and follow ────────────────────────────────────────────────────────────────────────────


def _prepare(options: argparse.Namespace) -> None:
    """Prepare packs and print their folder."""
    print(prepare(_data_settings(options.recipe)))


def _follow(options: argparse.Namespace) -> None:
    """Make the parts of a stream until the run that reads it has ended."""
    settings = _data_settings(options.recipe)
    if settings.stream is None:
        raise InputError(
            "data.streaming: is not a mapping, so no packs are made while a run trains; set it, as "
            "in data.streaming.disk_gb=20, or use prepare"
        )
    prepare(settings)
    say(f"{settings.packs}: making parts ahead of the run that reads them")
    follow(settings, options.parent)
    say(f"{settings.packs}: the run has ended")


def _data_settings(arguments: Sequence[str]) -> DataSettings:
    """Return the settings of a recipe's data section with key=value arguments over them.

    The recipe is the first argument, unless that is a key=value too. Its data section is laid over
    those of its bases.
    """
    data: dict[str, Any] = {}
    recipe = None
    if arguments and "=" not in arguments[0]:
        recipe, *arguments = arguments
        if Path(recipe).is_dir():
            raise InputError(
                f"{recipe}: a folder; name a recipe, or data.source={recipe} with "
                "data.tokenizer=... and data.packs=..."
            )
        for path, content in load_with_bases(recipe):
            section = content.get("data") or {}
            if not isinstance(section, dict):
                raise InputError(
                    f"{path}: `data`: a section of keys is wanted, the recipe holds {section!r}"
                )
            data |= section
    for argument in arguments:
        key, _, value = argument.partition("=")
        if not key.startswith("data."):
            raise InputError(
                f"command line: {key}: prepare takes the keys of data only, as in data.length=1024"
            )
        set_value({"data": data}, key, value_from_text(_Recipe, key, value))
    return parse(_Recipe, {"data": data}, recipe or "command line").data


# ── inspect ───────────────────────────────────────────────────────────────────────────────────────


def _inspect(options: argparse.Namespace) -> None:
    """Describe packs, or all packs in a folder, and print the text of one."""
    path = options.path
    packs = None if options.index is None else _open_splits(path)["train"]
    is_single = (path / MANIFEST).is_file()
    inside = [] if is_single else sorted(file.parent for file in path.rglob(MANIFEST))
    for folder in inside or [path]:
        _describe(folder, options.verify)
    if packs is not None:
        _print_text(packs, options.index, options.tokenizer)


def _open_splits(path: Path) -> dict[Split, Packs]:
    """Return the splits of the packs at `path`. Raise InputError if there are no packs."""
    return {split: open_split() for split, open_split in find_splits(path, None).items()}


def _describe(path: Path, verify: bool) -> None:
    """Print lines that describe the packs at `path`."""
    splits = _open_splits(path)
    first = splits["train"]
    print(f"{path}: {type(first).__name__} of {first.length:,} tokens")
    tokenizer = first.tokenizer or {}
    recorded = ", ".join(f"{key} {value}" for key, value in tokenizer.items() if value is not None)
    print(f"  tokenizer            {recorded or 'not recorded in this format'}")
    for split, packs in splits.items():
        print(f"  {split:<20} {len(packs):,} packs, fingerprint {packs.fingerprint}")
        if verify:
            packs.verify()
            print("  verified             every file that has a recorded hash is as it was written")
    if isinstance(first, ArrowPacks):
        print(summary(first.manifest))


def _print_text(packs: Packs, index: int, tokenizer_name: str | None) -> None:
    """Print the text of each document of a pack, or its ids if there is no tokenizer."""
    if not 0 <= index < len(packs):
        raise InputError(f"--index {index}: {packs.path} has packs 0 to {len(packs) - 1}")
    files = [folder / "tokenizer.json" for folder in (packs.path, packs.path.parent / FIRST)]
    name = tokenizer_name or next((str(file) for file in files if file.is_file()), None)
    tokenizer = load_tokenizer(name).tokenizer if name else None

    def text_of(ids: np.ndarray) -> str:
        if tokenizer is None:
            return " ".join(map(str, ids))
        return tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    pack = packs[index]
    ends = np.cumsum(pack.lengths).tolist()
    for start, end in pairwise([0, *ends]):
        print(f"──── document at {start:,} · {end - start:,} tokens ".ljust(100, "─"))
        ids = pack.input_ids[start:end]
        print(text_of(ids))
        if pack.trained is not None:
            print(f"[trained on] {text_of(ids[pack.trained[start:end]])}")
    if ends[-1] < packs.length:
        print(f"──── padding · {packs.length - ends[-1]:,} tokens ".ljust(100, "─"))


if __name__ == "__main__":
    sys.exit(main())
