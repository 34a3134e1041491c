"""The timeline as a picture file."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from autopipe.api.timeline_figure import plan_picture
from autopipe.cli.drawing.svg import timeline_svg
from tests.cli.drawing.examples import HOSTILE, chain_plan


def test_the_picture_is_xml_with_a_box_a_task():
    plan, timeline = chain_plan(model=HOSTILE)
    root = ElementTree.fromstring(timeline_svg(plan_picture(plan, timeline)))
    boxes = [
        each for each in root.iter("{http://www.w3.org/2000/svg}rect") if "fill" in each.attrib
    ]
    assert len(boxes) == len(timeline.spans)
    assert all(float(each.attrib["x"]) + float(each.attrib["width"]) <= 1000 for each in boxes)


def drawn(**options):
    return timeline_svg(plan_picture(*chain_plan(**options)))


def of_class(text, name):
    return [
        each for each in ElementTree.fromstring(text).iter() if each.attrib.get("class") == name
    ]


def test_gradient_sums_and_updates_are_drawn_behind_the_last_task():
    boxes = of_class(drawn(gradient_s=3.0, update_s=0.001), "end")
    titles = [each.find("{http://www.w3.org/2000/svg}title").text for each in boxes]
    assert titles == [
        name for stage in range(4) for name in (f"gradient sum of stage {stage}", "update")
    ]
    # Of 842 pixels: all of a device's step of 27 s, a sum of 3 s, an update that would be too thin
    # to see.
    sums = boxes[::2]
    updates = boxes[1::2]
    assert all(
        float(each.attrib["width"]) == pytest.approx(842 * 3 / 30.001 - 0.6, abs=0.01)
        for each in sums
    )
    assert {each.attrib["width"] for each in updates} == {"1.00"}
    first = float(sums[0].attrib["x"])
    assert first == pytest.approx(74 + 842 * 27 / 30.001, abs=0.01)
    assert not of_class(drawn(), "end")


def test_the_legend_tells_colours_and_letters_within_the_picture():
    text = drawn(stages=40, gradient_s=1.0, update_s=1.0)
    texts = [
        "".join(each.itertext())
        for each in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")
    ]
    for entry in (
        "F forward",
        "B backward",
        "G gradient sum",
        "U update",
        "stage 0",
        "stage 31",
        "and 8 more stages",
    ):
        assert entry in texts
    assert "stage 32" not in texts
    assert "G gradient sum" not in drawn()
    root = ElementTree.fromstring(text)
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    for each in root.iter():
        assert float(each.attrib.get("x", 0)) < width
        assert float(each.attrib.get("y", 0)) < height


def luminance(colour):
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_can_be_read_on_the_pictures_own_paper_in_either_theme():
    """Whatever page the picture is on: a browser tells it the system's theme alone. 4.5 is the
    WCAG's ratio.
    """
    text = drawn()
    (paper,) = of_class(text, "paper")
    assert paper.attrib["width"] == "1000"
    assert text.startswith(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 ' + paper.attrib["height"]
    )
    light, dark = text[text.index("<style>") : text.index("</style>")].split(
        "@media (prefers-color-scheme:dark)"
    )
    for style in (light, dark):
        colours = dict(re.findall(r"(text|\.\w+)\{[^}]*?fill:(#\w{6})", style))
        for name in ("text", ".quiet"):
            lighter, darker = sorted(
                (luminance(colours[name]), luminance(colours[".paper"])), reverse=True
            )
            assert (lighter + 0.05) / (darker + 0.05) >= 4.5
