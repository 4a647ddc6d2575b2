"""Drafting methods: one file each, one line in ``METHODS``."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foredraft.config import SpeculativeConfig
from foredraft.drafters.base import Drafter
from foredraft.drafters.calibration import FILE as CALIBRATION_FILE
from foredraft.drafters.calibration import Calibration
from foredraft.drafters.checkpoints import load_dflash, load_dspark
from foredraft.drafters.dflash import DFlashDrafter
from foredraft.drafters.dspark import DSparkDrafter
from foredraft.drafters.eagle3 import Eagle3Drafter
from foredraft.drafters.gemma4_checkpoints import load_gemma4_mtp
from foredraft.drafters.gemma4_mtp import Gemma4MTPDrafter
from foredraft.drafters.mtp import MTPDrafter
from foredraft.drafters.ngram import NgramDrafter
from foredraft.drafters.sequential_checkpoints import EAGLE3_ARCHITECTURES, load_eagle3, load_mtp
from foredraft.errors import UserError
from foredraft.models.config import ModelConfig
from foredraft.models.configuration import read_configuration
from foredraft.models.loading import EMBEDDED, Target, resolve

ASSETS = Path(__file__).parent.parent / "assets"


@dataclass(frozen=True)
class Method:
    """drafter: its class. load: reads its folder, None for a method without weights, whose folder holds a calibration
    or is None. architectures: that config.json of a folder names."""

    drafter: Callable[..., Drafter]
    load: Callable[[Path, torch.dtype, ModelConfig], tuple[Any, Any]] | None = None
    architectures: tuple[str, ...] = ()

    def __call__(self, folder: Path | None, target: Target) -> Drafter:
        """The drafter in ``folder`` beside its target."""
        calibration = None if folder is None else Calibration.load(folder)
        if self.load is None:
            return self.drafter(calibration=calibration)
        assert folder is not None
        config, weights = self.load(folder, target.model.dtype, target.model.config)
        return self.drafter(config, weights, target.model, calibration=calibration)


METHODS: dict[str, Method] = {
    "mtp": Method(MTPDrafter, load_mtp, ("MTPDraftModel",)),
    "gemma4_mtp": Method(Gemma4MTPDrafter, load_gemma4_mtp, ("Gemma4AssistantForCausalLM",)),
    "eagle3": Method(Eagle3Drafter, load_eagle3, tuple(EAGLE3_ARCHITECTURES)),
    "dflash": Method(DFlashDrafter, load_dflash, ("DFlashDraftModel",)),
    "dspark": Method(DSparkDrafter, load_dspark, ("Qwen3DSparkModel",)),
    "ngram": Method(NgramDrafter),
}


def load_drafter(config: SpeculativeConfig, target: Target) -> Drafter:
    """The drafter that ``config`` names, checked against its target. Raises UserError if it does not fit."""
    check_method(config)
    folder = _folder(config, target)
    if folder is not None:
        check_folder(folder, config.method)
    drafter = METHODS[config.method](folder, target)
    wanted = config.num_speculative_tokens
    if isinstance(wanted, int) and wanted > drafter.max_tokens:
        what = config.method if folder is None else f"the drafter in {folder}"
        raise UserError(f"num_speculative_tokens is {wanted}, but {what} proposes 1 to {drafter.max_tokens} tokens")
    return drafter


def check_method(config: SpeculativeConfig) -> None:
    """Raise UserError unless ``config`` names a known method."""
    if config.method not in METHODS:
        raise UserError(f"method {config.method!r} is not known; known: none, {', '.join(METHODS)}")


def _folder(config: SpeculativeConfig, target: Target) -> Path | None:
    """Where the drafter lies; None for a method that needs no weights and has no folder."""
    if config.model is not None:
        folder = resolve(config.model)
        if not folder.is_dir():
            raise UserError(f"{config.model} is not a drafter's folder")
        return folder
    shipped = ASSETS / f"{config.method}-{EMBEDDED}"
    if target.name == EMBEDDED and shipped.is_dir():
        return shipped
    if METHODS[config.method].load is None:
        return None
    if target.name == EMBEDDED:
        raise UserError(
            f"the {config.method} drafter for {EMBEDDED} is missing from this installation ({shipped}); install "
            "foredraft again, or name a drafter's folder with `model` in the speculative config (--drafter)"
        )
    raise UserError(f"no drafter ships for {target.name}; name one with `model` in the speculative config (--drafter)")


def check_folder(folder: Path, method: str) -> None:
    """Raise UserError where the folder holds a drafter of another method."""
    if METHODS[method].load is None:
        if not (folder / CALIBRATION_FILE).is_file():
            raise UserError(f"{method} needs no drafter; {folder} can only hold its {CALIBRATION_FILE}, and does not")
        return
    found = read_configuration(folder / "config.json").get("architectures") or []
    for name, other in METHODS.items():
        if name != method and any(architecture in found for architecture in other.architectures):
            raise UserError(
                f"{folder} holds a drafter of method {name} (architectures {found}), not {method}; "
                f"choose the method {name} or another drafter"
            )
