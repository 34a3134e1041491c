"""Several steps on one scale, in the terminal and on a page."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from autopipe.api.comparison import ComparisonPlan, PlanDiff
from autopipe.api.timeline_figure import one_device_per_group, plan_picture
from autopipe.cli.compare import compare_report
from autopipe.cli.drawing.report import report_page
from autopipe.cli.drawing.terminal import draw_memories, draw_timelines
from autopipe.ir.plan import Breakdown
from tests.cli.drawing.browser import needs_browser, seen_by
from tests.cli.drawing.examples import HOSTILE, chain_plan
from tests.cli.drawing.test_report import HANDS, WIDTHS, elements


def pictures(*sizes):
    """The steps of chains of so many stages and micro-batches."""
    plans = (chain_plan(stages, micro_batches) for stages, micro_batches in sizes)
    return [(f"p{index}", plan_picture(*each)) for index, each in enumerate(plans)]


def test_a_step_ends_where_its_length_says():
    steps = pictures((2, 4), (1, 10))
    lines = [line.plain for line in draw_timelines(steps, 92, colour=False)]
    assert [line.rstrip() for line in lines] == [
        "timelines on one scale",
        "p0" + "15.0 s ▏".rjust(46),
        "0 F0-F1-      B0====F2-B1====F3-B2====   B3====",
        "1    F0-B0====F1-B1====F2-B2====F3-B3====",
        "p1" + "30.0 s ▏".rjust(91),
        "0 " + "".join(f"F{index}-B{index}====" for index in range(10)),
        "  F- forward, B= backward",
    ]
    ends = [line.index("▏") for line in lines if "▏" in line]
    assert (ends[1] - 2) / (ends[0] - 2) == 2.0


def test_no_line_is_too_wide_and_memory_has_one_height():
    steps = pictures((4, 6), (40, 3))
    for width in (60, 120):
        drawn = [
            *draw_timelines(steps, width, colour=False),
            *draw_memories(steps, width, colour=False),
        ]
        assert max(len(line.plain) for line in drawn) <= width + 1
        assert any(line.plain.endswith(" 8 more") for line in drawn)
    memory = [line.plain for line in draw_memories(steps, 100, colour=False)]
    highest = max(peak for _, picture in steps for peak in picture.peaks)
    full = [line for line in memory if "█" in line]
    assert full and all(line.endswith(f" {steps[0][1].memory_text(highest)}") for line in full)


def test_tasks_too_fine_to_read_are_drawn_as_how_busy_devices_are():
    lines = [line.plain for line in draw_timelines(pictures((2, 200), (1, 10)), 80, colour=False)]
    assert "a full bar is a busy device" in lines[0]
    first = lines[2][2:]
    assert first.rstrip(" ") and set(first) <= set(" ▁▂▃▄▅▆▇█") and first.count("█") > 60


def test_of_devices_with_the_same_tasks_one_is_drawn():
    """Ten replicas of two devices each, of which the tenth's second one has a task less."""
    one = pictures((2, 4))[0][1]
    bars = [
        dataclasses.replace(bar, device=2 * replica + bar.device)
        for replica in range(10)
        for bar in one.bars
        if not (replica == 9 and bar.name == "1B3")
    ]
    transfers = tuple(
        dataclasses.replace(
            each, source=2 * replica + each.source, target=2 * replica + each.target
        )
        for replica in range(10)
        for each in one.transfers
    )
    many = dataclasses.replace(
        one, bars=tuple(bars), memory=one.memory * 10, limits=one.limits * 10, transfers=transfers
    )
    few = one_device_per_group(many)
    assert (few.devices, len(few.memory), few.transfers) == ((0, 1, 19), 3, one.transfers)
    assert [[bar.name for bar in row] for row in few.rows][:2] == [
        [bar.name for bar in row] for row in one.rows
    ]
    assert one_device_per_group(one) is one
    lines = [line.plain for line in draw_timelines([("p", few)], 60, colour=False)]
    assert [line[:3] for line in lines[2:5]] == [" 0 ", " 1 ", "19 "]
    assert lines[5].strip() == "others do what one of these does"


def comparison(first, second):
    """The page of two plans of these names."""
    found = []
    for name, stages, micro_batches in ((first, 2, 4), (second, 3, 8)):
        plan, timeline = chain_plan(stages, micro_batches, model=name)
        parts = Breakdown(timeline.end / 2, bubble_s=timeline.end / 2)
        found.append(
            ComparisonPlan(Path(name), dataclasses.replace(plan, breakdown=parts), timeline)
        )
    return report_page(
        compare_report(found, [PlanDiff(True, True, False), PlanDiff(False, False, True)])
    )


def test_the_page_takes_no_text_for_markup():
    hostile = HOSTILE.replace("/", "")
    assert [tag for tag, _ in elements(comparison(hostile, hostile))] == [
        tag for tag, _ in elements(comparison("a", "b"))
    ]
    assert "hsl(" in comparison("a", "b") and "nodes cannot be compared" in comparison("a", "b")


def test_the_page_of_two_plans_has_the_legend_of_both():
    page = comparison("a", "b")
    legend = page[
        page.index('<p class="legend">') : page.index("</p>", page.index('<p class="legend">'))
    ]
    for entry in ("F forward", "B backward", "stage 0", "stage 1", "stage 2"):
        assert f"</i>{entry}</span>" in legend
    assert "stage 3" not in legend


@needs_browser
def test_long_names_of_plans_fit_a_page_of_1440_pixels_and_a_phone(tmp_path):
    seen = seen_by(comparison("x" * 300, "y" * 300), WIDTHS, tmp_path, width=1440)
    assert seen["page"] == {"cut": 0, "scroll": True, "beyond": 0}
    assert seen["phone"]["scroll"] and seen["phone"]["beyond"] == 0


@needs_browser
def test_steps_share_an_axis_in_the_browser(tmp_path):
    """Below the second heading are the second plan's devices, and past the end of the first one it
    has no lane.
    """
    script = (
        HANDS
        + """
        note("start");
        const tipAt = (x, y) => { point("pointermove", x, y); return tip(); };
        seen.first = tipAt(48, 80);
        seen.second = tipAt(48, 80 + 2 * 54 + 26);
        seen.heading = (tipAt(48, 50), document.getElementById("tip").hidden);
        seen.hidden = document.getElementById("repetend").hidden;
        """
    )
    seen = seen_by(comparison("a", "b"), script, tmp_path)
    _, later = chain_plan(3, 8)
    assert seen["start"] == [0.0, later.end]
    assert seen["first"].split("\n")[:2] == [
        "0F0",
        "forward, stage 0, micro-batch 0, device 0 of a",
    ]
    assert seen["second"].split("\n")[:2] == [
        "0F0",
        "forward, stage 0, micro-batch 0, device 0 of b",
    ]
    assert (seen["heading"], seen["hidden"]) == (True, True)
