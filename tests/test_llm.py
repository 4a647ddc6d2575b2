"""The offline API: generate, chat and stream, from a folder on disk, with and without a drafter."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from scripted import PlainDecoder
from tiny import CONFIG, EOS, TOKENS, dflash_json, dflash_tensors, model_tensors, save_tokenizer, write_dflash

from foredraft import LLM, SamplingParams, SpeculativeConfig, UserError
from foredraft.config import EngineConfig
from foredraft.llm import RequestOutput, StreamUpdate
from foredraft.models.loading import Target, load_target

PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=14, ignore_eos=True, logprobs=2)
PROMPTS = ["abc", "dd a", "no", "a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llm") / "target"
    save_tokenizer(folder)
    config = {
        **{"model_type": "llama", "vocab_size": CONFIG.vocab_size, "hidden_size": CONFIG.hidden_size},
        **{"intermediate_size": CONFIG.intermediate_size, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": CONFIG.head_dim, "rope_theta": 100.0, "max_position_embeddings": 48},
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(model_tensors(CONFIG), folder / "model.safetensors")
    raw = dflash_json()
    write_dflash(folder.parent / "drafter", raw, dflash_tensors(raw))
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float64")


@pytest.fixture(scope="module")
def speculative(folder: Path) -> LLM:
    return LLM(str(folder), speculation(folder), dtype="float64", max_num_seqs=3, max_num_batched_tokens=2)


def speculation(folder: Path, **fields: Any) -> dict[str, Any]:
    return {"method": "dflash", "model": str(folder.parent / "drafter"), "num_speculative_tokens": 4, **fields}


def token_ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.mark.parametrize("name", ["plain", "speculative"])
def test_generate(request: pytest.FixtureRequest, name: str) -> None:
    llm: LLM = request.getfixturevalue(name)
    decode = PlainDecoder(llm.target)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert [output.prompt for output in outputs] == PROMPTS and [o.request_id for o in outputs] == [0, 1, 2, 3]
    for output in outputs:
        assert output.prompt is not None and output.finished
        assert output.prompt_token_ids == [TOKENS.index(c if c != " " else "Ġ") for c in output.prompt]
        (completion,) = output.outputs
        expected = decode(output.prompt_token_ids, PARAMS, 3, 48)
        assert (completion.index, completion.text) == (0, expected.text)
        assert completion.token_ids == expected.token_ids
        assert (completion.finish_reason, completion.stop_reason) == ("length", None)
        assert completion.logprobs is not None and [e.token_id for e in completion.logprobs] == completion.token_ids
        total = sum(entry.logprob for entry in expected.logprobs)
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-9)
        assert completion.acceptance.committed == 13 == len(completion.origins) - 1
        assert 0 < output.metrics.time_to_first_token < output.metrics.seconds < 60
    assert not llm.engine.has_work


def test_speculation_was_on(speculative: LLM) -> None:
    counted = speculative.generate("abc", PARAMS)[0].outputs[0].acceptance
    assert len(counted.proposed) == 4 and counted.rounds >= counted.proposed[0] > counted.proposed[3] > 0


def test_order_is_the_prompts_whatever_finishes_first(speculative: LLM) -> None:
    lengths = [14, 1, 6, 2, 9]
    params = [replace(PARAMS, max_tokens=length) for length in lengths]
    outputs = speculative.generate([*PROMPTS, {"prompt_token_ids": [3, 4, 5]}], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert [output.prompt for output in outputs] == [*PROMPTS, None]
    # the last one is the first one's tokens, given as such
    assert outputs[4].prompt_token_ids == outputs[0].prompt_token_ids
    assert outputs[4].outputs[0].token_ids == outputs[0].outputs[0].token_ids[:9]


def test_a_single_prompt_and_no_prompts(plain: LLM) -> None:
    alone = plain.generate("abc", PARAMS)
    assert len(alone) == 1 and token_ids(alone) == token_ids(plain.generate(["abc"], PARAMS))
    assert token_ids(plain.generate({"prompt_token_ids": [3, 4, 5]}, PARAMS)) == token_ids(alone)
    assert plain.generate([], PARAMS) == []
    assert len(plain.generate("abc")[0].outputs[0].token_ids) <= 16


def test_without_logprobs_there_are_none(plain: LLM) -> None:
    completion = plain.generate("abc", replace(PARAMS, logprobs=None))[0].outputs[0]
    assert completion.logprobs is None and completion.cumulative_logprob is None


def test_several_samples(speculative: LLM, plain: LLM) -> None:
    params = replace(PARAMS, n=3)
    outputs = speculative.generate(["abc", "no"], params)
    assert [[c.index for c in output.outputs] for output in outputs] == [[0, 1, 2]] * 2
    assert token_ids(outputs) == token_ids(plain.generate(["abc", "no"], params))
    assert len({tuple(ids) for ids in token_ids(outputs)}) == 6


def test_chat(plain: LLM) -> None:
    """The tiny template ends each message with a full stop and opens the answer with an exclamation mark."""
    single = [{"role": "user", "content": "ab"}]
    several = [single, [*single, {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]]
    outputs = plain.chat(several, PARAMS)
    assert token_ids(outputs) == token_ids(plain.generate(["ab.!", "ab.c.d.!"], PARAMS))
    assert [plain.tokenizer.decode(output.prompt_token_ids) for output in outputs] == ["ab.!", "ab.c.d.!"]
    assert token_ids(plain.chat(single, PARAMS)) == token_ids(outputs)[:1]
    without = plain.chat(single, PARAMS, add_generation_prompt=False)
    assert plain.tokenizer.decode(without[0].prompt_token_ids) == "ab."
    assert plain.chat([], PARAMS) == []


def joined(updates: Sequence[StreamUpdate], number: int, index: int) -> tuple[str, list[int], list[int]]:
    own = [update for update in updates if (update.request_id, update.index) == (number, index)]
    tokens = [token for update in own for token in update.token_ids]
    return "".join(update.text for update in own), tokens, [origin for update in own for origin in update.origins]


@pytest.mark.parametrize("stop", [None, ["a", "bcd"], ["."]])
def test_stream_updates_join_to_the_output(speculative: LLM, stop: list[str] | None) -> None:
    params = replace(PARAMS, n=2, stop=stop)
    updates = list(speculative.stream(PROMPTS, params))
    outputs = {update.request_id: update.output for update in updates if update.output}
    whole = speculative.generate(PROMPTS, params)
    assert sorted(outputs) == [0, 1, 2, 3] and token_ids([outputs[n] for n in range(4)]) == token_ids(whole)
    for output in whole:
        for completion in output.outputs:
            text, tokens, origins = joined(updates, output.request_id, completion.index)
            assert (text, tokens, origins) == (completion.text, completion.token_ids, completion.origins)
    assert any(len(update.token_ids) > 1 for update in updates) or stop
    # a request's whole output comes with its last update
    for number in outputs:
        assert [u for u in updates if u.request_id == number][-1].output is outputs[number]


def test_closing_a_stream_cancels_its_requests(speculative: LLM) -> None:
    stream = speculative.stream(PROMPTS, PARAMS)
    for _ in range(3):
        next(stream)
    assert speculative.engine.has_work
    stream.close()
    assert not speculative.engine.has_work
    # all slots are free again, and nothing of the cancelled requests is left in them
    assert len(speculative.generate(PROMPTS, PARAMS)) == 4


def test_streams_of_one_engine_do_not_disturb_each_other(speculative: LLM, plain: LLM) -> None:
    expected = token_ids(plain.generate(PROMPTS, PARAMS))
    first = speculative.stream(PROMPTS[:2], PARAMS)
    seen = [next(first)]
    assert token_ids(speculative.generate(PROMPTS[2:], PARAMS)) == expected[2:]
    second = speculative.stream(PROMPTS[2:], PARAMS)
    others = [next(second)]
    seen += first
    others += second
    assert [joined(seen, number, 0)[1] for number in range(2)] == expected[:2]
    assert [joined(others, number, 0)[1] for number in range(2)] == expected[2:]


def test_a_sequence_aborted_from_outside_ends_its_stream(plain: LLM) -> None:
    updates = []
    for update in plain.stream("abc", PARAMS):
        updates.append(update)
        if len(updates) == 3:
            for sequence in list(plain.engine.scheduler.running):
                plain.engine.abort(sequence)
    assert updates[-1].output is not None
    completion = updates[-1].output.outputs[0]
    assert completion.finish_reason == "abort" and len(completion.token_ids) == 3


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("a" * 48, "the prompt has 48 tokens, but this model takes at most 48 tokens"),
        ("", "the prompt is empty"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({"prompt_token_ids": [99]}, "outside the vocabulary"),
        ({"prompt_token_ids": ["a"]}, "a prompt must be a string or"),
        ({"prompt": "abc"}, "a prompt must be a string or"),
        (7, "a prompt must be a string or"),
    ],
)
def test_a_prompt_that_cannot_run(plain: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plain.generate(["abc", prompt, "no"], PARAMS)
    assert not plain.engine.has_work


def test_a_chat_that_is_too_long(plain: LLM) -> None:
    with pytest.raises(UserError, match="the prompt has 52 tokens, but this model takes at most 48"):
        plain.chat([{"role": "user", "content": "a" * 50}], PARAMS)


def test_parameters_for_each_prompt(plain: LLM) -> None:
    with pytest.raises(UserError, match="3 sampling parameters for 2 prompts; give one, or one for each"):
        plain.generate(PROMPTS[:2], [PARAMS] * 3)


def test_a_loaded_target_is_taken_as_it_is(folder: Path, plain: LLM) -> None:
    target = load_target(str(folder), torch.float64)
    llm = LLM(target)
    assert llm.target is target and token_ids(llm.generate("abc", PARAMS)) == token_ids(plain.generate("abc", PARAMS))
    assert target.tokenizer.eos_token_ids == (EOS,)


def test_method_none_is_plain_decoding(folder: Path, plain: LLM) -> None:
    llm = LLM(str(folder), {"method": "none"}, dtype="float64")
    completion = llm.generate("abc", PARAMS)[0].outputs[0]
    assert completion.acceptance.proposed == [] and completion.token_ids == token_ids(plain.generate("abc", PARAMS))[0]


def test_the_drafter_says_how_many_tokens_unless_the_user_does(folder: Path, tmp_path: Path) -> None:
    """The tiny one's checkpoint says nothing, so it would be 7, but its block has room for 5."""
    llm = LLM(str(folder), speculation(folder, num_speculative_tokens=None), dtype="float64")
    assert llm.speculation is not None and llm.speculation.num_speculative_tokens == 5
    assert len(llm.generate("abc", PARAMS)[0].outputs[0].acceptance.proposed) == 5
    raw = dflash_json(num_speculative_tokens=2)
    write_dflash(tmp_path, raw, dflash_tensors(raw))
    llm = LLM(str(folder), {"method": "dflash", "model": str(tmp_path)}, dtype="float64")
    assert len(llm.generate("abc", PARAMS)[0].outputs[0].acceptance.proposed) == 2


@pytest.mark.parametrize("form", [dict, json.dumps, lambda fields: SpeculativeConfig(**fields)])
def test_every_form_of_a_speculative_config(folder: Path, form: Any) -> None:
    llm = LLM(str(folder), form(speculation(folder, num_speculative_tokens=2)), dtype="float64")
    assert len(llm.generate("abc", PARAMS)[0].outputs[0].acceptance.proposed) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_speculative_tokens": 6}, "num_speculative_tokens is 6, but the drafter in .* proposes 1 to 5 tokens"),
        ({"model": None}, "no drafter ships for"),
        ({"model": "./nowhere"}, "no model './nowhere'"),
        ({"method": "medusa"}, "method 'medusa' is not known; known: none, mtp, "),
    ],
)
def test_speculation_that_cannot_be(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        LLM(str(folder), speculation(folder, **changes), dtype="float64")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "the speculative config is not valid JSON"),
        ("[1]", "must be a JSON object, not list"),
        (7, "must be a JSON object, not int"),
        ({}, "needs `method`"),
        ({"model": "x"}, "needs `method`"),
        ({"method": "dflash", "speed": 9, "draft": 1}, "unknown field in the speculative config: draft, speed; known"),
        ({"method": None}, "method is None in the speculative config, expected a string"),
        ({"method": "dflash", "model": 5}, "model is 5 in the speculative config, expected a string"),
        ({"method": "dflash", "num_speculative_tokens": 0}, "num_speculative_tokens is 0, expected an integer of at"),
        ({"method": "dflash", "num_speculative_tokens": "7"}, "num_speculative_tokens is '7'"),
        ({"method": "dflash", "num_speculative_tokens": 2.0}, "num_speculative_tokens is 2.0"),
        ({"method": "dflash", "num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({"method": "dflash", "acceptance_rule": "typical"}, "acceptance_rule is 'typical', expected 'exact' or"),
    ],
)
def test_a_speculative_config_that_is_wrong(value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        SpeculativeConfig.parse(value)


def test_a_speculative_config_that_is_right() -> None:
    expected = SpeculativeConfig("dflash", "some/drafter", 3, "rejection")
    fields = {"method": "dflash", "model": "some/drafter", "num_speculative_tokens": 3, "acceptance_rule": "rejection"}
    assert SpeculativeConfig.parse(fields) == SpeculativeConfig.parse(json.dumps(fields)) == expected
    assert SpeculativeConfig.parse(expected) is expected
    assert SpeculativeConfig.parse('{"method": "dflash"}') == SpeculativeConfig("dflash", None, None, "exact")


@pytest.mark.parametrize("name", ["max_model_len", "max_num_seqs", "max_num_batched_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8"])
def test_engine_limits_that_are_wrong(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"{name} is {value!r}, expected an integer of at least 1"):
        EngineConfig(**{name: value})


def test_a_loaded_target_is_as_it_was_loaded(target: Target) -> None:
    for settings in ({"quantization": "mxfp4"}, {"kernels": "pytorch"}):
        with pytest.raises(UserError, match="give them to load_target"):
            LLM(target, **settings)


def test_an_llm_that_cannot_be(folder: Path) -> None:
    with pytest.raises(UserError, match="dtype is 'int4', expected one of bfloat16, float32, float64"):
        LLM(str(folder), dtype="int4")
    with pytest.raises(UserError, match="max_model_len is 99, but the model's limit is 48"):
        LLM(str(folder), max_model_len=99)
    with pytest.raises(UserError, match=r"no model '\./nowhere'"):
        LLM("./nowhere")


def test_threads_share_an_engine(target: Target) -> None:
    prompts = ["abc", "dd ab", "cab.", "op"]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = [LLM(target).generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts]
    llm = LLM(target)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            found = pool.map(lambda prompt: llm.generate(prompt, params)[0].outputs[0].token_ids, prompts)
            assert list(found) == expected
