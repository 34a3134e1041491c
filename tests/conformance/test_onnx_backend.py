"""ONNX's own cases, run as emitted text; what is not run is listed in exceptions.toml with its
reason.
"""

from __future__ import annotations

import collections

import pytest
import torch
from onnx.backend.test.runner import Runner

from tests.conformance.adapter import EmissionBackend
from tests.conformance.cases import all_cases, data_of, model_of, skips, tolerances

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


@pytest.mark.conformance
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "name"), all_cases())
def test_case(kind: str, name: str, device: str) -> None:
    reason = skips().get(name)
    if reason is not None:
        pytest.skip(reason)
    case = all_cases()[kind, name]
    prepared = EmissionBackend.prepare(model_of(case), device)
    rtol, atol = tolerances().get(name, (case.rtol, case.atol))
    for inputs, expected in data_of(case):
        found = prepared.run(inputs)
        Runner.assert_similar_outputs(expected, found, rtol=rtol, atol=atol)


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
