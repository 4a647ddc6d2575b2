"""What a checkpoint is made from: a model folder or a GGUF file, with the files to go beside the weights."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foredraft.models.config import ModelConfig, RopeConfig
from foredraft.models.configuration import read_json
from foredraft.models.gguf import GGUFFile
from foredraft.models.layers import Weights
from foredraft.models.loading import folder_weights, read_config, resolve
from foredraft.tokenizer import Tokenizer

_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True)
class Source:
    """A model whose weights are read one at a time, in bfloat16 or as the MXFP4 that they are.

    raw: its config.json. files: the others that belong beside the weights, by name.
    identity: a digest that changes when the weights do (of the files' names, sizes and times).
    """

    config: ModelConfig
    raw: Mapping[str, Any]
    files: Mapping[str, bytes]
    weights: Weights
    identity: str


def open_source(name: str) -> Source:
    """The model that ``name`` stands for, as `load_target` understands it. Raises UserError as that does."""
    path = resolve(name)
    return _from_gguf(path) if path.is_file() else _from_folder(path)


def json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _from_folder(folder: Path) -> Source:
    config = read_config(folder)
    raw = read_json(folder / "config.json")
    weights = folder_weights(folder, torch.bfloat16)
    Tokenizer.from_folder(folder)  # a folder without one, or with a broken one, fails now
    return Source(
        config=config,
        raw=raw,
        files={name: (folder / name).read_bytes() for name in _COPIED if (folder / name).is_file()},
        weights=weights,
        identity=_identity([folder / "config.json", *folder.glob("*.safetensors")]),
    )


def _from_gguf(path: Path) -> Source:
    file = GGUFFile(path)
    config = file.config()
    files = Tokenizer.from_gguf(file.metadata).to_folder_files()
    return Source(
        config=config,
        raw={**_config_json(config), **files["generation_config.json"]},
        files={name: json_bytes(content) for name, content in files.items()},
        weights=file.weights(config, torch.bfloat16),
        identity=_identity([path]),
    )


def _identity(paths: Iterable[Path]) -> str:
    stats = [(path.name, path.stat()) for path in sorted(paths)]
    told = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _config_json(config: ModelConfig) -> dict[str, Any]:
    """config.json of a model that has none. A GGUF file's model has no biases (`GGUFFile.config` refuses them)."""
    return {
        "architectures": [_ARCHITECTURES[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config.rope),
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
    }


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "yarn":
        scaling["original_max_position_embeddings"] = rope.original_max_position_embeddings
    return scaling
