"""The page: nothing is loaded, no text becomes markup, and it draws, zooms and explains in a real
browser.
"""

from __future__ import annotations

import dataclasses
import html.parser
import re

import pytest

from autopipe.api.showing import ScheduleResult
from autopipe.api.timeline_figure import END_STYLES, stage_colour
from autopipe.cli.drawing.report import block_report, plan_report, report_page
from autopipe.ir.plan import Alternative, Breakdown, Choice
from autopipe.ir.schedule import Phase
from autopipe.ir.timeline import StepEndKind, TaskSeconds
from tests.cli.drawing.browser import needs_browser, seen_by
from tests.cli.drawing.examples import HOSTILE, chain_plan, split_embedding


def rivals(name):
    return (
        ScheduleResult("1f1b", 27.0, 0.3, (2**24,) * 4, chosen=True),
        ScheduleResult("gpipe", 29.0, 0.35, (2**25,) * 4),
        ScheduleResult(name, refusal=name),
    )


def plan_page(name="plain.onnx", stages=4, micro_batches=6):
    plan, timeline = chain_plan(stages, micro_batches, model=name)
    plan = dataclasses.replace(plan, summary=dataclasses.replace(plan.summary, strategy=name))
    return report_page(plan_report(plan, timeline, rivals(name) if stages == 4 else ()))


def block_page(name="plain"):
    schedule = split_embedding(first_name=name)
    own = ScheduleResult(name, schedule.makespan, 0.1, schedule.peak_memory, chosen=True)
    return report_page(block_report(schedule, name, name, (own,)))


class Elements(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


def elements(page):
    parser = Elements()
    parser.feed(page)
    return parser.found


@pytest.mark.parametrize("page", [plan_page, block_page])
def test_the_page_loads_nothing_and_takes_no_text_for_markup(page):
    hostile = page(HOSTILE)
    assert [tag for tag, _ in elements(hostile)] == [tag for tag, _ in elements(page())]
    assert not [
        tag
        for tag, given in elements(hostile)
        if {"src", "href", "onerror", "onload"} & given.keys()
    ]
    assert not re.search(r"@import|url\((?!#)|https?://(?!www\.w3\.org)", hostile)


def test_half_of_a_letter_in_a_name_can_be_written():
    assert block_page("\ud800").encode("utf-8")


def test_rivals_stand_in_order_with_the_chosen_one_marked():
    page = plan_page()
    assert page.index("1f1b (chosen)") < page.index(">gpipe<") < page.index('<td class="why"')
    assert "<td>1.074</td>" in page
    assert "over the limit" not in page


def test_colours_and_letters_are_explained_and_so_is_the_step():
    plan, timeline = chain_plan(4, 6)
    chosen = Alternative(Choice("piper", schedule="1f1b"), 1.0, 0.9, 6)
    other = Alternative(Choice("mcmc"), refused="no")
    plan = dataclasses.replace(
        plan, breakdown=Breakdown(0.5, bubble_s=0.25), alternatives=(other, chosen)
    )
    page = report_page(plan_report(plan, timeline, ()))
    legend = page[
        page.index('<p class="legend">') : page.index("</p>", page.index('<p class="legend">'))
    ]
    for stage in range(4):
        assert (
            f'<i style="background:{stage_colour(stage, Phase.FORWARD)}"></i>stage {stage}<'
            in legend
        )
    assert "F forward" in legend and "B backward" in legend and "its micro-batch" in legend
    assert "W gradients" not in legend, "a phase that the step does not have"
    parts = page[page.index("Where the step goes") :]
    assert (
        parts.index("<td>ideal</td>")
        < parts.index("<td>bubble</td>")
        < parts.index("33.3%")
        < parts.index("</table>")
    )
    rows = page[page.index("Candidates, the best of each strategy") :]
    assert (
        '<tr class="chosen"><td>piper</td>' in rows
        and '<td class="why" colspan="6">no</td>' in rows
    )
    tables = page.count("<table>")
    assert page.count('<div class="wide"><table>') == tables, "each scrolls on a phone"


HANDS = """
const probe = document.getElementById("timeline"), box = probe.getBoundingClientRect();
const note = (name) => { seen[name] = [Number(probe.dataset.from), Number(probe.dataset.to)]; };
const at = { clientX: box.left + box.width / 2, clientY: box.top + 50, bubbles: true, cancelable: true, pointerId: 1 };
probe.setPointerCapture = () => {};
const press = (key) => probe.dispatchEvent(new KeyboardEvent("keydown", { key }));
const point = (kind, x, y) => {
  probe.dispatchEvent(new PointerEvent(kind, { ...at, clientX: box.left + x, clientY: box.top + y }));
};
const tip = () => document.getElementById("tip").textContent;
const colours = () => {
  const points = probe.getContext("2d").getImageData(0, 0, probe.width, probe.height).data, found = new Set();
  for (let index = 0; index < points.length; index += 4) found.add(points.slice(index, index + 3).join());
  return [...found];
};
"""

MOVES = """
note("start");
probe.dispatchEvent(new WheelEvent("wheel", { ...at, deltaY: -300 }));
note("wheel");
point("pointerdown", box.width / 2, 50);
point("pointermove", box.width / 2 - 100, 50);
point("pointerup", box.width / 2 - 100, 50);
note("drag");
press("ArrowRight");
note("right");
document.getElementById("all").click();
note("all");
press("+");
note("key");
press("r");
note("repetend");
press("0");
seen.colours = colours();
point("pointermove", 50, 50);
seen.tip = tip();
point("pointermove", box.width / 2, 80);
seen.below = tip();
"""


def rgb(stage, phase):
    colour = stage_colour(stage, phase)
    return ",".join(str(int(colour[place : place + 2], 16)) for place in (1, 3, 5))


def length(view):
    return view[1] - view[0]


@needs_browser
def test_a_plan_draws_zooms_and_explains_in_a_browser(tmp_path):
    seen = seen_by(plan_page(HOSTILE), HANDS + MOVES, tmp_path)
    assert seen["start"] == seen["all"] == [0, 27.0]
    assert length(seen["wheel"]) == pytest.approx(27.0 / 2.718281828, rel=1e-3)
    assert seen["wheel"][0] > 0
    assert seen["drag"][0] > seen["wheel"][0]
    assert length(seen["drag"]) == pytest.approx(length(seen["wheel"]))
    assert seen["right"][0] == pytest.approx(seen["drag"][0] + length(seen["drag"]) / 8)
    assert length(seen["key"]) == pytest.approx(27.0 / 2)
    assert seen["repetend"] == [3.0, 18.0]
    both = (Phase.FORWARD, Phase.BACKWARD)
    assert {rgb(stage, phase) for stage in range(4) for phase in both} <= set(seen["colours"])
    assert seen["tip"].split("\n") == [
        "0F0", "forward, stage 0, micro-batch 0, device 0", "0 to 1 s: 1 s", "memory in use 6 MiB",
    ]  # fmt: skip
    assert seen["below"].endswith("memory in use 12 MiB")
    assert "<script>" in seen["title"]


def ending_page(**options):
    """A page whose step ends with gradient sums and updates."""
    plan, timeline = chain_plan(gradient_s=0.2, update_s=3.0, **options)
    return report_page(plan_report(plan, timeline, rivals("x" * 200)))


def test_gradient_sums_and_updates_have_their_place_in_the_legend():
    page = ending_page()
    legend = page[
        page.index('<p class="legend">') : page.index("</p>", page.index('<p class="legend">'))
    ]
    for kind, letter in ((StepEndKind.GRADIENT_SUM, "G"), (StepEndKind.UPDATE, "U")):
        assert f'<i style="background:{END_STYLES[kind].fill}"></i>{letter} {kind.value}<' in legend
    assert "G gradient sum<" not in plan_page()


@needs_browser
def test_gradient_sums_and_updates_are_painted_and_explained(tmp_path):
    script = """
    seen.colours = colours();
    const at_time = (time) => left_edge + (time / 30.2) * (right_edge - left_edge);
    const left_edge = 44, right_edge = box.width - 20 - 6.6 * "12 MiB".length;
    point("pointermove", at_time(28.7), 50); seen.update = tip();
    point("pointermove", at_time(27.1), 50); seen.sum = tip();
    """
    seen = seen_by(ending_page(), HANDS + script, tmp_path)
    for style in END_STYLES.values():
        assert (
            ",".join(str(int(style.fill[place : place + 2], 16)) for place in (1, 3, 5))
            in seen["colours"]
        )
    assert seen["update"].split("\n") == [
        "update", "parameters of all stages, device 0", "27.2 s to 30.2 s: 3 s",
    ]  # fmt: skip
    assert seen["sum"].split("\n") == [
        "gradient sum", "gradients of stage 0, device 0", "27 s to 27.2 s: 200 ms",
    ]  # fmt: skip


WIDTHS = """
const boxes = [...document.querySelectorAll(".wide")];
const widths = () => ({
  cut: boxes.filter((box) => box.scrollWidth > box.clientWidth).length,
  scroll: boxes.every((box) => getComputedStyle(box).overflowX === "auto"),
  beyond: boxes.filter((box) => box.getBoundingClientRect().right > document.body.getBoundingClientRect().right).length,
});
seen.page = widths();
document.body.style.width = "390px";
seen.phone = widths();
"""


@needs_browser
def test_tables_fit_a_page_of_1440_pixels_and_scroll_on_a_phone(tmp_path):
    """With the columns of split backwards and of hosts."""
    plan, timeline = chain_plan(gradient_s=0.2, update_s=3.0)
    host = TaskSeconds(0.5, 1.0)
    stage = dataclasses.replace(
        plan.prediction.stages[0],
        input_gradient_s=1.0,
        weight_gradient_s=1.0,
        on_host=host,
        on_device=host,
    )
    halves = tuple(
        dataclasses.replace(task, phase=Phase.INPUT_GRADIENT) for task in plan.schedule.tasks[0]
    )
    split = dataclasses.replace(
        plan,
        prediction=dataclasses.replace(plan.prediction, stages=(stage,) * 4),
        schedule=dataclasses.replace(plan.schedule, tasks=(halves, *plan.schedule.tasks[1:])),
    )
    seen = seen_by(
        report_page(plan_report(split, timeline, rivals("x" * 60))), WIDTHS, tmp_path, width=1440
    )
    assert seen["page"] == {"cut": 0, "scroll": True, "beyond": 0}
    assert seen["phone"]["scroll"] and seen["phone"]["beyond"] == 0
    assert seen["phone"]["cut"] > 0, "tables too wide for a phone are what scrolls"


@needs_browser
def test_many_devices_and_micro_batches_are_drawn_as_shares_of_time(tmp_path):
    script = (
        "seen.all = colours(); press('r'); note('repetend'); point('pointermove', 300, 50); "
        "seen.tip = tip();"
    )
    seen = seen_by(plan_page(stages=32, micro_batches=512), HANDS + script, tmp_path)
    assert {
        rgb(stage, phase) for stage in range(10) for phase in (Phase.FORWARD, Phase.BACKWARD)
    } <= set(seen["all"])
    assert seen["repetend"] == [96.0, 1536.0]
    assert re.match(
        r"0[FB]\d+\n(forward|backward), stage 0, micro-batch \d+, device 0\n", seen["tip"]
    )


@needs_browser
def test_blocks_are_told_by_their_names_and_in_their_own_units(tmp_path):
    script = HANDS + "point('pointermove', 48, 50); seen.tip = tip();"
    seen = seen_by(block_page(HOSTILE), script, tmp_path)
    assert seen["tip"].split("\n") == [
        f"{HOSTILE}·0", "forward, stage 0, unit 0, device 0", "0 to 1: 1", "memory in use 0",
    ]  # fmt: skip
