"""Function tools of OpenAI's chat API, in Hermes' form, which Qwen and others were trained on.

The model calls a function by writing, in the text of its answer::

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from foredraft.engine.grammar import json_rule, schema_problem
from foredraft.errors import UserError
from foredraft.sampling_params import MAX_GRAMMAR_BYTES, StructuredOutputsParams
from foredraft.tokenizer import Tokenizer

OPEN, CLOSE = "<tool_call>", "</tool_call>"

Delta = dict[str, Any]
"""An entry of `choices[].delta.tool_calls`: index, and id, type, name of the function, or more of its arguments."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolChoice:
    """The tools of a request, and which calls the model may make.

    tools: as the request has them, for the prompt. functions: of those that may be called, name and JSON schema of the
    arguments. required: whether the answer is calls alone. parallel: whether it may have several.
    """

    tools: tuple[Mapping[str, Any], ...]
    functions: tuple[tuple[str, Mapping[str, Any]], ...]
    required: bool
    parallel: bool

    def structured_outputs(self, tokenizer: Tokenizer) -> StructuredOutputsParams:
        """What makes every call valid: one of these functions, with arguments that follow its schema.

        Unless calls are required, any text may come before them. Where a tag is a special token, it is written as
        such: sample with `skip_special_tokens` false, so that `ToolCallParser` sees it; no other special token can
        come. Raises UserError if the schemas are too long together.
        """
        begin, end = (_special_token(tokenizer, tag) for tag in (OPEN, CLOSE))
        opening, closing = begin or json.dumps(OPEN), end or json.dumps(CLOSE)
        more = f' ("\\n" {opening} call)*' if self.parallel else ""
        rules = [f'call: "\\n" ({" | ".join(f"call_{index}" for index in range(len(self.functions)))}) "\\n" {closing}']
        if self.required:
            rules.append(f"start: {opening} call{more}")
        else:
            # Text is all there is until a tag is complete, as a special token or spelled, and then a call must follow.
            lead = f"(lead | TEXT {begin})" if begin else "lead"
            rules.append(f"start: TEXT | {lead} call{more}")
            rules += [r"TEXT: /(.|\n)*/", rf"lead[lazy]: /(.|\n)*{OPEN}/"]
        for index, (name, parameters) in enumerate(self.functions):
            head = json.dumps(f'{{"name": "{name}", "arguments": ')
            rules.append(f'call_{index}: {head} {json_rule(parameters)} "}}"')
        grammar = "\n".join(rules)
        size = len(grammar.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise UserError(
                f"the parameters of the tools have {size} bytes together, expected at most {MAX_GRAMMAR_BYTES}"
            )
        return StructuredOutputsParams(grammar=grammar)


def choice_of(tools: Any, tool_choice: Any = None, parallel_tool_calls: bool = True) -> ToolChoice | None:
    """What the fields of a request mean; None where the model shall call nothing.

    Raises UserError naming the field, such as `tools[0].function.name`, and what was expected.
    """
    functions = _functions(tools)
    if tool_choice is None:
        tool_choice = "auto"
    name = _chosen(tool_choice)
    if tool_choice == "none" or (tool_choice == "auto" and not functions):
        return None
    if not functions:
        raise UserError(f"tool_choice is {tool_choice!r}, but the request has no tools")
    if name is None:
        return ToolChoice(tuple(tools), tuple(functions.items()), tool_choice == "required", parallel_tool_calls)
    if name not in functions:
        raise UserError(f"tool_choice names the function {name!r}; those in tools are {', '.join(functions)}")
    return ToolChoice(tuple(tools), ((name, functions[name]),), required=True, parallel=False)


class ToolCallParser:
    """Takes the text of an answer piece by piece, and tells content and calls apart.

    No part of a tag is ever content, nor is white space before a call. What follows a tag but is no call, which only
    an unconstrained model writes, is content, tags included.
    """

    def __init__(self) -> None:
        self._state: Literal["content", "header", "arguments", "end"] = "content"
        self._held = ""
        self._depth = 0
        self._in_string = self._escaped = False
        self._count = 0
        self._content = ""
        self._calls: list[Delta] = []

    def feed(self, piece: str) -> tuple[str, list[Delta]]:
        """Content and parts of calls that are new; the arguments of a call come as they are written."""
        self._held += piece
        steps = {
            "content": self._read_content,
            "header": self._read_header,
            "arguments": self._read_arguments,
            "end": self._read_end,
        }
        while steps[self._state]():
            pass
        return self._new()

    def finish(self, truncated: bool = False) -> tuple[str, list[Delta]]:
        """What was held back: the answer has ended. truncated: for its length, so that what may begin a tag is none."""
        if self._state == "content":
            text = self._held[: _settled(self._held)] if truncated else self._held
            # White space after a call is no content either.
            self._content += text if text.strip() or not self._count else ""
        elif self._state == "header" and not truncated:
            self._content += OPEN + self._held
        self._held = ""
        return self._new()

    def _new(self) -> tuple[str, list[Delta]]:
        new = self._content, self._calls
        self._content, self._calls = "", []
        return new

    def _read_content(self) -> bool:
        before, tag, rest = self._held.partition(OPEN)
        if tag:
            self._content += before.rstrip()
            self._held, self._state = rest, "header"
            return True
        settled = _settled(self._held)
        self._content += self._held[:settled]
        self._held = self._held[settled:]
        return False

    def _read_header(self) -> bool:
        if header := _HEADER.match(self._held):
            self._call(json.loads(header[1]))
            self._held, self._state = self._held[header.end() :], "arguments"
            return True
        body, tag, rest = self._held.partition(CLOSE)
        if not tag:
            return False
        calls = _calls(body)
        for name, arguments in calls:
            self._call(name)
            self._argue(arguments)
        if not calls:
            self._content += OPEN + body + CLOSE
        self._held, self._state = rest, "content"
        return True

    def _read_arguments(self) -> bool:
        """Up to the end of the JSON object: a tag inside a string of it means nothing."""
        for index, character in enumerate(self._held):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self._argue(self._held[: index + 1])
                    self._held, self._state = self._held[index + 1 :], "end"
                    return True
        self._argue(self._held)
        self._held = ""
        return False

    def _read_end(self) -> bool:
        _, tag, rest = self._held.partition(CLOSE)
        if tag:
            self._held, self._state = rest, "content"
        return bool(tag)

    def _call(self, name: str) -> None:
        function = {"name": name, "arguments": ""}
        call_id = f"call_{secrets.token_hex(12)}"
        self._calls.append({"index": self._count, "id": call_id, "type": "function", "function": function})
        self._count += 1

    def _argue(self, text: str) -> None:
        if text:
            self._calls.append({"index": self._count - 1, "function": {"arguments": text}})


def template_supports_tools(chat_template: str | None) -> bool:
    """Whether a chat template does something with `tools`."""
    return chat_template is not None and re.search(r"\btools\b", chat_template) is not None


def tool_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], template_supports_tools: bool
) -> list[dict[str, Any]]:
    """Messages of the API, whose content is text or None, as a chat template takes them.

    For a template that supports tools, the arguments of earlier calls become objects, as templates expect them. For
    any other, the system message lists the tools, in Hermes' words, and calls and their results become text.
    Raises UserError naming the field, such as `messages[2].tool_calls[0].function.arguments`.
    """
    read = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if template_supports_tools:
        return read
    plain: list[dict[str, Any]] = []
    for index, message in enumerate(read):
        if message.get("role") == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if index and read[index - 1].get("role") == "tool":
                plain[-1]["content"] += "\n" + text
            else:
                plain.append({"role": "user", "content": text})
            continue
        calls = message.pop("tool_calls", None) or []
        texts = [message["content"]] if message["content"] or not calls else []
        plain.append({**message, "content": "\n".join([*texts, *(_call_text(call["function"]) for call in calls)])})
    if tools:
        listed = _SYSTEM.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if plain and plain[0].get("role") == "system":
            plain[0]["content"] += "\n\n" + listed
        else:
            plain.insert(0, {"role": "system", "content": listed})
    return plain


_SYSTEM = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a JSON object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\["\\/bfnrt])*")\s*,\s*"arguments"\s*:\s*(?=\{)')


def _functions(tools: Any) -> dict[str, Mapping[str, Any]]:
    """The schema of each function's arguments, by name."""
    if tools is None:
        return {}
    if not isinstance(tools, list):
        raise UserError(f"tools is a {type(tools).__name__}, expected a list")
    functions: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise UserError(f'{path} must be an object of type "function"')
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise UserError(f"{path}.function must be an object with name, description and parameters")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UserError(f"{path}.function.name is {name!r}, expected 1 to 64 letters, digits, _ or -")
        if name in functions:
            raise UserError(f"{path}.function.name is {name!r}, which another function has already")
        if not isinstance(function.get("description"), str | None):
            raise UserError(f"{path}.function.description is {function['description']!r}, expected a string")
        functions[name] = _parameters(function.get("parameters"), f"{path}.function.parameters")
    return functions


def _parameters(parameters: Any, path: str) -> Mapping[str, Any]:
    if parameters is None:
        return _NO_PARAMETERS
    if not isinstance(parameters, Mapping):
        raise UserError(f"{path} is a {type(parameters).__name__}, expected a JSON schema")
    schema = {"type": "object", **parameters}
    if schema["type"] != "object":
        raise UserError(f'{path}.type is {schema["type"]!r}, expected "object"')
    # Also that it is JSON, and not too long.
    try:
        StructuredOutputsParams(json=schema)
    except UserError as error:
        raise UserError(str(error).replace("structured_outputs.json", path)) from error
    if (problem := schema_problem(schema)) is not None:
        raise UserError(f"{path} cannot be used: {problem}")
    return schema


def _chosen(tool_choice: Any) -> str | None:
    """The name of the function to call, None for none, auto and required."""
    if tool_choice in ("none", "auto", "required"):
        return None
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function":
        function = tool_choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return name
    raise UserError(
        f"tool_choice is {tool_choice!r}, expected none, auto, required "
        'or {"type": "function", "function": {"name": ...}}'
    )


def _special_token(tokenizer: Tokenizer, tag: str) -> str | None:
    """A tag as Lark names a special token, or None where it is ordinary text."""
    token_ids = tokenizer.encode(tag, add_special_tokens=False)
    return f"<[{token_ids[0]}]>" if len(token_ids) == 1 and token_ids[0] in tokenizer.special_ids else None


def _settled(text: str) -> int:
    """How many characters cannot belong to an opening tag that is to come, or to white space before it."""
    begun = max((length for length in range(1, len(OPEN)) if text.endswith(OPEN[:length])), default=0)
    return len(text[: len(text) - begun].rstrip())


def _calls(body: str) -> list[tuple[str, str]]:
    """Name and arguments of the calls in a text between tags, whatever their order and form; none if it has others."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return []
    calls = []
    for call in found if isinstance(found, list) else [found]:
        name, arguments = (call.get("name"), call.get("arguments", {})) if isinstance(call, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(arguments, dict | str):
            return []
        calls.append((name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)))
    return calls


def _message(message: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A copy with text for content and objects for the arguments of calls."""
    read = {**message, "content": message.get("content") or ""}
    if read.get("tool_calls") is None:
        return read
    if not isinstance(read["tool_calls"], list):
        raise UserError(f"{path}.tool_calls must be a list")
    read["tool_calls"] = [_earlier_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(read["tool_calls"])]
    return read


def _earlier_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"{path}.function must be an object with name and arguments")
    arguments = function.get("arguments") or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}.function.arguments is not valid JSON: {error}") from error
    if not isinstance(arguments, Mapping):
        raise UserError(f"{path}.function.arguments must be the text of a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}


def _call_text(function: Mapping[str, Any]) -> str:
    body = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    return f"{OPEN}\n{body}\n{CLOSE}"
