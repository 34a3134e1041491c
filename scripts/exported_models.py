"""Plan, launch and verify every exported model on four CPU ranks, and write the results to
docs/reference/exported-models.md.

    python scripts/exported_models.py
        all models (about an hour on two cores)
    python scripts/exported_models.py --only gpt2
        models whose name contains `gpt2`; the other rows stay
    python scripts/exported_models.py --resume
        models without a row that passes
    python scripts/exported_models.py --jobs 3
        three models at a time

Each row is four commands of autopipe: plan, codegen, launch, verify. A model that fails has a row
with the reason.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "reference" / "exported-models.md"
sys.path.insert(0, str(ROOT))

from tests.distributed.support.pool import Pools, ranks_in  # noqa: E402 - needs the path above
from tests.exports.journey import (  # noqa: E402
    Journey,
    Outcome,
    all_journeys,
    travel,
)

PASSES = "passes"
SMALLEST = "squeezenet-onnx-static-forward"
PACKAGES = ("torch", "transformers", "onnx", "onnxruntime")
EXPORTERS = {
    "torchscript": "dynamo=False",
    "dynamo": "dynamo=True",
    "onnx": "light",
    "hand": "hand",
}
HEADER = (
    "model", "exporter", "type", "shapes", "outputs", "strategy", "batch", "nodes", "devices of each stage",
    "outputs, ONNX Runtime", "outputs, one device", "loss, one device", "gradients, one device", "result",
)  # fmt: skip
TEXT = """# Exported models

This page lists exported models that were taken from their file to verified ranks. Each row is one
ONNX file, for which four commands ran: `autopipe plan --gpus 4 --cluster cpu-local`, `codegen`,
`launch --device cpu` and `verify`. `python scripts/exported_models.py` writes this page. Rows ran
at commits up to {commit} ({day}), with {versions}.

The column `exporter` names the source of the file:

- `light`: networks that ship with onnx. For training, their weights are random, and YAML adds a
  loss.
- `dynamo=True` and `dynamo=False`: small random models of `transformers` and torch, from the newer
  and the older exporter of torch. The number after `@` is the opset of the file.
- `hand`: graphs of `tests/exports`.

Some files are results of optimizers, quantisers and converters.

The other columns contain:

- *outputs*: `loss` means two steps of training, one of which is compared; `forward` means one step
  of inference.
- *batch*: micro-batches × samples per micro-batch. If the file has another number of samples, it
  follows after `/`. A row with one micro-batch is a model whose output micro-batches would change;
  `plan` then refuses more of them.
- *nodes*: number of nodes in the file → number of nodes in the plan.
- *devices of each stage*: for example, in 1+2+1 the middle stage has two replicas.
- the columns with differences: ‖a − b‖₂ / ‖b‖₂ of the tensor with the largest difference. `outputs,
  ONNX Runtime` compares the outputs of one device with ONNX Runtime. The columns with `one device`
  compare four ranks with one device.

If the exporter has computed tensors from parameters, `plan` may refuse to train these tensors. For
the files in `FOLDED` of `tests/exports/journey.py`, the tensors are therefore listed in
`model.trainable`.

**{passed} of {count} rows pass.** {missing} of {total} files have no row.

"""


_POOLS = Pools()
"""Rank pools of this process; their ranks end with the process."""


def main() -> int:
    """Run the journeys and write the table; return 1 if a journey failed, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="run only models whose name contains PATTERN"
    )
    parser.add_argument(
        "--resume", action="store_true", help="run only models without a row that passes"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="journeys at a time")
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
    table = arguments.table
    rows = _former_rows(table) if arguments.only or arguments.resume else {}
    passed = {name for name, row in rows.items() if arguments.resume and row[-1] == PASSES}
    chosen = [
        each for each in all_journeys() if arguments.only in each.name and each.name not in passed
    ]
    failures = 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, context) as pool:
        for done in as_completed([pool.submit(_run_journey, journey) for journey in chosen]):
            outcome, seconds = done.result()
            name = outcome.journey.name
            failures += bool(outcome.failure)
            rows[name] = _row_of_outcome(outcome)
            print(f"{seconds:5.0f} s  {name}  {outcome.failure or PASSES}", flush=True)
            _write(rows, table)
    _write(rows, table)
    return 1 if failures else 0


def _run_journey(journey: Journey) -> tuple[Outcome, float]:
    """Return the outcome of a journey and its duration in seconds."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="autopipe-export-") as folder, ranks_in(_POOLS):
        outcome = travel(journey, Path(folder))
    return outcome, time.perf_counter() - started


def _row_of_outcome(outcome: Outcome) -> list[str]:
    journey = outcome.journey
    export = journey.export
    size = journey.samples
    found = (outcome.outputs, outcome.ranks_outputs, outcome.loss, outcome.gradients)
    return [
        export.model,
        re.sub("^[a-z]+", lambda found: EXPORTERS[found[0]], export.exporter),
        export.dtype,
        "dynamic" if export.dynamic else "static",
        "loss" if export.loss else "forward",
        journey.strategy,
        f"{journey.micro_batches}×{size}"
        + ("" if size == export.batch or export.dynamic else f"/{export.batch}"),
        "{}→{}".format(*outcome.nodes) if outcome.nodes else "",
        "+".join(map(str, outcome.stages)),
        *("" if value is None else f"{value:.1e}" for value in found),
        outcome.failure.replace("|", "/").replace("\n", " ") or PASSES,
    ]


def _write(rows: dict[str, list[str]], table: Path) -> None:
    """Return the table, with rows in the order of the journeys."""
    journeys = all_journeys()
    ordered = [rows[journey.name] for journey in journeys if journey.name in rows]
    text = TEXT.format(
        day=time.strftime("%Y-%m-%d"),
        commit=_current_commit(),
        versions=", ".join(f"{name} {import_module(name).__version__}" for name in PACKAGES),
        passed=sum(row[-1] == PASSES for row in ordered),
        count=len(ordered),
        missing=len(journeys) - len(ordered),
        total=len(journeys),
    )
    lines = [HEADER, ["---"] * len(HEADER), *ordered]
    table.write_text(text + "".join(f"|{'|'.join(line)}|\n" for line in lines), encoding="utf-8")


def _former_rows(table: Path) -> dict[str, list[str]]:
    """The rows that the table holds, by the journey's name: a journey and its row agree in the
    first seven columns.
    """
    if not table.exists():
        return {}
    lines = [
        line for line in table.read_text(encoding="utf-8").splitlines() if line.startswith("|")
    ][2:]
    rows = [line.removeprefix("|").removesuffix("|").split("|") for line in lines]
    by_key = {tuple(row[:7]): row for row in rows}
    keys = {
        journey.name: tuple(_row_of_outcome(Outcome(journey))[:7]) for journey in all_journeys()
    }
    return {name: by_key[key] for name, key in keys.items() if key in by_key}


def _current_commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short=10", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
