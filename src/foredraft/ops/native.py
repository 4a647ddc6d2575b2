"""The operations in C++ (csrc/): bfloat16 or quantised weights, float32 activations, bit for bit the same for a row
whatever the number of rows or threads.

Meanings and shapes are those of ``reference.py``. Tensors are made contiguous where they are not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.errors import UserError
from foredraft.quantization.mxfp4 import BLOCK, MXFP4Tensor

_library: Any
try:
    _library = import_module("foredraft._native")
except ImportError as error:
    _library, _reason = None, str(error)

NativeMatrix = Any
"""``_native.Matrix``."""


@cache
def unavailable() -> str | None:
    """Why the native library cannot be used, None when it can. Raises UserError for a wrong FOREDRAFT_ISA."""
    if _library is None:
        return (
            f"the native CPU kernels are not here ({_reason}); to build them, install a C++ compiler and Python's "
            "headers, then install foredraft again"
        )
    try:
        _library.isa()
    except RuntimeError as error:
        raise UserError(str(error)) from error
    return None


def library() -> Any:
    """The extension module; raises UserError when it cannot be used."""
    missing = unavailable()
    if missing is not None:
        raise UserError(missing)
    return _library


def isa() -> str:
    """The instruction set in use: avx512, avx2 or portable."""
    name: str = library().isa()
    return name


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let the kernels use ``count`` threads for a while; results do not depend on it."""
    before = library().threads()
    library().set_threads(count)
    try:
        yield
    finally:
        library().set_threads(before)


@contextmanager
def alone() -> Iterator[None]:
    """Keep PyTorch's operations to the calling thread for a while: on some tens of rows it wakes threads of its own,
    which then wait for processors that the kernels' threads hold, for milliseconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def embedding(token_ids: Tensor, table: NativeMatrix) -> Tensor:
    rows, columns = table.shape
    ids = token_ids.to(torch.int64).contiguous()
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < rows):
        raise IndexError(f"token ids must lie in 0..{rows - 1}")
    out = torch.empty(len(ids), columns)
    library().embedding(table, ids.data_ptr(), len(ids), out.data_ptr())
    return out


def linear(x: Tensor, weight: NativeMatrix, bias: Tensor | None = None) -> Tensor:
    rows, columns = weight.shape
    x = floats(x)
    if x.ndim != 2 or x.shape[1] != columns:
        raise ValueError(f"x is {tuple(x.shape)}, expected [T, {columns}]")
    out = torch.empty(len(x), rows)
    if len(x):
        # The kernel reads a bias by whole panels.
        padded = None if bias is None else torch.nn.functional.pad(bias.float(), (0, -rows % BLOCK)).contiguous()
        library().linear(weight, x.data_ptr(), len(x), 0 if padded is None else padded.data_ptr(), out.data_ptr())
    return out


def pack(weight: Tensor | MXFP4Tensor, form: str) -> NativeMatrix:
    rows, columns = weight.shape
    formats = library().Format
    if isinstance(weight, MXFP4Tensor):
        if bool((weight.scales == 255).any()):
            raise UserError("an MXFP4 weight has NaN scales (255); the checkpoint is damaged")
        chosen = formats.mxfp4_a16 if form == "mxfp4_a16" else formats.mxfp4
        codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
        return library().Matrix.from_mxfp4(codes.data_ptr(), scales.data_ptr(), rows, columns, chosen)
    values = weight.detach().to(torch.bfloat16).contiguous()
    try:
        return library().Matrix.from_bf16(values.data_ptr(), rows, columns, getattr(formats, form))
    except ValueError as error:
        raise UserError(f"{error} and cannot be quantised; the checkpoint is damaged") from error


def unpack(weight: NativeMatrix) -> Tensor:
    return embedding(torch.arange(weight.shape[0]), weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, weight = floats(x), floats(weight)
    out = torch.empty_like(x)
    size = x.shape[-1]
    library().rms_norm(x.data_ptr(), weight.data_ptr(), x.numel() // size, size, eps, out.data_ptr())
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x, cos, sin = floats(x), floats(cos), floats(sin)
    out = torch.empty_like(x)
    library().rope(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), *x.shape, out.data_ptr())
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    gate_up = floats(gate_up)
    rows, both = gate_up.shape
    out = torch.empty(rows, both // 2)
    library().silu_mul(gate_up.data_ptr(), rows, both // 2, out.data_ptr())
    return out


def argmax(x: Tensor) -> Tensor:
    x = floats(x)
    out = torch.empty(len(x), dtype=torch.int64)
    library().argmax(x.data_ptr(), *x.shape, out.data_ptr())
    return out


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    logits = floats(logits)
    ids, log_probs = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
    library().best(logits.data_ptr(), *logits.shape, ids.data_ptr(), log_probs.data_ptr())
    return ids, log_probs


def gumbel_argmax(
    scores: NDArray[np.float32],
    seed: int,
    position: int,
    stream: int,
    ids: NDArray[np.int64] | NDArray[np.int32] | None = None,
) -> int:
    """The index of the winner of ``scores [V]`` plus the Gumbel noise of ``noise.py``; -1 where the highest
    score is NaN or infinite.

    ids: ascending, the tokens [V] of the scores of a reduced vocabulary, whose noise they get; by default 0, 1, ...
    """
    tokens = None if ids is None else np.ascontiguousarray(ids, dtype=np.int64)
    if tokens is not None and len(tokens) != len(scores):
        raise ValueError(f"there are {len(scores)} scores, {len(tokens)} ids")
    winner: int = library().gumbel_argmax(
        scores.ctypes.data,
        len(scores),
        seed & 0xFFFFFFFFFFFFFFFF,
        position,
        int(stream),
        0 if tokens is None else tokens.ctypes.data,
    )
    return winner


def quantize(weight: Tensor) -> MXFP4Tensor:
    """As ``quantization.mxfp4.quantize`` with its rule "mse", for bfloat16 [N, K], K a multiple of 32."""
    rows, columns = weight.shape
    values = weight.detach().to(torch.bfloat16).contiguous()
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8)
    scales = torch.empty(rows, columns // BLOCK, dtype=torch.uint8)
    try:
        library().quantize_mxfp4(values.data_ptr(), rows, columns, codes.data_ptr(), scales.data_ptr())
    except ValueError as error:
        raise UserError(f"{error} and cannot be MXFP4") from error
    return MXFP4Tensor(codes, scales)


def release_free_memory() -> None:
    """Give back to the system what loading has freed but the C library still keeps."""
    library().release_free_memory()


def floats(x: Tensor) -> Tensor:
    """``x`` as the kernels take it."""
    if x.dtype == torch.float32 and x.is_contiguous():
        return x
    return x.float().contiguous()
