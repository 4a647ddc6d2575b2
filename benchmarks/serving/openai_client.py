"""The `openai` package, unmodified, against a running server: chat, streaming, tools, JSON schema, completions.

foredraft serve smollm2-135m &
pip install openai && python benchmarks/serving/openai_client.py http://127.0.0.1:8000/v1
"""

import json
import sys

from openai import BadRequestError, OpenAI

client = OpenAI(base_url=sys.argv[1], api_key="none")
MODEL = client.models.list().data[0].id
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def main() -> None:
    plain = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=40)
    text = plain.choices[0].message.content
    assert plain.usage is not None
    print("chat:", repr(text), plain.usage.completion_tokens, "tokens")

    stream = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces, usage = [], None
    for chunk in stream:
        usage = chunk.usage or usage
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(pieces) == text and usage == plain.usage
    print("stream: the same text in", len(pieces), "pieces, the same usage")

    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        called = client.chat.completions.create(
            model=MODEL, messages=QUESTION, tools=[TOOL], tool_choice=choice, temperature=0, max_tokens=100
        )
        calls = called.choices[0].message.tool_calls or []
        arguments = [json.loads(call.function.arguments) for call in calls]
        assert calls and all(own.keys() == {"city", "unit"} for own in arguments)
        print("tools:", calls[0].function.name, arguments[0], called.choices[0].finish_reason)

    formatted = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe Ada Lovelace as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}},
        temperature=0,
        max_tokens=60,
    )
    person = json.loads(formatted.choices[0].message.content or "")
    assert person.keys() == {"name", "age"} and isinstance(person["age"], int)
    print("json_schema:", person)

    scored = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0.8, seed=1, n=2, max_tokens=8, logprobs=True, top_logprobs=2
    )
    assert len(scored.choices) == 2 and scored.choices[0].logprobs is not None
    print("n, logprobs:", [choice.message.content for choice in scored.choices])

    completed = client.completions.create(model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=5)
    print("completions:", repr(completed.choices[0].text))
    try:
        client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body={"no_such_field": 1})
    except BadRequestError as error:
        print("refused:", error.body)


if __name__ == "__main__":
    main()
