"""The machine that measured: versions, processor, memory and how fast it reads."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import foredraft

MIB = 2**20


def environment() -> dict[str, Any]:
    """What to know about this machine and process to judge a result. Takes about a second."""
    return {
        "versions": {
            "foredraft": foredraft.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "system": platform.platform(),
        "processor": processor(),
        "logical_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": memory_gib(),
        "memory_bandwidth_gb_per_s": read_bandwidth(max(512 * MIB, 8 * last_level_cache())),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def read_bandwidth(size: int, repeats: int = 5) -> float:
    """GB/s (10^9 bytes) at which ``size`` bytes of memory are read, by the threads that PyTorch uses.

    The best of ``repeats`` passes. An integer sum is as close to a bare read as PyTorch's operations come.
    """
    buffer = torch.ones(size // 8, dtype=torch.int64)
    best = float("inf")
    for _ in range(repeats):
        begin = perf_counter()
        buffer.sum()
        best = min(best, perf_counter() - begin)
    return round(buffer.nbytes / best / 1e9, 1)


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory_gib() -> float | None:
    """Physical memory in GiB; None where the system does not tell."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def last_level_cache() -> int:
    """Bytes of the largest cache of the first core; 0 where the system does not tell."""
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        if text.endswith("K") and text[:-1].isdecimal():
            sizes.append(int(text[:-1]) * 1024)
    return max(sizes)
