"""Synthesis against a scripted model: what is written, and that an interruption loses and repeats nothing."""

import gzip
import json
from types import SimpleNamespace

import pytest

from foredraft.errors import UserError
from foredraft.training.synthesis import Conversation, read_prompts, self_written, synthesize


class ScriptedLLM:
    """Answers a conversation of k messages with "answer k"; fails after ``limit`` answers."""

    engine = SimpleNamespace(max_model_len=100)

    def __init__(self, limit=None):
        self.limit = limit
        self.asked = []
        self.tokenizer = SimpleNamespace(
            encode_chat=lambda messages: [len(messages)],
            encode=lambda text, add_special_tokens: [len(text)],
            apply_chat_template=lambda messages, add_generation_prompt: f"<user>{messages[0]['content']}<end>",
        )

    def stream(self, prompts, params):
        for number, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            if self.limit is not None and len(self.asked) == self.limit:
                raise KeyboardInterrupt
            self.asked.append((prompt["prompt_token_ids"], own.temperature, own.seed))
            yield SimpleNamespace(request_id=number, output=None)
            yield SimpleNamespace(request_id=number, output=self._output(prompt["prompt_token_ids"][0]))

    def generate(self, prompts, params):
        return [update.output for update in self.stream(prompts, params) if update.output]

    @staticmethod
    def _output(length):
        answer = SimpleNamespace(text=f"answer {length}", token_ids=[length, 2], finish_reason="stop")
        return SimpleNamespace(outputs=[answer])


CONVERSATIONS = [
    Conversation("a", (), ("one",)),
    Conversation("b", (), ("two", "and then")),
    Conversation("c", ({"role": "system", "content": "s"},), ("three",)),
]


def run(llm, output, conversations=CONVERSATIONS):
    return synthesize(llm, conversations, output, [0.0, 0.8], 8, 0, lambda _: None)


def records(output):
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_every_turn_is_answered_with_what_came_before(tmp_path):
    output = tmp_path / "out.jsonl"
    assert run(ScriptedLLM(), output) == 4
    written = {(entry["source"], len(entry["messages"])): entry for entry in records(output)}
    assert set(written) == {("a", 2), ("b", 2), ("b", 4), ("c", 3)}
    assert [m["content"] for m in written["b", 4]["messages"]] == ["two", "answer 1", "and then", "answer 3"]
    assert written["b", 4]["temperature"] == 0.8 and written["c", 3]["temperature"] == 0.0
    assert written["c", 3]["token_ids"] == [2, 2]


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
def test_interrupted_synthesis_ends_with_the_same_records(tmp_path, limit):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    run(ScriptedLLM(), whole)
    with pytest.raises(KeyboardInterrupt):
        run(ScriptedLLM(limit), parts)
    with parts.open("a") as file:
        file.write('{"cut short')
    run(ScriptedLLM(), parts)
    order = lambda entry: (entry["key"], len(entry["messages"]))  # noqa: E731
    assert sorted(records(parts), key=order) == sorted(records(whole), key=order)
    assert run(ScriptedLLM(), parts) == 0


def test_prompt_files(tmp_path):
    file = tmp_path / "mine.jsonl"
    lines = [
        {"turns": ["x", "y"]},
        {"prompt": "p", "source": "given"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "followups": ["v"]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_prompts(file) == [
        Conversation("mine", (), ("x", "y")),
        Conversation("given", (), ("p",)),
        Conversation("mine", ({"role": "system", "content": "s"},), ("u", "v")),
    ]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "5", '{"other": 1}', '{"turns": []}', '{"turns": [3]}', '{"messages": []}']
)
def test_bad_prompt_files_are_refused(tmp_path, content):
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    with pytest.raises(UserError, match=r"bad\.jsonl"):
        read_prompts(file)


def test_self_written_prompts_are_sampled_after_the_opening():
    llm = ScriptedLLM()
    written = self_written(llm, 3, seed=5)
    assert [asked[0] for asked in llm.asked] == [[len("<user>")]] * 3
    assert [asked[2] for asked in llm.asked] == [5, 6, 7]
    assert [c.turns for c in written] == [(f"answer {len('<user>')}",)]  # one, because all three are the same


def test_prompts_may_be_compressed_and_hold_any_character(tmp_path):
    file = tmp_path / "prompts.jsonl.gz"
    # U+2028 ends a line for str.splitlines, not in JSON lines.
    with gzip.open(file, "wt", encoding="utf-8") as out:
        out.write(json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False) + "\n")
    assert [conversation.turns for conversation in read_prompts(file)] == [("a\u2028b",)]
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(file.read_bytes()[:12] + b"\xff" * 20)
    with pytest.raises(UserError, match="cannot be read"):
        read_prompts(broken)
