"""`autopipe show`: the timeline as text, trace, picture and page; the page also in a real browser."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re
import shutil
import subprocess
from xml.etree import ElementTree

import pytest

from autopipe.cli.drawing.palette import stage_colour
from autopipe.cli.drawing.picture import plan_picture
from autopipe.cli.drawing.report import report_page
from autopipe.cli.drawing.svg import timeline_svg
from autopipe.cli.main import main
from autopipe.cli.plan_folder import open_prediction
from autopipe.configs.zoo import build, configure
from autopipe.ir.schedule import Phase
from tests.cli.drawing.examples import HOSTILE, chain_plan

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans")
    settings = {"layers": "2", "hidden": "32", "heads": "2", "sequence": "16", "vocabulary": "64", "loss": "true"}
    build(configure("gpt", settings)).save(path / "gpt.onnx")
    assert main(["plan", str(path / "gpt.onnx"), "--gpus", "2", "-q", "-o", str(path / "plan")]) == 0
    (path / "gpt.onnx").unlink()
    return path / "plan"


def test_no_colours_are_piped(folder, capsys):
    assert main(["show", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "repetend ×" in out
    assert "█" in out
    assert " of 74.5 GiB" in out


def test_json_says_what_was_decided(folder, capsys):
    assert main(["show", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["summary"]["devices"] == 2
    assert document["tasks"][1][:2] == ["1F0", "1B0"]
    assert document["stages"][0]["predicted"]["forward_s"] > 0


def test_the_trace_holds_every_task_and_message(folder, capsys, tmp_path):
    assert main(["show", str(folder), "--trace", str(tmp_path / "trace.json")]) == 0
    plan, timeline = open_prediction(folder)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(timeline.spans) + len(timeline.transfers)
    assert {event["name"] for event in complete} >= {str(task) for order in plan.schedule.tasks for task in order}
    assert max(event["ts"] + event["dur"] for event in complete) <= timeline.end * 1e6 * (1 + 1e-9)
    assert sum(event["ph"] == "C" for event in events) == sum(map(len, timeline.memory))


def test_the_picture_is_xml_with_a_box_a_task():
    plan, timeline = chain_plan(model=HOSTILE)
    root = ElementTree.fromstring(timeline_svg(plan_picture(plan, timeline)))
    boxes = [each for each in root.iter("{http://www.w3.org/2000/svg}rect") if "fill" in each.attrib]
    assert len(boxes) == len(timeline.spans)
    assert all(float(each.attrib["x"]) + float(each.attrib["width"]) <= 1000 for each in boxes)


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


def test_the_page_loads_nothing_and_takes_no_text_of_a_model_for_markup():
    harmless, hostile = (report_page(*chain_plan(model=name)) for name in ("plain.onnx", HOSTILE))
    assert [tag for tag, _ in elements(hostile)] == [tag for tag, _ in elements(harmless)]
    assert not [tag for tag, given in elements(hostile) if {"src", "href", "onerror", "onload"} & given.keys()]
    assert not re.search(r"@import|url\((?!#)|https?://(?!www\.w3\.org)", hostile)


@pytest.mark.parametrize("option", ["--html", "--svg", "--trace"])
def test_files_that_cannot_be_written_are_refused(folder, capsys, tmp_path, option):
    for target in (tmp_path, tmp_path / "absent/file"):
        assert main(["show", str(folder), option, str(target)]) == 2
        assert capsys.readouterr().err.startswith("error: ")
    assert list(tmp_path.iterdir()) == []


PROBE = """<script>
const probe = document.getElementById("timeline"), box = probe.getBoundingClientRect(), seen = {};
const note = (name) => { seen[name] = [Number(probe.dataset.from), Number(probe.dataset.to)]; };
const at = { clientX: box.left + box.width / 2, clientY: box.top + 30, bubbles: true, cancelable: true, pointerId: 1 };
probe.setPointerCapture = () => {};
note("start");
probe.dispatchEvent(new WheelEvent("wheel", { ...at, deltaY: -300 }));
note("wheel");
probe.dispatchEvent(new PointerEvent("pointerdown", at));
probe.dispatchEvent(new PointerEvent("pointermove", { ...at, clientX: at.clientX - 100 }));
probe.dispatchEvent(new PointerEvent("pointerup", at));
note("drag");
document.getElementById("all").click();
note("all");
probe.dispatchEvent(new KeyboardEvent("keydown", { key: "+" }));
note("key");
document.getElementById("all").click();
const points = probe.getContext("2d").getImageData(0, 0, probe.width, probe.height).data, colours = new Set();
for (let index = 0; index < points.length; index += 4) colours.add(points.slice(index, index + 3).join());
probe.dispatchEvent(new PointerEvent("pointermove", { ...at, clientX: box.left + 50 }));
seen.colours = [...colours];
seen.tip = document.getElementById("tip").textContent;
seen.title = document.title;
document.body.append(Object.assign(document.createElement("pre"), { id: "seen", textContent: JSON.stringify(seen) }));
</script></body>"""


def rgb(stage, phase):
    colour = stage_colour(stage, phase)
    return ",".join(str(int(colour[place : place + 2], 16)) for place in (1, 3, 5))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_the_page_draws_and_zooms_in_a_browser(tmp_path):
    plan, timeline = chain_plan(model=HOSTILE)
    plan = dataclasses.replace(plan, summary=dataclasses.replace(plan.summary, strategy=HOSTILE))
    (tmp_path / "page.html").write_text(report_page(plan, timeline).replace("</body>", PROBE))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1000,900"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run(
        [BROWSER, *flags, profile, "--dump-dom", f"file://{tmp_path / 'page.html'}"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    written = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert written, done.stdout[-2000:]
    seen = json.loads(html.unescape(written[1]))
    end = timeline.end
    assert seen["start"] == seen["all"] == [0, end]
    assert seen["wheel"][1] - seen["wheel"][0] == pytest.approx(end / 2.718281828, rel=1e-3)
    assert seen["wheel"][0] > 0
    assert seen["drag"][0] > seen["wheel"][0]
    assert seen["drag"][1] - seen["drag"][0] == pytest.approx(seen["wheel"][1] - seen["wheel"][0])
    assert seen["key"][1] - seen["key"][0] == pytest.approx(end / 2)
    # A forward and a backward colour of each of the four stages, at least, are on the canvas.
    assert {rgb(stage, phase) for stage in range(4) for phase in (Phase.FORWARD, Phase.BACKWARD)} <= set(
        seen["colours"]
    )
    assert seen["tip"].startswith("0F0\nstage 0, micro-batch 0, device 0")
    assert seen["title"] != "owned"
