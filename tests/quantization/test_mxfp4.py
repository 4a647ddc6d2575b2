"""MXFP4 against ml_dtypes, an independent implementation of both of its number formats, and by hand."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from foredraft.errors import UserError
from foredraft.quantization import mxfp4
from foredraft.quantization.mxfp4 import MXFP4Tensor, Rule, quantize, relative_error

ELEMENTS = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
SCALES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)


def unpacked(codes: Tensor) -> NDArray[Any]:
    """Codes [N, K], in the order that the low nibble comes first."""
    packed = codes.numpy()
    return np.stack([packed % 16, packed // 16], axis=-1).reshape(len(packed), -1)


def decoded(tensor: MXFP4Tensor) -> NDArray[Any]:
    scales = SCALES[tensor.scales.numpy()].repeat(32, axis=1)
    return np.asarray(ELEMENTS[unpacked(tensor.codes)] * scales)


def block(*values: float) -> Tensor:
    """One row of one block: ``values``, then zeros."""
    return torch.tensor([[*values, *[0.0] * (32 - len(values))]])


def all_codes(scales: Tensor) -> MXFP4Tensor:
    """A block of every code, twice, for each scale."""
    pairs = torch.arange(0, 16, 2) + 16 * torch.arange(1, 16, 2)
    return MXFP4Tensor(pairs.repeat(len(scales), 2).to(torch.uint8), scales.to(torch.uint8).unsqueeze(1))


def test_the_sixteen_elements() -> None:
    """Table 5 of the specification."""
    values = all_codes(torch.tensor([127])).dequantize(torch.float32)[0, :16].tolist()
    assert values[:8] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert values[8:] == [-value for value in values[:8]]
    assert math.copysign(1, values[8]) == -1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_code_with_every_scale(dtype: torch.dtype) -> None:
    tensor = all_codes(torch.arange(256))
    values = tensor.dequantize(dtype).double().numpy()
    expected = decoded(tensor)
    assert np.isnan(expected[255]).all()
    if dtype != torch.float64:
        expected = np.where(np.abs(expected) >= 2.0**128, np.copysign(np.inf, expected), expected)
        assert np.isinf(expected[254]).any() and not np.isinf(expected[:253]).any()
    assert np.array_equal(values, expected, equal_nan=True)
    assert np.array_equal(np.signbit(values[:255]), np.signbit(expected[:255]))


def test_the_low_nibble_is_the_even_column() -> None:
    tensor = quantize(block(4.0, -0.5, 3.0), "ocp")
    assert tensor.codes[0, :2].tolist() == [0x6 | 0x9 << 4, 0x5]
    assert tensor.scales.tolist() == [[127]]


def test_rounding_is_that_of_ml_dtypes() -> None:
    """Every bfloat16 below 8 in size, ties included, in blocks whose largest value gives them the scale 1."""
    values = torch.arange(0x10000, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[values.abs() < 8]
    values = torch.cat([values, torch.zeros(-len(values) % 31)]).view(-1, 31)
    weight = torch.cat([torch.full((len(values), 1), 4.0), values], dim=1)
    tensor = quantize(weight, "ocp")
    assert (tensor.scales == 127).all()
    expected = weight.numpy().clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(unpacked(tensor.codes), expected)


@pytest.mark.parametrize(
    ("value", "nearest"),
    [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5.0, 4), (0.2501, 0.5), (4.9999, 4), (5.0001, 6)],
)
def test_ties_go_to_the_even_code(value: float, nearest: float) -> None:
    values = quantize(block(4.0, value, -value), "ocp").dequantize(torch.float32)[0, 1:3].tolist()
    assert values == [nearest, -nearest]
    assert math.copysign(1, values[1]) == -1


@pytest.mark.parametrize("value", [6.0, 6.9, 7.0, 7.9999995])
def test_the_specifications_scale_saturates(value: float) -> None:
    tensor = quantize(block(value, -value), "ocp")
    assert tensor.scales.tolist() == [[127]]
    assert tensor.dequantize()[0, :2].tolist() == [6, -6]


@pytest.mark.parametrize(
    ("largest", "others", "scale", "values"),
    [
        (7.0, 0.0, 127, (6, 0)),  # 6 and 8 are as near: the specification's scale stays
        (7.01, 0.0, 128, (8, 0)),
        (7.5, 0.5, 127, (6, 0.5)),  # 2.25 at the largest against 0.25 there and 31 / 4 at the others
        (4.0, 0.25, 126, (3, 0.25)),  # 31 / 16 at the others against 1 at the largest
        (4.46, 0.25, 126, (3, 0.25)),
        (4.47, 0.25, 127, (4, 0)),
        (4.0, 0.5, 127, (4, 0.5)),
    ],
)
def test_the_least_squared_error_by_hand(
    largest: float, others: float, scale: int, values: tuple[float, float]
) -> None:
    weight = torch.full((1, 32), others)
    weight[0, 17] = largest
    tensor = quantize(weight)
    assert tensor.scales.tolist() == [[scale]]
    assert (tensor.dequantize()[0, 17].item(), tensor.dequantize()[0, 0].item()) == values
    assert quantize(-weight).dequantize()[0, 17].item() == -values[0]


@pytest.mark.parametrize("rule", ["mse", "ocp"])
def test_the_ends_of_the_scales_range(rule: Rule) -> None:
    tiny = 2.0**-127
    for value, scale, result in [
        (0.0, 0, 0.0),
        (2.0**-149, 0, 0.0),  # float32's smallest
        (tiny / 4, 0, 0.0),
        (tiny / 2, 0, tiny / 2),
        (1.5 * tiny, 0, 1.5 * tiny),
        (4 * tiny, 0, 4 * tiny),
        (8 * tiny, 1, 8 * tiny),
        (2.0**127, 252, 2.0**127),
        (1.75 * 2.0**127, 252, 1.5 * 2.0**127),
        (torch.finfo(torch.float32).max, 252, 1.5 * 2.0**127),
    ]:
        tensor = quantize(block(value), rule)
        assert tensor.scales.tolist() == [[scale]], value
        assert tensor.dequantize().double()[0, 0].item() == result, value


def test_no_scale_below_the_smallest() -> None:
    """Where half the scale would be better, as in the example by hand, but there is none."""
    weight = torch.full((1, 32), 0.25)
    weight[0, 0] = 4.0
    assert quantize(weight * 2.0**-126).scales.tolist() == [[0]]
    assert quantize(weight * 2.0**-127).scales.tolist() == [[0]]


def test_zeros_keep_their_sign() -> None:
    tensor = quantize(block(-0.0, 0.0))
    assert tensor.scales.tolist() == [[0]] and tensor.codes[0, 0].item() == 0x08


# Values on a grid of the format's halves and quarters meet ties; the others do not.
on_a_grid = st.lists(st.integers(-32, 32), min_size=32, max_size=32).map(lambda values: [x / 4 for x in values])
near_a_quarter = st.tuples(
    st.floats(3.75, 8.25, width=32),
    st.lists(st.sampled_from([0.0, 0.25, -0.25, 0.75, 0.3, 1.0]), min_size=31, max_size=31),
).map(lambda drawn: [drawn[0], *drawn[1]])
anything = st.lists(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), min_size=32, max_size=32)
blocks = st.tuples(st.one_of(on_a_grid, near_a_quarter, anything), st.integers(-20, 20)).map(
    lambda drawn: torch.tensor([drawn[0]], dtype=torch.float32) * 2.0 ** drawn[1]
)


def squared_error(weight: Tensor, values: NDArray[Any]) -> float:
    return math.fsum((weight.double().numpy().ravel() - values.ravel()) ** 2)


def every_scale(weight: Tensor) -> dict[int, float]:
    """Squared error with each scale byte whose values are all finite in bfloat16."""
    scales = SCALES[:253, np.newaxis]
    scaled = (weight.double().numpy() / scales).clip(-6, 6)
    values = scaled.astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * scales
    return {byte: squared_error(weight, row) for byte, row in enumerate(values)}


@settings(max_examples=500)
@given(blocks)
def test_mse_is_the_best_of_all_scales(weight: Tensor) -> None:
    best, ocp = quantize(weight), quantize(weight, "ocp")
    errors = every_scale(weight)
    chosen, specified = best.scales.item(), ocp.scales.item()
    assert squared_error(weight, decoded(best)) == errors[int(chosen)]
    assert squared_error(weight, decoded(ocp)) == errors[int(specified)]
    least = min(errors.values())
    assert least <= errors[int(chosen)] <= least * (1 + 1e-12)
    if errors[int(specified)] == least:
        assert chosen == specified


@given(blocks)
def test_the_specifications_scale(weight: Tensor) -> None:
    largest = weight.abs().max().item()
    exponent = math.floor(math.log2(largest)) - 2 if largest else -127
    assert SCALES[quantize(weight, "ocp").scales.item()] == 2.0 ** max(exponent, -127)


@pytest.mark.parametrize("rule", ["mse", "ocp"])
@given(weight=blocks)
def test_quantising_again_changes_nothing(rule: Rule, weight: Tensor) -> None:
    once = quantize(weight, rule)
    again = quantize(once.dequantize(), rule)
    assert torch.equal(once.codes, again.codes) and torch.equal(once.scales, again.scales)
    assert np.array_equal(once.dequantize().double().numpy(), decoded(once))


@given(st.integers(0, 2**32 - 1))
def test_values_of_the_format_stay(seed: int) -> None:
    """Whatever the codes and scales, quantising their values loses nothing."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (4, 32), generator=generator, dtype=torch.uint8)
    scales = torch.randint(4, 253, (4, 2), generator=generator).to(torch.uint8)
    values = MXFP4Tensor(codes, scales).dequantize()
    for rule in ("mse", "ocp"):
        assert torch.equal(quantize(values, rule).dequantize(), values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    tensor, expected = quantize(weight), quantize(weight.float())
    if dtype == torch.float64:
        expected = quantize(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(tensor.codes, expected.codes) and torch.equal(tensor.scales, expected.scales)


def test_rows_are_taken_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(10, 96, generator=torch.Generator().manual_seed(0))
    whole = quantize(weight)
    values, error = whole.dequantize(), relative_error(weight, whole)
    seen = []
    quantize_blocks = mxfp4._quantize_blocks
    monkeypatch.setattr(mxfp4, "_CHUNK", 300)
    monkeypatch.setattr(
        mxfp4, "_quantize_blocks", lambda blocks, rule: seen.append(blocks.numel()) or quantize_blocks(blocks, rule)
    )
    parts = quantize(weight)
    assert seen == [288, 288, 288, 96]
    assert torch.equal(parts.codes, whole.codes) and torch.equal(parts.scales, whole.scales)
    assert torch.equal(parts.dequantize(), values)
    assert relative_error(weight, parts) == pytest.approx(error, rel=1e-12)


def test_a_transposed_weight() -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(quantize(weight.T).codes, quantize(weight.T.contiguous()).codes)


def test_shape_rows_and_cat() -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    tensor = quantize(weight)
    assert tensor.shape == (6, 64) and tensor.ndim == 2 and isinstance(tensor.shape, torch.Size)
    assert tensor.nbytes == 6 * (32 + 2)
    values = tensor.dequantize()
    assert torch.equal(tensor.rows(slice(1, 4)).dequantize(), values[1:4])
    assert torch.equal(tensor.rows(torch.tensor([5, 0, 5])).dequantize(), values[[5, 0, 5]])
    assert torch.equal(
        MXFP4Tensor.cat([tensor.rows(slice(4, 6)), tensor]).dequantize(), torch.cat([values[4:], values])
    )


def test_relative_error() -> None:
    weight = block(4.0, 3.5, 2.0)
    assert relative_error(weight, quantize(weight, "ocp")) == pytest.approx((0.25 / 32.25) ** 0.5)
    assert relative_error(torch.zeros(1, 32), quantize(torch.zeros(1, 32))) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_no_weights(value: float) -> None:
    with pytest.raises(UserError, match="NaN or infinite"):
        quantize(torch.cat([block(1.0), block(value)]))


@pytest.mark.parametrize("shape", [(4, 33), (4, 16), (32,), (2, 2, 32)])
def test_shapes_without_blocks(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"multiple of 32"):
        quantize(torch.zeros(shape))


def test_an_unknown_rule() -> None:
    with pytest.raises(UserError, match="'best', expected one of mse, ocp"):
        quantize(block(1.0), "best")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("codes", "scales"),
    [
        (torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8)),
        (torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(3, 2, dtype=torch.uint8)),
        (torch.zeros(2, 32, dtype=torch.int8), torch.zeros(2, 2, dtype=torch.uint8)),
        (torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 2)),
        (torch.zeros(64, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8)),
    ],
)
def test_parts_that_do_not_fit(codes: Tensor, scales: Tensor) -> None:
    with pytest.raises(UserError, match="MXFP4"):
        MXFP4Tensor(codes, scales)
