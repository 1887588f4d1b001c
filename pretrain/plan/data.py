"""The packs that a run trains and is evaluated on, and the tokenizer that belongs to them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, BatchEncoding, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from foundation.errors import InputError
from packing.arrow import Pack, Packs
from packing.batch import Microbatch, build_microbatch, read_pack, sum_of_squares
from packing.prepare import prepare
from packing.settings import DataSettings
from packing.store import check_model, open_packs
from packing.tokenizer import load_tokenizer as load_text_tokenizer
from pretrain.settings.recipe import ModelSettings

_SAMPLED_PACKS = 1000
_SCANNED_PACKS = 2**16  # 1 GiB of token ids at 4,096 a pack: under a second, as opening has just hashed the same files


@dataclass(frozen=True)
class Data:
    """What is read from disk while training; opened and checked, nothing of it in memory."""

    train: Packs
    held_out: Packs | None

    @property
    def held_out_packs(self) -> int:
        return len(self.held_out) if self.held_out is not None else 0

    @property
    def vocabulary(self) -> int | None:
        """Size of the vocabulary that the packs were tokenized with, where they know it."""
        return (self.train.tokenizer or {}).get("vocab_size")

    @property
    def mean_squared(self) -> float:
        """Mean over packs, sampled evenly, of the sum of squared document lengths divided by the pack's length: what a token's
        attention costs."""
        sampled = range(0, len(self.train), max(1, len(self.train) // _SAMPLED_PACKS))
        squares = [sum_of_squares(self.train.lengths(index)) for index in sampled]
        return float(np.mean(squares)) / self.train.length

    def one_pack(self, index: int, vocab_size: int) -> Microbatch:
        """A microbatch of one training pack, counted round: real text, to observe the model on. InputError for a token that the
        model does not have."""
        return build_microbatch([read_pack(self.train, index % len(self.train), vocab_size)], mask_boundaries=True)

    def trial_batch(self, packs: int) -> Microbatch:
        """A microbatch with the documents of the first `packs` packs (in turns where there are fewer), to try the model on.

        All of its tokens are 0: which ones there are changes neither dtypes nor memory, and one beyond the vocabulary would end
        the process on a device, before the batches of training can say in which pack it stands.
        """
        tokens = np.zeros(self.train.length, dtype=np.uint32)
        chosen = [Pack(tokens, self.train.lengths(index % len(self.train))) for index in range(packs)]
        return build_microbatch(chosen, mask_boundaries=True)


def open_data(settings: DataSettings, *, is_main_process: bool, may_prepare: bool = True) -> Data:
    """The packs at `data.packs`, prepared first where `data.source` says from what and they are not there yet.

    Every process may call it: preparing takes a lock, and who gets it second finds the work done, or the same mistake. Without
    `may_prepare`, missing packs are an InputError: who asks for a plan does not ask for hours of work.
    """
    if settings.source is not None:
        if not may_prepare and not settings.packs.exists():
            raise InputError(
                f"`data.packs`: {settings.packs} is not prepared yet, and the plan counts its packs; "
                "`python -m packing prepare RECIPE` prepares it, and so does starting the run"
            )
        prepare(settings, progress=is_main_process)
    return Data(open_packs(settings, "train"), open_packs(settings, "held_out"))


def check_data(data: Data, model: ModelSettings, vocab_size: int) -> None:
    """InputError where the packs hold tokens that a model of `vocab_size` embeddings does not have, or means otherwise.

    Packs that do not know their vocabulary are read: all of them, or 65,536 evenly chosen ones and the first. The rest is checked
    as batches are made.
    """
    packs_know = (data.train.tokenizer or {}).get("fingerprint") is not None
    check_model(data.train, vocab_size, _fingerprint(model) if packs_know else None)
    if data.vocabulary is not None:
        return
    for packs in filter(None, (data.train, data.held_out)):
        stride = -(-len(packs) // _SCANNED_PACKS)
        for index in sorted({*range(min(len(packs), _SAMPLED_PACKS)), *range(0, len(packs), stride)}):
            read_pack(packs, index, vocab_size)


def check_tokenizer(data: DataSettings, model: ModelSettings, vocab_size: int) -> None:
    """InputError where `data.tokenizer` is not the model's or has more ids than `vocab_size`; for before text is prepared."""
    if data.tokenizer is None:
        return
    tokenizer, expected = load_text_tokenizer(data.tokenizer), _fingerprint(model)
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


def _fingerprint(model: ModelSettings) -> str | None:
    """Of the tokenizer that the model's folder or hub repository holds; None where there is none."""
    if model.source is None:
        return None
    if Path(model.source).exists():
        return load_text_tokenizer(model.source).fingerprint if (Path(model.source) / "tokenizer.json").is_file() else None
    with contextlib.suppress(InputError):  # a repository without a tokenizer, or a machine without network
        return load_text_tokenizer(model.source, model.revision).fingerprint
    return None


def load_tokenizer(data: DataSettings, model: ModelSettings, *, needed: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer for samples and for the exported folder: the data's, else the model's.

    None where neither has one; InputError where one is `needed`, or named and unreadable.
    """
    source = data.tokenizer or model.source
    if data.tokenizer is not None:
        load_text_tokenizer(data.tokenizer)  # names what is wrong with it better than the library below
    try:
        if source is not None and Path(source).is_file():
            return PreTrainedTokenizerFast(tokenizer_file=source)
        if source is not None:
            revision = model.revision if source == model.source else None
            return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        if data.tokenizer is not None or needed:
            key = "data.tokenizer" if data.tokenizer else "model.source"
            reason = " ".join(str(error).split())[:300]
            raise InputError(f"`{key}`: no tokenizer can be read from {source!r}: {reason}; set `data.tokenizer`") from None
    if needed:
        raise InputError("`evaluate.samples`: no tokenizer is known to read the prompts with; set `data.tokenizer`")
    return None


def check_samples(prompts: Iterable[str], tokenizer: PreTrainedTokenizerBase | None) -> None:
    """InputError where a prompt cannot be continued, which would otherwise be found out at the first evaluation."""
    for prompt in prompts:
        encoded_prompt(tokenizer, prompt)


def encoded_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> BatchEncoding:
    """`prompt` as [1, tokens] int64; an empty one as the token that a document begins with, or that ends the one before."""
    encoded = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    if encoded["input_ids"].shape[1]:
        return encoded
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        raise InputError("`evaluate.samples`: an empty prompt needs a tokenizer with a BOS or EOS token; write a few words")
    ids = torch.tensor([[start]])
    return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
