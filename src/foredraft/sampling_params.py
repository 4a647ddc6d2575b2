"""What a user asks of the sampler."""

import json
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeGuard, get_args

from foredraft.errors import UserError

_GREEDY_BELOW = 1e-5
_SEED_RANGE = range(-(2**63), 2**63)

MAX_GRAMMAR_BYTES = 64 * 1024
"""The longest schema, expression or grammar, in UTF-8."""

StructuredOutputsKind = Literal["json", "json_object", "regex", "choice", "grammar"]


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the output must look like, with the names of vLLM's class of the same name; exactly one field is given.

    After construction `json` is text and `choice` a tuple, so that equal ones have equal hashes. Whether llguidance
    takes a schema, an expression or a grammar shows when the request is added.

    json: a JSON schema, an object or its text. json_object: any JSON object. regex: an expression of Rust's regex
    crate that the whole output matches. choice: strings, one of which is the output. grammar: Lark, as llguidance has
    it, which begins with the rule `start`.

    Raises `UserError` naming the field and what was expected.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        kinds = get_args(StructuredOutputsKind)
        given = [kind for kind in kinds if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            raise UserError(
                f"structured_outputs needs exactly one of {', '.join(kinds)}, got {' and '.join(given) or 'none'}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", self._schema_text())
        elif self.choice is not None:
            object.__setattr__(self, "choice", self._choices())
        elif not self.json_object:
            self._check_text(given[0], getattr(self, given[0]))
        elif self.json_object is not True:
            raise UserError(f"structured_outputs.json_object is {self.json_object!r}, expected true or false")

    @property
    def kind(self) -> StructuredOutputsKind:
        """The field that is given."""
        kinds: tuple[StructuredOutputsKind, ...] = get_args(StructuredOutputsKind)
        return next(kind for kind in kinds if getattr(self, kind))

    def _schema_text(self) -> str:
        expected = "expected a JSON schema, an object or its text"
        try:
            schema = json.loads(self.json) if isinstance(self.json, str) else self.json
            if not isinstance(schema, Mapping):
                raise UserError(f"structured_outputs.json is a {type(schema).__name__}, {expected}")
            text = json.dumps(dict(schema), ensure_ascii=False, allow_nan=False)
        except UserError:
            raise
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(f"structured_outputs.json is not valid JSON ({error}), {expected}") from error
        self._check_text("json", text)
        return text

    def _choices(self) -> tuple[str, ...]:
        expected = "structured_outputs.choice must be a list of different strings, none of them empty"
        if isinstance(self.choice, str) or not isinstance(self.choice, Sequence) or not self.choice:
            raise UserError(expected)
        if not all(isinstance(text, str) and text for text in self.choice) or len({*self.choice}) < len(self.choice):
            raise UserError(expected)
        self._check_text("choice", "".join(self.choice))
        return tuple(self.choice)

    def _check_text(self, kind: str, text: object) -> None:
        if not isinstance(text, str) or not text:
            raise UserError(f"structured_outputs.{kind} is {text!r}, expected a string that is not empty")
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise UserError(f"structured_outputs.{kind} holds half of a UTF-16 pair, such as \\ud800") from error
        if size > MAX_GRAMMAR_BYTES:
            raise UserError(f"structured_outputs.{kind} has {size} bytes, expected at most {MAX_GRAMMAR_BYTES}")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters with the names, defaults and meaning of vLLM's class of the same name.

    After construction `stop` and `stop_token_ids` are tuples (a single string becomes a tuple of one, `None`
    an empty one), `logit_bias` is a copy with integer keys or `None`, and a `seed` of -1 is `None`.

    temperature: 0 (or less than 1e-5) is greedy decoding, where `top_p`, `top_k` and `min_p` have no effect.
    top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
    top_k: keep this many tokens; 0 or -1 keeps all.
    min_p: drop tokens less likely than this fraction of the most likely one, in [0, 1].
    repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or output.
    presence_penalty, frequency_penalty: subtracted once, or once per occurrence in the output, in [-2, 2].
    logit_bias: token id to a number in [-100, 100] that is added to its logit.
    stop, stop_token_ids: strings and token ids that end the output.
    min_tokens: tokens that end the output are not sampled before this many tokens.
    max_tokens: `None` means up to the model's context length.
    logprobs: how many of the most likely tokens to report beside the chosen one; -1 reports all.
    structured_outputs: what the output must look like. Not with `ignore_eos` or `min_tokens`, which would forbid the
        end where it is all that the grammar allows.

    Raises `UserError` naming the field, its value and the allowed range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._normalise()
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                self._refuse(name, "true or false")
        self._check_integer("n", 1)
        self._check_integer("top_k", -1, "at least 1, or 0 or -1 to keep all tokens")
        self._check_integer("min_tokens", 0)
        if self.max_tokens is not None:
            self._check_integer("max_tokens", 1)
            if self.min_tokens > self.max_tokens:
                self._refuse("min_tokens", f"at most max_tokens, which is {self.max_tokens}")
        if self.logprobs is not None:
            self._check_integer("logprobs", -1, "at least 0, or -1 for the whole vocabulary")
        if self.seed is not None and not (_is_integer(self.seed) and self.seed in _SEED_RANGE):
            self._refuse("seed", "an integer of 64 bits (-2**63 to 2**63 - 1)")
        self._check_number("temperature", lambda x: x >= 0, "at least 0")
        self._check_number("top_p", lambda x: 0 < x <= 1, "in (0, 1]")
        self._check_number("min_p", lambda x: 0 <= x <= 1, "in [0, 1]")
        self._check_number("repetition_penalty", lambda x: x > 0, "above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            self._check_number(name, lambda x: -2 <= x <= 2, "in [-2, 2]")
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputsParams):
                self._refuse("structured_outputs", "StructuredOutputsParams")
            if self.ignore_eos:
                self._refuse("ignore_eos", "false with structured_outputs, which end where their grammar ends")
            if self.min_tokens:
                self._refuse("min_tokens", "0 with structured_outputs, which end where their grammar ends")
        if self.greedy and self.n > 1:
            self._refuse("n", "1 when temperature is 0, because all outputs would be the same")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken instead of a random one."""
        return self.temperature < _GREEDY_BELOW

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `UserError` if `logit_bias` or `stop_token_ids` has a token outside the vocabulary."""
        for name, token_ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token_id in token_ids or ():
                if not 0 <= token_id < vocab_size:
                    raise UserError(
                        f"{name} names token {token_id}, but this model's token ids are 0 to {vocab_size - 1}"
                    )

    def _normalise(self) -> None:
        strings = "a string or a list of strings, none of them empty"
        stop = (self.stop,) if isinstance(self.stop, str) else self._sequence("stop", strings)
        if not all(isinstance(text, str) and text for text in stop):
            self._refuse("stop", strings)
        integers = "a list of token ids (integers of at least 0)"
        stop_token_ids = self._sequence("stop_token_ids", integers)
        if not all(_is_integer(token_id) and token_id >= 0 for token_id in stop_token_ids):
            self._refuse("stop_token_ids", integers)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(dict.fromkeys(stop_token_ids)))
        object.__setattr__(self, "logit_bias", self._integer_keys())
        if self.seed == -1:
            object.__setattr__(self, "seed", None)

    def _sequence(self, name: str, expected: str) -> tuple[object, ...]:
        value = getattr(self, name)
        if value is None:
            return ()
        if isinstance(value, str | bytes | Mapping):
            self._refuse(name, expected)
        try:
            return tuple(value)
        except TypeError:
            self._refuse(name, expected)

    def _integer_keys(self) -> dict[int, float] | None:
        """`logit_bias` with the string keys that JSON forces on it turned into token ids."""
        expected = "a mapping from token id to a number in [-100, 100]"
        if self.logit_bias is None:
            return None
        if not isinstance(self.logit_bias, Mapping):
            self._refuse("logit_bias", expected)
        biases = {}
        for key, bias in self.logit_bias.items():
            token_id = int(key) if isinstance(key, str) and key.isdecimal() else key
            if not _is_integer(token_id) or token_id < 0 or not _is_number(bias) or not -100 <= bias <= 100:
                self._refuse("logit_bias", expected)
            biases[token_id] = float(bias)
        return biases or None

    def _check_integer(self, name: str, minimum: int, expected: str = "") -> None:
        value = getattr(self, name)
        if not _is_integer(value) or value < minimum:
            self._refuse(name, f"an integer of {expected or f'at least {minimum}'}")

    def _check_number(self, name: str, allowed: Callable[[float], bool], expected: str) -> None:
        value = getattr(self, name)
        if not _is_number(value) or not math.isfinite(value) or not allowed(value):
            self._refuse(name, f"a number {expected}")

    def _refuse(self, name: str, expected: str) -> NoReturn:
        raise UserError(f"{name} is {getattr(self, name)!r}, expected {expected}")


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
