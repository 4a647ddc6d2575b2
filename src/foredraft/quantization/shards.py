"""A safetensors file written tensor by tensor, so that memory holds one of them."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

PARTIAL = ".partial"
"""Suffix of a file that is being written; the complete one takes its place at the end."""

_DTYPES = {torch.bfloat16: "BF16", torch.uint8: "U8"}


@dataclass(frozen=True)
class Entry:
    """A tensor to come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """A file to come: its tensors in the order of the file, and strings about it."""

    name: str
    entries: Sequence[Entry]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Of the tensors."""
        return sum(entry.nbytes for entry in self.entries)

    def header(self) -> bytes:
        """The file up to its first tensor: length of the JSON text (8 bytes, little end first), then the text."""
        described: dict[str, object] = {"__metadata__": {"format": "pt", **self.metadata}}
        offset = 0
        for entry in self.entries:
            end = offset + entry.nbytes
            described[entry.name] = {
                "dtype": _DTYPES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def is_in(self, path: Path) -> bool:
        """Whether ``path`` has this header and all bytes after it."""
        header = self.header()
        with path.open("rb") as file:
            return file.read(len(header)) == header and path.stat().st_size == len(header) + self.nbytes

    def write(self, path: Path, tensors: Iterable[Tensor]) -> None:
        """Write the file; ``tensors`` are those of the entries, in their order."""

        def parts() -> Iterable[bytes | memoryview]:
            yield self.header()
            for entry, tensor in zip(self.entries, tensors, strict=True):
                if tensor.dtype != entry.dtype or tensor.shape != entry.shape:
                    raise ValueError(f"{entry} was announced, {tensor.dtype} {tuple(tensor.shape)} came")
                yield tensor.contiguous().view(torch.uint8).numpy().data

        write_file(path, parts())


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write ``parts`` one after the other; ``path`` appears when all of them are on the disk."""
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
