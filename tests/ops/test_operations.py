"""Which implementation runs, and what is said where it is not the native one."""

import logging

import pytest
import torch

from foredraft import ops
from foredraft.errors import UserError
from foredraft.ops import NATIVE, REFERENCE, native, operations


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "unavailable", lambda: None)


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    ops._say_once.cache_clear()
    monkeypatch.setattr(native, "unavailable", lambda: "there are no kernels")


@pytest.mark.usefixtures("built")
def test_auto_is_native_for_bfloat16_on_a_cpu_only() -> None:
    assert operations("auto", torch.bfloat16, "cpu") is NATIVE
    assert operations("native", torch.bfloat16, "cpu") is NATIVE
    assert operations("auto", torch.float32, "cpu") is REFERENCE
    assert operations("auto", torch.bfloat16, "cuda:0") is REFERENCE
    assert operations("pytorch", torch.bfloat16, "cpu") is REFERENCE


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(("dtype", "device"), [(torch.float64, "cpu"), (torch.bfloat16, "cuda")])
def test_native_where_it_cannot_run(dtype: torch.dtype, device: str) -> None:
    with pytest.raises(UserError, match=f"bfloat16 on the cpu, not {dtype} on {device}"):
        operations("native", dtype, device)


def test_an_unknown_name() -> None:
    with pytest.raises(UserError, match="kernels is 'fast', expected one of auto, native, pytorch"):
        operations("fast", torch.bfloat16, "cpu")  # type: ignore[arg-type]


@pytest.mark.usefixtures("missing")
def test_a_missing_library_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "foredraft"):
        for _ in range(3):
            assert operations("auto", torch.bfloat16, "cpu") is REFERENCE
        assert operations("pytorch", torch.bfloat16, "cpu") is REFERENCE
    assert [record.message for record in caplog.records] == [
        "foredraft: there are no kernels; running on PyTorch, which is slower and not bit-exact"
    ]
    with pytest.raises(UserError, match="there are no kernels"):
        operations("native", torch.bfloat16, "cpu")
