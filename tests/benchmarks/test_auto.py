"""What tells the papers' placements, and that each of their main cases is asked for."""

from __future__ import annotations

import pytest

from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.placement.tessel_shapes import TesselShapes
from benchmarks.auto import HEADLINES, cases, is_around_tables, outline, row_parts, stages_beside
from benchmarks.table import Row
from benchmarks.tepdist import class_parts
from benchmarks.tessel import problem_on_v100


@pytest.fixture(scope="module")
def mt5() -> Problem:
    return problem_on_v100("mt5", {"loss": True}, 4, 16, 1)


@pytest.mark.parametrize(
    ("shape", "told"), [("m", "T1111T"), ("nn", "T11T11T"), ("v", "1111"), ("x", "11111111")]
)
def test_outlines_of_shapes(mt5: Problem, shape: str, told: str) -> None:
    placement = TesselShapes(shape).run(mt5)
    assert outline(mt5, placement) == told
    assert is_around_tables(mt5, placement) == (shape in ("m", "nn"))
    assert (
        class_parts(mt5, placement)
        == row_parts(mt5, placement)
        == (4 if shape in ("m", "nn") else 1)
    )


def test_one_stage_on_all_devices_is_around_nothing(mt5: Problem) -> None:
    placement = Placement((Stage(tuple(range(len(mt5.graph.nodes))), (0, 1, 2, 3), 1),))
    assert not is_around_tables(mt5, placement)
    assert stages_beside(mt5, placement) == 0


def test_stages_beside_one_another_are_counted() -> None:
    flava = problem_on_v100("flava", {}, 4, 4, 1)
    assert stages_beside(flava, TesselShapes("v").run(flava)) == 0
    assert stages_beside(flava, TesselShapes("k").run(flava)) > 0


def test_every_main_case_of_the_papers_is_asked_for() -> None:
    assert {each.request.model for each in HEADLINES} == {
        "gpt", "mt5", "flava", "mmt", "dlrm", "candle-uno", "vgg19", "rnnlm",
    }  # fmt: skip
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)


@pytest.mark.sweep
@pytest.mark.parametrize(("case", "shape"), [("vgg19-million/p=8", 8.0), ("rnnlm-paper/p=32", 8.0)])
def test_classes_are_split_without_being_asked_for(case: str, shape: float) -> None:
    rows = _rows_of(case)
    assert [row.ours for row in rows if row.metric == "class_parts"] == [shape]
    _check_speedups(rows)


@pytest.mark.sweep
def test_tables_and_head_go_over_all_devices_where_one_does_not_hold_them() -> None:
    rows = _rows_of("gpt-11b/p=4")
    assert [row.ours for row in rows if row.metric == "is_around_tables"] == [1.0]
    assert "under tessel" in rows[0].note
    _check_speedups(rows)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "case", ["dlrm-paper/p=8", "candle-uno-paper/p=8", "flava-paper/p=4/1", "flava-paper/p=4/4"]
)
def test_nothing_that_the_papers_compare_with_is_faster(case: str) -> None:
    _check_speedups(_rows_of(case))


def _rows_of(name: str) -> list[Row]:
    (case,) = [each for each in cases() if each.name == name]
    return list(case.run())


def _check_speedups(rows: list[Row]) -> None:
    found = [row.ours for row in rows if row.metric == "speedup" and row.ours is not None]
    assert found
    assert min(found) >= 1 - 1e-9
