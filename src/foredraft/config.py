"""Settings of an engine and of speculation, with vLLM's names."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from foredraft.errors import UserError

AcceptanceRule = Literal["exact", "rejection"]
NumSpeculativeTokens = int | Literal["auto"]


@dataclass(frozen=True)
class SpeculativeConfig:
    """How to speculate.

    method: a drafting method (``foredraft.drafters.METHODS``). model: the drafter's folder or Hub id; None takes
    the drafter that ships for the embedded target. num_speculative_tokens: N, draft tokens a round; None takes the
    drafter's own default; auto chooses in every round, by what rounds cost and by what is kept.
    acceptance_rule: ``exact`` keeps a draft token iff it equals the token the target samples there, so that the
    output is that of plain decoding; ``rejection`` is the standard rule, which keeps the distribution only.
    """

    method: str
    model: str | None = None
    num_speculative_tokens: NumSpeculativeTokens | None = None
    acceptance_rule: AcceptanceRule = "exact"

    def __post_init__(self) -> None:
        count = self.num_speculative_tokens
        if count not in (None, "auto") and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise UserError(f"num_speculative_tokens is {count!r}, expected an integer of at least 1, or 'auto'")
        if self.acceptance_rule not in get_args(AcceptanceRule):
            raise UserError(f"acceptance_rule is {self.acceptance_rule!r}, expected 'exact' or 'rejection'")
        for name in ("method", "model"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (name == "model" and value is None):
                raise UserError(f"{name} is {value!r} in the speculative config, expected a string")

    @classmethod
    def parse(cls, value: "SpeculativeConfig | Mapping[str, Any] | str") -> "SpeculativeConfig":
        """From a mapping, or from JSON text as ``--speculative-config`` takes it."""
        if isinstance(value, SpeculativeConfig):
            return value
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                raise UserError(f"the speculative config is not valid JSON: {error}") from error
        if not isinstance(value, Mapping):
            raise UserError(f"the speculative config must be a JSON object, not {type(value).__name__}")
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(value) - set(known))
        if unknown:
            raise UserError(f"unknown field in the speculative config: {', '.join(unknown)}; known: {', '.join(known)}")
        if "method" not in value:
            raise UserError("the speculative config needs `method`")
        return cls(**value)


@dataclass(frozen=True)
class EngineConfig:
    """Limits of an engine.

    max_model_len: most tokens of a sequence, prompt and output together; None is the model's own limit, or what the
    memory for keys and values holds. max_num_seqs: sequences running at once. max_num_batched_tokens: most rows of a
    pass that prefill may fill. prefill_beside_decode: the same in passes in which others decode, so that they do not
    wait long; None is no other limit. kv_cache_memory_bytes: most memory for keys and values of target and drafter,
    native kernels only; None lets them grow. enable_prefix_caching: keep the pages of earlier sequences within that
    memory for later ones that begin alike. drafter_errors: raise, or continue without speculation for the sequences
    concerned, which ``Engine.drafter_failures`` counts. seed: from which requests without a seed of their own get
    theirs.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    seed: int = 0
    prefill_beside_decode: int | None = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    drafter_errors: Literal["raise", "continue"] = "raise"

    def __post_init__(self) -> None:
        for name in (
            *("max_model_len", "max_num_seqs", "max_num_batched_tokens"),
            *("prefill_beside_decode", "kv_cache_memory_bytes"),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UserError(f"{name} is {value!r}, expected an integer of at least 1")
