"""Small random min-sum models, and the costs of all their choices."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import strategies as st

from autopipe.passes.solvers.min_sum import Edge, MinSum


@st.composite
def models(draw: st.DrawFn, forbidden: bool = True, memory: bool = False) -> MinSum:
    """Draw up to 6 nodes of 1 to 4 configurations. Graphs may be disconnected, pairs may have two
    edges, arrays may be shared, and ties are frequent.

    Costs are integers, integral floats with or without forbidden pairs, or any floats.
    """
    kind = draw(st.sampled_from(["int", "whole", "float"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    top = draw(st.sampled_from([1, 3, 100, 10**12]))
    shares = draw(st.floats(0, 0.4)) if forbidden and kind != "int" else 0.0

    def costs(*shape: int) -> np.ndarray:
        if kind == "int":
            return rng.integers(0, top, shape, endpoint=True)
        drawn = (
            np.floor(rng.random(shape) * top) if kind == "whole" else rng.normal(size=shape) * top
        )
        return np.where(rng.random(shape) < shares, np.inf, drawn)

    def needs(*shape: int) -> np.ndarray:
        return rng.integers(0, 10, shape)

    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    ends = st.integers(0, len(sizes) - 1)
    pairs = draw(st.lists(st.tuples(ends, ends), max_size=12))
    shared: dict[tuple[int, int], tuple[np.ndarray, np.ndarray | None]] = {}
    edges = []
    for source, target in pairs:
        shape = (sizes[source], sizes[target])
        known = shared.setdefault(
            shape, (costs(*shape), needs(*shape) if memory and rng.random() < 0.5 else None)
        )
        if rng.random() < 0.5:
            known = (costs(*shape), needs(*shape) if memory and rng.random() < 0.5 else None)
        edges.append(Edge(source, target, *known))
    vectors = {size: costs(size) for size in sizes}
    return MinSum(
        tuple(vectors[size] if rng.random() < 0.5 else costs(size) for size in sizes),
        tuple(edges),
        tuple(needs(size) for size in sizes) if memory else None,
    )


def all_choices(model: MinSum) -> list[tuple[float, float]]:
    """Return the (cost, memory) of each choice that is not forbidden."""
    found = []
    for choice in product(*(range(len(vector)) for vector in model.costs)):
        cost = model.cost_of(choice)
        if cost != np.inf:
            found.append((cost, model.memory_of(choice)))
    return found
