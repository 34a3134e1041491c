"""The timeline as a picture file."""

from __future__ import annotations

from xml.etree import ElementTree

from autopipe.cli.drawing.picture import plan_picture
from autopipe.cli.drawing.svg import timeline_svg
from tests.cli.drawing.examples import HOSTILE, chain_plan


def test_the_picture_is_xml_with_a_box_a_task():
    plan, timeline = chain_plan(model=HOSTILE)
    root = ElementTree.fromstring(timeline_svg(plan_picture(plan, timeline)))
    boxes = [each for each in root.iter("{http://www.w3.org/2000/svg}rect") if "fill" in each.attrib]
    assert len(boxes) == len(timeline.spans)
    assert all(float(each.attrib["x"]) + float(each.attrib["width"]) <= 1000 for each in boxes)
