"""Sizes and shares of memory on the command line."""

from pathlib import Path

import pytest

from foredraft.errors import UserError
from foredraft.server import memory


@pytest.mark.parametrize(
    ("text", "size"),
    [("512M", 512 * 2**20), ("2G", 2**31), ("1.5GiB", 3 * 2**29), ("100", 100), ("7kb", 7 * 1024), ("1t", 2**40)],
)
def test_sizes(text: str, size: int) -> None:
    assert memory.size("--x", text) == size


@pytest.mark.parametrize("text", ["", "M", "-1G", "0", "12Q", "nan", "1e999G"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UserError, match=r"--x is .* expected a size such as 512M or 2G"):
        memory.size("--x", text)


def test_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free", lambda: 1000)
    assert [memory.kv_bytes(text) for text in (None, "0.25", "10%", "100%", "1")] == [500, 250, 100, 1000, 1000]
    assert memory.kv_bytes("2K") == 2048
    for text in ("0", "0%", "120%", "-0.5"):
        with pytest.raises(UserError, match="--kv-cache-memory"):
            memory.kv_bytes(text)


def test_a_control_group_has_the_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    before = memory.free()
    assert before > 0
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert memory.free() == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free() > 3000
