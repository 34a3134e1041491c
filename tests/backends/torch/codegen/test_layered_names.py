"""Names of models in the layered form of a stage: 10,000 hostile names add no code and crash
nothing, and equal models give equal files.
"""

from __future__ import annotations

import ast
import itertools
import keyword
import random
from collections.abc import Callable, Iterator

import pytest

from autopipe.backends.torch.codegen.identifiers import RUNTIME_ATTRIBUTES
from autopipe.backends.torch.codegen.stage import emit_forward
from autopipe.backends.torch.codegen.stage_file import emit_stage
from autopipe.passes.lower.lower import one_device_program
from tests.backends.torch.codegen.symbolic import assert_same_results
from tests.distributed.support.builder import mlp

PIECES = (
    *keyword.kwlist, *sorted(RUNTIME_ATTRIBUTES), "p", "torch", "F", "operators", "forward", "layers",
    "layer", "0", "1", "2", "weight", "bias", "eval", "__import__", "_", "__class__", "x0", "p.w0", "p.c0",
    "loop_0", "segment_0", '"""', "'", "\\", "\n", "\r", "\t", "\0", "{}", "%s", "#", ";", "()", "[0]",
    "os.system('touch x')", "\u2028", "\u202e", "\u00e9", "\u0131", "\uff41", "\u540d", "\U0001f600", "\ud800",
    "onnx::", "node_", "val_", "/", ".", ":", "-", " ", "n" * 300, "0x0123456789abcdef",
)  # fmt: skip
"""Pieces of which hostile names consist: words of Python and of generated code, and characters that
end strings or look like others.
"""
NAMES = 10_000
NAMES_PER_MODEL = 40
ALLOWED_CALLS = ("torch.", "F.", "operators.", "p.")


def hostile_names(seed: int) -> Iterator[str]:
    """Yield different hostile names."""
    draw = random.Random(seed)
    for number in itertools.count():
        yield "".join(draw.choices(PIECES, k=draw.randint(1, 6))) + "\x1b" * (number % 7)


def renaming(seed: int) -> Callable[[str], str]:
    """Return a function that replaces each name by a hostile one."""
    names = hostile_names(seed)
    known: dict[str, str] = {}

    def rename(name: str) -> str:
        if name not in known:
            known[name] = next(each for each in names if each not in known.values())
        return known[name]

    return rename


def assert_only_calls_of_libraries(text: str) -> None:
    """A file imports torch and the runtime only, and calls only their functions."""
    tree = ast.parse(text)
    functions = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [each.name for each in node.names]
            assert set(names) <= {"torch", "torch.nn.functional", "operators", "recompute"}
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            # A method of a tensor, such as `x.reshape`, is called on a variable.
            is_method = isinstance(node.func, ast.Attribute)
            assert called in functions or called.startswith(ALLOWED_CALLS) or is_method
        elif isinstance(node, ast.Name | ast.arg | ast.FunctionDef | ast.Attribute):
            name = getattr(node, "id", None) or getattr(node, "arg", None)
            name = name or getattr(node, "attr", None) or getattr(node, "name", "")
            assert name.isascii() and name.isidentifier() and not keyword.iskeyword(name)
            assert not name.startswith("__")


@pytest.mark.parametrize("part", range(10))
def test_hostile_names(part: int) -> None:
    for seed in range(part, NAMES // NAMES_PER_MODEL, 10):
        graph, loss = mlp(9, rename=renaming(seed))
        assert len(graph.parameters) + 2 * len(graph.nodes) >= NAMES_PER_MODEL
        (stage,) = one_device_program(graph, 2, 4, loss).stages
        found = emit_stage(stage, "A stage.", "layers")
        assert_only_calls_of_libraries(found.text)
        assert emit_stage(stage, "A stage.", "layers") == found
        if seed % 50 == 0:
            assert_same_results(emit_forward(stage), emit_forward(stage, "layers"))
