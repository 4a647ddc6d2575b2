"""The contract: whatever the drafter proposes and whatever else runs, out comes what plain decoding gives."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import KINDS, PlainDecoder, ScriptedDrafter, hostile, some_costs
from tiny import CONFIG, EOS, TOKENS, dflash_json, dflash_tensors, model_tensors, tiny_target, write_dflash

from foredraft.config import EngineConfig, NumSpeculativeTokens
from foredraft.drafters.base import Drafter
from foredraft.drafters.checkpoints import load_dflash
from foredraft.drafters.dflash import DFlashDrafter
from foredraft.engine.costs import Costs
from foredraft.engine.engine import Engine
from foredraft.engine.sequence import Sequence as Running
from foredraft.models.batch import flat_batch
from foredraft.sampling_params import SamplingParams

TARGET = tiny_target()
MAX_LEN = 28
PLAIN = PlainDecoder(TARGET)


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    params: SamplingParams
    arrives: int


def engine_for(drafter: Drafter | None, count: NumSpeculativeTokens = 0, **settings: Any) -> Engine:
    rule, costs = settings.pop("acceptance_rule", "exact"), settings.pop("costs", None)
    return Engine(
        TARGET.model,
        EngineConfig(**{"max_model_len": MAX_LEN, **settings}),
        eos_token_ids=TARGET.tokenizer.eos_token_ids,
        tokenizer=TARGET.tokenizer,
        drafter=drafter,
        num_speculative_tokens=count,
        acceptance_rule=rule,
        costs=costs,
    )


def run(engine: Engine, requests: Sequence[Request]) -> list[list[Running]]:
    """Serve requests that arrive while others run; per request its sequences."""
    waiting = sorted(range(len(requests)), key=lambda index: requests[index].arrives)
    served: dict[int, list[Running]] = {}
    step = 0
    while waiting or engine.has_work:
        while waiting and (requests[waiting[0]].arrives <= step or not engine.has_work):
            index = waiting.pop(0)
            served[index] = engine.add(requests[index].prompt, requests[index].params)
        engine.step()
        step += 1
        assert step < 2000
    return [served[index] for index in range(len(requests))]


def assert_plain(served: Sequence[Sequence[Running]], requests: Sequence[Request], max_len: int = MAX_LEN) -> None:
    for request, sequences in zip(requests, served, strict=True):
        assert len(sequences) == request.params.n
        for sequence in sequences:
            expected = PLAIN(request.prompt, request.params, sequence.seed, max_len)
            assert sequence.output == expected.token_ids
            assert sequence.text == expected.text
            assert (sequence.finish_reason, sequence.stop_reason) == (expected.finish_reason, expected.stop_reason)
            assert len(sequence.logprobs) == len(expected.logprobs)
            for found, wanted in zip(sequence.logprobs, expected.logprobs, strict=True):
                assert (found.token_id, found.rank) == (wanted.token_id, wanted.rank)
                assert found.logprob == pytest.approx(wanted.logprob, abs=1e-9)
                assert [token for token, _ in found.top] == [token for token, _ in wanted.top]
                assert [p for _, p in found.top] == pytest.approx([p for _, p in wanted.top], abs=1e-9)
            assert len(sequence.origins) == len(sequence.output) and sequence.origins[0] == 0
            assert sequence.acceptance.committed == len(sequence.output) - 1


prompts = st.lists(st.integers(0, len(TOKENS) - 1), min_size=1, max_size=12)


@st.composite
def a_request(draw: st.DrawFn, temperatures: Sequence[float] = (0.0, 0.7, 1.2)) -> Request:
    """Stop strings and stop tokens are taken from what plain decoding would write, so that they are met."""
    prompt = draw(st.one_of(prompts, st.just([5] * (MAX_LEN - 2))))
    temperature = draw(st.sampled_from(temperatures))
    max_tokens = draw(st.sampled_from([1, 2, 3, 8, 12, None]))
    params = SamplingParams(
        temperature=temperature,
        seed=draw(st.integers(0, 10**6)),
        top_k=draw(st.sampled_from([0, 0, 4])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.8])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.4, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.9])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.6, -0.4])),
        logit_bias=draw(st.sampled_from([None, None, {EOS: 2.5, 7: 1.0}, {4: -100.0}])),
        ignore_eos=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
        max_tokens=max_tokens,
        logprobs=draw(st.sampled_from([None, None, 0, 3, -1])),
        n=draw(st.sampled_from([1, 1, 2])) if temperature else 1,
    )
    preview = PLAIN(prompt, params, params.seed or 0, MAX_LEN)
    stops = []
    if preview.text and draw(st.booleans()):
        for _ in range(draw(st.integers(1, 2))):
            at = draw(st.integers(0, len(preview.text) - 1))
            stop = preview.text[at : at + draw(st.integers(1, 4))]
            stops += [stop] if "\ufffd" not in stop else []
    stop_ids = []
    if draw(st.booleans()):
        stop_ids = [draw(st.sampled_from(preview.token_ids))]
    limit = min(max_tokens or MAX_LEN, MAX_LEN - len(prompt))
    params = replace(
        params,
        stop=stops,
        stop_token_ids=stop_ids,
        include_stop_str_in_output=draw(st.booleans()),
        min_tokens=draw(st.sampled_from([0, 0, min(2, limit), min(6, limit)])),
    )
    return Request(prompt, params, draw(st.integers(0, 12)))


limits = st.fixed_dictionaries(
    {"max_num_seqs": st.integers(1, 4), "max_num_batched_tokens": st.sampled_from([1, 3, 8, 512])}
)


@settings(max_examples=40)
@given(st.lists(a_request(), min_size=1, max_size=4), limits)
def test_plain_decoding_is_its_definition(requests: list[Request], limits: dict[str, int]) -> None:
    assert_plain(run(engine_for(None, **limits), requests), requests)


@settings(max_examples=250)
@given(
    st.lists(a_request(), min_size=1, max_size=4),
    limits,
    st.integers(1, 8),
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
    st.integers(0, 999),
)
def test_hostile_drafters_change_nothing(
    requests: list[Request], limits: dict[str, int], count: int, kinds: list[str], seed: int
) -> None:
    # The engine's own seeds, so that samples 2..n have their future too.
    seeds = [[s.seed for s in engine_for(None).add(request.prompt, request.params)] for request in requests]
    futures = [
        [*request.prompt, *PLAIN(request.prompt, request.params, own, MAX_LEN).token_ids]
        for request, each in zip(requests, seeds, strict=True)
        for own in each
    ]
    stops = {EOS, *(token for request in requests for token in request.params.stop_token_ids or ())}
    drafter = ScriptedDrafter(hostile(futures, kinds, len(TOKENS), sorted(stops), seed))
    served = run(engine_for(drafter, count, **limits), requests)
    assert_plain(served, requests)
    assert not drafter.seen and all(asked <= count for asked in drafter.asked)


@settings(max_examples=80)
@given(
    st.lists(a_request(), min_size=1, max_size=4),
    limits,
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
    st.one_of(st.none(), st.integers(0, 999)),
    some_costs(),
)
def test_whatever_auto_decides_changes_nothing(
    requests: list[Request], limits: dict[str, int], kinds: list[str], confidences: int | None, costs: Costs
) -> None:
    futures = [[*r.prompt, *PLAIN(r.prompt, r.params, r.params.seed or 0, MAX_LEN).token_ids] for r in requests]
    drafter = ScriptedDrafter(hostile(futures, kinds, len(TOKENS), [EOS], 1), confidences)
    assert_plain(run(engine_for(drafter, "auto", costs=costs, **limits), requests), requests)
    assert not drafter.seen


@settings(max_examples=40)
@given(
    st.lists(a_request((0.0,)), min_size=1, max_size=3),
    limits,
    st.integers(1, 8),
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
)
def test_rejection_without_temperature_is_exact(
    requests: list[Request], limits: dict[str, int], count: int, kinds: list[str]
) -> None:
    futures = [[*r.prompt, *PLAIN(r.prompt, r.params, r.params.seed or 0, MAX_LEN).token_ids] for r in requests]
    drafter = ScriptedDrafter(hostile(futures, kinds, len(TOKENS), [EOS], 0))
    assert_plain(run(engine_for(drafter, count, acceptance_rule="rejection", **limits), requests), requests)


@pytest.fixture(scope="module", params=["all", "subset"])
def dflash(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = dflash_json()
    tensors = dflash_tensors(raw)
    if request.param == "subset":
        vocabulary = torch.tensor([1, 3, 4, 7, 8, 11, 20, 25, 31])
        raw["draft_vocab_size"] = len(vocabulary)
        tensors["d2t"] = vocabulary - torch.arange(len(vocabulary))
    return write_dflash(tmp_path_factory.mktemp("dflash"), raw, tensors)


@settings(max_examples=50)
@given(st.lists(a_request(), min_size=1, max_size=4), limits, st.integers(1, 5))
def test_a_random_dflash_drafter_changes_nothing(
    dflash: Path, requests: list[Request], limits: dict[str, int], count: int
) -> None:
    drafter = DFlashDrafter(*load_dflash(dflash, torch.float64), TARGET.model)
    assert_plain(run(engine_for(drafter, count, **limits), requests), requests)


def boundary(params: SamplingParams, prompt: list[int] | None = None, **settings: Any) -> Running:
    """One request under a perfect drafter of five tokens, checked against plain decoding."""
    prompt = prompt or [3, 4, 5]
    request = Request(prompt, params, 0)
    free = replace(params, stop=None, stop_token_ids=None, max_tokens=None, ignore_eos=True, min_tokens=0)
    future = [*prompt, *PLAIN(prompt, free, params.seed or 0, MAX_LEN).token_ids]
    drafter = ScriptedDrafter(lambda tokens, count: future[len(tokens) : len(tokens) + 8])
    served = run(engine_for(drafter, 5, **settings), [request])
    assert_plain(served, [request], settings.get("max_model_len", MAX_LEN))
    return served[0][0]


WHOLE_CHARACTERS = {token: -100.0 for token in range(27, 32)}
FREE = SamplingParams(temperature=0.7, seed=11, max_tokens=None, ignore_eos=True, logit_bias=WHOLE_CHARACTERS)
OUTPUT = PLAIN([3, 4, 5], FREE, 11, MAX_LEN)


@pytest.mark.parametrize("length", range(1, 14))
def test_max_tokens_anywhere_in_an_accepted_run(length: int) -> None:
    sequence = boundary(replace(FREE, max_tokens=length))
    assert sequence.output == OUTPUT.token_ids[:length] and sequence.finish_reason == "length"
    assert sequence.acceptance.rounds == -(-(length - 1) // 6)


@pytest.mark.parametrize("length", range(5, 18))
def test_the_context_ends_anywhere_in_an_accepted_run(length: int) -> None:
    sequence = boundary(FREE, max_model_len=length)
    assert sequence.tokens == [3, 4, 5, *OUTPUT.token_ids[: length - 3]] and sequence.finish_reason == "length"


@pytest.mark.parametrize("place", range(13))
@pytest.mark.parametrize("kept", [False, True])
def test_a_stop_token_anywhere_in_an_accepted_run(place: int, kept: bool) -> None:
    token = OUTPUT.token_ids[place]
    sequence = boundary(replace(FREE, stop_token_ids=[token], include_stop_str_in_output=kept))
    assert sequence.output == OUTPUT.token_ids[: OUTPUT.token_ids.index(token) + 1]
    assert sequence.finish_reason == "stop" and sequence.stop_reason == token


@pytest.mark.parametrize("place", range(12))
@pytest.mark.parametrize("kept", [False, True])
def test_a_stop_string_across_tokens_anywhere_in_an_accepted_run(place: int, kept: bool) -> None:
    stop = OUTPUT.text[place : place + 3]
    sequence = boundary(replace(FREE, stop=stop, include_stop_str_in_output=kept))
    ends = OUTPUT.text.index(stop) + (len(stop) if kept else 0)
    assert sequence.text == OUTPUT.text[:ends] and sequence.stop_reason == stop


def test_rows_after_a_stop_are_not_reported() -> None:
    token = OUTPUT.token_ids[3]
    sequence = boundary(replace(FREE, stop_token_ids=[token], logprobs=2))
    assert [report.token_id for report in sequence.logprobs] == sequence.output
    assert sequence.num_output == OUTPUT.token_ids.index(token) + 1


def test_greedy_output_is_that_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        rms_norm_eps=1e-6,
        max_position_embeddings=MAX_LEN,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )
    reference = transformers.LlamaForCausalLM(config).double().eval()
    reference.load_state_dict(model_tensors(CONFIG))
    for prompt in ([3, 4, 5], [30], [9, 9, 20, 1, 7]):
        with torch.no_grad():
            expected = reference.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=20, eos_token_id=EOS, pad_token_id=EOS
            )[0].tolist()
        sequence = boundary(SamplingParams(temperature=0, max_tokens=20), prompt)
        assert sequence.tokens == expected


@settings(max_examples=25)
@given(a_request(), st.integers(0, 20), st.booleans())
def test_an_aborted_neighbour_leaves_no_trace(request: Request, after: int, speculate: bool) -> None:
    drafter = ScriptedDrafter(lambda tokens, count: [tokens[0]] * count) if speculate else None
    engine = engine_for(drafter, 3, max_num_seqs=2, max_num_batched_tokens=4)
    neighbour = engine.add([3] * 15, SamplingParams(max_tokens=None, seed=1, ignore_eos=True))[0]
    sequences = engine.add(request.prompt, request.params)
    for _ in range(after):
        if engine.has_work:
            engine.step()
    engine.abort(neighbour)
    engine.abort(neighbour)
    late = engine.add(request.prompt, request.params)
    while engine.has_work:
        engine.step()
    assert_plain([sequences, late], [request, request])
    if neighbour.finish_reason == "abort":
        full = PLAIN([3] * 15, neighbour.params, 1, MAX_LEN)
        assert neighbour.output == full.token_ids[: neighbour.num_output]


def test_the_tiny_target_is_worth_testing_with() -> None:
    """Its samples vary, its context matters, and its text has characters that span tokens."""
    assert len(set(OUTPUT.token_ids)) >= 8
    ids = list(range(3, 20))
    model = TARGET.model
    base = model.forward(flat_batch([ids], [0], [0], [1]), model.new_cache()).logits
    other = model.forward(flat_batch([[4, *ids[1:]]], [0], [0], [1]), model.new_cache()).logits
    assert (base - other).abs().max() > 1e-3
