"""A drafter that tests script, and plain decoding as its definition has it: one whole pass for every token."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from foredraft.drafters.base import DraftRequest, Proposal, Stop
from foredraft.drafters.calibration import Calibration
from foredraft.engine.costs import CostCurve, DraftCost, FixedCosts
from foredraft.engine.sampler import History, TokenLogprobs, sample_rows, token_logprobs
from foredraft.models.batch import Batch, flat_batch
from foredraft.models.loading import Target
from foredraft.sampling_params import SamplingParams

Script = Callable[[list[int], int], Sequence[int]]
"""From the tokens so far, anchor included, and the number asked for to what is proposed."""


class ScriptedDrafter:
    """Proposes what ``script`` says, and checks that the engine keeps the drafter's contract on the way.

    confidences: None, or a seed for made-up ones, with which it asks whether to stop, token by token.
    """

    taps = (1, 0)
    max_tokens = 8
    default_tokens = 3
    calibration: Calibration | None = None

    def __init__(self, script: Script, confidences: int | None = None) -> None:
        self._script = script
        self._rng = None if confidences is None else random.Random(confidences)
        self.seen: dict[int, list[int]] = {}
        self.features: dict[int, list[Tensor]] = {}
        self.finished: list[tuple[list[int], list[Tensor]]] = []
        self.asked: list[int] = []

    def observe(self, batch: Batch, taps: Tensor | None, accepted: Sequence[int]) -> None:
        assert taps is not None and len(taps) == len(batch.token_ids) == sum(batch.counts)
        rows, features = batch.token_ids.split(list(batch.counts)), taps.split(list(batch.counts))
        for slot, start, own, feature, keep in zip(batch.slots, batch.starts, rows, features, accepted, strict=True):
            assert 0 <= keep <= len(own)
            if not keep and slot not in self.seen:
                continue  # Not followed.
            seen = self.seen.setdefault(slot, [])
            assert len(seen) == start
            seen.extend(own[:keep].tolist())
            self.features.setdefault(slot, []).extend(feature[:keep])

    def propose(self, requests: Sequence[DraftRequest], max_tokens: int, stop: Stop | None = None) -> list[Proposal]:
        assert requests and 1 <= max_tokens <= self.max_tokens
        self.asked.append(max_tokens)
        for request in requests:
            assert len(self.seen[request.slot]) == request.position
        return [
            self._proposal(index, self._script([*self.seen[request.slot], request.anchor], max_tokens), stop)
            for index, request in enumerate(requests)
        ]

    def _proposal(self, index: int, tokens: Sequence[int], stop: Stop | None) -> Proposal:
        if self._rng is None:
            return Proposal(tuple(tokens))
        confidences: list[float] = []
        for k in range(1, len(tokens) + 1):
            confidences.append(self._rng.choice([0.0, 0.2, 0.5, 0.9, 1.0]))
            if stop is not None and k <= self.max_tokens and stop(index, confidences[-1], k):
                break
        return Proposal(tuple(tokens[: len(confidences)]), confidences=tuple(confidences))

    def release(self, slot: int) -> None:
        if slot in self.seen:
            self.finished.append((self.seen.pop(slot), self.features.pop(slot, [])))


KINDS = ("perfect", "garbage", "half", "empty", "long", "stop")


def hostile(
    futures: Sequence[Sequence[int]], kinds: Sequence[str], vocab_size: int, stops: Sequence[int], seed: int
) -> Script:
    """Proposals of the given kinds in turn. ``futures``: whole sequences, prompt included, as they are to come out."""
    rng = random.Random(seed)
    turn = iter(range(10**9))

    def script(tokens: list[int], count: int) -> Sequence[int]:
        future = next((f for f in futures if list(f[: len(tokens)]) == tokens), [])
        right = list(future[len(tokens) : len(tokens) + count])
        wrong = rng.choices(range(vocab_size), k=count)
        cut = rng.randint(0, len(right))
        match kinds[next(turn) % len(kinds)]:
            case "perfect":
                return right
            case "garbage":
                return wrong
            case "half":
                return (right[:cut] + wrong)[:count]
            case "empty":
                return []
            case "long":
                return list(future[len(tokens) :]) + wrong + wrong
            case _:
                return [*right[:cut], rng.choice(list(stops)), *wrong]

    return script


@st.composite
def some_costs(draw: st.DrawFn) -> FixedCosts:
    """Of machines on which drafting pays always, never, or now and then."""
    curve = CostCurve.through({rows: draw(st.floats(0.1, 3)) for rows in (1, 2, 4, 8, 40)})
    return FixedCosts(curve, DraftCost(*(draw(st.sampled_from([0.0, 0.01, 0.3])) for _ in range(4))))


@dataclass(frozen=True)
class Plain:
    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs]


class PlainDecoder:
    """Decoding without caches, batches or incremental text; passes over the same tokens are remembered."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._logits: dict[tuple[int, ...], Tensor] = {}

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[1, V] after ``tokens``."""
        key = tuple(tokens)
        if key not in self._logits:
            model = self._target.model
            with torch.inference_mode():
                batch = flat_batch([tokens], [0], [0], [1])
                self._logits[key] = model.forward(batch, model.new_cache()).logits
        return self._logits[key]

    def __call__(self, prompt: Sequence[int], params: SamplingParams, seed: int, max_len: int) -> Plain:
        tokenizer = self._target.tokenizer
        own_stops = list(params.stop_token_ids or ())
        stop_ids = own_stops + ([] if params.ignore_eos else list(tokenizer.eos_token_ids))
        limit = min(max_len - len(prompt), params.max_tokens or max_len)
        output: list[int] = []
        reports: list[TokenLogprobs] = []
        while True:
            logits = self.logits([*prompt, *output])
            history = History.from_prompt(prompt)
            history.commit(output)
            position = len(prompt) + len(output) - 1
            token = sample_rows(logits, params, history, [], position, seed, stop_ids)[0]
            if params.logprobs is not None:
                reports += token_logprobs(logits, [token], params.logprobs)
            before = tokenizer.decode(output, params.skip_special_tokens).rstrip("\ufffd")
            output.append(token)
            shown = output[:-1] if token in stop_ids and not params.include_stop_str_in_output else output
            text = tokenizer.decode(shown, params.skip_special_tokens)
            # A stop string counts when the newest token completes it; the first one in the text wins.
            hits = [
                (at, order)
                for order, stop in enumerate(params.stop or ())
                for at in range(len(text))
                if text.startswith(stop, at) and at + len(stop) > len(before)
            ]
            if hits and len(output) > params.min_tokens:
                at, order = min(hits)
                stop = list(params.stop or ())[order]
                kept = at + len(stop) if params.include_stop_str_in_output else at
                return Plain(output, text[:kept], "stop", stop, reports)
            if token in stop_ids:
                return Plain(output, text, "stop", token if token in own_stops else None, reports)
            if len(output) == limit:
                return Plain(output, text, "length", None, reports)
