r"""Commands for packs: train a tokenizer, prepare packs from text, show packs.

    python -m pretrain tokenizer my_text --vocabulary 8192 --out my_tokenizer
    python -m pretrain prepare recipes/smoke.yaml data.length=1024
    python -m pretrain prepare data.source=corpus.jsonl data.tokenizer=Qwen/Qwen3-0.6B \
        data.packs=packs/corpus
    python -m pretrain inspect packs/corpus --verify

Each function receives the parsed options of its command. `pretrain/settings/commands.py` defines
the options.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from foundation.errors import InputError
from foundation.progress import Progress, say
from packing.arrow import MANIFEST, ArrowPacks
from packing.chunks import Counts, read_chunk, require_documents
from packing.prepare import prepare, summary
from packing.records import PLAIN, WITHOUT_COLUMNS, TextTemplate, chat_columns
from packing.settings import DataSettings
from packing.sources import DatasetSource, FileSource, open_source, reading_settings
from packing.store import find_splits, notes_of, open_packs
from packing.tokenizer import save_tokenizer, train_tokenizer
from pretrain.settings.config import load_data

# Largest number of characters on which a tokenizer is trained. More characters need more memory and
# do not give better tokens.
_MOST_TEXT = 10**9


# ── tokenizer ─────────────────────────────────────────────────────────────────────────────────────


def tokenizer_command(options: argparse.Namespace) -> None:
    """Train a tokenizer on a source and save it in a new folder."""
    out = options.out
    # The data section needs `packs` and `tokenizer`, but their values are not used here.
    settings = load_data(
        [
            f"data.source={options.source}",
            f"data.packs={out}",
            f"data.tokenizer={out}",
            *options.settings,
        ]
    )
    if out.exists():
        raise InputError(
            f"--out {out}: this path already exists and is not overwritten; "
            "either choose another folder, or move this one away"
        )
    if settings.input_ids:
        raise InputError(
            "command line: a tokenizer is trained on text, not on token ids; "
            "set `data.text` to a column of text, or to a template of columns"
        )
    # `reading_settings` chooses the columns to read from all columns of the opened source.
    source = open_source(settings, WITHOUT_COLUMNS)
    settings = reading_settings(settings, source)
    if settings.messages:
        # The EOS token is empty, because a tokenizer does not learn the name of this token.
        source.rule = chat_columns(settings, PLAIN, (("eos_token", ""),))
    else:
        source.rule = TextTemplate.parse(settings.text)
    say(f"reading {source.description}")
    tokenizer = train_tokenizer(_texts(source, settings), options.vocabulary, options.special)
    save_tokenizer(tokenizer, out)
    size = tokenizer.get_vocab_size()
    print(f"{out}: byte-level BPE, {size:,} tokens")
    if size < options.vocabulary:
        print(f"The text has too few different words for {options.vocabulary:,} tokens.")


def _texts(source: FileSource | DatasetSource, settings: DataSettings) -> Iterator[str]:
    """Yield the texts of a source, until they have _MOST_TEXT characters.

    Raises InputError if the source, which `settings` name, has no text.
    """
    counts = Counts()
    with Progress("learning", "characters") as line:
        for chunk in source.chunks({}):
            documents, chunk_counts = read_chunk(chunk, source.rule)
            # The document of a chat is a pair: the text of the chat, and the spans of its answers.
            texts = [text if isinstance(text, str) else text[0] for text in documents]
            yield from texts
            counts += chunk_counts + Counts(documents=len(texts))
            line.update(sum(map(len, texts)))
            if line.n >= _MOST_TEXT:
                return
    require_documents(settings, counts)


# ── prepare ───────────────────────────────────────────────────────────────────────────────────────


def prepare_command(options: argparse.Namespace) -> None:
    """Prepare packs and print the folder of the packs."""
    settings = load_data(options.recipe)
    folder = prepare(settings, reports_existing=True)
    for note in notes_of(open_packs(settings, "train")):
        say(note)
    print(folder)


# ── inspect ───────────────────────────────────────────────────────────────────────────────────────


def inspect_command(options: argparse.Namespace) -> None:
    """Describe all packs at or below a path. With --verify, compare their files with hashes."""
    path = options.path
    token_dtype = None
    if path.suffix in (".yaml", ".yml", ".json") and path.is_file():
        settings = load_data([str(path), *options.overrides])
        path = settings.packs
        token_dtype = settings.token_dtype
    elif options.overrides:
        raise InputError(
            f"command line: {options.overrides[0]}: settings override a recipe, and {path} is no "
            "recipe; remove the settings, or name a recipe"
        )
    for folder in sorted(file.parent for file in path.rglob(MANIFEST)) or [path]:
        _describe(folder, token_dtype, options.verify)


def _describe(path: Path, token_dtype: str | None, verify: bool) -> None:
    """Describe the packs at `path`. With `verify`, compare their files with recorded hashes.

    `token_dtype` is the recipe's `data.token_dtype`.
    """
    openers = find_splits(path, None, token_dtype=token_dtype)
    splits = {split: open_split() for split, open_split in openers.items()}
    first = splits["train"]
    print(f"{path}: {type(first).__name__} of {first.length:,} tokens")
    recorded = ", ".join(
        f"{key} {value}" for key, value in (first.tokenizer or {}).items() if value is not None
    )
    print(f"  tokenizer            {recorded or 'not recorded in this format'}")
    for split, packs in splits.items():
        print(f"  {split:<20} {len(packs):,} packs, fingerprint {packs.fingerprint}")
        if verify:
            packs.verify()
            print("  verified             every file with a recorded hash is unchanged")
    for note in first.notes:
        print(f"  {note}")
    if isinstance(first, ArrowPacks):
        print(summary(first.manifest))
