"""Where stages that recompute are cut: against all cuts there are, and what passes from one segment
to the next.
"""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from autopipe.ir.graph import DType, Graph
from autopipe.passes.analysis.recompute import make_segmenter, segment_boundaries
from tests.distributed.support.builder import Builder, mlp
from tests.distributed.support.drawing import graphs

ROWS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=9)


def cost_of(cuts: tuple[int, ...], kept: list[int], crossing: list[int], held: int) -> int:
    largest = max(sum(kept[begin:end]) for begin, end in pairwise((0, *cuts, len(kept))))
    return held * sum(crossing[cut] for cut in cuts) + largest


@given(ROWS, st.integers(1, 8))
def test_no_cuts_are_much_cheaper(row: list[tuple[int, int]], held: int) -> None:
    """Limits that are tried lie a factor of the square root of two apart; below an eighth of a
    thousandth none are.
    """
    kept = [each for each, _ in row]
    crossing = [each for _, each in row]
    found = segment_boundaries(kept, crossing, held)
    assert list(found) == sorted(set(found)) and all(0 < cut < len(row) for cut in found)
    every = (cuts for count in range(len(row)) for cuts in combinations(range(1, len(row)), count))
    least = min(cost_of(cuts, kept, crossing, held) for cuts in every)
    assert cost_of(found, kept, crossing, held) <= 2**0.5 * least


def test_a_long_chain_is_cut_into_as_many_pieces_as_its_root() -> None:
    """Sixteen times as many equal operators keep four times as much."""
    costs = []
    for count in (64, 1024):
        kept = [400] * count
        crossing = [100] * count
        costs.append(cost_of(segment_boundaries(kept, crossing, 4), kept, crossing, 4))
    assert 3.5 <= costs[1] / costs[0] <= 4.5


def test_nothing_is_cut_where_much_crosses_or_much_is_held() -> None:
    assert segment_boundaries([10, 10, 10], [0, 100, 100], 1) == ()
    assert segment_boundaries([10, 10, 10], [0, 1, 1], 2) == (1, 2)
    assert segment_boundaries([10, 10, 10], [0, 1, 1], 30) == ()


def read_behind(graph: Graph, segments: tuple[tuple[int, ...], ...]) -> set[str]:
    """Values that a segment writes and a later one reads."""
    found: set[str] = set()
    written: set[str] = set()
    for segment in segments:
        for node in segment:
            found |= written & set(graph.nodes[node].inputs)
        written |= {name for node in segment for name in graph.nodes[node].outputs}
    return found


@given(graphs(train=True))
def test_segments_are_the_stages_nodes_in_order(drawn: tuple[Graph, str | None]) -> None:
    graph, _ = drawn
    nodes = tuple(range(len(graph.nodes)))
    segments = make_segmenter(graph)(nodes, 1)
    assert tuple(node for segment in segments.nodes for node in segment) == nodes
    passing = read_behind(graph, segments.nodes)
    views = {
        name
        for node in graph.nodes
        for name in node.outputs
        if node.op in ("Reshape", "Transpose", "Split")
    }
    assert passing - views <= set(segments.passing)


def test_cuts_lie_where_little_passes() -> None:
    """Between wide layers, and never inside one."""
    graph, _ = mlp(4)
    segments = make_segmenter(graph)(tuple(range(len(graph.nodes))), 1)
    assert read_behind(graph, segments.nodes) == set(segments.passing)


def test_a_mask_that_all_read_does_not_keep_layers_together() -> None:
    builder = Builder()
    x = builder.input((64, 8), DType.FLOAT64)
    mask = builder.node("Cast", builder.node("Greater", x, builder.node("Neg", x)), to=11)
    hidden = x
    for _ in range(8):
        wide = builder.node("MatMul", hidden, builder.parameter((8, 64)))
        for _ in range(4):
            wide = builder.node("Tanh", wide)
        hidden = builder.node("Mul", builder.node("MatMul", wide, builder.parameter((64, 8))), mask)
    loss = builder.mean_square(hidden)
    graph = builder.graph(loss)
    segments = make_segmenter(graph)(tuple(range(len(graph.nodes))), 1)
    assert len(segments.nodes) >= 4 and mask in segments.passing
