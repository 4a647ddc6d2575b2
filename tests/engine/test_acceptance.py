import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from foredraft.engine.acceptance import Verdict, exact, rejection, rejection_rows
from foredraft.engine.sampler import History, process_logits, sample_rows
from foredraft.ops.noise import GUMBEL_MAX, GUMBEL_MIN, Stream, gumbel, gumbel_argmax
from foredraft.sampling_params import SamplingParams

V = 8
TRIALS = 10_000
NO_HISTORY = History.from_prompt([])
Noise = Callable[[int, NDArray[np.int64]], NDArray[np.float64]]

token_lists = st.lists(st.integers(0, 3), max_size=8)


@settings(deadline=None)
@given(token_lists, st.lists(st.integers(0, 3), min_size=9, max_size=9))
def test_exact_keeps_the_longest_common_prefix(draft: list[int], target: list[int]) -> None:
    target = target[: len(draft) + 1]
    verdict = exact(draft, target)
    assert draft[: verdict.accepted] == target[: verdict.accepted]
    assert verdict.accepted == len(draft) or draft[verdict.accepted] != verdict.token
    assert verdict.token == target[verdict.accepted]
    assert exact(draft, target[: verdict.accepted + 1]) == verdict


def random_distributions(seed: int, *shape: int) -> NDArray[np.float64]:
    """Spread over several orders of magnitude, with some tokens filtered out."""
    rng = np.random.default_rng(seed)
    weights = rng.gamma(0.7, size=shape)
    weights *= rng.random(shape) < 0.8
    weights[..., rng.integers(shape[-1])] += 0.1
    return weights / weights.sum(-1, keepdims=True)


def log(p: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(p).log()


def noise_from(rng: np.random.Generator) -> Noise:
    return lambda _, token_ids: np.clip(rng.gumbel(size=token_ids.shape), GUMBEL_MIN, GUMBEL_MAX)


def assert_follows(observed: NDArray[np.int64], expected: NDArray[np.float64]) -> None:
    assert observed[expected == 0].sum() == 0
    possible = expected > 0
    assert stats.chisquare(observed[possible], observed.sum() * expected[possible]).pvalue > 0.001


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("one_hot", [False, True])
def test_first_token_follows_the_target(seed: int, one_hot: bool) -> None:
    rng = np.random.default_rng(seed)
    p, q = random_distributions(seed, 2, V), random_distributions(seed + 100, 1, V)
    if one_hot:
        drafts, log_q = np.full(TRIALS, q[0].argmax()), None
    else:
        drafts, log_q = rng.choice(V, TRIALS, p=q[0]), log(q)
    log_p, noise = log(p), noise_from(rng)
    first = []
    accepted = 0
    for draft, u in zip(drafts.tolist(), rng.random(TRIALS), strict=True):
        verdict = rejection([draft], log_p, log_q, [u], noise)
        accepted += verdict.accepted
        first.append(draft if verdict.accepted else verdict.token)
    assert_follows(np.bincount(first, minlength=V), p[0])
    # Chen et al.: P(accept) = sum of min(p, q) = 1 - TV(p, q)
    rate = p[0, drafts[0]] if one_hot else np.minimum(p[0], q[0]).sum()
    assert stats.binomtest(accepted, TRIALS, rate).pvalue > 0.001


@pytest.mark.parametrize("sampled", [True, False])
def test_two_tokens_follow_the_joint_distribution(sampled: bool) -> None:
    size = 4
    rng = np.random.default_rng(11)
    p1, q1, p3 = rng.dirichlet(np.ones(size), size=3)
    p2, q2 = rng.dirichlet(np.ones(size), size=(2, size))
    noise = noise_from(rng)
    pairs = np.zeros((size, size), dtype=np.int64)
    bonus = np.zeros(size, dtype=np.int64)
    for _ in range(TRIALS):
        d1 = int(rng.choice(size, p=q1)) if sampled else int(q1.argmax())
        d2 = int(rng.choice(size, p=q2[d1])) if sampled else int(q2[d1].argmax())
        log_q = log(np.stack([q1, q2[d1]])) if sampled else None
        verdict = rejection([d1, d2], log(np.stack([p1, p2[d1], p3])), log_q, rng.random(2), noise)
        tokens = [*[d1, d2][: verdict.accepted], verdict.token]
        if len(tokens) == 1:
            tokens.append(int(rng.choice(size, p=p2[tokens[0]])))
        pairs[tokens[0], tokens[1]] += 1
        if len(tokens) == 3:
            bonus[tokens[2]] += 1
    assert_follows(pairs, p1[:, None] * p2)
    assert_follows(bonus, p3)


@settings(deadline=None)
@given(st.integers(0, 1000), st.floats(2**-33, 1 - 2**-33))
def test_a_perfect_drafter_is_always_accepted(seed: int, u: float) -> None:
    log_p = log(random_distributions(seed, 4, V))
    draft = log_p[:3].argmax(-1).tolist()
    verdict = rejection(draft, log_p, log_p[:3], [u] * 3, lambda _, ids: np.zeros(ids.shape))
    assert verdict == Verdict(3, int(log_p[3].argmax()))


@settings(deadline=None)
@given(token_lists, st.lists(st.integers(0, 3), min_size=9, max_size=9), st.booleans(), st.integers(0, 99))
def test_a_certain_target_reduces_rejection_to_exact(
    draft: list[int], target: list[int], greedy_drafter: bool, seed: int
) -> None:
    target = target[: len(draft) + 1]
    rng = np.random.default_rng(seed)
    log_q = None if greedy_drafter else log(rng.dirichlet(np.ones(4), size=len(draft)))
    log_p = log(np.eye(4)[target])
    assert rejection(draft, log_p, log_q, rng.random(len(draft)), noise_from(rng)) == exact(draft, target)


def test_a_filtered_token_is_never_kept() -> None:
    log_p = log(np.array([[0.0, 1.0], [0.5, 0.5]]))
    impossible_draft = log(np.array([[0.0, 1.0]]))
    for log_q in (None, log(np.array([[0.9, 0.1]])), impossible_draft):
        verdict = rejection([0], log_p, log_q, [2**-33], lambda _, ids: np.zeros(ids.shape))
        assert verdict == Verdict(0, 1)


def test_rejection_without_a_residual_draws_from_the_target() -> None:
    log_p = torch.tensor([[-1e-6, -math.inf]] * 2)
    assert rejection([0], log_p, None, [1 - 2**-33], lambda _, ids: np.zeros(ids.shape)) == Verdict(0, 0)


def test_rows_after_a_rejection_are_not_computed() -> None:
    def rows() -> Iterator[Tensor]:
        yield log(np.array([0.0, 1.0]))
        raise AssertionError("the second row is not needed")

    assert rejection([0, 0], rows(), None, [0.5, 0.5], lambda _, ids: np.zeros(ids.shape)) == Verdict(0, 1)


PARAMS = SamplingParams(temperature=1.3, top_k=6, presence_penalty=1.5)


def target_logits(seed: int, num_rows: int) -> Tensor:
    return 2 * torch.randn(num_rows, V, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sampled", [True, False])
def test_rejection_rows_follows_the_processed_target(sampled: bool) -> None:
    """With the drafter sampling by the target's noise, and every trial at its own position, as in a run."""
    logits, q = target_logits(3, 2), np.random.default_rng(5).dirichlet(np.ones(V))
    log_q = log(q)[None]
    first, second = np.zeros(V, dtype=np.int64), np.zeros((V, V), dtype=np.int64)
    for position in range(6000):
        shared_noise = partial(gumbel, 21, position + 1, stream=Stream.TARGET)
        draft = gumbel_argmax(log_q[0].numpy(), shared_noise) if sampled else int(q.argmax())
        drafter = log_q if sampled else None
        verdict = rejection_rows(logits, PARAMS, NO_HISTORY, [draft], drafter, position, 21, [])
        first[draft if verdict.accepted else verdict.token] += 1
        if verdict.accepted:
            second[draft, verdict.token] += 1

    def processed(row: int, prefix: list[int]) -> NDArray[np.float64]:
        scores = process_logits(logits[row], PARAMS, NO_HISTORY, prefix, [])
        return torch.softmax(scores.double(), -1).numpy()

    assert_follows(first, processed(0, []))
    for draft in np.flatnonzero(second.sum(1) > 300).tolist():
        assert_follows(second[draft], processed(1, [draft]))


@settings(deadline=None)
@given(st.integers(0, 1000), st.lists(st.integers(0, V - 1), max_size=4), st.booleans())
def test_rejection_rows_at_temperature_zero_is_exact(seed: int, draft: list[int], perfect: bool) -> None:
    params = SamplingParams(temperature=0, repetition_penalty=1.2)
    logits = target_logits(seed, len(draft) + 1)
    if perfect:
        draft = []
        for row in logits[:-1]:
            draft.append(int(process_logits(row, params, NO_HISTORY, draft, []).argmax()))
    verdict = rejection_rows(logits, params, NO_HISTORY, draft, None, 0, 0, [])
    assert verdict == exact(draft, sample_rows(logits, params, NO_HISTORY, draft, 0, 0, []))
    assert verdict.accepted == len(draft) or not perfect


def test_bonus_shares_the_noise_of_plain_decoding() -> None:
    logits = target_logits(1, 1)
    for position in range(50):
        plain = sample_rows(logits, PARAMS, NO_HISTORY, [], position, 3, [])
        assert rejection_rows(logits, PARAMS, NO_HISTORY, [], None, position, 3, []) == Verdict(0, plain[0])


def test_replacement_has_noise_of_its_own() -> None:
    """Were it the noise that picked the draft token, the replacement would not follow the residual."""
    logits = target_logits(1, 2)
    filtered = int(logits[0].argmin())
    scores = process_logits(logits[0], PARAMS, NO_HISTORY, [], []).numpy()
    for position in range(50):
        verdict = rejection_rows(logits, PARAMS, NO_HISTORY, [filtered], None, position, 3, [])
        own = gumbel(3, position + 1, np.arange(V), Stream.RESIDUAL)
        assert verdict == Verdict(0, int((scores + own).argmax()))


def test_rejection_rows_needs_a_row_per_draft_and_one() -> None:
    with pytest.raises(ValueError, match="1 draft tokens need one more row of logits, got 1"):
        rejection_rows(target_logits(0, 1), PARAMS, NO_HISTORY, [1], None, 0, 0, [])
