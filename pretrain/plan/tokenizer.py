"""The tokenizer behind a run's packs: what a model from scratch takes from it, whether it is the model's own, and the object that
reads prompts and goes into the exported folder.

What `model.config` of a model from scratch leaves open of vocab_size, eos_token_id, bos_token_id and pad_token_id is taken from
the tokenizer, so that the exported model has no unused embeddings and `generate` stops at the token that ended the documents.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, BatchEncoding, PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from foundation.errors import InputError, shown
from foundation.reading import one_line
from packing.parts import training_parts
from packing.records import CHAT_TEMPLATE, chat_template
from packing.settings import DataSettings
from packing.tokenizer import TextTokenizer
from packing.tokenizer import load_tokenizer as load_text_tokenizer
from pretrain.model.huggingface import load_config
from pretrain.plan.data import Data
from pretrain.settings.recipe import ModelSettings, Recipe

VOCABULARY_MULTIPLE = 128  # of a vocabulary from scratch: products with the head are fastest so, and every precision takes them
ROLES = {"eos": "EOS", "bos": "BOS", "pad": "padding"}


def known_tokenizer(settings: DataSettings, data: Data | None) -> dict[str, Any]:
    """Returns what is known of the tokenizer that the packs are made with: name, vocab_size, eos_id, bos_id, pad_id (None: it has
    none).

    By `data.tokenizer` where that is set, else by what the packs remember. Keys of which nothing is known are absent. InputError
    where the packs were made with another tokenizer than `data.tokenizer`.
    """
    if settings.tokenizer is None:
        return data.tokenizer if data else {}
    named, made_with = load_text_tokenizer(settings.tokenizer).describe(), data.tokenizer.get("fingerprint") if data else None
    if made_with not in (None, named["fingerprint"]):
        raise InputError(
            f"`data.tokenizer`: {settings.tokenizer} ({named['fingerprint'][:12]}) is not the tokenizer of {settings.packs} "
            f"({data.tokenizer.get('name', 'unnamed')}, {made_with[:12]}); name that one, or leave `data.tokenizer` out"
        )
    return named


def without_absent_tokenizer(recipe: Recipe) -> tuple[Recipe, str | None]:
    """Returns, for a plan before packs exist, `recipe` without a tokenizer that is not there yet and without the prompts that it
    would read, and a line to say so; else `recipe` as it is, and None.

    Raises InputError where nothing but that tokenizer could say how large the vocabulary of the model is.
    """
    data, model = recipe.data, recipe.model
    no_prompts = {"evaluate": recipe.evaluate.model_copy(update={"samples": ()})}
    if data.tokenizer is None:  # the packs may bring one
        return recipe if model.source else recipe.model_copy(update=no_prompts), None
    if Path(data.tokenizer).exists():
        return recipe, None
    try:
        load_text_tokenizer(data.tokenizer)
    except InputError as error:
        if model.source is None and "vocab_size" not in (model.config or {}):
            raise InputError(f"{error}; or plan without it, with model.config.vocab_size=N on the command line") from None
        origin = "of `model.source`" if model.source else "set by the recipe"
        said = f"vocabulary {origin}, not checked: `data.tokenizer: {data.tokenizer}` is not there yet, or out of reach"
        return recipe.model_copy(update=no_prompts | {"data": data.model_copy(update={"tokenizer": None})}), said
    return recipe, None


def with_tokens_of(tokenizer: Mapping[str, Any], settings: ModelSettings) -> tuple[ModelSettings, str]:
    """`settings` of a model from scratch, what they leave open of its vocabulary taken from `tokenizer`; and a line to say so.

    Raises InputError where `model.config` contradicts the tokenizer, and for an unknown model type.
    """
    given = dict(settings.config or {})
    known = load_config(settings if settings.source else ModelSettings(config={"model_type": given["model_type"]}))
    size = tokenizer.get("vocab_size")
    if size is None:
        origin = "set by the recipe" if "vocab_size" in given else f"the default of {given['model_type']}"
        return settings, f"vocabulary {origin}; the tokenizer behind the packs is not known (`data.tokenizer`)"
    if contradictions := _contradictions(given, tokenizer):
        raise InputError(
            f"`model.config` contradicts the tokenizer of the data ({tokenizer.get('name', 'unnamed')}): "
            f"{'; '.join(contradictions)}. Leave these keys out, and they are taken from the tokenizer"
        )
    found = {"vocab_size": -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE}
    found |= {f"{role}_token_id": tokenizer[f"{role}_id"] for role in ROLES if f"{role}_id" in tokenizer}
    config = given | {key: value for key, value in found.items() if key not in given and hasattr(known, key)}
    rounded = f"rounded up to a multiple of {VOCABULARY_MULTIPLE}"
    origin = "set by the recipe, for" if "vocab_size" in given else f"{rounded} from" if found["vocab_size"] != size else "of"
    tokens = {word: config.get(f"{role}_token_id") for role, word in ROLES.items()}
    ids = ", ".join(f"{word} {'none' if token is None else token}" for word, token in tokens.items())
    return settings.model_copy(update={"config": config}), f"vocabulary {origin} the tokenizer's {size:,} ids; {ids}"


def has_other_tokens(tokenizer: Mapping[str, Any], settings: ModelSettings) -> bool:
    """Returns whether a model in the shape of a `source` is trained from scratch on the ids of another tokenizer than the
    source's."""
    if not settings.from_scratch or "fingerprint" not in tokenizer:
        return False
    return fingerprint_of(settings.model_copy(update={"from_scratch": False})) != tokenizer["fingerprint"]


def _contradictions(given: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> list[str]:
    found, size = [], given.get("vocab_size")
    if isinstance(size, int) and size < tokenizer["vocab_size"]:
        found.append(f"`vocab_size: {size}`, but it has {tokenizer['vocab_size']} ids")
    for role, word in ROLES.items():
        ids, own = given.get(f"{role}_token_id"), tokenizer.get(f"{role}_id")
        if ids is not None and own is not None and own not in (ids if isinstance(ids, list) else [ids]):
            found.append(f"`{role}_token_id: {ids}`, but its {word} token is {own}")
    return found


def check_tokenizer(data: DataSettings, model: ModelSettings, vocab_size: int) -> None:
    """InputError where `data.tokenizer` is not the model's or has more ids than `vocab_size`; for before text is prepared."""
    if data.tokenizer is None or model.weights_source is None:
        return
    tokenizer, expected = load_text_tokenizer(data.tokenizer), fingerprint_of(model)
    if expected is not None and tokenizer.fingerprint != expected:
        raise InputError(
            f"`data.tokenizer`: {data.tokenizer} ({tokenizer.fingerprint[:12]}) is not the tokenizer of `model.source` "
            f"({expected[:12]}); set `data.tokenizer: {model.source}`"
        )
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"`data.tokenizer`: {data.tokenizer} has {tokenizer.vocab_size} ids, the model's vocabulary {vocab_size}; use the "
            "model's own tokenizer, or set `model.config.vocab_size` for a model from scratch"
        )


def fingerprint_of(model: ModelSettings) -> str | None:
    """Returns the fingerprint of the tokenizer that the weights of the model's folder or hub repository are for; None where there
    is none."""
    if model.weights_source is None:
        return None
    if Path(model.repository).exists():
        return (
            load_text_tokenizer(model.repository).fingerprint if (Path(model.repository) / "tokenizer.json").is_file() else None
        )
    with contextlib.suppress(InputError):  # a repository without a tokenizer, or a machine without network
        return load_text_tokenizer(model.repository, model.revision).fingerprint
    return None


def load_tokenizer(
    settings: DataSettings, model: ModelSettings, data: Data | None = None, *, needed: bool
) -> PreTrainedTokenizerBase | None:
    """The tokenizer for samples and for the exported folder: the data's, else the model's, else the one that lies with the packs.

    None where none is there; InputError where one is `needed`, or named and unreadable.
    """
    found = _load_tokenizer(settings, model, data, needed=needed)
    if found is not None and (template := _template_of_chats(settings, data)):
        found.chat_template = template
    return found


def _template_of_chats(settings: DataSettings, data: Data | None) -> str | None:
    """Returns what chats are written with, where that is not the tokenizer's own; of several sources, the first that says so."""
    named = (part.chat_template for part in list(training_parts(settings).values()) or [settings])
    if (given := next(filter(None, named), None)) is not None:
        return chat_template(given, str(settings.tokenizer))
    file = data.beside(CHAT_TEMPLATE) if data is not None else None
    return file.read_text(encoding="utf-8") if file else None


def _load_tokenizer(
    settings: DataSettings, model: ModelSettings, data: Data | None, *, needed: bool
) -> PreTrainedTokenizerBase | None:
    source, with_packs = _places(settings, model, data)
    if settings.tokenizer is not None:
        text = load_text_tokenizer(settings.tokenizer)  # names what is wrong with it better than the library below
        if Path(settings.tokenizer).is_file():
            return _with_special_tokens(text, text.describe())
    try:
        if source is not None:
            revision = model.revision if source == model.repository else None
            return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        if settings.tokenizer is not None or needed:
            key = "data.tokenizer" if settings.tokenizer else "model.source"
            raise InputError(
                f"`{key}`: no tokenizer can be read from {source!r}: {one_line(error)}; set `data.tokenizer`"
            ) from None
    if with_packs is not None:
        text = load_text_tokenizer(str(with_packs))
        return _with_special_tokens(text, data.tokenizer or text.describe())
    if needed:
        raise InputError("`evaluate.samples`: no tokenizer is known to read the prompts with; set `data.tokenizer`")
    return None


def _places(settings: DataSettings, model: ModelSettings, data: Data | None) -> tuple[str | None, Path | None]:
    """Returns where the tokenizer is looked for: first at the data's or the model's, then at the one that lies with the packs."""
    with_packs = data.beside("tokenizer.json") if data is not None else None
    if model.from_scratch and settings.tokenizer is None and with_packs is not None:
        return None, with_packs  # the source's weights, which meant its own ids, are not taken
    return settings.tokenizer or model.repository, with_packs


def fingerprint_in_use(settings: DataSettings, model: ModelSettings, data: Data | None) -> str | None:
    """Returns the fingerprint of the tokenizer that `load_tokenizer` finds; None where there is none, or one without a
    tokenizer.json."""
    source, with_packs = _places(settings, model, data)
    for place, revision in ((source, model.revision if source == model.repository else None), (with_packs, None)):
        if place is not None:
            with contextlib.suppress(InputError):
                return load_text_tokenizer(str(place), revision).fingerprint
    return None


def check_same_tokenizer(settings: DataSettings, model: ModelSettings, data: Data | None, trained_with: str | None) -> None:
    """InputError where the tokenizer that `load_tokenizer` finds has another fingerprint than `trained_with`; None: not known."""
    found = fingerprint_in_use(settings, model, data)
    if trained_with not in (None, found):
        place = settings.tokenizer or model.repository or settings.packs
        raise InputError(
            f"{place} ({found[:12] if found else 'no tokenizer.json'}) is not the one it was trained with "
            f"({trained_with[:12]}); put that one back"
        )


def _with_special_tokens(text: TextTokenizer, known: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """A tokenizer.json does not say which tokens are EOS, BOS and padding; `known` does, as `TextTokenizer.describe`."""
    ids = {role: known.get(f"{role}_id") for role in ROLES}
    named = {f"{role}_token": text.tokenizer.id_to_token(token) for role, token in ids.items() if token is not None}
    return PreTrainedTokenizerFast(tokenizer_object=text.tokenizer, **named)


def positions_of(config: PretrainedConfig) -> int | None:
    """Returns how many tokens the model can read at once; None where its configuration does not say."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def encoded_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, model: PretrainedConfig) -> BatchEncoding:
    """`prompt` as [1, tokens] int64; an empty one as the token that a document begins with, or that ends the one before.
    InputError where it leaves `model` no position for another token."""
    encoded = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    tokens, positions = encoded["input_ids"].shape[1], positions_of(model)
    if positions and tokens >= positions:
        raise InputError(f"a prompt has {tokens} tokens and the model {positions} positions; shorten {shown(prompt, repr)}")
    if tokens:
        return encoded
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        raise InputError("an empty prompt needs a tokenizer with a BOS or EOS token; write a few words")
    ids = torch.tensor([[start]])
    return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
