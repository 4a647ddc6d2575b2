"""Structured output: which tokens a grammar allows next.

The grammars are llguidance's. Its masks depend on the text so far alone, not on how that was cut into tokens, since
nothing is forced here (``no_forcing``): forced text would be cut as the tokenizer cuts it, where the text of a special
token becomes that token.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from numpy.typing import NDArray

from foredraft.errors import UserError
from foredraft.ops.noise import NotFinite, Row
from foredraft.sampling_params import StructuredOutputsParams
from foredraft.tokenizer import Tokenizer

KEPT_GRAMMARS = 64
"""How many compiled grammars are kept for requests to come, those used last."""

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Between the parts of a JSON text. Bounded, since small models write line breaks for ever where they may."""

_LIMITS = LLParserLimits(verbose_errors=False)
_EXCERPTS = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: |\n +\d+ \| .*|<non-verbose/>", re.DOTALL)
_OPTIONS = '\n%llguidance {"no_forcing": true}'


class GrammarCompiler:
    """Constraints for the sequences of one model.

    vocab_size: V, rows of its embedding, which may be more than the tokenizer has tokens. eos_token_ids: tokens that
    end a sequence; all of them are allowed where the grammar may end, and only there.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        self._matcher = lru_cache(KEPT_GRAMMARS)(self._compile)

    def constraint(self, params: StructuredOutputsParams) -> "Constraint":
        """The constraint of a new sequence.

        Raises UserError, with the library's reason, if the schema, expression or grammar is invalid, not supported,
        or too complex, or if no token of the vocabulary can begin what it describes.
        """
        return Constraint(self._matcher(params).deep_copy(), self._eos_token_ids)

    def _compile(self, params: StructuredOutputsParams) -> LLMatcher:
        if not self._eos_token_ids:
            raise UserError("structured_outputs needs a model with an end-of-sequence token, and this one has none")
        matcher = LLMatcher(self._vocabulary, _lark(params) + _OPTIONS, log_level=0, limits=_LIMITS)
        allowed = _allowed(matcher, self._vocab_size) if not matcher.is_error() else None
        if allowed is None:
            raise UserError(f"structured_outputs.{params.kind} cannot be used: {_reason(matcher.get_error())}")
        allowed[self._eos_token_ids] = False
        if allowed.any():
            probe = matcher.deep_copy()
            probe.consume_token(int(allowed.argmax()))
            if not probe.rollback(1):
                raise UserError(f"structured_outputs.{params.kind} cannot be used: {_reason(probe.get_error())}")
        return matcher

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
        return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=self._eos_token_ids)


class Constraint:
    """What a grammar allows one sequence; it follows the tokens that are committed.

    To judge tokens behind a draft, the matcher runs ahead of what is committed, and back again.
    """

    def __init__(self, matcher: LLMatcher, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._ended = False
        self._ahead: list[int] = []

    def apply(self, row: Row, draft_prefix: Sequence[int]) -> None:
        """Set the tokens to -inf that may not come next, as if draft_prefix were committed.

        row: [V], changed in place. draft_prefix: tokens that the grammar allows. Once an end-of-sequence token has
        come, nothing else may. Raises NotFinite where the grammar gets stuck: nothing that could go on is in the
        vocabulary, or it is too complex.
        """
        path = self._before_end(draft_prefix)
        if self._ended or len(path) < len(draft_prefix):
            forbidden = np.ones(len(row), dtype=bool)
            forbidden[self._eos_token_ids] = False
        else:
            self._advance(path)
            allowed = _allowed(self._matcher, len(row))
            if allowed is None:
                raise NotFinite(f"the structured output cannot go on: {_reason(self._matcher.get_error())}")
            forbidden = ~allowed
        np.putmask(row, forbidden, -np.inf)

    def commit(self, token_id: int) -> None:
        """Take in the sequence's next token. Raises ValueError if the grammar forbids it."""
        if token_id in self._eos_token_ids:
            self._advance([])
            self._ended = True
            return
        if self._ahead[:1] != [token_id]:
            self._advance([token_id])
        del self._ahead[0]

    def valid_prefix(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, which would come next, the grammar allows."""
        self._advance([])
        if self._ended:
            return 0
        if self._matcher.is_stopped():
            return int(token_ids[0] in self._eos_token_ids) if token_ids else 0
        return self._matcher.validate_tokens(list(token_ids))

    def _before_end(self, token_ids: Sequence[int]) -> list[int]:
        ends = (index for index, token_id in enumerate(token_ids) if token_id in self._eos_token_ids)
        return list(token_ids[: next(ends, len(token_ids))])

    def _advance(self, path: list[int]) -> None:
        """Bring the matcher to ``path`` after what is committed."""
        common = 0
        while common < min(len(self._ahead), len(path)) and self._ahead[common] == path[common]:
            common += 1
        self._matcher.rollback(len(self._ahead) - common)
        self._ahead = path[: common + self._matcher.try_consume_tokens(path[common:])]
        if len(self._ahead) < len(path):
            raise ValueError(f"the grammar forbids token {path[len(self._ahead)]}")


class _Vocabulary:
    """The bytes of every token, as llguidance asks for them."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_id = eos_token_ids[0]
        self.special_token_ids = sorted(tokenizer.special_ids.union(eos_token_ids))
        # What cannot be told is never right: better never than wrong.
        self.tokens = [tokenizer.token_bytes(token_id) or b"" for token_id in range(vocab_size)]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode(), add_special_tokens=False)


def json_rule(schema: Mapping[str, Any]) -> str:
    """A JSON schema as an item of a Lark rule."""
    return "%json " + json.dumps({"x-guidance": {"whitespace_pattern": WHITESPACE}, **schema}, ensure_ascii=False)


def schema_problem(schema: Mapping[str, Any]) -> str | None:
    """Why a JSON schema cannot be used, if it cannot."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(f"start: {json_rule(schema)}", limits=_LIMITS)
    return _reason(messages[0]) if failed else None


def _lark(params: StructuredOutputsParams) -> str:
    if params.json is not None:
        assert isinstance(params.json, str)
        return f"start: {json_rule(json.loads(params.json))}"
    if params.json_object:
        return f"start: {json_rule({'type': 'object'})}"
    if params.regex is not None:
        return f"start: /{regex_to_lark(params.regex, '')}/"
    if params.choice is not None:
        return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice)
    assert params.grammar is not None
    return params.grammar


def _allowed(matcher: LLMatcher, vocab_size: int) -> NDArray[np.bool_] | None:
    """Which tokens may come next; None, and an error in the matcher, where it is stuck."""
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    if matcher.is_error():
        return None
    return np.unpackbits(mask, count=vocab_size, bitorder="little").view(bool)


def _reason(error: str) -> str:
    """An error of the library without its excerpts from the grammar, which can be long."""
    return _EXCERPTS.sub("", error).strip()
