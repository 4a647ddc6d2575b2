"""The operations against their textbook formulas, written out one row or one element at a time."""

import math
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foredraft.ops import REFERENCE, reference
from foredraft.ops.plan import Visibility, plan_attention

HEADS, GROUPS, SIZE, CAPACITY = 6, 2, 4, 90


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def one_row(query: Tensor, keys: Tensor, values: Tensor, visible: list[int]) -> Tensor:
    """softmax(q K^T / sqrt(D)) V of one row [H, D] over the positions it sees, head by head."""
    heads = []
    for head, q in enumerate(query):
        group = head // (HEADS // GROUPS)
        weights = [math.exp(float(q @ keys[at, group]) / math.sqrt(SIZE)) for at in visible]
        mixed = sum(w * values[at, group] for w, at in zip(weights, visible, strict=True))
        heads.append(mixed / sum(weights))
    return torch.stack(heads)


@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.sampled_from([1, 1, 2, 5, 66]), st.integers(0, 99)), min_size=1, max_size=4
    ),
    st.booleans(),
    st.sampled_from([None, 1, 3, 8, 200]),
    st.randoms(use_true_random=False),
)
def test_attention_is_the_textbooks(
    sequences: list[tuple[int, int, int]], causal: bool, window: int | None, rng: object
) -> None:
    starts = [start for start, _, _ in sequences]
    counts = [count for _, count, _ in sequences]
    slots = list(range(6))
    rng.shuffle(slots)  # type: ignore[attr-defined]
    slots = slots[: len(sequences)]
    keys, values = random(6, CAPACITY, GROUPS, SIZE, seed=1), random(6, CAPACITY, GROUPS, SIZE, seed=2)
    queries = random(sum(counts), HEADS, SIZE, seed=3)
    plan = plan_attention(starts, counts, slots, share=HEADS // GROUPS, visibility=Visibility(causal, window))
    found = reference.attention(queries, keys, values, plan)
    row = 0
    for start, count, slot in zip(starts, counts, slots, strict=True):
        for own in range(start, start + count):
            last = own if causal else start + count - 1
            first = 0 if window is None else max(0, own - window + 1)
            if count < 66 or own % 13 == 0:
                expected = one_row(queries[row], keys[slot], values[slot], list(range(first, last + 1)))
                torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-12)
            row += 1


@pytest.mark.parametrize("count", [3, 70])
def test_attention_in_bfloat16_is_close_to_float64(count: int) -> None:
    plan = plan_attention([5], [count], [0], share=HEADS // GROUPS)
    q, k, v = random(count, HEADS, SIZE), random(1, CAPACITY, GROUPS, SIZE, seed=1), random(1, CAPACITY, GROUPS, SIZE)
    low = reference.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), plan)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.double(), reference.attention(q, k, v, plan), rtol=0.05, atol=0.05)


def test_attention_needs_no_mask_where_everything_is_visible() -> None:
    assert plan_attention([4], [1], [0]).groups[0].mask is None
    assert plan_attention([4, 4], [3, 3], [0, 1], visibility=Visibility(causal=False)).groups[0].mask is None
    assert plan_attention([4], [1], [0], visibility=Visibility(window=5)).groups[0].mask is None
    assert plan_attention([4], [1], [0], visibility=Visibility(window=4)).groups[0].mask is not None
    assert plan_attention([4, 5], [1, 1], [0, 1]).groups[0].mask is not None
    assert plan_attention([4], [2], [0]).groups[0].mask is not None


def test_neighbouring_slots_are_attended_without_a_copy() -> None:
    cached = random(6, CAPACITY, GROUPS, SIZE)
    together = plan_attention([1, 7], [2, 2], [3, 4]).groups[0].select(cached)
    apart = plan_attention([1, 7], [2, 2], [1, 4]).groups[0].select(cached)
    assert together.data_ptr() == cached[3].data_ptr() and torch.equal(together, cached[3:5, :9])
    assert torch.equal(apart, cached[[1, 4], :9])


def test_linear() -> None:
    x, weight, bias = random(3, 5), random(4, 5, seed=1), random(4, seed=2)
    expected = torch.tensor([[sum(x[i] * weight[j]) for j in range(4)] for i in range(3)])
    torch.testing.assert_close(reference.linear(x, weight), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(reference.linear(x, weight, bias), expected + bias, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 70])
@pytest.mark.parametrize("shape", [(48, 64), (33, 576)])
def test_packing_changes_no_bit(rows: int, shape: tuple[int, int]) -> None:
    weight, bias = random(*shape, dtype=torch.bfloat16), random(shape[0], seed=3, dtype=torch.bfloat16)
    packed = reference.pack(weight)
    assert torch.equal(reference.unpack(packed), weight)
    x = random(rows, shape[1], seed=1, dtype=torch.bfloat16)
    for own in (None, bias):
        assert torch.equal(reference.linear(x, packed, own), reference.linear(x, weight, own))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_weights_are_not_packed(dtype: torch.dtype) -> None:
    weight = random(4, 8, dtype=dtype)
    assert reference.pack(weight) is weight and reference.unpack(weight) is weight


@pytest.mark.parametrize("width", [64, 576, 1536])
def test_a_single_bfloat16_row_is_summed_like_one_of_two(width: int) -> None:
    x, weight = random(2, width, dtype=torch.bfloat16), random(48, width, seed=1, dtype=torch.bfloat16)
    alone = reference.linear(x[:1], weight)
    assert alone.shape == (1, 48)
    assert torch.equal(alone, reference.linear(x[:1].repeat(2, 1), weight)[:1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype) -> None:
    x, weight = random(3, 2, 8, dtype=dtype) * 5, random(8, seed=1, dtype=dtype)
    found = reference.rms_norm(x, weight, 0.01)
    expected = F.rms_norm(x.double(), (8,), weight.double(), 0.01)
    assert found.dtype == dtype
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 0.02}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_rms_norm_of_bfloat16_reduces_in_float32() -> None:
    """1024 ones: in bfloat16 the sum of their squares would stop growing at 256."""
    x = torch.ones(1, 1024, dtype=torch.bfloat16)
    assert torch.equal(reference.rms_norm(x, torch.ones(1024, dtype=torch.bfloat16), 0.0), x)


def test_rope_turns_pairs_like_complex_numbers() -> None:
    x = random(5, 3, 8)
    angles = random(5, 4, seed=1)
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    double = angles.repeat(1, 2)
    found = reference.rope(x, double.cos(), double.sin())
    torch.testing.assert_close(found, torch.cat((pairs.real, pairs.imag), -1), rtol=0, atol=1e-14)


def test_silu_mul_gates_with_the_first_half() -> None:
    gate, up = random(2, 3), random(2, 3, seed=1)
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(reference.silu_mul(torch.cat((gate, up), -1)), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_best_is_the_first_of_the_largest_and_its_log_probability(dtype: torch.dtype) -> None:
    logits = torch.cat([random(4, 9) * 3, torch.tensor([[1.0, 5, 2, 5, 5, -torch.inf, 0, 0, 0]])]).to(dtype)
    ids, log_probs = reference.best(logits)
    assert (ids.dtype, log_probs.dtype) == (torch.int64, torch.float32)
    for row, found, log_prob in zip(logits.tolist(), ids.tolist(), log_probs.tolist(), strict=True):
        assert found == row.index(max(row))
        assert log_prob == pytest.approx(max(row) - math.log(sum(map(math.exp, row))), abs=1e-6)


def test_best_of_rows_without_a_distribution() -> None:
    nan, inf = math.nan, math.inf
    ids, log_probs = reference.best(torch.tensor([[1, nan, 2], [0, inf, 1], [-inf, -inf, -inf], [-inf, 1, -inf]]))
    assert ids.tolist() == [1, 1, 0, 1]
    assert log_probs.isnan().tolist() == [True, True, True, False] and log_probs[3] == 0


def test_embedding_picks_rows() -> None:
    table = random(7, 3)
    assert torch.equal(reference.embedding(torch.tensor([6, 0, 6]), table), table[[6, 0, 6]])


def test_the_table_names_each_operation() -> None:
    names = [field.name for field in fields(REFERENCE) if field.name != "name"]
    assert [getattr(REFERENCE, name) for name in names] == [getattr(reference, name) for name in names]
