"""Load tokenizers without a model library, and train byte-level BPE tokenizers.

A byte-level tokenizer decodes its tokens to exactly the text that was encoded.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import ByteLevelBPETokenizer, Tokenizer

from foundation.errors import InputError, as_input_error
from foundation.files import new_folder
from foundation.reading import load_object
from packing.settings import HUB_NAME, split_revision

REMEDY = "fetch the tokenizer again, or choose another tokenizer"
_CHOOSE = "set another tokenizer, or make one with `python -m pretrain tokenizer`"
_CONVERT = (
    "if there are vocab.json, merges.txt or a .model file instead, write tokenizer.json with "
    "transformers' `AutoTokenizer.from_pretrained('{}').save_pretrained(FOLDER)`"
)
# Files of a tokenizer in a hub repository.
_FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.*"]
# Usual names of special tokens, for a tokenizer whose files do not name the token.
_USUAL_NAMES = {
    "bos": ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]"),
    "eos": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]"),
    "pad": ("<|pad|>", "<pad>", "[PAD]"),
}
# Keys that may change when a tokenizer is saved. They do not change the ids that
# `encode(..., add_special_tokens=False)` returns.
_NOT_PART_OF_THE_FINGERPRINT = {"version", "truncation", "padding", "post_processor"}


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer and the ids of its special tokens.

    Do not change this object, because `load_tokenizer` returns the same object to all callers.
    """

    name: str
    tokenizer: Tokenizer
    # Ids of bos, eos and pad. Tokens that do not exist are missing.
    special: dict[str, int]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the token ids of a text.

        The hash does not depend on the formatting of tokenizer.json or on the order of its keys.
        Its computation takes a second for 150,000 tokens.
        """
        # Only some versions of the library write null fields.
        values = json.loads(self.tokenizer.to_str(), object_hook=_without_null_fields)
        content = {key: values[key] for key in values.keys() - _NOT_PART_OF_THE_FINGERPRINT}
        canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @cached_property
    def vocab_size(self) -> int:
        """Largest token id plus one. A model needs at least this number of embeddings."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def padding(self) -> int:
        """Token id that fills the rest of a pack."""
        return self.special.get("eos", self.special.get("pad", 0))

    @property
    def end_of_text(self) -> int:
        """Token id that ends a document. Raises InputError if there is none."""
        if "eos" not in self.special:
            raise InputError(
                f"data.tokenizer: {self.name} has no EOS token, with which documents end: "
                f"tokenizer.json lacks {', '.join(_names_of(self.name, 'eos')) or 'one'}; either "
                "set `eos_token` in its tokenizer_config.json to a token of tokenizer.json, or add "
                "a missing token with transformers' "
                f"`AutoTokenizer.from_pretrained('{self.name}').save_pretrained(FOLDER)`"
            )
        return self.special["eos"]

    def describe(self) -> dict[str, Any]:
        """Return the tokenizer's description, which is stored in the manifest of the packs."""
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "vocab_size": self.vocab_size,
            **{f"{role}_id": self.special.get(role) for role in _USUAL_NAMES},
        }


# A run loads its tokenizer several times, so two tokenizers are cached. Parsing a tokenizer of
# 150,000 tokens takes a second.
@lru_cache(maxsize=2)
def load_tokenizer(name: str) -> TextTokenizer:
    """Load a tokenizer from a tokenizer.json, a folder with one, or a hub model (`name@revision`).

    Raises InputError if the tokenizer cannot be found or read.
    """
    file = Path(name) if Path(name).is_file() else find_file(name, "tokenizer.json")
    if file is None:
        raise InputError(
            f"data.tokenizer: {name}: this tokenizer has no tokenizer.json; "
            f"{_CONVERT.format(name)}; otherwise {_CHOOSE}"
        )
    # The library raises a plain Exception for a file that it cannot use.
    with as_input_error(
        (Exception,),
        f"data.tokenizer: {file}: the tokenizer cannot be read",
        f"{_CONVERT.format(file.parent)}, or {REMEDY}",
    ):
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    special: dict[str, int] = {}
    for role in _USUAL_NAMES:
        with as_input_error(
            (TypeError, KeyError),
            f"data.tokenizer: {name}: `{role}_token` is not the text of a token",
            REMEDY,
        ):
            ids = [tokenizer.token_to_id(text) for text in _names_of(name, role)]
        if existing := [number for number in ids if number is not None]:
            special[role] = existing[0]
    return TextTokenizer(name, tokenizer, special)


def _names_of(tokenizer: str, role: str) -> Sequence[str]:
    """Return the possible texts of the special token `role` (bos, eos or pad) of a tokenizer.

    The first file that has the token's key determines the text. If its value is null, there is no
    such token. If no file has the key, return the usual texts, but a beginning-of-sequence token
    only if there is no file. A value of another type than in files of transformers is returned
    unchanged.
    """
    has_file = False
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = find_file(tokenizer, name)
        has_file |= file is not None
        values = load_object(file, REMEDY) if file else {}
        if f"{role}_token" in values:
            token = values[f"{role}_token"]
            if isinstance(token, dict):
                token = token["content"]
            return [token] if token else []
    return [] if has_file and role == "bos" else _USUAL_NAMES[role]


def find_file(tokenizer: str, name: str) -> Path | None:
    """Return the local path of the file `name` of a tokenizer, or None if it has no such file.

    `tokenizer` is a folder, the path of a tokenizer.json, or the name of a hub repository. Raises
    InputError if it does not exist.
    """
    path = Path(tokenizer)
    if path.exists():
        folder = path if path.is_dir() else path.parent
    elif HUB_NAME.fullmatch(split_revision(tokenizer)[0]):
        folder = _download(tokenizer)
    else:
        remedy = "run `make demo`, which trains it" if tokenizer.startswith("demo/") else _CHOOSE
        raise InputError(f"data.tokenizer: {path.absolute()} does not exist; {remedy}")
    file = folder / name
    return file if file.is_file() else None


@lru_cache(maxsize=2)
def _download(name: str) -> Path:
    """Download the tokenizer of a hub repository (`name@revision`), and return its folder.

    Without a network, return the folder of an earlier download.
    """
    from huggingface_hub import snapshot_download

    repository, revision = split_revision(name)
    with as_input_error(
        (OSError, ValueError),
        f"data.tokenizer: {Path(name).absolute()} does not exist, and {repository} cannot be "
        "loaded from the hub",
        _CHOOSE,
    ):
        return Path(snapshot_download(repository, revision=revision, allow_patterns=_FILES))


def _without_null_fields(value: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if item is not None}


# Token that ends every document, and fills packs.
END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(
    texts: Iterable[str], vocabulary: int, special: Sequence[str] = ()
) -> Tokenizer:
    """Train a tokenizer of `vocabulary` tokens on `texts`.

    The tokens are the end-of-text token (id 0), the tokens of `special`, the 256 bytes, and merges
    of bytes. The same texts in the same order give the same tokenizer. If there is little text, the
    tokenizer may have fewer tokens than `vocabulary`.
    """
    tokenizer = ByteLevelBPETokenizer()
    # Divide long texts, because the library needs about 100 bytes of memory for each byte. A piece
    # ends before a blank, where the pre-tokenizer of byte-level BPE always divides a text.
    pieces = r"(?s).{100000}.*?\S(?=[ \n])|.+"
    tokenizer.train_from_iterator(
        (piece for text in texts for piece in re.findall(pieces, text)),
        vocabulary,
        min_frequency=0,
        special_tokens=[END_OF_TEXT, *special],
        show_progress=False,
    )
    return Tokenizer.from_str(tokenizer.to_str())


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer into a new `folder`, in the form that AutoTokenizer loads.

    Raises InputError if the folder cannot be written. Then no partial folder is left.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        # Keep the spaces of "a , b". Otherwise this text is decoded as "a, b", which changes code.
        "clean_up_tokenization_spaces": False,
    }
    with (
        as_input_error(
            (OSError,),
            f"{folder}: the tokenizer cannot be written",
            "free disk space, or choose another folder",
        ),
        new_folder(folder) as writing,
    ):
        (writing / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        (writing / "tokenizer_config.json").write_text(
            json.dumps(config, indent=2) + "\n", encoding="utf-8"
        )
