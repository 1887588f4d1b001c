"""Learns a tokenizer from a source of text: byte-level BPE, saved the way Hugging Face's AutoTokenizer loads it.

Byte-level means that every text can be encoded and comes back exactly, whatever characters it holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from foundation.errors import InputError
from foundation.progress import Progress, say
from packing.records import TextTemplate, read_chunk
from packing.settings import DataSettings
from packing.sources import open_source

END_OF_TEXT = "<|endoftext|>"  # closes every document, and pads
_BYTES = 256  # tokens that any text can be written with


def make_tokenizer(
    settings: DataSettings, folder: Path, vocabulary: int, *, special: Sequence[str] = (), most_bytes: int = 10**9
) -> Tokenizer:
    """Train a tokenizer on `settings.source` and save it in `folder`.

    The text is read from the beginning on, `most_bytes` of it at most: more does not make better words, and takes memory. Raises
    InputError where the source cannot be read, `folder` exists, or the vocabulary leaves no room for words.
    """
    if folder.exists():
        raise InputError(f"--out {folder}: exists already and is never written over; name another folder or move it away")
    if vocabulary <= (least := _BYTES + 1 + len(special)):
        raise InputError(f"--vocabulary {vocabulary}: {least} ids are bytes and special tokens; ask for more, 8192 say")
    template, done = TextTemplate.parse(settings.text), 0
    source = open_source(settings, template)
    say(f"reading {source.description}")

    def texts() -> Iterator[str]:
        nonlocal done
        with Progress("learning", "bytes", shown=True) as line:
            for chunk in source.chunks():
                for text in read_chunk(chunk, template, settings.on_bad_line == "skip")[0]:
                    yield text
                    done += len(text.encode())
                    if done >= most_bytes:
                        say(f"learnt from the first {done:,} bytes of text (--most-bytes); the rest is not read")
                        return
                line.update(done, chunk.progress)

    tokenizer = train_tokenizer(texts(), vocabulary, special)
    if not done:
        raise InputError(f"data.source: {settings.source}: no document with any text")
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
    """Write tokenizer.json and tokenizer_config.json into `folder`, which is made. Raises OSError."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,  # code is not prose: "a , b" must not come back as "a, b"
    }
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
