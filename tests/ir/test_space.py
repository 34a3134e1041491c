"""The notation of iteration spaces."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.ir.space import AxisKind, NotationError, Space, Windowed, parse_notation


def kinds(space: Space) -> dict[str, str]:
    return {axis.name: axis.kind.value for axis in space.axes}


def test_a_batched_product() -> None:
    space = parse_notation("b m k+, k n -> b m n", ((2, 3, 4), (4, 5)), ((2, 3, 5),))
    assert kinds(space) == {"b": "parallel", "m": "parallel", "k": "sum", "n": "parallel"}
    assert space.axis_sizes() == {"b": 2, "m": 3, "k": 4, "n": 5}
    assert space.points == 2 * 3 * 4 * 5
    assert space.operands == ((("b",), ("m",), ("k",)), (("k",), ("n",)))
    assert space.axis("k").kind is AxisKind.SUM
    with pytest.raises(KeyError):
        space.axis("z")


def test_marks_and_what_no_result_has() -> None:
    space = parse_notation("a! b~ c+ d -> a", ((2, 3, 4, 5),), ((2,),))
    assert kinds(space) == {"a": "unsplittable", "b": "mean", "c": "sum", "d": "unsplittable"}


def test_an_axis_must_be_in_every_result_to_be_parallel() -> None:
    assert kinds(parse_notation("a b -> a b, a", ((2, 3),), ((2, 3), (2,)))) == {
        "a": "parallel",
        "b": "unsplittable",
    }
    assert kinds(parse_notation("a b -> a b, ?", ((2, 3),), ((2, 3), None))) == {
        "a": "parallel",
        "b": "parallel",
    }


def test_absent_operands_scalars_and_made_up_extents() -> None:
    space = parse_notation("a 1, ?, -> a 1", ((2, 1), None, ()), ((2, 7),))
    assert space.operands == ((("a",), ()), None, ())
    assert space.results == ((("a",), ()),)


def test_merged_dimensions() -> None:
    space = parse_notation("(a b) c -> a b c", ((6, 4),), ((2, 3, 4),))
    assert space.operands == ((("a", "b"), ("c",)),)
    assert space.axis_sizes() == {"a": 2, "b": 3, "c": 4}
    given = parse_notation("(a b) -> (a b)", ((6,),), ((6,),), {"a": 2})
    assert given.axis_sizes() == {"a": 2, "b": 3}


def test_dimensions_that_are_read_through_windows() -> None:
    space = parse_notation(
        "n [o 2 -1 3] 1, [o 1 0 2] -> n o", ((4, 9, 2), (6,)), ((4, 5),), fill=1.5
    )
    assert space.operands == ((("n",), (), ()), ((),))
    assert kinds(space) == {"n": "parallel", "o": "parallel"}
    assert space.windows_of(0) == (Windowed(0, 1, "o", 5, 2, -1, 3, 1.5),)
    assert space.windows_of(1) == (Windowed(1, 0, "o", 5, 1, 0, 2, 1.5),)
    assert space.windows_of(0)[0].span(5) == 11
    assert str(space) == "n [o 2 -1 3] 1, [o 1 0 2] -> n o"


@pytest.mark.parametrize(
    ("notation", "operands", "results", "message"),
    [
        ("a b", ((2, 3),), (), "lacks '->'"),
        ("a, b -> a", ((2,),), ((2,),), "describes 2 tensors, but the node reads or writes 1"),
        ("a b -> a", ((2,),), ((2,),), "describes 2 dimensions of a tensor of shape"),
        (
            "a -> a",
            ((2,),),
            ((3,),),
            "axis 'a' of 'a -> a' is of size 2 in one dimension and of size 3",
        ),
        ("(a b) -> (a b)", ((6,),), ((6,),), "sizes of axes a, b in"),
        (
            "(a b) a -> a b",
            ((7, 2),),
            ((2, 3),),
            "is of size 6, but the dimension of the tensor is of size 7",
        ),
    ],
)
def test_notation_that_does_not_fit(
    notation: str,
    operands: tuple[tuple[int, ...], ...],
    results: tuple[tuple[int, ...], ...],
    message: str,
) -> None:
    with pytest.raises(NotationError, match=message):
        parse_notation(notation, operands, results)


@st.composite
def spaces(
    draw: st.DrawFn,
) -> tuple[str, list[tuple[int, ...]], list[tuple[int, ...]], dict[str, int]]:
    """A line of notation with shapes that fit it."""
    extents = {f"x{index}": draw(st.integers(1, 5)) for index in range(draw(st.integers(1, 4)))}
    marks = {name: draw(st.sampled_from(["", "", "!", "+", "~"])) for name in extents}

    def tensor() -> tuple[str, tuple[int, ...]]:
        names = draw(st.permutations(list(extents)))[: draw(st.integers(0, len(extents)))]
        words = []
        shape = []
        while names:
            group = [names.pop() for _ in range(min(len(names), draw(st.integers(1, 2))))]
            text = " ".join(name + marks[name] for name in group)
            words.append(text if len(group) == 1 else f"({text})")
            shape.append(math.prod(extents[name] for name in group))
        return " ".join(words), tuple(shape)

    operands = [tensor() for _ in range(draw(st.integers(1, 3)))]
    results = [tensor() for _ in range(draw(st.integers(1, 2)))]
    line = f"{', '.join(text for text, _ in operands)} -> {', '.join(text for text, _ in results)}"
    return line, [shape for _, shape in operands], [shape for _, shape in results], extents


@given(spaces())
def test_spaces_print_and_parse(
    case: tuple[str, list[tuple[int, ...]], list[tuple[int, ...]], dict[str, int]],
) -> None:
    line, operands, results, extents = case
    space = parse_notation(line, tuple(operands), tuple(results), extents)
    assert space.axis_sizes() == {axis.name: extents[axis.name] for axis in space.axes}
    again = parse_notation(str(space), tuple(operands), tuple(results), extents)
    assert again == space
