"""`python -m packing`: prepare packs from text, look at packs, convert packs of other formats to ours.

    python -m packing tokenizer my_text --vocabulary 8192 --out my_tokenizer
    python -m packing prepare recipes/smoke.yaml data.length=1024
    python -m packing prepare --source corpus.jsonl --tokenizer Qwen/Qwen3-0.6B --out packs/corpus --length 4096
    python -m packing inspect packs/corpus --index 0
    python -m packing import ./multipacking --out packs/multipacking

Exit status: 0 done, 2 something given cannot be used (one message says what), 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from foundation.command import CommandParser, number, run_command
from foundation.errors import InputError, shown
from foundation.settings import Settings, given_once, load_with_bases, origin_in, parse, place_of, value_from_text
from packing.settings import DataSettings


class _Recipe(Settings):
    """What `prepare` reads of a recipe; the rest is the trainer's."""

    data: DataSettings


_IN_WORDS = {False: "no", True: "yes"}
# The settings of the data section that have a flag: what the help calls its value (None: a switch), and what it means.
_FLAGS = {
    "source": ("SOURCE", "file, folder or Hugging Face dataset"),
    "format": ("KIND", "auto, jsonl, parquet, text or dataset"),
    "subset": ("NAME", "Hugging Face datasets: the config's name"),
    "split": ("NAME", "Hugging Face datasets"),
    "revision": ("REVISION", "Hugging Face datasets: branch, tag or commit (the newest)"),
    "streaming": (None, "Hugging Face datasets: read without a download first"),
    "text": ("COLUMN", 'column, or a template such as "{title}\\n\\n{body}"'),
    "messages": ("COLUMN", "a chat instead of text: the column with its list of messages"),
    "prompt": ("COLUMN", "a chat of two messages: the column, or template, of what is asked"),
    "response": ("COLUMN", "the column, or template, of the answer"),
    "train_on": ("WHAT", "of a chat: response or all"),
    "chat_template": ("JINJA", "file or text of a chat template (the tokenizer's own)"),
    "input_ids": ("COLUMN", "tokens instead of text: the column with the ids of a source that is tokenized"),
    "labels": ("COLUMN", "of tokens: the column with the same ids, and -100 where there is no loss"),
    "document_lengths": ("COLUMN", "of tokens: the column with the lengths of a record's documents"),
    "tokenizer": ("TOKENIZER", "tokenizer.json, folder or hub name"),
    "length": ("N", "tokens of a pack"),
    "packing": ("HOW", "truncate or best_fit"),
    "positions": ("HOW", "restart or continue, for the rest of a cut document"),
    "add_bos": (None, "a BOS token before each document"),
    "add_eos": (None, "an EOS token after each document"),
    "shuffle": (None, "pack the documents in an order drawn from the seed"),
    "seed": ("N", "of the documents' order and of the held-out choice"),
    "held_out": ("SHARE", "documents set apart for evaluation"),
    "on_bad_line": ("HOW", "error or skip, for malformed records"),
    "processes": ("N", "default: one a core"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""

    def run() -> None:
        given = list(sys.argv[1:] if arguments is None else arguments)
        options = _parser(given[:1]).parse_intermixed_args(given[1:])  # so that key=value and files may follow an option
        options.run(options)

    return run_command(run, on_ctrl_c="interrupted; the same command goes on from here")


def _parser(name: Sequence[str]) -> CommandParser:
    """Returns the parser of the command called `name`, which is the first of the arguments if there is any."""
    parser = CommandParser(prog="python -m packing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made = {"tokenizer": _tokenizer_parser, "prepare": _prepare_parser, "inspect": _inspect_parser, "import": _import_parser}
    parser.add_argument("command", choices=made, metavar=" | ".join(made), help="COMMAND --help says more")
    command = parser.parse_args(name).command
    return made[command](f"{parser.prog} {command}")


def _tokenizer_parser(prog: str) -> CommandParser:
    text = "Learn a byte-level BPE tokenizer. Its end-of-text token, id 0, closes documents."
    tokenizer = CommandParser(prog=prog, description=text)
    tokenizer.add_argument("data.source", metavar="SOURCE", help=_FLAGS["source"][1])
    to_learn = "tokens to learn, all bytes included"
    tokenizer.add_argument("--vocabulary", type=number(1, whole=True), required=True, metavar="N", help=to_learn)
    tokenizer.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    tokenizer.add_argument(
        "--special", action="append", default=[], metavar="TOKEN", help="one more, as <|im_start|>; repeatable"
    )
    most = "bytes of text to learn from, from the beginning (1000000000)"
    tokenizer.add_argument("--most-bytes", type=number(1, whole=True), default=10**9, metavar="N", help=most)
    _add_flags(tokenizer, ("format", "subset", "split", "revision", "streaming", "text", "on_bad_line"))
    tokenizer.set_defaults(run=_tokenizer)
    return tokenizer


def _prepare_parser(prog: str) -> CommandParser:
    prepare = CommandParser(
        prog=prog,
        description="Tokenise text and pack it. Resumes where it stopped. A special token that a text spells out, such as a "
        "literal <|endoftext|>, becomes that token's id.",
    )
    prepare.add_argument("recipe", nargs="*", help="RECIPE.yaml, whose data section counts, then key=value to override it")
    prepare.add_argument("--out", dest="data.packs", metavar="FOLDER", help="where the packs go (data.packs)")
    _add_flags(prepare, _FLAGS)
    prepare.set_defaults(run=_prepare)
    return prepare


def _inspect_parser(prog: str) -> CommandParser:
    inspect = CommandParser(prog=prog, description="Show Arrow, MDS or token .bin packs.")
    inspect.add_argument("--index", type=number(0, whole=True), help="also show the text of this pack")
    inspect.add_argument("--split", choices=("train", "held_out"), default="train", help="where --index counts (default: train)")
    inspect.add_argument("--verify", action="store_true", help="hash every file again, also those that were found intact before")
    inspect.set_defaults(run=_inspect)
    return _of_packs(inspect)


def _import_parser(prog: str) -> CommandParser:
    convert = CommandParser(prog=prog, description="Convert MDS or token .bin packs to Arrow packs.")
    convert.add_argument("--out", type=Path, required=True)
    convert.set_defaults(run=_import)
    return _of_packs(convert)


def _of_packs(command: CommandParser) -> CommandParser:
    """Adds to `command` what names packs that are there; returns it."""
    command.add_argument("path", type=Path)
    command.add_argument("--tokenizer", help="tokenizer.json, folder or hub name (default: the one with the packs)")
    said = "tokens of a pack: for token .bin, which does not say"
    command.add_argument("--length", type=number(1, whole=True), help=said)
    command.add_argument("--end-token", type=number(0, whole=True), help="token .bin: the id that ends a document")
    return command


def _add_flags(command: argparse.ArgumentParser, names: Iterable[str]) -> None:
    for name in names:
        metavar, text = _FLAGS[name]
        shape = {"metavar": metavar} if metavar else {"action": argparse.BooleanOptionalAction}
        default = DataSettings.model_fields[name].default
        shown = "" if default is None else f" ({_IN_WORDS[default] if isinstance(default, bool) else default})"
        command.add_argument(f"--{name.replace('_', '-')}", dest=f"data.{name}", help=text + shown, **shape)


def _tokenizer(options: argparse.Namespace) -> None:
    from packing.vocabulary import make_tokenizer

    named = {"recipe": [], "data.packs": str(options.out), "data.tokenizer": str(options.out)}
    settings = _data_settings(argparse.Namespace(**vars(options) | named))
    given = {"special": options.special, "most_bytes": options.most_bytes}
    tokenizer = make_tokenizer(settings, options.out, options.vocabulary, **given)
    print(f"{options.out}: byte-level BPE, {tokenizer.get_vocab_size():,} tokens")


def _prepare(options: argparse.Namespace) -> None:
    settings = _data_settings(options)
    from packing.packer import prepare_stream
    from packing.prepare import prepare

    print((prepare_stream if settings.stream else prepare)(settings))


def _data_settings(options: argparse.Namespace) -> DataSettings:
    """Returns the settings of the data section: defaults, over them the recipe file, then key=value and the flags."""
    files = [text for text in options.recipe if "=" not in text or os.path.isfile(text)]  # Path's raises for a long value
    if len(files) > 1:
        raise InputError(f"command line: one recipe at a time, not {' and '.join(files)}")
    chain = load_with_bases(files[0]) if files else []
    data = _data_section(chain)
    flags = [(key, value) for key, value in vars(options).items() if key.startswith("data.") and value is not None]
    given = given_once([*(text.split("=", 1) for text in options.recipe if text not in files), *flags])
    for key, value in given.items():
        section, _, inside = key.partition(".")
        if section != "data" or not inside:
            file = f", and no file is called {shown(f'{key}={value}')}" if str(value).endswith((".yaml", ".yml")) else ""
            raise InputError(
                f"command line: {key}: prepare takes the keys of data only, as in data.length=1024 or data.seed=7{file}"
            )
        place, name = place_of({"data": data}, key)  # which may lie deeper, as data.validation.source
        place[name] = value if isinstance(value, bool) else value_from_text(_Recipe, key, value)
    if "packs" not in data:
        raise InputError(
            "command line: nothing says where the packs go; give a recipe with a data section, or --source, --tokenizer and --out"
        )

    return parse(_Recipe, {"data": data}, origin_in(chain, given)).data


def _data_section(chain: Sequence[tuple[Path, dict[str, Any]]]) -> dict[str, Any]:
    """Returns what a recipe and those that it is based on say of their data."""
    data = {}
    for path, own in chain:
        section = own.get("data") or {}
        if not isinstance(section, dict):
            raise InputError(f"{path}: `data`: a section of keys is wanted, the recipe holds {section!r}")
        data |= section
    return data


def _inspect(options: argparse.Namespace) -> None:
    from packing.inspection import decoded, describe, describe_stream, open_splits
    from packing.manifest import FIRST, MANIFEST, holds_packs, read_manifest

    kept = [each for pattern in (FIRST, f"*/{FIRST}") for each in options.path.glob(pattern) if holds_packs(each)]
    # A source that is prepared may be called so, too.
    if streams := sorted(each.parent for each in kept if "stream" in read_manifest(each)["statistics"]):
        if options.index is not None:
            part = next(streams[0].glob("part-*"), streams[0] / FIRST)
            raise InputError(f"{options.path}: is a stream of packs; name a part of it, as in {part} --index 0")
        for path in streams:
            print("\n".join(describe_stream(path, verify=options.verify)))
        return
    inside = () if (options.path / MANIFEST).is_file() else options.path.glob("*")
    sources = sorted(each for each in inside if holds_packs(each))
    if sources:
        if options.index is not None:
            raise InputError(f"{options.path}: holds the packs of several sources; name one, as in {sources[0]} --index 0")
        for path in sources:
            _inspect(argparse.Namespace(**vars(options) | {"path": path}))
        return
    splits = open_splits(options.path, options.length, options.end_token)
    print("\n".join(describe(options.path, splits)))
    if options.verify:
        for packs in splits.values():
            packs.verify()
        print("  verified        every file that has a recorded hash is as it was written")
    if options.index is None:
        return
    if options.split not in splits:
        raise InputError(f"{options.path}: has no {options.split} split")
    print("\n".join(decoded(splits[options.split], options.index, options.tokenizer)))


def _import(options: argparse.Namespace) -> None:
    from packing.inspection import import_packs

    given = {"length": options.length, "end_token": options.end_token, "tokenizer": options.tokenizer}
    manifest = import_packs(options.path, options.out, **given)
    numbers = manifest["statistics"]
    print(f"{options.out}: {numbers['packs']:,} packs of {manifest['length']:,} tokens, {numbers['fill']:.2%} filled")
    trained = numbers.get("trained_tokens")
    print(
        "  trained on    "
        + ("every token: nothing there says otherwise" if trained is None else f"{trained:,} tokens, by its labels")
    )


if __name__ == "__main__":
    sys.exit(main())
