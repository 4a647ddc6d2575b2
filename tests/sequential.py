"""Sequential drafters as described (no cache, every row anew, float64), and rounds to hold drafters to it."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tiny import CONFIG, TOKENS, layer_shapes, model_tensors, random_tensor
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from foredraft.drafters.base import DraftRequest, DraftSampling, Proposal
from foredraft.drafters.recursive import RecursiveDrafter
from foredraft.models.batch import flat_batch
from foredraft.models.config import ModelConfig, RopeConfig
from foredraft.models.decoder import DecoderModel
from foredraft.ops import NATIVE, REFERENCE, Operations

VOCABULARY = [1, 4, 5, 9, 17, 18, 30, 31]
TARGET_CONFIG = replace(CONFIG, num_layers=4)
NATIVE_CONFIG = replace(
    CONFIG, hidden_size=40, intermediate_size=70, num_layers=4, head_dim=10, rope=RopeConfig(theta=1000.0)
)


def drafter_json(target: ModelConfig, **changes: Any) -> dict[str, Any]:
    """The fields of config.json that both methods share, for a target of that shape."""
    return {
        "num_target_layers": target.num_layers,
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 20,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "rope_theta": 1000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **changes,
    }


def layer_tensors(raw: dict[str, Any], prefix: str, width: int, qk_norm: bool, seed: int) -> dict[str, Tensor]:
    """One random layer whose q, k and v read ``width`` values."""
    shape = replace(
        CONFIG,
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        qk_norm=qk_norm,
    )
    generator = torch.Generator().manual_seed(seed)
    reads = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
    shapes = {name: (size[0], width) if name.endswith(reads) else size for name, size in layer_shapes(shape).items()}
    return {prefix + name: random_tensor(size, generator) for name, size in shapes.items()}


def mtp_json(target: ModelConfig, qk_norm: bool = False, **changes: Any) -> dict[str, Any]:
    raw = {"architectures": ["MTPDraftModel"], "model_type": "qwen3" if qk_norm else "llama"}
    return {**drafter_json(target), **raw, "mtp_num_hidden_layers": 1, **changes}


def mtp_tensors(raw: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    generator, hidden = torch.Generator().manual_seed(seed), raw["hidden_size"]
    sizes = {"fc": (hidden, 2 * hidden), "pre_fc_norm_embedding": (hidden,), "pre_fc_norm_hidden": (hidden,)}
    tensors = {f"mtp.{name}.weight": random_tensor(size, generator) for name, size in sizes.items()}
    tensors["mtp.norm.weight"] = random_tensor((hidden,), generator)
    return tensors | layer_tensors(raw, "mtp.layers.0.", hidden, raw["model_type"] == "qwen3", seed + 1) | d2t(raw)


def eagle3_json(target: ModelConfig, qk_norm: bool = False, **changes: Any) -> dict[str, Any]:
    """With three taps, after layers 0, 1 and the last."""
    raw = {
        "architectures": ["Eagle3Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if qk_norm else "llama",
        "draft_vocab_size": target.vocab_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, target.num_layers], "use_aux_hidden_state": True},
    }
    return {**drafter_json(target), **raw, **changes}


def eagle3_tensors(
    raw: dict[str, Any], seed: int = 0, prefix: str = "midlayer.", own_head: bool = True
) -> dict[str, Tensor]:
    generator, hidden = torch.Generator().manual_seed(seed), raw["hidden_size"]
    taps = len(raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    sizes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * hidden),
        f"{prefix}hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    if own_head:
        sizes["lm_head.weight"] = (raw["draft_vocab_size"], hidden)
    tensors = {name: random_tensor(size, generator) for name, size in sizes.items()}
    return tensors | layer_tensors(raw, prefix, 2 * hidden, raw["model_type"] == "qwen3", seed + 1) | d2t(raw)


def gemma4_json(target: ModelConfig, **changes: Any) -> dict[str, Any]:
    """With one layer as wide as the target's, which reads the target's last one and predicts with its head."""
    text = {
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "rope_theta": target.rope.theta,
        "hidden_act": "silu",
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": target.hidden_size,
        "num_target_layers": target.num_layers,
        "kv_layers": [target.num_layers - 1],
        "text_config": text,
        **changes,
    }


def gemma4_tensors(raw: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    generator, hidden = torch.Generator().manual_seed(seed), raw["backbone_hidden_size"]
    sizes: dict[str, tuple[int, ...]] = {
        "pre_projection.weight": (hidden, 2 * hidden),
        "post_projection.weight": (hidden, hidden),
        "model.norm.weight": (hidden,),
    }
    tensors = {name: random_tensor(size, generator) for name, size in sizes.items()}
    layer = layer_tensors(raw["text_config"], "model.layers.0.", hidden, False, seed + 1)
    own = {name: tensor for name, tensor in layer.items() if not name.endswith(("k_proj.weight", "v_proj.weight"))}
    return tensors | own | d2t(raw)


def d2t(raw: dict[str, Any]) -> dict[str, Tensor]:
    if raw.get("draft_vocab_size") != len(VOCABULARY):
        return {}
    return {"d2t": torch.tensor(VOCABULARY) - torch.arange(len(VOCABULARY))}


def write(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder


def head_of(raw: dict[str, Any], target: DecoderModel) -> tuple[Tensor, Tensor]:
    """The target's rows that a drafter without a head of its own predicts with, and their ids."""
    reduced = raw.get("draft_vocab_size") == len(VOCABULARY)
    vocabulary = torch.tensor(VOCABULARY) if reduced else torch.arange(len(TOKENS))
    return target.head_rows(vocabulary).double(), vocabulary


def target_model(ops: Operations = REFERENCE, **changes: Any) -> DecoderModel:
    if ops is NATIVE:
        tensors = {name: tensor.bfloat16() for name, tensor in model_tensors(NATIVE_CONFIG).items()}
        return DecoderModel(replace(NATIVE_CONFIG, **changes), tensors.__getitem__, NATIVE)
    config = replace(TARGET_CONFIG, **changes)
    return DecoderModel(config, model_tensors(config).__getitem__, ops)


def causal_layer(
    tensors: dict[str, Tensor], prefix: str, raw: dict[str, Any], residual: Tensor, attention_input: Tensor
) -> Tensor:
    """A Llama layer over rows at positions 0, 1, ..., [n, K]: every row sees itself and those before it."""
    size, count = raw["head_dim"], len(residual)
    rotary = LlamaRotaryEmbedding(LlamaConfig(**raw))
    cos, sin = rotary(torch.zeros(1, dtype=torch.float64), torch.arange(count).unsqueeze(0))

    def weight(name: str) -> Tensor:
        return tensors[f"{prefix}{name}.weight"]

    def heads(name: str) -> Tensor:
        return (attention_input @ weight(f"self_attn.{name}_proj").T).view(count, -1, size)

    def rotated(x: Tensor, name: str) -> Tensor:
        if f"{prefix}self_attn.{name}_norm.weight" in tensors:
            x = norm(x, weight(f"self_attn.{name}_norm"), raw)
        turned = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1)
        return x * cos[0].unsqueeze(1) + turned * sin[0].unsqueeze(1)

    queries, keys, values = rotated(heads("q"), "q"), rotated(heads("k"), "k"), heads("v")
    share = queries.shape[1] // keys.shape[1]
    scores = torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(share, 1)) / size**0.5
    scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), -torch.inf)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.repeat_interleave(share, 1))
    x = residual + mixed.reshape(count, -1) @ weight("self_attn.o_proj").T
    inner = norm(x, weight("post_attention_layernorm"), raw)
    gated = F.silu(inner @ weight("mlp.gate_proj").T) * (inner @ weight("mlp.up_proj").T)
    return x + gated @ weight("mlp.down_proj").T


def norm(x: Tensor, weight: Tensor, raw: dict[str, Any]) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, raw["rms_norm_eps"])


class Description(Protocol):
    """A method for one target. head: [Vd, K], of the target ids ``vocabulary [Vd]``."""

    head: Tensor
    vocabulary: Tensor

    def features(self, taps: Tensor) -> Tensor: ...

    def rows(self, features: Tensor, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Of all pairs from position 0 on, what is fed back and what the head reads."""


def unrolled(method: Description, taps: Tensor, tokens: Sequence[int], anchor: int, drafted: Sequence[int]) -> Tensor:
    """What the head reads at each step, [len(drafted), K], when the steps before gave ``drafted``."""
    features = method.features(taps)
    ids = [*tokens[1:], anchor]
    found = []
    for token in drafted:
        fed_back, read = method.rows(features, ids)
        found.append(read[-1])
        features = torch.cat((features, fed_back[-1:]))
        ids.append(token)
    return torch.stack(found)


@dataclass
class Spy:
    """Remembers what the drafter's head reads, step by step."""

    steps: list[Tensor]

    @classmethod
    def on(cls, drafter: RecursiveDrafter) -> "Spy":
        spy, ops, head = cls([]), drafter._ops, drafter._head

        def linear(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
            if weight is head:
                spy.steps.append(x)
            return ops.linear(x, weight, bias)

        drafter._ops = replace(ops, linear=linear)
        return spy


class Rounds:
    """A target and a drafter driven as the engine drives them, with acceptance, chunks and stops by dice."""

    def __init__(self, target: DecoderModel, make: Callable[[], RecursiveDrafter], rng: random.Random) -> None:
        self.target, self.make, self.rng = target, make, rng
        self.drafter = make()
        self.spy = Spy.on(self.drafter)
        self.cache = target.new_cache()
        self.sequences: dict[int, tuple[list[int], int]] = {}

    def step(self) -> None:
        """Some sequences start, some prefill a chunk, some decode with rejected tokens behind the kept ones."""
        rng = self.rng
        for slot in range(3):
            if slot not in self.sequences and rng.random() < 0.6:
                longest = rng.choice([3, 20, 60])
                self.sequences[slot] = (rng.choices(range(len(TOKENS)), k=rng.randint(2, longest)), 0)
        slots = [slot for slot, (tokens, done) in self.sequences.items() if done < len(tokens) - 1]
        rng.shuffle(slots)
        rows, starts, kept = [], [], []
        for slot in slots:
            tokens, done = self.sequences[slot]
            keep = rng.randint(1, min(rng.choice([1, 4, 45]), len(tokens) - 1 - done))
            rows.append(tokens[done : done + keep] + rng.choices(range(len(TOKENS)), k=rng.choice([0, 0, 1, 4])))
            starts.append(done)
            kept.append(keep if rng.random() < 0.9 else 0)
        if any(kept):
            batch = flat_batch(rows, starts, slots)
            self.drafter.observe(batch, self.target.forward(batch, self.cache, self.drafter.taps).taps, kept)
            for slot, keep in zip(slots, kept, strict=True):
                tokens, done = self.sequences[slot]
                self.sequences[slot] = (tokens, done + keep)

    def propose(self, check: Callable[[Sequence[int], DraftRequest, Proposal, Tensor], None]) -> None:
        """Ask for proposals and hand ``check`` each with its committed tokens and what the head read, [N, K]."""
        rng = self.rng
        slots = [slot for slot, (_, done) in self.sequences.items() if done and rng.random() < 0.8]
        rng.shuffle(slots)
        if not slots:
            return
        requests = [self.request(slot, rng.choice([None, DraftSampling(0.7, rng.getrandbits(40))])) for slot in slots]
        asked = rng.choice([1, 2, 3, 6, 99])
        wanted = [rng.choice([asked, rng.randint(1, 6)]) for _ in slots]
        self.spy.steps.clear()
        proposals = self.drafter.propose(requests, asked, lambda index, _, k: k >= wanted[index])
        steps = [step.split(1) for step in self.spy.steps]
        rows: list[list[Tensor]] = [[] for _ in slots]
        for k, step in enumerate(steps):
            running = [index for index, proposal in enumerate(proposals) if len(proposal.token_ids) > k]
            for index, row in zip(running, step, strict=True):
                rows[index].append(row)
        for slot, request, proposal, own, most in zip(slots, requests, proposals, rows, wanted, strict=True):
            assert len(proposal.token_ids) == min(asked, most, self.drafter.max_tokens)
            check(self.sequences[slot][0][: request.position], request, proposal, torch.cat(own))

    def request(self, slot: int, sampling: DraftSampling | None = None) -> DraftRequest:
        tokens, done = self.sequences[slot]
        return DraftRequest(slot, tokens[done], done, sampling)

    def finish(self) -> None:
        for slot in list(self.sequences):
            tokens, done = self.sequences[slot]
            if done == len(tokens) - 1 or self.rng.random() < 0.1:
                self.drafter.release(slot)
                self.cache.release(slot)
                del self.sequences[slot]

    def run(self, rounds: int, check: Callable[[Sequence[int], DraftRequest, Proposal, Tensor], None]) -> None:
        for _ in range(rounds):
            self.step()
            self.propose(check)
            self.finish()


def taps_of(target: DecoderModel, layers: Sequence[int], tokens: Sequence[int]) -> Tensor:
    taps = target.forward(flat_batch([tokens], [0], [0], [0]), target.new_cache(), layers).taps
    assert taps is not None
    return taps


def check_description(
    target: DecoderModel, make: Callable[[], RecursiveDrafter], method: Description, seed: int, rounds: int = 7
) -> None:
    """Proposals are those of the description, whatever was accepted before, in float64."""

    def check(tokens: Sequence[int], request: DraftRequest, proposal: Proposal, read: Tensor) -> None:
        taps = taps_of(target, driven.drafter.taps, tokens)
        expected = unrolled(method, taps, tokens, request.anchor, proposal.token_ids)
        torch.testing.assert_close(read, expected, rtol=0, atol=1e-10)
        logits = expected @ method.head.T
        if request.sampling is None:
            assert proposal.token_ids == tuple(method.vocabulary[logits.argmax(-1)].tolist())
        assert {*proposal.token_ids} <= {*method.vocabulary.tolist()} and proposal.log_probs is None
        torch.testing.assert_close(
            torch.tensor(proposal.confidences, dtype=torch.float64), logits.softmax(-1).amax(-1), rtol=0, atol=1e-6
        )

    driven = Rounds(target, make, random.Random(seed))
    driven.run(rounds, check)


def check_native(
    target: DecoderModel, make: Callable[[], RecursiveDrafter], method: Description, seed: int, rounds: int = 6
) -> None:
    """On the native kernels a drafter with a past is one freshly primed, bit for bit, and near the description."""

    def check(tokens: Sequence[int], request: DraftRequest, proposal: Proposal, read: Tensor) -> None:
        fresh = make()
        spy = Spy.on(fresh)
        batch = flat_batch([tokens], [0], [5])
        taps = target.forward(batch, target.new_cache(), fresh.taps).taps
        assert taps is not None
        fresh.observe(batch, taps, [len(tokens)])
        assert fresh.propose([replace(request, slot=5)], len(proposal.token_ids)) == [proposal]
        assert torch.equal(torch.cat(spy.steps), read)
        expected = unrolled(method, taps.double(), tokens, request.anchor, proposal.token_ids)
        # 8-bit weights and activations, layer upon step.
        error = (read.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error[0] < 0.06 and error.max() < 0.25, error

    driven = Rounds(target, make, random.Random(seed))
    driven.run(rounds, check)
