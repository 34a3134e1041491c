"""Random small min-sum models with the structure of tables: chains, residuals, equal layers, and
values read by all layers.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import strategies as st

from autopipe.passes.solvers.min_sum import Edge, MinSum


@st.composite
def layered(draw: st.DrawFn, memory: bool = False) -> MinSum:
    """Up to three equal layers of up to four variables, each variable with one to three
    configurations.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layers = draw(st.integers(1, 3))
    width = draw(st.integers(1, 3))
    forbidden = draw(st.sampled_from([0.0, 0.2]))

    def costs(*shape: int) -> np.ndarray:
        drawn = rng.integers(0, 100, shape).astype(float)
        return np.where(rng.random(shape) < forbidden, np.inf, drawn)

    def needs(*shape: int) -> np.ndarray | None:
        return rng.integers(0, 10, shape) if memory else None

    sizes = draw(st.lists(st.integers(1, 3), min_size=width, max_size=width))
    own = [(rng.integers(0, 100, size).astype(float), needs(size)) for size in sizes]
    near = st.tuples(st.integers(0, width), st.integers(0, width))
    joined = draw(st.lists(near.filter(lambda ends: ends[0] < ends[1]), max_size=4, unique=True))
    first = sizes[0]
    within = [
        (
            one,
            other,
            costs(sizes[one], sizes[other] if other < width else first),
            needs(sizes[one], ([*sizes, first])[other]),
        )
        for one, other in joined
    ]
    edges = [
        Edge(
            layer * width + one, layer * width + other, matrix, more if rng.random() < 0.5 else None
        )
        for layer in range(layers)
        for one, other, matrix, more in within
        if layer * width + other < layers * width
    ]
    vectors, memories = [list(each) for each in zip(*(own * layers), strict=True)]
    if draw(st.booleans()):
        # A value that all layers read.
        matrix = costs(2, first)
        vectors.append(rng.integers(0, 100, 2).astype(float))
        memories.append(needs(2))
        edges += [Edge(layers * width, layer * width, matrix) for layer in range(layers)]
    return MinSum(tuple(vectors), tuple(edges), tuple(memories) if memory else None)


def best_choice(model: MinSum, limit: float = np.inf) -> float:
    """What the best choice costs that needs at most `limit` bytes; inf where there is none."""
    every = product(*(range(len(vector)) for vector in model.costs))
    return min(
        (float(model.cost_of(choice)) for choice in every if model.memory_of(choice) <= limit),
        default=np.inf,
    )
