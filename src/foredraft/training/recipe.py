"""What is chosen before training, and what every method's objective needs of the target."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from foredraft.drafters.weights import map_tensors
from foredraft.errors import UserError
from foredraft.models.batch import flat_batch
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import DecoderModel, TorchDecoder
from foredraft.models.layers import DecoderLayer
from foredraft.models.rope import RotaryTable, inverse_frequencies
from foredraft.ops import REFERENCE
from foredraft.training.losses import Mixture

W = TypeVar("W")


@dataclass(frozen=True)
class Recipe:
    """layers: drafter depth D. taps: target layers. drafts: numbers of draft tokens trained, drawn per step, so that a
    short block drafts as well as a long one; the largest is what the drafter can do, where its method has a limit.
    gamma: decay of the loss weight exp(-(k - 1) / gamma) over draft positions k. anchors: blocks per answer and step.
    evaluation_drafts: at which held-out texts are scored, always the same."""

    layers: int
    drafts: tuple[int, ...]
    taps: tuple[int, ...]
    mask_token_id: int
    gamma: float
    mixture: Mixture
    anchors: int
    evaluation_drafts: int = 7

    def check_shape(self, target: ModelConfig) -> None:
        """Raise UserError unless a new drafter of that target can have this shape."""
        if not 1 <= self.layers < target.num_layers:
            raise UserError(f"layers is {self.layers}, expected 1 to {target.num_layers - 1} for this target")
        if not all(0 <= tap < target.num_layers for tap in self.taps):
            raise UserError(f"taps are {list(self.taps)}, expected layers of the target, 0 to {target.num_layers - 1}")

    def check(self) -> None:
        """Raise UserError unless a drafter can be trained so."""
        if not self.drafts or min(self.drafts) < 1:
            raise UserError(f"draft tokens are {list(self.drafts)}, expected integers of at least 1")
        if not self.gamma > 0:
            raise UserError(f"gamma is {self.gamma}, expected a number above 0")
        if self.anchors < 1:
            raise UserError(f"anchors is {self.anchors}, expected at least 1")
        parts = (self.mixture.token, self.mixture.target, self.mixture.distance)
        if not all(0 <= part < math.inf for part in parts) or not any(parts):
            raise UserError(
                f"the weights of the loss are {list(parts)}, expected numbers of at least 0, not all of them 0"
            )

    def draw_drafts(self, generator: torch.Generator) -> int:
        return self.drafts[int(torch.randint(len(self.drafts), (), generator=generator))]


def trainable(weights: W, device: torch.device) -> W:
    """A float32 copy that is trained."""
    return map_tensors(weights, lambda tensor: tensor.detach().to(device, torch.float32, copy=True).requires_grad_())


def target_layers(target: DecoderModel) -> list[DecoderLayer[Tensor]]:
    """The target's layers as plain matrices; raises UserError for a target in the native kernels' packing."""
    if not isinstance(target.decoder, TorchDecoder):
        raise UserError("training needs a target on PyTorch; load it with kernels 'pytorch'")
    return [layer.map_matrices(target.ops.unpack) for layer in target.decoder.layers]


def rotary_table(config: ModelConfig, target: DecoderModel) -> RotaryTable:
    frequencies, factor = inverse_frequencies(config.rope, config.head_dim)
    return RotaryTable(frequencies, factor, target.dtype, target.device)


@torch.no_grad()
def residual_size(target: DecoderModel, sample: Sequence[int]) -> float:
    """The usual size (root mean square) of what the target's last layer reads, on the text ``sample``."""
    batch = flat_batch([sample], [0], [0], [1], target.device)
    taps = target.forward(batch, target.new_cache(), (target.config.num_layers - 2,)).taps
    assert taps is not None
    return float(taps.float().square().mean(dim=-1).sqrt().median())


@torch.no_grad()
def final_hidden(target: DecoderModel, last: Tensor) -> Tensor:
    """The target's hidden state after its final norm, from the output ``last [T, K]`` of its last layer."""
    return REFERENCE.rms_norm(last, target.final_norm, target.config.rms_norm_eps)


@torch.no_grad()
def soft_labels(target: DecoderModel, head: Tensor, last: Sequence[Tensor]) -> Tensor:
    """The target's distribution over the tokens of ``head [Vd, K]`` after every position, [sum T_i, Vd].

    last: per text [T_i, K], the output of the target's last layer.
    """
    normed = final_hidden(target, torch.cat(list(last)))
    return torch.softmax(REFERENCE.linear(normed, head, None), dim=-1)
