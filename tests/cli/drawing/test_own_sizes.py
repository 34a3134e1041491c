"""Stages with micro-batches of their own are drawn with their own numbers."""

from __future__ import annotations

import json

from autopipe.api.timeline_figure import plan_picture
from autopipe.api.timeline_files import chrome_trace, orders_csv
from autopipe.cli.drawing.report import plan_report, report_page
from autopipe.cli.drawing.svg import timeline_svg
from autopipe.cli.drawing.terminal import draw_timeline
from tests.cli.drawing.examples import own_sizes_plan


def test_every_picture_has_every_micro_batch_of_every_stage():
    plan, timeline = own_sizes_plan((1, 2, 4), micro_batches=4)
    picture = plan_picture(plan, timeline)
    rows = [[bar.unit for bar in row if bar.letter == "F"] for row in picture.rows]
    assert rows == [list(range(16)), list(range(8)), list(range(4))]
    rank = [line.split(",") for line in orders_csv(picture).splitlines()]
    assert [cells[-1] for cells in rank] == ["0B15", "1B7", "2B3"]
    tasks = [
        event
        for event in json.loads(chrome_trace(picture))["traceEvents"]
        if event.get("cat") == "forward"
    ]
    assert len(tasks) == 16 + 8 + 4
    shown = "\n".join(map(str, draw_timeline(picture, 200, colour=False)))
    assert "F0" in shown
    assert "micro-batch" in report_page(plan_report(plan, timeline, ()))
    assert timeline_svg(picture).startswith("<svg")
