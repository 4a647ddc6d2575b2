"""The unrolled training pass of each method sees what its drafter sees, on a tiny target."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from test_trainer import RECIPE, SHAPE, texts, tiny_target

from foredraft.drafters.base import DraftRequest
from foredraft.drafters.dspark import DSparkDrafter
from foredraft.drafters.eagle3 import Eagle3Drafter
from foredraft.drafters.gemma4_mtp import Gemma4MTPDrafter
from foredraft.drafters.mtp import MTPDrafter
from foredraft.drafters.weights import map_tensors
from foredraft.errors import UserError
from foredraft.models.batch import flat_batch
from foredraft.training.dflash import initial_dflash
from foredraft.training.dspark import DSparkObjective, initial_dspark
from foredraft.training.eagle3 import Eagle3Cell, initial_eagle3
from foredraft.training.features import FeatureSource
from foredraft.training.gemma4_mtp import Gemma4MTPCell, initial_gemma4_mtp
from foredraft.training.losses import Mixture
from foredraft.training.methods import OBJECTIVES, Start
from foredraft.training.mtp import MTPCell, initial_mtp
from foredraft.training.recursive import RecursiveObjective
from foredraft.training.trainer import TrainConfig, Trainer

DRAFTS = 4
PLAIN = replace(RECIPE, mixture=Mixture(), anchors=100, drafts=(DRAFTS,), taps=(0, 2, 4))
VOCABULARY = [*range(0, 48, 2), 1, 3, 5, 7, 9]


def shaken(weights, seed=3):
    """Weights away from their special start, so that every part of them matters."""
    generator = torch.Generator().manual_seed(seed)

    def shake(tensor):
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
        size = 0.3 if tensor.ndim == 1 else 0.7 / tensor.shape[-1] ** 0.5
        return tensor.float() + size * noise

    return map_tensors(weights, shake)


def made(method, target, vocab):
    """An objective over random weights, and the drafter that has the same."""
    method, _, kind = method.partition("-")
    if method == "dspark":
        backbone = initial_dflash(target, PLAIN, vocab, list(range(20)))
        config, weights = initial_dspark(backbone, PLAIN, 6, kind)
        weights = shaken(weights)
        recipe = replace(PLAIN, mixture=Mixture(0.1, 0, 0.9))
        return DSparkObjective(target, config, weights, recipe), DSparkDrafter(config, weights, target)
    sample = list(range(20))
    initial, cell, drafter = {
        "mtp": (lambda: initial_mtp(target, vocab, sample), MTPCell, MTPDrafter),
        "eagle3": (lambda: initial_eagle3(target, PLAIN, vocab), Eagle3Cell, Eagle3Drafter),
        "gemma4_mtp": (lambda: initial_gemma4_mtp(target, PLAIN, vocab, sample), Gemma4MTPCell, Gemma4MTPDrafter),
    }[method]
    config, weights = initial()
    weights = shaken(weights)
    return RecursiveObjective(target, cell(target, config, weights), PLAIN), drafter(config, weights, target)


@pytest.mark.parametrize("vocab", [None, VOCABULARY], ids=["whole", "reduced"])
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("method", ["mtp", "eagle3", "gemma4_mtp", "dspark-vanilla", "dspark-gated", "dspark-rnn"])
def test_scores_are_what_the_drafter_would_propose(method, has_norms, vocab):
    """At every anchor of two texts, the leading matches are the draft tokens that the text would have kept."""
    shape = SHAPE if has_norms else replace(SHAPE, architecture="llama", qk_norm=False)
    target = tiny_target(shape)
    objective, drafter = made(method, target, sorted(VOCABULARY) if vocab else None)
    # What a text keeps is little by chance, so the texts say what the drafter would.
    examples = [self_written(example, drafter, target) for example in texts(2)]
    taken = [
        target.forward(flat_batch([e.tokens], [0], [0]), target.new_cache(), objective.taps).taps for e in examples
    ]
    scores = objective.score(examples, taken, torch.Generator().manual_seed(0), DRAFTS)
    rows = iter(range(len(scores.matches)))
    kept = 0
    for example in examples:
        for anchor in range(len(example.prompt), len(example.tokens) - 1):
            row = next(rows)
            following = example.tokens[anchor + 1 : anchor + 1 + DRAFTS]
            proposed = proposals_at(example.tokens, anchor, drafter, target)
            expected = leading([a == b for a, b in zip(proposed, following, strict=False)])
            assert leading(scores.matches[row, : len(following)].tolist()) == expected, (anchor, row)
            kept += expected
    assert kept > 20


def leading(matches):
    return next((index for index, match in enumerate(matches) if not match), len(matches))


def proposals_at(tokens, anchor, drafter, target):
    cache = target.new_cache()
    batch = flat_batch([tokens[:anchor]], [0], [0])
    taps = target.forward(batch, cache, drafter.taps).taps
    cache.commit(0, anchor)
    if getattr(drafter, "reads_target_cache", False):
        drafter.attach(cache)
    drafter.release(0)
    drafter.observe(batch, taps, [anchor])
    return drafter.propose([DraftRequest(0, tokens[anchor], anchor)], DRAFTS)[0].token_ids


def self_written(example, drafter, target):
    tokens = list(example.prompt)
    generator = torch.Generator().manual_seed(len(example.answer))
    while len(tokens) < 28:
        drafted = proposals_at(tokens, len(tokens) - 1, drafter, target)
        count = int(torch.randint(1, DRAFTS + 1, (), generator=generator))
        tokens += [*drafted[:count], int(torch.randint(0, 40, (), generator=generator))]
    return replace(example, answer=tuple(tokens[len(example.prompt) :]))


@pytest.mark.parametrize("method", list(OBJECTIVES))
def test_every_method_learns_its_texts(method, tmp_path):
    target = tiny_target(replace(SHAPE, architecture="llama", qk_norm=False))
    examples = texts(2)
    mixture = Mixture(1.0, 0.0, 0.1) if method == "dspark" else OBJECTIVES[method].mixture
    recipe = replace(PLAIN, mixture=mixture, anchors=20, drafts=(3,), evaluation_drafts=3)
    objective = OBJECTIVES[method].build(target, recipe, Start(None, None, examples[0].tokens, 6))
    trainer = Trainer(
        FeatureSource(target, objective.taps, 1 << 20),
        objective,
        examples,
        examples,
        TrainConfig(steps=150, warmup=5, learning_rate=5e-3, evaluate_every=150),
        tmp_path,
        {},
    )
    assert trainer.run(lambda _: None)
    # A text drawn at random can only be learnt by heart.
    assert min(trainer.log[-1]["greedy"]["accuracy"]) > 0.8
    again = OBJECTIVES[method].build(target, recipe, Start(tmp_path, None, examples[0].tokens, 6))
    for name, tensor in again.parameters().items():
        torch.testing.assert_close(tensor, objective.parameters()[name], rtol=1e-2, atol=1e-2)


def test_dspark_needs_a_distance(tmp_path):
    target = tiny_target()
    start = initial_dflash(target, PLAIN, None, list(range(20)))
    with pytest.raises(UserError, match="confidence"):
        DSparkObjective(target, *initial_dspark(start, PLAIN, 4), PLAIN)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers": 0}, "layers"),
        ({"layers": SHAPE.num_layers}, "layers"),
        ({"drafts": (0,)}, "draft tokens"),
        ({"taps": (0, SHAPE.num_layers)}, "taps"),
        ({"taps": (-1,)}, "taps"),
        ({"gamma": 0.0}, "gamma"),
        ({"gamma": float("nan")}, "gamma"),
        ({"anchors": 0}, "anchors"),
        ({"mixture": Mixture(0, 0, 0)}, "loss"),
        ({"mixture": Mixture(float("nan"))}, "loss"),
    ],
)
def test_recipes_that_nothing_comes_of(changes, says):
    for recipe, outcome in (
        (RECIPE, nullcontext()),
        (replace(RECIPE, **changes), pytest.raises(UserError, match=says)),
    ):
        with outcome:
            recipe.check()
            recipe.check_shape(SHAPE)


@pytest.mark.parametrize(
    "changes",
    [
        *({"steps": 0}, {"answers_per_step": 0}, {"evaluate_every": 0}, {"warmup": -1}),
        *({"learning_rate": 0.0}, {"learning_rate": float("nan")}, {"decay": 2.0}, {"decay": float("nan")}),
    ],
)
def test_settings_that_nothing_comes_of(changes):
    (name,) = changes
    with pytest.raises(UserError, match=name):
        TrainConfig(**{"steps": 5} | changes)
