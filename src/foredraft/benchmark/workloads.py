"""The prompts that a benchmark runs, and where they come from."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import httpx
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

from foredraft.errors import UserError

NAMES = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")
BUNDLED = Path(__file__).parent / "prompts"

Source = Literal["data-dir", "hub", "bundled"]
Conversation = tuple[str, ...]
"""The user's turns of one conversation."""


@dataclass(frozen=True)
class Workload:
    """Conversations of one kind. ``notes``: what the user should be told about them."""

    name: str
    source: Source
    conversations: tuple[Conversation, ...]
    notes: tuple[str, ...] = ()


def load_workload(name: str, data_dir: Path | None, num_prompts: int) -> Workload:
    """The first ``num_prompts`` conversations of a workload, or all of them where it has fewer.

    They come from ``<data_dir>/<name>.jsonl`` (one object a line with ``turns``, a list of strings) if a folder
    is given, else from the Hub, else from the package's own prompts of the same kind.
    Raises UserError for an unknown name, a missing file or a malformed line.
    """
    if name not in NAMES:
        raise UserError(f"dataset {name!r} is not known; known: {', '.join(NAMES)}")
    if data_dir is not None:
        source: Source = "data-dir"
        conversations, told = _from_data_dir(name, data_dir), []
    else:
        downloaded, reason = _from_hub(name)
        source = "hub" if downloaded else "bundled"
        conversations = downloaded or read_conversations(BUNDLED / f"{name}.jsonl")
        told = [] if downloaded else [f"{reason}; this package's own prompts of that kind are used instead"]
    if len(conversations) < num_prompts:
        told.append(f"{num_prompts} prompts were asked for, {len(conversations)} are all there are")
    return Workload(name, source, tuple(conversations[:num_prompts]), tuple(told))


def load_workloads(names: Sequence[str], data_dir: Path | None, num_prompts: int) -> list[Workload]:
    """Several workloads; each name once."""
    return [load_workload(name, data_dir, num_prompts) for name in dict.fromkeys(names)]


def notes(workloads: Sequence[Workload]) -> Iterator[str]:
    """One line for each thing to tell, naming the workloads that it concerns."""
    concerned: defaultdict[str, list[str]] = defaultdict(list)
    for workload in workloads:
        for note in workload.notes:
            concerned[note].append(workload.name)
    yield from (f"{', '.join(names)}: {note}" for note, names in concerned.items())


def request_seed(seed: int, dataset: str, prompt: int, turn: int) -> int:
    """The sampling seed of one request, in [0, 2**31), which every server takes."""
    digest = hashlib.blake2b(f"{seed}:{dataset}:{prompt}:{turn}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def read_conversations(path: Path) -> list[Conversation]:
    """Conversations of a workload file. Raises UserError naming the line that is wrong."""
    return _read(path, lambda entry: entry["turns"])


def _from_data_dir(name: str, data_dir: Path) -> list[Conversation]:
    path = data_dir / f"{name}.jsonl"
    if not path.is_file():
        raise UserError(
            f"{path} does not exist; the data folder (--data-dir or FOREDRAFT_DATA) needs one file "
            "<dataset>.jsonl for each dataset asked for"
        )
    return read_conversations(path)


# The Hub's data sets


@dataclass(frozen=True)
class _HubFile:
    repository: str
    path: str
    turns: Callable[[Mapping[str, Any]], Any]
    """The turns of a record; None leaves it out."""


def _reasoned(problem: str) -> list[str]:
    return [f"{problem}\nPlease reason step by step, and put your final answer within \\boxed{{}}."]


def _completed(code: str) -> list[str]:
    request = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{request}\n```python\n{code}\n```"]


# openai/gsm8k, openai/openai_humaneval and google-research-datasets/mbpp hold parquet files only, which would
# need pyarrow. Others carry the prompts of the last two as JSON; task ids 11 to 510 are MBPP's test split.
_HUB = {
    "math500": _HubFile("HuggingFaceH4/MATH-500", "test.jsonl", lambda entry: _reasoned(entry["problem"])),
    "humaneval": _HubFile(
        "bigcode/humanevalpack",
        "data/python/data/humanevalpack.jsonl",
        lambda entry: _completed(entry["prompt"]),
    ),
    "mbpp": _HubFile(
        "Muennighoff/mbpp",
        "data/sanitized-mbpp.json",
        lambda entry: [entry["prompt"]] if 11 <= entry["task_id"] <= 510 else None,
    ),
    "mt-bench": _HubFile("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl", lambda entry: entry["turns"]),
}


def _from_hub(name: str) -> tuple[list[Conversation], str]:
    """A workload from the Hub or its cache; or nothing, and the reason."""
    file = _HUB.get(name)
    if file is None:
        return [], "the Hub has the public set as parquet only (give it with --data-dir)"
    reachable = _hub_is_reachable()
    try:
        path = hf_hub_download(
            file.repository, file.path, repo_type="dataset", local_files_only=not reachable, etag_timeout=5
        )
        return _read(Path(path), file.turns), ""
    except (EntryNotFoundError, HfHubHTTPError, httpx.HTTPError, OSError) as error:
        what = str(error).strip().splitlines()[0] if reachable else "the Hugging Face Hub is out of reach"
        return [], what


@cache
def _hub_is_reachable() -> bool:
    """One quick request, because the Hub's client retries for half a minute before it gives up."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        httpx.head(constants.ENDPOINT, timeout=3)
    except httpx.HTTPError:
        return False
    return True


# Reading


def _read(path: Path, turns: Callable[[Mapping[str, Any]], Any]) -> list[Conversation]:
    conversations = []
    for place, entry in _entries(path):
        try:
            found = turns(entry)
        except (KeyError, TypeError) as error:
            raise UserError(f"{place}: expected a JSON object with `turns`, a list of strings") from error
        if found is None:
            continue
        if not isinstance(found, list) or not found or not all(isinstance(t, str) and t for t in found):
            raise UserError(f"{place}: `turns` must be a list of at least one string, none of them empty")
        conversations.append(tuple(found))
    if not conversations:
        raise UserError(f"{path} holds no prompts")
    return conversations


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Each record of a JSON Lines file, or of a JSON file that is one list, with its place for errors."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text: {error}") from error
    if path.suffix == ".json":
        yield from ((f"{path}, entry {n}", entry) for n, entry in enumerate(_parsed(str(path), text), 1))
        return
    # Not splitlines(): a JSON string may hold U+2028 and other characters that it takes for line ends.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            place = f"{path}, line {number}"
            yield place, _parsed(place, line)


def _parsed(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{place} is not valid JSON: {error}") from error
