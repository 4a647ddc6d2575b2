"""The operations models are written in, as one table per implementation."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from foredraft.ops import reference
from foredraft.ops.plan import AttentionPlan

__all__ = ["REFERENCE", "Operations"]


@dataclass(frozen=True)
class Operations:
    """One implementation of every operation; ``reference.py`` says what each means."""

    name: str
    embedding: Callable[[Tensor, Tensor], Tensor]
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    attention: Callable[[Tensor, Tensor, Tensor, AttentionPlan], Tensor]


REFERENCE = Operations(
    name="pytorch",
    embedding=reference.embedding,
    linear=reference.linear,
    pack=reference.pack,
    unpack=reference.unpack,
    rms_norm=reference.rms_norm,
    rope=reference.rope,
    silu_mul=reference.silu_mul,
    attention=reference.attention,
)
