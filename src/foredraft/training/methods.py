"""What can be trained: one entry for each method."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from foredraft.drafters.checkpoints import load_dflash, load_dspark
from foredraft.drafters.dspark import MarkovKind
from foredraft.drafters.gemma4_checkpoints import load_gemma4_mtp
from foredraft.drafters.sequential_checkpoints import load_eagle3, load_mtp
from foredraft.models.configuration import read_configuration
from foredraft.models.decoder import DecoderModel
from foredraft.training.dflash import DFlashObjective, initial_dflash
from foredraft.training.dspark import DSparkObjective, initial_dspark
from foredraft.training.eagle3 import Eagle3Cell, initial_eagle3
from foredraft.training.gemma4_mtp import Gemma4MTPCell, initial_gemma4_mtp
from foredraft.training.losses import Mixture
from foredraft.training.mtp import MTPCell, initial_mtp
from foredraft.training.recipe import Recipe
from foredraft.training.recursive import RecursiveObjective
from foredraft.training.trainer import Objective


@dataclass(frozen=True)
class Start:
    """Where a drafter starts. init: the folder of a drafter, None for the target's own layers. draft_vocab: target ids
    the head predicts, None for all. sample: token ids of one text. markov_rank, markov_kind: of a new Markov head."""

    init: Path | None
    draft_vocab: Sequence[int] | None
    sample: Sequence[int]
    markov_rank: int = 64
    markov_kind: MarkovKind = "vanilla"


@dataclass(frozen=True)
class Trainable:
    """layers, taps: depth and number of taps by default. mixture: the loss by default. choices: options of a new
    drafter's shape that the method leaves open."""

    build: Callable[[DecoderModel, Recipe, Start], Objective]
    layers: int
    taps: int
    mixture: Mixture
    choices: frozenset[str]


def _mtp(target: DecoderModel, recipe: Recipe, start: Start) -> Objective:
    drafter = (
        load_mtp(start.init, torch.float32) if start.init else initial_mtp(target, start.draft_vocab, start.sample)
    )
    return RecursiveObjective(target, MTPCell(target, *drafter), recipe)


def _eagle3(target: DecoderModel, recipe: Recipe, start: Start) -> Objective:
    drafter = (
        load_eagle3(start.init, torch.float32) if start.init else initial_eagle3(target, recipe, start.draft_vocab)
    )
    return RecursiveObjective(target, Eagle3Cell(target, *drafter), recipe)


def _gemma4_mtp(target: DecoderModel, recipe: Recipe, start: Start) -> Objective:
    if start.init:
        drafter = load_gemma4_mtp(start.init, torch.float32)
    else:
        drafter = initial_gemma4_mtp(target, recipe, start.draft_vocab, start.sample)
    return RecursiveObjective(target, Gemma4MTPCell(target, *drafter), recipe)


def _dflash(target: DecoderModel, recipe: Recipe, start: Start) -> Objective:
    if start.init:
        drafter = load_dflash(start.init, torch.float32)
    else:
        drafter = initial_dflash(target, recipe, start.draft_vocab, start.sample)
    return DFlashObjective(target, *drafter, recipe)


def is_dflash(drafter: Path) -> bool:
    """Whether a folder holds a DFlash drafter, which a DSpark drafter can start from."""
    return "DFlashDraftModel" in (read_configuration(drafter / "config.json").get("architectures") or [])


def _dspark(target: DecoderModel, recipe: Recipe, start: Start) -> Objective:
    if start.init is None:
        begun = initial_dflash(target, recipe, start.draft_vocab, start.sample)
        return DSparkObjective(target, *initial_dspark(begun, recipe, start.markov_rank, start.markov_kind), recipe)
    if is_dflash(start.init):
        begun = load_dflash(start.init, torch.float32)
        return DSparkObjective(target, *initial_dspark(begun, recipe, start.markov_rank, start.markov_kind), recipe)
    return DSparkObjective(target, *load_dspark(start.init, torch.float32), recipe)


MARKOV_OPTIONS = frozenset({"--markov-rank", "--markov-kind"})

OBJECTIVES: dict[str, Trainable] = {
    "mtp": Trainable(_mtp, 1, 1, Mixture(), frozenset()),
    "gemma4_mtp": Trainable(_gemma4_mtp, 2, 1, Mixture(), frozenset({"--layers"})),
    "eagle3": Trainable(_eagle3, 1, 3, Mixture(), frozenset({"--taps"})),
    "dflash": Trainable(_dflash, 3, 4, Mixture(), frozenset({"--layers", "--taps"})),
    "dspark": Trainable(
        _dspark, 3, 4, Mixture(token=0.1, distance=0.9), frozenset({"--layers", "--taps"}) | MARKOV_OPTIONS
    ),
}
