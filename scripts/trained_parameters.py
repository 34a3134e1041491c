"""Compares what is trained here with torch's own parameters, and writes
tests/exports/trained-parameters.md.

    python scripts/trained_parameters.py               every model, exporter and kind of numbers: half an hour
    python scripts/trained_parameters.py --only mamba  those whose name holds `mamba`; the table's other rows stay
    python scripts/trained_parameters.py --jobs 2      two at a time
    python scripts/trained_parameters.py --before      into the columns `before`, run with an older autopipe

Nothing is planned and no rank is started: a model is exported, read, and its parameters are
compared.
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
TEXT = """# What is trained, compared with torch

Made by `python scripts/trained_parameters.py` with {versions}; `./test -m sweep tests/exports` asserts it.

Each row is one small model with a loss, of `transformers` or plain torch, through one of torch's exporters
(`torch.onnx.export` with `dynamo=True` or `dynamo=False`). Elements of all parameters that the loss reaches: those of
the module's own `named_parameters()`, and those that a plan of the exported file trains, at commit 26e3f3f (`before`)
and now (`here`). `trained`: every parameter is moved by noise, so that no two are equal; then names and numbers are
compared tensor by tensor. `fresh`: the module as it is made, most of whose scales are ones and biases zeros.

Much of what differs is lost while exporting: `dynamo=True` computes what depends on parameters alone, folds batch
normalization and drops biases of zeros. `torch.onnx.export(..., dynamo=True, optimize=False)` leaves all of it: so
exported, ResNet, Swin v2, Gemma 2, RWKV and weight normalization match torch exactly (models that cut a tensor with
`split` or `chunk` are then refused, as operators on sequences are not supported). An embedding's `padding_idx` stands
in no file of `dynamo=False`: torch gives that row no gradient, here it has one wherever the padding's token is not
masked.

**{equal} of {count} rows are equal**, {explained} differ for the reason that stands in the row, {wrong} are wrong.

"""


def main() -> int:
    """Compare and write the table; 1 where a difference is not explained."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="run only what has PATTERN in its name"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="models at a time")
    parser.add_argument("--before", action="store_true", help="fill the column `before`")
    parser.add_argument(
        "--table", type=Path, default=TABLE, metavar="FILE", help="the page that holds the table"
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
        running = {pool.submit(_found, traced): traced for traced in chosen}
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


def _found(traced: Traced) -> tuple[str, str, str]:
    """Elements in torch and here, and what to say of them."""
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
    lines = [HEADER, ["---"] * len(HEADER), *([*_key(each), *row] for each, row in ordered)]
    table.write_text(
        text + "".join(f"| {' | '.join(line)} |\n" for line in lines), encoding="utf-8"
    )


def _key(traced: Traced) -> list[str]:
    exporter = {"torchscript": "dynamo=False", "dynamo": "dynamo=True"}[traced.exporter]
    return [traced.model, exporter, "fresh" if traced.fresh else "trained"]


def _former_rows(every: list[Traced], table: Path) -> dict[str, list[str]]:
    """What the table holds, by name."""
    if not table.exists():
        return {}
    lines = [
        line for line in table.read_text(encoding="utf-8").splitlines() if line.startswith("| ")
    ][2:]
    cells = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]
    by_key = {tuple(row[:3]): row[3:] for row in cells}
    return {each.name: by_key[tuple(_key(each))] for each in every if tuple(_key(each)) in by_key}


if __name__ == "__main__":
    sys.exit(main())
