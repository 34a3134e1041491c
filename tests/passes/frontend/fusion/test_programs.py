"""Programs of fused and unfused graphs agree in results and gradients, for patterns from real
files.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch

from autopipe.backends.torch.codegen.stage import emit_forward
from autopipe.passes.frontend import Model, read_model
from autopipe.passes.frontend.fusion import rules
from tests.conformance.adapter import forward_of, stage_of, to_tensor
from tests.passes.frontend.building import floats, integers, model, node, saved
from tests.passes.frontend.reference import assert_close, parameter_array, random_feeds, run

HEADS: dict[str, object] = {"q": [2, 4, 5, 8], "k": [2, 4, 5, 8], "v": [2, 4, 5, 8]}
NUMBERS = {
    "root": np.float32(8**0.5), "low": np.float32(np.finfo(np.float32).min), "half": np.float32(0.5),
    "one": np.float32(1), "two": np.float32(2), "tiny": np.float32(1e-6), "last": integers(-1), "w": floats(8),
}  # fmt: skip
SCORES = [
    node("Transpose", "k", "kt", perm=[0, 1, 3, 2]),
    node("MatMul", "q kt", "qk"),
    node("Div", "qk root", "s"),
]
ENDED = [node("Softmax", "masked", "p", axis=-1), node("MatMul", "p v", "y")]
SUNK = [
    node("Concat", "b column", "all", axis=-1), node("ReduceMax", "all last", "most"),
    node("Sub", "all most", "masked"), node("Softmax", "masked", "p6", axis=-1),
    node("Slice", "p6 zero last last", "p"), node("MatMul", "p v", "y"),
]  # fmt: skip
SINKS = {"heads": integers(1, 4, 1, 1), "rows": integers(2, 4, 5, 1), "zero": integers(0)}
PAIRS = [
    node("Split", "q", "a b", axis=-1, num_outputs=2), node("Mul", "a cos", "ac"), node("Mul", "b sin", "bs"),
    node("Sub", "ac bs", "m"), node("Mul", "b cos", "bc"), node("Mul", "a sin", "as"), node("Add", "as bc", "n"),
]  # fmt: skip
NEIGHBOURS = [
    node("Slice", "q zero eight last step", "a"),
    node("Slice", "q single eight last step", "b"),
]
PLACES = {
    "zero": integers(0), "single": integers(1), "eight": integers(8), "last": integers(-1), "step": integers(2),
    "shape": integers(2, 4, 5, 8),
}  # fmt: skip
ANGLES: dict[str, object] = {"q": HEADS["q"], "cos": [1, 5, 4], "sin": [1, 5, 4]}

CASES: dict[str, tuple[list[onnx.NodeProto], dict[str, object], dict[str, np.ndarray], list[str]]] = {
    "attention with biases": (
        [*SCORES, node("Add", "s bias", "masked"), *ENDED], HEADS | {"bias": [2, 4, 5, 5]}, {}, ["Attention"]
    ),
    "attention whose probabilities are cast there and back": (
        [
            *SCORES, node("Add", "s bias", "masked"), node("Softmax", "masked", "p", axis=-1),
            node("Cast", "p", "wide", to=11), node("Cast", "wide", "narrow", to=1), node("MatMul", "narrow v", "y"),
        ],
        HEADS | {"bias": [2, 4, 5, 5]}, {}, ["Attention"],
    ),
    "causal attention": (
        [*SCORES, node("Where", "causal s low", "masked"), *ENDED], HEADS,
        {"causal": np.tri(5, dtype=bool).reshape(1, 1, 5, 5)}, ["Attention"],
    ),
    "scores with a cap and biases": (
        [
            *SCORES, node("Div", "s two", "t"), node("Tanh", "t", "u"), node("Mul", "u two", "capped"),
            node("Add", "capped bias", "masked"), *ENDED,
        ],
        HEADS | {"bias": [2, 1, 5, 5]}, {}, ["Attention"],
    ),
    "a causal window": (
        [*SCORES, node("Where", "outside low s", "masked"), *ENDED], HEADS,
        {"outside": ~(np.tri(5, dtype=bool) & ~np.tri(5, k=-3, dtype=bool))}, ["Attention"],
    ),
    "one head of keys, and a mask that chooses": (
        [
            node("Cast", "shown", "mask", to=9), *SCORES, node("Where", "mask s low", "masked"), *ENDED
        ],
        HEADS | {"k": [2, 1, 5, 8], "v": [2, 1, 5, 8], "shown": (onnx.TensorProto.INT64, [2, 1, 1, 5])}, {},
        ["Cast", "Where", "Attention"],
    ),
    "samples and heads in one dimension": (
        [
            node("Reshape", "q three", "q3"), node("Transpose", "k", "kt", perm=[0, 1, 3, 2]),
            node("Reshape", "kt turned", "kt3"), node("Reshape", "v three", "v3"), node("MatMul", "q3 kt3", "s3"),
            node("Add", "s3 alibi", "b3"), node("Mul", "b3 half", "sum3"), node("Reshape", "sum3 four", "s"),
            node("Add", "s bias", "masked"), node("Softmax", "masked", "p4", axis=-1),
            node("Reshape", "p4 square", "p"), node("MatMul", "p v3", "y"),
        ],
        HEADS | {"alibi": [8, 1, 5], "bias": [2, 1, 5, 5]},
        {
            "three": integers(8, 5, 8), "turned": integers(8, 8, 5), "four": integers(2, 4, 5, 5),
            "square": integers(8, 5, 5),
        },
        ["Mul", "Reshape", "Add", "Attention", "Reshape"],
    ),
    "a score of each head without a value": (
        [
            *SCORES, node("Add", "s bias", "b"), node("Reshape", "sinks heads", "s4"),
            node("Expand", "s4 rows", "column"), *SUNK,
        ],
        HEADS | {"bias": [2, 1, 5, 5], "sinks": [4]}, SINKS, ["Attention"],
    ),
    "a score of each query without a value": (
        [
            *SCORES, node("Add", "s bias", "b"), node("Expand", "queries rows", "column"), *SUNK,
        ],
        HEADS | {"bias": [2, 1, 5, 5], "queries": [1, 4, 5, 1]}, SINKS,
        [
            "Transpose", "MatMul", "Div", "Add", "Expand", "Concat", "ReduceMax", "Sub", "Softmax", "Slice", "MatMul"
        ],
    ),
    "probabilities of which none is dropped": (
        [
            *SCORES, node("Softmax", "s", "p", axis=-1), node("Dropout", "p none true", "kept"),
            node("MatMul", "kept v", "y"),
        ],
        HEADS, {"none": np.float32(0), "true": np.array(True)}, ["Attention"],
    ),
    "windows of more than four dimensions": (
        [
            node("Transpose", "k", "kt", perm=[0, 1, 2, 4, 3]), node("MatMul", "q kt", "s"),
            node("Add", "s bias", "masked"), *ENDED,
        ],
        {name: [2, 3, 4, 5, 8] for name in "qkv"} | {"bias": [3, 1, 5, 5]}, {},
        ["Reshape", "Reshape", "Reshape", "Expand", "Reshape", "Attention", "Reshape"],
    ),
    "values times transposed probabilities": (
        [
            node("Transpose", "x", "xt", perm=[0, 2, 1]), node("MatMul", "xt x", "qk"),
            node("Softmax", "qk", "p", axis=-1), node("Transpose", "p", "pt", perm=[0, 2, 1]),
            node("MatMul", "x pt", "y"),
        ],
        {"x": [2, 8, 5]}, {}, ["Transpose", "Reshape", "Attention", "Transpose", "Reshape"],
    ),
    "halves of a head turned": (
        [
            node("Split", "q", "a b", axis=-1, num_outputs=2), node("Neg", "b", "n"),
            node("Concat", "n a", "t", axis=3), node("Mul", "t sin", "u"), node("Mul", "cos q", "c"),
            node("Add", "c u", "y"),
        ],
        {"q": HEADS["q"], "cos": [1, 5, 8], "sin": [2, 1, 5, 8]}, {}, ["Rotary"],
    ),
    "neighbours of a part of a head turned": (
        [
            node("Slice", "q zero four last", "x"), node("Slice", "q four eight last", "rest"),
            node("Slice", "x zero four last step", "a"), node("Slice", "x single four last step", "b"),
            node("Neg", "b", "n"), node("Unsqueeze", "n last", "n5"), node("Unsqueeze", "a last", "a5"),
            node("Concat", "n5 a5", "t5", axis=-1), node("Reshape", "t5 shape", "t"), node("Mul", "x cos", "c"),
            node("Mul", "t sin", "u"), node("Add", "c u", "turned"), node("Concat", "turned rest", "y", axis=-1),
        ],
        {"q": HEADS["q"], "cos": [1, 1, 5, 4], "sin": [1, 1, 5, 4]},
        PLACES | {"four": integers(4), "shape": integers(2, 4, 5, 4)}, ["Rotary"],
    ),
    "both results of a pair": ([*PAIRS, node("Concat", "m n", "y", axis=-1)], ANGLES, {}, ["Rotary"]),
    "both results of neighbours, put apart": (
        [*NEIGHBOURS, *PAIRS[1:], node("Concat", "m n", "y", axis=-1)], ANGLES, PLACES, ["Rotary"]
    ),
    "both results of neighbours, side by side": (
        [
            *NEIGHBOURS, *PAIRS[1:], node("Unsqueeze", "m last", "m5"), node("Unsqueeze", "n last", "n5"),
            node("Concat", "m5 n5", "t5", axis=-1), node("Reshape", "t5 shape", "y"),
        ],
        ANGLES, PLACES, ["Rotary"],
    ),
    "a pair of other places": (
        [node("Split", "q", "b a", axis=-1, num_outputs=2), *PAIRS[1:], node("Concat", "m n", "y", axis=-1)],
        ANGLES, {}, ["Split", "Mul", "Mul", "Sub", "Mul", "Mul", "Add", "Concat"],
    ),
    "RMSNormalization": (
        [
            node("Pow", "x two", "squares"), node("ReduceMean", "squares last", "m"), node("Add", "m tiny", "e"),
            node("Sqrt", "e", "d"), node("Div", "x d", "n"), node("Mul", "n w", "y"),
        ],
        {"x": [3, 8]}, {}, ["RMSNormalization"],
    ),
    "Gelu": (
        [
            node("Div", "x square_root", "a"), node("Erf", "a", "b"), node("Add", "b one", "c"),
            node("Mul", "x c", "d"), node("Mul", "d half", "y"),
        ],
        {"x": [3, 8]}, {"square_root": np.float32(2**0.5)}, ["Gelu"],
    ),
    "Gelu by tanh as a gate": (
        [node("Gelu", "x", "a", approximate="tanh"), node("Mul", "up a", "y")],
        {"x": [3, 8], "up": [3, 8]}, {}, ["GatedUnit"],
    ),
    "Gelu as a gate": (
        [node("Gelu", "x", "a"), node("Mul", "a up", "y")], {"x": [3, 8], "up": [3, 8]}, {}, ["GatedUnit"]
    ),
    "squared Relu as a gate": (
        [node("Relu", "x", "r"), node("Pow", "r two", "a"), node("Mul", "a up", "y")],
        {"x": [3, 8], "up": [3, 8]}, {}, ["GatedUnit"],
    ),
    "Swish with a number": (
        [node("Mul", "x two", "a"), node("Sigmoid", "a", "s"), node("Mul", "x s", "y")], {"x": [3, 8]}, {}, ["Swish"]
    ),
    "halves of one product": (
        [
            node("Split", "x", "g up", axis=-1, num_outputs=2), node("Sigmoid", "g", "s"), node("Mul", "g s", "a"),
            node("Mul", "up a", "y"),
        ],
        {"x": [3, 8]}, {}, ["Split", "SwiGLU"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_fused_and_unfused_programs_agree(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, inputs, held, expected = CASES[case]
    read = {name for each in nodes for name in each.input}
    known = {name: array for name, array in (NUMBERS | held).items() if name in read}
    path = saved(model(nodes, inputs, "y", known), tmp_path)
    fused = read_model(path)
    assert [each.op for each in fused.graph.nodes] == expected
    assert list(fused.fused) == [operator for operator in expected if operator in rules.FUSED]
    monkeypatch.setattr(rules, "RULES", {})
    plain = read_model(path)
    assert len(plain.graph.nodes) > 1
    feeds = random_feeds(fused.graph, top=2)
    found = trained(fused, feeds)
    assert_close(found, trained(plain, feeds))
    assert_close({"y": found["y"]}, run(path, feeds))


def trained(read: Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the results of a graph on one device, and the gradients of floating-point inputs and
    of trained parameters.
    """
    graph = read.graph
    weights = {
        each.value.name: to_tensor(parameter_array(each, read.path)) for each in graph.parameters
    }
    given = {name: to_tensor(feeds[name]) for name in (value.name for value in graph.inputs)}
    leaves = {
        name: each.requires_grad_()
        for name, each in (weights | given).items()
        if each.is_floating_point()
    }
    held = SimpleNamespace(
        device=torch.device("cpu"),
        **{f"c{index}": to_tensor(each.array) for index, each in enumerate(graph.constants)},
        **{f"w{index}": weights[each.value.name] for index, each in enumerate(graph.parameters)},
    )
    (result,) = forward_of(emit_forward(stage_of(graph)).text)(held, *given.values())
    weighted = (result * torch.linspace(-1, 1, result.numel()).reshape(result.shape)).sum()
    gradients = torch.autograd.grad(weighted, list(leaves.values()))
    return {
        "y": result.detach().numpy(),
        **{name: each.numpy() for name, each in zip(leaves, gradients, strict=True)},
    }
