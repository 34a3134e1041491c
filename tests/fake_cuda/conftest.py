"""The fake CUDA device, built once for all tests of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.backends.torch import fake_cuda
from autopipe.ir.errors import ConfigurationError


@pytest.fixture(scope="session")
def fake_cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The device's library, for processes that load it."""
    try:
        return fake_cuda.build(tmp_path_factory.getbasetemp().parent / "fake-cuda")
    except ConfigurationError as error:
        pytest.skip(error.message)
