"""Reading and writing drafter folders (config.json and safetensors)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from foredraft.drafters.dflash import DFlashConfig, DFlashWeights
from foredraft.drafters.dspark import DSparkConfig, DSparkWeights, MarkovKind, MarkovWeights
from foredraft.drafters.fitting import check_shape
from foredraft.drafters.storage import drafter_weights
from foredraft.errors import UserError
from foredraft.models.config import ModelConfig, RopeConfig, decoder_config, required
from foredraft.models.configuration import read_configuration
from foredraft.models.layers import DecoderLayer, dense, load_layer, load_tensor
from foredraft.models.loading import tensor_names


def load_dflash(
    folder: Path, dtype: torch.dtype, target: ModelConfig | None = None
) -> tuple[DFlashConfig, DFlashWeights]:
    """Read a DFlash drafter in the z-lab layout (``DFlashDraftModel``).

    Tensors: ``fc``, ``hidden_norm``, ``layers.i.*`` (Qwen3 names), ``norm``. Where the head predicts only a part
    of the vocabulary, ``d2t [Vd]`` holds target id minus draft id of each entry, as in EAGLE-3 checkpoints.
    target: checked against before any weight is read, so that a drafter of another model is named as such.
    """
    source = str(folder / "config.json")
    raw = read_configuration(folder / "config.json")
    check_architecture(raw, "DFlashDraftModel", source)
    config = _read_backbone(raw, source, "DFlash")
    if config.block_size < 2:
        raise UserError(f"{source}: block_size is {config.block_size}; it counts the anchor, so it must be 2 or more")
    if target is not None:
        check_shape(config.layers, config.num_target_layers, target)
    return config, _backbone_weights(folder, raw, config, dtype)


def save_dflash(
    folder: Path, config: DFlashConfig, weights: DFlashWeights, extra: Mapping[str, Any] | None = None
) -> None:
    """Write a DFlash drafter in the z-lab layout; ``extra`` is added to config.json."""
    raw, tensors = _backbone_parts(config, weights)
    raw = {
        "architectures": ["DFlashDraftModel"],
        **raw,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
    }
    write_drafter(folder, {**raw, **(extra or {})}, tensors)


def load_dspark(
    folder: Path, dtype: torch.dtype, target: ModelConfig | None = None
) -> tuple[DSparkConfig, DSparkWeights]:
    """Read a DSpark drafter in DeepSpec's layout (``Qwen3DSparkModel``), which vLLM reads too.

    Tensors: DFlash's, ``markov_head.markov_w1`` and ``markov_w2``, ``markov_head.gate_proj`` (gated) or
    ``markov_head.joint_proj`` (rnn), ``confidence_head.proj``; ``embed_tokens`` and ``lm_head``, each the target's
    where it is absent. target: see ``load_dflash``.
    """
    source = str(folder / "config.json")
    raw = read_configuration(folder / "config.json")
    check_architecture(raw, "Qwen3DSparkModel", source)
    backbone = _read_backbone(raw, source, "DSpark")
    if backbone.block_size < 1:
        raise UserError(f"{source}: block_size is {backbone.block_size}, expected an integer of at least 1")
    if raw.get("sample_from_anchor") is False:
        raise UserError(f"{source}: sample_from_anchor is false; only blocks whose anchor row predicts are supported")
    rank = int(required(raw, "markov_rank", source))
    if rank < 1:
        raise UserError(f"{source}: markov_rank is {rank}; a drafter without a Markov head is not supported")
    kind: MarkovKind = raw.get("markov_head_type") or "vanilla"
    if kind not in get_args(MarkovKind):
        known = ", ".join(get_args(MarkovKind))
        raise UserError(f"{source}: markov_head_type is {kind!r}, expected one of {known}")
    confident = bool(raw.get("enable_confidence_head"))
    config = DSparkConfig(backbone, rank, kind, bool(raw.get("confidence_head_with_markov")) if confident else None)
    if target is not None:
        check_shape(backbone.layers, backbone.num_target_layers, target)
    read = drafter_weights(folder, dtype)
    hidden, vocab_size = backbone.layers.hidden_size, backbone.layers.vocab_size
    own = _backbone_weights(folder, raw, backbone, dtype)
    draft_size = vocab_size if own.draft_vocab is None else len(own.draft_vocab)

    stored = tensor_names(folder)

    def optional(name: str, *shape: int) -> Tensor | None:
        return load_tensor(read, name, *shape) if name in stored else None

    gate, gate_bias = None, None
    if kind != "vanilla":
        name, rows, columns = _gate_shape(kind, rank, hidden)
        gate = load_tensor(read, f"{name}.weight", rows, columns)
        gate_bias = load_tensor(read, f"{name}.bias", rows)
    confidence, confidence_bias = None, None
    if confident:
        columns = hidden + (rank if config.confidence_with_markov else 0)
        confidence = load_tensor(read, "confidence_head.proj.weight", 1, columns)
        confidence_bias = load_tensor(read, "confidence_head.proj.bias", 1)
    weights = DSparkWeights(
        backbone=own,
        markov=MarkovWeights(
            w1=load_tensor(read, "markov_head.markov_w1.weight", vocab_size, rank),
            w2=load_tensor(read, "markov_head.markov_w2.weight", draft_size, rank),
            gate=gate,
            gate_bias=gate_bias,
        ),
        confidence=confidence,
        confidence_bias=confidence_bias,
        embeddings=optional("embed_tokens.weight", vocab_size, hidden),
        head=optional("lm_head.weight", draft_size, hidden),
    )
    return config, weights


def save_dspark(
    folder: Path, config: DSparkConfig, weights: DSparkWeights, extra: Mapping[str, Any] | None = None
) -> None:
    """Write a DSpark drafter in DeepSpec's layout; ``extra`` is added to config.json."""
    backbone, markov = config.backbone, weights.markov
    raw, tensors = _backbone_parts(backbone, weights.backbone)
    confident = config.confidence_with_markov is not None
    raw = {
        "architectures": ["Qwen3DSparkModel"],
        **raw,
        "mask_token_id": backbone.mask_token_id,
        "target_layer_ids": list(backbone.target_layer_ids),
        "sample_from_anchor": True,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_kind,
        "enable_confidence_head": confident,
        **({"confidence_head_with_markov": config.confidence_with_markov} if confident else {}),
    }
    gate = _gate_shape(config.markov_kind, config.markov_rank, backbone.layers.hidden_size)[0]
    optional = {
        f"{gate}.weight": markov.gate,
        f"{gate}.bias": markov.gate_bias,
        "confidence_head.proj.weight": weights.confidence,
        "confidence_head.proj.bias": weights.confidence_bias,
        "embed_tokens.weight": weights.embeddings,
        "lm_head.weight": weights.head,
    }
    tensors |= {"markov_head.markov_w1.weight": markov.w1, "markov_head.markov_w2.weight": markov.w2}
    tensors |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    write_drafter(folder, {**raw, **(extra or {})}, tensors)


def _gate_shape(kind: MarkovKind, rank: int, hidden: int) -> tuple[str, int, int]:
    """Name, rows and columns of the matrix inside a Markov head."""
    if kind == "rnn":
        return "markov_head.joint_proj", 3 * rank, 2 * rank + hidden
    return "markov_head.gate_proj", rank, hidden + rank


def check_architecture(raw: Mapping[str, Any], expected: str, source: str) -> None:
    """Raise UserError unless a config.json names ``expected`` among its architectures."""
    if expected not in (raw.get("architectures") or []):
        raise UserError(f"{source}: architectures is {raw.get('architectures')}, not a {expected}")


def write_drafter(folder: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def _read_backbone(raw: Mapping[str, Any], source: str, what: str) -> DFlashConfig:
    """The shape of a DFlash or DSpark drafter; what the methods have of their own is read in ``dflash_config`` first,
    beside it otherwise."""
    shape = decoder_config(
        {"head_dim": 128, **raw, "use_sliding_window": False}, source, architecture="dflash", qk_norm=True
    )
    if shape.attention_bias or shape.mlp_bias:
        raise UserError(f"{source}: biases (attention_bias, mlp_bias) are not supported in a {what} drafter")
    method = {**raw, **(raw.get("dflash_config") or {})}
    if float(method.get("input_embedding_scale") or 1.0) != 1.0:
        raise UserError(f"{source}: input_embedding_scale is not supported")
    layer_ids = method.get("target_layer_ids")
    num_target_layers = int(required(raw, "num_target_layers", source))
    if layer_ids is None:
        layer_ids = default_taps(num_target_layers, shape.num_layers)
    if any(not 0 <= index < num_target_layers for index in layer_ids):
        raise UserError(f"{source}: target_layer_ids {layer_ids} must lie in 0..{num_target_layers - 1}")
    mask = method.get("mask_token_id")
    if mask is None or not 0 <= int(mask) < shape.vocab_size:
        raise UserError(f"{source}: mask_token_id is {mask}, not an id of the vocabulary")
    windows = _windows(raw, shape.num_layers, source)
    if raw.get("is_causal") and None in windows:
        raise UserError(f"{source}: is_causal is true, but only layers with a sliding window may be causal")
    return DFlashConfig(
        layers=shape,
        block_size=int(required(method, "block_size", source)),
        target_layer_ids=tuple(int(index) for index in layer_ids),
        num_target_layers=num_target_layers,
        mask_token_id=int(mask),
        windows=windows,
        causal_windows=raw.get("is_causal") is not False and any(windows),
        default_tokens=read_default_tokens(raw, source),
    )


def _backbone_weights(folder: Path, raw: Mapping[str, Any], config: DFlashConfig, dtype: torch.dtype) -> DFlashWeights:
    read = drafter_weights(folder, dtype)
    shape = config.layers
    hidden = shape.hidden_size
    return DFlashWeights(
        fc=load_tensor(read, "fc.weight", hidden, hidden * len(config.target_layer_ids)),
        context_norm=load_tensor(read, "hidden_norm.weight", hidden),
        layers=tuple(
            load_layer(read, f"layers.{i}.", shape).map_matrices(lambda weight: dense(weight, dtype))
            for i in range(shape.num_layers)
        ),
        norm=load_tensor(read, "norm.weight", hidden),
        draft_vocab=read_draft_vocab(folder, raw, shape.vocab_size),
    )


def _backbone_parts(config: DFlashConfig, weights: DFlashWeights) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What DFlash and DSpark drafters share of config.json, and the tensors."""
    shape = config.layers
    raw: dict[str, Any] = {
        "model_type": "qwen3",
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "num_speculative_tokens": config.default_tokens,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tie_word_embeddings,
        "dtype": str(weights.fc.dtype).removeprefix("torch."),
        **rope_fields(shape.rope),
        **window_fields(config),
    }
    tensors = {
        "fc.weight": weights.fc,
        "hidden_norm.weight": weights.context_norm,
        "norm.weight": weights.norm,
    }
    for index, layer in enumerate(weights.layers):
        tensors.update(layer_tensors(f"layers.{index}.", layer, shape.num_heads, shape.head_dim))
    if weights.draft_vocab is not None:
        raw["draft_vocab_size"] = len(weights.draft_vocab)
        tensors["d2t"] = (weights.draft_vocab - torch.arange(len(weights.draft_vocab))).int()
    return raw, tensors


def default_taps(num_target_layers: int, count: int) -> tuple[int, ...]:
    """``count`` layers spread evenly from the second to the third last (arXiv 2602.06036), as z-lab's code does."""
    if count == 1:
        return (num_target_layers // 2,)
    first, last = 1, num_target_layers - 3
    return tuple(round(first + index * (last - first) / (count - 1)) for index in range(count))


def read_default_tokens(raw: Mapping[str, Any], source: str) -> int:
    given = raw.get("num_speculative_tokens", DFlashConfig.default_tokens)
    if not isinstance(given, int) or given < 1:
        raise UserError(f"{source}: num_speculative_tokens is {given!r}, expected an integer of at least 1")
    return given


def read_draft_vocab(folder: Path, raw: Mapping[str, Any], vocab_size: int) -> Tensor | None:
    size = raw.get("draft_vocab_size")
    if size is None or int(size) == vocab_size:
        return None
    offsets = dense(drafter_weights(folder, torch.int64)("d2t"), torch.int64)
    vocab = offsets + torch.arange(len(offsets))
    if len(vocab) != int(size) or vocab.min() < 0 or vocab.max() >= vocab_size:
        raise UserError(f"{folder}: d2t does not map {size} draft ids into the vocabulary of {vocab_size}")
    return vocab


def layer_tensors(prefix: str, layer: DecoderLayer[Tensor], heads: int, head_dim: int) -> dict[str, Tensor]:
    """A layer's tensors by their Hugging Face names, for a layer without biases."""
    q_rows = heads * head_dim
    kv_rows = (len(layer.qkv) - q_rows) // 2
    q, k, v = torch.split(layer.qkv, [q_rows, kv_rows, kv_rows])
    gate, up = layer.gate_up.chunk(2)
    named = {
        "input_layernorm": layer.input_norm,
        "self_attn.q_proj": q,
        "self_attn.k_proj": k,
        "self_attn.v_proj": v,
        "self_attn.q_norm": layer.q_norm,
        "self_attn.k_norm": layer.k_norm,
        "self_attn.o_proj": layer.out,
        "post_attention_layernorm": layer.post_norm,
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": layer.down,
    }
    return {f"{prefix}{name}.weight": tensor for name, tensor in named.items() if tensor is not None}


def rope_fields(rope: RopeConfig) -> dict[str, Any]:
    if rope.kind == "default":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    names = (
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    )
    scaling = {name: getattr(rope, name) for name in names if getattr(rope, name) is not None}
    return {"rope_theta": rope.theta, "rope_scaling": {"rope_type": rope.kind, **scaling}}


def _windows(raw: Mapping[str, Any], layers: int, source: str) -> tuple[int | None, ...]:
    kinds = raw.get("layer_types") or ["full_attention"] * layers
    # transformers reads `sliding_window` as absent unless `use_sliding_window` is set.
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    if len(kinds) != layers or not {*kinds} <= {"full_attention", "sliding_attention"}:
        raise UserError(
            f"{source}: layer_types must name full_attention or sliding_attention for each of {layers} layers"
        )
    if (window is not None) != ("sliding_attention" in kinds):
        raise UserError(
            f"{source}: layers of type sliding_attention in layer_types need use_sliding_window and "
            "sliding_window, and these need such layers"
        )
    return tuple(int(window) if window and kind == "sliding_attention" else None for kind in kinds)


def window_fields(config: DFlashConfig) -> dict[str, Any]:
    windows = config.windows
    sizes = {window for window in windows if window is not None}
    if len(sizes) > 1:
        raise ValueError(f"the z-lab layout holds one window size, not {sorted(sizes)}")
    if not sizes:
        return {
            "use_sliding_window": False,
            "sliding_window": None,
            "layer_types": ["full_attention"] * len(windows),
        }
    return {
        **({} if config.causal_windows else {"is_causal": False}),
        "use_sliding_window": True,
        "sliding_window": sizes.pop(),
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
    }
