"""The native operations against closed forms in float64, and bit for bit against themselves in other company.

Every instruction set runs the same tests: FOREDRAFT_ISA=avx2 or portable in pytest's environment.
"""

import os
from functools import partial

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from foredraft.errors import UserError
from foredraft.ops import native, noise, reference
from foredraft.ops.noise import gumbel_argmax
from foredraft.quantization.mxfp4 import MXFP4Tensor, quantize

MISSING = native.unavailable()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

FORMS = ("bf16", "int8", "mxfp4", "mxfp4_a16")
BLOCK = 32
# N and K around the kernels' panels and blocks of 32, and above them.
SHAPES = [(1, 1), (5, 7), (31, 33), (32, 32), (33, 31), (48, 64), (70, 161), (257, 96), (64, 576)]
# Around the rows that one tile holds (4, 6 or 8), and the rows that stay in the cache (96).
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 64, 70, 100]
# The rounding of a float32 operation, twice, for the scales that are multiplied first.
FLOAT32 = 2.0**-23


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def weight(n: int, k: int, seed: int = 1) -> Tensor:
    """Rows of sizes that differ."""
    return (random(n, k, seed=seed) * torch.logspace(-2, 1, n).unsqueeze(1)).bfloat16()


def padded(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.shape[-1] % BLOCK))


def eight_bit(x: Tensor) -> Tensor:
    """What activations [T, K] become: per block of 32 an integer of at most 127 times amax / 127, in float64.

    The integer is that of float32 arithmetic, which decides values that lie close to the middle between two.
    """
    blocks = padded(x).view(len(x), -1, BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, 127 / largest, 0)
    return ((blocks * inverse).round().double() * (largest.double() / 127)).view(len(x), -1)[:, : x.shape[1]]


def activations(x: Tensor, form: str) -> Tensor:
    """``x`` as the products of ``form`` see it, in float64."""
    return x.bfloat16().double() if form in ("bf16", "mxfp4_a16") else eight_bit(x)


def quantized(w: Tensor) -> MXFP4Tensor:
    """With zeros up to a whole number of blocks."""
    return quantize(padded(w))


def stands_for(w: Tensor, form: str) -> Tensor:
    """What a weight becomes, in float64; for int8 what the kernels say it became."""
    if form.startswith("mxfp4"):
        return quantized(w).dequantize(torch.float64)[:, : w.shape[1]]
    return native.unpack(native.pack(w, form)).double() if form == "int8" else w.double()


def assert_product(found: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None) -> None:
    """``found`` is x @ w.T + bias (float64) but for the rounding of float32 sums."""
    expected, size = x @ w.T, x.abs() @ w.abs().T
    if bias is not None:
        expected, size = expected + bias.double(), size + bias.double().abs()
    excess = (found.double() - expected).abs() - (x.shape[1] + 8) * FLOAT32 * size
    assert found.dtype == torch.float32 and found.shape == expected.shape
    assert excess.max() <= 0


def test_the_instruction_set_is_the_one_asked_for() -> None:
    assert native.isa() == (os.environ.get("FOREDRAFT_ISA") or native.isa())
    assert native.isa() in ("avx512", "avx2", "portable")


def test_threads_are_those_of_the_process() -> None:
    library = native.library()
    assert library.available_threads() == len(os.sched_getaffinity(0))
    with native.threads(3):
        assert library.threads() == 3
    with pytest.raises(ValueError, match="at least 1"):
        library.set_threads(0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear(form: str, shape: tuple[int, int]) -> None:
    n, k = shape
    w, bias = weight(n, k), random(n, seed=2)
    packed = native.pack(w, form)
    assert packed.shape == (n, k)
    values = stands_for(w, form)
    for rows in ROWS:
        x = random(rows, k, seed=rows, scale=3.0)
        assert_product(native.linear(x, packed), activations(x, form), values)
        assert_product(native.linear(x, packed, bias), activations(x, form), values, bias)


@pytest.mark.parametrize("form", FORMS)
def test_linear_of_rows_and_blocks_that_differ_widely(form: str) -> None:
    """Every block of every row has a scale of its own, from 1e-6 to 1e6; some are zeros."""
    x = random(9, 8 * BLOCK) * torch.logspace(-3, 3, 9).unsqueeze(1)
    x.view(9, 8, BLOCK).mul_(torch.logspace(3, -3, 8).unsqueeze(-1))
    x[3, BLOCK : 2 * BLOCK] = 0
    x[5] = 0
    w = weight(40, 8 * BLOCK)
    w.view(40, 8, BLOCK).mul_(torch.logspace(-2, 2, 8).bfloat16().unsqueeze(-1))
    w[7, :BLOCK] = 0
    w[9] = 0
    found = native.linear(x, native.pack(w, form))
    assert_product(found, activations(x, form), stands_for(w, form))
    assert not found[5].any() and not found[:, 9].any()


@pytest.mark.parametrize("form", ["int8", "mxfp4"])
def test_integers_are_multiplied_exactly(form: str) -> None:
    """With a largest element of 127 the activations' scale is 1; all sums are small enough to be exact in float32."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-127, 128, (11, 5 * BLOCK), generator=generator).float()
    x[:, ::BLOCK] = torch.tensor([127.0, -127.0]).repeat(6)[:11].unsqueeze(1)
    if form == "int8":
        w = torch.randint(-127, 128, (45, 5 * BLOCK), generator=generator).bfloat16()
        w[:, 5::BLOCK] = -127
        packed = native.pack(w, form)
        assert torch.equal(native.unpack(packed), w.float())
    else:
        codes = torch.randint(0, 256, (45, 5 * BLOCK // 2), generator=generator, dtype=torch.uint8)
        tensor = MXFP4Tensor(codes, torch.randint(125, 130, (45, 5), generator=generator, dtype=torch.uint8))
        packed, w = native.pack(tensor, form), tensor.dequantize()
    assert torch.equal(native.linear(x, packed).double(), x.double() @ w.double().T)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 5), st.integers(1, 20))
def test_sixteen_bit_mxfp4_is_bfloat16_of_the_same_weights(seed: int, n: int, blocks: int, rows: int) -> None:
    """W4A16 is exact: bit for bit the bfloat16 product of what the codes and scales stand for."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, blocks * BLOCK // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 150, (n, blocks), generator=generator, dtype=torch.uint8)
    tensor = MXFP4Tensor(codes, scales)
    x = torch.randn(rows, blocks * BLOCK, generator=generator)
    dense = native.pack(tensor.dequantize(torch.bfloat16), "bf16")
    assert torch.equal(native.linear(x, native.pack(tensor, "mxfp4_a16")), native.linear(x, dense))


def test_int8_weights_lie_within_half_a_step() -> None:
    """The step is the smallest bfloat16 not below amax / 127 of a block."""
    w = weight(70, 5 * BLOCK)
    found = native.unpack(native.pack(w, "int8")).view(70, 5, BLOCK).double()
    largest = w.float().view(70, 5, BLOCK).abs().amax(-1, keepdim=True) / 127
    step = largest.bfloat16()
    step = torch.where(step.float() < largest, torch.nextafter(step, torch.tensor(torch.inf).bfloat16()), step).double()
    levels = found / step
    assert torch.equal(levels, levels.round()) and levels.abs().max() == 127
    assert ((found - w.view(70, 5, BLOCK).double()).abs() <= step / 2 * (1 + 1e-6)).all()


@pytest.mark.parametrize("form", ["mxfp4", "mxfp4_a16"])
def test_every_code_with_every_scale(form: str) -> None:
    """But for the smallest scale, 2^-127, whose elements (at most 6 x 2^-127) count as zeros."""
    elements = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    pairs = (torch.arange(0, 16, 2) + 16 * torch.arange(1, 16, 2)).repeat(2).to(torch.uint8)
    scales = torch.arange(255, dtype=torch.uint8)
    packed = native.pack(MXFP4Tensor(pairs.repeat(255, 1), scales.unsqueeze(1)), form)
    expected = np.tile(elements, 2) * 2.0 ** (np.arange(255)[:, None] - 127)
    expected[np.abs(expected) >= 2.0**128] *= np.inf
    found = native.unpack(packed).double().numpy()
    assert np.array_equal(found[1:], expected[1:], equal_nan=True)
    assert np.abs(found[0] - expected[0]).max() <= 6 * 2.0**-127
    for columns in ([0], [1, 2], list(range(16))):
        x = torch.zeros(1, BLOCK)
        x[0, columns] = 127.0
        small = slice(1, 247)  # a row's product stays finite
        assert_product(native.linear(x, packed)[:, small], x.double(), torch.from_numpy(expected[small]))


@pytest.mark.parametrize("form", ["mxfp4", "mxfp4_a16"])
@pytest.mark.parametrize("shape", [(3, 32), (70, 96), (33, 31), (40, 100)])
def test_packing_quantises_as_the_definition_does(form: str, shape: tuple[int, int]) -> None:
    w = weight(*shape)
    expected = quantized(w).dequantize(torch.float32)[:, : shape[1]]
    assert torch.equal(native.unpack(native.pack(w, form)), expected)
    if shape[1] % BLOCK == 0:
        assert torch.equal(native.unpack(native.pack(quantize(w), form)), expected)


def test_bfloat16_weights_stay() -> None:
    w = weight(70, 37)
    w[0, :4] = torch.tensor([0.0, -0.0, 3e38, 1e-40])
    packed = native.pack(w, "bf16")
    assert torch.equal(native.unpack(packed), w.float())
    assert packed.format == native.library().Format.bf16
    assert packed.nbytes == 2 * 96 * 64


@pytest.mark.parametrize("form", FORMS)
def test_embedding_is_a_row_of_what_was_packed(form: str) -> None:
    w = weight(70, 45)
    table, values = native.pack(w, form), stands_for(w, form)
    ids = torch.tensor([69, 0, 33, 33, 31, 32])
    assert torch.equal(native.embedding(ids, table).double(), values[ids])
    assert torch.equal(native.unpack(table).double(), values)
    assert native.embedding(ids[:0], table).shape == (0, 45)
    for wrong in (-1, 70):
        with pytest.raises(IndexError, match=r"0\.\.69"):
            native.embedding(torch.tensor([1, wrong]), table)


def test_tensors_of_other_layouts_and_types() -> None:
    w, x = weight(33, 40), random(40, 5)
    packed = native.pack(w.t().contiguous().t(), "bf16")
    expected = native.linear(x.t().contiguous(), native.pack(w, "bf16"))
    assert torch.equal(native.linear(x.t(), packed), expected)
    assert torch.equal(native.linear(x.t().double(), packed), expected)
    assert native.linear(x.t()[:0], packed).shape == (0, 33)
    bias = random(66, seed=3)[::2]
    assert torch.equal(native.linear(x.t(), packed, bias), native.linear(x.t(), packed, bias.clone()))
    for wrong in (x, x[:, 0]):
        with pytest.raises(ValueError, match=r"expected \[T, 40\]"):
            native.linear(wrong, packed)


@pytest.mark.parametrize("form", ["int8", "mxfp4", "mxfp4_a16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [(0, 0), (40, 17), (69, 99)])
def test_weights_that_are_none_are_refused(form: str, value: float, at: tuple[int, int]) -> None:
    w = weight(70, 100)
    w[at] = value
    with pytest.raises(UserError, match="NaN or infinite"):
        native.pack(w, form)
    if form == "mxfp4":
        with pytest.raises(UserError, match="NaN or infinite"):
            native.quantize(padded(w))


@pytest.mark.parametrize("form", ["mxfp4", "mxfp4_a16"])
def test_a_scale_that_is_none_is_refused(form: str) -> None:
    tensor = quantize(weight(40, 64))
    tensor.scales[33, 1] = 255
    with pytest.raises(UserError, match="255"):
        native.pack(tensor, form)


def bfloat16_weights() -> st.SearchStrategy[Tensor]:
    """Whole blocks of bfloat16: any finite bit pattern, or normal numbers of sizes that differ."""
    bits = st.lists(st.integers(0, 0xFFFF).filter(lambda b: b & 0x7F80 != 0x7F80), min_size=1, max_size=64)
    patterns = bits.map(lambda own: np.resize(np.array(own, dtype=np.uint16), -(-len(own) // BLOCK) * BLOCK))
    raw = patterns.map(lambda own: torch.from_numpy(own.view(np.int16).copy()).view(torch.bfloat16).view(1, -1))
    normal = st.builds(
        lambda seed, n, blocks, size, spread: (
            random(n, blocks * BLOCK, seed=seed)
            * 2.0**size
            * torch.exp(spread * random(n, blocks * BLOCK, seed=seed + 1))
        ).bfloat16(),
        st.integers(0, 2**32),
        st.integers(1, 40),
        st.integers(1, 3),
        st.integers(-120, 120),
        st.sampled_from([0.0, 0.3, 2.0]),
    )
    return st.one_of(raw, normal).filter(lambda w: bool(w.isfinite().all()))


@settings(max_examples=200)
@given(bfloat16_weights())
def test_quantize_is_the_definition(w: Tensor) -> None:
    found, expected = native.quantize(w), quantize(w)
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(found.codes, expected.codes)


@pytest.mark.parametrize("size", [1, 3, 6, 15, 16, 17, 64, 80, 576, 1537])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e15])
def test_rms_norm(size: int, scale: float) -> None:
    x, w = random(3, 5, size, scale=scale), 1 + random(size, seed=1)
    found = native.rms_norm(x, w, 1e-6)
    expected = F.rms_norm(x.double(), (size,), w.double(), 1e-6)
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=0)
    assert not native.rms_norm(torch.zeros(2, size), w, 1e-6).any()


@pytest.mark.parametrize("dim", [2, 6, 16, 64, 80])
def test_rope(dim: int) -> None:
    x, angles = random(5, 3, dim, scale=4.0), random(5, dim // 2, seed=1).repeat(1, 2) * 100
    cos, sin = angles.cos(), angles.sin()
    expected = reference.rope(x.double(), cos.double(), sin.double())
    limit = 3 * FLOAT32 * x.abs().max()
    torch.testing.assert_close(native.rope(x, cos, sin).double(), expected, rtol=0, atol=float(limit))


@pytest.mark.parametrize("inner", [1, 3, 15, 16, 17, 40, 1536])
def test_silu_mul(inner: int) -> None:
    both = random(4, 2 * inner, scale=8.0)
    expected = reference.silu_mul(both.double())
    torch.testing.assert_close(native.silu_mul(both).double(), expected, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("lane", [0, 3, 15, 16, 20])
def test_silu_mul_of_extremes(lane: int) -> None:
    """Where e^-gate is beyond float32 the result is next to nothing; NaN and infinity show."""
    nan, inf = float("nan"), float("inf")
    gates = [0.0, -0.0, 1e-40, 20.0, 88.0, 1e30, -20.0, -86.9, -87.1, -88.0, -89.0, -104.0, -1e4, inf, nan]
    for gate in gates:
        both = torch.ones(1, 42)
        both[0, lane], both[0, 21 + lane] = gate, -3.0
        found = native.silu_mul(both)[0]
        expected = reference.silu_mul(both.double())[0]
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-33, equal_nan=True)


@settings(max_examples=200)
@given(st.data(), st.integers(1, 3), st.integers(1, 70))
def test_argmax_is_the_first_of_the_largest(data: st.DataObject, rows: int, count: int) -> None:
    value = st.sampled_from([float("-inf"), -1.0, -0.0, 0.0, 1.0, 2.5, 3e38, float("inf")])
    x = torch.tensor([data.draw(st.lists(value, min_size=count, max_size=count)) for _ in range(rows)])
    assert native.argmax(x).tolist() == x.numpy().argmax(-1).tolist()


@settings(max_examples=100)
@given(st.integers(1, 70), st.data())
def test_argmax_finds_a_nan(count: int, data: st.DataObject) -> None:
    x = random(1, count, seed=count)
    for at in data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3)):
        x[0, at] = float("nan")
    assert native.argmax(x).tolist() == x.argmax(-1).tolist()
    assert native.gumbel_argmax(x[0].numpy(), 1, 2, noise.Stream.TARGET) == -1


def test_argmax_of_a_vocabulary() -> None:
    x = random(9, 49152)
    for row in range(9):
        x[row, [row * 5000 + 17, 49151]] = 9.0
    assert native.argmax(x).tolist() == [row * 5000 + 17 for row in range(9)]
    assert native.argmax(x[:0]).tolist() == []


# Around the steps of 4096 whose sums are merged, and above them.
@pytest.mark.parametrize("count", [1, 3, 16, 33, 4095, 4096, 4097, 8192, 20_000, 260_000])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 4.0, 30.0])
def test_best(count: int, spread: float) -> None:
    x = random(3, count, seed=count, scale=spread) + 7.0
    x[1, :: 3 if count > 3 else 1] -= 1e30
    ids, log_probs = native.best(x)
    assert (ids.dtype, log_probs.dtype) == (torch.int64, torch.float32)
    assert ids.tolist() == x.numpy().argmax(-1).tolist()
    expected = torch.log_softmax(x.double(), -1).amax(-1)
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-6, atol=1e-6)


def test_best_where_one_token_has_nearly_everything() -> None:
    """The tail of 260000 tokens that a running float32 sum beside a 1 would lose."""
    x = torch.full((1, 260_000), -20.0)
    x[0, 5000] = 0.0
    assert float(native.best(x)[1]) == pytest.approx(-np.log1p(259_999 * np.exp(-20.0)), rel=0.02)


@settings(max_examples=200)
@given(st.data(), st.integers(1, 3), st.integers(1, 70))
def test_best_of_any_row_is_the_references(data: st.DataObject, rows: int, count: int) -> None:
    value = st.sampled_from([float("-inf"), -3e38, -1.0, -0.0, 0.0, 2.5, 3e38, float("inf"), float("nan")])
    x = torch.tensor([data.draw(st.lists(value, min_size=count, max_size=count)) for _ in range(rows)])
    for found, expected in zip(native.best(x), reference.best(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_best_of_a_vocabulary_with_one_broken_logit(value: float) -> None:
    x = random(4, 20_000)
    x[1, 15_000] = value
    x[2] = -torch.inf
    ids, log_probs = native.best(x)
    assert ids.tolist() == x.argmax(-1).tolist()
    assert log_probs.isnan().tolist() == [False, True, True, False]
    assert [len(part) for part in native.best(x[:0])] == [0, 0]


@settings(max_examples=30)
@given(st.integers(1, 20_000), st.integers(1, 9), st.integers(0, 2**32), st.integers(1, 4))
def test_a_row_of_best_depends_on_nothing_else(count: int, rows: int, seed: int, threads: int) -> None:
    x = random(rows, count, seed=seed, scale=3.0)
    with native.threads(threads):
        together = native.best(torch.cat([x, torch.full_like(x[:1], torch.nan)]))
    with native.threads(1):
        for i in range(rows):
            for own, all_rows in zip(native.best(x[i : i + 1]), together, strict=True):
                assert torch.equal(own, all_rows[i : i + 1])


keys = st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.sampled_from(list(noise.Stream)))


@settings(max_examples=150)
@given(
    keys,
    st.integers(1, 3000),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.3, 3.0, 30.0, 1e4]),
    st.sampled_from([0, 0, 3, 50]),
    st.booleans(),
)
def test_gumbel_argmax_is_numpys(
    key: tuple[int, int, noise.Stream], count: int, seed: int, spread: float, filtered: int, ties: bool
) -> None:
    own_seed, position, stream = key
    scores: NDArray[np.float32] = np.random.default_rng(seed).normal(size=count).astype(np.float32) * np.float32(spread)
    if ties:
        scores = np.round(scores)
    if filtered:  # as top-k leaves them
        scores[np.argsort(-scores)[filtered:]] = -np.inf
    expected = gumbel_argmax(scores, partial(noise.gumbel, own_seed, position, stream=stream))
    assert native.gumbel_argmax(scores, own_seed, position, stream) == expected


@settings(max_examples=150)
@given(
    keys,
    st.integers(1, 1000),
    st.sampled_from([1.0, 0.5, 0.1, 0.002]),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.3, 3.0, 30.0, 1e4]),
    st.sampled_from([0, 0, 3, 50]),
    st.booleans(),
)
def test_gumbel_argmax_of_a_draft_vocabulary_has_the_noise_of_its_target_ids(
    key: tuple[int, int, noise.Stream],
    count: int,
    density: float,
    seed: int,
    spread: float,
    filtered: int,
    ties: bool,
) -> None:
    own_seed, position, stream = key
    rng = np.random.default_rng(seed)
    ids: NDArray[np.int64] = np.sort(rng.choice(int(count / density), count, replace=False)).astype(np.int64)
    scores: NDArray[np.float32] = rng.normal(size=count).astype(np.float32) * np.float32(spread)
    if ties:
        scores = np.round(scores)
    if filtered:
        scores[np.argsort(-scores)[filtered:]] = -np.inf
    expected = gumbel_argmax(scores, lambda rows: noise.gumbel(own_seed, position, ids[rows], stream))
    assert native.gumbel_argmax(scores, own_seed, position, stream, ids) == expected
    assert native.gumbel_argmax(scores, own_seed, position, stream, ids.astype(np.int32)) == expected


def test_gumbel_argmax_with_ids_that_do_not_fit() -> None:
    scores: NDArray[np.float32] = np.zeros(3, dtype=np.float32)
    with pytest.raises(ValueError, match="3 scores, 2 ids"):
        native.gumbel_argmax(scores, 1, 2, noise.Stream.TARGET, np.arange(2))


@pytest.mark.parametrize("scores", [[float("inf"), 0.0], [float("-inf")] * 5, [float("nan")] * 3])
def test_gumbel_argmax_of_scores_without_a_finite_top(scores: list[float]) -> None:
    assert native.gumbel_argmax(np.array(scores, dtype=np.float32), 1, 2, noise.Stream.TARGET) == -1


# Batch invariance: bit for bit


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=40)
@given(data=st.data())
def test_a_row_of_linear_depends_on_nothing_else(form: str, data: st.DataObject) -> None:
    """Not on the number of rows, its place, what the others hold, the number of threads, or the other columns."""
    n, k = data.draw(st.tuples(st.integers(1, 150), st.integers(1, 130)))
    seed = data.draw(st.integers(0, 2**32))
    w, x = weight(n, k, seed=seed), random(80, k, seed=seed + 1)
    bias = random(n, seed=seed + 2) if data.draw(st.booleans()) else None
    packed = native.pack(w, form)
    with native.threads(1):
        alone = torch.cat([native.linear(row.unsqueeze(0), packed, bias) for row in x])
    for _ in range(4):
        order = torch.tensor(data.draw(st.lists(st.integers(0, 79), min_size=1, max_size=130)))
        hostile = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(order), max_size=len(order))))
        mixed = x[order]
        mixed[hostile] = data.draw(st.sampled_from([0.0, 1e30, float("inf"), float("nan")]))
        with native.threads(data.draw(st.integers(1, 4))):
            found = native.linear(mixed, packed, bias)
        assert torch.equal(found[~hostile], alone[order[~hostile]])
    first, last = sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
    assume(first < last)
    part = native.linear(x[:5], native.pack(w[first:last], form), None if bias is None else bias[first:last])
    assert torch.equal(part, alone[:5, first:last])


@pytest.mark.parametrize("form", FORMS)
def test_every_number_of_rows_gives_the_same_bits(form: str) -> None:
    x, packed = random(200, 96), native.pack(weight(65, 96), form)
    with native.threads(1):
        alone = torch.cat([native.linear(row.unsqueeze(0), packed) for row in x])
    for rows in (*range(1, 71), 95, 96, 97, 192, 193, 200):
        with native.threads(1 + rows % 4):
            assert torch.equal(native.linear(x[:rows], packed), alone[:rows])


@settings(max_examples=30)
@given(st.integers(1, 90), st.integers(1, 20), st.integers(0, 2**32), st.integers(1, 4))
def test_a_row_of_the_other_operations_depends_on_nothing_else(size: int, rows: int, seed: int, count: int) -> None:
    x, w = random(rows, 2 * size, seed=seed), random(2 * size, seed=seed + 1)
    ids = torch.arange(rows).flip(0) % 7
    table = native.pack(weight(7, size), "int8")
    angles = random(rows, 2 * size, seed=seed + 2)
    with native.threads(count):
        together = (
            native.rms_norm(x, w, 1e-6),
            native.silu_mul(x),
            native.argmax(x),
            native.embedding(ids, table),
            native.rope(x.unsqueeze(1), angles, angles),
        )
    with native.threads(1):
        for i in range(rows):
            row = x[i : i + 1]
            alone = (
                native.rms_norm(row, w, 1e-6),
                native.silu_mul(row),
                native.argmax(row),
                native.embedding(ids[i : i + 1], table),
                native.rope(row.unsqueeze(1), angles[i : i + 1], angles[i : i + 1]),
            )
            for own, all_rows in zip(alone, together, strict=True):
                assert torch.equal(own, all_rows[i : i + 1])


@pytest.mark.parametrize("form", FORMS)
def test_packing_depends_on_no_thread(form: str) -> None:
    w = weight(130, 70)
    with native.threads(1):
        expected = native.unpack(native.pack(w, form))
    for count in (2, 3, 4):
        with native.threads(count):
            assert torch.equal(native.unpack(native.pack(w, form)), expected)
