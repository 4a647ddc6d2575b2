"""A drafter's weights are dataclasses of tensors, nested in tuples and dataclasses; these walk them."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


def map_tensors(weights: T, function: Callable[[Tensor], Tensor]) -> T:
    """The same weights with ``function`` applied to every floating-point tensor."""
    mapped: Any = _mapped(weights, function)
    return mapped  # type: ignore[no-any-return]


def named_tensors(weights: object, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every floating-point tensor with its path, such as ``layers.0.qkv``."""
    if isinstance(weights, Tensor):
        if weights.is_floating_point():
            yield prefix, weights
    elif isinstance(weights, tuple):
        for index, part in enumerate(weights):
            yield from named_tensors(part, f"{prefix}.{index}" if prefix else str(index))
    elif is_dataclass(weights):
        for field in fields(weights):
            yield from named_tensors(getattr(weights, field.name), f"{prefix}.{field.name}" if prefix else field.name)


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_mapped(part, function) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _mapped(getattr(value, field.name), function) for field in fields(value)})
    return value
