"""Drafters with layers of Gemma 4 against transformers: its assistant, step by step, and its assisted generation."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from foredraft.drafters.base import DraftRequest
from foredraft.drafters.gemma4_assistant import FULL, SLIDING, Gemma4Decoder, Gemma4Shape, Gemma4Weights, gemma4_logits
from foredraft.drafters.gemma4_checkpoints import load_gemma4_mtp
from foredraft.drafters.gemma4_mtp import GEMMA, Gemma4MTPConfig, Gemma4MTPDrafter, Gemma4MTPWeights
from foredraft.models.batch import flat_batch
from foredraft.models.config import ModelConfig, RopeConfig
from foredraft.models.decoder import DecoderModel
from foredraft.ops import REFERENCE
from foredraft.ops.reference import linear, rms_norm

VOCAB, BACKBONE, WINDOW, KV_HEADS = 24, 20, 6, 2
HEAD_DIMS = {FULL: 16, SLIDING: 8}
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": 0,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 28,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIMS[SLIDING],
    "global_head_dim": HEAD_DIMS[FULL],
    "sliding_window": WINDOW,
    "max_position_embeddings": 256,
}
ROPE = {
    FULL: {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.25, "factor": 2.0},
    SLIDING: {"rope_type": "default", "rope_theta": 100.0},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "sparse-head": {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 3},
    "other-rope": {"rope_parameters": ROPE},
}


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Norms and scalars around 1, matrices that keep the size of what they multiply."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {**dict(model.named_parameters()), **{k: v for k, v in model.named_buffers() if "layer_scalar" in k}}
    for tensor in tensors.values():
        values = torch.randn(tensor.shape, generator=generator)
        tensor.data = 1 + 0.3 * values if tensor.ndim == 1 else values * tensor.shape[1] ** -0.5


class Assistant:
    """A random assistant of transformers, and what we make of its folder."""

    def __init__(self, name: str, folder: Path) -> None:
        own = dict(VARIANTS[name])
        text = Gemma4TextConfig(
            **TEXT,
            hidden_size=12,
            num_hidden_layers=3,
            layer_types=[SLIDING, SLIDING, FULL],
            num_kv_shared_layers=3,
            rope_parameters=own.pop("rope_parameters", None),
        )
        config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=BACKBONE, **own)
        self.model = Gemma4AssistantForCausalLM(config).eval()
        randomize(self.model, 3)
        if self.model.masked_embedding is not None:
            order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))
            self.model.masked_embedding.token_ordering.data = order
        self.model.save_pretrained(folder)
        self.config: Gemma4MTPConfig
        self.weights: Gemma4MTPWeights
        self.config, self.weights = load_gemma4_mtp(folder, torch.float32)


@pytest.fixture(scope="module")
def assistants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Assistant]:
    return {name: Assistant(name, tmp_path_factory.mktemp(name)) for name in VARIANTS}


class States:
    """A ``SharedCache`` of [1, G, n, D] keys and values by slot and kind, as transformers shares them."""

    def __init__(self) -> None:
        self.by_slot: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}

    def shared(self, kind: str, slot: int, length: int) -> tuple[Tensor, Tensor]:
        keys, values = self.by_slot[slot][kind]
        return keys[0].transpose(0, 1), values[0].transpose(0, 1)


@pytest.mark.parametrize("name", VARIANTS)
def test_steps_are_those_of_transformers(assistants: dict[str, Assistant], name: str) -> None:
    """Four steps of three sequences in one batch: shorter than the window, at it, and far beyond."""
    assistant = assistants[name]
    config, weights = assistant.config, assistant.weights
    assert config.gemma is not None and weights.gemma is not None and weights.head is not None
    generator = torch.Generator().manual_seed(5)
    lengths, states = (3, WINDOW + 1, 19), States()
    for slot, length in enumerate(lengths):
        states.by_slot[slot] = {
            kind: (
                torch.randn(1, KV_HEADS, length, size, generator=generator),
                torch.randn(1, KV_HEADS, length, size, generator=generator),
            )
            for kind, size in HEAD_DIMS.items()
        }
    decoder = Gemma4Decoder(config.gemma, weights.gemma.layers, config.layers.rms_norm_eps)
    hidden = torch.randn(3, BACKBONE, generator=generator)
    for _ in range(4):
        inputs = torch.cat((torch.randn(3, BACKBONE, generator=generator), hidden), dim=-1)
        found = decoder.forward(linear(inputs, weights.pre_projection), range(3), lengths, states)
        normed = rms_norm(found, weights.norm, config.layers.rms_norm_eps)
        logits = gemma4_logits(normed, weights.head, config.gemma, weights.gemma)
        hidden = linear(normed, weights.post_projection)
        for slot, length in enumerate(lengths):
            with torch.no_grad():
                expected = assistant.model(
                    inputs_embeds=inputs[slot].view(1, 1, -1),
                    position_ids=torch.tensor([[length]]),
                    shared_kv_states=states.by_slot[slot],
                )
            torch.testing.assert_close(hidden[slot], expected.last_hidden_state[0, 0], rtol=1e-4, atol=1e-5)
            scored = logits[slot] > -torch.inf
            torch.testing.assert_close(logits[slot][scored], expected.logits[0, 0][scored], rtol=1e-4, atol=1e-5)
            # What the sparse head leaves out, transformers gives one value below all others.
            assert scored.sum() == (9 if name == "sparse-head" else VOCAB)
            assert bool((expected.logits[0, 0][~scored] < expected.logits[0, 0][scored].min()).all())


def test_position_and_window_matter(assistants: dict[str, Assistant]) -> None:
    """Guards the test above: neither rotation nor window could be wrong without notice."""
    assistant = assistants["dense"]
    assert assistant.config.gemma is not None and assistant.weights.gemma is not None
    decoder = Gemma4Decoder(assistant.config.gemma, assistant.weights.gemma.layers, 1e-6)
    generator = torch.Generator().manual_seed(6)
    states = States()
    kept = {kind: torch.randn(2, 1, KV_HEADS, 19, size, generator=generator) for kind, size in HEAD_DIMS.items()}
    states.by_slot[0] = {kind: (both[0], both[1]) for kind, both in kept.items()}
    hidden = torch.randn(1, 12, generator=generator)
    base = decoder.forward(hidden, [0], [19], states)
    assert (decoder.forward(hidden, [0], [18], states) - base).abs().max() > 1e-3
    for place, seen in ((19 - WINDOW - 2, False), (19 - WINDOW - 1, True), (18, True)):
        changed = kept[SLIDING].clone()
        changed[:, :, :, place] += 1
        states.by_slot[0] = {**states.by_slot[0], SLIDING: (changed[0], changed[1])}
        assert bool((decoder.forward(hidden, [0], [19], states) - base).abs().max() > 1e-4) == seen


def test_softcap_bends_both_heads(assistants: dict[str, Assistant]) -> None:
    generator = torch.Generator().manual_seed(7)
    hidden, head = torch.randn(2, 12, generator=generator) * 5, torch.randn(VOCAB, 12, generator=generator)
    dense = Gemma4Weights(())
    plain = gemma4_logits(hidden, head, Gemma4Shape((), {}), dense)
    capped = gemma4_logits(hidden, head, Gemma4Shape((), {}, softcap=3.0), dense)
    torch.testing.assert_close(capped, 3 * (plain / 3).tanh())
    sparse = assistants["sparse-head"].weights.gemma
    assert sparse is not None
    scored = gemma4_logits(hidden, head, Gemma4Shape((), {}, top_centroids=2, softcap=3.0), sparse)
    assert (scored > -torch.inf).sum(-1).tolist() == [6, 6]
    where = scored > -torch.inf
    torch.testing.assert_close(scored[where], capped[where])


class Generation:
    """transformers' assisted generation of a tiny Gemma 4, with our drafter looking over its shoulder."""

    def __init__(self, assistant: Assistant, monkeypatch: pytest.MonkeyPatch) -> None:
        text = Gemma4TextConfig(
            **TEXT, hidden_size=BACKBONE, num_hidden_layers=4, layer_types=[SLIDING, FULL, SLIDING, FULL]
        )
        self.target = Gemma4ForCausalLM(text).eval()
        randomize(self.target, 8)
        self.assistant = assistant.model
        model = self.target.model
        stand_in = SimpleNamespace(
            config=ModelConfig(
                architecture=GEMMA,
                vocab_size=VOCAB,
                hidden_size=BACKBONE,
                intermediate_size=28,
                num_layers=4,
                num_heads=4,
                num_kv_heads=KV_HEADS,
                head_dim=HEAD_DIMS[FULL],
                rms_norm_eps=text.rms_norm_eps,
                max_position_embeddings=256,
                rope=RopeConfig(),
                tie_word_embeddings=True,
            ),
            ops=REFERENCE,
            dtype=torch.float32,
            device=torch.device("cpu"),
            embeddings=model.embed_tokens.weight.detach(),
            final_norm=model.norm.weight.detach(),
        )
        self.drafter = Gemma4MTPDrafter(assistant.config, assistant.weights, cast(DecoderModel, stand_in))
        self.states = States()
        self.drafter.attach(self.states)
        self.run = 0
        self.streams: list[Tensor] = []
        self.theirs: list[list[int]] = []
        self.ours: list[list[int]] = []
        self.accepted: list[int] = []
        model.norm.register_forward_pre_hook(lambda module, inputs: self.streams.append(inputs[0].detach()))
        original = SinglePositionMultiTokenCandidateGenerator.get_candidates

        def get_candidates(generator: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            result = original(generator, input_ids, *args, **kwargs)
            if result[1] is not None:
                self.compare(input_ids[0].tolist(), kwargs["model_outputs"], result[0][0].tolist())
            return result

        monkeypatch.setattr(SinglePositionMultiTokenCandidateGenerator, "get_candidates", get_candidates)

    def compare(self, tokens: Sequence[int], outputs: Any, candidates: Sequence[int]) -> None:
        position = len(tokens) - 1
        # Rows of the last pass: those that were kept, then those of rejected drafts.
        stream = self.streams[-1]
        batch = flat_batch([[0] * stream.shape[1]], [self.run], [0])
        self.drafter.observe(batch, stream[0], [position - self.run])
        if self.run:
            self.accepted.append(position - self.run - 1)
        self.run = position
        # transformers cuts at the anchor's position included: the key of a rejected draft may stand there.
        self.states.by_slot[0] = {
            kind: (keys[:, :, : len(tokens)], values[:, :, : len(tokens)])
            for kind, (keys, values) in outputs.shared_kv_states.items()
        }
        drafted = candidates[len(tokens) :]
        self.theirs.append(list(drafted))
        proposal = self.drafter.propose([DraftRequest(0, tokens[-1], position)], len(drafted))[0]
        self.ours.append(list(proposal.token_ids))


@pytest.mark.parametrize("name", ["dense", "sparse-head"])
def test_drafts_are_those_of_assisted_generation(
    assistants: dict[str, Assistant], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Position, embedding scale, hidden state and order of the input are what transformers feeds real checkpoints."""
    generation = Generation(assistants[name], monkeypatch)
    generation.assistant.generation_config.num_assistant_tokens = 4
    for seed in range(6):
        generation.run = 0
        prompt = torch.randint(3, VOCAB, (1, 5 + seed), generator=torch.Generator().manual_seed(seed))
        generation.target.generate(
            prompt, assistant_model=generation.assistant, max_new_tokens=30, do_sample=False, eos_token_id=None
        )
    assert generation.ours == generation.theirs
    assert len(generation.theirs) > 60 and len({tuple(drafts) for drafts in generation.theirs}) > 20
    assert {0, 1} <= set(generation.accepted)
