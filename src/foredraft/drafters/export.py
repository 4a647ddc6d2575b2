"""Drafters for other engines: the layouts that vLLM reads, complete in themselves, in bfloat16.

A shipped drafter may leave out its head, which is then the target's own rows; an exported one brings them, because
vLLM shares a head only where draft and target vocabulary are the same. Embeddings that are the target's stay out: vLLM
and llama.cpp share them.

How the layouts count target layers: here, z-lab and DeepSpec id i is the output of layer i; EAGLE-3 checkpoints and
speculators store i + 1 for it, the layer whose input it is. vLLM hands a drafter its taps in ascending order, so they
are sorted, and the columns of fc with them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foredraft.drafters import ASSETS
from foredraft.drafters.checkpoints import layer_tensors, load_dflash, load_dspark, rope_fields, window_fields
from foredraft.drafters.dflash import DFlashConfig, DFlashWeights
from foredraft.drafters.dspark import DSparkConfig, DSparkWeights
from foredraft.drafters.eagle3 import Eagle3Config, Eagle3Weights
from foredraft.drafters.sequential_checkpoints import load_eagle3
from foredraft.errors import UserError
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import DecoderModel
from foredraft.models.loading import EMBEDDED, resolve

HeadRows = Callable[[Tensor | None], Tensor]
"""The target's head rows for some token ids, or all of them."""

LAYOUTS = {
    "dflash": ("z-lab", "speculators", "gguf"),
    "eagle3": ("specforge", "speculators", "gguf"),
    "dspark": ("deepspec", "speculators", "gguf"),
}
"""The layouts of each method that can be exported, the method's usual one first."""


@dataclass(frozen=True)
class Portable:
    """A drafter before any layout.

    shape: of its decoder layers; windows: as DFlashConfig says. tensors: by name in bfloat16, without head and
    vocabulary; a layer's names begin with ``layers.i.``. taps: 0-based by the layers' output, ascending. head: [Vd, K],
    None for the target's whole head. vocab: [Vd] target ids, None for all. own: the method's keys of config.json
    that every layout has.
    """

    method: str
    shape: ModelConfig
    tensors: dict[str, Tensor]
    taps: tuple[int, ...]
    num_target_layers: int
    default_tokens: int
    head: Tensor | None
    vocab: Tensor | None
    own: dict[str, Any]
    windows: dict[str, Any]


def drafter_folder(model: str, method: str, drafter: str | None) -> Path:
    """The folder of the drafter that was named, or else of the one that ships for the embedded model."""
    if drafter is not None:
        return resolve(drafter)
    folder = ASSETS / f"{method}-{EMBEDDED}"
    if model != EMBEDDED or not folder.is_dir():
        raise UserError(f"no {method} drafter ships for {model}; name one with --drafter")
    return folder


def load_portable(method: str, folder: Path, target: DecoderModel) -> Portable:
    """Read a drafter of ``target`` from its folder. Raises UserError where no other engine could run it."""
    dtype, shape = torch.bfloat16, target.config
    if method == "dflash":
        return portable_dflash(*load_dflash(folder, dtype, shape), target.head_rows)
    if method == "eagle3":
        return portable_eagle3(*load_eagle3(folder, dtype, shape), target.head_rows)
    if method == "dspark":
        return portable_dspark(*load_dspark(folder, dtype, shape), target.head_rows)
    raise UserError(f"drafters of method {method!r} cannot be exported; those of {', '.join(LAYOUTS)} can")


def portable_dflash(config: DFlashConfig, weights: DFlashWeights, head_rows: HeadRows) -> Portable:
    taps, fc = _ascending(config.target_layer_ids, weights.fc)
    tensors = {"fc.weight": fc, "hidden_norm.weight": weights.context_norm, "norm.weight": weights.norm}
    return Portable(
        method="dflash",
        shape=config.layers,
        tensors=_bfloat16(tensors | _layers(config.layers, weights.layers)),
        taps=taps,
        num_target_layers=config.num_target_layers,
        default_tokens=config.default_tokens,
        head=_head(None, weights.draft_vocab, head_rows),
        vocab=weights.draft_vocab,
        own={"block_size": config.block_size, "mask_token_id": config.mask_token_id},
        windows=window_fields(config),
    )


def portable_dspark(config: DSparkConfig, weights: DSparkWeights, head_rows: HeadRows) -> Portable:
    """vLLM and llama.cpp know the Markov head ``vanilla`` only; vLLM would run another as if it were that."""
    if config.markov_kind != "vanilla":
        raise UserError(
            f"a DSpark drafter with a {config.markov_kind} Markov head cannot be exported: vLLM and llama.cpp run "
            "the vanilla head only"
        )
    backbone = portable_dflash(config.backbone, weights.backbone, head_rows)
    markov, with_markov = weights.markov, config.confidence_with_markov
    tensors = {"markov_head.markov_w1.weight": markov.w1, "markov_head.markov_w2.weight": markov.w2}
    if weights.confidence is not None:
        bias = weights.confidence_bias
        tensors["confidence_head.proj.weight"] = weights.confidence
        tensors["confidence_head.proj.bias"] = torch.zeros(1) if bias is None else bias
    if weights.embeddings is not None:
        tensors["embed_tokens.weight"] = weights.embeddings
    own = {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_kind,
        "enable_confidence_head": weights.confidence is not None,
        "confidence_head_with_markov": weights.confidence is not None and bool(with_markov),
    }
    return replace(
        backbone,
        method="dspark",
        tensors=backbone.tensors | _bfloat16(tensors),
        head=_head(weights.head, backbone.vocab, head_rows),
        own=backbone.own | own,
    )


def portable_eagle3(config: Eagle3Config, weights: Eagle3Weights, head_rows: HeadRows) -> Portable:
    taps, fc = _ascending(config.target_layer_ids, weights.fc)
    tensors = {
        "fc.weight": fc,
        "layers.0.hidden_norm.weight": weights.hidden_norm,
        "norm.weight": weights.norm,
    }
    return Portable(
        method="eagle3",
        shape=config.layers,
        tensors=_bfloat16(tensors | _layers(config.layers, weights.layers)),
        taps=taps,
        num_target_layers=config.num_target_layers,
        default_tokens=config.default_tokens,
        head=_head(weights.head, weights.draft_vocab, head_rows),
        vocab=weights.draft_vocab,
        own={"norm_before_residual": config.norm_before_residual},
        windows={},
    )


def write_portable(drafter: Portable, layout: str, folder: Path, target: str) -> None:
    """Write config.json and model.safetensors. target: its name or folder, which the speculators layout records."""
    config = _speculators_config(drafter, target) if layout == "speculators" else CONFIGS[layout](drafter)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = stored_tensors(drafter, layout)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def stored_tensors(drafter: Portable, layout: str) -> dict[str, Tensor]:
    """The tensors of a layout: head and maps of the vocabulary included.

    d2t: [Vd] target id minus draft id. t2d: [V] whether a target id has a draft id; vLLM does not need it, others do.
    """
    tensors = dict(drafter.tensors)
    if layout == "specforge":
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    if drafter.head is not None:
        tensors["lm_head.weight"] = drafter.head
    if drafter.vocab is not None:
        listed = torch.zeros(drafter.shape.vocab_size, dtype=torch.bool)
        listed[drafter.vocab] = True
        tensors |= {"d2t": drafter.vocab - torch.arange(len(drafter.vocab)), "t2d": listed}
    return tensors


def _zlab_config(drafter: Portable) -> dict[str, Any]:
    return _shape_fields(drafter) | {
        "architectures": ["DFlashDraftModel"],
        "block_size": drafter.own["block_size"],
        "dflash_config": {"mask_token_id": drafter.own["mask_token_id"], "target_layer_ids": list(drafter.taps)},
    }


def _deepspec_config(drafter: Portable) -> dict[str, Any]:
    return _shape_fields(drafter) | {
        "architectures": ["Qwen3DSparkModel"],
        "target_layer_ids": list(drafter.taps),
        **drafter.own,
    }


def _specforge_config(drafter: Portable) -> dict[str, Any]:
    inputs_of = _next_layers(drafter)
    qwen3 = drafter.shape.qk_norm
    return _shape_fields(drafter) | {
        "architectures": ["Eagle3Qwen3ForCausalLM" if qwen3 else "LlamaForCausalLMEagle3"],
        "eagle_aux_hidden_state_layer_ids": inputs_of,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": inputs_of, "use_aux_hidden_state": True},
        **drafter.own,
    }


CONFIGS: Mapping[str, Callable[[Portable], dict[str, Any]]] = {
    "z-lab": _zlab_config,
    "deepspec": _deepspec_config,
    "specforge": _specforge_config,
}


def _speculators_config(drafter: Portable, target: str) -> dict[str, Any]:
    eagle = drafter.method == "eagle3"
    causal = drafter.windows.get("is_causal", drafter.windows.get("use_sliding_window", False))
    if causal and "full_attention" in drafter.windows["layer_types"]:
        raise UserError(
            "the speculators layout has one setting of causality for all layers, this drafter mixes both; "
            "export it in the z-lab layout"
        )
    taps = "eagle_aux_hidden_state_layer_ids" if eagle else "aux_hidden_state_layer_ids"
    return {
        "architectures": [{"dflash": "DFlash", "dspark": "DSpark", "eagle3": "Eagle3"}[drafter.method] + "Speculator"],
        "speculators_model_type": drafter.method,
        "speculators_config": {
            "algorithm": drafter.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafter.default_tokens}],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "transformer_layer_config": _shape_fields(drafter),
        "draft_vocab_size": _draft_vocab_size(drafter),
        "target_hidden_size": drafter.shape.hidden_size,
        taps: _next_layers(drafter),
        **({} if eagle else {"sample_from_anchor": drafter.method == "dspark"}),
        **({"sliding_window_non_causal": False} if causal else {}),
        **drafter.own,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def _shape_fields(drafter: Portable) -> dict[str, Any]:
    """The decoder's keys. The RoPE twice: as transformers before and since version 5 has it."""
    shape, rope = drafter.shape, rope_fields(drafter.shape.rope)
    scaling = rope["rope_scaling"] or {"rope_type": "default"}
    return {
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": _draft_vocab_size(drafter),
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **rope,
        "rope_parameters": {"rope_theta": rope["rope_theta"], **scaling},
        **drafter.windows,
        "num_target_layers": drafter.num_target_layers,
        "num_speculative_tokens": drafter.default_tokens,
    }


def _draft_vocab_size(drafter: Portable) -> int:
    return drafter.shape.vocab_size if drafter.vocab is None else len(drafter.vocab)


def _next_layers(drafter: Portable) -> list[int]:
    """The taps as the layers whose input they are."""
    return [index + 1 for index in drafter.taps]


def _ascending(taps: tuple[int, ...], fc: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """Sorted taps, and ``fc [K, taps * K]`` with its columns in that order."""
    if len({*taps}) != len(taps):
        raise UserError(f"target_layer_ids {list(taps)} names a layer twice, which other engines cannot hand over")
    order = sorted(range(len(taps)), key=taps.__getitem__)
    parts = fc.chunk(len(taps), dim=1)
    return tuple(taps[index] for index in order), torch.cat([parts[index] for index in order], dim=1)


def _layers(shape: ModelConfig, layers: tuple[Any, ...]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(layers):
        tensors |= layer_tensors(f"layers.{index}.", layer, shape.num_heads, shape.head_dim)
    return tensors


def _head(own: Tensor | None, vocab: Tensor | None, head_rows: HeadRows) -> Tensor | None:
    if own is None and vocab is None:
        return None
    return (head_rows(vocab) if own is None else own).detach().to(torch.bfloat16)


def _bfloat16(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to(torch.bfloat16) for name, tensor in tensors.items()}
