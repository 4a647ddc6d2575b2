"""Responses of the OpenAI HTTP API from what the engine's thread tells."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from foredraft.engine.sampler import TokenLogprobs
from foredraft.engine.sequence import RoundTrace
from foredraft.engine.sequence import Sequence as Running
from foredraft.server.runner import Update
from foredraft.server.tools import ToolCallParser
from foredraft.tokenizer import Tokenizer

Detail = Literal["none", "summary", "detailed"]


@dataclass
class Choice:
    """One sequence of a request. number: the index of the choice.

    text: what it has said so far, without tool calls. tokens: how many have been told of. finished: whether the end has
    been told of; the sequence itself may be further, since the engine's thread does not wait.
    """

    number: int
    prompt: int
    prompt_text: str = ""
    text: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    sequence: Running | None = None
    tokens: int = 0
    finished: bool = False
    parser: ToolCallParser | None = None

    @property
    def finish_reason(self) -> str | None:
        if self.sequence is None or not self.finished:
            return None
        if self.tool_calls and self.sequence.finish_reason == "stop":
            return "tool_calls"
        return self.sequence.finish_reason


@dataclass
class Answer:
    """A request's response in the making.

    n: sequences of each prompt. detail: of what speculation did, see ``speculation_of``. trace: whether rounds are
    told. chat: chat completions, otherwise completions.
    """

    chat: bool
    model: str
    tokenizer: Tokenizer
    prompts: Sequence[Sequence[int]]
    n: int
    logprobs: int | None
    detail: Detail
    most_drafts: int
    trace: bool
    tools: bool = False
    echo: bool = False
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    choices: list[Choice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(16)}"
        self.choices = [
            Choice(
                number,
                number // self.n,
                self.tokenizer.decode(self.prompts[number // self.n]) if self.echo else "",
                parser=ToolCallParser() if self.tools else None,
            )
            for number in range(len(self.prompts) * self.n)
        ]

    def take(self, update: Update) -> dict[str, Any]:
        """Take in an update; the choice's part of the chunk that tells of it."""
        choice = self.choices[update.prompt * self.n + update.index]
        sequence = update.sequence
        said = update.new.text
        calls: list[dict[str, Any]] = []
        if choice.parser is not None:
            said, calls = choice.parser.feed(said)
            if update.finished:
                rest, more = choice.parser.finish(truncated=sequence.finish_reason != "stop")
                said, calls = said + rest, calls + more
        first = not choice.text and choice.sequence is None
        begin = len(choice.prompt_text) + len(choice.text)
        choice.text += said
        choice.sequence, choice.finished = sequence, update.finished
        choice.tokens += len(update.new.token_ids)
        _add_calls(choice.tool_calls, calls)
        told = None
        if self.logprobs is not None:
            end = update.logprobs_from + len(update.new.token_ids)
            told = self._logprobs(sequence.logprobs[update.logprobs_from : end], begin)
            choice.logprobs.append(told)
        part: dict[str, Any] = {"index": choice.number, "logprobs": told, "finish_reason": choice.finish_reason}
        if self.chat:
            part["delta"] = {"content": said} if said or not calls else {}
            if calls:
                part["delta"]["tool_calls"] = calls
        else:
            part["text"] = choice.prompt_text + said if first else said
        if update.finished:
            part["stop_reason"] = sequence.stop_reason
        if self.trace:
            part["rounds"] = self._rounds(update)
        return part

    def opening(self) -> list[dict[str, Any]]:
        """The first chunk of a chat stream."""
        return [
            {
                "index": choice.number,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            for choice in self.choices
        ]

    def chunk(self, parts: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._head(kind), "choices": list(parts), **more}

    def whole(self) -> dict[str, Any]:
        """The response that is not streamed."""
        kind = "chat.completion" if self.chat else "text_completion"
        found = {**self._head(kind), "choices": [self._whole_choice(choice) for choice in self.choices]}
        return {**found, "usage": self.usage(), **self.metrics()}

    def usage(self) -> dict[str, Any]:
        """Tokens so far; a prompt counts once, however many sequences it has."""
        prompt = sum(map(len, self.prompts))
        completion = sum(choice.tokens for choice in self.choices)
        first = {choice.prompt: choice.sequence for choice in reversed(self.choices) if choice.sequence is not None}
        cached = sum(min(sequence.reused, sequence.prompt_length) for sequence in first.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def metrics(self) -> dict[str, Any]:
        """vLLM's ``metrics``, for requests of a single sequence."""
        if self.detail == "none" or len(self.choices) > 1 or self.choices[0].sequence is None:
            return {}
        rounds = self.choices[0].sequence.rounds or []
        return {"metrics": {"speculative_decoding": speculation_of(rounds, self.most_drafts, self.detail)}}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        sequence = choice.sequence
        assert sequence is not None
        found: dict[str, Any] = {"index": choice.number, "finish_reason": choice.finish_reason}
        found["stop_reason"] = sequence.stop_reason
        found["logprobs"] = self._joined(choice.logprobs) if self.logprobs is not None else None
        if not self.chat:
            return {**found, "text": choice.prompt_text + choice.text}
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.tool_calls:
            message["content"] = choice.text or None
            message["tool_calls"] = choice.tool_calls
        return {**found, "message": message}

    def _joined(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        keys = parts[0] if parts else ()
        return {key: [entry for part in parts for entry in part[key]] for key in keys}

    def _logprobs(self, entries: Sequence[TokenLogprobs], begin: int) -> dict[str, Any]:
        """begin: where the text of these tokens begins, for completions."""
        if self.chat:
            return {"content": [self._chat_logprobs(entry) for entry in entries]}
        tokens = [self._token(entry.token_id) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(begin)
            begin += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{self._token(token): logprob for token, logprob in entry.top} for entry in entries],
            "text_offset": offsets,
        }

    def _chat_logprobs(self, entry: TokenLogprobs) -> dict[str, Any]:
        own = [self._with_bytes(token, logprob) for token, logprob in entry.top]
        return {**self._with_bytes(entry.token_id, entry.logprob), "top_logprobs": own}

    def _with_bytes(self, token_id: int, logprob: float) -> dict[str, Any]:
        written = self.tokenizer.token_bytes(token_id)
        return {
            "token": self._token(token_id),
            "logprob": logprob,
            "bytes": None if written is None else list(written),
        }

    def _token(self, token_id: int) -> str:
        return self.tokenizer.token_text(token_id)

    def _rounds(self, update: Update) -> list[dict[str, Any]]:
        """Each round's text, as far as no stop string can take it back, and its draft tokens that were not kept."""
        told: list[dict[str, Any]] = [
            {
                "pieces": [],
                "committed": entry.committed,
                "drafted": len(entry.draft),
                "accepted": entry.accepted,
                "rejected": [self._token(token) for token in entry.draft[entry.accepted :]],
            }
            for entry in update.rounds
        ]
        if told:
            # A round is told of as soon as it is over.
            told[-1]["pieces"] = [list(piece) for piece in update.new.pieces]
        return told


def speculation_of(rounds: Sequence[RoundTrace], most: int, detail: Detail) -> dict[str, Any]:
    """vLLM's ``metrics.speculative_decoding``: of the rounds that verified a proposal.

    most: N. detail: with ``detailed`` every round is told as well.
    """
    drafted = [len(entry.draft) for entry in rounds if entry.draft]
    accepted = [entry.accepted for entry in rounds if entry.draft]
    histogram = [0] * (most + 1)
    for count in accepted:
        histogram[count] += 1
    found: dict[str, Any] = {
        "mean_acceptance_length": 1 + sum(accepted) / len(accepted) if accepted else 1.0,
        "draft_acceptance_rate": sum(accepted) / sum(drafted) if drafted else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": len(drafted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": most,
    }
    if detail == "detailed":
        found |= {"per_step_accepted": accepted, "per_step_drafted": drafted}
    return found


def _add_calls(calls: list[dict[str, Any]], deltas: Sequence[dict[str, Any]]) -> None:
    """Put streamed parts of tool calls together."""
    for delta in deltas:
        if delta["index"] == len(calls):
            calls.append({"id": delta["id"], "type": "function", "function": {"name": "", "arguments": ""}})
        function = calls[delta["index"]]["function"]
        for name, text in delta.get("function", {}).items():
            function[name] += text
