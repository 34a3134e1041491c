"""Compare the trained parameters of exported files with the parameters of the torch modules, and
write tests/exports/trained-parameters.md.

    python scripts/trained_parameters.py
        every model and exporter, trained and fresh (half an hour)
    python scripts/trained_parameters.py --only mamba
        models whose name contains `mamba`; the other rows stay
    python scripts/trained_parameters.py --jobs 2
        two models at a time
    python scripts/trained_parameters.py --before
        fill the column `before`; run this with an older autopipe

A model is exported and read; it is not planned, and no ranks start.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "exports" / "trained-parameters.md"
sys.path.insert(0, str(ROOT))

from tests.exports.traced import Traced, all_traced  # noqa: E402 - needs the path above
from tests.exports.trained_parameters import NOT_EXPORTED, compared, unexplained  # noqa: E402

PACKAGES = ("torch", "transformers", "onnx", "onnxscript")
HEADER = ("model", "exporter", "numbers", "torch", "before", "here", "result")
EQUAL = "equal"
SMALLEST = "gpt2-torchscript-trained"
TEXT = """# Trained parameters, compared with torch

This page compares the parameters that a plan of an exported file trains with the parameters of the torch module. Write it with
`python scripts/trained_parameters.py` ({versions}); `./test -m sweep tests/exports` asserts it.

Each row is a small model with a loss, of `transformers` or torch, and one of torch's exporters (`torch.onnx.export` with `dynamo=True` or
`dynamo=False`). The columns count elements of parameters that the loss reaches: of the module's `named_parameters()` (`torch`), and of the
plan at commit 26e3f3f (`before`) and at present (`here`). `trained`: noise is added to every parameter, so that all differ, and names and
values are compared per tensor. `fresh`: initial values, in which most scales are ones and biases are zeros.

Most differences arise in the exporter: `dynamo=True` computes values that depend only on parameters, folds batch normalization and drops zero
biases. With `torch.onnx.export(..., dynamo=True, optimize=False)`, ResNet, Swin v2, Gemma 2, RWKV and weight normalization equal torch
exactly. Files of `dynamo=False` do not contain the `padding_idx` of an embedding: torch has no gradient for that row, autopipe has one unless
the token is masked.

**{equal} of {count} rows are equal**, {explained} differ for the reason in the row, {wrong} are wrong.

"""


def main() -> int:
    """Compare and write the table; return 1 if a difference has no known reason, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="run only models whose name contains PATTERN"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="models at a time")
    parser.add_argument("--before", action="store_true", help="fill the column `before`")
    parser.add_argument(
        "--table", type=Path, default=TABLE, metavar="FILE", help="the page with the table"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="one small model: checks that this script runs"
    )
    arguments = parser.parse_args()
    if arguments.tiny:
        parser.set_defaults(only=SMALLEST)
        arguments = parser.parse_args()
    every = [*all_traced(fresh=False), *all_traced(fresh=True)]
    rows = _former_rows(every, arguments.table)
    chosen = [each for each in every if arguments.only in each.name]
    failures = 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, context) as pool:
        running = {pool.submit(_table_cells, traced): traced for traced in chosen}
        for done in as_completed(running):
            traced = running[done]
            torch, here, result = done.result()
            former = rows.get(traced.name, ["", "", "", ""])
            rows[traced.name] = (
                [torch, here, *former[2:]] if arguments.before else [torch, former[1], here, result]
            )
            failures += result.startswith("wrong")
            print(f"{traced.name}: {torch} {here} {result}", flush=True)
            _write(every, rows, arguments.table)
    _write(every, rows, arguments.table)
    return 1 if failures and not arguments.before else 0


def _table_cells(traced: Traced) -> tuple[str, str, str]:
    """Return (elements in torch, elements here, result), each as text for the table."""
    logging.disable(logging.WARNING)
    reason = NOT_EXPORTED.get((traced.model, traced.exporter))
    if reason:
        return "", "", f"not exported: {reason}"
    found = compared(traced)
    wrong, explained = unexplained(traced, found.differences)
    said = f"wrong: {'; '.join(wrong)}" if wrong else "; ".join(explained) or EQUAL
    return f"{found.torch:,}", f"{found.here:,}", said.replace("|", "/")


def _write(every: list[Traced], rows: dict[str, list[str]], table: Path) -> None:
    ordered = [(each, rows[each.name]) for each in every if each.name in rows]
    results = [row[-1] for _, row in ordered]
    equal = sum(result == EQUAL for result in results)
    wrong = sum(result.startswith("wrong") for result in results)
    text = TEXT.format(
        versions=", ".join(f"{name} {import_module(name).__version__}" for name in PACKAGES),
        equal=equal,
        count=len(ordered),
        explained=len(ordered) - equal - wrong,
        wrong=wrong,
    )
    lines = [HEADER, ["---"] * len(HEADER), *([*_row_key(each), *row] for each, row in ordered)]
    table.write_text(
        text + "".join(f"| {' | '.join(line)} |\n" for line in lines), encoding="utf-8"
    )


def _row_key(traced: Traced) -> list[str]:
    exporter = {"torchscript": "dynamo=False", "dynamo": "dynamo=True"}[traced.exporter]
    return [traced.model, exporter, "fresh" if traced.fresh else "trained"]


def _former_rows(every: list[Traced], table: Path) -> dict[str, list[str]]:
    """Return the cells of each row of the table, by the name of its model and exporter."""
    if not table.exists():
        return {}
    lines = [
        line for line in table.read_text(encoding="utf-8").splitlines() if line.startswith("| ")
    ][2:]
    cells = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]
    by_key = {tuple(row[:3]): row[3:] for row in cells}
    return {
        each.name: by_key[tuple(_row_key(each))]
        for each in every
        if tuple(_row_key(each)) in by_key
    }


if __name__ == "__main__":
    sys.exit(main())
