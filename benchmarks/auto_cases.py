"""The main cases of four papers, chosen without naming a strategy: runs them, and writes the page
about them.

    python -m benchmarks.auto_cases --log /tmp/cases.jsonl --only gpt-11b --only vgg19
    python -m benchmarks.auto_cases --log /tmp/cases.jsonl --table /tmp/auto-cases.md

It is `python -m benchmarks auto`, a case after the other; each is a line of the log, and what the
log has is not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.auto import cases
from benchmarks.command_line import parse_arguments

Row = Mapping[str, Any]

HEAD = """\
# The papers' main cases, chosen without naming a strategy

Each case of `python -m benchmarks auto` asks for a model at its paper's size, on the paper's devices, and names neither
strategy nor schedule. All steps are simulated. What is compared with are the papers' baselines as the benchmarks of
each paper have them (those of `tessel`, `graphpipe`, `pase` and `tepdist`); `theirs` is what the paper reports,
mostly the largest of several sizes and numbers of devices.

`at most` is what the step of any plan could be faster: were all devices busy all the time with the model's operators at
the roofline, and with nothing else, no messages, sums of gradients or second forwards.

The shape that a paper is about comes out where it is fastest. Where another plan is faster, that one is chosen, and
`the best of` the paper's strategy says by how much. GraphPipe's stages, for one, share samples alone; a layer whose
gradients are costly to exchange is better split, and then all devices are busy with no branches beside one another.

    python -m benchmarks.auto_cases --log /tmp/cases.jsonl
    python -m benchmarks.auto_cases --log /tmp/cases.jsonl --table /tmp/auto-cases.md
"""

SHAPES = {
    "is_around_tables": "M or NN: tables and heads on all devices, layers between on single ones",
    "stages_beside": "stages beside one another",
    "class_parts": "parts of the classes",
    "row_parts": "parts of a table's rows",
}


def main() -> None:
    """Run cases that the log lacks, or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--log", type=Path, required=True, metavar="FILE", help="a JSON object a line"
    )
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="write the log's cases as Markdown, run nothing"
    )
    parser.add_argument(
        "--only", action="append", metavar="CASE", help="a case's beginning; repeatable"
    )
    arguments = parse_arguments(parser, only=["candle-uno-paper/p=8"])
    found = (
        [json.loads(line) for line in arguments.log.read_text().splitlines()]
        if arguments.log.exists()
        else []
    )
    if arguments.table:
        arguments.table.write_text(written(found))
        return
    done = {each["case"] for each in found}
    for case in cases():
        if case.name in done or (
            arguments.only and not case.name.startswith(tuple(arguments.only))
        ):
            continue
        begin = sum(os.times()[:4])
        rows = [dataclasses.asdict(row) for row in case.run()]
        line = {"case": case.name, "seconds": sum(os.times()[:4]) - begin, "rows": rows}
        with arguments.log.open("a") as log:
            log.write(json.dumps(line) + "\n")
        print(case.name, f"{line['seconds']:.0f} s of processor time", flush=True)


def written(found: Sequence[Row]) -> str:
    """The page."""
    order = [case.name for case in cases()]
    left = ", the others are left for a quiet machine" if len(found) < len(order) else ""
    lines = [HEAD, f"{len(found)} of {len(order)} cases are here{left}."]
    for case in sorted(found, key=lambda each: order.index(each["case"])):
        lines += ["", f"## {case['case']}", "", *_about(case["rows"]), "", *_compared(case["rows"])]
    return "\n".join(lines) + "\n"


def _about(rows: Iterable[Row]) -> Iterable[str]:
    for row in rows:
        if row["metric"] == "step_time_s" and row["ours"] is None:
            yield f"No plan: {row['note']}."
        elif row["metric"] == "step_time_s":
            yield from (f"A step of {row['ours']:.4g} s ({row['note']}):", "")
        elif row["metric"] in SHAPES:
            yield f"- {SHAPES[row['metric']]}: {_told(row)}"


def _told(row: Row) -> str:
    if row["metric"] == "is_around_tables":
        return "yes" if row["ours"] else "no"
    return f"{row['ours']:.0f}"


def _compared(rows: Sequence[Row]) -> Iterable[str]:
    speedups = [row for row in rows if row["metric"] == "speedup"]
    most = {row["variant"]: f"{row['ours']:.2f}" for row in rows if row["metric"] == "most_speedup"}
    if speedups:
        yield from ("| faster than | theirs | ours | at most | |", "|---|---|---|---|---|")
    for row in speedups:
        name = row["variant"].removeprefix("auto over ")
        theirs = "" if row["theirs"] is None else f"{row['theirs']:.2f}"
        ours = "–" if row["ours"] is None else f"{row['ours']:.2f}"
        yield f"| {name} | {theirs} | {ours} | {most.get(row['variant'], '')} | {row['note']} |"


if __name__ == "__main__":
    main()
