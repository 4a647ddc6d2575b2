"""Training text written by the target itself: answers to prompts from a file, or to prompts it makes up."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import UserError
from foredraft.llm import LLM, Prompt, RequestOutput
from foredraft.sampling_params import SamplingParams
from foredraft.training.data import text_lines

AT_ONCE = 256
"""Conversations between two writes of a turn: a second turn waits for the first turns of its group."""


@dataclass(frozen=True)
class Conversation:
    """User turns to be answered one after the other; messages: what comes before them, a system message say."""

    source: str
    messages: tuple[Mapping[str, Any], ...]
    turns: tuple[str, ...]

    @property
    def key(self) -> str:
        content = json.dumps([self.messages, self.turns], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def read_prompts(file: Path) -> list[Conversation]:
    """Conversations from JSON lines (.gz too): ``turns``, ``prompt``, or ``messages`` with optional ``followups``."""
    conversations = []
    for number, line in enumerate(text_lines(file), start=1):
        if line.strip():
            try:
                conversations.append(_conversation(json.loads(line), file.stem))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise UserError(
                    f"{file}, line {number}: expected an object with `turns`, `prompt` or `messages` ({error!r})"
                ) from error
    if not conversations:
        raise UserError(f"{file} holds no prompts")
    return conversations


def _conversation(record: Mapping[str, Any], default_source: str) -> Conversation:
    source = str(record.get("source", default_source))
    if "messages" in record:
        *before, last = record["messages"]
        return Conversation(source, tuple(before), (last["content"], *record.get("followups", ())))
    turns = record["turns"] if "turns" in record else [record["prompt"]]
    if not turns or not all(isinstance(turn, str) for turn in turns):
        raise TypeError("turns must be strings")
    return Conversation(source, (), tuple(turns))


def self_written(llm: LLM, count: int, seed: int, max_tokens: int = 256) -> list[Conversation]:
    """Prompts that the target writes in the user's place, sampled after its chat template's opening.

    No instruction is needed: a chat model that is shown only the beginning of a user's message goes on as its
    training data did.
    """
    opening = _user_opening(llm)
    params = [
        SamplingParams(temperature=1.0, top_p=0.98, max_tokens=max_tokens, seed=seed + number)
        for number in range(count)
    ]
    prompt: Prompt = {"prompt_token_ids": llm.tokenizer.encode(opening, add_special_tokens=False)}
    written = {
        output.outputs[0].text.strip()
        for output in llm.generate([prompt] * count, params)
        if output.outputs[0].finish_reason == "stop"
    }
    return [Conversation("self-written", (), (text,)) for text in sorted(written) if text]


def _user_opening(llm: LLM) -> str:
    mark = "\N{OBJECT REPLACEMENT CHARACTER}foredraft\N{OBJECT REPLACEMENT CHARACTER}"
    rendered = llm.tokenizer.apply_chat_template([{"role": "user", "content": mark}], add_generation_prompt=False)
    opening, found, _ = rendered.partition(mark)
    if not found:
        raise UserError("this model's chat template does not show the user's message, so none can be written")
    return opening


def synthesize(
    llm: LLM,
    conversations: Sequence[Conversation],
    output: Path,
    temperatures: Sequence[float],
    max_tokens: int,
    seed: int,
    report: Callable[[int], None],
) -> int:
    """Answer every turn and append one JSON object per answer to ``output``; returns how many are new.

    Conversation i is answered at ``temperatures[i % len(temperatures)]``. What ``output`` already holds is not
    done again, and a line that an interruption cut short is dropped. ``report`` gets the tokens of each answer.
    """
    done = _finished_keys(output)
    todo = [
        (conversation, temperatures[number % len(temperatures)])
        for number, conversation in enumerate(conversations)
        if conversation.key not in done
    ]
    written = 0
    with output.open("a") as file:
        for begin in range(0, len(todo), AT_ONCE):
            for record in _answers(llm, todo[begin : begin + AT_ONCE], max_tokens, seed):
                file.write(json.dumps(record) + "\n")
                file.flush()
                written += 1
                report(len(record["token_ids"]))
    return written


def _answers(
    llm: LLM, group: Sequence[tuple[Conversation, float]], max_tokens: int, seed: int
) -> Iterator[dict[str, Any]]:
    histories: list[list[Mapping[str, Any]]] = [list(conversation.messages) for conversation, _ in group]
    alive = list(range(len(group)))
    turn = 0
    while alive := [place for place in alive if turn < len(group[place][0].turns)]:
        for place in alive:
            histories[place].append({"role": "user", "content": group[place][0].turns[turn]})
        prompts = {place: llm.tokenizer.encode_chat(histories[place]) for place in alive}
        alive = [place for place in alive if len(prompts[place]) + max_tokens <= llm.engine.max_model_len]
        params = [
            SamplingParams(temperature=group[place][1], max_tokens=max_tokens, seed=seed + place) for place in alive
        ]
        for number, result in _results(llm, [{"prompt_token_ids": prompts[place]} for place in alive], params):
            place = alive[number]
            conversation, temperature = group[place]
            answer = result.outputs[0]
            histories[place].append({"role": "assistant", "content": answer.text})
            yield {
                "key": conversation.key,
                "last": turn + 1 == len(conversation.turns),
                "source": conversation.source,
                "temperature": temperature,
                "finish": answer.finish_reason,
                "messages": list(histories[place]),
                "token_ids": answer.token_ids,
            }
        turn += 1


def _results(
    llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
) -> Iterator[tuple[int, RequestOutput]]:
    for update in llm.stream(prompts, params):
        if update.output:
            yield update.request_id, update.output


def _finished_keys(output: Path) -> set[str]:
    """Conversations that ``output`` answers in full; lines of others are taken out of the file."""
    if not output.exists():
        return set()
    kept: dict[str, list[str]] = {}
    complete: set[str] = set()
    lines = output.read_text().splitlines()
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        kept.setdefault(record["key"], []).append(line)
        if record["last"]:
            complete.add(record["key"])
    _rewrite(output, (line for key in kept if key in complete for line in kept[key]))
    return complete


def _rewrite(output: Path, lines: Iterable[str]) -> None:
    temporary = output.with_suffix(output.suffix + ".tmp")
    temporary.write_text("".join(f"{line}\n" for line in lines))
    temporary.replace(output)
