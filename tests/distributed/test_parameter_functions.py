"""What an exporter computes from parameters is trained as torch trains the parameters, or training
it is refused.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from autopipe.configs.configuration import load_configuration
from autopipe.ir.errors import ModelError
from autopipe.passes.frontend import read_model
from autopipe.passes.frontend.model import require_trainable
from autopipe.passes.weight_files import module_layouts
from tests.distributed.support.pool import Pools
from tests.distributed.support.trained_weights import by_ranks, by_torch
from tests.exports.parameter_functions import CASES, PROBES, Case, batch_of, file_of, module_of
from tests.passes.frontend.reference import parameter_array

STEPS = 2
SEVERAL = {
    "product", "sum of two", "joined", "joined columns", "product of elements", "scaled rows", "low rank", "adapted",
}  # fmt: skip
"""Functions of several parameters, which are found if the file holds all of them and its metadata
name them.
"""
UNKNOWN = {
    "softmax", "normalized", "symmetric", "rows of a multiple, some twice", "straight through of a multiple",
    "layer beside the identity",
}  # fmt: skip
"""Functions that are not found even if the file holds their parameter."""
FOLDED_BY_DYNAMO = {"cosines and sines", "straight through", "relative positions of a multiple"}
"""Functions that are not found, either, but that torch's older exporter keeps at least in part."""
KEPT = {
    "sigmoid", "softplus", "exponential", "normalized", "product", "adapted", "sines", "cosines and sines",
    "straight through", "exponential layer",
}  # fmt: skip
"""Functions that torch's older exporter leaves in the graph."""
LAYERS = {"layer", "product with a weight"}
"""Layers that read the parameters themselves, perhaps transposed."""
LOOKUPS = {"relative positions", "table of relative positions"}
MOVED = {"plain", "transposed", "flipped", "view", "part", "exponential", "exponential layer"}
REFUSED = {
    ("dynamo", False): frozenset(PROBES) - MOVED - LOOKUPS - LAYERS,
    ("dynamo", True): frozenset(UNKNOWN | FOLDED_BY_DYNAMO),
    ("torchscript", False): frozenset(PROBES) - {"plain", "flipped"} - LOOKUPS - KEPT - LAYERS,
    ("torchscript", True): frozenset((UNKNOWN | SEVERAL) - KEPT - {"low rank"}),
}
"""By exporter, and whether the module also uses the parameter itself: the functions whose parameter
is not known.
"""


EXPORTED_BY_DYNAMO = {
    "plain", "transposed", "view", "part", "scaled", "exponential", "layer", "sigmoid", "product", "low rank",
    "softmax", "straight through", "relative positions",
}  # fmt: skip
"""Functions that torch.export writes in each run, from each of the sets above. It writes the others
in sweeps, since an export takes 2 seconds of processor time. The older exporter takes 10 ms.
"""


def is_refused(case: Case) -> bool:
    return case.probe in REFUSED[case.exporter, case.beside]


def marked(cases: Iterable[Case]) -> list[object]:
    """Return the cases as parameters of a test, with the marker `sweep` if they run in sweeps."""
    return [
        pytest.param(
            case,
            id=case.name,
            marks=(
                [pytest.mark.sweep]
                if case.exporter == "dynamo" and case.probe not in EXPORTED_BY_DYNAMO
                else []
            ),
        )
        for case in cases
    ]


@pytest.mark.parametrize("case", marked(CASES))
def test_a_tensor_with_a_parameters_name_is_that_parameter(case: Case) -> None:
    path = file_of(case)
    layouts = module_layouts(path)
    known = {name: tensor.detach().numpy() for name, tensor in module_of(case).named_parameters()}
    for each in read_model(path).graph.parameters:
        name = each.value.name
        if name not in known:
            continue
        array = parameter_array(each, path)
        if name in layouts:
            for step in layouts[name].inverse:
                array = step.apply(array)
        assert array.shape == known[name].shape
        np.testing.assert_allclose(array, known[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", marked(each for each in CASES if is_refused(each)))
def test_training_a_function_of_a_parameter_is_refused(case: Case) -> None:
    path = file_of(case)
    read = read_model(path)
    refused = [each.value.name for each in read.tensors if each.refused]
    assert refused
    with pytest.raises(ModelError, match=refused[0]) as caught:
        require_trainable(read)
    assert (
        "optimize=False" in caught.value.message
        or "do_constant_folding=False" in caught.value.message
    )
    require_trainable(read_model(path, trainable=tuple(refused)))
    require_trainable(read_model(path, frozen=tuple(refused)))
    words = shlex.split(caught.value.hint)
    assignments = [after for before, after in itertools.pairwise(words) if before == "--set"]
    settings = load_configuration(assignments=assignments).model
    assert settings.trainable == settings.frozen == tuple(refused)


@pytest.mark.distributed
@pytest.mark.parametrize("case", marked(each for each in CASES if not is_refused(each)))
def test_two_steps_are_those_of_torch(case: Case, pools: Pools, tmp_path: Path) -> None:
    path = file_of(case)
    x, y = batch_of(STEPS)
    data = {"x": x, "y": y}
    found = by_ranks(path, data, STEPS, pools, tmp_path)

    module = module_of(case)
    before = {name: tensor.detach().numpy().copy() for name, tensor in module.named_parameters()}
    after = by_torch(module, data, STEPS)
    assert any(np.abs(after[name] - before[name]).max() > 1e-3 for name in before), (
        "training changed nothing"
    )
    initial = {
        each.value.name: parameter_array(each, path) for each in read_model(path).graph.parameters
    }
    compared = sum(compare(name, array, initial, before, after) for name, array in found.items())
    reached = sum(
        array.size for name, array in after.items() if not np.array_equal(array, before[name])
    )
    assert compared >= reached or case.probe == "part", "parameters are missing"


def compare(
    name: str,
    array: np.ndarray,
    initial: dict[str, np.ndarray],
    before: dict[str, np.ndarray],
    after: dict[str, np.ndarray],
) -> int:
    """Compare a trained tensor with torch's and return its elements; one with a name of its own is
    known by the elements that it began with, each of which one parameter had.
    """
    if name in after:
        assert array.shape == after[name].shape
        np.testing.assert_allclose(array, after[name], rtol=1e-5, atol=1e-6)
        return array.size
    began = np.concatenate([each.reshape(-1) for each in before.values()])
    ended = np.concatenate([each.reshape(-1) for each in after.values()])
    first = initial[name].reshape(-1)
    places = np.abs(began - first[:, None]).argmin(axis=1)
    # The logarithm of an exponential is the parameter up to a rounding.
    np.testing.assert_allclose(began[places], first, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(array.reshape(-1), ended[places], rtol=1e-5, atol=1e-6)
    return array.size


def test_functions_of_each_run_exist() -> None:
    assert set(PROBES) >= EXPORTED_BY_DYNAMO
