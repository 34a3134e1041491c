"""Names come from models: whatever they hold, they stay text in the generated files."""

from __future__ import annotations

import ast
import io
import keyword
import re
import tokenize
from collections.abc import Callable
from pathlib import Path

import pytest

from autopipe.ir.placement import Placement, Split, Stage
from tests.distributed.support.builder import Builder, mlp
from tests.distributed.support.pool import Pools
from tests.distributed.support.running import (
    assert_equal_steps,
    batch_of,
    expected_step,
    one_device,
    run_forward,
    run_step,
    schedule_of,
    write,
)

pytestmark = pytest.mark.distributed

TEMPLATES = {
    "quotes": "'\"%s'\"",
    "docstring": '"""%s"""',
    "newlines": "a\n%s\r\n\timport os\n",
    "backslashes": "\\%s\\",
    "separators": "a\u2028%s\u2029\x85b",
    "code": '"); import os; os.system("touch {marker}") #%s',
    "call": "__import__('os').system('touch {marker}')#%s",
    "string": "' + __import__('os').system('touch {marker}') + '%s",
    "keywords": "class %s lambda",
    "controls": "\x01\x07\x1b[31m%s\x7f\x0c",
    "directions": "\u202e%s\u2066",
    "letters": "é%s名\U0001f600",
    "surrogates": "\udc80%s\ud800",
    "long": "n" * 5000 + "%s",
    "format": "{%s}{0}%%s%%(x)s",
    "paths": "../../%s/../../etc",
    "ends": "%s\0partial",
}
"""Ways to spell the name of a value; `%s` is its plain one."""

KNOWN = {
    *keyword.kwlist, "torch", "F", "nn", "functional", "autopipe", "backends", "runtime", "operators",
    "INPUTS", "OUTPUTS", "PARAMETERS", "CONSTANTS", "forward", "p", "_", "tanh", "matmul", "mean", "dim", "group",
    "all_reduce", "all_gather", "reduce_scatter", "slice", "average", "float64", "rank", "Rank", "__file__",
    "__name__", "main", "step", "stage", "Data", "Recv", "Send", "Loss", "Recompute", "channel", "gradient", "offsets",
    "weight", "range", "i", "recv", "send", "recv_gradient", "backward", "send_gradient", "addmm", "sum",
}  # fmt: skip
MADE = re.compile(r"x\d+|s\d+|stage_\d+|w\d+|c\d+")


def assert_only_our_names(text: str) -> None:
    """Every identifier of a file is one of ours; what a model says stands in strings and
    comments.
    """
    ast.parse(text)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            assert token.string in KNOWN or MADE.fullmatch(token.string), token
    assert text.isprintable() or all(letter.isprintable() or letter == "\n" for letter in text)


def renaming(kind: str, marker: Path) -> Callable[[str], str]:
    """How the names of a graph are spelled; inputs keep theirs where an .npz file cannot hold the
    other.
    """
    template = TEMPLATES[kind].replace("{marker}", str(marker))
    plain = kind in ("surrogates", "ends")
    return lambda name: name if plain and name.startswith("in") else template.replace("%s", name)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_training_under_any_names(pools: Pools, tmp_path: Path, kind: str) -> None:
    marker = tmp_path / "touched"
    graph, loss = mlp(2, rename=renaming(kind, marker))
    splits = ((0, (Split("k", 2),)), (1, (Split("x0", 2),)))
    placement = Placement((Stage((0, 1), (0, 1), 4, splits), Stage((2, 3, 4, 5), (2,), 4)))
    flat = tmp_path / "flat"
    write(graph, placement, schedule_of(graph, placement, 2), loss, flat, style="flat")
    for path in [*flat.glob("rank_*.py"), *flat.glob("stage_*.py")]:
        assert_only_our_names(path.read_text(encoding="utf-8"))
    folder = tmp_path / "program"
    write(graph, placement, schedule_of(graph, placement, 2), loss, folder)
    batch = batch_of(graph, 2)
    found = run_step(pools, folder, batch)
    assert_equal_steps(found, expected_step(graph, loss, folder, batch, 2), 1e-9)
    assert not marker.exists()


@pytest.mark.parametrize("kind", TEMPLATES)
def test_outputs_under_any_names(pools: Pools, tmp_path: Path, kind: str) -> None:
    graph, output = mlp(1, rename=renaming(kind, tmp_path / "touched"))
    write(graph, *one_device(graph, 2, False, 4), None, tmp_path / "program")
    found = run_forward(pools, tmp_path / "program", batch_of(graph, 2))
    assert list(found) == [output]
    assert not (tmp_path / "touched").exists()


def test_names_that_look_alike_stay_apart(pools: Pools, tmp_path: Path) -> None:
    """A derived form of one value is not taken for another value of the model that is called so."""
    names = {
        "v0": "a",
        "v1": "a\0partial",
        "v2": "a\0whole",
        "v3": "a\0000",
        "v4": "A",
        "v5": "a b",
        "v6": "a_b",
    }
    builder = Builder(rename=lambda name: names.get(name, name))
    weight = builder.parameter((4, 4))
    value = builder.input((4, 4))
    made = [builder.node("MatMul", value, weight)]
    made += [builder.node("Tanh", made[-1]) for _ in range(6)]
    total = made[0]
    for other in made[1:]:
        total = builder.node("Add", total, other)
    loss = builder.mean_square(total)
    graph = builder.graph(loss)
    splits = [(0, (Split("k", 2),)), (1, (Split("x0", 2),)), (3, (Split("x1", 2),))]
    placement = Placement((Stage(tuple(range(len(graph.nodes))), (0, 1), 4, tuple(splits)),))
    folder = tmp_path / "program"
    write(graph, placement, schedule_of(graph, placement, 2), loss, folder)
    batch = batch_of(graph, 2)
    assert_equal_steps(
        run_step(pools, folder, batch), expected_step(graph, loss, folder, batch, 2), 1e-9
    )
