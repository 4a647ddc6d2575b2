import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from foredraft.engine.sampler import (
    History,
    greedy_rows,
    is_plain_greedy,
    process_logits,
    sample_rows,
    token_logprobs,
)
from foredraft.ops.noise import GUMBEL_MAX, GUMBEL_MIN, Stream, gumbel, gumbel_argmax
from foredraft.sampling_params import SamplingParams

V = 40
PROMPT, OUTPUT = [3, 5, 5, 8], [5, 9, 9, 9, 11]
NO_HISTORY = History.from_prompt([])

params_with_everything = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.8]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 1, 5, 100]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.9]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    logit_bias=st.sampled_from([None, {0: 3.0, 4: -100.0}]),
    min_tokens=st.sampled_from([0, 4, 7]),
)
token_lists = st.lists(st.integers(0, V - 1), max_size=6)


def random_logits(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def history(prompt: Sequence[int] = PROMPT, output: Sequence[int] = OUTPUT) -> History:
    made = History.from_prompt(prompt)
    made.commit(output)
    return made


def processed(logits: Tensor, params: SamplingParams, stop_ids: Sequence[int] = ()) -> Tensor:
    return process_logits(logits, params, history(), [], stop_ids)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("params", "reference"),
    [
        (SamplingParams(temperature=0.6), TemperatureLogitsWarper(0.6)),
        (SamplingParams(top_k=7), TopKLogitsWarper(7)),
        (SamplingParams(top_k=1000), TopKLogitsWarper(1000)),
        (SamplingParams(top_p=0.8), TopPLogitsWarper(0.8)),
        (SamplingParams(top_p=0.01), TopPLogitsWarper(0.01)),
        (SamplingParams(min_p=0.1), MinPLogitsWarper(0.1)),
        (SamplingParams(repetition_penalty=1.4), RepetitionPenaltyLogitsProcessor(1.4)),
        (SamplingParams(repetition_penalty=0.7), RepetitionPenaltyLogitsProcessor(0.7)),
    ],
)
def test_processors_against_transformers(params: SamplingParams, reference: object, seed: int) -> None:
    logits = random_logits(seed, V)
    expected = reference(torch.tensor([PROMPT + OUTPUT]), logits[None].clone())[0]  # type: ignore[operator]
    torch.testing.assert_close(processed(logits, params), expected)


@pytest.mark.parametrize("seed", range(5))
def test_order_of_processors_against_transformers(seed: int) -> None:
    logits, ids = random_logits(seed, V), torch.tensor([PROMPT + OUTPUT])
    expected = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits[None].clone())
    for warper in (
        TemperatureLogitsWarper(1.7),
        MinPLogitsWarper(0.02),
        TopKLogitsWarper(12),
        TopPLogitsWarper(0.9),
    ):
        expected = warper(ids, expected)
    params = SamplingParams(repetition_penalty=1.3, temperature=1.7, min_p=0.02, top_k=12, top_p=0.9)
    torch.testing.assert_close(processed(logits, params), expected[0])


def test_penalties_and_biases_by_formula() -> None:
    logits = random_logits(0, V)
    params = SamplingParams(
        frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0, logit_bias={5: 1.5, 20: -7.0}
    )
    expected = logits.tolist()
    expected[5] += 1.5
    expected[20] -= 7.0
    for token_id in {*PROMPT, *OUTPUT}:
        expected[token_id] *= 0.5 if expected[token_id] > 0 else 2.0
    for token_id in OUTPUT:
        expected[token_id] -= 0.5
    for token_id in set(OUTPUT):
        expected[token_id] -= 0.25
    np.testing.assert_allclose(processed(logits, params), expected, rtol=1e-12)


@pytest.mark.parametrize(("min_tokens", "masked"), [(0, False), (7, False), (8, True)])
def test_min_tokens_counts_output_and_draft_prefix(min_tokens: int, masked: bool) -> None:
    logits = random_logits(0, V)
    row = process_logits(logits, SamplingParams(min_tokens=min_tokens), history(), [1, 1], {2, 30, V + 5})
    expected = logits.clone()
    if masked:
        expected[[2, 30]] = -math.inf
    assert torch.equal(row, expected)


def test_min_tokens_that_excludes_every_token() -> None:
    with pytest.raises(RuntimeError, match="every token is excluded"):
        process_logits(torch.zeros(3), SamplingParams(min_tokens=1), NO_HISTORY, [], [0, 1, 2])


def test_equal_logits_keep_the_lower_ids() -> None:
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, -1.0])
    assert processed_ids(logits, SamplingParams(top_k=2)) == [1, 2]
    assert processed_ids(torch.zeros(8), SamplingParams(top_p=0.5)) == [0, 1, 2, 3]
    assert processed_ids(torch.zeros(8), SamplingParams(top_p=0.51)) == [0, 1, 2, 3, 4]
    coarse = random_logits(0, 5000).round()
    best_first = sorted(range(5000), key=lambda token_id: (-coarse[token_id], token_id))
    assert processed_ids(coarse, SamplingParams(top_k=700)) == sorted(best_first[:700])
    nucleus = processed_ids(coarse, SamplingParams(top_p=0.6))
    assert nucleus == sorted(best_first[: len(nucleus)])


def processed_ids(logits: Tensor, params: SamplingParams) -> list[int]:
    row = process_logits(logits, params, NO_HISTORY, [], [])
    ids: list[int] = torch.nonzero(row > -math.inf).flatten().tolist()
    assert torch.equal(row[ids], logits[ids])
    return ids


@settings(deadline=None)
@given(st.integers(0, 10**6), st.floats(0.001, 0.999), st.sampled_from([0.1, 1.0, 10.0]))
def test_top_p_keeps_the_smallest_sufficient_set(seed: int, p: float, scale: float) -> None:
    logits = random_logits(seed, 200) * scale
    probabilities = torch.softmax(logits, -1).sort(descending=True).values.tolist()
    count = len(processed_ids(logits, SamplingParams(top_p=p)))
    assert math.fsum(probabilities[:count]) > p - 1e-12
    assert math.fsum(probabilities[: count - 1]) < p + 1e-12


@settings(deadline=None)
@given(params_with_everything, token_lists, token_lists, token_lists, st.integers(0, 10**6))
def test_a_draft_prefix_counts_as_committed(
    params: SamplingParams, prompt: list[int], output: list[int], prefix: list[int], seed: int
) -> None:
    logits = random_logits(seed, V, dtype=torch.float32)
    before = history(prompt, output)
    as_if = process_logits(logits, params, before, prefix, [2, 6])
    committed = process_logits(logits, params, history(prompt, output + prefix), [], [2, 6])
    assert torch.equal(as_if, committed)
    assert before.num_output_tokens == len(output) and sum(before.output_counts.values()) == len(output)


@pytest.mark.parametrize(
    ("given_dtype", "dtype"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_dtypes_and_that_the_logits_stay_as_they_are(given_dtype: torch.dtype, dtype: torch.dtype) -> None:
    logits = random_logits(0, V, dtype=given_dtype)
    original = logits.clone()
    row = processed(logits, SamplingParams(temperature=0.5, top_k=3))
    assert row.dtype == dtype
    assert torch.equal(logits, original)
    assert torch.equal(row, processed(logits.to(dtype), SamplingParams(temperature=0.5, top_k=3)))


def target_noise(seed: int, position: int) -> partial[NDArray[np.float64]]:
    return partial(gumbel, seed, position, stream=Stream.TARGET)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 12.0, 1e6])
def test_pruning_does_not_change_the_choice(scale: float, dtype: type[np.floating]) -> None:
    scores = (scale * np.random.default_rng(1).standard_normal((6, 20_000))).astype(dtype)
    scores[:, ::3] = -np.inf
    for position, row in enumerate(scores):
        noise = target_noise(9, position)
        assert gumbel_argmax(row, noise) == (row + noise(np.arange(row.size))).argmax()


@pytest.mark.parametrize("num_close", [0, 2000])
def test_pruning_spares_a_token_that_can_just_win(num_close: int) -> None:
    span = GUMBEL_MAX - GUMBEL_MIN

    def extreme(token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.where(token_ids == 1, GUMBEL_MAX, GUMBEL_MIN)

    rest = np.full(num_close, -span)
    assert gumbel_argmax(np.array([0.0, 1e-9 - span, *rest]), extreme) == 1
    assert gumbel_argmax(np.array([0.0, -1e-9 - span, *rest]), extreme) == 0
    assert gumbel_argmax(np.array([-1e-9 - span, 0.0, *rest]), lambda ids: np.zeros(ids.shape)) == 1
    assert gumbel_argmax(np.zeros(3 + num_close), lambda ids: np.zeros(ids.shape)) == 0


def test_noise_is_computed_for_few_tokens_only() -> None:
    asked: list[int] = []

    def noise(token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
        asked.extend(token_ids.tolist())
        return gumbel(0, 0, token_ids, Stream.TARGET)

    scores = np.full(50_000, -np.inf)
    scores[[7, 70, 700]] = [1.0, 2.0, -40.0]
    gumbel_argmax(scores, noise)
    assert asked == [7, 70]


def test_samples_follow_the_processed_distribution() -> None:
    logits = random_logits(3, 1, 8)
    params = SamplingParams(temperature=1.5, top_k=6)
    expected = torch.softmax(process_logits(logits[0], params, NO_HISTORY, [], []), -1).numpy()
    tokens = [sample_rows(logits, params, NO_HISTORY, [], position, 4, [])[0] for position in range(5000)]
    observed = np.bincount(tokens, minlength=8)
    kept = expected > 0
    assert observed[~kept].sum() == 0
    assert stats.chisquare(observed[kept], 5000 * expected[kept]).pvalue > 0.001


def next_logits(context: Sequence[int]) -> Tensor:
    """A target of our own: the logits are a fixed function of the last two tokens."""
    return random_logits(context[-1] * V + context[-2], V, dtype=torch.float32)


def decode(params: SamplingParams, drafts: list[list[int]], num_tokens: int) -> list[int]:
    context, output, past = [1, 3], list[int](), History.from_prompt([1, 3])
    for round_index in range(num_tokens):
        draft = drafts[round_index % len(drafts)]
        logits = torch.stack([next_logits(context + draft[:k]) for k in range(len(draft) + 1)])
        tokens = sample_rows(logits, params, past, draft, len(context) - 1, 77, [2, 6])
        assert tokens[:-1] == draft[: len(tokens) - 1]
        past.commit(tokens)
        context += tokens
        output += tokens
    return output[:num_tokens]


@settings(deadline=None)
@given(params_with_everything, st.lists(token_lists, min_size=1, max_size=5))
def test_speculation_changes_no_token(params: SamplingParams, drafts: list[list[int]]) -> None:
    plain = decode(params, [[]], 12)
    assert decode(params, drafts, 12) == plain
    perfect = [plain[:5], plain[6:9]]
    assert decode(params, perfect, 12) == plain


def test_sample_rows_ends_at_the_first_mismatch() -> None:
    logits = torch.zeros(4, V)
    logits[range(4), [4, 7, 1, 9]] = 10.0
    greedy = SamplingParams(temperature=0)
    penalised = SamplingParams(temperature=0, presence_penalty=0.1)
    for params in (greedy, penalised):
        assert sample_rows(logits, params, NO_HISTORY, [4, 7, 1], 0, 0, []) == [4, 7, 1, 9]
        assert sample_rows(logits, params, NO_HISTORY, [4, 8, 1], 0, 0, []) == [4, 7]
        assert sample_rows(logits[:1], params, NO_HISTORY, [], 0, 0, []) == [4]
        with pytest.raises(ValueError, match="2 draft tokens need one more row of logits, got 4"):
            sample_rows(logits, params, NO_HISTORY, [4, 7], 0, 0, [])


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, 0.0, 0.0], [2.0, 1.0, 2.0]])
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert greedy_rows(logits.to(dtype)) == [1, 0, 0]


@pytest.mark.parametrize(
    ("params", "plain"),
    [
        (SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.5, seed=1), True),
        (SamplingParams(), False),
        (SamplingParams(temperature=0, min_tokens=1), False),
        (SamplingParams(temperature=0, logit_bias={1: 1.0}), False),
        (SamplingParams(temperature=0, repetition_penalty=1.1), False),
        (SamplingParams(temperature=0, presence_penalty=0.1), False),
        (SamplingParams(temperature=0, frequency_penalty=0.1), False),
    ],
)
def test_is_plain_greedy(params: SamplingParams, plain: bool) -> None:
    assert is_plain_greedy(params) is plain


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_are_an_error(bad: float) -> None:
    logits = torch.zeros(2, V)
    logits[1, 17] = bad
    for params in (
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, presence_penalty=1),
        SamplingParams(),
    ):
        with pytest.raises(RuntimeError, match="NaN"):
            sample_rows(logits[1:], params, NO_HISTORY, [], 0, 0, [])
    with pytest.raises(RuntimeError, match="NaN"):
        greedy_rows(logits)
    with pytest.raises(RuntimeError, match="NaN"):
        token_logprobs(logits, [0, 0], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_against_torch(dtype: torch.dtype) -> None:
    logits = random_logits(8, 3, V, dtype=dtype)
    tokens = [4, 17]
    expected = torch.log_softmax(logits.double(), -1)
    reports = token_logprobs(logits, tokens, 5)
    assert [report.token_id for report in reports] == tokens
    for report, row in zip(reports, expected, strict=False):
        assert math.isclose(report.logprob, row[report.token_id], rel_tol=1e-6)
        assert report.rank == (row >= row[report.token_id]).sum()
        np.testing.assert_allclose([value for _, value in report.top], row.topk(5).values, rtol=1e-6)
        np.testing.assert_allclose(row[[token for token, _ in report.top]], row.topk(5).values, rtol=1e-6)


def test_logprobs_of_equals_none_and_all() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0]])
    (report,) = token_logprobs(logits, [2], 2)
    assert [token for token, _ in report.top] == [1, 2]
    assert report.rank == 3
    assert token_logprobs(logits, [2], 0)[0].top == ()
    assert [token for token, _ in token_logprobs(logits, [2], -1)[0].top] == [1, 2, 3, 0]
    assert [token for token, _ in token_logprobs(logits, [2], 9)[0].top] == [1, 2, 3, 0]
