"""One training loop for every drafting method: the target is frozen, the method brings its loss."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.errors import UserError
from foredraft.training.data import Example
from foredraft.training.features import FeatureSource
from foredraft.training.losses import BlockScores, acceptance_length


class Objective(Protocol):
    """What the trainer needs of a method: which taps it reads, what is trained, and how a draft scores.

    evaluation_drafts: the number of draft tokens at which held-out texts are scored, always the same.
    """

    taps: tuple[int, ...]
    evaluation_drafts: int

    def parameters(self) -> dict[str, Tensor]:
        """Everything trained, float32, by name."""

    def score(
        self,
        examples: Sequence[Example],
        features: Sequence[Tensor],
        generator: torch.Generator,
        drafts: int | None = None,
    ) -> BlockScores:
        """Draft at random anchors of ``examples`` and compare with what the target wrote.

        features: per example [T, m * K]. drafts: tokens drafted at an anchor; drawn from the recipe's when None.
        """

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Write the drafter."""


@dataclass(frozen=True)
class TrainConfig:
    """The loop's settings.

    answers_per_step: texts per optimizer step (per process). The learning rate rises over ``warmup`` steps,
    stays, and falls linearly to zero over the last ``decay`` share of ``steps``. feature_cache_bytes: memory
    for target features of texts seen before, where they are not on disk.
    """

    steps: int
    answers_per_step: int = 2
    learning_rate: float = 1e-3
    warmup: int = 100
    decay: float = 0.3
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    evaluate_every: int = 500
    checkpoint_every: int = 500

    def __post_init__(self) -> None:
        for name in ("steps", "answers_per_step", "evaluate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.warmup < 0:
            raise UserError(f"warmup is {self.warmup}, expected at least 0")
        if not 0 < self.learning_rate < math.inf:
            raise UserError(f"learning_rate is {self.learning_rate}, expected a number above 0")
        if not 0 <= self.decay <= 1:
            raise UserError(f"decay is {self.decay}, expected a share, 0 to 1")


@dataclass(frozen=True)
class Progress:
    """Averages since the last report. accuracy: per draft position k = 1, 2, ... among labels that exist."""

    step: int
    loss: float
    learning_rate: float
    accuracy: list[float]
    acceptance_length: float
    seconds_per_step: float


def learning_rate_factor(step: int, config: TrainConfig) -> float:
    """Warm-up, plateau, linear decay: the factor on the learning rate of ``step`` (0-based)."""
    decay_steps = max(1, round(config.decay * config.steps))
    rising = (step + 1) / max(1, config.warmup)
    falling = (config.steps - step) / decay_steps
    return max(0.0, min(1.0, rising, falling))


class Trainer:
    """Trains ``objective`` on ``train`` in ``folder``; continues from the checkpoint there if there is one.

    A continued run must have the settings of the one before, ``steps`` apart: more of them make it longer, and as
    long as the learning rate has not begun to fall that is the same as having asked for more at once.

    Under ``torchrun`` the processes share the answers of a step and average their gradients.
    """

    def __init__(
        self,
        features: FeatureSource,
        objective: Objective,
        train: Sequence[Example],
        held_out: Sequence[Example],
        config: TrainConfig,
        folder: Path,
        fingerprint: dict[str, Any],
    ) -> None:
        self._objective = objective
        self._train = train
        self._held_out = held_out
        self._config = config
        self._folder = folder
        self._fingerprint = json.loads(json.dumps({**asdict(config), **fingerprint}))
        self._features = features
        self._parameters = objective.parameters()
        matrices = [tensor for tensor in self._parameters.values() if tensor.ndim > 1]
        vectors = [tensor for tensor in self._parameters.values() if tensor.ndim == 1]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if self.world > 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group()
        self.step = 0
        self.seconds = 0.0
        self.log: list[dict[str, Any]] = []
        self._resume()

    def run(self, report: Callable[[Progress], None], stop: Callable[[], bool] = lambda: False) -> bool:
        """Train to the last step; False if ``stop`` ended it before. Writes a checkpoint either way."""
        config = self._config
        window: list[BlockScores] = []
        began = time.monotonic()
        reported = began
        try:
            while self.step < config.steps and not stop():
                window.append(self._one_step())
                self.step += 1
                now = time.monotonic()
                if self.step % 20 == 0 or self.step == config.steps:
                    report(self._progress(window, (now - reported) / len(window)))
                    window, reported = [], now
                if self.step % config.evaluate_every == 0 or self.step == config.steps:
                    self._evaluate(self.seconds + now - began)
                if self.step % config.checkpoint_every == 0:
                    self._checkpoint(self.seconds + now - began)
        finally:
            self.seconds += time.monotonic() - began
            self._checkpoint(self.seconds)
        if self.world > 1:
            # A process that exits while another still talks to it takes that one down.
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
        return self.step >= config.steps

    def _one_step(self) -> BlockScores:
        config = self._config
        rate = config.learning_rate * learning_rate_factor(self.step, config)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        examples = list(self._answers_of(self.step))
        features = [self._features(example) for example in examples]
        generator = torch.Generator().manual_seed(((config.seed * 1_000_003 + self.step) * 4099 + self.rank) % 2**63)
        scores = self._objective.score(examples, features, generator)
        scores.loss.backward()  # type: ignore[no-untyped-call]
        if self.world > 1:
            for tensor in self._parameters.values():
                assert tensor.grad is not None
                torch.distributed.all_reduce(tensor.grad)
                tensor.grad /= self.world
        torch.nn.utils.clip_grad_norm_(self._parameters.values(), config.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return BlockScores(scores.loss.detach(), scores.matches, scores.counted)

    def _answers_of(self, step: int) -> Iterator[Example]:
        """This process's texts of a step: every epoch visits all texts in an order of its own."""
        each = self._config.answers_per_step
        first = (step * self.world + self.rank) * each
        for number in range(first, first + each):
            epoch, place = divmod(number, len(self._train))
            yield self._train[_order(len(self._train), self._config.seed, epoch)[place]]

    def _progress(self, window: Sequence[BlockScores], seconds: float) -> Progress:
        matches, counted = _stacked(window)
        return Progress(
            step=self.step,
            loss=sum(float(scores.loss) for scores in window) / len(window),
            learning_rate=float(self._optimizer.param_groups[0]["lr"]),
            accuracy=_accuracy(matches, counted),
            acceptance_length=acceptance_length(matches, counted),
            seconds_per_step=seconds,
        )

    @torch.no_grad()
    def _evaluate(self, seconds: float) -> None:
        """Score the held-out texts, greedy and sampled answers apart, always at the same anchors."""
        if not self._held_out:
            return
        entry: dict[str, Any] = {"step": self.step, "seconds": round(seconds, 1)}
        kinds = {
            "greedy": [example for example in self._held_out if example.temperature == 0],
            "sampled": [example for example in self._held_out if example.temperature > 0],
        }
        for kind, examples in kinds.items():
            scores = []
            for number, example in enumerate(examples):
                generator = torch.Generator().manual_seed(number)
                scores.append(
                    self._objective.score(
                        [example], [self._features(example)], generator, self._objective.evaluation_drafts
                    )
                )
            if scores:
                matches, counted = _stacked(scores)
                entry[kind] = {
                    "loss": round(sum(float(s.loss) for s in scores) / len(scores), 4),
                    "acceptance_length": round(acceptance_length(matches, counted), 4),
                    "accuracy": [round(value, 4) for value in _accuracy(matches, counted)],
                }
        self.log.append(entry)

    def _checkpoint(self, seconds: float) -> None:
        """Write the drafter, and everything a later run needs to continue as if never stopped."""
        if self.rank:
            return
        self._objective.save(self._folder, {})
        state: dict[str, Tensor] = {}
        for name, tensor in self._parameters.items():
            state[f"parameter.{name}"] = tensor.detach()
            for key, value in self._optimizer.state[tensor].items():
                state[f"optimizer.{name}.{key}"] = value
        header = {"step": self.step, "seconds": seconds, "log": self.log, "config": self._fingerprint}
        temporary = self._folder / "checkpoint.tmp"
        save_file(state, temporary, metadata={"foredraft": json.dumps(header)})
        temporary.replace(self._folder / CHECKPOINT)
        (self._folder / "training.json").write_text(json.dumps(header, indent=1) + "\n")

    def _resume(self) -> None:
        path = self._folder / CHECKPOINT
        if not path.exists():
            return
        try:
            with safe_open(path, framework="pt") as opened:
                header = json.loads(opened.metadata()["foredraft"])
            state = load_file(path)
        except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise UserError(f"{path} is not a checkpoint of foredraft; remove it to start over") from error
        stored = header["config"]
        fixed = (stored.keys() | self._fingerprint) - {"steps"}
        changed = sorted(key for key in fixed if stored.get(key) != self._fingerprint.get(key))
        if changed:
            raise UserError(
                f"{path} belongs to a run with other settings ({', '.join(changed)}); "
                "use the same ones, or another --output"
            )
        for name, tensor in self._parameters.items():
            with torch.no_grad():
                tensor.copy_(state[f"parameter.{name}"])
            prefix = f"optimizer.{name}."
            kept = {
                key.removeprefix(prefix): value.to(tensor.device)
                for key, value in state.items()
                if key.startswith(prefix)
            }
            if kept:
                self._optimizer.state[tensor] = kept
        self.step, self.seconds, self.log = header["step"], header["seconds"], header["log"]


CHECKPOINT = "checkpoint.state"
"""A safetensors file by another name, so that nobody takes it for a part of the drafter."""


def _order(count: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed((seed * 7919 + epoch) % 2**63)
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order


def _stacked(window: Sequence[BlockScores]) -> tuple[Tensor, Tensor]:
    """Matches and counted positions of several steps, padded to the longest block."""
    width = max(scores.matches.shape[1] for scores in window)

    def padded(part: Tensor) -> Tensor:
        return torch.nn.functional.pad(part, (0, width - part.shape[1]))

    return (
        torch.cat([padded(scores.matches) for scores in window]),
        torch.cat([padded(scores.counted) for scores in window]),
    )


def _accuracy(matches: Tensor, counted: Tensor) -> list[float]:
    hits = (matches & counted).sum(0).double()
    return [float(value) for value in (hits / counted.sum(0).clamp(min=1))]
