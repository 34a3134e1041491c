"""Answers are worked out once, and only the last ones are kept."""

from __future__ import annotations

import pytest

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.memo import memoize, memoize_all


def test_equal_texts_are_one_and_equal_lists_are_not() -> None:
    asked: list[tuple[str, list[int]]] = []

    @memoize(8)
    def length(text: str, numbers: list[int]) -> int:
        asked.append((text, numbers))
        return len(text) + len(numbers)

    one = [1, 2]
    other = [1, 2]
    text = "ab"
    assert length(text, one) == length("".join(["a", "b"]), one) == 4
    assert len(asked) == 1
    assert length(text, other) == 4
    assert len(asked) == 2


def test_equal_tuples_of_texts_are_one_however_texts_are_spelled() -> None:
    asked: list[tuple[str, ...]] = []

    @memoize(8)
    def count(texts: tuple[str, ...]) -> int:
        asked.append(texts)
        return len(texts)

    assert [count(("a", "b")), count(tuple("ab")), count(("a\0b",)), count(())] == [2, 2, 1, 0]
    assert asked == [("a", "b"), ("a\0b",), ()]


def test_the_oldest_answer_is_forgotten() -> None:
    asked: list[int] = []

    @memoize(2)
    def double(number: int) -> int:
        asked.append(number)
        return 2 * number

    assert [double(number) for number in (1, 2, 1, 3, 1, 2)] == [2, 4, 2, 6, 2, 4]
    assert asked == [1, 2, 3, 2]


def test_arguments_stay_alive_so_that_no_other_value_is_taken_for_them() -> None:
    @memoize(100)
    def first(numbers: list[int]) -> int:
        return numbers[0]

    assert [first([number]) for number in range(100)] == list(range(100))


def test_errors_are_not_kept() -> None:
    asked: list[int] = []

    @memoize(2)
    def refuse(number: int) -> int:
        asked.append(number)
        raise ValueError(number)

    for _ in range(2):
        with pytest.raises(ValueError):
            refuse(1)
    assert asked == [1, 1]


def test_a_search_asks_once_and_keeps_refusals() -> None:
    asked: list[int] = []

    def half(number: int) -> int:
        asked.append(number)
        if number % 2:
            raise InfeasibleError("odd")
        return number // 2

    known = memoize_all(half)
    for _ in range(2):
        assert known(4) == 2
        with pytest.raises(InfeasibleError, match="odd"):
            known(3)
    assert asked == [4, 3]
