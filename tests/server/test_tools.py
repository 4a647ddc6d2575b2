"""Tools for chat: what the grammar allows, what the parser makes of an answer, and what a template gets to see."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from test_tokenizer import smollm2_file
from tiny import CONFIG, tiny_model
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from foredraft import LLM, SamplingParams, UserError
from foredraft.config import EngineConfig
from foredraft.engine.engine import Engine
from foredraft.engine.grammar import GrammarCompiler
from foredraft.models.gguf import GGUFFile
from foredraft.models.loading import EMBEDDED
from foredraft.server.tools import ToolCallParser, ToolChoice, choice_of, template_supports_tools, tool_messages
from foredraft.tokenizer import Tokenizer

WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string", "maxLength": 24}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": WEATHER}},
    {
        "type": "function",
        "function": {"name": "get_weather_map", "parameters": {"properties": {"x": {"type": "null"}}}},
    },
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "now"}}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


PARIS, NOW = call("get_weather", '{"city": "Paris", "days": 3}'), call("now", "{}")


def byte_tokenizer(tags: str) -> Tokenizer:
    """One token a byte, and the tags as text, as added tokens or as special tokens."""
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>", "<think>"]
    own = [] if tags == "text" else ["<tool_call>", "</tool_call>"]
    backend = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*vocabulary, *own])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(t, special=tags == "special", normalized=False) for t in own])
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<eos>", "<think>")])
    return Tokenizer(backend, special_tokens={"eos_token": 256}, eos_token_ids=[256], chat_template=None)


def chosen(tools: Any = TOOLS, tool_choice: Any = None, parallel_tool_calls: bool = True) -> ToolChoice:
    choice = choice_of(tools, tool_choice, parallel_tool_calls)
    assert choice is not None
    return choice


def allows(tokenizer: Tokenizer, choice: ToolChoice, text: str) -> bool:
    tokens = [*tokenizer.encode(text, add_special_tokens=False), *tokenizer.eos_token_ids]
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    constraint = compiler.constraint(choice.structured_outputs(tokenizer))
    return constraint.valid_prefix(tokens) == len(tokens)


# The request


def test_which_calls_a_request_wants() -> None:
    names = ["get_weather", "get_weather_map", "now"]
    for tool_choice, required in ((None, False), ("auto", False), ("required", True)):
        choice = chosen(tool_choice=tool_choice)
        assert (choice.required, choice.parallel, [name for name, _ in choice.functions]) == (required, True, names)
        assert choice.tools == tuple(TOOLS)
    assert not chosen(parallel_tool_calls=False).parallel
    named = chosen(tool_choice=NAMED)
    assert named.required and not named.parallel and [name for name, _ in named.functions] == ["now"]
    assert named.tools == tuple(TOOLS)
    for tools, tool_choice in ((None, None), ([], "auto"), (None, "none"), (TOOLS, "none")):
        assert choice_of(tools, tool_choice) is None


@pytest.mark.parametrize(
    ("tools", "tool_choice", "message"),
    [
        ({}, None, "tools is a dict, expected a list"),
        ([3], None, r'tools\[0\] must be an object of type "function"'),
        ([{"type": "retrieval"}], None, r"tools\[0\] must be"),
        ([TOOLS[0], {"type": "function"}], None, r"tools\[1\].function must be an object"),
        ([{"type": "function", "function": {}}], None, r"tools\[0\].function.name is None, expected 1 to 64 letters"),
        ([{"type": "function", "function": {"name": "a b"}}], None, r"tools\[0\].function.name is 'a b'"),
        ([{"type": "function", "function": {"name": "a" * 65}}], None, r"tools\[0\].function.name is 'a{65}'"),
        ([TOOLS[2], TOOLS[2]], None, r"tools\[1\].function.name is 'now', which another function has"),
        ([{"type": "function", "function": {"name": "a", "description": 1}}], None, "function.description is 1"),
        ([{"type": "function", "function": {"name": "a", "parameters": "x"}}], None, "parameters is a str, expected a"),
        (
            [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}],
            None,
            r"tools\[0\].function.parameters.type is 'string', expected \"object\"",
        ),
        (
            [
                TOOLS[2],
                {"type": "function", "function": {"name": "a", "parameters": {"properties": {"x": {"not": {}}}}}},
            ],
            None,
            r"tools\[1\].function.parameters cannot be used: Unimplemented keys: \[\"not\"\]$",
        ),
        (
            [{"type": "function", "function": {"name": "a", "parameters": {"title": "x" * 70_000}}}],
            None,
            r"tools\[0\].function.parameters has \d+ bytes, expected at most 65536",
        ),
        (None, "required", "tool_choice is 'required', but the request has no tools"),
        ([], NAMED, "but the request has no tools"),
        (TOOLS, "sometimes", "tool_choice is 'sometimes', expected none, auto, required or"),
        (TOOLS, {"type": "function"}, "tool_choice is .*, expected none, auto, required or"),
        (TOOLS, {"type": "function", "function": {"name": "later"}}, "'later'; those in tools are get_weather, get_w"),
    ],
)
def test_what_is_wrong_with_a_request(tools: Any, tool_choice: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choice_of(tools, tool_choice)


def test_many_long_schemas_together() -> None:
    tools = [
        {"type": "function", "function": {"name": f"f{index}", "parameters": {"title": "x" * 20_000}}}
        for index in range(4)
    ]
    with pytest.raises(UserError, match=r"parameters of the tools have \d+ bytes together, expected at most 65536"):
        chosen(tools).structured_outputs(byte_tokenizer("text"))


# The grammar

WRONG_CALLS = [
    call("get_time", "{}"),
    call("get_weather", "{}"),
    call("get_weather", '{"city": "Paris", "days": 12}'),
    call("get_weather", '{"city": "Paris", "unit": "K"}'),
    call("get_weather", '"Paris"'),
    call("now", '{"x": 1}'),
    '<tool_call>{"name": "now"}</tool_call>',
    "<tool_call>now()</tool_call>",
    "<tool_call>",
    NOW[:-1],
]


@pytest.mark.parametrize("tags", ["text", "added", "special"])
def test_required_calls(tags: str) -> None:
    tokenizer = byte_tokenizer(tags)
    choice = chosen(tool_choice="required")
    for text in (PARIS, NOW, f"{NOW}\n{PARIS}\n{NOW}", call("get_weather_map", '{"x":\n null, "y": [2]}')):
        assert allows(tokenizer, choice, text)
    for text in ("", "Hello", f"Well: {NOW}", f"{NOW} Done.", f"{NOW}{NOW}", *WRONG_CALLS):
        assert not allows(tokenizer, choice, text)
    single = chosen(tool_choice="required", parallel_tool_calls=False)
    assert allows(tokenizer, single, PARIS) and not allows(tokenizer, single, f"{PARIS}\n{NOW}")
    named = chosen(tool_choice=NAMED)
    assert allows(tokenizer, named, NOW)
    assert not allows(tokenizer, named, PARIS) and not allows(tokenizer, named, f"{NOW}\n{NOW}")


@pytest.mark.parametrize("tags", ["text", "added", "special"])
def test_calls_where_the_model_wants_to(tags: str) -> None:
    tokenizer = byte_tokenizer(tags)
    choice = chosen()
    texts = ["", "Hello\nthere, 2 < 3 <tool <tool_call", NOW, f"{NOW}\n{PARIS}", f"Wait <a>.\n{PARIS}"]
    tag_as_text = ["</tool_call>", call("get_weather", '{"city": "<tool_call>"}')]
    for text in texts + (tag_as_text if tags != "special" else []):
        assert allows(tokenizer, choice, text), text
    for text in (*WRONG_CALLS, f"Hello {WRONG_CALLS[0]}", f"{NOW} Done.", f"{NOW}\n{WRONG_CALLS[1]}"):
        assert not allows(tokenizer, choice, text), text
    assert not allows(tokenizer, choice, "<think>")
    spelled = [*b"<tool_call>\n"]
    constraint = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids).constraint(
        choice.structured_outputs(tokenizer)
    )
    letters = {tokenizer.token_text(token): token for token in range(256)}
    assert constraint.valid_prefix([letters[chr(byte)] for byte in [*spelled, *b"Hello"]]) == len(spelled)
    single = chosen(parallel_tool_calls=False)
    assert allows(tokenizer, single, f"So: {PARIS}") and not allows(tokenizer, single, f"{PARIS}\n{NOW}")


@pytest.mark.parametrize("tags", ["text", "added", "special"])
def test_a_model_that_knows_nothing_calls_correctly(tags: str) -> None:
    tokenizer = byte_tokenizer(tags)
    model = tiny_model(replace(CONFIG, vocab_size=264, max_position_embeddings=512))
    engine = Engine(model, EngineConfig(), eos_token_ids=tokenizer.eos_token_ids, tokenizer=tokenizer)
    params = SamplingParams(
        max_tokens=None,
        structured_outputs=chosen(tool_choice="required").structured_outputs(tokenizer),
        skip_special_tokens=False,
        logit_bias={256: 3.0, **dict.fromkeys(range(127, 256), -5.0)},
    )
    sequences = [engine.add([seed], replace(params, seed=seed))[0] for seed in range(40)]
    while engine.has_work:
        engine.step()
    ended = [sequence for sequence in sequences if sequence.finish_reason == "stop"]
    assert len(ended) > 10
    schemas = dict(chosen().functions)
    names = set()
    for sequence in ended:
        content, calls = parsed([sequence.text])
        assert content == "" and calls
        for name, arguments in calls:
            names.add(name)
            jsonschema.validate(json.loads(arguments), schemas[name])
    assert len(names) > 1


# The parser


def parsed(pieces: Sequence[str], truncated: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """Content, and names and arguments of calls, with their deltas put together as OpenAI's clients do."""
    parser = ToolCallParser()
    answers = [*map(parser.feed, pieces), parser.finish(truncated)]
    calls: list[dict[str, Any]] = []
    for _, deltas in answers:
        for delta in deltas:
            if delta["index"] == len(calls):
                assert delta["type"] == "function" and re.fullmatch("call_[0-9a-f]{24}", delta["id"])
                calls.append({**delta["function"]})
            else:
                assert delta.keys() == {"index", "function"} and delta["index"] == len(calls) - 1
                calls[-1]["arguments"] += delta["function"]["arguments"]
    return "".join(text for text, _ in answers), [(each["name"], each["arguments"]) for each in calls]


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[begin:end] for begin, end in pairwise(places)]


# Text without a whole tag, and without white space at its ends.
says = (
    st.text(st.sampled_from('<>/tol_ca ab\n{}"'), max_size=12).map(str.strip).filter(lambda t: "<tool_call>" not in t)
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.sampled_from(["</tool_call>", "<tool_call>", '"}', "\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
arguments_of = st.builds(
    lambda value, indent: json.dumps(value, indent=indent),
    st.dictionaries(st.text(max_size=4), values, max_size=3),
    st.sampled_from([None, 2]),
)
cuts_of = st.lists(st.integers(0, 500), max_size=30)


@given(
    says,
    st.sampled_from(["", "\n", " \n\n"]),
    st.lists(st.tuples(st.from_regex("[a-z_]{1,8}", fullmatch=True), arguments_of), max_size=3),
    cuts_of,
)
@example("a <tool_cal", "\n", [("now", "{}")], list(range(200)))
def test_any_cut_of_an_answer(said: str, space: str, calls: list[tuple[str, str]], cuts: list[int]) -> None:
    text = said + (space if calls else "") + "\n".join(call(*each) for each in calls)
    assert parsed(pieces_of(text, cuts)) == (said, calls)
    assert parsed(list(text)) == (said, calls)


@given(says, says, cuts_of, st.booleans())
def test_text_without_calls_is_content(first: str, second: str, cuts: list[int], truncated: bool) -> None:
    text = f"{first}\n {second}."
    assert parsed(pieces_of(text, cuts), truncated) == (text, [])


@given(cuts_of, st.integers(0, 400))
def test_a_truncated_answer_shows_no_part_of_a_tag(cuts: list[int], length: int) -> None:
    whole = f"So be it.\n{PARIS}\n{NOW}"
    content, calls = parsed(pieces_of(whole[:length], cuts), truncated=True)
    assert "So be it.".startswith(content) and len(content) >= min(length, 9) - 1
    complete = [("get_weather", '{"city": "Paris", "days": 3}'), ("now", "{}")]
    for (name, arguments), (right, all_arguments) in zip(calls, complete, strict=False):
        assert name == right and all_arguments.startswith(arguments)
    heads = [f'"{name}", "arguments": {{' for name, _ in complete]
    assert len(calls) == sum(whole.index(head) + len(head) <= length for head in heads)


def test_deltas_come_as_soon_as_they_can() -> None:
    parser = ToolCallParser()
    assert parser.feed("Let me see. ") == ("Let me see.", [])
    assert parser.feed("<b") == (" <b", [])
    assert parser.feed(">\n<tool_") == (">", [])
    assert parser.feed('call>\n{"name": "now", ') == ("", [])
    text, (delta,) = parser.feed('"arguments": {')[0], parser.feed("")[1] or [{}]
    assert text == "" and delta == {}
    assert parser.feed('"a": "</tool') == ("", [{"index": 0, "function": {"arguments": '"a": "</tool'}}])
    assert parser.feed('_call>"') == ("", [{"index": 0, "function": {"arguments": '_call>"'}}])
    assert parser.feed("}}\n</tool_call>\n") == ("", [{"index": 0, "function": {"arguments": "}"}}])
    assert parser.finish() == ("", [])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>[{"name": "f", "arguments": {}}, {"name": "g"}]</tool_call>', "", [("f", "{}"), ("g", "{}")]),
        ('<tool_call>{"name": "\\u0066", "arguments": {}}</tool_call>', "", [("f", "{}")]),
        ("a <tool_call>f(1)</tool_call> b", "a<tool_call>f(1)</tool_call> b", []),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        ("<tool_call>f(1)", "<tool_call>f(1)", []),
        (f"{NOW}\n done", "\n done", [("now", "{}")]),
        (f"{NOW} \n", "", [("now", "{}")]),
        (" \n", " \n", []),
    ],
)
def test_what_an_unconstrained_model_writes(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parsed([text]) == parsed(list(text)) == (content, calls)


# The prompt

EARLIER = [
    {"role": "user", "content": "How is Paris?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Orléans"}'},
            },
            {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "mild"},
    {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
    {"role": "assistant", "content": "Mild.", "tool_calls": None},
    {"role": "user", "content": "Thanks"},
]


def test_messages_for_a_template_without_tools() -> None:
    system, user, assistant, results, *rest = tool_messages(EARLIER, TOOLS, False)
    assert system["role"] == "system"
    listed = re.search(r"<tools>\n(.*)\n</tools>\n", system["content"], re.DOTALL)
    assert listed is not None and [json.loads(line) for line in listed[1].splitlines()] == TOOLS
    assert system["content"].endswith(
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )
    assert user == EARLIER[0]
    assert assistant == {"role": "assistant", "content": call("get_weather", '{"city": "Orléans"}') + "\n" + NOW}
    assert parsed([assistant["content"]]) == ("", [("get_weather", '{"city": "Orléans"}'), ("now", "{}")])
    assert results["role"] == "user" and results["content"] == (
        "<tool_response>\nmild\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    )
    assert rest == [{"role": "assistant", "content": "Mild."}, EARLIER[5]]
    said = [EARLIER[0], {**EARLIER[1], "content": "One moment."}]
    assert tool_messages(said, [], False)[1]["content"].startswith("One moment.\n<tool_call>\n")


def test_which_templates_support_tools() -> None:
    assert template_supports_tools("{% if tools %}{{ tools | tojson }}{% endif %}")
    assert not template_supports_tools("{{ messages[0].content }} mytools") and not template_supports_tools(None)


def test_the_system_message_keeps_its_own_words() -> None:
    messages = [{"role": "system", "content": "Be brief."}, EARLIER[0]]
    system, user = tool_messages(messages, TOOLS[2:], False)
    assert system["content"].startswith("Be brief.\n\n# Tools\n") and user == EARLIER[0]
    assert messages[0]["content"] == "Be brief."
    assert tool_messages(messages, [], False) == messages


def test_messages_for_a_template_with_tools() -> None:
    read = tool_messages(EARLIER, TOOLS, True)
    assert [message["role"] for message in read] == [message["role"] for message in EARLIER]
    assert read[1]["content"] == ""
    assert [each["function"]["arguments"] for each in read[1]["tool_calls"]] == [{"city": "Orléans"}, {}]
    assert EARLIER[1]["content"] is None and read[2:4] == EARLIER[2:4]
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments | tojson }};{% endfor %}{% endfor %}"
    )
    tokenizer = byte_tokenizer("text")
    tokenizer.chat_template = template
    assert tokenizer.apply_chat_template(read, tools=TOOLS) == 'get_weather{"city": "Orléans"};now{};'


@pytest.mark.parametrize(
    ("tool_calls", "message"),
    [
        (3, r"messages\[1\].tool_calls must be a list"),
        ([3], r"messages\[1\].tool_calls\[0\].function must be an object with name and arguments"),
        ([{"function": {"name": 1}}], r"messages\[1\].tool_calls\[0\].function must be"),
        ([{"function": {"name": "f", "arguments": "{"}}], r"tool_calls\[0\].function.arguments is not valid JSON: "),
        ([{"function": {"name": "f", "arguments": "[1]"}}], r"function.arguments must be the text of a JSON object"),
    ],
)
def test_what_is_wrong_with_earlier_calls(tool_calls: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tool_messages([EARLIER[0], {"role": "assistant", "tool_calls": tool_calls}], TOOLS, True)


# The embedded model


def test_the_embedded_tokenizer_writes_tags_as_text() -> None:
    tokenizer = Tokenizer.from_gguf(GGUFFile(smollm2_file()).metadata)
    assert not template_supports_tools(tokenizer.chat_template)
    prompt = tokenizer.apply_chat_template(tool_messages(EARLIER, TOOLS, False))
    assert prompt.startswith("<|im_start|>system\n# Tools\n") and prompt.count("<|im_start|>user\n<tool_response>") == 1
    assert allows(tokenizer, chosen(), f"Let me see.\n{PARIS}\n{NOW}")
    assert allows(tokenizer, chosen(tool_choice="required"), PARIS)
    assert not allows(tokenizer, chosen(), f"Let me see.\n{WRONG_CALLS[0]}")


@pytest.mark.slow
def test_the_embedded_model_calls_a_function() -> None:
    smollm2_file()
    answers = []
    for config in (None, {"method": "dflash"}):
        llm = LLM(EMBEDDED, config)
        messages = tool_messages([{"role": "user", "content": "What is the weather in Paris?"}], TOOLS[:1], False)
        for tool_choice, temperature in (("required", 0.0), ("required", 0.8), ("auto", 0.0)):
            choice = chosen(TOOLS[:1], tool_choice, parallel_tool_calls=False)
            structured = choice.structured_outputs(llm.tokenizer)
            params = SamplingParams(
                temperature=temperature,
                seed=1,
                max_tokens=100,
                structured_outputs=structured,
                skip_special_tokens=False,
            )
            output = llm.chat(messages, params)[0].outputs[0]
            content, calls = parsed([text for text, _ in output.pieces], output.finish_reason == "length")
            if tool_choice == "required":
                assert content == "" and output.finish_reason == "stop" and len(calls) == 1
            for name, arguments in calls:
                assert name == "get_weather"
                jsonschema.validate(json.loads(arguments), WEATHER)
            answers.append(output.token_ids)
    assert answers[:3] == answers[3:]
