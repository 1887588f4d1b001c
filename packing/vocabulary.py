"""Learns a tokenizer from a source of text: byte-level BPE, saved the way Hugging Face's AutoTokenizer loads it.

Byte-level means that every text can be encoded and comes back exactly, whatever characters it holds.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from foundation.errors import InputError
from foundation.files import remove_own_folder
from foundation.progress import Progress, say
from foundation.reading import reason_of, unusable_text
from packing.chunks import read_chunk
from packing.records import TextTemplate
from packing.settings import DataSettings
from packing.sources import open_source

END_OF_TEXT = "<|endoftext|>"  # closes every document, and pads
_BYTES = 256  # tokens that any text can be written with
_MOST = 2**24  # tokens: far more than any model has; the library takes memory for all at once
_UNFINISHED = ".unfinished"
_OWN = re.compile(r"tokenizer(_config)?\.json")  # what lies in an unfinished folder of ours


def make_tokenizer(
    settings: DataSettings, folder: Path, vocabulary: int, *, special: Sequence[str] = (), most_bytes: int = 10**9
) -> Tokenizer:
    """Train a tokenizer on `settings.source` and save it in `folder`, which appears whole or not at all.

    The text is read from the beginning on, `most_bytes` of it at most: more does not make better words, and takes memory. Raises
    InputError where the source cannot be read, `folder` exists or cannot be made, or the vocabulary leaves no room for words.
    """
    if folder.exists() or folder.is_symlink():
        raise InputError(f"--out {folder}: exists already and is never written over; name another folder or move it away")
    if vocabulary <= (least := _BYTES + 1 + len(special)):
        raise InputError(f"--vocabulary {vocabulary}: {least} ids are bytes and special tokens; ask for more, 8192 say")
    if vocabulary > _MOST:
        raise InputError(f"--vocabulary {vocabulary}: {_MOST:,} tokens are the most that can be learnt; ask for fewer, 8192 say")
    if END_OF_TEXT in special or len(set(special)) < len(special) or "" in special:
        raise InputError(f"--special: each is a text of its own, and {END_OF_TEXT} is there already")
    if unusable := next(filter(None, map(unusable_text, special)), None):
        raise InputError(f"--special: {unusable}; name a text")
    _make_unfinished(folder).rmdir()  # what hinders it is said before the text is read
    template, done = TextTemplate.parse(settings.text), 0
    source = open_source(settings, template)
    say(f"reading {source.description}")

    def texts() -> Iterator[str]:
        nonlocal done
        with Progress("learning", "bytes", shown=True) as line:
            for chunk in source.chunks():
                for text in read_chunk(chunk, template, settings.on_bad_line == "skip").documents:
                    yield text
                    done += len(text.encode())
                    if done >= most_bytes:
                        say(f"learnt from the first {done:,} bytes of text (--most-bytes); the rest is not read")
                        return
                line.update(done, chunk.progress)

    found = texts()
    if (first := next(found, None)) is None:
        raise InputError(f"data.source: {settings.source}: no document with any text")
    tokenizer = train_tokenizer(itertools.chain([first], found), vocabulary, special)
    save_tokenizer(tokenizer, folder)
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocabulary: int, special: Sequence[str] = ()) -> Tokenizer:
    """Learn `vocabulary` tokens from `texts`: the end-of-text token (id 0), those of `special`, the 256 bytes, and merges.

    The same texts in the same order give the same tokenizer. Few texts can give fewer tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, *special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # all bytes, seen or not
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json; `folder` appears whole or not at all. Raises InputError."""
    unfinished = _make_unfinished(folder)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,  # code is not prose: "a , b" must not come back as "a, b"
    }
    try:
        (unfinished / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        (unfinished / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(folder)
    except OSError as error:
        raise InputError(
            f"--out {folder}: cannot be written: {reason_of(error)}; put that right, or name another folder"
        ) from None


def _make_unfinished(folder: Path) -> Path:
    """An empty folder beside `folder`, in place of what a killed process has left there. InputError for somebody else's."""
    unfinished = folder.with_name(folder.name + _UNFINISHED)
    try:
        remove_own_folder(unfinished, _OWN)
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"--out {folder}: cannot be made: {reason_of(error)}; name another folder") from None
    return unfinished
