"""DFlash against a re-computation from its description: no cache, an explicit mask, float64, tensors by file name."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CONFIG, MASK, TOKENS, dflash_json, dflash_tensors, model_tensors, tiny_model, write_dflash
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from foredraft.drafters.base import DraftRequest, DraftSampling, Proposal
from foredraft.drafters.calibration import Calibration
from foredraft.drafters.checkpoints import load_dflash
from foredraft.drafters.dflash import DFlashConfig, DFlashDrafter, DFlashWeights
from foredraft.models.batch import flat_batch
from foredraft.models.decoder import DecoderModel
from foredraft.models.rope import RotaryTable, inverse_frequencies
from foredraft.ops import REFERENCE
from foredraft.ops.noise import Stream, draw
from foredraft.training.dflash import training_forward

TARGET = tiny_model(replace(CONFIG, num_layers=4))
WINDOWED = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
VOCABULARY = [1, 4, 5, 9, 17, 18, 30, 31]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one-tap-multi-query": {
        "num_key_value_heads": 1,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [2]},
    },
    "window": {**WINDOWED, "sliding_window": 8, "is_causal": False},
    "short-window": {**WINDOWED, "sliding_window": 3, "is_causal": False},
    "causal-window": {**WINDOWED, "sliding_window": 8},
    "draft-vocabulary": {"draft_vocab_size": len(VOCABULARY)},
    "yarn": {
        "rope_theta": 500.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
}


class Variant:
    """A random drafter for TARGET as a file, as we load it, and as its description computes it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.raw = dflash_json(TARGET.config, **VARIANTS[name])
        self.raw["dflash_config"] = {"mask_token_id": MASK, "target_layer_ids": [0, 2, 3]} | (
            VARIANTS[name].get("dflash_config") or {}
        )
        self.tensors = dflash_tensors(self.raw)
        self.vocabulary = torch.arange(len(TOKENS))
        self.draft_head = TARGET.head
        stored = dict(self.tensors)
        if "draft_vocab_size" in self.raw:
            self.vocabulary = torch.tensor(VOCABULARY)
            self.draft_head = TARGET.head[self.vocabulary]
            stored["d2t"] = self.vocabulary - torch.arange(len(VOCABULARY))
        self.config: DFlashConfig
        self.weights: DFlashWeights
        self.config, self.weights = load_dflash(write_dflash(folder, self.raw, stored), torch.float64)
        self.rotary = Qwen3RotaryEmbedding(Qwen3Config(**{k: v for k, v in self.raw.items() if k != "architectures"}))

    def taps(self, tokens: Sequence[int]) -> Tensor:
        ids = self.raw["dflash_config"]["target_layer_ids"]
        taps = TARGET.forward(flat_batch([tokens], [0], [0], [0]), TARGET.new_cache(), ids).taps
        assert taps is not None
        return taps

    def hidden(self, taps: Tensor, anchor: int, count: int) -> Tensor:
        """Final hidden states [count, K] of the mask rows behind ``anchor``, whose context has ``taps [p, m * K]``."""
        raw, eps, size = self.raw, self.raw["rms_norm_eps"], self.raw["head_dim"]
        past, block = len(taps), count + 1
        cos, sin = self.rotary(torch.zeros(1, dtype=torch.float64), torch.arange(past + block).unsqueeze(0))

        def norm(x: Tensor, name: str) -> Tensor:
            return F.rms_norm(x, x.shape[-1:], self.tensors[name], eps)

        def rotate(x: Tensor, first: int) -> Tensor:
            c, s = (table[0, first : first + len(x)].unsqueeze(1) for table in (cos, sin))
            left, right = x[..., : size // 2], x[..., size // 2 :]
            return x * c + torch.cat((-right, left), -1) * s

        context = norm(taps @ self.tensors["fc.weight"].T, "hidden_norm.weight")
        x = TARGET.embeddings[[anchor] + [raw["dflash_config"]["mask_token_id"]] * count]
        for layer in range(raw["num_hidden_layers"]):

            def weight(name: str, layer: int = layer) -> Tensor:
                return self.tensors[f"layers.{layer}.{name}.weight"]

            own = norm(x, f"layers.{layer}.input_layernorm.weight")
            both = torch.cat((context, own))
            q = (own @ weight("self_attn.q_proj").T).view(block, -1, size)
            k = (both @ weight("self_attn.k_proj").T).view(past + block, -1, size)
            v = (both @ weight("self_attn.v_proj").T).view(past + block, -1, size)
            q = rotate(norm(q, f"layers.{layer}.self_attn.q_norm.weight"), past)
            k = rotate(norm(k, f"layers.{layer}.self_attn.k_norm.weight"), 0)
            share = q.shape[1] // k.shape[1]
            scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(share, 1)) / size**0.5
            scores = scores.masked_fill(~self.visible(layer, past, block), -torch.inf)
            mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(share, 1))
            x = x + mixed.reshape(block, -1) @ weight("self_attn.o_proj").T
            inner = norm(x, f"layers.{layer}.post_attention_layernorm.weight")
            gated = F.silu(inner @ weight("mlp.gate_proj").T) * (inner @ weight("mlp.up_proj").T)
            x = x + gated @ weight("mlp.down_proj").T
        return norm(x, "norm.weight")[1:]

    def visible(self, layer: int, past: int, block: int) -> Tensor:
        seen = torch.ones(block, past + block, dtype=torch.bool)
        if self.raw.get("layer_types", [""] * 9)[layer] == "sliding_attention":
            for row in range(block):
                for key in range(past + block):
                    too_old = past + row - key >= self.raw["sliding_window"]
                    too_new = key > past + row and self.raw.get("is_causal") is not False
                    seen[row, key] = not (too_old or too_new)
        return seen

    def tokens(self, hidden: Tensor) -> list[int]:
        return self.vocabulary[(hidden @ self.draft_head.T).argmax(-1)].tolist()


class Spy:
    """REFERENCE that remembers what the head saw: its product is the last one of a proposal."""

    def __init__(self) -> None:
        self.seen = torch.empty(0)
        self.operations = replace(REFERENCE, linear=self.linear)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.seen = x
        return REFERENCE.linear(x, weight, bias)


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Variant]:
    return {name: Variant(name, tmp_path_factory.mktemp(name)) for name in VARIANTS}


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


def assert_confidences(proposal: Proposal, expected: Tensor) -> None:
    """``ops.best`` gives float32."""
    assert proposal.confidences is not None
    found = torch.tensor(proposal.confidences, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


class Rounds:
    """A target and a drafter driven as the engine drives them, with acceptance by dice."""

    def __init__(self, variant: Variant, rng: random.Random) -> None:
        self.variant, self.rng, self.spy = variant, rng, Spy()
        self.drafter = DFlashDrafter(variant.config, variant.weights, TARGET, self.spy.operations)
        self.cache = TARGET.new_cache()
        self.sequences: dict[int, tuple[list[int], int]] = {}

    def step(self) -> None:
        """Some sequences start, some prefill a chunk, some decode with rejected tokens behind the kept ones."""
        rng = self.rng
        for slot in range(3):
            if slot not in self.sequences and rng.random() < 0.6:
                self.sequences[slot] = (rng.choices(range(len(TOKENS)), k=rng.randint(4, 30)), 0)
        slots = [slot for slot, (tokens, done) in self.sequences.items() if done < len(tokens) - 1]
        rng.shuffle(slots)
        rows, starts, kept = [], [], []
        for slot in slots:
            tokens, done = self.sequences[slot]
            keep = rng.randint(1, min(9, len(tokens) - 1 - done))
            rows.append(tokens[done : done + keep] + rng.choices(range(len(TOKENS)), k=rng.choice([0, 0, 1, 4])))
            starts.append(done)
            kept.append(keep if rng.random() < 0.9 else 0)
        if any(kept):
            batch = flat_batch(rows, starts, slots)
            taps = TARGET.forward(batch, self.cache, self.drafter.taps).taps
            self.drafter.observe(batch, taps, kept)
            for slot, keep in zip(slots, kept, strict=True):
                tokens, done = self.sequences[slot]
                self.sequences[slot] = (tokens, done + keep)

    def propose(self) -> None:
        slots = [slot for slot, (_, done) in self.sequences.items() if done and self.rng.random() < 0.8]
        if not slots:
            return
        requests = [DraftRequest(slot, *self.anchor(slot)) for slot in slots]
        asked = self.rng.choice([1, 2, 3, 5, 9])
        count = min(asked, self.drafter.max_tokens)
        proposals = self.drafter.propose(requests, asked)
        hidden = self.spy.seen.view(len(slots), count, -1)
        for slot, request, own, proposal in zip(slots, requests, hidden, proposals, strict=True):
            committed = self.sequences[slot][0][: request.position]
            expected = self.variant.hidden(self.variant.taps(committed), request.anchor, count)
            assert_same(own, expected)
            assert proposal.token_ids == tuple(self.variant.tokens(expected))
            assert_confidences(proposal, (expected @ self.variant.draft_head.T).softmax(-1).amax(-1))

    def anchor(self, slot: int) -> tuple[int, int]:
        tokens, done = self.sequences[slot]
        return tokens[done], done

    def finish(self) -> None:
        for slot in list(self.sequences):
            tokens, done = self.sequences[slot]
            if done == len(tokens) - 1 or self.rng.random() < 0.1:
                self.drafter.release(slot)
                self.cache.release(slot)
                del self.sequences[slot]


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_proposals_are_those_of_the_description(variants: Mapping[str, Variant], name: str, seed: int) -> None:
    """After any pattern of acceptance, for any batch: what rejected tokens and blocks left behind is never seen."""
    rounds = Rounds(variants[name], random.Random(seed))
    for _ in range(7):
        rounds.step()
        rounds.propose()
        rounds.finish()


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_a_drafter_with_a_past_is_one_freshly_primed(variants: Mapping[str, Variant], seed: int) -> None:
    rounds = Rounds(variants["plain"], random.Random(seed))
    for _ in range(6):
        rounds.step()
        rounds.propose()
    for slot, (tokens, done) in rounds.sequences.items():
        if not done:
            continue
        spy = Spy()
        fresh = DFlashDrafter(rounds.variant.config, rounds.variant.weights, TARGET, spy.operations)
        batch = flat_batch([tokens[:done]], [0], [0])
        fresh.observe(batch, TARGET.forward(batch, TARGET.new_cache(), fresh.taps).taps, [done])
        expected = fresh.propose([DraftRequest(0, tokens[done], done)], 5)
        found = rounds.drafter.propose([DraftRequest(slot, tokens[done], done)], 5)
        assert [proposal.token_ids for proposal in found] == [proposal.token_ids for proposal in expected]
        assert_same(rounds.spy.seen, spy.seen)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "causal-window"])
@pytest.mark.parametrize("block", [2, 4, 6])
def test_training_sees_what_inference_sees(variants: Mapping[str, Variant], name: str, block: int) -> None:
    """Blocks at many anchors of several texts at once; thirty anchors are more than are attended in one go."""
    variant, rng = variants[name], random.Random(block)
    texts = [rng.choices(range(len(TOKENS)), k=length) for length in (37, 6, 12)]
    anchors = [sorted(rng.sample(range(1, len(text)), count)) for text, count in zip(texts, (30, 1, 7), strict=True)]
    taps = [variant.taps(text) for text in texts]
    frequencies, factor = inverse_frequencies(variant.config.layers.rope, variant.config.layers.head_dim)
    found = training_forward(
        variant.config,
        variant.weights,
        TARGET.embeddings,
        taps,
        [torch.tensor(own) for own in anchors],
        torch.tensor([text[at] for text, own in zip(texts, anchors, strict=True) for at in own]),
        block,
        RotaryTable(frequencies, factor, torch.float64),
    )
    expected = [
        variant.hidden(features[:at], text[at], block - 1)
        for text, own, features in zip(texts, anchors, taps, strict=True)
        for at in own
    ]
    assert_same(found[:, 1:], torch.stack(expected))


def test_later_context_matters(variants: Mapping[str, Variant]) -> None:
    """Guards the tests above: the taps, every context position and the anchor do reach the proposal."""
    variant = variants["plain"]
    tokens = random.Random(0).choices(range(3, len(TOKENS)), k=12)
    taps = variant.taps(tokens)
    base = variant.hidden(taps, 5, 3)
    for position in range(12):
        changed = taps.clone()
        changed[position] = -changed[position]
        assert (variant.hidden(changed, 5, 3) - base).abs().max() > 1e-6
    assert (variant.hidden(taps, 6, 3) - base).abs().max() > 1e-3
    assert (variant.hidden(taps, 5, 4)[:3] - base).abs().max() > 1e-3


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["plain", "draft-vocabulary"])
def test_packed_weights_give_the_same_bits(variants: Mapping[str, Variant], name: str, tied: bool) -> None:
    variant, found = variants[name], []
    config = replace(TARGET.config, tie_word_embeddings=tied)
    tensors = {name: tensor.bfloat16() for name, tensor in model_tensors(config).items()}
    tokens = random.Random(1).choices(range(len(TOKENS)), k=20)
    for pack in (REFERENCE.pack, lambda weight, form: weight):
        target = DecoderModel(config, tensors.__getitem__, replace(REFERENCE, pack=pack))
        spy = Spy()
        drafter = DFlashDrafter(variant.config, variant.weights, target, replace(spy.operations, pack=pack))
        batch = flat_batch([tokens], [0], [0])
        drafter.observe(batch, target.forward(batch, target.new_cache(), drafter.taps).taps, [20])
        proposal = drafter.propose([DraftRequest(0, 5, 20)], 5)[0]
        found.append((proposal, spy.seen))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])
    assert {*found[0][0].token_ids} <= {*variant.vocabulary.tolist()}


def test_sampled_proposals_are_drawn_from_the_distribution_they_report(variants: Mapping[str, Variant]) -> None:
    """The k-th token of a sampling request by the noise of its own position, beside a greedy request."""
    variant = variants["draft-vocabulary"]
    drafter = DFlashDrafter(variant.config, variant.weights, TARGET)
    tokens = random.Random(3).choices(range(len(TOKENS)), k=9)
    batch = flat_batch([tokens, tokens], [0, 0], [0, 1])
    drafter.observe(batch, TARGET.forward(batch, TARGET.new_cache(), drafter.taps).taps, [9, 9])
    sampling = DraftSampling(temperature=0.7, seed=11, want_log_probs=True)
    greedy, sampled = drafter.propose([DraftRequest(0, 5, 9), DraftRequest(1, 5, 9, sampling)], 4)
    logits = variant.hidden(variant.taps(tokens), 5, 4) @ variant.draft_head.T
    expected = torch.full((4, len(TOKENS)), -torch.inf, dtype=torch.float64)
    expected[:, VOCABULARY] = (logits / 0.7).log_softmax(-1)
    assert sampled.log_probs is not None
    assert_same(sampled.log_probs, expected)
    drawn = [draw((logits[k - 1] / 0.7).numpy(), 11, 9 + k, Stream.TARGET, np.array(VOCABULARY)) for k in range(1, 5)]
    assert sampled.token_ids == tuple(VOCABULARY[row] for row in drawn)
    assert greedy.token_ids == tuple(variant.tokens(variant.hidden(variant.taps(tokens), 5, 4)))
    for proposal in (greedy, sampled):
        assert_confidences(proposal, logits.softmax(-1).amax(-1))


def test_confidences_are_calibrated_by_position(variants: Mapping[str, Variant]) -> None:
    calibration = Calibration((2.0, 0.5), (0.1, -0.3))
    tokens = random.Random(3).choices(range(len(TOKENS)), k=9)
    batch = flat_batch([tokens], [0], [0])
    found = []
    for own in (None, calibration):
        drafter = DFlashDrafter(variants["plain"].config, variants["plain"].weights, TARGET, calibration=own)
        drafter.observe(batch, TARGET.forward(batch, TARGET.new_cache(), drafter.taps).taps, [9])
        found.append(drafter.propose([DraftRequest(0, 5, 9)], 3)[0].confidences)
    assert found[0] is not None
    assert found[1] == tuple(calibration.apply(k, raw) for k, raw in enumerate(found[0], start=1)) != found[0]


def test_taps_and_limits(variants: Mapping[str, Variant]) -> None:
    drafter = DFlashDrafter(variants["plain"].config, variants["plain"].weights, TARGET)
    assert drafter.taps == (0, 2, 3) and drafter.max_tokens == drafter.default_tokens == 5
    config = replace(variants["plain"].config, default_tokens=3)
    assert DFlashDrafter(config, variants["plain"].weights, TARGET).default_tokens == 3


def test_a_gap_between_drafter_and_target_is_not_drafted_over(variants: Mapping[str, Variant]) -> None:
    drafter = DFlashDrafter(variants["plain"].config, variants["plain"].weights, TARGET)
    with pytest.raises(RuntimeError, match="slot 0: the drafter has seen 0 positions, the anchor stands at 4"):
        drafter.propose([DraftRequest(0, 5, 4)], 3)
