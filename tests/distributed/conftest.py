"""Processes for the tests that run programs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.support.pool import Pools, ranks_in
from tests.distributed.support.zoo import SmallModels


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """`pools.of(4).run(folder, "--steps", 1)` runs the four ranks of a program folder."""
    found = Pools()
    yield found
    found.stop()


@pytest.fixture
def here(pools: Pools) -> Iterator[None]:
    """Commands start programs on the pools instead of in processes of their own."""
    with ranks_in(pools):
        yield


@pytest.fixture(scope="session")
def small_models(pools: Pools) -> SmallModels:
    """The models of the zoo in small, with the steps that one device computes."""
    return SmallModels(pools)
