"""Gemma 4 MTP on targets of the Llama kind, against a re-computation from its description: no cache, float64, tensors
by file name, the target's keys and values computed anew for every proposal."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny import CONFIG, TOKENS, model_tensors, random_tensor
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from foredraft.drafters.base import DraftRequest, DraftSampling, Proposal, ReadsTargetCache
from foredraft.drafters.calibration import Calibration
from foredraft.drafters.gemma4_checkpoints import load_gemma4_mtp
from foredraft.drafters.gemma4_mtp import Gemma4MTPConfig, Gemma4MTPDrafter, Gemma4MTPWeights
from foredraft.drafters.picking import DraftVocabulary, pick
from foredraft.errors import UserError
from foredraft.models.batch import flat_batch
from foredraft.models.config import RopeConfig
from foredraft.models.decoder import DecoderModel
from foredraft.ops import NATIVE, REFERENCE, Operations, native

SHAPE = replace(CONFIG, num_layers=3)
# bfloat16 values, so that the native target has the same weights.
TENSORS = {name: tensor.bfloat16().double() for name, tensor in model_tensors(SHAPE).items()}
TARGET = DecoderModel(SHAPE, TENSORS.__getitem__)
V, H, D, G = SHAPE.vocab_size, SHAPE.hidden_size, SHAPE.head_dim, SHAPE.num_kv_heads
VOCABULARY = torch.tensor([1, 4, 5, 9, 17, 18, 30, 31])
ROTARY = Qwen3RotaryEmbedding(Qwen3Config(head_dim=D, rope_parameters={"rope_type": "default", "rope_theta": 100.0}))


def assistant_json(**changes: Any) -> dict[str, Any]:
    """config.json of a drafter for SHAPE; ``text`` changes text_config."""
    text: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": 20,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": G,
        "head_dim": D,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "rope_theta": 100.0,
        "hidden_act": "silu",
        **changes.pop("text", {}),
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": H,
        "num_target_layers": SHAPE.num_layers,
        "kv_layers": [SHAPE.num_layers - 1] * text["num_hidden_layers"],
        "text_config": text,
        **changes,
    }


def assistant_tensors(raw: Mapping[str, Any], seed: int = 1, head_rows: int | None = None) -> dict[str, Tensor]:
    """Random tensors of such a drafter, of bfloat16 values. head_rows: of lm_head, None without one."""
    text = raw["text_config"]
    hidden, inner, q = text["hidden_size"], text["intermediate_size"], text["num_attention_heads"] * D
    shapes: dict[str, tuple[int, ...]] = {
        "pre_projection.weight": (hidden, 2 * H),
        "post_projection.weight": (H, hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(text["num_hidden_layers"]):
        own: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if text["model_type"] == "qwen3":
            own["self_attn.q_norm.weight"] = (D,)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in own.items()}
    if head_rows is not None:
        shapes["lm_head.weight"] = (head_rows, hidden)
    generator = torch.Generator().manual_seed(seed)
    return {name: random_tensor(shape, generator).bfloat16().double() for name, shape in shapes.items()}


def write_assistant(folder: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


SMALL = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 6, "model_type": "qwen3"}
VARIANTS: dict[str, tuple[dict[str, Any], int | None]] = {
    "one-layer": ({}, None),
    "small-two-layers-own-head": ({"text": SMALL, "kv_layers": [0, 2]}, V),
    "draft-vocabulary": ({"draft_vocab_size": len(VOCABULARY)}, None),
    "own-head-draft-vocabulary": ({"text": SMALL, "draft_vocab_size": len(VOCABULARY)}, len(VOCABULARY)),
}


class Variant:
    """A random drafter for TARGET as a file, as we load it, and as its description computes it."""

    def __init__(self, name: str, folder: Path) -> None:
        changes, head_rows = VARIANTS[name]
        self.raw = assistant_json(**changes)
        self.tensors = assistant_tensors(self.raw, head_rows=head_rows)
        stored = dict(self.tensors)
        self.vocab = DraftVocabulary(None, V)
        self.head = self.tensors.get("lm_head.weight", TENSORS["lm_head.weight"])
        if "draft_vocab_size" in self.raw:
            stored["d2t"] = VOCABULARY - torch.arange(len(VOCABULARY))
            self.vocab = DraftVocabulary(VOCABULARY, V)
            if head_rows is None:
                self.head = self.head[VOCABULARY]
        self.config: Gemma4MTPConfig
        self.weights: Gemma4MTPWeights
        self.config, self.weights = load_gemma4_mtp(write_assistant(folder, self.raw, stored), torch.float64, SHAPE)

    def logits(self, committed: Sequence[int], following: Sequence[int]) -> Tensor:
        """[len(following), Vd]: row k - 1 is what step k makes of following[:k], the anchor first, then drafts."""
        text = self.raw["text_config"]
        past, heads = len(committed), text["num_attention_heads"]
        cos, sin = ROTARY(torch.zeros(1, dtype=torch.float64), torch.arange(past).unsqueeze(0))
        stream = [TARGET.embeddings[list(committed)]]
        for layer in range(SHAPE.num_layers):
            taps = TARGET.forward(flat_batch([committed], [0], [0], [0]), TARGET.new_cache(), [layer]).taps
            assert taps is not None
            stream.append(taps)

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return F.rms_norm(x, x.shape[-1:], weight, 1e-6)

        def rotate(x: Tensor, first: int) -> Tensor:
            c, s = (table[0, first:].unsqueeze(1) for table in (cos, sin))
            left, right = x[..., : D // 2], x[..., D // 2 :]
            return x * c + torch.cat((-right, left), -1) * s

        seen = {}
        for read in set(self.raw["kv_layers"]):
            name = f"model.layers.{read}."
            own = norm(stream[read], TENSORS[f"{name}input_layernorm.weight"])
            keys, values = (
                (own @ TENSORS[f"{name}self_attn.{part}_proj.weight"].T).view(past, G, D) for part in ("k", "v")
            )
            seen[read] = rotate(keys, 0), values
        state = norm(stream[-1][-1], TENSORS["model.norm.weight"])
        rows = []
        for token in following:
            x = self.tensors["pre_projection.weight"] @ torch.cat((TARGET.embeddings[token], state))
            for layer, read in enumerate(self.raw["kv_layers"]):

                def weight(name: str, layer: int = layer) -> Tensor:
                    return self.tensors[f"model.layers.{layer}.{name}.weight"]

                q = (weight("self_attn.q_proj") @ norm(x, weight("input_layernorm"))).view(1, heads, D)
                if text["model_type"] == "qwen3":
                    q = norm(q, weight("self_attn.q_norm"))
                q = rotate(q, past - 1)[0]
                keys, values = (part.repeat_interleave(heads // G, dim=1) for part in seen[read])
                scores = torch.einsum("hd,phd->hp", q, keys) / D**0.5
                mixed = torch.einsum("hp,phd->hd", scores.softmax(-1), values).flatten()
                x = x + weight("self_attn.o_proj") @ mixed
                own = norm(x, weight("post_attention_layernorm"))
                gated = F.silu(weight("mlp.gate_proj") @ own) * (weight("mlp.up_proj") @ own)
                x = x + weight("mlp.down_proj") @ gated
            normed = norm(x, self.tensors["model.norm.weight"])
            rows.append(self.head @ normed)
            state = self.tensors["post_projection.weight"] @ normed
        return torch.stack(rows)


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Variant]:
    return {name: Variant(name, tmp_path_factory.mktemp(name)) for name in VARIANTS}


class Rounds:
    """A target and a drafter driven as the engine drives them, with acceptance by dice."""

    def __init__(self, variant: Variant, target: DecoderModel, rng: random.Random) -> None:
        self.variant, self.target, self.rng = variant, target, rng
        self.drafter = Gemma4MTPDrafter(variant.config, variant.weights, target)
        self.cache = target.new_cache()
        self.drafter.attach(self.cache)
        self.sequences: dict[int, tuple[list[int], int]] = {}

    def step(self) -> None:
        """Some sequences start, some prefill a chunk, some decode with rejected tokens behind the kept ones."""
        rng = self.rng
        for slot in range(3):
            if slot not in self.sequences and rng.random() < 0.6:
                self.sequences[slot] = (rng.choices(range(len(TOKENS)), k=rng.randint(2, 30)), 0)
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
            taps = self.target.forward(batch, self.cache, self.drafter.taps).taps
            for slot, start, keep in zip(slots, starts, kept, strict=True):
                tokens, _ = self.sequences[slot]
                self.sequences[slot] = (tokens, start + keep)
                self.cache.commit(slot, start + keep)
            self.drafter.observe(batch, taps, kept)

    def requests(self) -> list[DraftRequest]:
        requests = []
        for slot, (tokens, done) in self.sequences.items():
            if done and self.rng.random() < 0.8:
                sampling = None
                if self.rng.random() < 0.3:
                    sampling = DraftSampling(self.rng.choice([0.5, 1.5]), self.rng.randrange(99))
                requests.append(DraftRequest(slot, tokens[done], done, sampling))
        return requests

    def propose(self) -> None:
        requests = self.requests()
        if not requests:
            return
        asked = self.rng.choice([1, 2, 3, 5, 20])
        ends = [self.rng.choice([1, 2, 4, 99]) for _ in requests]
        proposals = self.drafter.propose(requests, asked, lambda index, confidence, k: k >= ends[index])
        for request, end, proposal in zip(requests, ends, proposals, strict=True):
            assert len(proposal.token_ids) == min(asked, end, self.drafter.max_tokens)
            self.check(request, proposal)

    def check(self, request: DraftRequest, proposal: Proposal) -> None:
        committed = self.sequences[request.slot][0][: request.position]
        logits = self.variant.logits(committed, [request.anchor, *proposal.token_ids[:-1]])
        rows = [(request, k) for k in range(1, len(logits) + 1)]
        expected = pick(logits, rows, self.variant.vocab, REFERENCE)
        assert list(proposal.token_ids) == expected.token_ids
        assert proposal.confidences == pytest.approx(expected.confidences, abs=1e-10)

    def finish(self) -> None:
        for slot in list(self.sequences):
            tokens, done = self.sequences[slot]
            if done == len(tokens) - 1 or self.rng.random() < 0.1:
                self.drafter.release(slot)
                self.cache.release(slot)
                del self.sequences[slot]


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_proposals_are_those_of_the_description(variants: Mapping[str, Variant], name: str, seed: int) -> None:
    """After any pattern of acceptance, for any batch, greedy and sampled, wherever a sequence stops."""
    rounds = Rounds(variants[name], TARGET, random.Random(seed))
    for _ in range(6):
        rounds.step()
        rounds.propose()
        rounds.finish()


def target_of(ops: Operations) -> DecoderModel:
    if ops is NATIVE:
        return DecoderModel(SHAPE, {k: tensor.bfloat16() for k, tensor in TENSORS.items()}.__getitem__, NATIVE)
    return TARGET


BOTH = [
    pytest.param(REFERENCE, id="pytorch"),
    pytest.param(
        NATIVE, id="native", marks=pytest.mark.skipif(native.unavailable() is not None, reason="no native library")
    ),
]


@pytest.mark.parametrize("ops", BOTH)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_a_drafter_with_a_past_is_one_freshly_primed(
    variants: Mapping[str, Variant], ops: Operations, seed: int
) -> None:
    """On the native kernels bit for bit, whatever else was in the batch."""
    target, rng = target_of(ops), random.Random(seed)
    rounds = Rounds(variants[rng.choice([*VARIANTS])], target, rng)
    for _ in range(5):
        rounds.step()
    requests = rounds.requests()
    if not requests:
        return
    for request, found in zip(requests, rounds.drafter.propose(requests, 4), strict=True):
        tokens = rounds.sequences[request.slot][0][: request.position]
        fresh, cache = Gemma4MTPDrafter(rounds.variant.config, rounds.variant.weights, target), target.new_cache()
        fresh.attach(cache)
        batch = flat_batch([tokens], [0], [0])
        taps = target.forward(batch, cache, fresh.taps).taps
        cache.commit(0, len(tokens))
        fresh.observe(batch, taps, [len(tokens)])
        expected = fresh.propose([replace(request, slot=0)], 4)[0]
        assert found.token_ids == expected.token_ids
        exact = 0.0 if ops is NATIVE else 1e-10
        assert found.confidences == pytest.approx(expected.confidences, rel=0, abs=exact)


@pytest.mark.skipif(native.unavailable() is not None, reason="no native library")
def test_native_drafts_are_close_to_the_description(variants: Mapping[str, Variant]) -> None:
    """The native drafter multiplies in 8 bits, so that values differ in the second digit."""
    target, rng = target_of(NATIVE), random.Random(3)
    off: list[float] = []
    for variant in variants.values():
        for length in (1, 7, 70):
            tokens = rng.choices(range(len(TOKENS)), k=length + 1)
            drafter, cache = Gemma4MTPDrafter(variant.config, variant.weights, target), target.new_cache()
            drafter.attach(cache)
            batch = flat_batch([tokens[:-1]], [0], [0])
            taps = target.forward(batch, cache, drafter.taps).taps
            cache.commit(0, length)
            drafter.observe(batch, taps, [length])
            proposal = drafter.propose([DraftRequest(0, tokens[-1], length)], 3)[0]
            logits = variant.logits(tokens[:-1], [tokens[-1], *proposal.token_ids[:-1]])
            assert proposal.confidences is not None
            off += (torch.tensor(proposal.confidences) - logits.softmax(-1).max(-1).values).abs().tolist()
    assert len(off) == 3 * 3 * len(VARIANTS)
    assert sum(off) / len(off) < 0.03 and max(off) < 0.2


def test_context_state_and_token_matter(variants: Mapping[str, Variant]) -> None:
    """Guards the tests above: a wrong key, position, hidden state or token would show."""
    variant = variants["small-two-layers-own-head"]
    tokens = random.Random(0).choices(range(3, len(TOKENS)), k=12)
    base = variant.logits(tokens, [5, 6])
    assert (variant.logits([*tokens[:4], tokens[4] % 8 + 3 + 8, *tokens[5:]], [5, 6]) - base).abs().max() > 1e-6
    assert (variant.logits(tokens[:-1], [5, 6]) - base).abs().max() > 1e-3
    other = variant.logits(tokens, [5, 7])
    assert torch.equal(other[0], base[0]) and (other[1] - base[1]).abs().max() > 1e-3


def test_confidences_are_calibrated(variants: Mapping[str, Variant]) -> None:
    calibration = Calibration((2.0, 0.5), (0.1, -0.2))
    variant, found = variants["one-layer"], []
    for own in (None, calibration):
        drafter, cache = Gemma4MTPDrafter(variant.config, variant.weights, TARGET, None, own), TARGET.new_cache()
        drafter.attach(cache)
        batch = flat_batch([[3, 4, 5]], [0], [0])
        taps = TARGET.forward(batch, cache, drafter.taps).taps
        cache.commit(0, 3)
        drafter.observe(batch, taps, [3])
        found.append(drafter.propose([DraftRequest(0, 6, 3)], 3)[0])
    raw, calibrated = found
    assert raw.token_ids == calibrated.token_ids and raw.confidences is not None
    assert calibrated.confidences == tuple(calibration.apply(k, own) for k, own in enumerate(raw.confidences, 1))


def test_taps_limits_and_misuse(variants: Mapping[str, Variant]) -> None:
    variant = variants["one-layer"]
    drafter = Gemma4MTPDrafter(variant.config, variant.weights, TARGET)
    assert isinstance(drafter, ReadsTargetCache) and drafter.reads_target_cache
    assert drafter.taps == (2,) and (drafter.default_tokens, drafter.max_tokens) == (3, 15)
    with pytest.raises(RuntimeError, match="attach"):
        drafter.propose([DraftRequest(0, 5, 4)], 3)
    drafter.attach(TARGET.new_cache())
    with pytest.raises(RuntimeError, match="slot 0: the drafter has seen 0 positions, the anchor stands at 4"):
        drafter.propose([DraftRequest(0, 5, 4)], 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 20}, "its hidden size is 16, the target's is 20"),
        ({"vocab_size": 40}, "its vocabulary size is 32, the target's is 40"),
        ({"num_layers": 4}, "its number of target layers is 3, the target's is 4"),
        ({"num_kv_heads": 1}, "its number of key/value heads is 2, the target's is 1"),
        ({"head_dim": 8}, "its head size is 6, the target's is 8"),
        ({"rope": RopeConfig(theta=50.0)}, "its RoPE is not the target's"),
    ],
)
def test_another_target_is_refused(variants: Mapping[str, Variant], changes: dict[str, Any], message: str) -> None:
    variant, config = variants["one-layer"], replace(SHAPE, **changes)
    with pytest.raises(UserError, match=message):
        Gemma4MTPDrafter(variant.config, variant.weights, DecoderModel(config, model_tensors(config).__getitem__))
