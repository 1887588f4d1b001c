"""The tokenizer behind a run's packs: what a model from scratch takes from it, whether it is the model's own, and the object that
reads prompts and goes into the exported folder.

What `model.config` of a model from scratch leaves open of vocab_size, eos_token_id, bos_token_id and pad_token_id is taken from
the tokenizer, so that the exported model has no unused embeddings and `generate` stops at the token that ended the documents.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from transformers import (
    AutoTokenizer,
    BatchEncoding,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from foundation.errors import InputError
from foundation.reading import refusing
from packing.records import CHAT_TEMPLATE, chat_template
from packing.settings import DataSettings, split_revision
from packing.store import training_parts
from packing.tokenizer import load_tokenizer as load_text_tokenizer
from pretrain.model.huggingface import config_values, load_config
from pretrain.settings.recipe import ModelSettings

# of a vocabulary from scratch: products with the head are fastest so, and every precision takes
# them
VOCABULARY_MULTIPLE = 128
ROLES = {"eos": "EOS", "bos": "BOS", "pad": "padding"}
# Texts that transformers' tokenizer classes normalize or split differently.
PROBES = (
    "Hello world 12345, it's 3.14 and 1,000,000!",
    "  two blanks, a\ttab,\n\n  an indented line\r\n and blanks at the end   ",
    "DON'T we'll I'M __init__(self, *args) -> None: # 0x1F != 7e-5",
    "Caf\u00e9 cafe\u0301 \ufb01ne \u00df \u0130 \u1e9b\u0323 \uff21\uff11 \u00bd x\u00b2 \u2026",
    "\u4f60\u597d\uff0c\u4e16 \u3053\u3093 \u0645\u0631 \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f600\U0001f469\u200d\U0001f4bb \u00a0\u3000\u200b\ufeff \u2581a \x00\x07",
)


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
    `TextTokenizer.describe`. InputError where they contradict each other.

    A token that the tokenizer lacks is null. It is EOS if the configuration class wants an id, as
    cwm does for BOS.
    """
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
    wants_id = {
        key
        for key, value in values.items()
        if value is None and config_values(type(config), {key: None}).get(key, 0) is not None
    }
    values |= dict.fromkeys(wants_id, tokenizer.get("eos_id"))
    refused = {key for key in wants_id if values[key] is None}
    return {
        key: value for key, value in values.items() if hasattr(config, key) and key not in refused
    } | dict(given)


def fingerprint_in_use(
    settings: DataSettings, model: ModelSettings, data: Data | None
) -> str | None:
    """The fingerprint of the tokenizer that `load_tokenizer` returns; None where there is none."""
    return fingerprint_at(_place(settings, model, data))


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

    None where none is there. InputError where one is `needed`, and where the exported folder would
    not encode text as packs do.
    """
    place = _place(settings, model, data)
    if place is None:
        if needed:
            raise InputError(
                "`evaluate.samples`: no tokenizer is known to read the prompts with; set `data.tokenizer`"
            )
        return None
    same = data is not None and data.tokenizer.get("fingerprint") == fingerprint_at(place)
    tokenizer = tokenizer_in(place, data.tokenizer if same else None)
    if given := next(
        filter(None, (part.chat_template for part in training_parts(settings).values())), None
    ):
        tokenizer.chat_template = chat_template(given, str(settings.tokenizer))
    elif data is not None and (file := data.beside(CHAT_TEMPLATE)):
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    _check_export(tokenizer, place, load_config(model))
    return tokenizer


def _place(settings: DataSettings, model: ModelSettings, data: Data | None) -> str | None:
    """Return where a run's tokenizer.json lies: at the data's tokenizer or the model's source, or
    else with the packs."""
    file = data.beside("tokenizer.json") if data is not None else None
    # From scratch, the source's weights, which meant its own ids, are not taken.
    source = None if model.from_scratch and file else model.source
    places = (settings.tokenizer or source, file and str(file))
    return next(filter(fingerprint_at, places), None)


def tokenizer_in(place: str, ids: Mapping[str, Any] | None = None) -> PreTrainedTokenizerFast:
    """Load the tokenizer.json of a file, folder or hub repository, to encode text as packs do.

    AutoTokenizer may rebuild it from `tokenizer_class`, with another normalizer or pre-tokenizer.
    EOS, BOS and padding are those of `ids`, as `TextTokenizer.describe` has them; by default those
    of the folder. One that tokenizer.json lacks is dropped, as transformers would give it a new id.
    Raises InputError if there is no tokenizer.json.
    """
    text = load_text_tokenizer(place)
    ids = ids or text.describe()
    tokens = {number: token for token, number in text.tokenizer.get_vocab().items()}
    roles = {f"{role}_token": tokens.get(ids.get(f"{role}_id")) for role in ROLES}
    if Path(place).is_file():
        return PreTrainedTokenizerFast(tokenizer_object=text.tokenizer, **roles)
    name, revision = split_revision(place)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(name, revision=revision, **roles)
    tokenizer.init_kwargs.pop("auto_map", None)  # a class of the repository, which is not exported
    return tokenizer


def _check_export(
    tokenizer: PreTrainedTokenizerFast,
    place: str,
    config: PretrainedConfig,
) -> None:
    """Raise InputError if the exported folder encodes a text unlike the tokenizer.json at `place`.

    For some model types AutoTokenizer takes a class that ignores parts of tokenizer.json.
    """
    packed = load_text_tokenizer(place).tokenizer
    what = f"`data.tokenizer`: {place}: AutoTokenizer does not read it as packs do"
    remedy = f"name another tokenizer, or another `model_type` than {config.model_type}"
    with TemporaryDirectory() as folder, refusing((Exception,), what, remedy):
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        exported = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    added = {*exported.get_added_vocab(), *map(str, packed.get_added_tokens_decoder().values())}
    for probe in [*PROBES, *(f"a {token} b{token}c" for token in sorted(added))]:
        encoding = packed.encode(probe, add_special_tokens=False)
        if exported.encode(probe, add_special_tokens=False) != encoding.ids:
            kind = type(exported).__name__
            raise InputError(
                f"{what}: as {kind}, it encodes {probe!r} otherwise; {remedy}; or make one that "
                f'agrees, by transformers.{kind}.from_pretrained("{place}").save_pretrained(NEW), '
                "and prepare packs with `data.tokenizer: NEW`"
            )


def positions_of(config: PretrainedConfig) -> int | None:
    """Returns how many tokens the model can read at once; None where its configuration does not say."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def encoded_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str, model: PretrainedConfig
) -> BatchEncoding:
    """`prompt` as [1, tokens] int64, as packs hold it; an empty one as the token that a document
    begins with, or that ends the one before.
    InputError where it leaves `model` no position for another token."""
    text = prompt or tokenizer.bos_token or tokenizer.eos_token
    if not text:
        raise InputError(
            "prompt '': the tokenizer has no BOS or EOS token to begin with; write a few words"
        )
    encoded = tokenizer(
        text,
        return_tensors="pt",
        return_token_type_ids=False,
        add_special_tokens=False,
    )
    tokens, positions = encoded["input_ids"].shape[1], positions_of(model)
    if positions and tokens >= positions:
        raise InputError(
            f"prompt {prompt[:40]!r}: {tokens} tokens, and the model has {positions} positions; shorten it"
        )
    return encoded
