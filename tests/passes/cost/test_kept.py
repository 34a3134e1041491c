"""What a device keeps of tensors that it holds a part of."""

from __future__ import annotations

from autopipe.passes.cost.kept import kept_values
from autopipe.passes.cost.uses import uses_of
from tests.distributed.builder import Builder


def test_of_an_image_read_through_windows_the_rows_that_they_read() -> None:
    builder = Builder()
    hidden = builder.node("Relu", builder.node("Mul", builder.input((4, 2, 8, 6)), builder.parameter((6,))))
    weight = builder.parameter((2, 2, 3, 3))
    made = builder.node("Conv", hidden, weight, pads=(1, 1, 1, 1), strides=(1, 2), dilations=(1, 1))
    graph = builder.graph(builder.mean_square(made))
    (kept,) = (each for each in kept_values(graph, uses_of(graph))[2] if each.key[0] == hidden)
    row = 4 * 2 * 6 * 8
    assert kept.bytes == 8 * row
    assert kept.local_bytes({}) == kept.local_bytes({"o0": 1}) == 8 * row
    assert kept.local_bytes({"o0": 2}) == 6 * row, "four rows and one beyond each end"
    assert kept.local_bytes({"o0": 4, "n": 2}) == 4 * row // 2
    assert kept.local_bytes({"o1": 3}) == 8 * row // 2, "three of six columns"
