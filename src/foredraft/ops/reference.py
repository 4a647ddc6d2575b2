"""The operations in PyTorch: the definition that every faster version is tested against.

T is the number of rows (tokens) of a flat batch, H attention heads, G key/value heads, D the head size.
All functions are differentiable, so that training and inference share them.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.ops.plan import FEW_ROWS, AttentionPlan
from foredraft.quantization.mxfp4 import quantize

PACKED_FOR_ROWS = 8


def embedding(token_ids: Tensor, table: Tensor) -> Tensor:
    """Rows of ``table [V, K]`` for ``token_ids [T]``."""
    return F.embedding(token_ids, table)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [T, K] @ weight [N, K].T + bias [N]``, for a weight as it is or as ``pack`` returns it.

    A single row is computed as two: the kernel that oneDNN takes for one row sums a long K in another order
    than the one it takes for several, and a token must not depend on how many rows are verified with it.
    """
    if len(x) == 1 and x.dtype == torch.bfloat16:
        return _linear(x.repeat(2, 1), weight, bias)[:1]
    return _linear(x, weight, bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return F.linear(x, weight, bias)


def pack(weight: Tensor, form: str = "bf16") -> Tensor:
    """``weight [N, K]`` in the order in which ``linear`` streams it fastest, for weights that stay as they are.

    form: see ``Format``; for MXFP4 PyTorch multiplies what it stands for, in the weight's dtype.
    bfloat16 on a CPU goes into oneDNN's blocked layout: the same bits out of ``linear``, in about two thirds of the
    time at few rows. Other weights are returned unchanged.
    """
    if form.startswith("mxfp4"):
        weight = quantize(weight).dequantize(weight.dtype)
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _blocked_layout_is_fast():
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
        return packed
    return weight


def unpack(weight: Tensor) -> Tensor:
    """A weight's values again, [N, K], whether it was packed or not."""
    return weight.to_dense() if weight.is_mkldnn else weight


@cache
def _blocked_layout_is_fast() -> bool:
    return bool(torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def argmax(x: Tensor) -> Tensor:
    """The index of the largest value of each row of ``x [T, N]``, of equals the first: [T] int64."""
    return x.argmax(dim=-1)


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """``argmax`` of ``logits [R, V]``, [R] int64, and its log probability under softmax, [R] float32.

    The latter is NaN where a row has a NaN, where its highest logit is infinite, or where all are -inf.
    """
    ids = argmax(logits)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    above = wide - wide.gather(-1, ids.unsqueeze(-1))
    return ids, -above.exp().sum(-1).log().float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, reduced in float32 (float64 stays float64)."""
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x [T, H, D]`` by the angles of its positions, halves paired (Hugging Face layout).

    ``cos`` and ``sin`` are [T, D], the second half repeating the first.
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` for ``gate_up [T, 2M]``, the gate in the first half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def attention(q: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan) -> Tensor:
    """Grouped-query attention of a ragged flat batch over a slotted cache.

    ``q`` is [T, H, D]; ``keys`` and ``values`` are [slots, capacity, G, D] and already hold the rows of this
    batch. ``plan`` says which rows belong together and what each may see. Returns [T, H, D].

    Up to ``FEW_ROWS`` rows a sequence (decode and verification) the products are written out: on CPUs a row's
    result then does not depend on how many rows are beside it, which PyTorch's fused kernel, used for prefill,
    does not keep. Query heads that share a key/value head are folded into the row dimension, so that
    grouped-query attention needs no copy of the cache.
    """
    rows, heads, size = q.shape
    parts = []
    for group in plan.groups:
        query = (q if group.rows is None else q[group.rows]).view(len(group.slots), -1, heads, size)
        key = group.select(keys).transpose(1, 2)
        value = group.select(values).transpose(1, 2)
        if group.triangular:
            result = F.scaled_dot_product_attention(
                query.transpose(1, 2), key, value, is_causal=True, enable_gqa=True
            ).transpose(1, 2)
        else:
            result = _folded_attention(query, key, value, group.mask)
        parts.append(result.reshape(-1, heads, size))
    if len(parts) == 1 and plan.groups[0].rows is None:
        return parts[0]
    out = q.new_empty(rows, heads, size)
    for group, part in zip(plan.groups, parts, strict=True):
        out[group.rows] = part
    return out


def _folded_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """``query [B, n, H, D]`` over ``key``, ``value [B, G, S, D]``; the result is [B, n, H, D]."""
    count, n, heads, size = query.shape
    groups = key.shape[1]
    share = heads // groups
    folded = query.view(count, n, groups, share, size).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(count, groups, share * n, size)
    if n > FEW_ROWS:
        result = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask)
    else:
        scores = folded @ key.transpose(-1, -2)
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        scores = scores.to(wide) * size**-0.5
        if mask is not None:
            scores = scores.masked_fill_(~mask, -torch.inf)
        result = torch.softmax(scores, dim=-1).to(query.dtype) @ value
    return result.view(count, groups, share, n, size).permute(0, 3, 1, 2, 4)
