"""What `benchmarks fidelity` makes of candidates, and the command on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from autopipe.api.request import make_request
from autopipe.configs.configuration import load_configuration
from autopipe.ir.errors import LaunchError
from autopipe.ir.measured_costs import Costs, DeviceCosts, costs_text
from benchmarks import weighed_plans
from benchmarks.weighed_plans import Comparison, Outcome, candidates_of, spearman, write_page
from benchmarks.worker_pool import ProgramRun
from tests.cli.command_line import CommandLine
from tests.cli.test_bad_requests import perceptron
from tests.passes.frontend.building import saved


def test_equal_values_share_the_mean_of_their_ranks():
    # Ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4: 1 - 6 · 0.5 / (4 · 15) but for the tie's part.
    assert spearman([1, 2, 2, 3], [10, 30, 20, 40]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert spearman([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)
    assert spearman([1, 1, 1], [1, 2, 3]) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12))
def test_the_correlation_is_that_of_the_textbook(pairs):
    first, second = ([pair[side] for pair in pairs] for side in (0, 1))
    if len(set(first)) > 1 and len(set(second)) > 1:
        assert spearman(first, second) == pytest.approx(
            scipy.stats.spearmanr(first, second).statistic
        )
    else:
        assert spearman(first, second) is None


COMPARISON = Comparison(
    "gpt",
    4,
    (
        Outcome("a & b", True, 0.02, 100, 10, (0.03, 0.02, 0.04), 110, 10),
        Outcome("c", False, 0.05, 100, 10, (0.05,), 110, 10),
        Outcome("d", False, 0.04, 100, 10, (0.02,), 110, 10),
        Outcome("e", False, 0.01, 100, None, failed="it cannot be run"),
    ),
)


def test_what_failed_counts_for_nothing():
    assert [each.name for each, _ in COMPARISON.measured] == ["d", "a & b", "c"]
    assert COMPARISON.chosen_over_fastest == pytest.approx(1.5)
    assert COMPARISON.correlation == pytest.approx(0.5)
    failed = Comparison("gpt", 4, COMPARISON.outcomes[3:])
    assert (failed.correlation, failed.chosen_over_fastest) == (None, None)


def test_the_page_holds_all_of_it_and_names_its_picture(tmp_path):
    write_page(tmp_path / "page.md", "python -m benchmarks fidelity", [COMPARISON])
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "| gpt/p=4 | 3 of 4 | 0.500 | 1.50 |" in text
    assert "a & b ←" in text and "- e: it cannot be run" in text and "(page.svg)" in text
    points = (
        ElementTree.parse(tmp_path / "page.svg")
        .getroot()
        .iter("{http://www.w3.org/2000/svg}circle")
    )
    assert len(list(points)) == 3 + 1


@pytest.fixture
def candidates(tmp_path):
    model = saved(perceptron(trains=True), tmp_path)
    words = {"--gpus": "2", "--cluster": "cpu-local", "--batch-size": "8"}
    return candidates_of(make_request(load_configuration(words=words), model))


class Ranks:
    """Ranks whose n-th step takes 100 + n seconds, ten times that in some programs; another one
    fails.
    """

    def __init__(self, broken: Path, slow: Sequence[Path] = ()) -> None:
        self.broken = broken
        self.slow = slow
        self.runs: list[tuple[Path, int]] = []

    def run(self, program, data, steps, recorded, patience_s):
        assert data.exists() and (program / "rank_001.py").exists()
        self.runs.append((program, recorded[1]))
        if program == self.broken:
            raise LaunchError("it hangs", where="rank 1")
        scale = 10 if program in self.slow else 1
        return ProgramRun(
            tuple(scale * (100 + each) for each in range(steps)), 7, 100 if recorded[1] else 0, 0.5
        )


def test_candidates_differ_and_one_that_fails_stops_no_other(candidates, tmp_path):
    assert candidates[0].chosen and not any(each.chosen for each in candidates[1:])
    assert candidates[0].predicted_s == min(each.predicted_s for each in candidates)
    assert len({each.name for each in candidates}) == len(candidates) > 2
    folder = tmp_path / "programs"
    folder.mkdir()
    ranks = Ranks(folder / "1")
    outcomes = weighed_plans.measured(candidates, ranks, folder, 0.0, lambda _: None)
    assert [each.failed for each in outcomes[:3]] == ["", "rank 1: it hangs", ""]
    # Of eight steps one is recorded and three warm up, of seven in a second round three warm up.
    assert outcomes[0].steps_s == (104, 105, 106, 107, 103, 104, 105, 106)
    assert (outcomes[0].measured_memory, outcomes[0].measured_bytes, outcomes[0].processor_s) == (
        100,
        7,
        0.5,
    )
    assert ranks.runs[: len(candidates)] == [
        (folder / f"{index}", 1) for index in range(len(candidates))
    ]
    assert (folder / "1", 0) not in ranks.runs


def test_the_chosen_one_and_those_near_the_fastest_are_run_more_often(
    candidates, tmp_path, monkeypatch
):
    clock = iter(range(1000))
    # Every round takes a second, with one between: after two and four of seven there is time for
    # all and as much again.
    monkeypatch.setattr(weighed_plans.time, "monotonic", lambda: next(clock))
    ranks = Ranks(tmp_path / "1", slow=(tmp_path / "0", tmp_path / "2"))
    outcomes = weighed_plans.measured(candidates, ranks, tmp_path, 7.0, lambda _: None)
    # Seven steps in later rounds, of which three warm up; what fails is left alone.
    assert outcomes[0].chosen and outcomes[0].steps_s.count(1030) == 3, (
        "the chosen one is run four times, if slow"
    )
    assert outcomes[2].steps_s.count(1030) == 2, "another slow one is run three times"
    assert outcomes[3].steps_s == (104, 105, 106, 107, *(103, 104, 105, 106) * 3)
    assert [recorded for program, recorded in ranks.runs if program == tmp_path / "1"] == [1]


def test_what_is_asked_for_has_to_be_there(command_line: CommandLine):
    command_line.refuses(2, ("fidelity", "--only", "gtp"), "there is no case 'gtp'")
    command_line.refuses(2, ("fidelity", "--ranks", "1"), "at least 2 ranks")
    command_line.refuses(2, ("fidelity", "--write", "no/page.md"), "the folder does not exist")


@pytest.mark.sweep
def test_two_ranks_run_all_plans_of_a_tiny_model(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(weighed_plans.SUBJECTS, "rnnlm", {})
    monkeypatch.setattr(weighed_plans, "BATCH", 8)
    costs = command_line.folder / "machine.costs"
    costs.write_text(costs_text(Costs((DeviceCosts("any", ("nothing",)),))), encoding="utf-8")
    words = (
        "--only",
        "rnnlm",
        "--ranks",
        "2",
        "--costs",
        costs,
        "--minutes",
        "0",
        "--write",
        "page.md",
    )
    rows = json.loads(command_line.done("fidelity", *words, "--json").out)["rows"]
    figures = {(row["metric"], row["variant"]): row for row in rows}
    names = {variant for metric, variant in figures if metric == "step_time_s"}
    assert len(names) > 2
    for name in names:
        assert figures["step_time_s", name]["ours"] > 0, figures["step_time_s", name]["note"]
        assert (
            figures["communication_bytes", name]["ours"]
            == figures["predicted_communication_bytes", name]["ours"]
        )
        predicted, allocated = (
            figures[metric, name]["ours"]
            for metric in ("predicted_peak_memory_bytes", "peak_memory_bytes")
        )
        # Above it there may be what an LSTM's kernels take, which is as much as so small a model
        # itself.
        assert predicted / 2 < allocated < 4 * predicted
    assert {"spearman", "chosen_over_fastest"} <= {metric for metric, _ in figures}
    assert "rnnlm on 2 ranks" in (command_line.folder / "page.md").read_text(encoding="utf-8")
