"""How much memory there is, and what the server will use of it."""

import os
from pathlib import Path

from foredraft.engine.memory import Paged
from foredraft.errors import UserError
from foredraft.llm import LLM

MIB = 2**20
UNITS = {"": 1, "K": 2**10, "M": MIB, "G": 2**30, "T": 2**40}
DEFAULT_SHARE = 0.5
CGROUP = Path("/sys/fs/cgroup")


def size(flag: str, text: str) -> int:
    """Bytes of a size such as 512M or 2G (powers of 1,024). Raises UserError."""
    number, unit = text.strip().upper().removesuffix("IB").removesuffix("B"), ""
    if number and number[-1] in "KMGT":
        number, unit = number[:-1], number[-1]
    try:
        found = int(float(number) * UNITS[unit])
    except (ValueError, OverflowError):
        found = 0
    if found < 1:
        raise UserError(f"{flag} is {text!r}, expected a size such as 512M or 2G")
    return found


def kv_bytes(text: str | None) -> int:
    """Of ``--kv-cache-memory``: a size, or a share of the memory that is free now."""
    share = _share(text)
    if share is None:
        assert text is not None
        return size("--kv-cache-memory", text)
    return int(share * free())


def _share(text: str | None) -> float | None:
    if text is None:
        return DEFAULT_SHARE
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None
    if not 0 < share <= 1:
        if share > 1 and not text.endswith("%"):
            return None
        raise UserError(
            f"--kv-cache-memory is {text!r}, expected a share above 0, at most 1 (100%), or a size such as 2G"
        )
    return share


def free() -> int:
    """Bytes that this process may still take: what the system says is available, and no more than its control group
    leaves it."""
    found = [_available(), _left_in_group()]
    return min(value for value in found if value is not None)


def _available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Not Linux: all there is, of which half is the default.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _left_in_group() -> int | None:
    """Control groups of version 2."""
    try:
        most = (CGROUP / "memory.max").read_text().strip()
        return None if most == "max" else max(0, int(most) - int((CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        return None


def plan(llm: LLM) -> dict[str, int]:
    """Bytes: of the process now (weights, caches that were measured), of the pages still to come, and of what the
    largest pass takes beside them (the logits of all rows that are verified)."""
    engine = llm.engine
    drafts = llm.drafter.max_tokens if llm.drafter else 0
    rows = llm.config.max_num_seqs * (1 + drafts)
    found = {"process": resident(), "logits": rows * llm.target.model.config.vocab_size * 4}
    if isinstance(engine.memory, Paged):
        use = engine.memory.use
        found["kv_cache"] = (use.limit or 0) * engine.memory.page_bytes
    return found


def resident() -> int:
    """Bytes of this process that are in memory."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
