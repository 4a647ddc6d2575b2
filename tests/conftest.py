"""What every test runs under. Tiny models are built by ``tiny.py``, which pytest finds beside this file."""

import pytest
import torch
from hypothesis import settings
from tiny import tiny_target

from foredraft.models.loading import Target

# Examples run models: their time says nothing, and a failure must come back in the next run.
settings.register_profile("foredraft", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("foredraft")
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: loads the real model, more than ten seconds")


@pytest.fixture(scope="session")
def target() -> Target:
    """A float64 Llama of two layers with a byte-level tokenizer of 32 tokens."""
    return tiny_target()
