"""Drafting methods: one file each, one line in ``METHODS``."""

from collections.abc import Callable
from pathlib import Path

from foredraft.config import SpeculativeConfig
from foredraft.drafters.base import Drafter
from foredraft.drafters.checkpoints import load_dflash
from foredraft.drafters.dflash import DFlashDrafter
from foredraft.errors import UserError
from foredraft.models.loading import EMBEDDED, Target, resolve

ASSETS = Path(__file__).parent.parent / "assets"


def _dflash(folder: Path, target: Target) -> Drafter:
    return DFlashDrafter(*load_dflash(folder, target.model.dtype, target.model.config), target.model)


METHODS: dict[str, Callable[[Path, Target], Drafter]] = {"dflash": _dflash}


def load_drafter(config: SpeculativeConfig, target: Target) -> Drafter:
    """The drafter that ``config`` names, checked against its target. Raises UserError if it does not fit."""
    check_method(config)
    if config.model is not None:
        folder = resolve(config.model)
        if not folder.is_dir():
            raise UserError(f"{config.model} is not a drafter's folder")
    elif target.name == EMBEDDED:
        folder = ASSETS / f"{config.method}-{EMBEDDED}"
    else:
        raise UserError(
            f"no drafter ships for {target.name}; name one with `model` in the speculative config (--drafter)"
        )
    drafter = METHODS[config.method](folder, target)
    if config.num_speculative_tokens is not None and config.num_speculative_tokens > drafter.max_tokens:
        raise UserError(
            f"num_speculative_tokens is {config.num_speculative_tokens}, "
            f"but the drafter in {folder} proposes 1 to {drafter.max_tokens} tokens"
        )
    return drafter


def check_method(config: SpeculativeConfig) -> None:
    """Raise UserError unless ``config`` names a known method."""
    if config.method not in METHODS:
        raise UserError(f"method {config.method!r} is not known; known: none, {', '.join(METHODS)}")
