"""What every test may ask for: comparison with golden files, ranks that are kept, and one thread a
process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.distributed.support.pool import Pools

GOLDEN = Path(__file__).parent / "golden"

# Two workers share the machine; threads of numerical libraries would only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What one test run finds must not be what the next one tests, nor what a user's own plans come
# from.
os.environ["AUTOPIPE_CACHE"] = os.devnull

# No test may depend on how busy the machine is.
settings.register_profile("default run", deadline=None, derandomize=True)
# `./test --hypothesis-profile=search` looks for new failures, with other examples each time.
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile("default run")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write what is found into tests/golden"
    )


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """`pools.of(4).run(folder, "--steps", 1)` runs the four ranks of a program folder."""
    from tests.distributed.support.pool import Pools

    found = Pools()
    yield found
    found.stop()


@pytest.fixture
def here(pools: Pools) -> Iterator[None]:
    """Commands start programs on the pools instead of in processes of their own."""
    from tests.distributed.support.pool import ranks_in

    with ranks_in(pools):
        yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(text, "plan/gpt.txt")` asserts that `text` is what tests/golden/plan/gpt.txt holds.

    `./test --update-golden` writes the file instead; read the difference in git before committing
    it.
    """

    def compare(text: str, name: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), f"tests/golden/{name} is missing; write it with --update-golden"
        assert text == path.read_text(encoding="utf-8"), f"differs from tests/golden/{name}"

    return compare
