"""Structured output: the masks against languages one can list, the output against ``json``, ``jsonschema`` and ``re``,
and speculation against plain decoding."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scripted import KINDS, PlainDecoder, ScriptedDrafter, hostile, some_costs
from test_tokenizer import smollm2_file
from tiny import CONFIG, EOS, TOKENS, model_tensors, tiny_model, tiny_target, tiny_tokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from foredraft import LLM, SamplingParams, UserError
from foredraft.config import EngineConfig, NumSpeculativeTokens
from foredraft.drafters.base import Drafter, DraftRequest, Proposal, Stop
from foredraft.drafters.ngram import NgramDrafter
from foredraft.engine import grammar
from foredraft.engine.costs import Costs
from foredraft.engine.engine import Engine
from foredraft.engine.grammar import Constraint, GrammarCompiler
from foredraft.engine.sampler import History, is_plain_greedy, process_logits, sample_rows
from foredraft.engine.sequence import Sequence as Running
from foredraft.models.cache import PagedCache
from foredraft.models.decoder import DecoderModel
from foredraft.models.loading import EMBEDDED, Target
from foredraft.ops import NATIVE, native
from foredraft.ops.noise import NotFinite
from foredraft.sampling_params import MAX_GRAMMAR_BYTES, StructuredOutputsParams
from foredraft.tokenizer import Tokenizer

# All bytes, some pairs that occur in JSON, a tag that is ordinary text, and special tokens, two of which end.
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
PIECES = ['{"', '":', '",', "Ġ{", 'Ġ"', '"}', "}}", "true", "null", "ab", "Ċ", "ĠĠ", "12", "Ã©"]
SPECIAL = ["<eos>", "<end>", "<pad>"]
VOCABULARY = [*dict.fromkeys([*ALPHABET, *PIECES]), "<tool>", *SPECIAL]
ENDS = (VOCABULARY.index("<eos>"), VOCABULARY.index("<end>"))
ROWS = len(VOCABULARY) + 5
MAX_LEN = 160


def json_tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(VOCABULARY)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return Tokenizer(backend, special_tokens={"eos_token": ENDS[0]}, eos_token_ids=ENDS, chat_template=None)


TARGET = Target("json", tiny_model(replace(CONFIG, vocab_size=ROWS, max_position_embeddings=MAX_LEN)), json_tokenizer())
PLAIN = PlainDecoder(TARGET)
COMPILER = GrammarCompiler(TARGET.tokenizer, ROWS, ENDS)
TINY = GrammarCompiler(tiny_tokenizer(), len(TOKENS) + 3, [EOS])

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "color": {"enum": ["red", "green", "<end>"]},
        "count": {"type": "integer", "minimum": -12, "maximum": 300},
        "flags": {"type": "array", "items": {"type": ["boolean", "null"]}, "maxItems": 3},
    },
    "required": ["name", "count"],
    "additionalProperties": False,
}
LARK = """start: pair ("," pair)*
pair: KEY "=" (NUMBER | "[" start "]")
KEY: /[a-c]{1,3}/
NUMBER: /[0-9]{1,2}/"""
PARAMS = [
    StructuredOutputsParams(json=SCHEMA),
    StructuredOutputsParams(json_object=True),
    StructuredOutputsParams(regex=r"(ab|ba|é)+ is [a-c]{2,5}(true|null)?\."),
    StructuredOutputsParams(choice=["yes", "yes, but", "no", "<end>", "<tool>"]),
    StructuredOutputsParams(grammar=LARK),
]


def allowed_by(constraint: Constraint, draft_prefix: Sequence[int] = (), rows: int = ROWS) -> set[int]:
    row = np.zeros(rows, dtype=np.float32)
    constraint.apply(row, draft_prefix)
    assert set(np.unique(row)) <= {0.0, -np.inf}
    return set(np.flatnonzero(row == 0).tolist())


def after(compiler: GrammarCompiler, params: StructuredOutputsParams, tokens: Sequence[int]) -> Constraint:
    constraint = compiler.constraint(params)
    for token in tokens:
        constraint.commit(token)
    return constraint


def listed(choices: Sequence[str], tokens: Sequence[int]) -> set[int]:
    """Which tokens may follow, where the output is one of ``choices``."""
    texts = [*TOKENS[:19], " ", *(token.replace("Ġ", " ") for token in TOKENS[20:27])]
    if EOS in tokens:
        return {EOS}
    written = "".join(texts[token] for token in tokens)
    found = {token for token in range(3, 27) if any(c.startswith(written + texts[token]) for c in choices)}
    return found | ({EOS} if written in choices else set())


@settings(max_examples=200)
@given(st.lists(st.text("abcd .", min_size=1, max_size=7), min_size=1, max_size=6, unique=True), st.data())
def test_masks_of_languages_one_can_list(choices: list[str], data: st.DataObject) -> None:
    """Whatever was looked at before, what may come next is what the strings say."""
    constraint = TINY.constraint(StructuredOutputsParams(choice=choices))
    committed: list[int] = []
    rows = len(TOKENS) + 3
    while EOS not in committed:
        draft: list[int] = []
        while (found := listed(choices, committed + draft)) and EOS not in draft and data.draw(st.booleans()):
            assert allowed_by(constraint, draft, rows) == found
            draft.append(data.draw(st.sampled_from(sorted(found))))
        assert allowed_by(constraint, draft, rows) == listed(choices, committed + draft)
        proposal = [*draft, *data.draw(st.lists(st.integers(0, rows - 1), max_size=3))]
        valid = 0
        while valid < len(proposal) and EOS not in proposal[:valid]:
            if proposal[valid] not in listed(choices, committed + proposal[:valid]):
                break
            valid += 1
        assert constraint.valid_prefix(proposal) == valid
        # Some of the draft is accepted, and something else may come in its place.
        accepted = draft[: data.draw(st.integers(0, len(draft)))]
        if EOS not in accepted:
            accepted.append(data.draw(st.sampled_from(sorted(listed(choices, committed + accepted)))))
        for token in accepted:
            constraint.commit(token)
        committed += accepted
    assert allowed_by(constraint, [], rows) == {EOS} and constraint.valid_prefix([EOS]) == 0


@settings(max_examples=150)
@given(st.sampled_from(PARAMS), st.integers(0, 10**6), st.data())
def test_a_draft_prefix_is_as_if_committed(params: StructuredOutputsParams, seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    constraint = COMPILER.constraint(params)
    committed: list[int] = []
    for _ in range(data.draw(st.integers(1, 5))):
        draft: list[int] = []
        for _ in range(data.draw(st.integers(0, 6))):
            expected = allowed_by(after(COMPILER, params, committed + draft))
            assert allowed_by(constraint, draft) == expected
            draft.append(int(rng.choice(sorted(expected))))
            ends = [index for index, token in enumerate(draft) if token in ENDS]
            assert constraint.valid_prefix(draft) == (ends[0] + 1 if ends else len(draft))
        kept = draft[: data.draw(st.integers(0, len(draft)))]
        if set(kept) & set(ENDS):
            return
        for token in kept:
            constraint.commit(token)
        committed += kept
        assert allowed_by(constraint) == allowed_by(after(COMPILER, params, committed))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_apply_keeps_the_scores_of_what_is_allowed(dtype: Any) -> None:
    scores = np.random.default_rng(0).normal(size=ROWS).astype(dtype)
    row = scores.copy()
    COMPILER.constraint(StructuredOutputsParams(regex="[0-9]+")).apply(row, [])
    kept = np.flatnonzero(np.isfinite(row)).tolist()
    assert [VOCABULARY[token] for token in kept] == [*"0123456789", "12"]
    assert row.dtype == dtype and (row[kept] == scores[kept]).all() and (np.delete(row, kept) == -np.inf).all()


def test_text_is_never_a_special_token_and_rows_without_token_never_come() -> None:
    anything = allowed_by(COMPILER.constraint(StructuredOutputsParams(regex="(.|\n)*")))
    spelled = {token for token in range(ROWS) if token < len(VOCABULARY) and VOCABULARY[token] not in SPECIAL}
    # Continuation bytes of UTF-8, and bytes that it does not have, begin nothing.
    begins = {token for token in spelled if len(VOCABULARY[token]) > 1 or begins_utf8(VOCABULARY[token])}
    assert anything == begins | set(ENDS)
    tag = COMPILER.constraint(StructuredOutputsParams(choice=["<end>"]))
    assert allowed_by(tag) == {VOCABULARY.index("<")}
    tool = COMPILER.constraint(StructuredOutputsParams(choice=["<tool>"]))
    assert allowed_by(tool) == {VOCABULARY.index("<"), VOCABULARY.index("<tool>")}
    named = COMPILER.constraint(StructuredOutputsParams(grammar='start: "ab" <pad> "c"'))
    assert allowed_by(named, [VOCABULARY.index("ab")]) == {VOCABULARY.index("<pad>")}


def begins_utf8(character: str) -> bool:
    """Of a byte in GPT-2's spelling: whether it is ASCII or the first of several (Unicode 16, table 3-7)."""
    alone = decoders.ByteLevel().decode([character])
    return alone != "\ufffd" or 0xC2 <= ord(character) <= 0xF4


def test_all_ends_are_allowed_where_the_grammar_may_end_and_nowhere_else() -> None:
    params = StructuredOutputsParams(regex="a+b?")
    a, b = VOCABULARY.index("a"), VOCABULARY.index("b")
    constraint = COMPILER.constraint(params)
    assert not allowed_by(constraint) & set(ENDS)
    assert allowed_by(constraint, [a]) >= {a, b, *ENDS}
    assert allowed_by(constraint, [a, b]) == set(ENDS)
    for end in ENDS:
        assert allowed_by(constraint, [a, b, end]) == allowed_by(constraint, [a, end, a]) == set(ENDS)
        assert constraint.valid_prefix([a, a, end, a]) == 3 and constraint.valid_prefix([end]) == 0
        assert after(COMPILER, params, [a, b]).valid_prefix([end, a]) == 1
        ended = after(COMPILER, params, [a, end])
        assert allowed_by(ended) == set(ENDS) and ended.valid_prefix([a]) == 0
    assert after(COMPILER, params, [a, b]).valid_prefix([]) == 0
    assert allowed_by(constraint) == {a, VOCABULARY.index("ab")}


def test_a_forbidden_token_is_a_mistake_of_the_caller() -> None:
    constraint = COMPILER.constraint(StructuredOutputsParams(regex="ab*"))
    a, b = VOCABULARY.index("a"), VOCABULARY.index("b")
    for wrong in ([b], [a, a]):
        with pytest.raises(ValueError, match=f"the grammar forbids token {wrong[-1]}"):
            allowed_by(constraint, wrong)
    with pytest.raises(ValueError, match=f"forbids token {b}"):
        constraint.commit(b)
    constraint.commit(a)
    assert allowed_by(constraint) == {b, *ENDS}


def test_byte_fallback_tokens_write_their_byte() -> None:
    """SentencePiece's kind: a word begins with its space, and bytes without a token have one of their own."""
    vocabulary = {"<unk>": 0, "</s>": 1, "▁caf": 2, "caf": 3, "<0xC3>": 4, "<0xA9>": 5, "▁": 6, "é": 7}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "</s>"])
    tokenizer = Tokenizer(backend, special_tokens={"eos_token": 1}, eos_token_ids=[1], chat_template=None)
    constraint = GrammarCompiler(tokenizer, 10, [1]).constraint(StructuredOutputsParams(choice=[" café", "café"]))
    assert allowed_by(constraint, [], 10) == {2, 3, 6}
    assert allowed_by(constraint, [2], 10) == {4, 7} and allowed_by(constraint, [6, 3, 4], 10) == {5}
    assert allowed_by(constraint, [3, 4, 5], 10) == {1}


def test_other_decoders_write_whole_characters() -> None:
    tokenizer = json_tokenizer()
    tokenizer._backend.decoder = decoders.Sequence([decoders.ByteLevel()])
    constraint = GrammarCompiler(tokenizer, ROWS, ENDS).constraint(StructuredOutputsParams(regex=" é+"))
    assert allowed_by(constraint) == {VOCABULARY.index("Ġ")}
    assert allowed_by(constraint, [VOCABULARY.index("Ġ")]) == {VOCABULARY.index("Ã©")}


def test_a_token_that_ends_is_no_text() -> None:
    tool = VOCABULARY.index("<tool>")
    compiler = GrammarCompiler(TARGET.tokenizer, ROWS, [tool])
    constraint = compiler.constraint(StructuredOutputsParams(choice=["<tool>", "<"]))
    assert allowed_by(constraint) == {VOCABULARY.index("<")}
    assert allowed_by(constraint, [VOCABULARY.index("<")]) == {VOCABULARY.index("t"), tool}


# Parameters


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar, got none"),
        ({"json_object": False}, "got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
        ({"json_object": 1}, "json_object is 1, expected true or false"),
        ({"json": "{"}, r"structured_outputs.json is not valid JSON \(.+\), expected a JSON schema"),
        ({"json": "[" * 100_000}, "structured_outputs.json is not valid JSON"),
        ({"json": "3"}, "structured_outputs.json is a int, expected a JSON schema, an object or its text"),
        ({"json": [1]}, "structured_outputs.json is a list"),
        ({"json": {"const": {1}}}, "structured_outputs.json is not valid JSON"),
        ({"json": {"const": float("nan")}}, "structured_outputs.json is not valid JSON"),
        ({"json": {"const": "\ud800"}}, "half of a UTF-16 pair"),
        ({"regex": ""}, "regex is '', expected a string that is not empty"),
        ({"regex": 3}, "regex is 3, expected a string"),
        ({"grammar": ["a"]}, "grammar is .*, expected a string"),
        ({"choice": "ab"}, "choice must be a list of different strings"),
        ({"choice": []}, "choice must be a list of different strings"),
        ({"choice": ["a", ""]}, "choice must be a list of different strings"),
        ({"choice": ["a", "a"]}, "choice must be a list of different strings"),
        ({"choice": ["a", 1]}, "choice must be a list of different strings"),
        ({"regex": "é" * (MAX_GRAMMAR_BYTES // 2 + 1)}, "regex has 65538 bytes, expected at most 65536"),
        ({"json": {"description": "x" * MAX_GRAMMAR_BYTES}}, "json has .* bytes, expected at most 65536"),
        ({"choice": ["x" * MAX_GRAMMAR_BYTES, "y"]}, "choice has 65537 bytes"),
    ],
)
def test_fields_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        StructuredOutputsParams(**fields)


def test_a_schema_is_the_same_as_its_text() -> None:
    text = StructuredOutputsParams(json=json.dumps(SCHEMA, indent=3))
    assert text == StructuredOutputsParams(json=SCHEMA) and hash(text) == hash(PARAMS[0])
    assert StructuredOutputsParams(choice=["a"]) == StructuredOutputsParams(choice=("a",))
    assert [params.kind for params in PARAMS] == ["json", "json_object", "regex", "choice", "grammar"]


def test_what_does_not_go_together() -> None:
    for fields in ({"ignore_eos": True}, {"min_tokens": 2}):
        with pytest.raises(UserError, match=f"{next(iter(fields))} is .*structured_outputs"):
            SamplingParams(structured_outputs=PARAMS[0], **fields)
    with pytest.raises(UserError, match=r"structured_outputs is \{'regex': 'a'\}, expected StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    assert not is_plain_greedy(SamplingParams(temperature=0, structured_outputs=PARAMS[0]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": {"type": "foo"}}, "json cannot be used: Invalid type: foo$"),
        ({"json": {"type": "string", "pattern": "("}}, "json cannot be used: regex parse error:.*unclosed group$"),
        ({"json": {"not": {"type": "string"}}}, r'json cannot be used: Unimplemented keys: \["not"\]$'),
        ({"json": {"$ref": "https://example.com/schema"}}, "json cannot be used: .*does not fetch resources$"),
        (
            {"json": {"type": "integer", "minimum": 3, "maximum": 1}},
            "json cannot be used: .*minimum .* is greater than maximum",
        ),
        ({"regex": "["}, "regex cannot be used: .*unclosed character class$"),
        ({"regex": "(?=a)b"}, "regex cannot be used: .*look-ahead.* not supported$"),
        ({"grammar": "start: word"}, r'grammar cannot be used: at 1\(8\): unknown name: "word"$'),
        ({"grammar": 'start: "a'}, r"grammar cannot be used: 1\(10\): lexer error$"),
        ({"grammar": 'start: a "b"\na[max_tokens=3]: /[a-z]+/'}, "grammar cannot be used: rollback not supported"),
        ({"grammar": 'start: "x" a\na[stop="b"]: /[a-z]+/'}, "grammar cannot be used: rollback not supported"),
    ],
)
def test_the_reason_of_the_library(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"(?s)structured_outputs.{message}"):
        COMPILER.constraint(StructuredOutputsParams(**fields))


def test_a_vocabulary_that_cannot_begin() -> None:
    with pytest.raises(UserError, match=r"structured_outputs.regex cannot be used: NoExtensionBias"):
        TINY.constraint(StructuredOutputsParams(regex="[q-z]"))


def test_a_model_without_end() -> None:
    with pytest.raises(UserError, match="needs a model with an end-of-sequence token"):
        GrammarCompiler(tiny_tokenizer(), len(TOKENS), []).constraint(PARAMS[2])


def test_grammars_are_compiled_once_and_kept_as_long_as_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    real = grammar.LLMatcher

    def counting(vocabulary: Any, text: str, **options: Any) -> Any:
        compiled.append(text)
        return real(vocabulary, text, **options)

    monkeypatch.setattr(grammar, "LLMatcher", counting)
    compiler = GrammarCompiler(TARGET.tokenizer, ROWS, ENDS)
    words = [StructuredOutputsParams(choice=[f"word {index}"]) for index in range(grammar.KEPT_GRAMMARS + 1)]
    for word in words:
        compiler.constraint(word)
        compiler.constraint(words[0])
    assert len(compiled) == len(words)
    compiler.constraint(words[1])
    assert len(compiled) == len(words) + 1


# The engine


def engine_for(
    drafter: Drafter | None, count: NumSpeculativeTokens = 0, target: Target = TARGET, **settings: Any
) -> Engine:
    rule, costs = settings.pop("acceptance_rule", "exact"), settings.pop("costs", None)
    return Engine(
        target.model,
        EngineConfig(**settings),
        eos_token_ids=target.tokenizer.eos_token_ids,
        tokenizer=target.tokenizer,
        drafter=drafter,
        num_speculative_tokens=count,
        acceptance_rule=rule,
        costs=costs,
    )


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def plain(prompt: Sequence[int], params: SamplingParams, seed: int) -> list[int]:
    """Constrained decoding by its definition: for every token a new pass and a new constraint."""
    assert params.structured_outputs is not None
    output: list[int] = []
    while len(output) < min(params.max_tokens or MAX_LEN, MAX_LEN - len(prompt)):
        history = History.from_prompt(prompt)
        history.commit(output)
        constraint = after(COMPILER, params.structured_outputs, output)
        logits = PLAIN.logits([*prompt, *output])
        position = len(prompt) + len(output) - 1
        output += sample_rows(logits, params, history, [], position, seed, [], constraint)
        if output[-1] in ENDS:
            break
    return output


@st.composite
def a_request(draw: st.DrawFn, temperatures: Sequence[float] = (0.0, 0.7, 1.2)) -> tuple[list[int], SamplingParams]:
    prompt = draw(st.lists(st.integers(0, len(VOCABULARY) - 1), min_size=1, max_size=6))
    params = SamplingParams(
        temperature=draw(st.sampled_from(temperatures)),
        seed=draw(st.integers(0, 10**6)),
        top_k=draw(st.sampled_from([0, 0, 4])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.8])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.4])),
        logit_bias=draw(st.sampled_from([None, {ENDS[0]: 3.0, ENDS[1]: -2.0}, dict.fromkeys(range(40), -100.0)])),
        max_tokens=draw(st.sampled_from([1, 5, 30])),
        structured_outputs=draw(st.sampled_from([*PARAMS, None])),
    )
    return prompt, params


def assert_plain(engine: Engine, requests: Sequence[tuple[list[int], SamplingParams]]) -> None:
    served = [engine.add(prompt, params)[0] for prompt, params in requests]
    finish(engine)
    for (prompt, params), sequence in zip(requests, served, strict=True):
        if params.structured_outputs is None:
            assert sequence.output == PLAIN(prompt, params, sequence.seed, MAX_LEN).token_ids
        else:
            assert sequence.output == plain(prompt, params, sequence.seed)
            assert (sequence.finish_reason == "stop") is (sequence.output[-1] in ENDS)


def futures_of(requests: Sequence[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    futures = []
    for prompt, params in requests:
        assert params.seed is not None
        if params.structured_outputs is None:
            futures.append([*prompt, *PLAIN(prompt, params, params.seed, MAX_LEN).token_ids])
        else:
            futures.append([*prompt, *plain(prompt, params, params.seed)])
    return futures


requests_of = st.lists(a_request(), min_size=1, max_size=4)
kinds_of = st.lists(st.sampled_from(KINDS), min_size=1, max_size=6)


@settings(max_examples=60)
@given(requests_of, st.integers(1, 8), kinds_of, st.sampled_from([1, 8, 512]))
def test_hostile_drafters_change_nothing(
    requests: list[tuple[list[int], SamplingParams]], count: int, kinds: list[str], batched: int
) -> None:
    drafter = ScriptedDrafter(hostile(futures_of(requests), kinds, len(VOCABULARY), ENDS, count))
    assert_plain(engine_for(drafter, count, max_num_seqs=3, max_num_batched_tokens=batched), requests)


@settings(max_examples=30)
@given(requests_of, kinds_of, st.one_of(st.none(), st.integers(0, 99)), some_costs())
def test_whatever_auto_decides_changes_nothing(
    requests: list[tuple[list[int], SamplingParams]], kinds: list[str], confidences: int | None, costs: Costs
) -> None:
    drafter = ScriptedDrafter(hostile(futures_of(requests), kinds, len(VOCABULARY), ENDS, 0), confidences)
    assert_plain(engine_for(drafter, "auto", costs=costs), requests)


@settings(max_examples=20)
@given(st.lists(a_request((0.0,)), min_size=1, max_size=3), st.integers(1, 8), kinds_of)
def test_rejection_without_temperature_is_exact(
    requests: list[tuple[list[int], SamplingParams]], count: int, kinds: list[str]
) -> None:
    drafter = ScriptedDrafter(hostile(futures_of(requests), kinds, len(VOCABULARY), ENDS, 1))
    assert_plain(engine_for(drafter, count, acceptance_rule="rejection"), requests)


def test_forbidden_drafts_are_not_paid_for() -> None:
    params = SamplingParams(temperature=0, seed=0, structured_outputs=StructuredOutputsParams(regex="(ab|ba){4,}"))
    future = [3, *plain([3], params, 0)]
    wrong = VOCABULARY.index("{")
    drafter = ScriptedDrafter(lambda tokens, count: [*future[len(tokens) : len(tokens) + 2], wrong, wrong])
    engine = engine_for(drafter, 4)
    sequence = engine.add([3], params)[0]
    finish(engine)
    assert sequence.output == future[1:] and len(sequence.acceptance.proposed) == 2
    assert sequence.acceptance.kept == sequence.acceptance.proposed


class DrawingDrafter(ScriptedDrafter):
    """Draws one token of a distribution q over the whole vocabulary."""

    def __init__(self, log_q: torch.Tensor) -> None:
        super().__init__(lambda tokens, count: [])
        self._log_q = log_q
        self._rng = np.random.default_rng(5)

    def propose(self, requests: Sequence[DraftRequest], max_tokens: int, stop: Stop | None = None) -> list[Proposal]:
        drawn = self._rng.choice(len(self._log_q), size=len(requests), p=self._log_q.exp().numpy())
        return [Proposal((int(token),), self._log_q[None]) for token in drawn]


def test_rejection_keeps_the_constrained_distribution() -> None:
    """Also where the drafter often draws what the grammar forbids."""
    first, rest = VOCABULARY.index("z"), [VOCABULARY.index(letter) for letter in "abcd"]
    structured = StructuredOutputsParams(regex="z[a-d]")
    params = SamplingParams(temperature=0.8, max_tokens=3, structured_outputs=structured)
    history, constraint = History.from_prompt([7, 8]), after(COMPILER, structured, [first])
    scores = process_logits(PLAIN.logits([7, 8, first])[0], params, history, [], [], constraint)
    expected = torch.softmax(scores, -1).numpy()[rest]
    q = np.full(ROWS, 1e-6)
    q[rest[expected.argmax()]], q[rest[expected.argmin()]], q[VOCABULARY.index("y")] = 0.5, 0.1, 0.4
    drafter = DrawingDrafter(torch.from_numpy(q / q.sum()).log())
    engine = engine_for(drafter, 1, acceptance_rule="rejection")
    sequences = [engine.add([7, 8], replace(params, seed=seed))[0] for seed in range(3000)]
    finish(engine)
    assert all(sequence.output[0] == first for sequence in sequences)
    counts = np.array([sum(sequence.output[1] == token for sequence in sequences) for token in rest])
    assert counts.sum() == len(sequences)
    assert stats.chisquare(counts, counts.sum() * expected / expected.sum()).pvalue > 0.001
    assert all(sequence.acceptance.proposed for sequence in sequences)


def test_samples_have_a_constraint_each() -> None:
    params = SamplingParams(temperature=1.2, n=4, seed=1, max_tokens=30, structured_outputs=PARAMS[2])
    engine = engine_for(None)
    sequences = engine.add([5, 6], params)
    finish(engine)
    assert len({tuple(sequence.output) for sequence in sequences}) > 1
    for sequence in sequences:
        assert sequence.output == plain([5, 6], params, sequence.seed)


def test_a_refused_request_leaves_the_engine_as_it_was() -> None:
    engine = engine_for(None)
    with pytest.raises(UserError, match="Invalid type"):
        engine.add([5], SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "foo"})))
    assert not engine.has_work
    other = engine_for(None)
    assert engine.add([5], SamplingParams())[0].seed == other.add([5], SamplingParams())[0].seed
    blind = Engine(TARGET.model, EngineConfig(), eos_token_ids=ENDS)
    with pytest.raises(UserError, match="structured_outputs needs the model's tokenizer"):
        blind.add([5], SamplingParams(structured_outputs=PARAMS[0]))


def test_a_sequence_that_is_stuck_ends_alone() -> None:
    """The tiny vocabulary has no letter after p."""
    target = tiny_target()
    engine = engine_for(None, target=target)
    stuck = engine.add([3], SamplingParams(structured_outputs=StructuredOutputsParams(regex="a[q-z]")))[0]
    other = engine.add([3], SamplingParams(structured_outputs=StructuredOutputsParams(regex="ab")))[0]
    finish(engine)
    assert stuck.finish_reason == "error" and stuck.output == [TOKENS.index("a")]
    assert stuck.error is not None and "the structured output cannot go on" in stuck.error
    assert other.finish_reason == "stop" and other.text == "ab"
    with pytest.raises(NotFinite, match="cannot go on"):
        allowed_by(after(TINY, StructuredOutputsParams(regex="a[q-z]"), [TOKENS.index("a")]), [], len(TOKENS) + 3)


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
def test_a_sequence_that_is_preempted_keeps_its_constraint() -> None:
    """Two sequences that need three pages of memory each, and four pages for both."""
    config = replace(CONFIG, vocab_size=ROWS, max_position_embeddings=MAX_LEN, head_dim=10, hidden_size=40)
    tensors = {name: tensor.bfloat16() for name, tensor in model_tensors(config).items()}
    target = Target("native", DecoderModel(config, tensors.__getitem__, NATIVE), json_tokenizer())
    cache = target.model.new_cache()
    assert isinstance(cache, PagedCache)
    structured = StructuredOutputsParams(regex="([a-f]{3},){38}[a-f]{5}")
    params = SamplingParams(
        temperature=1.0, max_tokens=None, structured_outputs=structured, logit_bias={VOCABULARY.index("ab"): -9}
    )

    def outputs(memory: int | None) -> tuple[list[list[int]], int]:
        engine = engine_for(NgramDrafter(), 4, target, kv_cache_memory_bytes=memory)
        served = [engine.add([seed], replace(params, seed=seed))[0] for seed in (1, 2)]
        finish(engine)
        return [sequence.output for sequence in served], engine.scheduler.preemptions

    free, _ = outputs(None)
    limited, preemptions = outputs(4 * cache.page_bytes)
    assert limited == free and preemptions > 0 and all(len(output) > 130 for output in free)


def sampled(params: StructuredOutputsParams, count: int) -> list[Running]:
    drafter = ScriptedDrafter(lambda tokens, asked: tokens[-3:])
    engine = engine_for(drafter, 3)
    sampling = SamplingParams(
        temperature=1.0,
        max_tokens=None,
        structured_outputs=params,
        logit_bias={ENDS[0]: 2.0, VOCABULARY.index('"'): 3.0},
    )
    sequences = [engine.add([seed % 50, 9], replace(sampling, seed=seed))[0] for seed in range(count)]
    finish(engine)
    return sequences


def valid_json(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


@pytest.mark.parametrize(
    ("params", "check"),
    [
        (PARAMS[0], valid_json),
        (PARAMS[1], lambda text: isinstance(json.loads(text), dict)),
        (PARAMS[2], lambda text: re.fullmatch(r"(ab|ba|é)+ is [a-c]{2,5}(true|null)?\.", text) is not None),
        (PARAMS[3], lambda text: text in ("yes", "yes, but", "no", "<end>", "<tool>")),
        (PARAMS[4], lambda text: re.fullmatch(r"[a-c]{1,3}=[0-9\[].*", text) and text.count("[") == text.count("]")),
    ],
    ids=["json", "json_object", "regex", "choice", "grammar"],
)
def test_output_is_what_was_asked_for(params: StructuredOutputsParams, check: Callable[[str], bool]) -> None:
    """Sampled from a model that knows nothing, so that the grammar alone can be the reason."""
    ended = [sequence for sequence in sampled(params, 60) if sequence.finish_reason == "stop"]
    assert len(ended) > 20 and len({sequence.text for sequence in ended}) >= min(5, len(ended))
    for sequence in ended:
        assert sequence.output[-1] in ENDS and check(sequence.text)


# The embedded model


@pytest.mark.slow
def test_the_embedded_model_with_its_drafter() -> None:
    smollm2_file()
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 40},
            "country": {"type": "string", "maxLength": 40},
            "inhabitants": {"type": "integer", "minimum": 0, "maximum": 10**8},
        },
        "required": ["city", "country", "inhabitants"],
        "additionalProperties": False,
    }
    messages = [{"role": "user", "content": "Describe Paris as JSON with city, country and inhabitants."}]
    params = [
        SamplingParams(
            temperature=temperature,
            seed=3,
            max_tokens=120,
            structured_outputs=StructuredOutputsParams(json=schema),
        )
        for temperature in (0.0, 0.8)
    ]
    answers = []
    for config in (None, {"method": "dflash"}, {"method": "dflash", "num_speculative_tokens": 3}):
        llm = LLM(EMBEDDED, config)
        outputs = [llm.chat(messages, each)[0].outputs[0] for each in params]
        answers.append([output.token_ids for output in outputs])
        for output in outputs:
            assert output.finish_reason == "stop"
            jsonschema.validate(json.loads(output.text), schema)
        if config:
            assert sum(sum(output.acceptance.kept) for output in outputs) > 0
    assert answers[0] == answers[1] == answers[2]
