"""`python -m benchmarks`: figures beside a paper's, in the terminal and as JSON; its own where they
can be met.
"""

from __future__ import annotations

import json

import pytest

from tests.cli.command_line import CommandLine


def rows(command_line: CommandLine) -> list[dict[str, object]]:
    """All rows for the M-shape on four devices."""
    told: list[dict[str, object]] = json.loads(
        command_line.done("tessel", "--only", "m/4", "--json").out
    )["rows"]
    return told


def test_bubble_rates_are_those_of_table_2(command_line: CommandLine) -> None:
    found = rows(command_line)
    assert {tuple(row) for row in found} == {
        ("case", "metric", "theirs", "ours", "unit", "variant", "note")
    }
    assert {row["case"] for row in found} == {"m/4"}
    rates = [row for row in found if row["metric"] == "bubble_rate" and row["theirs"] is not None]
    assert {row["variant"] for row in rates} == {"1f1b", "chimera", "1f1b_plus", "tessel"}
    assert all(row["ours"] == pytest.approx(row["theirs"]) for row in rates)


def test_the_table_names_both_columns(command_line: CommandLine) -> None:
    told = command_line.done("tessel", "--only", "k/4").out
    assert told.splitlines()[0].split() == [
        "case",
        "variant",
        "metric",
        "theirs",
        "ours",
        "unit",
        "note",
    ]


def test_a_case_that_is_not_there_is_refused_with_those_that_are(command_line: CommandLine) -> None:
    command_line.refuses(2, ("tessel", "--only", "w/4"), "there is no case 'w/4'", "did you mean")
