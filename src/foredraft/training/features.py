"""Taps of the frozen target over whole texts: computed when asked for, remembered in memory or on disk."""

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from foredraft.errors import UserError
from foredraft.models.batch import flat_batch
from foredraft.models.decoder import DecoderModel
from foredraft.training.data import Example


class FeatureStore:
    """Taps of texts on disk, for several runs over the same texts, [tokens, m * K] in one file of bfloat16.

    The file holds room for every text from the beginning, but takes space only as it is filled. It belongs to one
    target, one choice of taps and one list of texts; raises UserError when the folder holds that of another.
    """

    def __init__(
        self, folder: Path, model: str, taps: tuple[int, ...], width: int, examples: Sequence[Example]
    ) -> None:
        self.taps = taps
        self._lengths = [len(example.tokens) for example in examples]
        self._index = {example.tokens: number for number, example in enumerate(examples)}
        self._starts = torch.tensor([0, *self._lengths]).cumsum(0).tolist()
        shape = (self._starts[-1], len(taps) * width)
        texts = sha256(repr([example.tokens for example in examples]).encode()).hexdigest()
        about = {"model": model, "taps": list(taps), "width": width, "texts": texts}
        folder.mkdir(parents=True, exist_ok=True)
        described = folder / "features.json"
        if described.exists() and json.loads(described.read_text()) != about:
            raise UserError(f"{folder} holds features of another target, other taps or other texts; use another folder")
        described.write_text(json.dumps(about))
        self._values = torch.from_file(
            str(folder / "features.bin"), shared=True, size=shape[0] * shape[1], dtype=torch.bfloat16
        ).view(shape)
        self._present = torch.from_file(str(folder / "present.bin"), shared=True, size=len(examples), dtype=torch.uint8)

    @staticmethod
    def bytes_needed(examples: Sequence[Example], taps: Sequence[int], width: int) -> int:
        """What a store takes on disk once every text is in it."""
        return sum(len(example.tokens) for example in examples) * len(taps) * width * 2

    def get(self, example: Example) -> Tensor | None:
        """[T, m * K], None for a text that is not there yet."""
        number = self._index.get(example.tokens)
        if number is None or not self._present[number]:
            return None
        return self._values[self._starts[number] : self._starts[number + 1]]

    def put(self, example: Example, taps: Tensor) -> None:
        number = self._index.get(example.tokens)
        if number is not None:
            self._values[self._starts[number] : self._starts[number + 1]] = taps
            self._present[number] = 1


class FeatureSource:
    """Taps of whole texts, from ``store`` where there is one, remembered in memory as far as ``cache_bytes`` go."""

    def __init__(
        self, target: DecoderModel, taps: tuple[int, ...], cache_bytes: int, store: FeatureStore | None = None
    ) -> None:
        if store is not None and not set(taps) <= set(store.taps):
            raise UserError(f"the features on disk are of layers {store.taps}, but {taps} are needed")
        self._target = target
        self._taps = taps
        self._left = cache_bytes
        self._known: dict[tuple[int, ...], Tensor] = {}
        self._store = store

    def __call__(self, example: Example) -> Tensor:
        """[T, m * K]. A text always runs alone, so that its features do not depend on what ran before."""
        if self._store is not None:
            stored = self._store.get(example)
            if stored is None:
                stored = self._computed(example, self._store.taps)
                self._store.put(example, stored)
            return self._columns(stored).to(self._target.device)
        known = self._known.get(example.tokens)
        if known is not None:
            return known.to(self._target.device)
        taps = self._computed(example, self._taps)
        if taps.nbytes <= self._left:
            self._left -= taps.nbytes
            self._known[example.tokens] = taps.cpu()
        return taps

    def _columns(self, stored: Tensor) -> Tensor:
        assert self._store is not None
        width = self._target.config.hidden_size
        places = [self._store.taps.index(tap) * width for tap in self._taps]
        return torch.cat([stored[:, place : place + width] for place in places], dim=1)

    @torch.no_grad()
    def _computed(self, example: Example, layers: tuple[int, ...]) -> Tensor:
        batch = flat_batch([example.tokens], [0], [0], [1], self._target.device)
        taps = self._target.forward(batch, self._target.new_cache(), layers).taps
        assert taps is not None
        return taps
