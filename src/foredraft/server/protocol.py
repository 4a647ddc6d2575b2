"""Requests of the OpenAI HTTP API, with vLLM's additions, and what they mean to the engine.

What is not supported is refused by name; a field that is null counts as left out.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from foredraft.errors import UserError
from foredraft.sampling_params import SamplingParams, StructuredOutputsParams

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_DEADLINE = 24 * 3600.0


class Unsupported(UserError):
    """A request that is refused. param: the field, where it is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {key: own for key, own in value.items() if own is not None} if isinstance(value, dict) else value


class StreamOptions(_Model):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class RequestSpeculation(_Model):
    """num_speculative_tokens: at most so many draft tokens a round; 0 is plain decoding."""

    num_speculative_tokens: Annotated[int, Field(ge=0)]


class JsonSchema(_Model):
    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool = True


class ResponseFormat(_Model):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def structured(self) -> StructuredOutputsParams | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise Unsupported("response_format of type json_schema needs json_schema.schema", "response_format")
        return StructuredOutputsParams(json=self.json_schema.schema_)


class StructuredOutputs(_Model):
    """vLLM's field of the same name."""

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def structured(self) -> StructuredOutputsParams:
        given = self.model_dump(by_alias=True, exclude_none=True)
        return StructuredOutputsParams(**given)


class _Generation(_Model):
    """What chat and completions share."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    n: Annotated[int, Field(ge=1)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    seed: int | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[str, float] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=256)] | None = None
    # vLLM's
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    # foredraft's
    speculative_config: RequestSpeculation | None = None
    return_rounds: bool = False
    deadline_seconds: Annotated[float, Field(gt=0, le=MAX_DEADLINE)] | None = None

    @model_validator(mode="after")
    def _check(self) -> "_Generation":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    def _sampling(
        self, max_tokens: int | None, logprobs: int | None, structured: StructuredOutputsParams | None
    ) -> SamplingParams:
        return SamplingParams(
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,  # type: ignore[arg-type]  # JSON's string keys
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            max_tokens=max_tokens,
            logprobs=logprobs,
            skip_special_tokens=self.skip_special_tokens,
            structured_outputs=structured,
        )

    @property
    def draft_limit(self) -> int | None:
        return None if self.speculative_config is None else self.speculative_config.num_speculative_tokens

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class FunctionCall(_Model):
    name: str
    arguments: str


class ToolCall(_Model):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class TextPart(_Model):
    type: Literal["text"]
    text: str


class Message(_Model):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check(self) -> "Message":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing")
        return self

    def plain(self) -> dict[str, Any]:
        """As chat templates read it."""
        found = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            found["content"] = "".join(part.text for part in self.content)
        if self.role == "developer":
            found["role"] = "system"
        return found


class ChatRequest(_Generation):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    store: Literal[False] = False
    service_tier: Literal["auto", "default"] = "auto"
    # vLLM's
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        own = {"messages", "tools", "add_generation_prompt"} & set(self.chat_template_kwargs or ())
        if own:
            raise ValueError(
                f"chat_template_kwargs cannot have {', '.join(sorted(own))}: the request has fields for that"
            )
        if sum(bool(given) for given in (self.response_format, self.structured_outputs, self.tools)) > 1:
            raise ValueError("response_format, structured_outputs and tools cannot be combined")
        return self

    def params(self, structured: StructuredOutputsParams | None) -> SamplingParams:
        """structured: of the tools, if there are any."""
        if self.response_format is not None:
            structured = self.response_format.structured()
        elif self.structured_outputs is not None:
            structured = self.structured_outputs.structured()
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._sampling(most, (self.top_logprobs or 0) if self.logprobs else None, structured)


class CompletionRequest(_Generation):
    prompt: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[list[int]], Field(min_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False
    best_of: int | None = None
    # vLLM's
    add_special_tokens: bool = True
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError(f"best_of is {self.best_of}: only as many as n, which is {self.n}, are supported")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo cannot be combined with logprobs: those of the prompt are not computed")
        if self.response_format is not None and self.structured_outputs is not None:
            raise ValueError("response_format and structured_outputs cannot be combined")
        return self

    def prompts(self) -> list[str] | list[list[int]]:
        """One entry for each prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    def params(self) -> SamplingParams:
        structured = None
        if self.response_format is not None:
            structured = self.response_format.structured()
        elif self.structured_outputs is not None:
            structured = self.structured_outputs.structured()
        return self._sampling(16 if self.max_tokens is None else self.max_tokens, self.logprobs, structured)


class TokenizeRequest(_Model):
    """Either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(_Model):
    model: str | None = None
    tokens: list[int]


def parse(kind: type[_Model], body: bytes) -> Any:
    """The request in ``body``. Raises Unsupported, naming the field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _explained(error.errors()) from error


def _explained(errors: Sequence[Mapping[str, Any]]) -> Unsupported:
    # Of a union, the branch that got furthest says most.
    worst = max(errors, key=lambda each: (each["type"] == "extra_forbidden", len(each["loc"])))
    path = ".".join(str(part) for part in worst["loc"] if not _is_branch(part)) or None
    if worst["type"] == "json_invalid":
        return Unsupported(f"the body is not valid JSON: {worst['ctx']['error']}")
    if worst["type"] == "extra_forbidden":
        return Unsupported(f"{path} is not supported by this server", path)
    if worst["type"] == "value_error":
        message = str(worst["ctx"]["error"])
        return Unsupported(f"{path}: {message}" if path else message, path)
    if worst["type"] == "missing":
        return Unsupported(f"{path} is missing", path)
    return Unsupported(f"{path}: {worst['msg']}" if path else str(worst["msg"]), path)


def _is_branch(part: object) -> bool:
    """Whether a part of an error's place is pydantic's name for a branch of a union, not a field."""
    return isinstance(part, str) and (part in {"str", "int"} or "[" in part)
