"""Which of our Triton functions are kernels, told from their source: without Triton, and without a GPU."""

from __future__ import annotations

import ast
from pathlib import Path


def launched_in(file: Path) -> set[str]:
    """The names of the kernels in `file`: the functions of Triton that no other of them calls."""
    functions = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    kernels = {each.name: each for each in functions if "triton.jit" in map(ast.unparse, each.decorator_list)}
    inside = [node for kernel in kernels.values() for node in ast.walk(kernel) if isinstance(node, ast.Call)]
    return kernels.keys() - {ast.unparse(call.func) for call in inside}
