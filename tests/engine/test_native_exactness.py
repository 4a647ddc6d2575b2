"""The contract on the native kernels: token ids and log-probabilities are those of each request alone, bit for bit.

Plain decoding is taken at its definition: for every token one whole pass over the sequence, by one thread, with
nothing kept from before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import KINDS, PlainDecoder, ScriptedDrafter, hostile, some_costs
from tiny import CONFIG, EOS, TOKENS, dflash_json, dflash_tensors, model_tensors, tiny_tokenizer, write_dflash

from foredraft.benchmark.workloads import BUNDLED, read_conversations
from foredraft.config import EngineConfig, NumSpeculativeTokens, SpeculativeConfig
from foredraft.drafters import load_drafter
from foredraft.drafters.base import Drafter
from foredraft.drafters.checkpoints import load_dflash
from foredraft.drafters.dflash import DFlashDrafter
from foredraft.engine.costs import Costs
from foredraft.engine.engine import Engine
from foredraft.engine.sequence import Sequence as Running
from foredraft.models.config import RopeConfig
from foredraft.models.decoder import DecoderModel
from foredraft.models.loading import EMBEDDED, PRECISIONS, Quantization, Target, load_target
from foredraft.ops import NATIVE, native
from foredraft.sampling_params import SamplingParams

MISSING = native.unavailable()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

QUANTIZATIONS: tuple[Quantization, ...] = ("none", "mxfp4", "mxfp4-a16")
TINY = replace(
    CONFIG,
    hidden_size=40,
    intermediate_size=70,
    num_layers=3,
    head_dim=10,
    rope=RopeConfig(theta=1000.0),
    max_position_embeddings=256,
)
MAX_LEN = 160
"""Beyond two pages of 64 positions and one step of 128."""


@cache
def tiny(quantization: Quantization) -> Target:
    tensors = {name: tensor.bfloat16() for name, tensor in model_tensors(TINY).items()}
    model = DecoderModel(TINY, tensors.__getitem__, NATIVE, PRECISIONS[quantization])
    return Target("tiny", model, tiny_tokenizer(), quantization)


@cache
def plain(quantization: Quantization) -> PlainDecoder:
    return PlainDecoder(tiny(quantization))


@pytest.fixture(scope="module")
def dflash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = dflash_json(TINY)
    return write_dflash(tmp_path_factory.mktemp("dflash"), raw, dflash_tensors(raw))


@dataclass(frozen=True)
class Request:
    """arrives, aborted: steps of the engine; None: it is left to finish. speculates: whether it may."""

    prompt: list[int]
    params: SamplingParams
    arrives: int = 0
    aborted: int | None = None
    speculates: bool = True

    @property
    def seed(self) -> int:
        assert self.params.seed is not None
        return self.params.seed


def serve(engine: Engine, requests: Sequence[Request]) -> list[Running]:
    waiting = sorted(range(len(requests)), key=lambda index: requests[index].arrives)
    served: dict[int, Running] = {}
    step = 0
    while waiting or engine.has_work:
        while waiting and (requests[waiting[0]].arrives <= step or not engine.has_work):
            index = waiting.pop(0)
            served[index] = engine.add(requests[index].prompt, requests[index].params)[0]
            if not requests[index].speculates:
                served[index].draft_limit = 0
        engine.step()
        step += 1
        for index, sequence in served.items():
            if requests[index].aborted is not None and requests[index].aborted <= step:
                engine.abort(sequence)
        assert step < 5000
    return [served[index] for index in range(len(requests))]


lengths = st.one_of(st.integers(1, 12), st.integers(60, 68), st.integers(124, 134))


@st.composite
def a_request(draw: st.DrawFn) -> Request:
    length = draw(lengths)
    block = draw(st.lists(st.integers(0, len(TOKENS) - 1), min_size=1, max_size=8))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7, 1.2])),
        seed=draw(st.integers(0, 10**6)),
        max_tokens=draw(st.integers(1, 20)),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.8])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.5])),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, -1])),
    )
    arrives = draw(st.integers(0, 10))
    aborted = draw(st.sampled_from([None, None, None, arrives + 1, arrives + 4]))
    return Request((block * length)[:length], params, arrives, aborted)


limits = st.fixed_dictionaries(
    {"max_num_seqs": st.integers(1, 16), "max_num_batched_tokens": st.sampled_from([1, 3, 17, 64, 512])}
)
methods = st.one_of(
    st.none(),
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
    st.just("dflash"),
)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@settings(max_examples=50)
@given(
    requests=st.lists(a_request(), min_size=1, max_size=16),
    limits=limits,
    method=methods,
    count=st.one_of(st.integers(1, 5), st.just("auto")),
    costs=some_costs(),
    confidences=st.one_of(st.none(), st.integers(0, 99)),
    workers=st.sampled_from([1, 1, 1, 2, 3]),
)
def test_each_request_is_as_if_alone(
    dflash: Path,
    quantization: Quantization,
    requests: list[Request],
    limits: dict[str, int],
    method: str | list[str] | None,
    count: NumSpeculativeTokens,
    costs: Costs,
    confidences: int | None,
    workers: int,
) -> None:
    """No method, drafters that propose anything, DFlash, which samples where the request does; any N, auto too; any
    batch, chunking, neighbours and threads."""
    target = tiny(quantization)
    with native.threads(1):
        expected = [plain(quantization)(r.prompt, r.params, r.seed, MAX_LEN) for r in requests]
    drafter: Drafter | None = None
    if method == "dflash":
        drafter = DFlashDrafter(*load_dflash(dflash, target.model.dtype), target.model)
    elif method is not None:
        futures = [[*r.prompt, *alone.token_ids] for r, alone in zip(requests, expected, strict=True)]
        drafter = ScriptedDrafter(hostile(futures, list(method), len(TOKENS), [EOS], len(requests)), confidences)
    engine = Engine(
        target.model,
        EngineConfig(max_model_len=MAX_LEN, **limits),
        eos_token_ids=[EOS],
        drafter=drafter,
        num_speculative_tokens=count if drafter else 0,
        costs=costs,
    )
    with native.threads(workers):
        served = serve(engine, requests)
    for request, alone, sequence in zip(requests, expected, served, strict=True):
        length = sequence.num_output
        if sequence.finish_reason == "abort":
            assert request.aborted is not None
        else:
            assert length == len(alone.token_ids) and sequence.finish_reason == alone.finish_reason
        assert sequence.output == alone.token_ids[:length]
        assert sequence.logprobs == alone.logprobs[:length]


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_first_pass_that_ends_a_request_beside_others(dflash: Path, quantization: Quantization) -> None:
    """The drafter is told about a sequence of which it keeps nothing, in a slot that it has never seen."""
    target = tiny(quantization)
    params = SamplingParams(temperature=0, seed=0, max_tokens=8, ignore_eos=True)
    requests = [Request([3, 4, 5], params), *[Request([6, slot], replace(params, max_tokens=1)) for slot in range(12)]]
    drafter = DFlashDrafter(*load_dflash(dflash, target.model.dtype), target.model)
    engine = Engine(target.model, EngineConfig(), eos_token_ids=[EOS], drafter=drafter, num_speculative_tokens=3)
    for request, sequence in zip(requests, serve(engine, requests), strict=True):
        assert sequence.output == plain(quantization)(request.prompt, request.params, 0, MAX_LEN).token_ids


def test_the_tiny_model_is_worth_testing_with() -> None:
    """Quantisation changes what it says, its samples vary, and a row of weights changed by its last bit shows."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, logprobs=-1)
    runs = [plain(quantization)([3, 4, 5], params, 3, MAX_LEN) for quantization in QUANTIZATIONS]
    assert len({tuple(run.token_ids) for run in runs}) == 3
    assert all(len(set(run.token_ids)) > 10 for run in runs)
    tensors = {name: tensor.bfloat16() for name, tensor in model_tensors(TINY).items()}
    tensors["model.layers.0.mlp.down_proj.weight"][0] *= 1 + 2.0**-7
    changed = PlainDecoder(Target("changed", DecoderModel(TINY, tensors.__getitem__, NATIVE), tiny_tokenizer()))
    assert changed([3, 4, 5], replace(params, max_tokens=1), 3, MAX_LEN).logprobs != runs[0].logprobs[:1]


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "mxfp4"])
def test_the_embedded_model_with_its_drafter(quantization: Quantization) -> None:
    target = load_target(EMBEDDED, quantization=quantization, kernels="native")
    prompts = [
        target.tokenizer.encode_chat([{"role": "user", "content": read_conversations(BUNDLED / f"{name}.jsonl")[0][0]}])
        for name in ("gsm8k", "humaneval", "mt-bench")
    ]
    requests = [
        Request(
            prompt, SamplingParams(temperature=(0.0, 0.7, 1.2)[index % 3], seed=index, max_tokens=12 + index), 3 * index
        )
        for index, prompt in enumerate(prompts)
    ]
    config = EngineConfig(max_num_batched_tokens=50)
    eos = target.tokenizer.eos_token_ids
    alone = [serve(Engine(target.model, config, eos_token_ids=eos), [request])[0].output for request in requests]
    for count in (None, 1, 3, 7):
        drafter = count and load_drafter(SpeculativeConfig("dflash", num_speculative_tokens=count), target)
        engine = Engine(
            target.model, config, eos_token_ids=eos, drafter=drafter or None, num_speculative_tokens=count or 0
        )
        served = serve(engine, requests)
        assert [sequence.output for sequence in served] == alone
        if count:
            assert sum(sum(sequence.acceptance.kept) for sequence in served) > 0
