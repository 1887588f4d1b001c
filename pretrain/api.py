"""Parts of the launcher for other training loops, and for the Trainer of transformers.

::

    from pretrain.api import audit, convert, exact_adamw, open_packs, parity

    packs = open_packs("packs")
    loader = DataLoader(packs, 4, collate_fn=packs.collate)
    batch = next(iter(loader))
    convert(model, "current")                  # FP8 linear layers
    optimizer = exact_adamw(model, lr=3e-4)    # BF16 weights with exact FP32 updates
    print(audit(model, batch))                 # the precision of each GEMM, as it ran
    print(parity(model, batch).summary())      # loss and gradients of plain transformers

docs/library.md has a guide, and `examples/` has complete scripts. The launcher calls the same code.

The names in `__all__` and their documented arguments follow semantic versioning, from version 0.2
on: a change that breaks a caller raises the minor version before 1.0, and then the major version.
All other modules of this package may change in any version.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from foundation.errors import InputError, as_input_error
from foundation.overrides import overridden
from foundation.settings import parse
from packing.arrow import IGNORE, Pack, Split
from packing.batch import build_microbatch
from packing.settings import DataSettings
from packing.store import find_splits
from packing.store import open_packs as open_split
from packing.stream import order_of
from pretrain.launch.environment import check_options
from pretrain.model import attention_support
from pretrain.model.huggingface import decoder_layers
from pretrain.model.wrapping import convert as convert_linears
from pretrain.observe.model_audit import Audit, Batch, Product, audit, backward_of
from pretrain.optimizer.adamw import ExactAdamW, exact_adamw
from pretrain.precision.product import LowPrecisionLinear, PrecisionContext
from pretrain.precision.scope import LINEARS, Decision, check_scope, decide, quantized_names
from pretrain.precision.selection import make_engines, select_precision, support_check_on
from pretrain.precision.settings import (
    AMBIGUOUS_FP8,
    QUANTIZED,
    LowPrecisionSettings,
)
from pretrain.run.assembly import REHEARSALS
from pretrain.settings.config import load_recipe
from pretrain.verify.gradient_errors import distances, judge, resolution_of
from pretrain.verify.parity import Parity, too_far, training_without_dropout, worst_of
from pretrain.verify.reference_model import reference_model

__all__ = [
    "Audit",
    "Conversion",
    "ExactAdamW",
    "PackedDataset",
    "Parity",
    "Product",
    "audit",
    "convert",
    "exact_adamw",
    "open_packs",
    "parity",
]


# ── Low-precision linear layers ───────────────────────────────────────────────────────────────────


@dataclass(eq=False, repr=False)
class Conversion:
    """The precision of a model that :func:`convert` has converted.

    Attributes:
        decisions: Map the name of each linear layer to its precision. A layer that stays in BF16
            has a reason.
        context: State that the layers share.
    """

    decisions: Mapping[str, Decision]
    context: PrecisionContext

    def state_dict(self) -> dict[str, Tensor]:
        """Return amax histories and scales for a checkpoint. Only delayed scaling has them."""
        return {name: tensor.clone() for name, tensor in self.context.state().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of :meth:`state_dict` of the same model in the same precision."""
        self.context.go_back([state[name] for name in self.context.state()])

    def __repr__(self) -> str:
        engine: Any = self.context.engine
        count = len(quantized_names(self.decisions))
        return f"{count} linear layers in {self.context.current.name}, {engine.describe()}"


def convert(
    model: PreTrainedModel, precision: str, *, calibrate_on: Batch | None = None, **fp8_config: Any
) -> Conversion:
    """Replace the linear layers of a Hugging Face model by low-precision layers, in place.

    The layers compute on Transformer Engine if the device of the model supports the precision.
    Otherwise the precision is emulated, which is slow, and a warning is issued. The model keeps its
    class, its Parameters and their names, so optimizers, checkpoints and `save_pretrained` work as
    before.

    No call is needed in the training loop. Each forward quantizes the weights again, so they cannot
    be stale after an update by any optimizer. Low precision is used if the model is in training
    mode or if gradients are enabled. Otherwise, as in `torch.no_grad` evaluation, layers are
    unquantized, unless `use_autocast_during_eval` is set.

    Args:
        model: The model, on its device. Wrap it (DDP, FSDP2, torch.compile, Accelerate, Trainer)
            after this call. Add LoRA adapters before.
        precision: "delayed", "current", "block", "mxfp8", "nvfp4" or "mxfp4". Append "+head" to
            quantize the LM head too.
        calibrate_on: A batch, or a function that computes the loss, as in :func:`audit`. Delayed
            scaling needs it. Four forward and backward passes fill the histories, because the
            first microbatch would otherwise be quantized with scales of one, which turns small
            gradients into zeros.
        fp8_config: Keys of a recipe's `fp8_config` (docs/settings.md), such as
            `keep_bf16=["down_proj"]`. `on_unsupported` is "emulate" by default.

    Returns:
        The conversion. With delayed scaling, its :meth:`Conversion.state_dict` belongs into
        checkpoints.

    Raises:
        InputError: The precision or a key is unknown, no linear layer can be quantized, a linear
            layer has a forward or hooks of its own, which the replacement would lose, or the batch
            is unsuitable. The model is then not converted.

    Example::

        >>> conversion = convert(model, "mxfp8", keep_bf16_layers={"last": 2})
        >>> loss = model(**batch).loss
        >>> loss.backward()
    """
    if not isinstance(model, PreTrainedModel) or "forward" in vars(model):
        raise InputError(
            f"convert: {type(model).__name__} is no model of transformers, or it is wrapped or "
            "converted already; convert the plain model first, then wrap it. Of a model of PEFT, "
            "convert `get_base_model()`"
        )
    name = precision.removesuffix("+head")
    if name not in QUANTIZED:
        raise InputError(
            f"convert: {name!r} is none of the precisions {', '.join(QUANTIZED)}; {AMBIGUOUS_FP8}"
        )
    scope = "linear" if name == precision else "linear+head"
    defaults = {"on_unsupported": "emulate", "scope": scope}
    settings = parse(LowPrecisionSettings, defaults | fp8_config, "convert")
    check_options(settings, [QUANTIZED[name]], "precision", "convert: ")
    active = select_precision(name, settings, support_check_on(model.device.type))
    if not active.precision.quantized:
        raise InputError(f"convert: the model would train in {name}; remove `on_unsupported`")
    if active.quantized_precision.keeps_history and calibrate_on is None:
        raise InputError("convert: delayed scaling needs a batch; set `calibrate_on`")
    if active.notice:
        warnings.warn(active.notice, stacklevel=2)
    layers = list(decoder_layers(model).values())
    check_scope(model, layers, active)
    decisions = decide(model, layers, active)
    _require_plain(model, decisions)
    # The modules of the model, which are restored if the calibration fails.
    before = dict(model.named_modules())
    context = PrecisionContext(
        getattr(torch, active.precision.compute_dtype),
        make_engines([active], model.device),
        active,
        evaluates_low=settings.use_autocast_during_eval,
    )
    convert_linears(model, decisions, context)
    for module in model.modules():
        if isinstance(module, LowPrecisionLinear):
            module.register_forward_pre_hook(_check_call)
    _replace_forward(model, context)
    if calibrate_on is not None:
        try:
            for _ in range(REHEARSALS):
                backward_of(model, calibrate_on)
        except BaseException:
            _restore(model, before)
            raise
    return Conversion(decisions, context)


def _replace_forward(model: PreTrainedModel, context: PrecisionContext) -> None:
    """Let the forward of a converted model compute as `context` says."""
    # A copy of the model has a copy of the context, and finds it by this attribute.
    vars(model)["precision_context"] = context
    forward = torch.compiler.disable(_forward_in_low_precision, recursive=False)
    # The Trainer reads the names of the arguments.
    forward.__signature__ = inspect.signature(type(model).forward)
    model.forward = MethodType(forward, model)


def _restore(model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> None:
    """Undo a conversion. `modules` are the modules of `model` before the conversion."""
    # `named_modules` lists a module before its children.
    for name, module in modules.items():
        if model.get_submodule(name) is not module:
            model.set_submodule(name, module)
    # These attributes hide the forward of the class. `_replace_forward` has set them.
    del model.forward, model.precision_context


def _forward_in_low_precision(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute the forward of a converted model."""
    context = model.precision_context
    if model.device.type != context.engine.device.type:
        raise InputError(
            f"the model was converted on {context.engine.device} and now is on {model.device}; "
            "move it to its device first, then call `convert`"
        )
    _check_packs(model, kwargs)
    with ExitStack() as contexts:
        contexts.enter_context(context.forward(training=model.training or torch.is_grad_enabled()))
        # Recompute layers with the scales and the quantized weights of their forward.
        checkpoint = MethodType(_checkpoint, context)
        for module in model.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                contexts.enter_context(overridden(module, _gradient_checkpointing_func=checkpoint))
        return type(model).forward(model, *args, **kwargs)


# torch.compile cannot compile a checkpoint whose recomputation enters a context.
_checkpoint = torch.compiler.disable(PrecisionContext.checkpoint)


def _require_plain(model: nn.Module, decisions: Mapping[str, Decision]) -> None:
    """Raise InputError if a linear layer to be replaced does more than its class in torch."""
    quantized = quantized_names(decisions)
    for name, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        is_plain = type(module) in LINEARS and "forward" not in vars(module) and not any(hooks)
        if isinstance(module, LINEARS) and name in quantized and not is_plain:
            raise InputError(
                f"convert: {name} is a {type(module).__name__} with a forward or hooks of its "
                f"own, which would be lost; keep it with `keep_bf16=[{name!r}]`"
            )


@torch.compiler.disable
def _check_call(module: LowPrecisionLinear, args: tuple[Tensor, ...]) -> None:
    """Raise InputError if a low-precision layer cannot train with this call.

    The call must be part of a forward of the model, and the product for the weight's gradient sums
    over the tokens, so their number must suit the precision.
    """
    context: Any = module.state.context
    # A forward of the model sets `low_precision`, unless `parity` has turned off `quantizing`.
    if module.training and torch.is_grad_enabled() and context.quantizing != context.low_precision:
        raise InputError(
            f"{module.state.name}: this low-precision layer was called outside of a forward of its "
            "model, so it would train unquantized. Call the model itself. To recompute layers in "
            "backward, call `gradient_checkpointing_enable()` of the model"
        )
    tokens = args[0].shape[:-1].numel()
    precision = context.engine.precision
    if context.low_precision and torch.is_grad_enabled() and tokens % precision.multiple_of:
        raise InputError(
            f"{module.state.name}: the batch has {tokens} tokens, padding included, but "
            f"{precision.name} needs a multiple of {precision.multiple_of}; either pad the "
            f"sequences, for example by `pad_to_multiple_of={precision.multiple_of}` of a data "
            "collator, or keep layers with other inputs, such as images, with `keep_bf16` of "
            "`convert`"
        )


# ── Packs ─────────────────────────────────────────────────────────────────────────────────────────


class PackedDataset(Dataset[Pack]):
    """Map-style dataset of packs in the order of a training. :func:`open_packs` creates it.

    `dataset[place]` is the pack at a place in the endless stream of packs. Each epoch has another
    order. The order is a pure function of the place. So a training resumes at the number of packs
    that all ranks have trained. `len(dataset)` is the number of packs in an epoch, so a
    DataLoader without a sampler, or a `for` loop, reads the first epoch, in its shuffled order. Use
    :meth:`places` for more epochs.
    """

    def __init__(self, settings: DataSettings, split: Split, seed: int) -> None:
        self.arguments = settings, split, seed
        self.mask_boundaries = settings.mask_boundaries
        packs = None if settings.stream else open_split(settings, split)
        if packs is None:
            raise InputError(
                f"{settings.packs}: there are no packs of {split!r} that can be read at any time"
            )
        self.packs = packs
        self.order = order_of(packs, seed)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings. Another process, such as a worker, opens the packs itself."""
        return type(self), self.arguments

    def __len__(self) -> int:
        return len(self.packs)

    def __iter__(self) -> Iterator[Pack]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, place: int) -> Pack:
        (index,) = self.order.packs_at(range(place, place + 1))
        return self.packs[int(index)]

    def places(self, start: int, stop: int) -> range:
        """Return the places from `start` to `stop - 1` of this rank, as a sampler of a DataLoader.

        Ranks take turns. `torch.distributed` has the rank, if it is initialized.
        """
        rank, world_size = 0, 1
        if torch.distributed.is_initialized():
            rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return range(start + rank, stop, world_size)

    def collate(self, packs: Sequence[Pack]) -> dict[str, Any]:
        """Return the keyword arguments of a Hugging Face model for one microbatch of packs.

        The packs are laid end to end in one row [1, T] of `input_ids`, `position_ids` and `labels`.
        Positions restart in each document, and the arguments of FlashAttention have the boundaries
        of documents, so that documents do not attend to each other with any attention in
        transformers' registry. Documents do see each other in models with other layers, such as
        Mamba's or convolutions, or with ALiBi. :func:`parity` and converted models refuse to
        compute such models with these arguments. `labels` are not shifted, because the model shifts
        them. The first token of a document is no label, unless a recipe has `data.mask_boundaries:
        false`.
        """
        batch = build_microbatch(packs, mask_boundaries=self.mask_boundaries)
        # Drop the offsets of empty documents, which are repeated.
        ends = batch.cu_seqlens.unique()
        return {
            "input_ids": batch.input_ids,
            "position_ids": batch.position_ids,
            # The last label of a row is masked, so that it can move to the front.
            "labels": batch.labels.roll(1),
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": batch.max_seqlen,
            "max_length_k": batch.max_seqlen,
            # With a cache, transformers would not separate the documents.
            "use_cache": False,
        }


def open_packs(
    source: str | Path, *, split: Split = "train", length: int | None = None, seed: int = 0
) -> PackedDataset:
    """Open the packs of the launcher for a DataLoader.

    Args:
        source: Folder or file of packs in any format of `data.packs`, or a recipe (.yaml). A recipe
            may mix sources, and its seed replaces `seed`.
        split: "train" or "held_out".
        length: Number of tokens in a pack of a token file (.bin, .npy). Other formats record it. A
            token file without a header needs a recipe with `data.token_dtype`.
        seed: Seed of the order of packs.

    Raises:
        InputError: There are no packs of this split, or they are streamed.

    Example::

        >>> packs = open_packs("packs")
        >>> places = packs.places(start=8 * step, stop=8 * last_step)
        >>> loader = DataLoader(packs, 4, sampler=places, collate_fn=packs.collate)
        >>> for batch in loader:
        ...     loss = model(**batch).loss
    """
    path = Path(source)
    if path.suffix in (".yaml", ".yml"):
        recipe = load_recipe(path)
        settings, seed = recipe.data, recipe.seed
    else:
        length = find_splits(path, length)["train"]().length
        settings = DataSettings(packs=path, length=length)
    return PackedDataset(settings, split, seed)


def _check_packs(model: PreTrainedModel, batch: Mapping[str, Any]) -> None:
    """Raise InputError if the model would mix the documents of a batch of packs."""
    if "cu_seq_lens_q" in batch:
        attention_support.check_documents(model)


# ── Comparison with plain transformers ────────────────────────────────────────────────────────────


def parity(
    model: PreTrainedModel, batch: Mapping[str, Any], reference: PreTrainedModel | None = None
) -> Parity:
    """Compare the loss and the gradients of a causal language model with plain transformers.

    The reference runs twice: in FP32 for the expected values, and in BF16 for the tolerances, which
    are the errors of BF16. The model runs without dropout. A model that :func:`convert` has
    converted runs without quantization, because :func:`audit` reports its precision. The gradients
    of frozen parameters are compared too. The model, its gradients and the reference are not
    changed.

    Args:
        model: The model. It may have fused kernels, another attention, or converted layers.
        batch: Keyword arguments of the model and of the reference, with `labels`.
        reference: A model with the same names of parameters and the same weights. By default, the
            model of transformers with the same configuration and weights, with eager attention.

    Returns:
        The comparison. `failures` has one line for each mismatch, and `summary()` is a line about
        the largest differences.

    Raises:
        InputError: The batch has no labels, or it has packs whose documents the model would mix.

    Example::

        >>> result = parity(model, batch)
        >>> assert not result.failures, result.summary()
    """
    if batch.get("labels") is None:
        raise InputError("parity: the batch has no `labels`, so there is no loss; add `labels`")
    _check_packs(model, batch)
    devices = [model.device] if model.device.type == "cuda" else []
    context = getattr(model, "precision_context", PrecisionContext(model.dtype))
    with torch.random.fork_rng(devices):
        with as_input_error(
            (AttributeError, LookupError, ValueError),
            f"parity: transformers has no {type(model).__name__} with these parameters",
            "pass the model as it is before it is wrapped, compiled or gets adapters, or set "
            "`reference`",
        ):
            plain = reference or reference_model(model, model.device)
        with training_without_dropout(model), overridden(context, quantizing=False):
            output, gradients = _output_and_gradients(model, batch, None)
        with training_without_dropout(plain):
            fp32_output, fp32_gradients = _output_and_gradients(plain, batch, torch.float32)
            bf16_output, bf16_gradients = _output_and_gradients(plain, batch, torch.bfloat16)
    bf16_errors = _token_losses(bf16_output, batch) - _token_losses(fp32_output, batch)
    # The allowed error as a multiple of BF16's error.
    resolution = resolution_of(*(gradient.dtype for gradient in gradients.values()))
    # The error of the mean loss may be small by chance, because errors of tokens cancel. Their root
    # mean square is never smaller.
    tolerated = resolution * bf16_errors.square().mean().sqrt().item()
    norms = [gradient.float().norm() for gradient in gradients.values()]
    tensors = judge(
        distances(gradients, fp32_gradients),
        distances(bf16_gradients, fp32_gradients),
        resolution,
    )
    result = Parity(
        failures=[],
        tokens=len(bf16_errors),
        loss=output.loss.item(),
        reference_loss=fp32_output.loss.item(),
        loss_tolerated=tolerated,
        gradient_norm=math.hypot(*norms),
        tensors=tensors,
    )
    result.failures += too_far("loss", result.loss, result.reference_loss, tolerated)
    result.failures += worst_of(tensors, "gradients", "the model differs from plain transformers")
    return result


def _token_losses(output: Any, batch: Mapping[str, Any]) -> Tensor:
    """Return the losses of the tokens with a label, FP64 [labels]."""
    labels = batch["labels"][:, 1:]
    logits = output.logits[:, :-1].detach().double().mT
    return F.cross_entropy(logits, labels, reduction="none")[labels != IGNORE]


def _output_and_gradients(
    model: nn.Module, batch: Mapping[str, Any], dtype: torch.dtype | None
) -> tuple[Any, dict[str, Tensor]]:
    """Return the output of `model` and its gradients by name.

    They are computed with copies of the parameters in `dtype`, or in their own dtype if it is None.
    Frozen parameters have gradients too. The attributes `grad` of the model do not change.
    """
    parameters = {
        name: parameter.detach().to(dtype or parameter.dtype).requires_grad_()
        for name, parameter in model.named_parameters()
    }
    output = functional_call(model, parameters, (), dict(batch))
    gradients = torch.autograd.grad(output.loss, list(parameters.values()), allow_unused=True)
    return output, {
        name: gradient
        for name, gradient in zip(parameters, gradients, strict=True)
        if gradient is not None
    }
