"""MXFP4: blocks of 32 four-bit floats with one power-of-two scale (OCP Microscaling Formats (MX) v1.0)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from foredraft.errors import UserError

BLOCK = 32
"""Elements that share a scale."""

Rule = Literal["mse", "ocp"]

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the low three bits of an E2M1 code stand for; the fourth is the sign (section 5.3.3)."""

_BIAS = 127
_NAN_SCALE = 255
# A scale of 2^125 and below keeps every product with a code finite in bfloat16 and float32.
_LOWEST, _HIGHEST = -_BIAS, 125
# Torch's cost per call is small beside this many elements, and the temporaries still take a few megabytes.
_CHUNK = 1 << 18


@dataclass(frozen=True, eq=False)
class MXFP4Tensor:
    """A matrix [N, K] in MXFP4.

    codes: uint8 [N, K/2], two E2M1 elements a byte, the one of even k in the low nibble.
    scales: uint8 [N, K/32], E8M0: block b of a row is multiplied by 2^(scales[n, b] - 127); 255 is NaN.
    Raises UserError when the two do not fit together.
    """

    codes: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        for name, tensor in (("codes", self.codes), ("scales", self.scales)):
            if tensor.dtype != torch.uint8 or tensor.ndim != 2:
                raise UserError(f"MXFP4 {name} must be a uint8 matrix, not {tensor.dtype} {tuple(tensor.shape)}")
        (rows, half), (scale_rows, blocks) = self.codes.shape, self.scales.shape
        if rows != scale_rows or 2 * half != BLOCK * blocks:
            raise UserError(
                f"MXFP4 codes {(rows, half)} and scales {(scale_rows, blocks)} do not fit together: "
                f"expected [N, K/2] and [N, K/{BLOCK}]"
            )

    @property
    def shape(self) -> torch.Size:
        rows, half = self.codes.shape
        return torch.Size((rows, 2 * half))

    @property
    def ndim(self) -> int:
        return 2

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The values [N, K], exact in bfloat16, float32 and float64 (infinite where 2^128 or more)."""
        device = self.codes.device
        values = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], dtype=dtype, device=device)
        pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1)
        scales = _powers_of_two(values)
        result = torch.empty(self.shape, dtype=dtype, device=device)
        for part in _row_chunks(self.shape):
            elements = pairs[self.codes[part].int()].view(*self.scales[part].shape, BLOCK)
            torch.mul(elements, scales[self.scales[part].int()].unsqueeze(-1), out=result[part].view(elements.shape))
        return result

    def rows(self, index: Tensor | slice) -> "MXFP4Tensor":
        """The chosen rows."""
        return MXFP4Tensor(self.codes[index], self.scales[index])

    @staticmethod
    def cat(parts: Sequence["MXFP4Tensor"]) -> "MXFP4Tensor":
        """The rows of all ``parts``, in order; they must have the same K."""
        return MXFP4Tensor(torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts]))


def quantize(weight: Tensor, rule: Rule = "mse") -> MXFP4Tensor:
    """A matrix [N, K] of finite values in MXFP4; K is a multiple of 32.

    rule "ocp": the scale 2^(floor(log2 max|w|) - 2) of the specification (section 6.3). rule "mse": of all scales
    the one with the least squared error over the block, the specification's where they are equal. Either rounds
    to the nearest element, ties to the even code, and saturates at 6. A block of zeros has the smallest scale, 2^-127;
    scales above 2^125 are not used, so that every result is finite in bfloat16.
    The specification leaves NaN and infinity to the implementation: a weight that has them is broken, so they raise
    UserError, as do other shapes.
    """
    if rule not in get_args(Rule):
        raise UserError(f"the scale rule is {rule!r}, expected one of {', '.join(get_args(Rule))}")
    if weight.ndim != 2 or weight.shape[1] % BLOCK:
        raise UserError(
            f"a weight of shape {tuple(weight.shape)} cannot be MXFP4: it must be a matrix whose number of columns "
            f"is a multiple of {BLOCK}"
        )
    rows, columns = weight.shape
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, columns // BLOCK, dtype=torch.uint8, device=weight.device)
    for part in _row_chunks(weight.shape):
        values = weight[part].to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
        block_codes, block_scales = _quantize_blocks(values.reshape(-1, BLOCK), rule)
        codes[part] = (block_codes[:, 0::2] | block_codes[:, 1::2] << 4).view(-1, columns // 2)
        scales[part] = block_scales.view(-1, columns // BLOCK)
    return MXFP4Tensor(codes, scales)


def relative_error(weight: Tensor, quantized: MXFP4Tensor) -> float:
    """Norm of the difference over the norm of ``weight`` [N, K] (Frobenius); 0 for a weight of zeros."""
    difference = total = 0.0
    for part in _row_chunks(weight.shape):
        values = weight[part].float()
        difference += float(
            (values - quantized.rows(part).dequantize(torch.float32)).square_().sum(dtype=torch.float64)
        )
        total += float(values.square().sum(dtype=torch.float64))
    return (difference / total) ** 0.5 if total else 0.0


def _quantize_blocks(blocks: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Codes [B, 32] and scale bytes [B] of ``blocks`` [B, 32]."""
    magnitudes = blocks.abs()
    largest = magnitudes.amax(dim=1)
    if not largest.isfinite().all():
        raise UserError("a weight with NaN or infinite values cannot be MXFP4")
    # frexp's mantissa lies in [1/2, 1), so its exponent is floor(log2) + 1.
    exponents = torch.frexp(largest).exponent.where(largest > 0, _LOWEST) - 3
    scales = exponents.clamp(_LOWEST, _HIGHEST) + _BIAS
    scaled = magnitudes.mul_(_powers_of_two(blocks)[2 * _BIAS - scales].unsqueeze(1))
    codes = _nearest(scaled)
    if rule == "mse":
        _improve(scaled, codes, scales)
    codes.bitwise_or_(blocks.signbit().view(torch.uint8) << 3)
    return codes, scales.to(torch.uint8)


def _improve(scaled: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Where another scale than the specification's has less squared error, take it (in place).

    scaled: magnitudes [B, 32] over the specification's scale, so that the largest, t, is in [4, 8), or less with
    the smallest scale.
    Only the neighbours can win, and only for some t:
    - Twice the scale has the elements 0 1 2 3 4 6 8, a subset of the present ones but for 8, to which only t > 7 is
      nearer than to 6. Larger scales have, below 8, subsets of these.
    - Half the scale adds 1/4 and 3/4, which gain at most (1/4)^2 for each of the other 31, and loses
      (t - 3)^2 - (t - 4)^2 = 2 t - 7 or more at the largest; that is the smaller for t < 4.46875 only. A quarter of the
      scale loses at least 6.25 there and gains at most 31 / 16.
    """
    largest = scaled.amax(dim=1)
    up = (largest > 7) & (scales < _HIGHEST + _BIAS)
    down = (largest < 4.46875) & (scales > 0)
    index = (up | down).nonzero().squeeze(1)
    step = up[index].to(scales.dtype) - down[index].to(scales.dtype)
    factor = torch.where(step > 0, 0.5, 2.0).to(scaled.dtype).unsqueeze(1)
    present, present_codes = scaled[index], codes[index]
    other = present * factor
    other_codes = _nearest(other)
    # The factors are powers of two, so that nothing is rounded and equal errors compare as equal.
    better = _squared_error(other, other_codes) < _squared_error(present, present_codes) * factor.squeeze(1) ** 2
    codes[index] = torch.where(better.unsqueeze(1), other_codes, present_codes)
    scales[index] += step.where(better, 0)


def _nearest(scaled: Tensor) -> Tensor:
    """Codes (uint8) of the magnitudes nearest to ``scaled``, which is not negative; ties to the even code."""
    codes = torch.zeros_like(scaled, dtype=torch.uint8)
    for code, (below, above) in enumerate(pairwise(MAGNITUDES), start=1):
        middle = (below + above) / 2
        reached = scaled >= middle if code % 2 == 0 else scaled > middle
        codes += reached.view(torch.uint8)
    return codes


def _squared_error(scaled: Tensor, codes: Tensor) -> Tensor:
    """Sums [B] in float64 over blocks; the differences themselves are exact in float32."""
    magnitudes = torch.tensor(MAGNITUDES, dtype=scaled.dtype, device=scaled.device)
    return (magnitudes[codes.int()] - scaled).double().square_().sum(dim=1)


def _powers_of_two(like: Tensor) -> Tensor:
    """2^(byte - 127) for all scale bytes, in the dtype and on the device of ``like``; the last is NaN."""
    values = [2.0 ** (byte - _BIAS) for byte in range(_NAN_SCALE)]
    return torch.tensor([*values, torch.nan], dtype=torch.float64).to(like)


def _row_chunks(shape: torch.Size) -> list[slice]:
    rows, columns = shape
    step = max(1, _CHUNK // max(1, columns))
    return [slice(start, start + step) for start in range(0, rows, step)]
