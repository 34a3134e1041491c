"""The text of a program: golden files, and a size that the number of micro-batches does not
change.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from autopipe.backends.torch.codegen.call import Call
from autopipe.backends.torch.codegen.rank import emit_rank
from autopipe.backends.torch.codegen.stage import defer_weight_gradient
from autopipe.ir.graph import Graph
from autopipe.ir.ops import signature_of
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.program import Program
from autopipe.passes.lower.lower import lower
from tests.distributed.support.builder import mlp
from tests.distributed.support.halves import halved
from tests.distributed.support.portions import forwards_first
from tests.distributed.support.running import schedule_of, stage_graph, write

Golden = Callable[[str, str], None]


def placed() -> tuple[Graph, str, Placement]:
    """Two products on a device each, then a third on two devices, split by its batch."""
    graph, loss = mlp(3)
    batch = tuple(
        (node, (Split(axis, 2),)) for node, axis in ((4, "m"), (5, "x0"), (6, "x0"), (7, "d0"))
    )
    stages = (Stage((0, 1), (0,), 4), Stage((2, 3), (1,), 4), Stage((4, 5, 6, 7), (2, 3), 4, batch))
    return graph, loss, Placement(stages)


def program_of(micro_batches: int, name: str) -> Program:
    graph, loss, placement = placed()
    return lower(graph, placement, schedule_of(graph, placement, micro_batches, name), loss)


def arguments_of(program: Program) -> list[list[str]]:
    """Return names of the arguments of each stage."""
    return [[f"x{index}" for index in range(len(each.inputs))] for each in program.stages]


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_rank_files_have_the_same_size_for_any_number_of_micro_batches(name: str) -> None:
    few = program_of(32, name)
    many = program_of(512, name)
    for short, long in zip(few.ranks, many.ranks, strict=True):
        lines = [
            emit_rank(program, rank, "A rank.", arguments_of(program)).splitlines()
            for program, rank in ((few, short), (many, long))
        ]
        assert len(lines[0]) == len(lines[1])
        assert len(lines[0]) < 40


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_files_of_a_program(
    name: str, tmp_path: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # The manifest has the path from the program to the model.
    graph, loss, placement = placed()
    folder = tmp_path / "program"
    write(graph, placement, schedule_of(graph, placement, 8, name), loss, folder)
    for rank in (0, 1, 2):
        golden(
            (folder / f"rank_{rank:03d}.py").read_text(encoding="utf-8"),
            f"program/{name}/rank_{rank:03d}.txt",
        )
    if name == "1f1b":
        golden((folder / "stage_02.py").read_text(encoding="utf-8"), "program/stage_02.txt")
        golden((folder / "run.py").read_text(encoding="utf-8"), "program/run.txt")
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        golden(json.dumps(manifest, indent=1, sort_keys=True) + "\n", "program/manifest.json")


def test_files_of_micro_batches_of_different_sizes(tmp_path: Path, golden: Golden) -> None:
    """One sample, then two that two devices share, then four: what is sent and received in turn."""
    graph, loss, _ = placed()
    shared = (2, (Split("m", 2),)), (3, (Split("x0", 2),))
    stages = (
        Stage((0, 1), (0,), 1),
        Stage((2, 3), (1, 2), 2, shared),
        Stage((4, 5, 6, 7), (3,), 4),
    )
    placement = Placement(stages)
    folder = tmp_path / "program"
    write(graph, placement, forwards_first(stage_graph(graph, placement), 8), loss, folder)
    for rank in (0, 1, 3):
        golden(
            (folder / f"rank_{rank:03d}.py").read_text(encoding="utf-8"),
            f"program/unequal/rank_{rank:03d}.txt",
        )
    golden((folder / "stage_01.py").read_text(encoding="utf-8"), "program/unequal/stage_01.txt")


def test_files_of_halved_backwards(tmp_path: Path, golden: Golden) -> None:
    """Only the stage whose backwards are split calls its product through `p.weight_grads`."""
    graph, loss, placement = placed()
    whole = frozenset((stage, micro_batch) for stage in (0, 2) for micro_batch in range(8))
    folder = tmp_path / "program"
    write(graph, placement, halved(schedule_of(graph, placement, 8), 2, whole), loss, folder)
    golden((folder / "rank_001.py").read_text(encoding="utf-8"), "program/halved/rank_001.txt")
    golden((folder / "stage_01.py").read_text(encoding="utf-8"), "program/halved/stage_01.txt")
    assert "weight_grads" not in (folder / "stage_00.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("code", "operands", "spelled"),
    [
        (
            "F.linear(x0, p.w1.t(), p.w2)",
            ("x0", "p.w1", "p.w2"),
            "p.weight_grads(F.linear, x0, p.w1.t(), p.w2)",
        ),
        (
            "operators.sharded_gather(p.w0, x1, p.group)",
            ("p.w0", "x1"),
            "p.weight_grads(operators.sharded_gather, p.w0, x1, p.group)",
        ),
        (
            "2.0 * torch.mm(x0, p.w1)",
            ("x0", "p.w1"),
            "p.weight_grads(lambda y0, y1: 2.0 * torch.mm(y0, y1), x0, p.w1)",
        ),
        (
            "torch.matmul(x0, p.w1).mT(0)",
            ("x0", "p.w1"),
            "p.weight_grads(lambda y0, y1: torch.matmul(y0, y1).mT(0), x0, p.w1)",
        ),
        ("p.w1[x0]", ("p.w1", "x0"), "p.weight_grads(lambda y0, y1: y0[y1], p.w1, x0)"),
    ],
)
def test_what_is_deferred_is_spelled_as_the_call_it_was(
    code: str, operands: tuple[str, ...], spelled: str
) -> None:
    graph, _, _ = placed()
    signature = signature_of(graph, graph.nodes[0])
    call = Call.of(signature, operands, ())

    def emitter(call: Call) -> str:
        text = code
        for operand, name in zip(operands, call.codes, strict=True):
            text = text.replace(operand, str(name))
        return text

    assert defer_weight_gradient(emitter, call) == spelled
