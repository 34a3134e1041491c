"""A graph pipeline against the sequential pipeline of the same stages, on gloo ranks.

The same operators on the same ranks under 1F1B, once with branches that wait for nobody, once in a
chain: there a zero that a stage computes from its last value is added to the first value of the
next stage. It alters no number, takes one float a sample, and makes every forward wait for the
stage before, every backward for the stage behind. In the graph pipeline the same zero comes from
the stage's own first value, so that both compute the same.

Steps run in turns. `measured` is the sequential pipeline's median over the graph pipeline's,
`predicted` the same ratio of simulated steps, in which each rank has a core of its own: where ranks
share cores, those that a warm-up leaves idle serve the other ranks, and there is less to gain.

    python benchmarks/graph_pipeline.py --rounds 15
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from command_line import autopipe, parse_arguments
from onnx import helper, numpy_helper
from side_by_side import Contestant, compare

Scopes = tuple[str, ...]
NAMES = "graph", "sequential"


@dataclass(frozen=True, slots=True)
class Case:
    """A model in so many ranks' stages; the last stage also has what joins the branches."""

    model: str
    settings: str
    micro_batch_size: int
    stages: tuple[Scopes, ...]
    """How the names of each stage's nodes begin, in the order of the chain."""


def whole(scope: str, *groups: Sequence[int]) -> tuple[Scopes, ...]:
    """Stages of whole branches."""
    return tuple(tuple(f"/{scope}.{branch}/" for branch in group) for group in groups)


def cut(branches: int, *groups: Sequence[str]) -> tuple[Scopes, ...]:
    """Branches cut into as many stages as there are groups of parts."""
    return tuple(
        tuple(f"/branches.{branch}/{part}" for part in group)
        for branch in range(branches)
        for group in groups
    )


_SLOWLY = "--set", "optimizer.lr=0.000001"
"""Random weights and data diverge in as many steps as a measurement takes."""
_ATTENTION = "sequence=64 hidden=128 heads=4 feed_forward=512"
_MODALITIES = f"{_ATTENTION} embedding=128 branches=4 layers=2"
_LINEAR = "features=512 hidden=512 top_layers=2"
_TABLES = "sparse_branches=4 rows=10000 width=16 bag=8"
_PAIRS = (0, 1), (2, 3), (4, 5)
_SINGLE = tuple((branch,) for branch in range(7))
_JOIN = "/Concat", "/tables."

CASES = {
    4: (
        Case(
            "two-branch",
            f"{_ATTENTION} repeats=4",
            4,
            cut(2, ("blocks.0", "blocks.1"), ("blocks.2", "blocks.3")),
        ),
        Case("mmt", _MODALITIES, 4, whole("branches", (0,), (1,), (2,), (3,))),
        Case(
            "dlrm",
            f"{_LINEAR} {_TABLES} dense_branches=6 dense_layers=4",
            64,
            (*whole("dense", *_PAIRS), _JOIN),
        ),
        Case(
            "candle-uno",
            f"{_LINEAR} branches=6 layers=4",
            64,
            (*whole("branches", *_PAIRS), _JOIN[:1]),
        ),
    ),
    8: (
        Case(
            "two-branch",
            f"{_ATTENTION} repeats=4",
            8,
            cut(2, *((f"blocks.{block}",) for block in range(4))),
        ),
        Case("mmt", _MODALITIES, 8, cut(4, ("projection", "layers.0"), ("layers.1", "norm"))),
        Case(
            "dlrm",
            f"{_LINEAR} {_TABLES} dense_branches=7 dense_layers=8",
            64,
            (*whole("dense", *_SINGLE), _JOIN),
        ),
        Case(
            "candle-uno",
            f"{_LINEAR} branches=7 layers=8",
            64,
            (*whole("branches", *_SINGLE), _JOIN[:1]),
        ),
    ),
}
"""By number of ranks. Stages take some ten milliseconds of a core for a micro-batch and are about
as long as one another; neighbours in the chain that have no data to pass on are what the two
pipelines differ in.
"""


def build(case: Case, folder: Path, name: str, micro_batches: int) -> tuple[Path, float]:
    """The program of a pipeline by its name, and the seconds that its step is predicted to take."""
    model = folder / f"{name}.onnx"
    configuration = folder / "stages.yaml"
    settings = [
        word
        for setting in (*case.settings.split(), "loss=true", "weights=none")
        for word in ("--set", setting)
    ]
    autopipe("zoo", "build", case.model, "-o", model, *settings)
    configuration.write_text(
        _constraints(case, _tie(model, case, name == "sequential")), encoding="utf-8"
    )
    batch = [
        "--micro-batches",
        micro_batches,
        "--batch-size",
        micro_batches * case.micro_batch_size,
    ]
    decisions = [
        "--config",
        configuration,
        "--strategy",
        "manual",
        "--schedule",
        "kfkb",
        *batch,
        *_SLOWLY,
    ]
    autopipe(
        "plan",
        model,
        "--gpus",
        len(case.stages),
        "--cluster",
        "cpu-local",
        *decisions,
        "-o",
        folder / name,
    )
    autopipe("codegen", folder / name)
    summary = json.loads((folder / name / "plan.json").read_text(encoding="utf-8"))["summary"]
    return folder / name / "program", summary["step_time_s"]


def _constraints(case: Case, tied: Sequence[int]) -> str:
    """The stages in the words of a configuration; what no rule is for comes last."""
    scopes = [(scope, stage) for stage, own in enumerate(case.stages) for scope in own]
    scopes += [(f"/tie.{stage}/", stage) for stage in tied]
    return json.dumps(
        {"constraints": [{"match": f"{scope}*", "stage": stage} for scope, stage in scopes]}
    )


def _tie(path: Path, case: Case, sequential: bool) -> list[int]:
    """Add zeros to the first values of stages that the stage before in the chain has no data for.

    Returns the stages of the nodes that make the zeros and add them.
    """
    proto = onnx.load(path)
    nodes = [
        [node for node in proto.graph.node if node.name.startswith(scopes)]
        for scopes in case.stages
    ]
    stages = []
    for stage, (before, own) in enumerate(itertools.pairwise(nodes), 1):
        given = {name for node in before for name in node.output}
        if any(name in given for node in own for name in node.input):
            continue
        first = next(node for node in own if node.op_type in ("MatMul", "Gemm"))
        name = first.output[0]
        alone = f"{first.output[0]}.alone"
        first.output[0] = alone
        source, maker = (before[-1].output[0], stage - 1) if sequential else (alone, stage)
        rank = 2 if first.op_type == "Gemm" else 3
        place = list(proto.graph.node).index(first) + 1
        for index, node in enumerate(_zero(proto.graph, f"/tie.{maker}/{stage}", source, rank)):
            proto.graph.node.insert(place + index, node)
        zero = f"/tie.{maker}/{stage}/zero"
        proto.graph.node.insert(
            place + 2, helper.make_node("Add", [alone, zero], [name], f"/tie.{stage}/Add")
        )
        stages += [maker, stage]
    onnx.save(proto, path)
    return sorted(set(stages))


def _zero(
    graph: onnx.GraphProto, name: str, source: str, rank: int
) -> tuple[onnx.NodeProto, onnx.NodeProto]:
    """The nodes that make a zero a sample from one number of a value."""
    axes = np.arange(1, rank)
    for what, array in (
        ("from", axes * 0),
        ("to", axes * 0 + 1),
        ("axes", axes),
        ("factor", np.float32(0)),
    ):
        graph.initializer.append(numpy_helper.from_array(np.asarray(array), f"{name}/{what}"))
    parts = [source, f"{name}/from", f"{name}/to", f"{name}/axes"]
    return (
        helper.make_node("Slice", parts, [f"{name}/one"], f"{name}/Slice"),
        helper.make_node("Mul", [f"{name}/one", f"{name}/factor"], [f"{name}/zero"], f"{name}/Mul"),
    )


def main() -> None:
    """Build the programs, run both of each model in turns, print a row a model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--ranks", type=int, nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--models", nargs="+", default=["two-branch", "mmt", "dlrm", "candle-uno"])
    arguments = parse_arguments(parser, rounds=1, micro_batches=2, ranks=[4], models=["candle-uno"])
    print(
        f"{os.cpu_count()} cores, {arguments.micro_batches} micro-batches, {arguments.rounds} "
        "rounds"
    )
    print("model       ranks      graph  sequential  measured  predicted")
    for ranks in arguments.ranks:
        for case in CASES[ranks]:
            if case.model not in arguments.models:
                continue
            with tempfile.TemporaryDirectory() as scratch:
                built = {
                    name: build(case, Path(scratch), name, arguments.micro_batches)
                    for name in NAMES
                }
                contestants = [Contestant(name, program) for name, (program, _) in built.items()]
                seconds = compare(contestants, ranks, arguments.rounds)
            graph, sequential = (seconds[name] for name in NAMES)
            predicted = built["sequential"][1] / built["graph"][1]
            row = f"{case.model:11} {ranks:5} {graph * 1e3:7.1f} ms {sequential * 1e3:8.1f} ms"
            print(f"{row} {sequential / graph:9.3f} {predicted:10.3f}", flush=True)


if __name__ == "__main__":
    main()
