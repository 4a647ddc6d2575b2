"""How checkpoints in the Hugging Face layout hold MXFP4 weights: tensor names and config.json fields.

Two layouts, as vLLM's loaders read them (model_executor/layers/quantization/quark and compressed_tensors):

- "quark": ``X.weight`` uint8 [N, K/2] and ``X.weight_scale`` uint8 [N, K/32].
- "compressed-tensors", format ``mxfp4-pack-quantized``: ``X.weight_packed`` and ``X.weight_scale``, the same bytes.

What vLLM 0.32 makes of the configurations written here:

- Quark: scheme ``QuarkOCP_MX`` with unquantised activations, so W4A16: Marlin on CUDA; on ROCm decoding to bfloat16
  in every call (and only with the amd-quark package), as its AITER kernel wants MXFP4 activations. A quantised head of
  this layout is not loaded.
- compressed-tensors: scheme ``CompressedTensorsW4A4Mxfp4`` whatever is said of activations. Where the hardware has
  MXFP4 arithmetic (FlashInfer on Blackwell, AITER on ROCm) activations are MXFP4 too; elsewhere it is W4A16 (Marlin).
- On CPU both schemes are chosen and then end in "Failed to find a kernel", before any tensor is read.
"""

from collections.abc import Mapping
from typing import Any, Literal

from foredraft.errors import UserError
from foredraft.quantization.mxfp4 import BLOCK

Layout = Literal["quark", "compressed-tensors"]

CODES_SUFFIX: dict[Layout, str] = {"quark": "", "compressed-tensors": "_packed"}
"""Added to the name of a weight, ``X.weight``, that is stored as codes."""

SCALES_SUFFIX = "_scale"

_PACKED_FORMAT = "mxfp4-pack-quantized"


def config_field(layout: Layout, quantized_head: bool) -> dict[str, Any]:
    """``quantization_config`` of a checkpoint whose layers' matrices, and head if wanted, are MXFP4."""
    ignored = [] if quantized_head else ["lm_head"]
    if layout == "quark":
        weight = {
            "dtype": "fp4",
            "qscheme": "per_group",
            "ch_axis": -1,
            "group_size": BLOCK,
            "scale_format": "e8m0",
            "is_dynamic": False,
        }
        return {
            "quant_method": "quark",
            "global_quant_config": {"weight": weight, "input_tensors": None, "output_tensors": None, "bias": None},
            "layer_quant_config": {},
            "layer_type_quant_config": {},
            "exclude": ignored,
            "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        }
    group = {
        # The head is no Linear in vLLM: it has to be named.
        "targets": ["Linear", "lm_head"] if quantized_head else ["Linear"],
        "format": _PACKED_FORMAT,
        "weights": {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "group",
            "group_size": BLOCK,
            "scale_dtype": "torch.uint8",
            "dynamic": False,
        },
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": _PACKED_FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


def read_layout(config: Mapping[str, Any], source: str) -> Layout | None:
    """The layout that a config.json announces; None where it says nothing of quantization.

    Which tensors are quantised is seen from their names; how activations were meant to be is not looked at, since
    weights are what foredraft keeps in MXFP4. Raises UserError for every other kind of quantised weights.
    """
    field = config.get("quantization_config")
    if field is None:
        return None
    method = field.get("quant_method") if isinstance(field, Mapping) else field
    if method == "quark":
        _check_quark(field, source)
        return "quark"
    if method == "compressed-tensors":
        _check_compressed_tensors(field, source)
        return "compressed-tensors"
    raise _unsupported(source, f"quant_method {method!r}")


def _check_quark(field: Mapping[str, Any], source: str) -> None:
    weight = (field.get("global_quant_config") or {}).get("weight")
    if isinstance(weight, list) and len(weight) == 1:
        (weight,) = weight
    if not isinstance(weight, Mapping):
        raise _unsupported(source, f"global_quant_config.weight {weight!r}")
    for name, expected in (("dtype", "fp4"), ("group_size", BLOCK), ("scale_format", "e8m0")):
        if weight.get(name) != expected:
            raise _unsupported(source, f"global_quant_config.weight with {name} {weight.get(name)!r}")


def _check_compressed_tensors(field: Mapping[str, Any], source: str) -> None:
    groups = field.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _unsupported(source, f"config_groups {groups!r}")
    for name, group in groups.items():
        packing = group.get("format") or field.get("format")
        if packing != _PACKED_FORMAT:
            raise _unsupported(source, f"format {packing!r} in config_groups.{name}")
        weights = group.get("weights") or {}
        for key, expected in (("num_bits", 4), ("type", "float"), ("group_size", BLOCK)):
            if weights.get(key) != expected:
                raise _unsupported(source, f"{key} {weights.get(key)!r} in config_groups.{name}.weights")


def _unsupported(source: str, found: str) -> UserError:
    return UserError(
        f"{source}: quantization_config has {found}, which is not supported; quantised weights must be MXFP4 as Quark "
        f"(dtype fp4, group_size {BLOCK}, scale_format e8m0) or compressed-tensors ({_PACKED_FORMAT}) store them"
    )
