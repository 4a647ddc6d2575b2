"""MTP against a re-computation from its description, and against transformers' own multi-token prediction."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sequential import (
    VOCABULARY,
    Spy,
    causal_layer,
    check_description,
    check_native,
    head_of,
    mtp_json,
    mtp_tensors,
    norm,
    taps_of,
    target_model,
    unrolled,
    write,
)
from tiny import CONFIG, TOKENS, model_tensors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from foredraft.config import EngineConfig
from foredraft.drafters.base import DraftRequest, DraftSampling, Proposal, Stop
from foredraft.drafters.mtp import MTPConfig, MTPDrafter, MTPWeights
from foredraft.drafters.sequential_checkpoints import load_mtp, save_mtp
from foredraft.engine.engine import Engine
from foredraft.models.batch import Batch, flat_batch
from foredraft.models.decoder import DecoderModel
from foredraft.ops import NATIVE, native
from foredraft.sampling_params import SamplingParams

TARGET = target_model()
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "qk-norm-multi-query": {"qk_norm": True, "num_key_value_heads": 1},
    "draft-vocabulary": {"draft_vocab_size": len(VOCABULARY)},
}
MISSING = native.unavailable()


class Method:
    """A random MTP head as a file, as we load it, and as its description computes it."""

    def __init__(self, name: str, folder: Path, target: DecoderModel) -> None:
        self.target = target
        self.raw = mtp_json(target.config, **VARIANTS[name])
        self.tensors = mtp_tensors(self.raw)
        self.head, self.vocabulary = head_of(self.raw, target)
        self.config, self.weights = load_mtp(write(folder, self.raw, self.tensors), torch.float64, target.config)

    def drafter(self) -> MTPDrafter:
        return MTPDrafter(self.config, self.weights, self.target)

    def features(self, taps: Tensor) -> Tensor:
        weight = self.target.final_norm.double()
        return F.rms_norm(taps, weight.shape, weight, self.target.config.rms_norm_eps)

    def rows(self, features: Tensor, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        table, raw = self.target.ops.embedding(torch.arange(len(TOKENS)), self.target.embeddings).double(), self.raw
        pair = (
            norm(table[list(token_ids)], self.tensors["mtp.pre_fc_norm_embedding.weight"], raw),
            norm(features, self.tensors["mtp.pre_fc_norm_hidden.weight"], raw),
        )
        x = torch.cat(pair, -1) @ self.tensors["mtp.fc.weight"].T
        own = norm(x, self.tensors["mtp.layers.0.input_layernorm.weight"], raw)
        x = norm(causal_layer(self.tensors, "mtp.layers.0.", raw, x, own), self.tensors["mtp.norm.weight"], raw)
        return x, x


@pytest.fixture(scope="module")
def methods(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Method]:
    return {name: Method(name, tmp_path_factory.mktemp(name), TARGET) for name in VARIANTS}


@pytest.fixture(scope="module")
def native_method(tmp_path_factory: pytest.TempPathFactory) -> Method:
    return Method("plain", tmp_path_factory.mktemp("native"), target_model(NATIVE))


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_proposals_are_those_of_the_description(methods: Mapping[str, Method], name: str, seed: int) -> None:
    check_description(TARGET, methods[name].drafter, methods[name], seed)


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_native_drafter_with_a_past_is_one_freshly_primed(native_method: Method, seed: int) -> None:
    check_native(native_method.target, native_method.drafter, native_method, seed)


def test_everything_reaches_the_proposal(methods: Mapping[str, Method]) -> None:
    """Guards the tests above: every position, every step and the order of the two halves do matter."""
    method, tokens, drafted = methods["plain"], [5, 9, 4, 30, 7, 22], [3, 8, 12]
    taps = taps_of(TARGET, (3,), tokens)
    base = unrolled(method, taps, tokens, 6, drafted)
    for position in range(len(tokens)):
        changed = taps.clone()
        changed[position] *= -1
        assert (unrolled(method, changed, tokens, 6, drafted) - base).abs().amax(-1).min() > 1e-6
    assert (unrolled(method, taps, tokens, 7, drafted) - base).abs().amax(-1).min() > 1e-3
    other = unrolled(method, taps, tokens, 6, [3, 9, 12])
    assert torch.equal(other[:2], base[:2]) and (other[2] - base[2]).abs().max() > 1e-3


def primed(drafter: MTPDrafter, tokens: Sequence[int]) -> None:
    batch = flat_batch([tokens], [0], [0])
    drafter.observe(batch, TARGET.forward(batch, TARGET.new_cache(), drafter.taps).taps, [len(tokens)])


def test_log_probs_are_those_the_tokens_are_drawn_from(methods: Mapping[str, Method]) -> None:
    method, tokens = methods["draft-vocabulary"], [5, 9, 4, 30]
    drafter = method.drafter()
    primed(drafter, tokens)
    batch = flat_batch([tokens[:2]], [0], [1])
    drafter.observe(batch, TARGET.forward(batch, TARGET.new_cache(), drafter.taps).taps, [2])
    sampled, greedy = drafter.propose(
        [DraftRequest(0, 6, 4, DraftSampling(0.5, 11, want_log_probs=True)), DraftRequest(1, 6, 2)], 4
    )
    assert greedy.log_probs is None and sampled.log_probs is not None
    read = unrolled(method, taps_of(TARGET, drafter.taps, tokens), tokens, 6, sampled.token_ids)
    expected = torch.full((4, len(TOKENS)), -torch.inf, dtype=torch.float64)
    expected[:, VOCABULARY] = (read @ method.head.T / 0.5).log_softmax(-1)
    torch.testing.assert_close(sampled.log_probs.double(), expected, rtol=0, atol=1e-6)


def test_the_same_proposal_can_be_asked_for_again(methods: Mapping[str, Method]) -> None:
    drafter = methods["plain"].drafter()
    primed(drafter, range(3, 20))
    first = drafter.propose([DraftRequest(0, 5, 17)], 4)
    assert drafter.propose([DraftRequest(0, 5, 17)], 4) == first
    assert drafter.propose([DraftRequest(0, 5, 17)], 2) == [first[0].first(2)]


def test_each_pair_runs_once(methods: Mapping[str, Method], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a few committed tokens wait for the anchor, those of a long prompt but the last do not."""
    drafter, passes = methods["plain"].drafter(), []
    own = drafter._decoder.forward

    def forward(hidden: Tensor, batch: Batch, *arguments: Any) -> Any:
        passes.append((batch.starts, batch.counts))
        return own(hidden, batch, *arguments)

    monkeypatch.setattr(drafter._decoder, "forward", forward)
    cache = TARGET.new_cache()
    for start, count in ((0, 40), (40, 5), (45, 3)):
        batch = flat_batch([[7] * count], [start], [2])
        drafter.observe(batch, TARGET.forward(batch, cache, drafter.taps).taps, [count])
        cache.commit(2, start + count)
        if start:
            drafter.propose([DraftRequest(2, 9, start + count)], 2)
    once = [((0,), (39,)), ((39,), (6,)), ((45,), (1,)), ((45,), (3,)), ((48,), (1,))]
    assert passes == once


def test_a_gap_between_drafter_and_target_is_not_drafted_over(methods: Mapping[str, Method]) -> None:
    drafter = methods["plain"].drafter()
    with pytest.raises(RuntimeError, match="slot 0: the drafter has seen 0 positions, the anchor stands at 4"):
        drafter.propose([DraftRequest(0, 5, 4)], 3)
    with pytest.raises(RuntimeError, match="slot 0: the drafter has seen 0 positions"):
        drafter.propose([DraftRequest(0, 5, 0)], 3)


def test_limits_and_taps(methods: Mapping[str, Method]) -> None:
    drafter = methods["plain"].drafter()
    assert drafter.taps == (3,) and drafter.max_tokens == 15 and drafter.default_tokens == 3
    config = replace(methods["plain"].config, max_tokens=2)
    assert MTPDrafter(config, methods["plain"].weights, TARGET).default_tokens == 2


# transformers' multi-token prediction takes its layer from any family, so Llama's will do; its checkpoints must only be
# known to hold tensors of such a layer. They have the names that we write.


@dataclass(frozen=True)
class Pair:
    """The same target and MTP head in transformers and here, from the same file."""

    theirs: Any
    target: DecoderModel
    config: MTPConfig
    weights: MTPWeights


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    def forward(self: Any, x: Tensor) -> Tensor:
        """transformers' own rounds to float32 whatever the dtype."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"^mtp\."])
    shape = replace(CONFIG, max_position_embeddings=256)
    target = model_tensors(shape)
    # A few tokens win most of the time, so that a random drafter is right at times.
    target["lm_head.weight"][10:14] *= 5
    fields = {"intermediate_size": shape.intermediate_size, "head_dim": shape.head_dim, "rms_norm_eps": 1e-6}
    raw = mtp_json(shape, rope_theta=shape.rope.theta, **fields)
    config, weights = load_mtp(write(tmp_path / "mtp", raw, mtp_tensors(raw, seed=3)), torch.float64, shape)
    save_mtp(tmp_path / "saved", config, weights)
    save_file({**target, **load_file(tmp_path / "saved" / "model.safetensors")}, tmp_path / "model.safetensors")
    shared = {name: raw[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")}
    rope = {"rope_type": "default", "rope_theta": shape.rope.theta}
    theirs = LlamaConfig(
        **shared,
        **fields,
        num_hidden_layers=shape.num_layers,
        num_mtp_layers=1,
        rope_parameters=rope,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        architectures=["LlamaForCausalLM"],
    )
    theirs.save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    return Pair(model.eval(), DecoderModel(shape, target.__getitem__), config, weights)


class Recorder:
    """Passes everything on to a drafter, and keeps what it proposed after how many tokens."""

    def __init__(self, drafter: MTPDrafter) -> None:
        self._drafter = drafter
        self.taps, self.max_tokens, self.default_tokens = drafter.taps, drafter.max_tokens, drafter.default_tokens
        self.calibration = None
        self.observe, self.release = drafter.observe, drafter.release
        self.proposed: list[tuple[int, tuple[int, ...]]] = []

    def propose(self, requests: Sequence[DraftRequest], max_tokens: int, stop: Stop | None = None) -> list[Proposal]:
        found = self._drafter.propose(requests, max_tokens, stop)
        self.proposed += [(r.position + 1, p.token_ids) for r, p in zip(requests, found, strict=True)]
        return found


@pytest.mark.parametrize("seed", range(3))
def test_rounds_are_those_of_transformers_assisted_generation(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """``generate(use_mtp=True)`` against the engine: the tokens, and every proposal of every round."""
    proposed: list[tuple[int, tuple[int, ...]]] = []
    own = MTPCandidateGenerator.get_candidates

    def get_candidates(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = own(self, input_ids, *args, **kwargs)
        length = input_ids.shape[1]
        if found[0].shape[1] > length:
            proposed.append((length, tuple(found[0][0, length:].tolist())))
        return found

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", get_candidates)
    prompt = random.Random(seed).choices(range(len(TOKENS)), k=5 + 11 * seed)
    count = 60
    theirs = pair.theirs.generate(torch.tensor([prompt]), use_mtp=True, do_sample=False, max_new_tokens=count)
    drafter = Recorder(MTPDrafter(pair.config, pair.weights, pair.target))
    engine = Engine(pair.target, EngineConfig(), drafter=drafter, num_speculative_tokens=1)
    [sequence] = engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert sequence.output == theirs[0, len(prompt) :].tolist()
    assert 0 < sum(sequence.acceptance.kept) < len(drafter.proposed)
    # Where one token is left to generate we do not draft any more.
    assert drafter.proposed == proposed[: len(drafter.proposed)] and len(proposed) - len(drafter.proposed) <= 1


def test_steps_are_those_of_transformers_layer(pair: Pair) -> None:
    """Beyond the first step transformers goes on to a layer of its own for each; here its one layer is run again and
    again on its own output, by hand."""
    tokens, anchor, count = [5, 9, 4, 30, 7, 22, 3], 6, 5
    drafter = MTPDrafter(pair.config, pair.weights, pair.target)
    spy = Spy.on(drafter)
    batch = flat_batch([tokens], [0], [0])
    drafter.observe(batch, pair.target.forward(batch, pair.target.new_cache(), drafter.taps).taps, [len(tokens)])
    [proposal] = drafter.propose([DraftRequest(0, anchor, len(tokens))], count)
    head = MtpModel.from_pretrained(pair.theirs)
    cache = MtpCache(config=pair.theirs.config.get_mtp_config())
    with torch.inference_mode():
        hidden = pair.theirs(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1]
        ids, positions = torch.tensor([[*tokens[1:], anchor]]), torch.arange(1, len(tokens) + 1).unsqueeze(0)
        for step, token in zip(spy.steps, proposal.token_ids, strict=True):
            hidden = head.forward_layer(0, hidden, positions, cache, input_ids=ids)[:, -1:]
            # Its positions are one further, and its cosines float32.
            torch.testing.assert_close(step, hidden[0], rtol=0, atol=1e-5)
            assert int(pair.theirs.lm_head(hidden).argmax()) == token
            ids, positions = torch.tensor([[token]]), positions[:, -1:] + 1
