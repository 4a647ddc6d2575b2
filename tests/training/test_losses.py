import math

import pytest
import torch

from foredraft.training.losses import (
    BEYOND_TEXT,
    CHUNK,
    OUTSIDE_VOCABULARY,
    Bias,
    Mixture,
    acceptance_length,
    position_weights,
    score_blocks,
)


def by_autograd(hidden, head, labels, weights, mixture, soft, soft_rows, bias):
    """The same loss from PyTorch's own operations, all logits at once."""
    logits = hidden @ head.T
    if bias is not None:
        logits = logits + bias.vectors @ bias.matrix.T
    log_q = torch.log_softmax(logits, dim=-1)
    hard = torch.nn.functional.one_hot(labels.clamp(min=0), len(head)).to(log_q.dtype)
    label = mixture.token * hard
    loss = 0
    if mixture.needs_target:
        label = label + mixture.target * soft[soft_rows]
        loss = mixture.distance * (log_q.exp() - soft[soft_rows]).abs().sum(-1)
    weight = weights * (labels >= 0)
    return ((loss - (label * log_q).sum(-1)) * weight).sum() / weight.sum()


@pytest.mark.parametrize("mixture", [Mixture(), Mixture(0.7, 0.3), Mixture(0.0, 1.0), Mixture(0.1, 0.0, 0.9)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("blocks", [3, CHUNK])  # less than a chunk of rows, and several
def test_loss_and_gradients_equal_autograd(mixture, biased, blocks):
    generator = torch.Generator().manual_seed(blocks)
    hidden = torch.randn(blocks, 4, 8, generator=generator, requires_grad=True)
    head = torch.randn(17, 8, generator=generator)
    labels = torch.randint(0, 17, (blocks, 4), generator=generator)
    labels[0, 2], labels[1, 3], labels[1, 1] = BEYOND_TEXT, BEYOND_TEXT, OUTSIDE_VOCABULARY
    soft = torch.softmax(torch.randn(9, 17, generator=generator), -1)
    rows = torch.randint(0, 9, (blocks, 4), generator=generator)
    weights = position_weights(4, 2.0)
    vectors = torch.randn(blocks, 4, 3, generator=generator, requires_grad=True)
    matrix = torch.randn(17, 3, generator=generator, requires_grad=True)
    bias = Bias(vectors, matrix) if biased else None
    trained = (hidden, vectors, matrix) if biased else (hidden,)
    arguments = (head, labels, weights, mixture, soft if mixture.needs_target else None, rows, bias)

    expected = by_autograd(hidden, *arguments)
    gradients = torch.autograd.grad(expected, trained)
    scores = score_blocks(hidden, *arguments)
    torch.testing.assert_close(scores.loss, expected, rtol=1e-5, atol=1e-6)
    for own, gradient in zip(torch.autograd.grad(scores.loss, trained), gradients, strict=True):
        torch.testing.assert_close(own, gradient, rtol=1e-4, atol=1e-6)
    if mixture.distance:
        logits = hidden @ head.T + (vectors @ matrix.T if biased else 0)
        common = torch.minimum(torch.softmax(logits, -1), soft[rows]).sum(-1)
        torch.testing.assert_close(scores.overlap, common, rtol=1e-4, atol=1e-5)


def test_matches_say_where_the_best_token_is_the_label():
    head = torch.eye(5)
    hidden = torch.eye(5)[[3, 1, 0, 2]].view(1, 4, 5)
    scores = score_blocks(
        hidden, head, torch.tensor([[3, 2, OUTSIDE_VOCABULARY, BEYOND_TEXT]]), position_weights(4, 4.0)
    )
    assert scores.matches.tolist() == [[True, False, False, False]]
    assert scores.counted.tolist() == [[True, True, True, False]]


def test_weights_decay_by_gamma():
    assert position_weights(3, 4.0).tolist() == pytest.approx([1.0, math.exp(-1 / 4), math.exp(-2 / 4)])


def test_acceptance_length_counts_leading_matches_of_whole_blocks():
    matches = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 1], [1, 1, 1]]).bool()
    counted = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0]]).bool()
    assert acceptance_length(matches, counted) == pytest.approx(1 + (2 + 0 + 3) / 3)
    assert acceptance_length(matches, torch.zeros_like(counted)) == 1.0
