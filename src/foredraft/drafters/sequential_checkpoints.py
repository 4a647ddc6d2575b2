"""Reading and writing the folders of MTP and EAGLE-3 drafters (config.json and safetensors)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.checkpoints import (
    check_architecture,
    layer_tensors,
    read_default_tokens,
    read_draft_vocab,
    rope_fields,
    write_drafter,
)
from foredraft.drafters.eagle3 import Eagle3Config, Eagle3Weights
from foredraft.drafters.fitting import check_shape
from foredraft.drafters.mtp import MTPConfig, MTPWeights
from foredraft.drafters.recursive import RecursiveConfig
from foredraft.drafters.storage import drafter_weights
from foredraft.errors import UserError
from foredraft.models.config import ModelConfig, decoder_config, required
from foredraft.models.configuration import read_configuration
from foredraft.models.layers import DecoderLayer, Weights, dense, load_layer, load_tensor
from foredraft.models.loading import tensor_names

EAGLE3_ARCHITECTURES = {
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",
}
"""And the family of their layer: Qwen3's norms queries and keys."""


def load_mtp(folder: Path, dtype: torch.dtype, target: ModelConfig | None = None) -> tuple[MTPConfig, MTPWeights]:
    """Read an MTP head that lies apart from its target (``MTPDraftModel``, a layout of this project).

    Tensors have the names of Qwen3.5's checkpoints: ``mtp.fc`` of [embedding; hidden state], ``mtp.layers.0.*``,
    ``mtp.norm``, ``mtp.pre_fc_norm_embedding``, ``mtp.pre_fc_norm_hidden``; but norms hold the factor itself, where
    Qwen3.5 stores it minus one. ``d2t`` as in EAGLE-3. target: checked against before any weight is read.
    """
    source = str(folder / "config.json")
    raw = read_configuration(folder / "config.json")
    check_architecture(raw, "MTPDraftModel", source)
    config = MTPConfig(
        layers=_shape(raw, source, "mtp", "mtp_num_hidden_layers", qk_norm=raw.get("model_type") == "qwen3"),
        num_target_layers=int(required(raw, "num_target_layers", source)),
        default_tokens=_default_tokens(raw, source, MTPConfig.default_tokens),
    )
    if target is not None:
        check_shape(config.layers, config.num_target_layers, target)
    read, hidden = drafter_weights(folder, dtype), config.layers.hidden_size
    layer = load_layer(read, "mtp.layers.0.", config.layers)
    return config, MTPWeights(
        fc=load_tensor(read, "mtp.fc.weight", hidden, 2 * hidden),
        embedding_norm=load_tensor(read, "mtp.pre_fc_norm_embedding.weight", hidden),
        hidden_norm=load_tensor(read, "mtp.pre_fc_norm_hidden.weight", hidden),
        layers=(layer.map_matrices(lambda weight: dense(weight, dtype)),),
        norm=load_tensor(read, "mtp.norm.weight", hidden),
        draft_vocab=read_draft_vocab(folder, raw, config.layers.vocab_size),
    )


def save_mtp(folder: Path, config: MTPConfig, weights: MTPWeights, extra: Mapping[str, Any] | None = None) -> None:
    """Write an MTP head as ``load_mtp`` reads it; ``extra`` is added to config.json."""
    shape = config.layers
    tensors = {
        "mtp.fc.weight": weights.fc,
        "mtp.pre_fc_norm_embedding.weight": weights.embedding_norm,
        "mtp.pre_fc_norm_hidden.weight": weights.hidden_norm,
        "mtp.norm.weight": weights.norm,
        **layer_tensors("mtp.layers.0.", weights.layers[0], shape.num_heads, shape.head_dim),
    }
    raw = {
        "architectures": ["MTPDraftModel"],
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "mtp_num_hidden_layers": 1,
        **_shape_fields(config, weights.fc.dtype),
    }
    _write(folder, raw, extra, tensors, weights.draft_vocab)


def load_eagle3(
    folder: Path, dtype: torch.dtype, target: ModelConfig | None = None
) -> tuple[Eagle3Config, Eagle3Weights]:
    """Read an EAGLE-3 drafter in the layout of SafeAILab, SpecForge and vLLM.

    Tensors: ``fc``, ``midlayer.*`` or ``layers.0.*`` with its ``hidden_norm``, ``norm``, ``lm_head`` (the target's
    where it is absent), ``d2t [Vd]``: target id minus draft id. ``embed_tokens`` are taken to be the target's, and
    ``t2d`` says what ``d2t`` says. Layer ids count as vLLM's do: i is the output of the target's layer i - 1; where
    there are none, they are vLLM's default 2, L / 2 and L - 3 of L. ``num_target_layers`` is this project's; without
    it the number is the target's.
    """
    source = str(folder / "config.json")
    raw = read_configuration(folder / "config.json")
    names = [name for name in (raw.get("architectures") or []) if name in EAGLE3_ARCHITECTURES]
    if not names:
        known = ", ".join(EAGLE3_ARCHITECTURES)
        raise UserError(f"{source}: architectures is {raw.get('architectures')}, expected one of {known}")
    method = {**raw, **(raw.get("eagle_config") or {})}
    _refuse_variants(method, source)
    shape = _shape(raw, source, "eagle3", "num_hidden_layers", qk_norm=EAGLE3_ARCHITECTURES[names[0]] == "qwen3")
    if int(raw.get("target_hidden_size") or shape.hidden_size) != shape.hidden_size:
        raise UserError(f"{source}: target_hidden_size other than hidden_size is not supported")
    count = raw.get("num_target_layers") or (target.num_layers if target else None)
    if count is None:
        raise UserError(f"{source} has no `num_target_layers`, and no target was named")
    config = Eagle3Config(
        layers=shape,
        target_layer_ids=_target_layers(method, int(count), source),
        num_target_layers=int(count),
        norm_before_residual=bool(raw.get("norm_before_residual")),
        default_tokens=_default_tokens(raw, source, Eagle3Config.default_tokens),
    )
    if target is not None:
        check_shape(config.layers, config.num_target_layers, target)
    read, stored, hidden = drafter_weights(folder, dtype), tensor_names(folder), shape.hidden_size
    if "embed_tokens.weight" in stored:
        load_tensor(read, "embed_tokens.weight", shape.vocab_size, hidden)
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in stored else "layers.0."
    vocab = read_draft_vocab(folder, raw, shape.vocab_size)
    rows = shape.vocab_size if vocab is None else len(vocab)
    return config, Eagle3Weights(
        fc=load_tensor(read, "fc.weight", hidden, hidden * len(config.target_layer_ids)),
        hidden_norm=load_tensor(read, f"{prefix}hidden_norm.weight", hidden),
        layers=(_eagle3_layer(read, prefix, shape),),
        norm=load_tensor(read, "norm.weight", hidden),
        head=load_tensor(read, "lm_head.weight", rows, hidden) if "lm_head.weight" in stored else None,
        draft_vocab=vocab,
    )


def save_eagle3(
    folder: Path, config: Eagle3Config, weights: Eagle3Weights, extra: Mapping[str, Any] | None = None
) -> None:
    """Write an EAGLE-3 drafter with the names of SafeAILab (``midlayer.*``); ``extra`` is added to config.json."""
    shape = config.layers
    tensors = {
        "fc.weight": weights.fc,
        "midlayer.hidden_norm.weight": weights.hidden_norm,
        "norm.weight": weights.norm,
        **layer_tensors("midlayer.", weights.layers[0], shape.num_heads, shape.head_dim),
    }
    if weights.head is not None:
        tensors["lm_head.weight"] = weights.head
    if weights.draft_vocab is not None:
        mask = torch.zeros(shape.vocab_size, dtype=torch.bool)
        mask[weights.draft_vocab.cpu()] = True
        tensors["t2d"] = mask
    raw = {
        "architectures": ["Eagle3Qwen3ForCausalLM" if shape.qk_norm else "LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "draft_vocab_size": shape.vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [index + 1 for index in config.target_layer_ids],
            "use_aux_hidden_state": True,
        },
        **_shape_fields(config, weights.fc.dtype),
    }
    _write(folder, raw, extra, tensors, weights.draft_vocab)


def default_eagle3_taps(num_target_layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer, by their output: SafeAILab's choice. L is 6 or more."""
    return (1, num_target_layers // 2 - 1, num_target_layers - 4)


def _shape(raw: Mapping[str, Any], source: str, architecture: str, depth: str, *, qk_norm: bool) -> ModelConfig:
    count = int(required(raw, depth, source))
    if count != 1:
        raise UserError(f"{source}: {depth} is {count}; a drafter of one layer is supported")
    shape = decoder_config({**raw, "num_hidden_layers": 1}, source, architecture=architecture, qk_norm=qk_norm)
    if shape.attention_bias or shape.mlp_bias:
        raise UserError(f"{source}: biases (attention_bias, mlp_bias) are not supported in a drafter")
    return shape


def _default_tokens(raw: Mapping[str, Any], source: str, otherwise: int) -> int:
    return read_default_tokens({"num_speculative_tokens": otherwise, **raw}, source)


def _refuse_variants(method: Mapping[str, Any], source: str) -> None:
    for name in ("norm_before_fc", "fc_norm", "norm_output", "parallel_drafting"):
        if method.get(name):
            raise UserError(f"{source}: {name} is not supported in an EAGLE-3 drafter")
    if method.get("use_aux_hidden_state") is False:
        raise UserError(
            f"{source}: use_aux_hidden_state is false, but only drafters on the target's taps are supported"
        )
    if float(method.get("logit_scale") or 1.0) != 1.0:
        raise UserError(f"{source}: logit_scale is not supported in an EAGLE-3 drafter")


def _target_layers(method: Mapping[str, Any], num_target_layers: int, source: str) -> tuple[int, ...]:
    given: Sequence[int] | None = method.get("eagle_aux_hidden_state_layer_ids")
    ids = default_eagle3_taps(num_target_layers) if not given else tuple(int(index) - 1 for index in given)
    # vLLM hands the layers over in ascending order whatever the file says.
    if list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= num_target_layers:
        raise UserError(
            f"{source}: eagle_aux_hidden_state_layer_ids is {given}, expected ascending numbers "
            f"in 1..{num_target_layers}"
        )
    return ids


def _eagle3_layer(read: Weights, prefix: str, shape: ModelConfig) -> DecoderLayer[Tensor]:
    """The layer whose queries, keys and values are computed from 2 * K values."""
    hidden, inner, size = shape.hidden_size, shape.intermediate_size, shape.head_dim
    q_rows, kv_rows = shape.num_heads * size, shape.num_kv_heads * size

    def matrices(rows: Mapping[str, int], columns: int) -> Tensor:
        return torch.cat([tensor(name, count, columns) for name, count in rows.items()])

    def tensor(name: str, *sizes: int) -> Tensor:
        return load_tensor(read, f"{prefix}{name}.weight", *sizes)

    return DecoderLayer(
        input_norm=tensor("input_layernorm", hidden),
        qkv=matrices(
            {"self_attn.q_proj": q_rows, "self_attn.k_proj": kv_rows, "self_attn.v_proj": kv_rows}, 2 * hidden
        ),
        qkv_bias=None,
        q_norm=tensor("self_attn.q_norm", size) if shape.qk_norm else None,
        k_norm=tensor("self_attn.k_norm", size) if shape.qk_norm else None,
        out=tensor("self_attn.o_proj", hidden, q_rows),
        out_bias=None,
        post_norm=tensor("post_attention_layernorm", hidden),
        gate_up=matrices({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden),
        gate_up_bias=None,
        down=tensor("mlp.down_proj", hidden, inner),
        down_bias=None,
    )


def _shape_fields(config: RecursiveConfig, dtype: torch.dtype) -> dict[str, Any]:
    shape = config.layers
    return {
        "num_target_layers": config.num_target_layers,
        "num_speculative_tokens": config.default_tokens,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tie_word_embeddings,
        "dtype": str(dtype).removeprefix("torch."),
        **rope_fields(shape.rope),
    }


def _write(
    folder: Path,
    raw: Mapping[str, Any],
    extra: Mapping[str, Any] | None,
    tensors: Mapping[str, Tensor],
    draft_vocab: Tensor | None,
) -> None:
    reduced: dict[str, Any] = {}
    if draft_vocab is not None:
        reduced["draft_vocab_size"] = len(draft_vocab)
        tensors = {**tensors, "d2t": draft_vocab.cpu() - torch.arange(len(draft_vocab))}
    write_drafter(folder, {**raw, **reduced, **(extra or {})}, tensors)
