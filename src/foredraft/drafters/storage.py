"""How drafters are stored small: matrices as int8 with one scale for every 32 elements along K.

In the names of compressed-tensors (``int-quantized``, groups of 32): ``X.weight`` int8 [N, K] and ``X.weight_scale``
bfloat16 [N, K / 32], a weight is code * scale. Codes and scales are those of the native kernels' 8-bit packing
(csrc/matrix.cpp: scale = largest magnitude / 127 rounded up to bfloat16, codes to nearest, ties to even), so that a
drafter which runs in 8 bits loses nothing by having been stored in 8 bits.

Reading gives bfloat16 that packs to the same codes and scales. code * scale rounded to bfloat16 would not always: the
largest magnitude of a group decides about the scale and must be exact. But only one bfloat16 value T leads to a given
scale s, the largest that is not above 127 * s; the elements of a group's largest code are therefore read as T. All
others are off by at most half a bfloat16 step, which is less than half of s.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foredraft.errors import UserError
from foredraft.models.configuration import read_json
from foredraft.models.layers import Weights
from foredraft.models.loading import folder_weights, stored_tensors

GROUP = 32
FEWEST_ROWS = 32
"""Matrices with fewer rows stay as they are: there is nothing to save."""
SCALES_SUFFIX = "_scale"
SMALLEST = 1e-30
"""A group without a larger magnitude is all zeros."""


def drafter_weights(folder: Path, dtype: torch.dtype) -> Weights:
    """Tensors of a drafter's folder in ``dtype``, stored in 8 bits or not. Every drafter is read through this."""
    config = folder / "config.json"
    field = read_json(config).get("quantization_config") if config.exists() else None
    if field != quantization_field():
        return folder_weights(folder, dtype)
    stored = stored_tensors(folder, "cpu")

    def get(name: str) -> Tensor:
        if name not in stored:
            raise UserError(f"{folder} lacks the tensor {name}")
        tensor: Tensor = stored[name].get_tensor(name)
        return tensor

    def read(name: str) -> Tensor:
        tensor = get(name)
        if tensor.dtype != torch.int8:
            return tensor.to(dtype)
        scales = get(name + SCALES_SUFFIX)
        if scales.shape != (len(tensor), tensor.shape[-1] // GROUP) or tensor.shape[-1] % GROUP:
            raise UserError(
                f"{folder}: {name} is {tuple(tensor.shape)}, {name}{SCALES_SUFFIX} {tuple(scales.shape)}; expected one "
                f"scale for every {GROUP} columns"
            )
        return dequantize(tensor, scales).to(dtype)

    return read


def compact(folder: Path, output: Path) -> None:
    """Write the drafter in ``folder`` to ``output`` with its matrices in 8 bits and all other floats as bfloat16.

    Everything else in the folder is copied. Raises UserError where the weights are quantised already.
    """
    source = folder / "config.json"
    raw = read_json(source)
    if raw.get("quantization_config"):
        raise UserError(f"{source}: the weights are quantised already (quantization_config)")
    if output.exists() and output.samefile(folder):
        raise UserError(f"{output}: the small drafter needs a folder of its own")
    tensors: dict[str, Tensor] = {}
    for name, file in stored_tensors(folder, "cpu").items():
        tensor = file.get_tensor(name)
        if not tensor.is_floating_point():
            tensors[name] = tensor
        elif tensor.ndim == 2 and tensor.shape[1] % GROUP == 0 and len(tensor) >= FEWEST_ROWS:
            tensors[name], tensors[name + SCALES_SUFFIX] = quantize(tensor)
        else:
            tensors[name] = tensor.bfloat16()
    output.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.is_file() and path != source and not path.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copy2(path, output)
    config = {**raw, "dtype": "bfloat16", "quantization_config": quantization_field()}
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, output / "model.safetensors")


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [N, K] and scales bfloat16 [N, K / 32] of ``weight [N, K]``, first rounded to bfloat16."""
    groups = weight.bfloat16().float().view(len(weight), -1, GROUP)
    if not bool(groups.isfinite().all()):
        raise UserError("a weight has NaN or infinite elements and cannot be quantised")
    top = groups.abs().amax(-1)
    bits = (torch.where(top > SMALLEST, top, 0.0) / 127).view(torch.int32)
    scales = (bits + 0xFFFF & ~0xFFFF).view(torch.float32)
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    codes = (groups * inverse.unsqueeze(-1)).round()
    return codes.flatten(1).to(torch.int8), scales.bfloat16()


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 [N, K] that packs to ``codes`` int8 [N, K] and ``scales`` bfloat16 [N, K / 32] again."""
    groups = codes.view(len(codes), -1, GROUP)
    wide = scales.float().unsqueeze(-1)
    largest = ((127 * wide).view(torch.int32) & ~0xFFFF).view(torch.float32)
    # In int16, where -128 has a magnitude.
    magnitude = groups.short().abs()
    is_top = magnitude == magnitude.amax(-1, keepdim=True)
    values = torch.where(is_top, largest * groups.sign(), groups * wide)
    return values.bfloat16().flatten(1)


def quantization_field() -> dict[str, Any]:
    """``quantization_config`` of a drafter in this form."""
    weights = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": [],
        "kv_cache_scheme": None,
    }
