"""Fusion of mixtures of experts as exporters write them: results, gradients, splits over devices,
memory.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from autopipe.backends.torch.runtime import operators
from autopipe.passes.analysis.gradients import saved_tensors
from autopipe.passes.analysis.operators import op_instances
from autopipe.passes.frontend import read_model, weights
from autopipe.passes.frontend.fusion import rules
from tests.ir.ops.splitting import Use, check
from tests.passes.frontend.building import floats, integers, model, node, saved
from tests.passes.frontend.fusion.test_programs import trained
from tests.passes.frontend.reference import assert_close, random_feeds, run

BOOL = onnx.TensorProto.BOOL
TOKENS = 6
HIDDEN = 8
INNER = 4
EXPERTS = 4
CHOSEN = 2
INPUTS: dict[str, object] = {"x": [TOKENS, HIDDEN], "scores": [TOKENS, EXPERTS]}
ROUTER = [node("Softmax", "scores", "p", axis=-1), node("TopK", "p two", "shares chosen", axis=-1)]
NUMBERS = {
    "two": integers(CHOSEN), "zero": integers(0), "one": integers(1), "last": integers(-1), "limit": np.float32(0.7),
    "low": np.float32(-0.7), "beta": np.float32(1), "alpha": np.float32(1.702), "none": np.float32(0),
    "rows": integers(-1, HIDDEN), "spread": integers(1, CHOSEN, 1), "flat": integers(-1),
    "slots": integers(TOKENS, CHOSEN, HIDDEN), "ends": integers(2 * INNER), "axis": integers(1),
    "depth": np.int64(EXPERTS + 1),
    "hot": np.array([0, 1]), "zeros": np.zeros((TOKENS, HIDDEN), np.float32), "column": integers(TOKENS, 1),
    "sides": integers(-1, -2), "nought": np.int64(0), "singles": integers(*[1] * EXPERTS),
    **{f"e{expert}": np.int64(expert) for expert in range(EXPERTS)},
}  # fmt: skip


def gathered(turned: bool) -> list[onnx.NodeProto]:
    """Return nodes that gather the matrices of each token's experts. With `turned`, as GPT-OSS
    writes them: transposed weights, biases, clamps, and interleaved gates.
    """
    nodes = [
        *ROUTER, node("Unsqueeze", "x one", "x1"),
        node("Tile" if turned else "Expand", "x1 spread", "x2"), node("Reshape", "x2 rows", "x3"),
        node("Reshape", "chosen flat", "places"), node("Unsqueeze", "places last", "index"),
        node("GatherND", "w1 index", "m1"), node("GatherND", "w2 index", "m2"),
    ]  # fmt: skip
    if turned:
        nodes += [
            node("GatherND", "b1 index", "c1"), node("GatherND", "b2 index", "c2"),
            node("Unsqueeze", "x3 one", "v1"), node("MatMul", "v1 m1", "r1"), node("Squeeze", "r1 one", "s1"),
            node("Add", "s1 c1", "h"), node("Slice", "h zero ends axis two", "g"),
            node("Slice", "h one ends axis two", "u"), node("Clip", "g _ limit", "gates"),
            node("Clip", "u low limit", "clipped"), node("Add", "clipped beta", "up"),
            node("Mul", "gates alpha", "sharp"), node("Sigmoid", "sharp", "sigmoid"),
            node("Mul", "gates sigmoid", "active"), node("Mul", "active up", "hidden"),
            node("Unsqueeze", "hidden one", "v2"), node("MatMul", "v2 m2", "r2"), node("Squeeze", "r2 one", "s2"),
            node("Add", "s2 c2", "results"),
        ]  # fmt: skip
    else:
        nodes += [
            node("Unsqueeze", "x3 last", "v1"), node("MatMul", "m1 v1", "r1"), node("Squeeze", "r1 last", "h"),
            node("Split", "h", "gates up", axis=1, num_outputs=2), node("Sigmoid", "gates", "sigmoid"),
            node("Mul", "gates sigmoid", "active"), node("Mul", "active up", "hidden"),
            node("Unsqueeze", "hidden last", "v2"), node("MatMul", "m2 v2", "r2"),
            node("Squeeze", "r2 last", "results"),
        ]  # fmt: skip
    return [
        *nodes, node("Reshape", "shares flat", "weights"), node("Unsqueeze", "weights last", "column_of"),
        node("Mul", "results column_of", "weighed"), node("Reshape", "weighed slots", "by_slot"),
        node("ReduceSum", "by_slot one", "y", keepdims=0),
    ]  # fmt: skip


def masked(listed: bool, hit: bool = False) -> list[onnx.NodeProto]:
    """Return nodes that compute all experts for all tokens under a mask; with `listed`, each expert
    has separate matrices; with `hit`, as a traced loop over the experts that had tokens in an
    example.
    """
    nodes = [
        *ROUTER, node("OneHot", "chosen depth hot", "hots", axis=-1), node("Transpose", "hots", "by", perm=[2, 1, 0]),
        node("Transpose", "shares", "turned", perm=[1, 0]),
    ]  # fmt: skip
    if hit:
        parts = " ".join(f"part{e}" for e in range(EXPERTS))
        nodes += [
            node("ReduceSum", "by sides", "tokens_of", keepdims=0), node("Greater", "tokens_of nought", "is_hit"),
            node("NonZero", "is_hit", "hits"), node("Transpose", "hits", "each_hit", perm=[1, 0]),
            node("Split", "each_hit singles", parts, axis=0),
            *(node("Squeeze", f"part{e}", f"e{e}") for e in range(EXPERTS)),
        ]  # fmt: skip
    total = "zeros"
    for e in range(EXPERTS):
        if listed:
            nodes += [node("MatMul", f"x gate{e}", f"g{e}"), node("MatMul", f"x up{e}", f"u{e}")]
        else:
            nodes += [
                node("Gather", f"w1 e{e}", f"p{e}", axis=0), node("Transpose", f"p{e}", f"t{e}", perm=[1, 0]),
                node("MatMul", f"x t{e}", f"h{e}"), node("Split", f"h{e}", f"g{e} u{e}", axis=1, num_outputs=2),
                node("Gather", f"w2 e{e}", f"q{e}", axis=0), node("Transpose", f"q{e}", f"down{e}", perm=[1, 0]),
            ]  # fmt: skip
        after = "y" if e == EXPERTS - 1 else f"y{e}"
        nodes += [
            node("Gather", f"by e{e}", f"hit{e}", axis=0), node("Cast", f"hit{e}", f"mask{e}", to=BOOL),
            node("Sigmoid", f"g{e}", f"s{e}"), node("Mul", f"g{e} s{e}", f"a{e}"), node("Mul", f"a{e} u{e}", f"i{e}"),
            node("MatMul", f"i{e} down{e}", f"r{e}"), node("Where", f"mask{e} turned none", f"k{e}"),
            node("ReduceSum", f"k{e} zero", f"l{e}", keepdims=1), node("Reshape", f"l{e} column", f"o{e}"),
            node("Cast", f"mask{e}", f"n{e}", to=onnx.TensorProto.INT32), node("ReduceSum", f"n{e} zero", f"c{e}"),
            node("Cast", f"c{e}", f"any{e}", to=BOOL), node("Reshape", f"any{e} column", f"d{e}"),
            node("Mul", f"r{e} o{e}", f"m{e}"), node("Where", f"d{e} m{e} zeros", f"where{e}"),
            node("Add", f"{total} where{e}", after),
        ]  # fmt: skip
        total = after
    return nodes


STACKED = {"w1": floats(EXPERTS, 2 * INNER, HIDDEN), "w2": floats(EXPERTS, HIDDEN, INNER)}
TURNED = {
    "w1": floats(EXPERTS, HIDDEN, 2 * INNER), "w2": floats(EXPERTS, INNER, HIDDEN), "b1": floats(EXPERTS, 2 * INNER),
    "b2": floats(EXPERTS, HIDDEN),
}  # fmt: skip
LISTED = {
    f"{name}{expert}": floats(INNER, HIDDEN) if name == "down" else floats(HIDDEN, INNER)
    for name in ("gate", "up", "down") for expert in range(EXPERTS)
}  # fmt: skip
CASES = {
    "looked up": (gathered(False), STACKED, "Experts"), "turned": (gathered(True), TURNED, "Experts"),
    "masked": (masked(False), STACKED, "Experts"), "listed": (masked(True), LISTED, "ListedExperts"),
    "hit": (masked(False, True), STACKED, "Experts"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_mixture_computes_and_saves_only_chosen_experts(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, layers, operator = CASES[case]
    read = {name for each in nodes for name in each.input}
    written = {name for each in nodes for name in each.output}
    known = {name: array for name, array in (NUMBERS | layers).items() if name in read - written}
    path = saved(model(nodes, INPUTS, "y", known), tmp_path)
    fused = read_model(path)
    assert fused.fused == {operator: 1}
    feeds = random_feeds(fused.graph, top=2)
    found = trained(fused, feeds)
    assert_close({"y": found["y"]}, run(path, feeds))
    index = next(index for index, each in enumerate(fused.graph.nodes) if each.op == operator)
    assert op_instances(fused.graph)[index].flops == 2 * TOKENS * CHOSEN * 3 * HIDDEN * INNER
    # Tokens are an input.
    assert [each.key[0] for each in saved_tensors(fused.graph)[index]] == [
        "chosen",
        "shares",
    ]
    monkeypatch.setattr(rules, "RULES", {})
    plain = read_model(path)
    assert operator not in {each.op for each in plain.graph.nodes}
    assert_close(found, trained(plain, feeds))


def test_large_zero_tensors_are_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SMALL", 16)
    in_nodes = {
        name: onnx.numpy_helper.from_array(NUMBERS[name], name) for name in ("zeros", "none")
    }
    constants = [
        onnx.helper.make_node("Constant", [], [name], value=each) for name, each in in_nodes.items()
    ]
    nodes = [*constants, *masked(True)]
    read = {name for each in masked(True) for name in each.input} - in_nodes.keys()
    known = {name: array for name, array in (NUMBERS | LISTED).items() if name in read}
    file = model(nodes, INPUTS, "y", known)
    file.producer_name = "pytorch"  # Exporters store all of its parameters as initializers.
    found = read_model(saved(file, tmp_path))
    assert found.fused == {"ListedExperts": 1}
    assert {each.value.name for each in found.graph.parameters} == set(LISTED)


@pytest.mark.parametrize(("case", "axes"), [("looked up", 2), ("turned", 3), ("listed", 2)])
def test_splits_by_experts_hidden_units_and_tokens(case: str, axes: int, tmp_path: Path) -> None:
    nodes, layers, operator = CASES[case]
    read = {name for each in nodes for name in each.input}
    known = {name: array for name, array in (NUMBERS | layers).items() if name in read}
    graph = read_model(saved(model(nodes, INPUTS, "y", known), tmp_path)).graph
    mixture = next(each for each in graph.nodes if each.op == operator)
    chosen = np.argsort(np.random.default_rng(0).random((TOKENS, EXPERTS)))[:, :CHOSEN]
    tokens = dict(
        zip(
            mixture.inputs,
            (floats(TOKENS, HIDDEN), chosen, abs(floats(TOKENS, CHOSEN))),
            strict=False,
        )
    )
    drawn = {name: floats(*graph.type_of(name).shape) for name in mixture.inputs[3:] if name}
    assert check(Use(graph, mixture, tokens | drawn), 1e-4, 1e-5) == axes


def test_backward_saves_the_operands() -> None:
    x = torch.randn(64, HIDDEN, requires_grad=True)
    shares = torch.rand(64, CHOSEN, requires_grad=True)
    layers = [
        (torch.randn(EXPERTS, *shape, requires_grad=True), None)
        for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    ]
    chosen = torch.randint(EXPERTS, (64, CHOSEN))
    saved_storages = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved_storages.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        operators.experts(
            x, chosen, shares, layers[0], layers[1], activation=operators.swiglu(turns=False)
        )
    operands = (x, chosen, shares, *(weight for weight, _ in layers))
    assert saved_storages == {each.untyped_storage().data_ptr() for each in operands}
