"""Options of a strategy or scheduler, checked against the fields of any dataclass."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest

from autopipe.configs.configuration import build, load_configuration
from autopipe.ir.errors import ConfigurationError
from scripts.reference_pages import keys_table
from tests.configs.texts import parse_configuration


@dataclass(frozen=True, slots=True)
class Search:
    """A pass with an option of every type."""

    name: ClassVar[str] = "search"

    steps: int = 10
    """How often
    it tries."""

    epsilon: float = 0.5
    exact: bool = False
    order: Literal["first", "best"] = "first"
    label: str | None = None
    shape: tuple[int, ...] = ()
    box: tuple[int, float] = (1, 2.0)
    weights: tuple[tuple[str, float], ...] = ()


def read(options: str) -> Search:
    return build(
        parse_configuration(f"strategy: {{name: search, {options}}}", "c.yaml").strategy,
        Search,
        "strategy",
    )


def test_options_of_every_type() -> None:
    assert read("") == Search()
    assert read(
        "steps: 3, epsilon: 1, exact: true, order: best, label: x, shape: [1, 2], box: [3, 4], "
        "weights: {a: 1}"
    ) == Search(3, 1.0, True, "best", "x", (1, 2), (3, 4.0), (("a", 1.0),))
    assert read("label: null, shape: []") == Search()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("stepz: 3", "c.yaml:1: unknown key 'stepz' in strategy (did you mean 'steps'?)"),
        ("steps: 1.5", "c.yaml:1: strategy.steps is 1.5 (expected a whole number)"),
        ("exact: 1", "c.yaml:1: strategy.exact is 1 (expected `true` or `false`)"),
        (
            "order: bast",
            "c.yaml:1: strategy.order: 'bast' is none of first, best (did you mean 'best'?)",
        ),
        (
            "label: off",
            'which YAML reads as false) (expected text or `null`; write "off" in quotes)',
        ),
        ("shape: [1, x]", "c.yaml:1: strategy.shape[1] is 'x' (expected a whole number)"),
        ("shape: 3", "c.yaml:1: strategy.shape is 3 (expected a list of a whole number)"),
        ("box: [1]", "c.yaml:1: strategy.box: 1 item where 2 are expected"),
        ("weights: {a: b}", "c.yaml:1: strategy.weights.a is 'b' (expected a number)"),
        ("epsilon: '1e-3'", "write 1e-3 without quotes"),
    ],
)
def test_bad_options(options: str, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(expected)):
        read(options)


def test_options_from_the_command_line() -> None:
    chosen = load_configuration(
        words={"--strategy": "search"}, assignments=["strategy.label=no", "strategy.steps=4"]
    )
    assert build(chosen.strategy, Search, "strategy") == Search(steps=4, label="no")
    wrong = load_configuration(assignments=["schedule.steps=x"])
    with pytest.raises(
        ConfigurationError, match=re.escape("--set schedule.steps=x: schedule.steps is 'x'")
    ):
        build(wrong.schedule, Search, "schedule")


def test_options_have_a_table() -> None:
    rows = keys_table(Search).splitlines()
    assert rows[2] == "| `steps` | whole number | `10` | How often it tries. |"
    assert len(rows) == 10
