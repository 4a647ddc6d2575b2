"""Training blocks, the start from the target's layers, and the loop around them, on a tiny target."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import CONFIG, model_tensors

from foredraft.drafters.base import DraftRequest
from foredraft.drafters.checkpoints import load_dflash
from foredraft.drafters.dflash import DFlashDrafter, context_features
from foredraft.errors import UserError
from foredraft.models.batch import flat_batch
from foredraft.models.decoder import DecoderModel
from foredraft.models.layers import context_keys_values, key_value_rows, project
from foredraft.ops import REFERENCE
from foredraft.training.data import Example
from foredraft.training.dflash import DFlashObjective, initial_dflash, training_mask
from foredraft.training.features import FeatureSource
from foredraft.training.losses import Mixture
from foredraft.training.recipe import Recipe
from foredraft.training.trainer import CHECKPOINT, TrainConfig, Trainer, learning_rate_factor

SHAPE = replace(
    CONFIG,
    architecture="qwen3",
    vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    num_layers=6,
    head_dim=8,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    qk_norm=True,
)
RECIPE = Recipe(layers=2, drafts=(3, 4), taps=(1, 3), mask_token_id=47, gamma=4.0, mixture=Mixture(0.5, 0.5), anchors=6)


def tiny_target(shape=SHAPE, dtype=torch.float32):
    tensors = model_tensors(shape)
    return DecoderModel(shape, lambda name: tensors[name].to(dtype))


def texts(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: tuple(torch.randint(0, 40, (n,), generator=generator).tolist())  # noqa: E731
    return [Example(draw(5), draw(20), float(i % 2), "test") for i in range(count)]


def trainer_in(folder, target, examples, recipe=RECIPE, held_out=(), **settings):
    config = TrainConfig(**{"steps": 6, "warmup": 2, "checkpoint_every": 100, "evaluate_every": 100} | settings)
    folder.mkdir(exist_ok=True)
    start = initial_dflash(target, recipe, None, examples[0].tokens)
    objective = DFlashObjective(target, *start, recipe)
    features = FeatureSource(target, objective.taps, 1 << 20)
    return Trainer(features, objective, examples, held_out, config, folder, asdict(recipe))


def silent(_):
    pass


@pytest.mark.parametrize("window", [None, 3])
def test_mask_against_its_definition(window):
    anchors, block, context = torch.tensor([2, 5, 6]), 3, 8
    mask = training_mask(context, anchors, block, window)
    for row in range(9):
        anchor = int(anchors[row // block])
        own = anchor + row % block
        for column in range(context + 9):
            if column < context:
                position, visible = column, column < anchor
            else:
                other = column - context
                position, visible = int(anchors[other // block]) + other % block, other // block == row // block
            if window is not None:
                visible = visible and position > own - window
            assert bool(mask[row, column]) == visible, (row, column)


def test_first_keys_and_values_are_those_of_the_targets_last_layer():
    """With one layer and the tap before it, fusion as identity must reproduce the target's own K and V."""
    target = tiny_target()
    recipe = replace(RECIPE, layers=1, taps=(0, 4))
    tokens = list(range(10, 30))
    config, weights = initial_dflash(target, recipe, None, tokens)
    batch = flat_batch([tokens], [0], [0])
    taps = target.forward(batch, target.new_cache(), recipe.taps).taps
    angles = target.decoder.rotary(batch.positions, len(tokens))
    context = context_features(weights.fc, weights.context_norm, taps, SHAPE.rms_norm_eps, REFERENCE)
    projected = REFERENCE.linear(context, key_value_rows(weights.layers[0], config.layers), None)
    keys, values = context_keys_values(weights.layers[0], projected, angles, config.layers, REFERENCE)
    _, own_keys, own_values = project(target.decoder.layers[-1], taps[:, 32:], angles, SHAPE, REFERENCE)
    torch.testing.assert_close(keys, own_keys, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(values, own_values, rtol=1e-4, atol=1e-5)


def test_a_norm_free_target_starts_with_queries_and_keys_of_its_own_size():
    shape = replace(SHAPE, architecture="llama", qk_norm=False)
    target = tiny_target(shape)
    _, weights = initial_dflash(target, replace(RECIPE, layers=1), None, list(range(20)))
    batch = flat_batch([list(range(20))], [0], [0])
    hidden = target.forward(batch, target.new_cache(), (4,)).taps
    queries, keys, _ = project(
        target.decoder.layers[-1], hidden, target.decoder.rotary(batch.positions, 20), shape, REFERENCE
    )
    layer = weights.layers[0]
    # rotation keeps lengths, so the sizes can be read off the rotated heads
    assert float(layer.q_norm[0]) == pytest.approx(float(queries.square().mean(-1).sqrt().mean()), rel=1e-4)
    assert float(layer.k_norm[0]) == pytest.approx(float(keys.square().mean(-1).sqrt().mean()), rel=1e-4)


def test_scores_are_what_the_drafter_would_propose():
    """The training side's matches at each anchor equal the inference drafter's proposals there."""
    target = tiny_target()
    recipe = replace(RECIPE, mixture=Mixture(), anchors=100, drafts=(3,))
    example = texts(1)[0]
    config, weights = initial_dflash(target, recipe, None, example.tokens)
    objective = DFlashObjective(target, config, weights, recipe)
    taps = target.forward(flat_batch([example.tokens], [0], [0]), target.new_cache(), recipe.taps).taps
    scores = objective.score([example], [taps], torch.Generator().manual_seed(0))
    first = len(example.prompt)
    for row, anchor in enumerate(range(first, len(example.tokens) - 1)):
        drafter = DFlashDrafter(config, weights, target)
        drafter.observe(flat_batch([example.tokens[:anchor]], [0], [0]), taps[:anchor], [anchor])
        proposal = drafter.propose([DraftRequest(0, example.tokens[anchor], anchor)], 3)[0]
        following = example.tokens[anchor + 1 : anchor + 4]
        expected = [a == b for a, b in zip(proposal.token_ids, following, strict=False)]
        assert scores.matches[row, : len(following)].tolist() == expected
        assert scores.counted[row].tolist() == [True] * len(following) + [False] * (3 - len(following))


def test_training_learns_its_texts(tmp_path):
    target = tiny_target()
    examples = texts(2)
    recipe = replace(RECIPE, drafts=(3,), mixture=Mixture(), anchors=20)
    trainer = trainer_in(tmp_path, target, examples, recipe, examples, steps=150, learning_rate=3e-3)
    assert trainer.run(silent)
    entry = trainer.log[-1]
    assert entry["step"] == 150
    assert min(entry["greedy"]["accuracy"][:3]) > 0.9
    assert json.loads((tmp_path / "training.json").read_text())["log"] == trainer.log


@pytest.mark.parametrize("stop_after", [1, 3])
def test_interrupted_training_goes_on_exactly(tmp_path, stop_after):
    target = tiny_target()
    examples = texts(5)
    whole = trainer_in(tmp_path / "whole", target, examples)
    whole.run(silent)

    first = trainer_in(tmp_path / "parts", target, examples)
    assert not first.run(silent, lambda: first.step == stop_after)
    second = trainer_in(tmp_path / "parts", target, examples)
    assert second.step == stop_after
    assert second.run(silent)
    ours, theirs = (load_file(tmp_path / name / CHECKPOINT) for name in ("parts", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    moved = initial_dflash(target, RECIPE, None, examples[0].tokens)[1].fc
    assert not torch.equal(ours["parameter.fc"], moved)


def test_what_an_exception_interrupts_is_kept(tmp_path):
    trainer = trainer_in(tmp_path, tiny_target(), texts(3))

    def fail():
        if trainer.step == 2:
            raise MemoryError
        return False

    with pytest.raises(MemoryError):
        trainer.run(silent, fail)
    assert trainer_in(tmp_path, tiny_target(), texts(3)).step == 2


def test_checkpoint_of_another_run_is_refused(tmp_path):
    target = tiny_target()
    trainer_in(tmp_path, target, texts(3)).run(silent)
    with pytest.raises(UserError, match="learning_rate"):
        trainer_in(tmp_path, target, texts(3), learning_rate=5e-4)
    (tmp_path / CHECKPOINT).write_bytes(b"rubbish")
    with pytest.raises(UserError, match="not a checkpoint"):
        trainer_in(tmp_path, target, texts(3))


def test_saved_drafter_loads_and_fits_its_target(tmp_path):
    target = tiny_target(dtype=torch.bfloat16)
    trainer_in(tmp_path, target, texts(3)).run(silent)
    config, weights = load_dflash(Path(tmp_path), torch.bfloat16)
    assert config.block_size == 5 and config.target_layer_ids == (1, 3) and config.mask_token_id == 47
    DFlashDrafter(config, weights, target)


def test_learning_rate_rises_stays_and_falls():
    config = TrainConfig(steps=100, warmup=10, decay=0.5)
    factors = [learning_rate_factor(step, config) for step in range(101)]
    assert factors[0] == pytest.approx(0.1) and factors[9] == factors[49] == 1.0
    assert factors[75] == pytest.approx(0.5) and factors[100] == 0.0
