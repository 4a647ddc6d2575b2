"""Draft tokens against the definition: softmax, and Gumbel noise of the target's ids, token by token in NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from foredraft.drafters.base import DraftRequest, DraftSampling
from foredraft.drafters.picking import DraftVocabulary, pick
from foredraft.engine.sampler import History, sample_rows
from foredraft.ops import NATIVE, REFERENCE, Operations, native
from foredraft.ops.noise import Stream, gumbel
from foredraft.sampling_params import SamplingParams

V = 40
IDS = torch.tensor([3, 4, 9, 12, 13, 27, 30, 39])
OPERATIONS = [REFERENCE, *([NATIVE] if native.unavailable() is None else [])]


def some_logits(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return 2 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("ops", OPERATIONS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "subset"])
def test_greedy_requests_get_the_best_token(ops: Operations, ids: Tensor | None) -> None:
    vocab = DraftVocabulary(ids, V)
    logits = some_logits(5, V if ids is None else len(ids), 0)
    picked = pick(logits, [(DraftRequest(0, 1, 7), k) for k in range(1, 6)], vocab, ops)
    best = logits.argmax(-1)
    assert picked.token_ids == (best if ids is None else ids[best]).tolist()
    assert picked.confidences == pytest.approx(logits.double().softmax(-1).amax(-1).tolist(), rel=1e-5)
    assert not any(log_q is not None for log_q in picked.log_probs)


@pytest.mark.parametrize("ops", OPERATIONS, ids=lambda ops: ops.name)
@settings(max_examples=60)
@given(
    st.integers(0, 999),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 100),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.booleans(),
    st.booleans(),
)
def test_sampling_requests_share_the_targets_noise(
    ops: Operations, number: int, seed: int, position: int, temperature: float, reduced: bool, wanted: bool
) -> None:
    ids = IDS if reduced else torch.arange(V)
    logits = some_logits(2, len(ids), number)
    request = DraftRequest(0, 1, position, DraftSampling(temperature, seed, wanted))
    picked = pick(logits, [(request, 1), (request, 2)], DraftVocabulary(ids if reduced else None, V), ops)
    scaled = logits.numpy() / np.float32(temperature)
    for row, (own, token) in enumerate(zip(scaled, picked.token_ids, strict=True)):
        noisy = own + gumbel(seed, position + row + 1, ids.numpy(), Stream.TARGET)
        assert token == int(ids[int(noisy.argmax())])
    assert picked.confidences == pytest.approx(logits.double().softmax(-1).amax(-1).tolist(), rel=1e-5)
    for row, log_q in enumerate(picked.log_probs):
        assert (log_q is not None) == wanted
        if log_q is None:
            continue
        expected = np.zeros(V)
        expected[ids.numpy()] = np.exp(scaled[row].astype(np.float64)) / np.exp(scaled[row].astype(np.float64)).sum()
        assert log_q.shape == (V,) and log_q.exp().numpy() == pytest.approx(expected, abs=1e-12)
        assert bool(torch.isneginf(log_q).numpy()[np.setdiff1d(np.arange(V), ids.numpy())].all())


def test_a_drafter_with_the_targets_logits_picks_the_targets_tokens() -> None:
    logits = some_logits(4, V, 3)
    params = SamplingParams(temperature=0.8, seed=5)
    for seed in range(50):
        request = DraftRequest(0, 1, 11, DraftSampling(0.8, seed))
        picked = pick(logits, [(request, k) for k in (1, 2, 3)], DraftVocabulary(None, V), REFERENCE)
        # Row k of the target, and the draft for it, see the same logits here.
        target = sample_rows(
            torch.cat([logits[:3], logits[3:]]), params, History.from_prompt([]), picked.token_ids[:3], 11, seed, []
        )
        assert target[:3] == picked.token_ids[:3]


def test_draws_follow_the_draft_distribution() -> None:
    logits = some_logits(1, len(IDS), 8)
    counts = np.zeros(V)
    for seed in range(3000):
        request = DraftRequest(0, 1, 2, DraftSampling(0.9, seed))
        counts[pick(logits, [(request, 1)], DraftVocabulary(IDS, V), REFERENCE).token_ids[0]] += 1
    expected = 3000 * (logits[0].double() / 0.9).softmax(-1).numpy()
    assert counts.sum() == counts[IDS.numpy()].sum()
    assert stats.chisquare(counts[IDS.numpy()], expected).pvalue > 1e-3


def test_greedy_and_sampling_requests_side_by_side() -> None:
    """Only the sampling one has a distribution to show."""
    logits = some_logits(2, len(IDS), 1, torch.float64)
    greedy = DraftRequest(0, 1, 4)
    sampling = DraftRequest(1, 1, 9, DraftSampling(1.0, 3, want_log_probs=True))
    picked = pick(logits, [(greedy, 1), (sampling, 1)], DraftVocabulary(IDS, V), REFERENCE)
    assert picked.log_probs[0] is None and picked.log_probs[1] is not None
    assert picked.log_probs[1].exp().sum().item() == pytest.approx(1)
    alone = pick(logits[1:], [(sampling, 1)], DraftVocabulary(IDS, V), REFERENCE)
    assert alone.token_ids == picked.token_ids[1:] and alone.confidences == picked.confidences[1:]
