"""Drafters in 8 bits: the native packing's own codes, read back so that packing finds them again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import dflash_json, dflash_tensors, write_dflash
from torch import Tensor

from foredraft.cli.export import export
from foredraft.drafters.checkpoints import load_dflash
from foredraft.drafters.storage import GROUP, compact, dequantize, drafter_weights, quantization_field, quantize
from foredraft.drafters.weights import named_tensors
from foredraft.errors import UserError
from foredraft.ops import native

needs_native = pytest.mark.skipif(native.unavailable() is not None, reason="the native library is missing")


def bfloat16_of(bits: Any) -> Tensor:
    return torch.from_numpy(np.asarray(bits, dtype=np.uint16).view(np.int16).copy()).view(torch.bfloat16)


def all_tops() -> Tensor:
    """One group for each positive bfloat16 magnitude from 2^-99 to 2^99, which is its largest element; the others
    are random and below it."""
    tops = bfloat16_of(np.arange((127 - 99) << 7, (127 + 99) << 7))
    generator = torch.Generator().manual_seed(0)
    shares = 2 * torch.rand(len(tops), GROUP, generator=generator) - 1
    weight = (tops.float().unsqueeze(1) * shares).bfloat16()
    weight[:, 7] = tops * torch.where(torch.arange(len(tops)) % 2 == 0, 1, -1)
    return weight


def packed_values(weight: Tensor) -> Tensor:
    """What the native kernels make of ``weight`` in 8 bits: code * scale, which float32 holds exactly."""
    return native.unpack(native.pack(weight, "int8"))


def test_every_group_maximum_survives() -> None:
    weight = all_tops()
    codes, scales = quantize(weight)
    again = dequantize(codes, scales)
    assert torch.equal(again[:, 7], weight[:, 7])
    codes_again, scales_again = quantize(again)
    assert torch.equal(codes_again, codes) and torch.equal(scales_again, scales)


@needs_native
def test_codes_and_scales_are_the_native_packing_s() -> None:
    """From the weight itself and from what is read back."""
    weight = all_tops()
    codes, scales = quantize(weight)
    stored = codes.float() * scales.float().repeat_interleave(GROUP, dim=1)
    assert torch.equal(packed_values(weight), stored)
    assert torch.equal(packed_values(dequantize(codes, scales)), stored)
    # code * scale as such would not do: the reason for reading the largest element as something else.
    assert not torch.equal(packed_values(stored.bfloat16()), stored)


@needs_native
@settings(max_examples=80)
@given(data=st.data())
def test_any_bit_patterns(data: st.DataObject) -> None:
    """Groups of equal elements, zeros, subnormals, huge and tiny values side by side."""
    finite = st.integers(0, 0xFFFF).filter(lambda bits: bits & 0x7F80 != 0x7F80)
    near = st.integers(0x3F00, 0x4100) | st.integers(0xBF00, 0xC100)
    element = data.draw(st.sampled_from([finite, near, st.sampled_from([0, 0x8000, 1, 0x3F80, 0xBF80, 0x7F7F])]))
    bits = data.draw(st.lists(element, min_size=2 * GROUP, max_size=2 * GROUP))
    weight = bfloat16_of(bits).view(1, -1)
    codes, scales = quantize(weight)
    stored = codes.float() * scales.float().repeat_interleave(GROUP, dim=1)
    assert torch.equal(packed_values(weight), stored)
    assert torch.equal(packed_values(dequantize(codes, scales)), stored)
    # Half a scale for the codes, half a bfloat16 step for being read.
    error = (dequantize(codes, scales).double() - weight.double()).abs().view(-1, GROUP)
    assert bool((error <= 1.0001 * scales.double().view(-1, 1) + 1e-30).all())


def test_codes_by_hand() -> None:
    """Largest magnitude 127: the scale is 1 and codes are rounded, ties to even."""
    weight = torch.zeros(1, GROUP)
    weight[0, :6] = torch.tensor([127.0, -127.0, 2.5, 3.5, -0.5, 60.25])
    codes, scales = quantize(weight)
    assert scales.tolist() == [[1.0]] and codes[0, :6].tolist() == [127, -127, 2, 4, 0, 60]
    assert dequantize(codes, scales)[0, :6].tolist() == [127.0, -127.0, 2.0, 4.0, 0.0, 60.0]
    # 2 / 127 is 129.008 / 128 * 2^-6, so the scale is 130 / 128 * 2^-6, and 2 is 126.03 of them.
    weight[0, :6] = torch.tensor([2.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    codes, scales = quantize(weight)
    assert scales.item() == 130 / 128 / 64 and codes[0, :2].tolist() == [126, 63]
    assert dequantize(codes, scales)[0, 0].item() == 2.0


def wide_json() -> dict[str, Any]:
    """A drafter whose matrices have whole groups of columns and enough rows, but for k_proj and v_proj."""
    return dflash_json(
        hidden_size=64, intermediate_size=96, head_dim=8, num_attention_heads=8, num_key_value_heads=2, vocab_size=40,
        draft_vocab_size=12,
    )  # fmt: skip


def write_wide(folder: Path) -> dict[str, Tensor]:
    tensors = dflash_tensors(wide_json())
    tensors["d2t"] = torch.arange(0, 24, 2)
    write_dflash(folder, wide_json(), tensors)
    return tensors


def test_a_compacted_drafter_is_read_as_before(tmp_path: Path) -> None:
    tensors = write_wide(tmp_path / "given")
    (tmp_path / "given" / "calibration.json").write_text("{}")
    compact(tmp_path / "given", tmp_path / "small")
    stored = load_file(tmp_path / "small" / "model.safetensors")
    matrices = {name for name, tensor in tensors.items() if tensor.ndim == 2 and len(tensor) >= 32}
    assert {name for name, tensor in stored.items() if tensor.dtype == torch.int8} == matrices
    assert {"fc.weight", "layers.1.mlp.down_proj.weight"} < matrices
    assert set(stored) == set(tensors) | {f"{name}_scale" for name in matrices}
    for name in matrices:
        rows, columns = tensors[name].shape
        assert stored[f"{name}_scale"].shape == (rows, columns // 32)
        assert stored[f"{name}_scale"].dtype == torch.bfloat16
    assert stored["norm.weight"].dtype == torch.bfloat16 and torch.equal(stored["d2t"], tensors["d2t"])
    assert (tmp_path / "small" / "calibration.json").read_text() == "{}"
    config, weights = load_dflash(tmp_path / "small", torch.bfloat16)
    assert config == load_dflash(tmp_path / "given", torch.bfloat16)[0]
    before = dict(named_tensors(load_dflash(tmp_path / "given", torch.bfloat16)[1]))
    assert weights.draft_vocab is not None
    assert weights.draft_vocab.tolist() == (torch.arange(0, 24, 2) + torch.arange(12)).tolist()
    for name, tensor in named_tensors(weights):
        if tensor.ndim == 1:
            assert torch.equal(tensor, before[name])
        else:
            assert tensor.dtype == torch.bfloat16 and not torch.equal(tensor, before[name])
            torch.testing.assert_close(tensor, before[name], rtol=0, atol=float(before[name].abs().max()) / 150)


def test_the_size_is_that_of_8_bits(tmp_path: Path) -> None:
    tensors = {"fc.weight": torch.randn(1024, 512), "norm.weight": torch.ones(512)}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "dtype": "float32"}))
    save_file(tensors, tmp_path / "model.safetensors")
    compact(tmp_path, tmp_path / "small")
    size = (tmp_path / "small" / "model.safetensors").stat().st_size
    assert size < 1024 * 512 * (1 + 2 / 32) + 2 * 512 + 600
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["quantization_config"] == quantization_field()
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"] == {
        **{"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
    }


def test_compressed_tensors_reads_the_configuration() -> None:
    compressed = pytest.importorskip("compressed_tensors.quantization")
    found = compressed.QuantizationConfig.model_validate(quantization_field())
    (scheme,) = found.config_groups.values()
    assert scheme.weights.num_bits == 8 and scheme.weights.group_size == 32 and found.format == "int-quantized"


def test_what_cannot_be_compacted(tmp_path: Path) -> None:
    write_wide(tmp_path / "given")
    with pytest.raises(UserError, match="needs a folder of its own"):
        compact(tmp_path / "given", tmp_path / "given")
    compact(tmp_path / "given", tmp_path / "small")
    with pytest.raises(UserError, match="quantised already"):
        compact(tmp_path / "small", tmp_path / "smaller")
    with pytest.raises(UserError, match="NaN or infinite"):
        quantize(torch.full((1, GROUP), torch.inf))


def test_a_damaged_file(tmp_path: Path) -> None:
    write_wide(tmp_path / "given")
    compact(tmp_path / "given", tmp_path / "small")
    path = tmp_path / "small" / "model.safetensors"
    stored = load_file(path)
    scales = stored.pop("fc.weight_scale")
    save_file(stored, path)
    with pytest.raises(UserError, match=r"lacks the tensor fc\.weight_scale"):
        drafter_weights(tmp_path / "small", torch.bfloat16)("fc.weight")
    save_file(stored | {"fc.weight_scale": scales[:, :1].contiguous()}, path)
    with pytest.raises(UserError, match="expected one scale for every 32 columns"):
        drafter_weights(tmp_path / "small", torch.bfloat16)("fc.weight")


def test_export_writes_the_compact_form(tmp_path: Path) -> None:
    raw = dflash_json()
    write_dflash(tmp_path / "whole", raw, dflash_tensors(raw))
    export("tiny", tmp_path / "small", "dflash", str(tmp_path / "whole"), "compact")
    assert json.loads((tmp_path / "small/config.json").read_text())["quantization_config"] == quantization_field()
