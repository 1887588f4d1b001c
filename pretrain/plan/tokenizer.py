"""The tokenizer behind a run's packs: what a model from scratch takes from it, whether it is the model's own, and the object that
reads prompts and goes into the exported folder.

What `model.config` of a model from scratch leaves open of vocab_size, eos_token_id, bos_token_id and pad_token_id is taken from
the tokenizer, so that the exported model has no unused embeddings and `generate` stops at the token that ended the documents.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from transformers import (
    AutoTokenizer,
    BatchEncoding,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from foundation.errors import InputError
from foundation.reading import one_line
from packing.records import CHAT_TEMPLATE, chat_template
from packing.settings import DataSettings, split_revision
from packing.store import training_parts
from packing.tokenizer import load_tokenizer as load_text_tokenizer
from pretrain.model.huggingface import load_config
from pretrain.settings.recipe import ModelSettings

# of a vocabulary from scratch: products with the head are fastest so, and every precision takes
# them
VOCABULARY_MULTIPLE = 128
ROLES = {"eos": "EOS", "bos": "BOS", "pad": "padding"}


class Data(Protocol):
    """Open packs (`pretrain.run.data.Data`), as far as the tokenizer depends on them."""

    @property
    def tokenizer(self) -> Mapping[str, Any]:
        """Return what the packs record about their tokenizer."""

    def beside(self, name: str) -> Path | None:
        """Return the file `name` in the folder of the packs, or None if it does not exist."""


def with_tokens(
    model: ModelSettings, settings: DataSettings, data: Data | None, *, needed: bool = False
) -> ModelSettings:
    """`model` with the keys of the vocabulary that it leaves open filled in from the tokenizer: `data.tokenizer`, else the one
    that the packs name. As it is where no tokenizer is known, and where its `source` brings its own.

    `needed`: a tokenizer that is not there is an InputError even where nothing is left open. Raises InputError, too, where
    `data.tokenizer` is not that of the packs, or of the model's weights, and where `model.config` contradicts the tokenizer.
    """
    given, known = dict(model.config or {}), data.tokenizer if data else {}
    if not needed and not model.from_scratch and (model.source or "vocab_size" in given):
        return model
    if settings.tokenizer is not None:
        named, packed = load_text_tokenizer(settings.tokenizer).describe(), known.get("fingerprint")
        for whose, expected in (
            (settings.packs, packed),
            ("`model.source`", fingerprint_at(model.weights_source)),
        ):
            if expected not in (None, named["fingerprint"]):
                raise InputError(
                    f"`data.tokenizer`: {settings.tokenizer} ({named['fingerprint'][:12]}) is not the tokenizer of {whose} "
                    f"({expected[:12]}); name that one, and prepare packs with it"
                )
        known = named
    if "vocab_size" not in known or (model.source is not None and not model.from_scratch):
        return model
    if model.source is not None and known.get("fingerprint") in (
        None,
        fingerprint_at(model.source),
    ):
        return model
    of_type = load_config(
        model if model.source else ModelSettings(config={"model_type": given["model_type"]})
    )
    return model.model_copy(update={"config": tokens_of(known, given, of_type)})


def tokens_of(
    tokenizer: Mapping[str, Any], given: Mapping[str, Any], config: PretrainedConfig
) -> dict[str, Any]:
    """What is `given` of a model's config, and the keys that `config` has and it leaves open from `tokenizer`, as
    `TextTokenizer.describe`. InputError where they contradict each other."""
    size = tokenizer["vocab_size"]
    if given.get("vocab_size", size) < size:
        raise InputError(
            f"`model.config.vocab_size: {given['vocab_size']}`: the data's tokenizer has {size} ids; leave it out"
        )
    values = {"vocab_size": -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE}
    for role, name in ROLES.items():
        if f"{role}_id" not in tokenizer:
            continue
        ids, own = given.get(f"{role}_token_id"), tokenizer[f"{role}_id"]
        if (
            ids is not None
            and own is not None
            and own not in (ids if isinstance(ids, list) else [ids])
        ):
            raise InputError(
                f"`model.config.{role}_token_id: {ids}`: the {name} token of the data's tokenizer "
                f"({tokenizer.get('name', 'unnamed')}) is {own}; leave it out, and it is taken from there"
            )
        values[f"{role}_token_id"] = own
    return {key: value for key, value in values.items() if hasattr(config, key)} | dict(given)


def fingerprint_in_use(
    settings: DataSettings, model: ModelSettings, data: Data | None
) -> str | None:
    """The fingerprint of the tokenizer that `load_tokenizer` returns; None where there is none, or no tokenizer.json."""
    return next(filter(None, map(fingerprint_at, _places(settings, model, data))), None)


def fingerprint_at(place: str | None) -> str | None:
    """The fingerprint of the tokenizer in a folder or hub repository; None where there is none."""
    # a folder or repository without a tokenizer, or a machine without network
    with contextlib.suppress(InputError):
        return place and load_text_tokenizer(place).fingerprint
    return None


def load_tokenizer(
    settings: DataSettings, model: ModelSettings, data: Data | None = None, *, needed: bool
) -> PreTrainedTokenizerBase | None:
    """The tokenizer for samples and for the exported folder: the data's, else the model's, else the one that lies with the packs;
    with the template that chats were written with.

    None where none is there; InputError where one is `needed`, or named and unreadable.
    """
    tokenizer = None
    named, with_packs = _places(settings, model, data)
    if named is not None:
        tokenizer = (
            _from_file(named, {})
            if Path(named).is_file()
            else _from_folder(named, settings, needed=needed)
        )
    if tokenizer is None and with_packs is not None:
        tokenizer = _from_file(with_packs, data.tokenizer)
    if tokenizer is None:
        if needed:
            raise InputError(
                "`evaluate.samples`: no tokenizer is known to read the prompts with; set `data.tokenizer`"
            )
        return None
    if given := next(
        filter(None, (part.chat_template for part in training_parts(settings).values())), None
    ):
        tokenizer.chat_template = chat_template(given, str(settings.tokenizer))
    elif data is not None and (file := data.beside(CHAT_TEMPLATE)):
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    return tokenizer


def _places(
    settings: DataSettings, model: ModelSettings, data: Data | None
) -> tuple[str | None, str | None]:
    """Returns where the tokenizer is looked for: first at the data's or the model's, then at the one that lies with the packs."""
    file = data.beside("tokenizer.json") if data is not None else None
    with_packs = str(file) if file else None
    if model.from_scratch and settings.tokenizer is None and with_packs is not None:
        return None, with_packs  # the source's weights, which meant its own ids, are not taken
    return settings.tokenizer or model.source, with_packs


def _from_folder(
    place: str, settings: DataSettings, *, needed: bool
) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a folder or on the hub. None where it cannot be read and need not be."""
    try:
        name, revision = split_revision(place)
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        if settings.tokenizer is None and not needed:
            return None
        key = "data.tokenizer" if settings.tokenizer else "model.source"
        raise InputError(
            f"`{key}`: no tokenizer can be read from {place!r}: {one_line(error)}; set `data.tokenizer`"
        ) from None


def _from_file(file: str, known: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """A tokenizer.json does not say which tokens are EOS, BOS and padding; `known` does, or else their usual names do."""
    text = load_text_tokenizer(file)
    known = known or text.describe()
    ids = {role: known.get(f"{role}_id") for role in ROLES}
    named = {
        f"{role}_token": text.tokenizer.id_to_token(token)
        for role, token in ids.items()
        if token is not None
    }
    return PreTrainedTokenizerFast(tokenizer_object=text.tokenizer, **named)


def positions_of(config: PretrainedConfig) -> int | None:
    """Returns how many tokens the model can read at once; None where its configuration does not say."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def encoded_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str, model: PretrainedConfig
) -> BatchEncoding:
    """`prompt` as [1, tokens] int64; an empty one as the token that a document begins with, or that ends the one before.
    InputError where it leaves `model` no position for another token."""
    text = prompt or tokenizer.bos_token or tokenizer.eos_token
    if not text:
        raise InputError(
            "prompt '': the tokenizer has no BOS or EOS token to begin with; write a few words"
        )
    encoded = tokenizer(
        text, return_tensors="pt", return_token_type_ids=False, add_special_tokens=bool(prompt)
    )
    tokens, positions = encoded["input_ids"].shape[1], positions_of(model)
    if positions and tokens >= positions:
        raise InputError(
            f"prompt {prompt[:40]!r}: {tokens} tokens, and the model has {positions} positions; shorten it"
        )
    return encoded
