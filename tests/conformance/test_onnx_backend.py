"""ONNX's own cases in four checks, which one test runs for each case:

- node by node: the emitted code of each node computes the expected results;
- through the frontend: so does the program of the case's file, which is checked, folded, cleaned
  and fused as a user's file is;
- split: parts of the node along each axis that its definition can split make up its results and
  gradients;
- on a device: emitted code runs on torch's meta device. It fails there if an operator makes a
  tensor on another device, or reads values. So no operator names a device, and none stops the host
  of a GPU until results are computed.

`exceptions.toml` lists the cases that are not run, with the reasons.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from onnx.backend.test.runner import Runner

from autopipe.backends.torch.codegen.call import torch_dtype
from autopipe.backends.torch.codegen.stage import emit_forward
from autopipe.ir.graph import DType
from tests.conformance.adapter import EmissionBackend, forward_of, stage_of, to_tensor
from tests.conformance.cases import all_cases, data_of, model_of, skips, tolerances
from tests.conformance.frontend_cases import READ, results_through_frontend
from tests.conformance.single_nodes import SINGLE, use_in
from tests.ir.ops.splitting import Use, check

LISTED = frozenset(
    """
    Constant Add Mul Unsqueeze Reshape MatMul ConstantOfShape Transpose Gather Shape Concat Identity Cast Slice
    Conv Relu Where Pow Div Expand LayerNormalization ReduceMean Sqrt Softmax BatchNormalization Squeeze Equal
    Neg Gemm Reciprocal IsNaN And Range Sigmoid Flatten ReduceSum Split Gelu GatherND Tanh GreaterOrEqual
    SoftmaxCrossEntropyLoss Erf MaxPool LessOrEqual NonZero ScatterElements Min Sub Log Sum TopK Less Cos Sin
    Max Greater Pad AveragePool LSTM ScatterND OneHot Abs Tile ArgMax LRN Dropout GlobalAveragePool Exp Not
    CumSum Attention RMSNormalization RotaryEmbedding GroupNormalization InstanceNormalization HardSwish
    HardSigmoid LeakyRelu PRelu Elu Selu Softplus Softsign Mish LogSoftmax Clip Floor Ceil Round Sign Mod Or Xor
    Trilu Einsum ConvTranspose Resize DepthToSpace SpaceToDepth GRU RNN GatherElements ReduceMax ReduceMin
    ReduceProd ReduceL1 ReduceL2 ReduceLogSumExp ReduceSumSquare ArgMin NegativeLogLikelihoodLoss Size EyeLike
    BitwiseAnd BitwiseOr BitwiseXor BitwiseNot MeanVarianceNormalization GlobalMaxPool LpPool NonMaxSuppression
    """.split()  # noqa: SIM905 - a hundred names are read more easily so
)
"""Operators counted in real exports, and those that a user expects besides."""
EXCUSED = ("element types", "strings", "sequences", "optional", "random numbers")
"""How reasons begin that hold whatever the operator."""

DEVICES = (
    ["CPU", pytest.param("CUDA", marks=pytest.mark.cuda)] if torch.cuda.is_available() else ["CPU"]
)


WAITING = frozenset({"Compress", "NonZero", "RoiAlign"})
"""Operators that read values while they run: the positions where a condition holds, the number of
samples of a region.
"""

Check = Callable[[], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cases")


@pytest.mark.conformance
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "name"), all_cases())
def test_case(kind: str, name: str, device: str, folder: Path) -> None:
    """Run all checks of a case on the CPU, and the first one on a GPU."""
    checks = dict(checks_of(kind, name, device, folder))
    if not checks:
        pytest.skip(skips()[name])
    run_all(checks)


def checks_of(kind: str, name: str, device: str, folder: Path) -> Iterator[tuple[str, Check]]:
    """Yield the checks of a case by name."""
    if name not in skips():
        yield "node by node", lambda: check_nodes(kind, name, device)
    if device != "CPU":
        return
    if (kind, name) in READABLE:
        yield "through the frontend", lambda: check_frontend(kind, name, folder)
    use = use_in(kind, name) if (kind, name) in SINGLE_NODES else None
    if use is not None:
        yield "split", lambda: check_splits(use)
        if use.node.op not in WAITING:
            yield "on a device", lambda: check_device(use)


READABLE = frozenset(READ)
SINGLE_NODES = frozenset(SINGLE)


def run_all(checks: dict[str, Check]) -> None:
    """Run every check. Raise an ExceptionGroup that names the checks that fail."""
    failures: dict[str, Exception] = {}
    for name, run in checks.items():
        try:
            run()
        except Exception as error:  # noqa: BLE001 - the remaining checks run too
            failures[name] = error
    if failures:
        raise ExceptionGroup(f"failed: {', '.join(failures)}", list(failures.values()))


def check_nodes(kind: str, name: str, device: str) -> None:
    case = all_cases()[kind, name]
    prepared = EmissionBackend.prepare(model_of(case), device)
    rtol, atol = tolerances().get(name, (case.rtol, case.atol))
    for inputs, expected in data_of(case):
        found = prepared.run(inputs)
        Runner.assert_similar_outputs(expected, found, rtol=rtol, atol=atol)


def check_frontend(kind: str, name: str, folder: Path) -> None:
    case = all_cases()[kind, name]
    found, expected = results_through_frontend(case, folder)
    rtol, atol = tolerances().get(name, (case.rtol, case.atol))
    Runner.assert_similar_outputs(expected, found, rtol=rtol, atol=atol)


def check_splits(use: Use) -> None:
    coarse = any(value.dtype in (DType.FLOAT16, DType.BFLOAT16) for value in use.graph.values)
    check(use, *((1e-2, 1e-2) if coarse else (1e-4, 1e-5)))


def check_device(use: Use) -> None:
    graph = use.graph
    held = {
        f"c{index}": to_tensor(each.array).to("meta") for index, each in enumerate(graph.constants)
    }
    held |= {
        f"w{index}": to_tensor(use.arrays[each.value.name]).to("meta")
        for index, each in enumerate(graph.parameters)
    }
    operands = [to_tensor(use.arrays[each.name]).to("meta") for each in graph.inputs]
    forward = forward_of(emit_forward(stage_of(graph)).text)
    results = forward(SimpleNamespace(device=torch.device("meta"), **held), *operands)
    for output, result in zip(graph.outputs, results, strict=True):
        value = graph.type_of(output)
        assert result.device.type == "meta"
        assert tuple(result.shape) == value.shape
        assert str(result.dtype) == torch_dtype(value.dtype)


def test_every_failed_check_is_named() -> None:
    def fail() -> None:
        raise ValueError("wrong")

    with pytest.raises(ExceptionGroup, match="failed: split, on a device") as caught:
        run_all({"node by node": lambda: None, "split": fail, "on a device": fail})
    assert len(caught.value.exceptions) == 2


def test_numbers_of_checks() -> None:
    """No check is left out of cases by mistake."""
    assert len(READ) >= 1800
    assert len(SINGLE) >= 1450


def test_most_node_cases_are_run() -> None:
    run = [name for kind, name in all_cases() if kind == "node" and name not in skips()]
    assert len(run) >= 1650


def test_skips_name_cases_that_exist() -> None:
    assert skips().keys() | tolerances().keys() <= {name for _, name in all_cases()}


def test_listed_operators_are_run_in_every_case_but_for_types_and_randomness() -> None:
    left_out = collections.defaultdict(list)
    for (_, name), case in all_cases().items():
        operators = {node.op_type for node in model_of(case).graph.node}
        if name in skips() and operators <= LISTED and not skips()[name].startswith(EXCUSED):
            left_out[skips()[name]].append(name)
    assert not left_out
