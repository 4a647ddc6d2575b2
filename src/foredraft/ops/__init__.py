"""The operations models are written in, as one table per implementation."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from foredraft.errors import UserError
from foredraft.ops import native, reference
from foredraft.quantization.mxfp4 import MXFP4Tensor

__all__ = ["NATIVE", "REFERENCE", "Format", "Kernels", "Matrix", "Operations", "Weight", "operations"]

Weight: TypeAlias = Tensor | MXFP4Tensor
"""A matrix [N, K] as a checkpoint holds it."""

Matrix: TypeAlias = Any
"""A weight as an implementation's ``pack`` returns it; it has a ``shape``."""

Format = Literal["bf16", "int8", "mxfp4", "mxfp4_a16"]
"""How a matrix is stored and multiplied by the native kernels: bfloat16; 8-bit weights and activations; MXFP4 weights
with 8-bit activations (W4A8); MXFP4 weights with bfloat16 activations (W4A16). PyTorch multiplies in the model's dtype
what MXFP4 stands for, and takes the first two as the weight is."""

Kernels = Literal["auto", "native", "pytorch"]


@dataclass(frozen=True)
class Operations:
    """One implementation of every operation; ``reference.py`` says what each means."""

    name: str
    embedding: Callable[[Tensor, Matrix], Tensor]
    linear: Callable[[Tensor, Matrix, Tensor | None], Tensor]
    pack: Callable[[Weight, Format], Matrix]
    unpack: Callable[[Matrix], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    argmax: Callable[[Tensor], Tensor]
    best: Callable[[Tensor], tuple[Tensor, Tensor]]


def _table(name: str, module: Any) -> Operations:
    functions = ("embedding", "linear", "pack", "unpack", "rms_norm", "rope", "silu_mul", "argmax", "best")
    return Operations(name, **{function: getattr(module, function) for function in functions})


REFERENCE = _table("pytorch", reference)
NATIVE = _table("native", native)


def operations(kernels: Kernels, dtype: torch.dtype, device: str) -> Operations:
    """The implementation that ``kernels`` names.

    auto: native for bfloat16 on a CPU, PyTorch for all else, and with a word where the native library is missing.
    Raises UserError for an unknown name, or for native where it cannot run.
    """
    if kernels not in get_args(Kernels):
        raise UserError(f"kernels is {kernels!r}, expected one of {', '.join(get_args(Kernels))}")
    fits = torch.device(device).type == "cpu" and dtype == torch.bfloat16
    if kernels == "pytorch" or (kernels == "auto" and not fits):
        return REFERENCE
    if not fits:
        raise UserError(f"the native kernels run bfloat16 on the cpu, not {dtype} on {device}")
    missing = native.unavailable()
    if missing is None:
        return NATIVE
    if kernels == "native":
        raise UserError(missing)
    _say_once(f"{missing}; running on PyTorch, which is slower and not bit-exact")
    return REFERENCE


@cache
def _say_once(message: str) -> None:
    logging.getLogger("foredraft").warning("foredraft: %s", message)
