from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopipe.passes.analysis.chain import Matrix
from autopipe.passes.placement.pipedream import search_chains

Stages = list[tuple[int, int, int, int]]


def chains(blocks: int, devices: int, stages: int, degrees: tuple[int, ...]) -> Iterator[Stages]:
    """Every way to cut blocks into stages with degrees that add up to the devices: (first, stop,
    device, degree).
    """
    for inner in itertools.combinations(range(1, blocks), stages - 1):
        bounds = (0, *inner, blocks)
        for chosen in itertools.product(degrees, repeat=stages):
            if sum(chosen) == devices:
                starts = [0, *itertools.accumulate(chosen)]
                yield [(bounds[at], bounds[at + 1], starts[at], chosen[at]) for at in range(stages)]


@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([(1,), (1, 2), (1, 2, 4), (2,)]),
    st.integers(0, 10**6),
)
def test_every_number_of_stages_gets_its_best_chain(
    blocks: int, devices: int, degrees: tuple[int, ...], seed: int
) -> None:
    random = np.random.default_rng(seed)
    shape = (blocks + 1, devices, max(degrees) + 1, blocks + 1, blocks + 1)
    table = random.integers(1, 50, shape).astype(float)
    table[random.random(shape) < 0.2] = np.inf
    table[..., *np.tril_indices(blocks + 1)] = np.inf

    def price(place: int, device: int, degree: int) -> Matrix:
        found: Matrix = table[place, device, degree]
        return found

    answers = {
        len(pieces): pieces for pieces in search_chains(blocks, devices, devices, degrees, price)
    }
    for stages in range(1, min(blocks, devices) + 1):

        def slowest(chain: Stages, stages: int = stages) -> float:
            return max(
                float(table[stages - at, device, degree, first, stop])
                for at, (first, stop, device, degree) in enumerate(chain)
            )

        best = min(map(slowest, chains(blocks, devices, stages, degrees)), default=np.inf)
        if not np.isfinite(best):
            assert stages not in answers
            continue
        pieces = answers[stages]
        assert max(piece.cost for piece in pieces) == best
        assert [piece.first for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
        assert pieces[-1].stop == blocks
        assert sum(piece.degree for piece in pieces) == devices
