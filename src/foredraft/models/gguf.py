"""Targets from a GGUF file: metadata, configuration, and weights dequantised one tensor at a time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from foredraft.errors import UserError
from foredraft.models.config import ModelConfig, RopeConfig
from foredraft.models.layers import Weights

LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


class _Reader(gguf.GGUFReader):
    """Reads through a plain array: the many small slices of a numpy memmap take seconds."""

    @property
    def data(self) -> Any:
        return self._data

    @data.setter
    def data(self, mapped: Any) -> None:
        self._data = np.asarray(mapped)


class GGUFFile:
    """One opened GGUF file (memory-mapped)."""

    def __init__(self, path: Path) -> None:
        try:
            self._reader = _Reader(path)
        except (OSError, ValueError, IndexError) as error:
            raise UserError(f"{path} is not a readable GGUF file: {error}") from error
        self.path = path
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.metadata: dict[str, Any] = {
            name: field.contents() for name, field in self._reader.fields.items() if not name.startswith("GGUF.")
        }

    def config(self) -> ModelConfig:
        architecture = self.metadata.get("general.architecture")
        if architecture not in ("llama", "qwen3"):
            raise UserError(f"{self.path}: architecture {architecture!r} is not supported; known: llama, qwen3")
        for name, what in (("rope_freqs.weight", "their own RoPE factors"), ("blk.0.attn_q.bias", "biases")):
            if name in self._tensors:
                raise UserError(
                    f"{self.path}: GGUF files with {what} ({name}) are not supported; "
                    "use the model's Hugging Face folder"
                )

        def value(key: str, default: Any = None) -> Any:
            found = self.metadata.get(f"{architecture}.{key}", default)
            if found is None:
                raise UserError(f"{self.path}: metadata lacks {architecture}.{key}")
            return found

        heads = int(value("attention.head_count"))
        hidden = int(value("embedding_length"))
        return ModelConfig(
            architecture=architecture,
            vocab_size=int(self._tensor("token_embd.weight").shape[1]),
            hidden_size=hidden,
            intermediate_size=int(value("feed_forward_length")),
            num_layers=int(value("block_count")),
            num_heads=heads,
            num_kv_heads=int(value("attention.head_count_kv", heads)),
            head_dim=int(value("attention.key_length", hidden // heads)),
            rms_norm_eps=float(value("attention.layer_norm_rms_epsilon")),
            max_position_embeddings=int(value("context_length")),
            rope=_rope(self.metadata, architecture, str(self.path)),
            tie_word_embeddings="output.weight" not in self._tensors,
            qk_norm=architecture == "qwen3",
        )

    def weights(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> Weights:
        """Tensors by Hugging Face name, in ``dtype``."""

        def read(name: str) -> Tensor:
            found = self._tensor(_gguf_name(name))
            try:
                values = torch.tensor(gguf.dequantize(found.data, found.tensor_type))
            except NotImplementedError as error:
                raise UserError(
                    f"{self.path}: {found.name} is stored as {found.tensor_type.name}, which is not supported"
                ) from error
            if config.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
                values = _halves_paired(values, config.head_dim)
            return values.to(dtype=dtype, device=device)

        return read

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise UserError(f"{self.path} lacks the tensor {name}")
        return self._tensors[name]


def _gguf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, index, rest = name.split(".", 3)
    return f"blk.{index}.{LAYER_NAMES[rest]}"


def _halves_paired(weight: Tensor, head_dim: int) -> Tensor:
    """Undo llama.cpp's row order of rotary weights (neighbours paired) into ours (halves paired)."""
    rows, columns = weight.shape
    heads = rows // head_dim
    return weight.view(heads, head_dim // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _rope(metadata: Mapping[str, Any], architecture: str, source: str) -> RopeConfig:
    prefix = f"{architecture}.rope."
    kind = metadata.get(f"{prefix}scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise UserError(f"{source}: RoPE scaling {kind!r} is not supported; known: none, linear, yarn")
    return RopeConfig(
        theta=float(metadata.get(f"{prefix}freq_base", 10000.0)),
        kind="default" if kind == "none" else kind,
        factor=float(metadata.get(f"{prefix}scaling.factor", 1.0)),
        original_max_position_embeddings=int(
            metadata.get(f"{prefix}scaling.original_context_length", metadata[f"{architecture}.context_length"])
        ),
    )
