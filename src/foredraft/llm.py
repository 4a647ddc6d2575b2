"""The offline API, with vLLM's names."""

import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from foredraft.config import EngineConfig, NumSpeculativeTokens, SpeculativeConfig
from foredraft.drafters import check_method, load_drafter
from foredraft.drafters.base import Drafter
from foredraft.engine.engine import Engine
from foredraft.engine.sampler import TokenLogprobs
from foredraft.engine.sequence import Acceptance, FinishReason
from foredraft.engine.sequence import Sequence as RunningSequence
from foredraft.errors import UserError
from foredraft.models.loading import Quantization, Target, load_target
from foredraft.ops import Kernels
from foredraft.sampling_params import SamplingParams

Prompt = str | Mapping[str, Any]
"""Text, or ``{"prompt_token_ids": [...]}``."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class CompletionOutput:
    """One generated sequence.

    origins: for each token, the block position k >= 1 of the accepted draft token it was, or 0 for a token that
    the target itself sampled. pieces: the text cut where its tokens meet, each piece with its token's origin.
    logprobs: per token, when asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    origins: list[int]
    pieces: list[tuple[str, int]]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    acceptance: Acceptance

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass(frozen=True)
class RequestMetrics:
    """Seconds from arrival to the first token and to the last one."""

    time_to_first_token: float
    seconds: float


@dataclass(frozen=True)
class RequestOutput:
    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass(frozen=True)
class StreamUpdate:
    """New output of one sequence.

    token_ids, origins: the new tokens (see ``CompletionOutput``). pieces: the new text that no stop string can
    take back, cut where its tokens meet, each piece with its token's origin. output: the request's whole output,
    with the update that finishes it.
    """

    request_id: int
    index: int
    token_ids: list[int]
    origins: list[int]
    pieces: list[tuple[str, int]]
    output: RequestOutput | None

    @property
    def text(self) -> str:
        return "".join(piece for piece, _ in self.pieces)


@dataclass
class _Request:
    prompt: str | None
    sequences: list[RunningSequence]


@dataclass
class Progress:
    """How much of a sequence a stream has handed out."""

    number: int
    index: int
    sequence: RunningSequence
    characters: int = 0
    tokens: int = 0
    done: bool = False

    def update(self) -> StreamUpdate | None:
        """What is new, if anything."""
        sequence = self.sequence
        if sequence.num_output == self.tokens and not sequence.finished:
            return None
        settled = sequence.settled_text
        new = StreamUpdate(
            request_id=self.number,
            index=self.index,
            token_ids=sequence.output[self.tokens :],
            origins=sequence.origins[self.tokens :],
            pieces=sequence.pieces(self.characters, settled),
            output=None,
        )
        self.characters, self.tokens, self.done = settled, sequence.num_output, sequence.finished
        return new


class LLM:
    """A target model, with or without speculation.

    model: alias, folder, GGUF file or Hub id (see ``load_target``). speculative_config: a mapping with vLLM's
    keys (``method``, ``model``, ``num_speculative_tokens``), JSON text, or None for plain decoding; ``speculation`` is
    what came of it, with every default filled in (N may be auto, see ``SpeculativeConfig``), and ``drafter`` what was
    loaded. quantization: of the target's weights, see ``Quantization``.
    kernels: auto, native or pytorch (see ``operations``). Both belong to loading, so not with a loaded Target.
    engine_config: all of the engine's limits, in place of the four that stand here.
    Raises UserError for anything that does not fit.
    """

    def __init__(
        self,
        model: str | Target,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
        *,
        dtype: str = "bfloat16",
        device: str = "cpu",
        quantization: Quantization = "none",
        kernels: Kernels = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        seed: int = 0,
        engine_config: EngineConfig | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise UserError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
        self.config = engine_config or EngineConfig(max_model_len, max_num_seqs, max_num_batched_tokens, seed)
        speculation = None if speculative_config is None else SpeculativeConfig.parse(speculative_config)
        if speculation and speculation.method == "none":
            speculation = None
        if speculation:
            check_method(speculation)
        if not isinstance(model, str) and (quantization, kernels) != ("none", "auto"):
            raise UserError("quantization and kernels belong to loading; give them to load_target, not with its Target")
        self.target = (
            load_target(model, DTYPES[dtype], device, quantization=quantization, kernels=kernels)
            if isinstance(model, str)
            else model
        )
        self.tokenizer = self.target.tokenizer
        self.drafter: Drafter | None = None
        count: NumSpeculativeTokens = 0
        if speculation:
            self.drafter = load_drafter(speculation, self.target)
            count = speculation.num_speculative_tokens or self.drafter.default_tokens
            speculation = replace(speculation, num_speculative_tokens=count)
        self.speculation = speculation
        self.lock = threading.Lock()
        self.engine = Engine(
            self.target.model,
            self.config,
            eos_token_ids=self.tokenizer.eos_token_ids,
            tokenizer=self.tokenizer,
            drafter=self.drafter,
            num_speculative_tokens=count,
            acceptance_rule=speculation.acceptance_rule if speculation else "exact",
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt. Results are in the order of the prompts."""
        return self._finished(self.stream(prompts, sampling_params))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        return self.generate([self.chat_prompt(each, **template) for each in conversations], sampling_params)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> Prompt:
        """The prompt of a conversation, for ``generate`` or ``stream``."""
        return {"prompt_token_ids": self.tokenizer.encode_chat(messages, **template)}

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[StreamUpdate]:
        """Complete prompts together and yield what each round brings. Closing the iterator cancels the rest."""
        if not isinstance(prompts, str | Mapping | Sequence):
            raise UserError(f"prompts must be a prompt or a list of prompts, not {type(prompts).__name__}")
        single = isinstance(prompts, str | Mapping)
        listed: list[Prompt] = [prompts] if single else list(prompts)  # type: ignore[list-item]
        params = _each(sampling_params, len(listed))
        encoded = [self._encode(prompt) for prompt in listed]
        requests: list[_Request] = []
        try:
            for prompt, tokens, own in zip(listed, encoded, params, strict=True):
                text = prompt if isinstance(prompt, str) else None
                with self.lock:
                    requests.append(_Request(text, self.engine.add(tokens, own)))
            yield from self._updates(requests)
        finally:
            with self.lock:
                for request in requests:
                    for sequence in request.sequences:
                        self.engine.abort(sequence)

    def _updates(self, requests: list[_Request]) -> Iterator[StreamUpdate]:
        pending = [
            Progress(number, index, sequence)
            for number, request in enumerate(requests)
            for index, sequence in enumerate(request.sequences)
        ]
        unfinished = [len(request.sequences) for request in requests]
        while pending:
            # Another stream of this engine, of another thread even, may have moved these sequences on: look before
            # stepping, and hold the engine still meanwhile.
            with self.lock:
                ready = [(each, each.update()) for each in pending]
            for each, update in ready:
                if update is None:
                    continue
                unfinished[each.number] -= each.done
                if each.done and not unfinished[each.number]:
                    update = replace(update, output=_output(each.number, requests[each.number]))
                yield update
            pending = [each for each in pending if not each.done]
            with self.lock:
                if any(not each.sequence.finished for each in pending):
                    self.engine.step()

    def _finished(self, updates: Iterator[StreamUpdate]) -> list[RequestOutput]:
        outputs = [update.output for update in updates if update.output]
        return sorted(outputs, key=lambda output: output.request_id)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        tokens = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
        if not isinstance(tokens, list | tuple) or not all(isinstance(token, int) for token in tokens):
            raise UserError('a prompt must be a string or {"prompt_token_ids": [...]}')
        return list(tokens)


def _each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise UserError(f"{len(params)} sampling parameters for {count} prompts; give one, or one for each")
    return list(params)


def _output(number: int, request: _Request) -> RequestOutput:
    first = request.sequences[0]
    return RequestOutput(
        request_id=number,
        prompt=request.prompt,
        prompt_token_ids=first.tokens[: first.prompt_length],
        outputs=[
            CompletionOutput(
                index=index,
                text=sequence.text,
                token_ids=sequence.output,
                origins=list(sequence.origins),
                pieces=sequence.pieces(0, len(sequence.text)),
                logprobs=None if sequence.params.logprobs is None else list(sequence.logprobs),
                finish_reason=sequence.finish_reason,
                stop_reason=sequence.stop_reason,
                acceptance=replace(sequence.acceptance),
            )
            for index, sequence in enumerate(request.sequences)
        ],
        metrics=RequestMetrics(
            time_to_first_token=min(s.first_token_at for s in request.sequences) - first.arrived,
            seconds=max(s.finished_at for s in request.sequences) - first.arrived,
        ),
    )
