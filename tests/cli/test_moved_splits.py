"""An edited placement.yaml of a plan that splits operators: splits follow their nodes, and layers
have names.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import yaml

from autopipe.api.plan_folder import open_plan, placement_text
from autopipe.api.request import chosen_strategy
from autopipe.configs.zoo import build, configure
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.frontend import read_model
from autopipe.passes.frontend.load import load
from autopipe.passes.frontend.scopes import layers_of
from tests.cli.command_line import CommandLine
from tests.configs.texts import parse_configuration
from tests.passes.cost.graphs import cluster, perceptron, problem

GPT = {
    "layers": "4",
    "hidden": "32",
    "heads": "2",
    "sequence": "16",
    "vocabulary": "64",
    "loss": "true",
}
COLUMNS = (Split("n", 2),)
ROWS = (Split("k", 2),)


def stages_of(text: str, of: Problem) -> tuple[Stage, ...]:
    strategy = chosen_strategy(parse_configuration(text, "placement.yaml"))
    assert strategy is not None
    return strategy.run(of).stages


def placed(
    second: tuple[int, ...], splits: tuple[tuple[int, tuple[Split, ...]], ...] = ()
) -> tuple[Problem, str]:
    """Four layers of a product and a Relu on two stages, the products of the first split over two
    devices.
    """
    graph = perceptron([16] * 5)
    first = Stage((0, 1, 2, 3), (0, 1), 8, ((0, COLUMNS), (2, ROWS)))
    placement = Placement((first, Stage((4, 5, 6, 7), second, 8, splits)))
    return problem(graph, cluster(4)), nodes_text(graph, placement)


def nodes_text(graph: Graph, placement: Placement) -> str:
    """The text of a placement of four layers, with nodes in place of layers."""
    text = placement_text(graph, placement)
    for layers, nodes in (("[0, 1]", "[matmul0, relu3]"), ("[2, 3]", "[matmul4, relu7]")):
        assert f"    layers: {layers}\n" in text
        text = text.replace(f"    layers: {layers}\n", f"    nodes:\n    - {nodes}\n")
    return text


def moved(text: str) -> str:
    """The text with the last two nodes of the first stage at the front of the second one."""
    assert "- [matmul0, relu3]\n" in text and "- [matmul4, relu7]\n" in text
    return text.replace("[matmul0, relu3]", "[matmul0, relu1]").replace(
        "[matmul4, relu7]", "[matmul2, relu7]"
    )


def test_splits_follow_to_as_many_devices() -> None:
    of, text = placed((2, 3))
    first, second = stages_of(moved(text), of)
    assert (first.nodes, second.nodes) == ((0, 1), (2, 3, 4, 5, 6, 7))
    assert first.splits == ((0, COLUMNS),)
    assert second.splits == ((2, ROWS),)


def test_an_entry_of_the_new_stage_counts_first() -> None:
    of, text = placed((2, 3), ((4, COLUMNS), (6, ROWS)))
    again = moved(text).replace("      - matmul4\n", "      - matmul4\n      - matmul2\n")
    assert stages_of(again, of)[1].splits == ((2, COLUMNS), (4, COLUMNS), (6, ROWS))


def test_one_device_computes_a_moved_node_whole() -> None:
    of, text = placed((2,))
    assert stages_of(moved(text), of)[1].splits == ()


def test_devices_that_cannot_be_divided_so_share_samples() -> None:
    graph = perceptron([16] * 5, batch=6)
    first = Stage((0, 1, 2, 3), (0, 1), 6, ((0, COLUMNS), (2, ROWS)))
    text = nodes_text(graph, Placement((first, Stage((4, 5, 6, 7), (2, 3, 4), 6))))
    second = stages_of(moved(text), problem(graph, cluster(5)))[1]
    assert second.splits == ((2, (Split("m", 3),)),)


def test_what_a_stage_says_of_all_nodes_counts_where_the_split_does_not_fit() -> None:
    graph = perceptron([16] * 5, batch=6)
    every = tuple((node, (Split("m" if node % 2 == 0 else "x0", 3),)) for node in (4, 5, 6, 7))
    first = Stage((0, 1, 2, 3), (0, 1), 6, ((0, COLUMNS), (2, ROWS)))
    text = nodes_text(graph, Placement((first, Stage((4, 5, 6, 7), (2, 3, 4), 6, every))))
    assert "'*'" in text
    second = stages_of(moved(text), problem(graph, cluster(5)))[1]
    assert [len(splits) for _, splits in second.splits] == [1] * 6
    assert {split.degree for _, splits in second.splits for split in splits} == {3}


@pytest.mark.parametrize("degrees", [(2, 1, 2), (2, 2, 1)])
def test_a_layer_of_a_split_plan_moves_by_its_number(
    command_line: CommandLine, degrees: tuple[int, int, int]
) -> None:
    build(configure("gpt", GPT)).save(command_line.folder / "gpt.onnx")
    options = zip(("pipeline", "data", "tensor"), degrees, strict=True)
    words = [f"--set=strategy.{name}={value}" for name, value in options]
    command_line.done("plan", "gpt.onnx", "--gpus", 4, "--cluster", "a100-80gb", "--batch-size", 16, "--micro-batches",
                      4, "--strategy", "grid", "--schedule", "1f1b", *words, "-o", "p", "-q")  # fmt: skip
    before = open_plan(Path("p"))
    path = Path("p/placement.yaml")
    text = path.read_text()
    # A layer of the first stage goes to the second one.
    assert "    layers: [0, 1]\n" in text and "    layers: [2, 3]\n" in text
    path.write_text(text.replace("layers: [0, 1]", "layers: [0, 0]").replace("[2, 3]", "[1, 3]"))
    command_line.done("plan", "--from", "p", "-q", "-o", "q")
    after = open_plan(Path("q"))
    own = before.plan.placement.stage_of()
    changed = [
        node for node, stage in after.plan.placement.stage_of().items() if stage != own[node]
    ]
    assert changed
    for node, stage in after.plan.placement.stage_of().items():
        kept = before.plan.placement.stages[own[node]].splits_of(node)
        assert after.plan.placement.stages[stage].splits_of(node) == kept
    command_line.done("codegen", "q", "-q")


@pytest.fixture
def split_plan(command_line: CommandLine) -> Path:
    """The placement of a plan whose stages split their nodes."""
    build(configure("gpt", GPT | {"layers": "2"})).save(command_line.folder / "gpt.onnx")
    degrees = ("--set=strategy.pipeline=2", "--set=strategy.data=1", "--set=strategy.tensor=2")
    batch = ("--batch-size", 8, "--micro-batches", 4, "--schedule", "1f1b")
    command_line.done("plan", "gpt.onnx", "--gpus", 4, "--cluster", "a100-80gb", "--strategy", "grid", *degrees,
                      *batch, "-o", "p", "-q")  # fmt: skip
    return Path("p/placement.yaml")


def test_a_file_that_was_cut_short_at_a_line_is_no_other_placement(
    command_line: CommandLine, split_plan: Path
) -> None:
    """Without its last entries of `splits` it would be one with fewer splits."""
    lines = split_plan.read_text().splitlines(keepends=True)
    assert lines[-1] == "  name: explicit\n"
    begin = next(number for number, line in enumerate(lines) if line == "    splits:\n")
    for end in (0, *range(begin, len(lines))):
        split_plan.write_text("".join(lines[:end]))
        shown = command_line.run("plan", "--from", "p", "-q", "-o", "q")
        message = (
            f"{split_plan} is truncated: `strategy.name`, the last key that `plan` writes, is "
            "missing"
        )
        ending = f"{split_plan} is truncated: it does not end with a line break"
        assert shown.code == 2
        assert (message if end else ending) in shown.err
        assert not Path("q").exists()


def test_the_name_may_stand_anywhere(command_line: CommandLine, split_plan: Path) -> None:
    """A person, or a program that sorts keys, may write the file in another order and style."""
    stages = open_plan(Path("p")).plan.placement.stages
    text = split_plan.read_text()
    first = text.replace("  name: explicit\n", "").replace(
        "strategy:\n", "strategy:\n  name: explicit\n"
    )
    document = yaml.safe_load(text)
    for form in (
        first,
        yaml.safe_dump(document),
        yaml.safe_dump(document, default_flow_style=True),
        text + "# mine\n",
    ):
        split_plan.write_text(form)
        command_line.done("plan", "--from", "p", "-q", "-o", "q", "--force")
        assert open_plan(Path("q")).plan.placement.stages == stages


def test_layers_of_an_export_are_named(tmp_path: Path) -> None:
    build(configure("gpt", GPT | {"layers": "2"})).save(tmp_path / "gpt.onnx")
    model = onnx.load(tmp_path / "gpt.onnx")
    for node in model.graph.node:
        found = re.match(r"/layers\.(\d)/", node.name)
        scopes = ["", "model", *([f"model.h.{found[1]}"] if found else []), node.name]
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=repr(scopes))
        node.name = node.name.replace("/", "_")
    damaged = model.graph.node[0].metadata_props[0]
    damaged.value = "['', 1, __import__('os')]"
    onnx.save(model, tmp_path / "named.onnx")
    source = load(tmp_path / "named.onnx")
    graph = read_model(source, batch=2).graph
    layers = layers_of(source, graph)
    assert set(layers) == {"", "model.h.0", "model.h.1"}
    half = layers.index("model.h.1")
    placement = Placement(
        (
            Stage(tuple(range(half + 3)), (0,), 2),
            Stage(tuple(range(half + 3, len(layers))), (1,), 2),
        )
    )
    text = placement_text(graph, placement, layers)
    assert "    layers: [0, 0]\n" in text
    assert text.count("# model.h.1\n") == 2 and "# model.h.0\n" not in text
    given = replace(problem(perceptron([8, 8]), cluster(2)), graph=graph, batch_size=8)
    assert stages_of(text, given) == placement.stages
