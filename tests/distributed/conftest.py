"""Models for the tests that run programs."""

from __future__ import annotations

import pytest

from tests.distributed.support.pool import Pools
from tests.distributed.support.zoo import SmallModels


@pytest.fixture(scope="session")
def small_models(pools: Pools) -> SmallModels:
    """The models of the zoo in small, with the steps that one device computes."""
    return SmallModels(pools)
