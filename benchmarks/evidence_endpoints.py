"""What trained models are worth, in plain transformers: held-out loss by kind of text, last words, distance from the baseline.

`python -m benchmarks.evidence` starts this beside the runs that it trains. It measures each run as soon as that has ended, adds
it to the result file, and ends when its standard input does and nothing is left to measure.

Weights and layers are in BF16, logits in FP32. A document stands alone, padded on its right: no packing, no attention of ours.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from benchmarks.evidence_results import Results, baseline_of, key_of
from foundation.errors import InputError
from packing.mixture import MixedPacks
from packing.store import open_packs
from pretrain.checkpoint.folders import step_folder
from pretrain.compare.matrix_file import CELL, Matrix, MatrixRun, load_matrix
from pretrain.optimizer.schedule import decay_begins
from pretrain.plan.data import packs_evaluated
from pretrain.run.export import SavedModel, tokenizer_of
from pretrain.settings.recipe import Recipe

KL_TOKENS = 200_000  # held-out tokens on which two models are compared
PASSAGES = 2000  # passages whose last word is to be guessed
CONTEXT = 64  # tokens of a passage before its last word, at least
PROSE = "prose"  # the kind of text that has passages
_BATCH_TOKENS = 65_536  # with padding
_CHUNK = 8192  # tokens whose logits exist at once
_SEED = 0  # of which passages, and which documents, are chosen


@dataclass(frozen=True)
class Batch:
    """Documents side by side: what goes in, and of each token to be guessed (`targets` of them) what is asked of it."""

    input_ids: Tensor  # [documents, longest] int64, zeros behind a document's end
    at: Tensor  # [targets] int64, where in the flattened outputs a token is guessed
    labels: Tensor  # [targets] int64
    kinds: Tensor  # [targets] int64, the kind of its text
    passages: Tensor  # [targets] int64, the passage whose last word it is in; -1: none


@dataclass(frozen=True)
class HeldOut:
    """The held-out text of a recipe as batches, of which some documents are for comparing two models."""

    kinds: tuple[str, ...]
    batches: tuple[Batch, ...]
    compared: tuple[Batch, ...]
    passages: int
    fingerprint: str = ""  # of the packs that it is a part of

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None, device: torch.device) -> HeldOut:
        """The packs that a run of `recipe` evaluates on. InputError where its data holds out nothing."""
        data, limit = recipe.data, recipe.evaluate.packs
        found = open_packs(data, "held_out")
        if found is None:
            raise InputError(f"{data.packs}: no packs are held out, so there is nothing to measure on")
        parts = found.parts if isinstance(found, MixedPacks) else {data.packs.name: found}
        documents: list[np.ndarray] = []
        kinds: list[int] = []
        for number, packs in enumerate(parts.values()):
            for index in range(packs_evaluated(len(packs), len(found), limit)):
                pack = packs[index]
                pieces = np.split(pack.input_ids.astype(np.int64), np.cumsum(pack.lengths))[: len(pack.lengths)]
                documents += [piece for piece in pieces if len(piece) > 1]
                kinds += [number] * (len(documents) - len(kinds))
        words = last_words(documents, kinds, tuple(parts), tokenizer)
        order = np.random.default_rng(_SEED).permutation(len(documents))
        tokens = np.cumsum([len(documents[index]) for index in order])
        chosen = order[: int(np.searchsorted(tokens, KL_TOKENS)) + 1]
        everything = range(len(documents))
        batches = [tuple(batched(documents, kinds, words, which, device)) for which in (everything, chosen)]
        return cls(tuple(parts), *batches, passages=sum(map(len, words.values())), fingerprint=found.fingerprint)


def last_words(
    documents: Sequence[np.ndarray], kinds: Sequence[int], names: Sequence[str], tokenizer: PreTrainedTokenizerBase | None
) -> dict[int, list[tuple[int, int]]]:
    """Find words of prose with which a sentence ends, at least CONTEXT tokens from the document's begin: PASSAGES of them, or as
    many as there are. Returns by document the first token of each and the one after its last. A word is letters after a blank.
    Empty where there is no prose, or no tokenizer of bytes."""
    if tokenizer is None or PROSE not in names:
        return {}
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    blank = "[\u0120\u010a]"  # how byte-level tokenizers write a blank, and a line's end
    patterns = ("\u0120[A-Za-z]+", "[A-Za-z]+", "[.!?]", f"{blank}.*", f"[.!?]{blank}.*")
    begins, goes_on, stops, blanks, ends = (
        np.array([bool(re.fullmatch(pattern, token or "")) for token in tokens]) for pattern in patterns
    )
    found: list[tuple[int, int, int]] = []
    for number, document in enumerate(documents):
        if names[kinds[number]] != PROSE:
            continue
        for first in np.flatnonzero(begins[document[CONTEXT:]]) + CONTEXT:
            end = first + 1
            while end < len(document) and goes_on[document[end]]:
                end += 1
            after = document[end : end + 2]
            if ends[after[:1]].any() or (len(after) == 2 and stops[after[0]] and blanks[after[1]]):
                found.append((number, int(first), int(end)))
    chosen = np.random.default_rng(_SEED).permutation(len(found))[:PASSAGES]
    words: dict[int, list[tuple[int, int]]] = {}
    for number, first, end in (found[index] for index in sorted(chosen)):
        words.setdefault(number, []).append((first, end))
    return words


def batched(
    documents: Sequence[np.ndarray],
    kinds: Sequence[int],
    words: dict[int, list[tuple[int, int]]],
    which: Sequence[int],
    device: torch.device,
) -> Iterator[Batch]:
    """Those `which` of the documents, the longest first, so that little is padding."""
    ids = {place: number for number, place in enumerate((document, word) for document in words for word in words[document])}
    waiting = sorted(which, key=lambda index: -len(documents[index]))
    while waiting:
        longest = len(documents[waiting[0]])
        count = max(1, _BATCH_TOKENS // longest)
        taken, waiting = waiting[:count], waiting[count:]
        padded, passages = np.zeros((len(taken), longest), np.int64), np.full((len(taken), longest), -1)
        lengths = np.array([len(documents[index]) for index in taken])
        for row, index in enumerate(taken):
            padded[row, : lengths[row]] = documents[index]
            for word in words.get(index, ()):
                passages[row, word[0] : word[1]] = ids[index, word]
        rows, places = np.nonzero(np.arange(longest) < lengths[:, None] - 1)  # each token but a document's last guesses the next
        arrays = (
            padded,
            rows * longest + places,
            padded[rows, places + 1],
            np.array([kinds[index] for index in taken])[rows],
            passages[rows, places + 1],
        )
        yield Batch(*(torch.from_numpy(array).to(device) for array in arrays))


def logits_of(model: PreTrainedModel, batch: Batch) -> Iterator[tuple[slice, Tensor]]:
    """Yield the logits [targets, vocabulary] of the batch's targets in FP32, some at a time. Padding comes after all that is
    looked at, and attention is causal, so no mask is needed."""
    hidden = model.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state.flatten(0, 1)[batch.at]
    head = model.get_output_embeddings().weight.float()
    for begin in range(0, len(hidden), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        yield part, functional.linear(hidden[part].float(), head)


@torch.inference_mode()
def losses(model: PreTrainedModel, held_out: HeldOut) -> dict[str, float | None]:
    """`held_out_loss` in nats a token, over all text and for each kind, and `last_word_accuracy`: of how many passages each token
    of the last word is the likeliest; None where there are no passages."""
    device = model.device
    sums = torch.zeros(2, len(held_out.kinds), dtype=torch.float64, device=device)
    missed = torch.zeros(held_out.passages + 1, dtype=torch.int64, device=device)  # the last one is for all other tokens
    for batch in held_out.batches:
        for part, logits in logits_of(model, batch):
            labels, kinds = batch.labels[part], batch.kinds[part]
            found = functional.cross_entropy(logits, labels, reduction="none").double()
            sums[0].index_add_(0, kinds, found)
            sums[1].index_add_(0, kinds, torch.ones_like(found))
            missed.index_add_(0, batch.passages[part] % len(missed), (logits.argmax(-1) != labels).long())
    total, tokens = sums.sum(1).tolist()
    by_kind = {f"held_out_loss/{kind}": loss for kind, loss in zip(held_out.kinds, (sums[0] / sums[1]).tolist(), strict=True)}
    guessed = (missed[:-1] == 0).double().mean().item() if held_out.passages else None
    return {"held_out_loss": total / tokens, **by_kind, "last_word_accuracy": guessed}


@torch.inference_mode()
def divergence(reference: PreTrainedModel, model: PreTrainedModel, held_out: HeldOut) -> float:
    """KL(reference || model) in nats a token, over the documents that are for it."""
    total, tokens = torch.zeros((), dtype=torch.float64, device=model.device), 0
    for batch in held_out.compared:
        for (_, ours), (_, theirs) in zip(logits_of(reference, batch), logits_of(model, batch), strict=True):
            log_p, log_q = ours.log_softmax(-1), theirs.log_softmax(-1)
            total += (log_p.exp() * (log_p - log_q)).sum(-1).double().sum()
            tokens += len(ours)
    return total.item() / tokens


def final_model(run: MatrixRun, device: torch.device) -> PreTrainedModel:
    """The model that a finished run has exported."""
    folder = run.run_dir / "final"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").to(device).eval()


def model_before_decay(run: MatrixRun, device: torch.device) -> PreTrainedModel | None:
    """The model as it was when the rate began to fall; None where it never did, or where that checkpoint is not kept."""
    recipe = run.recipe
    steps = recipe.train.steps or -(-(recipe.train.tokens or 0) // recipe.batch.tokens)
    begins = decay_begins(recipe.schedule, steps, recipe.batch.tokens)
    folder = None if begins is None else step_folder(run.run_dir / "checkpoints", begins)
    if folder is None or not folder.is_dir():
        return None
    saved = SavedModel.open(folder, "bf16")
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(saved.hf.config, dtype=torch.bfloat16, attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(saved.read(name))
    return model.eval()


def is_ready(run: MatrixRun) -> bool:
    """Whether it is finished, its model exported: a run tells its end before it exports."""
    return run.is_finished() and (run.run_dir / "final" / "config.json").is_file()


class Measuring:
    """The runs of a matrix, measured one after another as they end."""

    def __init__(self, matrix: Matrix, results: Results, *, scale: str, command: str, device: torch.device) -> None:
        self.matrix, self.results, self.scale, self.command, self.device = matrix, results, scale, command, device
        self.order = [key_of(run) for run in matrix.runs]
        self._held_out: HeldOut | None = None
        self._baselines: dict[str, PreTrainedModel] = {}
        self._failed: set[str] = set()

    def round(self, *, last: bool) -> None:
        """Measure what has ended. What waits for its baseline is left for another round, unless this is the `last` one."""
        for run in self.matrix.runs:
            if key_of(run) not in self._failed and is_ready(run) and self.is_due(run, last=last):
                self.attempt(key_of(run), lambda run=run: self.measure(run))
            elif last and self.results.runs and key_of(run) not in self.results.runs and run.has_halted():
                self.attempt(key_of(run), lambda run=run: self.note_halted(run))
        self.compare_baselines()

    def attempt(self, what: str, measure: Callable[[], None]) -> None:
        """Measure; say so where that cannot be done, or the file not be written: all else is measured all the same."""
        try:
            measure()
        except (InputError, OSError, RuntimeError) as error:
            self._failed.add(what)
            print(f"{what}: cannot be measured: {error}", file=sys.stderr, flush=True)

    @property
    def failed(self) -> bool:
        return bool(self._failed)

    def is_due(self, run: MatrixRun, *, last: bool) -> bool:
        baseline, known = baseline_of(self.matrix, run), self.results.runs.get(key_of(run))
        here = baseline is not None and is_ready(baseline)
        if known is not None:  # perhaps measured before its baseline was there
            return here and baseline is not run and known["endpoints"]["final"]["kl_to_baseline"] is None
        elsewhere = baseline is None or key_of(baseline) in self.results.runs
        return here or elsewhere or last

    def note_halted(self, run: MatrixRun) -> None:
        self.results.add_halted(run)
        self.results.write(self.order)
        print(f"{key_of(run)}: was halted, which the file says; its cell has no mean", flush=True)

    def measure(self, run: MatrixRun) -> None:
        """Its endpoints, into the file."""
        held_out = self._held_out = self._held_out or HeldOut.of(
            run.recipe, tokenizer_of(run.recipe, run.run_dir)[0], self.device
        )
        self.results.check_fits(run, held_out.fingerprint)
        model, before = final_model(run, self.device), model_before_decay(run, self.device)
        baseline = baseline_of(self.matrix, run)
        distance = None
        if baseline is not None and baseline is not run and is_ready(baseline):
            distance = divergence(self.baseline(baseline), model, held_out)
        said = {"scale": self.scale, "command": self.command, "held_out": held_out.fingerprint}
        self.results.begin(self.matrix, run, **said, parameters=sum(each.numel() for each in model.parameters()))
        early = losses(before, held_out) if before is not None else None
        final = losses(model, held_out) | {"kl_to_baseline": distance}
        if early is not None:
            early.pop("last_word_accuracy")
        self.results.add(run, {"before_decay": early, "final": final})
        self.results.write(self.order)
        said = "" if distance is None else f", KL to its baseline {distance:.5f}"
        print(f"{key_of(run)}: measured: held-out loss {final['held_out_loss']:.5f}{said}", flush=True)

    def compare_baselines(self) -> None:
        """Baselines of two seeds whose models are here, as far as they are measured and not compared yet."""
        cell = self.matrix.baseline.values[CELL]
        known = [
            run for run in self.matrix.runs if run.values[CELL] == cell and key_of(run) in self.results.runs and is_ready(run)
        ]
        for pair in itertools.combinations(sorted(known, key=lambda run: run.recipe.seed), 2):
            seeds, what = [run.recipe.seed for run in pair], f"{key_of(pair[0])} beside {key_of(pair[1])}"
            if self._held_out is None or what in self._failed or seeds in [found["seeds"] for found in self.results.pairs]:
                continue
            self.attempt(what, lambda pair=pair: self.compare(*pair))

    def compare(self, first: MatrixRun, second: MatrixRun) -> None:
        """Two baselines, into the file."""
        distance = divergence(self.baseline(first), self.baseline(second), self._held_out)
        self.results.pairs.append({"seeds": [first.recipe.seed, second.recipe.seed], "kl": distance})
        self.results.write(self.order)

    def baseline(self, run: MatrixRun) -> PreTrainedModel:
        if run.name not in self._baselines:
            self._baselines[run.name] = final_model(run, self.device)
        return self._baselines[run.name]


def main(arguments: Sequence[str] | None = None, wait: Callable[[], object] = sys.stdin.read) -> int:
    """`wait`: returns when no more runs will end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("matrix", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--out", type=Path, required=True, help="the result file")
    parser.add_argument("--scale", default="")
    parser.add_argument("--command", default="", help="what the file says that it was made by")
    asked = parser.parse_intermixed_args(arguments)
    device = torch.device("cuda", torch.cuda.device_count() - 1) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_num_threads(min(torch.get_num_threads(), 4))  # the runs need the others
    disable_progress_bar()
    matrix = load_matrix(asked.matrix, asked.overrides)
    ended = threading.Event()
    threading.Thread(target=lambda: (wait(), ended.set()), daemon=True).start()
    measuring = Measuring(matrix, Results(asked.out), scale=asked.scale, command=asked.command, device=device)
    while True:
        last = ended.is_set()
        measuring.round(last=last)
        if last:
            return int(measuring.failed)
        ended.wait(1.0)


if __name__ == "__main__":
    sys.exit(main())
