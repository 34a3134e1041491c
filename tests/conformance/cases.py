"""The cases that `onnx` ships: a model, sets of inputs and expected outputs, tolerances."""

from __future__ import annotations

import functools
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests

COLLECTIONS = ("node", "simple", "pytorch-converted", "pytorch-operator")
EXCEPTIONS = Path(__file__).parent / "exceptions.toml"


@functools.cache
def all_cases() -> dict[tuple[str, str], TestCase]:
    """Every case by collection and name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {
            (kind, case.name): case for kind in COLLECTIONS for case in load_model_tests(kind=kind)
        }
    return dict(sorted(found.items()))


@functools.cache
def skips() -> dict[str, str]:
    """Why a case is not run node by node, by its name; names are listed one by one in
    exceptions.toml.
    """
    listed = tomllib.loads(EXCEPTIONS.read_text(encoding="utf-8"))
    return {
        name: entry["reason"]
        for entry in (*listed["skip"], *listed["resolved"])
        for name in entry["cases"]
    }


@functools.cache
def unread() -> frozenset[str]:
    """Names of the cases that are run node by node, but that the product's frontend cannot read."""
    listed = tomllib.loads(EXCEPTIONS.read_text(encoding="utf-8"))["unread"]
    return frozenset(name for entry in listed for name in entry["cases"])


@functools.cache
def resolved() -> frozenset[str]:
    """Names of the cases among these that the frontend leaves nothing of, and that are run through
    it.
    """
    listed = tomllib.loads(EXCEPTIONS.read_text(encoding="utf-8"))["resolved"]
    return frozenset(name for entry in listed for name in entry["cases"])


@functools.cache
def tolerances() -> dict[str, tuple[float, float]]:
    """Relative and absolute tolerance of the few cases that cannot be held to their own, by
    name.
    """
    listed = tomllib.loads(EXCEPTIONS.read_text(encoding="utf-8"))["tolerance"]
    return {name: (entry["rtol"], entry["atol"]) for entry in listed for name in entry["cases"]}


def model_of(case: TestCase) -> onnx.ModelProto:
    """The case's model."""
    return (
        case.model
        if case.model is not None
        else onnx.load(Path(str(case.model_dir)) / "model.onnx")
    )


def _array(tensor: np.ndarray | onnx.TensorProto) -> np.ndarray:
    """Return a tensor of a case as an array: onnx 1.23 holds some as protocol buffers, earlier
    versions none.
    """
    return numpy_helper.to_array(tensor) if isinstance(tensor, onnx.TensorProto) else tensor


def data_of(case: TestCase) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
    """Inputs and expected outputs, one pair a data set."""
    if case.data_sets is not None:
        for inputs, outputs in case.data_sets:
            yield [_array(each) for each in inputs], [_array(each) for each in outputs]
        return
    for folder in sorted(Path(str(case.model_dir)).glob("test_data_set_*")):
        yield _stored(folder, "input"), _stored(folder, "output")


def _stored(folder: Path, kind: str) -> list[np.ndarray]:
    files = sorted(folder.glob(f"{kind}_*.pb"), key=lambda file: int(file.stem.rpartition("_")[2]))
    return [numpy_helper.to_array(onnx.TensorProto.FromString(file.read_bytes())) for file in files]
