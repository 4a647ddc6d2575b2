"""DSpark's heads by their formulas, its rounds against a re-computation: no cache, float64, tensors by file name."""

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import (
    CONFIG,
    MASK,
    TOKENS,
    dspark_json,
    dspark_tensors,
    model_tensors,
    tiny_model,
    write_dflash,
)
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from foredraft.drafters.base import DraftRequest, DraftSampling, Proposal
from foredraft.drafters.calibration import Calibration
from foredraft.drafters.checkpoints import load_dspark
from foredraft.drafters.dspark import DSparkDrafter, markov_latent
from foredraft.models.batch import flat_batch
from foredraft.models.decoder import DecoderModel
from foredraft.ops import NATIVE, REFERENCE, native

TARGET = tiny_model(CONFIG)
RANK, BLOCK = 5, 6
VOCABULARY = [1, 4, 5, 9, 17, 18, 30, 31]
VARIANTS: dict[str, dict[str, Any]] = {
    "vanilla": {"markov_head_type": "vanilla"},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "confidence-of-hidden": {"markov_head_type": "gated", "confidence_head_with_markov": False},
    "no-confidence": {"markov_head_type": "rnn", "enable_confidence_head": False},
    "draft-vocabulary": {"markov_head_type": "rnn", "draft_vocab_size": len(VOCABULARY)},
    "own-tables": {"markov_head_type": "vanilla", "draft_vocab_size": len(VOCABULARY)},
}


class Variant:
    """A random drafter for TARGET as a file, as we load it, and as its description computes it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.raw = dspark_json(**VARIANTS[name])
        self.tensors = dspark_tensors(self.raw, own_tables=name == "own-tables")
        if "draft_vocab_size" in self.raw:
            self.tensors["d2t"] = torch.tensor(VOCABULARY) - torch.arange(len(VOCABULARY))
        self.vocabulary = torch.tensor(VOCABULARY if "draft_vocab_size" in self.raw else range(len(TOKENS)))
        self.embeddings = self.tensors.get("embed_tokens.weight", TARGET.embeddings)
        self.head = self.tensors.get("lm_head.weight", TARGET.head[self.vocabulary])
        self.config, self.weights = load_dspark(write_dflash(folder, self.raw, self.tensors), torch.float64)
        self.rotary = Qwen3RotaryEmbedding(Qwen3Config(**{k: v for k, v in self.raw.items() if k != "architectures"}))

    def drafter(self, calibration: Calibration | None = None) -> DSparkDrafter:
        return DSparkDrafter(self.config, self.weights, TARGET, calibration=calibration)

    def hidden(self, tokens: Sequence[int], anchor: int, count: int) -> Tensor:
        """Normed hidden states [count, K] of [anchor, MASK x (count - 1)] behind ``tokens``."""
        raw, size, past = self.raw, self.raw["head_dim"], len(tokens)
        batch = flat_batch([tokens], [0], [0], [0])
        taps = TARGET.forward(batch, TARGET.new_cache(), raw["target_layer_ids"]).taps
        assert taps is not None
        cos, sin = self.rotary(torch.zeros(1, dtype=torch.float64), torch.arange(past + count).unsqueeze(0))

        def norm(x: Tensor, name: str) -> Tensor:
            return F.rms_norm(x, x.shape[-1:], self.tensors[name], raw["rms_norm_eps"])

        def rotate(x: Tensor, first: int) -> Tensor:
            c, s = (table[0, first : first + len(x)].unsqueeze(1) for table in (cos, sin))
            return x * c + torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1) * s

        context = norm(taps @ self.tensors["fc.weight"].T, "hidden_norm.weight")
        x = self.embeddings[[anchor] + [MASK] * (count - 1)]
        for layer in range(raw["num_hidden_layers"]):
            at = f"layers.{layer}."
            weights = {name: self.tensors[f"{at}self_attn.{name}_proj.weight"] for name in "qkvo"}
            own = norm(x, f"{at}input_layernorm.weight")
            both = torch.cat((context, own))
            q = rotate(norm((own @ weights["q"].T).view(count, -1, size), f"{at}self_attn.q_norm.weight"), past)
            k = rotate(norm((both @ weights["k"].T).view(past + count, -1, size), f"{at}self_attn.k_norm.weight"), 0)
            v = (both @ weights["v"].T).view(past + count, -1, size)
            share = q.shape[1] // k.shape[1]
            scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(share, 1)) / size**0.5
            mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(share, 1))
            x = x + mixed.reshape(count, -1) @ weights["o"].T
            inner = norm(x, f"{at}post_attention_layernorm.weight")
            gate, up = (inner @ self.tensors[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ self.tensors[f"{at}mlp.down_proj.weight"].T
        return norm(x, "norm.weight")

    def propose(self, tokens: Sequence[int], anchor: int, count: int) -> tuple[list[int], list[float], Tensor]:
        """Token ids, confidences and logits [count, Vd] of a greedy round."""
        own, kind, read = self.hidden(tokens, anchor, count), self.raw["markov_head_type"], self.tensors
        state = torch.zeros(RANK, dtype=torch.float64)
        ids: list[int] = []
        confidences: list[float] = []
        logits: list[Tensor] = []
        for h in own:
            e = read["markov_head.markov_w1.weight"][ids[-1] if ids else anchor]
            latent = e
            if kind == "gated":
                both = torch.cat((h, e))
                latent = (
                    both @ read["markov_head.gate_proj.weight"].T + read["markov_head.gate_proj.bias"]
                ).sigmoid() * e
            if kind == "rnn":
                all_three = torch.cat((state, e, h))
                z = all_three @ read["markov_head.joint_proj.weight"].T + read["markov_head.joint_proj.bias"]
                g = z[:RANK].sigmoid()
                state = g * state + (1 - g) * z[RANK : 2 * RANK].tanh()
                latent = z[2 * RANK :].tanh()
            logits.append(self.head @ h + read["markov_head.markov_w2.weight"] @ latent)
            ids.append(int(self.vocabulary[logits[-1].argmax()]))
            if self.raw["enable_confidence_head"]:
                features = torch.cat((h, e)) if self.raw["confidence_head_with_markov"] else h
                score = read["confidence_head.proj.weight"] @ features + read["confidence_head.proj.bias"]
                confidences.append(score.sigmoid().item())
            else:
                confidences.append(logits[-1].softmax(-1).max().item())
        return ids, confidences, torch.stack(logits)


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Variant]:
    return {name: Variant(name, tmp_path_factory.mktemp(name)) for name in VARIANTS}


def assert_close(found: Proposal, ids: Sequence[int], confidences: Sequence[float]) -> None:
    assert list(found.token_ids) == list(ids) and found.log_probs is None
    # max q comes from ``ops.best``, in float32.
    assert found.confidences == pytest.approx(confidences, abs=1e-6)


class Rounds:
    """A target and a drafter driven as the engine drives them, with acceptance by dice."""

    def __init__(self, variant: Variant, rng: random.Random) -> None:
        self.variant, self.rng = variant, rng
        self.drafter = variant.drafter()
        self.cache = TARGET.new_cache()
        self.sequences: dict[int, tuple[list[int], int]] = {}

    def step(self) -> None:
        """Some sequences start or end, some run a chunk of rows of which the first ones are kept."""
        rng = self.rng
        for slot in range(3):
            if slot in self.sequences and rng.random() < 0.1:
                self.drafter.release(slot)
                self.cache.release(slot)
                del self.sequences[slot]
            if slot not in self.sequences and rng.random() < 0.6:
                self.sequences[slot] = (rng.choices(range(len(TOKENS)), k=rng.randint(3, 30)), 0)
        slots = [slot for slot, (tokens, done) in self.sequences.items() if done < len(tokens) - 1]
        if not slots:
            return
        rng.shuffle(slots)
        rows, starts, kept = [], [], []
        for slot in slots:
            tokens, done = self.sequences[slot]
            keep = rng.randint(1, min(9, len(tokens) - 1 - done))
            rows.append(tokens[done : done + keep] + rng.choices(range(len(TOKENS)), k=rng.choice([0, 1, 4])))
            starts.append(done)
            kept.append(keep if rng.random() < 0.9 else 0)
        batch = flat_batch(rows, starts, slots)
        taps = TARGET.forward(batch, self.cache, self.drafter.taps).taps
        self.drafter.observe(batch, taps, kept)
        for slot, keep in zip(slots, kept, strict=True):
            tokens, done = self.sequences[slot]
            self.sequences[slot] = (tokens, done + keep)

    def propose(self) -> None:
        ready = [slot for slot, (_, done) in self.sequences.items() if done and self.rng.random() < 0.8]
        if not ready:
            return
        asked = self.rng.choice([1, 2, 4, 9])
        requests = [
            DraftRequest(slot, self.sequences[slot][0][self.sequences[slot][1]], self.sequences[slot][1])
            for slot in ready
        ]
        for request, found in zip(requests, self.drafter.propose(requests, asked), strict=True):
            committed = self.sequences[request.slot][0][: request.position]
            ids, confidences, _ = self.variant.propose(committed, request.anchor, min(asked, BLOCK))
            assert_close(found, ids, confidences)


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=6)
@given(seed=st.integers(0, 2**32))
def test_proposals_are_those_of_the_description(variants: Mapping[str, Variant], name: str, seed: int) -> None:
    """After any pattern of acceptance, for any batch: what rejected tokens and blocks left behind is never seen."""
    rounds = Rounds(variants[name], random.Random(seed))
    for _ in range(6):
        rounds.step()
        rounds.propose()


@pytest.mark.parametrize("name", ["vanilla", "gated", "rnn"])
def test_each_token_depends_on_the_one_before(variants: Mapping[str, Variant], name: str) -> None:
    """Guards the tests above: without the bias of the token before, other tokens would have been proposed."""
    variant, rng = variants[name], random.Random(0)
    differ = 0
    for _ in range(10):
        tokens = rng.choices(range(len(TOKENS)), k=8)
        ids, _, logits = variant.propose(tokens, 5, BLOCK)
        base = variant.hidden(tokens, 5, BLOCK) @ variant.head.T
        assert len({tuple(row) for row in (logits - base).tolist()}) > 1
        differ += base.argmax(-1).tolist() != ids
    assert differ >= 5


def primed(variant: Variant, tokens: Sequence[int], calibration: Calibration | None = None) -> DSparkDrafter:
    drafter = variant.drafter(calibration)
    batch = flat_batch([tokens, tokens], [0, 0], [0, 1])
    taps = TARGET.forward(batch, TARGET.new_cache(), drafter.taps).taps
    drafter.observe(batch, taps, [len(tokens), len(tokens)])
    return drafter


def test_a_sampled_token_is_what_the_next_one_follows(variants: Mapping[str, Variant]) -> None:
    """Log-probabilities of each position by the tokens drawn before it; a greedy sequence beside it keeps its own."""
    variant, tokens = variants["draft-vocabulary"], [3, 9, 14, 5, 9]
    drafter = primed(variant, tokens)
    sampling = DraftSampling(temperature=2.0, seed=7, want_log_probs=True)
    greedy, sampled = drafter.propose([DraftRequest(0, 4, 5), DraftRequest(1, 4, 5, sampling)], BLOCK)
    assert list(greedy.token_ids) == variant.propose(tokens, 4, BLOCK)[0] != list(sampled.token_ids)
    read, hidden = variant.tensors, variant.hidden(tokens, 4, BLOCK)
    state = torch.zeros(1, RANK, dtype=torch.float64)
    assert sampled.log_probs is not None and sampled.confidences is not None
    for k, before in enumerate([4, *sampled.token_ids[:-1]]):
        embedded = read["markov_head.markov_w1.weight"][[before]]
        gate = (read["markov_head.joint_proj.weight"], read["markov_head.joint_proj.bias"])
        latent, state = markov_latent("rnn", embedded, hidden[k : k + 1], state, *gate, REFERENCE)
        logits = hidden[k] @ variant.head.T + latent[0] @ read["markov_head.markov_w2.weight"].T
        expected = torch.full((len(TOKENS),), -torch.inf, dtype=torch.float64)
        expected[VOCABULARY] = (logits / 2).log_softmax(-1)
        torch.testing.assert_close(sampled.log_probs[k], expected, rtol=0, atol=1e-10)
        features = torch.cat((hidden[k], embedded[0]))
        score = read["confidence_head.proj.weight"] @ features + read["confidence_head.proj.bias"]
        assert sampled.confidences[k] == pytest.approx(score.sigmoid().item())
    assert {*sampled.token_ids} <= {*VOCABULARY}


def test_markov_heads_by_hand() -> None:
    """r = 1, K = 1: e = 2, h = 3, s = 0.5, and gates whose values are read off."""
    e, h, s = (torch.tensor([[value]], dtype=torch.float64) for value in (2.0, 3.0, 0.5))
    latent, state = markov_latent("vanilla", e, h, s, None, None, REFERENCE)
    assert latent.item() == 2.0 and state.item() == 0.5
    gate = torch.tensor([[0.5, -1.0]], dtype=torch.float64)
    latent, state = markov_latent("gated", e, h, s, gate, torch.tensor([0.25], dtype=torch.float64), REFERENCE)
    # 0.5 * 3 - 1 * 2 + 0.25
    assert latent.item() == pytest.approx(2 / (1 + math.exp(0.25))) and state.item() == 0.5
    joint = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.0], [0.0, 0.0, 0.1]], dtype=torch.float64)
    bias = torch.tensor([-0.5, 0.0, 0.2], dtype=torch.float64)
    latent, state = markov_latent("rnn", e, h, s, joint, bias, REFERENCE)
    # The gate is sigmoid(0.5 - 0.5), the candidate tanh(1), the output tanh(0.3 + 0.2).
    assert state.item() == pytest.approx(0.5 * 0.5 + 0.5 * math.tanh(1.0))
    assert latent.item() == pytest.approx(math.tanh(0.5))


def test_confidences_are_calibrated_by_position(variants: Mapping[str, Variant]) -> None:
    variant, tokens = variants["vanilla"], [3, 9, 14, 5, 9]
    calibration = Calibration((2.0, 0.5), (0.1, -0.3))
    request = DraftRequest(0, 4, 5)
    raw = primed(variant, tokens).propose([request], 3)[0].confidences
    assert raw == pytest.approx(variant.propose(tokens, 4, 3)[1])
    found = primed(variant, tokens, calibration).propose([request], 3)[0].confidences
    assert raw is not None and found == tuple(calibration.apply(k, own) for k, own in enumerate(raw, start=1)) != raw


@pytest.mark.skipif(native.unavailable() is not None, reason="the native library is missing")
@pytest.mark.parametrize("name", ["gated", "rnn", "own-tables"])
def test_native_proposals_do_not_depend_on_the_batch(variants: Mapping[str, Variant], name: str) -> None:
    """In 8 bits; and they are close to what the weights say."""
    variant = variants[name]
    tensors = {key: tensor.bfloat16() for key, tensor in model_tensors(CONFIG).items()}
    target = DecoderModel(CONFIG, tensors.__getitem__, NATIVE)
    texts = [[3, 9, 14, 5, 9], [7, 7, 8], [30, 1, 2, 3, 4, 5, 6, 7]]
    requests = [DraftRequest(slot, 4 + slot, len(text)) for slot, text in enumerate(texts)]
    drafter = DSparkDrafter(variant.config, variant.weights, target)
    batch = flat_batch(texts, [0] * 3, range(3))
    drafter.observe(batch, target.forward(batch, target.new_cache(), drafter.taps).taps, batch.counts)
    together = drafter.propose(requests, BLOCK)
    for request, text, found in zip(requests, texts, together, strict=True):
        assert drafter.propose([request], BLOCK) == [found]
        assert {*found.token_ids} <= {*variant.vocabulary.tolist()}
        assert found.confidences is not None
        assert found.confidences[0] == pytest.approx(variant.propose(text, request.anchor, BLOCK)[1][0], abs=0.1)


def test_limits(variants: Mapping[str, Variant]) -> None:
    """b rows give b proposals."""
    drafter = variants["vanilla"].drafter()
    assert drafter.taps == (0, 1) and drafter.max_tokens == drafter.default_tokens == BLOCK
    assert drafter.calibration is None
    with pytest.raises(RuntimeError, match="slot 0: the drafter has seen 0 positions, the anchor stands at 4"):
        drafter.propose([DraftRequest(0, 5, 4)], 3)
