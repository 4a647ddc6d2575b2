"""foredraft: speculative decoding for language models that one can trust."""

from foredraft.config import SpeculativeConfig
from foredraft.errors import UserError
from foredraft.llm import LLM, CompletionOutput, RequestOutput
from foredraft.sampling_params import SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "StructuredOutputsParams",
    "UserError",
]
__version__ = "0.1.0"
