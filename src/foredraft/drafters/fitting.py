"""Fitting a drafter to its target: shapes that must agree, weights in the target's form, the head they may share."""

from collections.abc import Iterable
from typing import TypeVar

from torch import Tensor

from foredraft.drafters.weights import map_tensors
from foredraft.errors import UserError
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import DecoderModel
from foredraft.ops import Format, Matrix, Operations

T = TypeVar("T")

FORM: Format = "int8"
"""The native kernels run a drafter in 8 bits: the target has the last word anyway."""


def check_shape(shape: ModelConfig, num_target_layers: int, target: ModelConfig) -> None:
    """Raise UserError unless a drafter with layers of ``shape`` was made for a target like this."""
    check_equal(
        [
            ("hidden size", shape.hidden_size, target.hidden_size),
            ("vocabulary size", shape.vocab_size, target.vocab_size),
            ("number of target layers", num_target_layers, target.num_layers),
        ]
    )


def check_equal(pairs: Iterable[tuple[str, int, int]]) -> None:
    """Raise UserError unless what the drafter expects, (name, its value, the target's), is so."""
    for what, mine, theirs in pairs:
        if mine != theirs:
            raise UserError(f"the drafter was made for another target: its {what} is {mine}, the target's is {theirs}")


def fitted(weights: T, target: DecoderModel) -> T:
    """``weights`` on the target's device and, but for token ids, in its dtype."""
    return map_tensors(weights, lambda tensor: tensor.to(device=target.device, dtype=target.dtype))


def draft_head(own: Tensor | None, ids: Tensor | None, target: DecoderModel, ops: Operations) -> Matrix:
    """The head [Vd, K] of a drafter: its own, or the target's rows ``ids [Vd]``, all of them for None."""
    if own is None and ids is None:
        return target.head
    return ops.pack(target.head_rows(ids) if own is None else own, FORM)
