"""What the matrix products of a model really multiplied, seen from underneath: the operands as they reach the kernel.

A module may carry the right name and multiply in BF16 all the same, so nothing here asks a module anything. Whoever looks on says
around a call which product it is (`ProductObserver.during`); what is multiplied inside is seen where it is multiplied:

* torch's products underneath autograd, with the tensors that they get. Those of the emulation are held, block by block, against
  the format that they should be of, by the scales that the emulated product gives beside them.
* Transformer Engine's at the one function of its extension that multiplies, whatever called it, and those that cublasLt computes
  in its place: by the class and format of what arrives there, and by its codes and scales.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foundation.attributes import holding
from pretrain.precision import products
from pretrain.precision.formats.definition import Role, Scaling
from pretrain.precision.operand_check import LARGEST_CODE, Sample, describe, examine, examine_tensor_scale, sample
from pretrain.precision.quantizers.grid import E4M3, E5M2, Grid
from pretrain.precision.settings import ActivePrecision

BITS = {"bfloat16": 8, "float32": 24}  # significant bits of a dtype's values, the leading one included

# The left and the right operand of a linear's products: x w^T, g w and g^T x.
OPERANDS: dict[str, tuple[Role, Role]] = {
    "forward": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}

# Products of torch, and where their two factors stand: what addmm adds the product to is no factor, and may be an FP32 sum.
FACTORS = {
    torch.ops.aten.mm: slice(0, 2),
    torch.ops.aten.bmm: slice(0, 2),
    torch.ops.aten.linear: slice(0, 2),
    torch.ops.pretrain.linear: slice(0, 2),
    torch.ops.pretrain.input_gradient: slice(0, 2),
    torch.ops.pretrain.add_product: slice(1, 3),
    torch.ops.aten.addmm: slice(1, 3),
    torch.ops.aten.addmm_: slice(1, 3),
    torch.ops.aten.baddbmm: slice(1, 3),
    torch.ops.aten._grouped_mm: slice(0, 2),
}

# Transformer Engine's products by which factor it transposes, in cuBLAS's order: the weight comes first.
_GEMMS = {(True, False): "forward", (False, False): "dgrad", (False, True): "wgrad"}
_FP8 = {"e4m3": (torch.float8_e4m3fn, E4M3), "e5m2": (torch.float8_e5m2, E5M2)}
_BLOCK = 128


class ObservedProduct(NamedTuple):
    """One product of a linear: `gemm` is forward, dgrad or wgrad; `left` and `right` say what its operands were."""

    gemm: str
    left: str
    right: str


class ScalesOf(NamedTuple):
    """The scales of an emulated operand, beside its values: `blocks` as `operand_check.sample` takes them, and the scale of the
    tensor."""

    blocks: Tensor | None
    tensor: Tensor | None


@dataclass
class _Call:
    """A product that is under way."""

    names: Sequence[str]
    gemm: str | None  # None: the layout that it is called with tells
    swapped: bool = False  # the operands trade places, as in the transposed weight gradient
    scales: tuple[ScalesOf, ScalesOf] | None = None  # of an emulated product's operands


@dataclass(frozen=True)
class _Finding:
    names: Sequence[str]
    gemm: str
    role: Role
    grid: Grid
    scaling: Scaling
    figures: Tensor


class ProductObserver:
    """Notes the products of each linear in the order they run, in `products` by name; a recomputed forward is noted twice.

    Recomputation nests forwards in the backward of a product, hence a stack.
    """

    def __init__(self, active: ActivePrecision | None, seed: int = 0, examined: Set[str] | None = None) -> None:
        """`active`: what low-precision operands are held against; None: only their kinds are noted. `seed` picks the blocks.
        `examined`: the linears whose operands are held against it, where not all are."""
        self.products: dict[str, list[ObservedProduct]] = {}
        self.multiplying = False
        self._active = active if active and active.precision.quantized else None
        self._seed = seed
        self._examined = examined
        self._calls: list[_Call] = []
        self._findings: list[_Finding] = []
        self._generators: dict[torch.device, torch.Generator] = {}

    # ── Around a product ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def during(self, names: Sequence[str], gemm: str | None = None, **about: Any) -> Iterator[None]:
        """What is multiplied inside is `gemm` of the linears called `names`; `about`: other fields of a `_Call`.

        Products of torch are looked at in here alone: a dispatch mode around a whole step would keep it from being compiled."""
        self._calls.append(_Call(names, gemm, **about))
        before, self.multiplying = self.multiplying, gemm is not None
        try:
            with _TorchProducts(self) if gemm else nullcontext():
                yield
        finally:
            self.multiplying = before
            self._calls.pop()

    def watched(self, function: Callable[..., Any], names: Sequence[str], gemm: str, **about: Any) -> Callable[..., Any]:
        """`function`, whatever it multiplies being `gemm` of `names`."""

        @wraps(function)
        def observed(*args: Any, **kwargs: Any) -> Any:
            with self.during(names, gemm, **about):
                return function(*args, **kwargs)

        return observed

    @contextmanager
    def installed(self, te: ModuleType) -> Iterator[None]:
        """While entered, every GEMM of Transformer Engine is seen, and those that are computed in its place."""
        extension = importlib.import_module("transformer_engine_torch")
        see = self._seeing(te)
        gemm, multiply = see(extension.generic_gemm), see(products.generic_multiply)
        with holding(extension, generic_gemm=gemm), holding(products, generic_multiply=multiply):
            yield

    # ── What is found ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def faults(self) -> dict[str, list[str]]:
        """What is wrong with operands, by the linear's name; waits for the device, once."""
        found: dict[str, list[str]] = {}
        for finding, figures in self._read():
            fault = describe(figures, finding.grid, finding.scaling)
            for name in finding.names if fault else ():
                found.setdefault(name, []).append(f"{finding.gemm} {finding.role}: {fault}")
        return found

    def scaled(self) -> set[tuple[str, Role]]:
        """Linear and role of each operand of one scale that was not all zeros."""
        whole = ((finding, figures) for finding, figures in self._read() if finding.scaling.block is None)
        return {(name, finding.role) for finding, figures in whole if figures[LARGEST_CODE] > 0 for name in finding.names}

    def _read(self) -> Iterator[tuple[_Finding, list[float]]]:
        if self._findings:
            yield from zip(self._findings, torch.stack([finding.figures for finding in self._findings]).tolist(), strict=True)

    # ── A product of torch ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def torch_product(self, left: Tensor, right: Tensor) -> None:
        """left [m, k] times right [k, n], as the kernel gets them."""
        call = self._calls[-1]
        if call.scales is None or self._active is None:
            self._note(call, dtype_name(left.dtype), dtype_name(right.dtype))
            return
        roles = OPERANDS[call.gemm]
        self._note(call, *(self._active.precision.operand_kind(self._active.settings, role) for role in roles))
        if self._is_examined(call):
            for role, matrix, scales in zip(roles, (left, right.mT), call.scales, strict=True):
                self._examine_emulated(call, role, matrix, scales)

    def _examine_emulated(self, call: _Call, role: Role, matrix: Tensor, scales: ScalesOf) -> None:
        grid, scaling = self._format(role)
        if scaling.block is None:
            scale = scales.tensor if scales.tensor is not None else torch.zeros((), device=matrix.device)  # 0: there is none
            blocks = sample(matrix, None, scaling, self._generator(matrix.device))
            least, most = torch.aminmax(matrix)
            self._find(call, role, grid, scaling, _with_scale(blocks, scale), torch.maximum(-least, most).float())
            return
        self._find(call, role, grid, scaling, sample(matrix, scales.blocks, scaling, self._generator(matrix.device)))
        if self._active.precision.tensor_scaled and scales.blocks is not None:
            self._keep(call, role, grid, scaling, examine_tensor_scale(scales.blocks))

    # ── A product of Transformer Engine ─────────────────────────────────────────────────────────────────────────────────────────

    def _seeing(self, te: ModuleType) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def around(multiply: Callable[..., Any]) -> Callable[..., Any]:
            def observed(left: Any, transposes_left: bool, right: Any, transposes_right: bool, *args: Any, **kwargs: Any) -> Any:
                result = multiply(left, transposes_left, right, transposes_right, *args, **kwargs)
                if self._calls and result is not None:  # None: not computed here
                    with torch.no_grad():
                        self._te_product(te, (left, transposes_left), (right, not transposes_right))
                return result

            return observed

        return around

    def _te_product(self, te: ModuleType, first: tuple[Any, bool], second: tuple[Any, bool]) -> None:
        """cuBLAS counts columns first, so Transformer Engine names the operands the other way round. With each: whether it is
        read by rows."""
        call = self._calls[-1]
        left, right = (first, second) if call.swapped else (second, first)
        gemm = call.gemm or _GEMMS[first[1], not second[1]]
        call = _Call(call.names, gemm)
        self._note(call, operand_kind(te, left[0]), operand_kind(te, right[0]))
        if self._active is not None and self._is_examined(call):
            for role, (operand, by_rows) in zip(OPERANDS[gemm], (left, right), strict=True):
                self._examine_te(te, call, role, operand, by_rows)

    def _examine_te(self, te: ModuleType, call: _Call, role: Role, operand: Any, by_rows: bool) -> None:
        """The scales of FP8 operands against their codes; any byte is a code. MXFP8's and NVFP4's scales lie in an order of the
        kernel's own, and are left to the library."""
        per_tensor = isinstance(operand, te.Float8TensorStorage)
        if not per_tensor and not isinstance(operand, te.Float8BlockwiseQTensorStorage):
            return
        dtype, grid = _FP8[_format(te, operand._fp8_dtype)]
        scaling = self._active.precision.scaling(self._active.settings, role)
        if per_tensor:
            # On GPUs whose products read operands either way there are no transposes.
            transposed = None if by_rows or operand._transpose_invalid else operand._transpose
            data = operand._data if transposed is None else transposed
            if data is None or scaling.block is not None:
                return
            codes = data.reshape(-1, data.shape[-1]).view(dtype)
            # Magnitudes of codes order as their bits do.
            largest = (data.view(torch.uint8) & 0x7F).amax().reshape(1).view(dtype).float().reshape(())
            blocks = sample(codes.view(torch.uint8), None, scaling, self._generator(data.device))
            blocks = blocks._replace(values=blocks.values.view(dtype))
            self._find(call, role, grid, scaling, _with_scale(blocks, operand._scale_inv.reshape(())), largest)
            return
        data = operand._rowwise_data if by_rows else operand._columnwise_data
        scales = operand._rowwise_scale_inv if by_rows else operand._columnwise_scale_inv
        if data is None or scales is None or scaling.block != _BLOCK or scaling.square != operand._is_2D_scaled:
            return
        codes = data.reshape(-1, data.shape[-1]) if by_rows else data.reshape(data.shape[0], -1)
        down = -(-codes.shape[0] // _BLOCK) if scaling.square else codes.shape[0]
        across = -(-codes.shape[1] // _BLOCK)
        scales = (scales if scaling.square else scales.t())[:down, :across]  # padded to a multiple of four
        blocks = sample(codes, scales, scaling, self._generator(data.device))
        values = blocks.values.view(dtype).float() * blocks.scale[:, None]
        self._find(call, role, grid, scaling, blocks._replace(values=values))

    # ── All of them ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _note(self, call: _Call, left: str, right: str) -> None:
        for name in call.names:
            self.products.setdefault(name, []).append(ObservedProduct(call.gemm, left, right))

    def _is_examined(self, call: _Call) -> bool:
        return self._examined is None or not self._examined.isdisjoint(call.names)

    def _find(self, call: _Call, role: Role, grid: Grid, scaling: Scaling, blocks: Sample, largest: Tensor | None = None) -> None:
        self._keep(call, role, grid, scaling, examine(blocks, grid, scaling, largest))

    def _keep(self, call: _Call, role: Role, grid: Grid, scaling: Scaling, figures: Tensor) -> None:
        self._findings.append(_Finding(call.names, call.gemm, role, grid, scaling, figures))

    def _format(self, role: Role) -> tuple[Grid, Scaling]:
        precision, settings = self._active.precision, self._active.settings
        return precision.grid(settings, role), precision.scaling(settings, role)

    def _generator(self, device: torch.device) -> torch.Generator:
        """Returns a generator of its own: a number drawn from torch's would change the run."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


class _TorchProducts(TorchDispatchMode):
    """While entered, tells `observer` of each product of two matrices."""

    def __init__(self, observer: ProductObserver) -> None:
        super().__init__()
        self._observer = observer

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if factors := FACTORS.get(function.overloadpacket):
            self._observer.torch_product(*args[factors])
        return function(*args, **(kwargs or {}))


def _with_scale(blocks: Sample, scale: Tensor) -> Sample:
    """Codes whose tensor has one scale, which is not in them: multiplied by it, as every other operand's blocks are."""
    return blocks._replace(values=blocks.values.float() * scale, scale=scale.float().expand(len(blocks.values)))


def operand_kind(te: ModuleType, operand: Any) -> str:
    """The number format and the scaling of a GEMM's operand, such as "e4m3 tensor-scaled"; of an unquantized tensor its dtype."""
    if isinstance(operand, te.Float8TensorStorage):
        return f"{_format(te, operand._fp8_dtype)} tensor-scaled"
    if isinstance(operand, te.Float8BlockwiseQTensorStorage):
        return f"{_format(te, operand._fp8_dtype)} {'128x128' if operand._is_2D_scaled else '1x128'} blocks"
    if isinstance(operand, te.MXFP8TensorStorage):
        return f"mxfp8 {_format(te, operand._fp8_dtype)}"
    if isinstance(operand, te.NVFP4TensorStorage):
        return "nvfp4 e2m1"
    return dtype_name(operand.dtype) if isinstance(operand, torch.Tensor) else type(operand).__name__


def _format(te: ModuleType, dtype: Any) -> str:
    """kFloat8E4M3 -> e4m3."""
    return te.DType.cast(dtype).name[-4:].lower()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
