"""TePDist's levels of the search for splits, compared with the exact search.

    python benchmarks/tepdist_levels.py zoo --write /tmp/tepdist-levels.md
    python benchmarks/tepdist_levels.py gpt3 --devices 8 16 64 --write /tmp/tepdist-levels.md

`zoo`: all models of the zoo at their default sizes. `gpt3`: GPT-3 175B with 96 layers, without
fusion, and with norms, activations and softmaxes decomposed into their ONNX definitions: more than
ten thousand operators. Seconds are CPU time; those of the tables are listed separately. There is no
memory limit. `--write` puts the table under the heading of its name in a page.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import onnx
import onnx.inliner
from command_line import parse_arguments

from autopipe.configs.cluster import build_cluster, cluster_preset
from autopipe.configs.zoo import MODELS, build, configure
from autopipe.ir.problem import Mode, Problem
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.frontend import read, read_model
from autopipe.passes.frontend.model import Model
from autopipe.passes.placement.tepdist.levels import O2, O3
from autopipe.passes.sharding.node_costs import StageOptions
from autopipe.passes.sharding.search import ExactSolver, Solver, SplitTables, make_split_tables
from autopipe.passes.solvers.min_sum import Assignment

BATCH = 64
DECOMPOSED = [("", "LayerNormalization"), ("", "Gelu"), ("", "Softmax")]
COLUMNS = (
    "model",
    "devices",
    "operators",
    "tables s",
    "exact s",
    "O2 s",
    "O3 s",
    "exact ms",
    "O2 loss",
    "O3 loss",
    "O2 gap",
    "O3 gap",
)


def zoo_model(name: str) -> Model:
    """Return a model of the zoo at its default size."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        build(configure(name, {"loss": True, "weights": "none"})).save(path)
        return read_model(path, batch=BATCH)


def gpt3() -> Model:
    """Return GPT-3 175B, decomposed and without fusion."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        build(configure("gpt", {"size": "175b", "loss": True, "weights": "none"})).save(path)
        whole = onnx.load(path, load_external_data=False)
        inlined = onnx.inliner.inline_selected_functions(
            whole, DECOMPOSED, inline_schema_functions=True
        )
        onnx.save(inlined, path)
        with patch.object(read, "fuse_operators", lambda graph: graph):
            return read_model(path, batch=BATCH)


def timed(make: Callable[[], Solver], tables: SplitTables) -> tuple[Assignment, float]:
    """Return the solver's assignment without a memory limit, and its CPU seconds."""
    begin = time.process_time()
    answer = make()(tables, None)
    return answer, time.process_time() - begin


def row(name: str, model: Model, devices: int, cluster: str) -> list[str]:
    """Return one line of the table."""
    links = build_cluster(cluster_preset(cluster), devices, None, None)
    problem = Problem(
        model.graph, roofline_costs(model.graph), links, BATCH, 1, Mode.TRAIN, model.loss
    )
    begin = time.process_time()
    nodes = range(len(model.graph.nodes))
    tables = make_split_tables(
        problem, nodes, tuple(range(devices)), StageOptions(given=frozenset(model.graph.outputs))
    )
    made = time.process_time() - begin
    (exact, exact_s), (second, second_s), (third, third_s) = (
        timed(make, tables) for make in (lambda: ExactSolver(None), O2, O3)
    )
    seconds = [f"{each:.2f}" for each in (made, exact_s, second_s, third_s)]
    losses = [f"{100 * max(0.0, each.cost / exact.cost - 1):.3f}%" for each in (second, third)]
    gaps = [f"{100 * each.gap:.3f}%" for each in (second, third)]
    return [
        name,
        str(devices),
        str(model.nodes_before),
        *seconds,
        f"{1e3 * exact.cost:.4g}",
        *losses,
        *gaps,
    ]


def rows(
    part: str, devices: Sequence[int], cluster: str, only: Sequence[str]
) -> Iterator[list[str]]:
    """Yield the lines of a part."""
    for name in sorted(MODELS) if part == "zoo" else ["gpt3-175b"]:
        if not only or name in only:
            model = zoo_model(name) if part == "zoo" else gpt3()
            for count in devices:
                yield row(name, model, count, cluster)


def main() -> None:
    """Print the table, and write it if requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["zoo", "gpt3"])
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--cluster", default="a100-80gb")
    parser.add_argument("--only", nargs="*", default=[], help="models of the zoo")
    parser.add_argument("--write", type=Path, help="a page with a heading of the part's name")
    arguments = parse_arguments(parser, devices=[4], only=["two-branch"])
    import scipy.optimize  # noqa: F401  Loaded before anything is timed.

    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    print("\n".join(lines), flush=True)
    for each in rows(arguments.part, arguments.devices, arguments.cluster, arguments.only):
        lines.append("| " + " | ".join(each) + " |")
        print(lines[-1], flush=True)
    if arguments.write:
        page = arguments.write.read_text()
        table = re.compile(
            rf"(?<=^## {arguments.part}$)(.*?)^\|.*?(?=^[^|]|\Z)", re.MULTILINE | re.DOTALL
        )
        arguments.write.write_text(
            table.sub(lambda found: found[1] + "\n".join(lines) + "\n", page, count=1)
        )


if __name__ == "__main__":
    main()
