"""ScatterNDs that assign along one dimension: they compute the same after the pass, and keep the
other dimensions apart.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopipe.ir.batch import BatchDimension, batch_axes_of
from autopipe.ir.errors import ModelError
from autopipe.ir.problem import Mode
from autopipe.passes.frontend import read_model
from tests.passes.frontend.building import floats, integers, model, node, saved
from tests.passes.frontend.evaluated import emitted
from tests.passes.frontend.reference import random_feeds, run

EXTENTS = st.integers(1, 4)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A ScatterND into data of shape `shape` along `dimension`, at `assigned` indices along it. Its
    indices address the first `depth` dimensions.
    """

    shape: tuple[int, ...]
    depth: int
    dimension: int
    assigned: tuple[int, ...]
    flat: bool
    """True if the indices have the shape [elements, depth]."""
    reduction: str

    @property
    def parts(self) -> int:
        """Number of indices along the one dimension that is addressed after the pass: the last, if
        all are addressed completely and in order.
        """
        extent = self.shape[self.dimension]
        is_complete = [each % extent for each in self.assigned] == list(range(extent))
        return self.shape[self.depth - 1] if is_complete else len(self.assigned)

    def indices(self) -> np.ndarray:
        columns = [np.arange(extent) for extent in self.shape[: self.depth]]
        columns[self.dimension] = np.asarray(self.assigned)
        grid = np.stack(np.meshgrid(*columns, indexing="ij"), axis=-1).astype(np.int64)
        return grid.reshape(-1, self.depth) if self.flat else grid


@st.composite
def assignments(draw: st.DrawFn) -> Assignment:
    shape = tuple(draw(st.lists(EXTENTS, min_size=2, max_size=4)))
    depth = draw(st.integers(2, len(shape)))
    dimension = draw(st.integers(0, depth - 1))
    extent = shape[dimension]
    numbers = st.integers(-extent, extent - 1)
    unique = st.lists(numbers, min_size=1, max_size=extent, unique_by=lambda each: each % extent)
    assigned = tuple(draw(unique))
    reduction = draw(st.sampled_from(["none", "add", "max"]))
    return Assignment(shape, depth, dimension, assigned, draw(st.booleans()), reduction)


def scattered(assignment: Assignment, folder: Path) -> Path:
    """Return the file of the model y = ScatterND(x, indices, z)."""
    indices = assignment.indices()
    updates = [*indices.shape[:-1], *assignment.shape[assignment.depth :]]
    nodes = [node("ScatterND", "x indices z", "y", reduction=assignment.reduction)]
    inputs = {"x": list(assignment.shape), "z": updates}
    return saved(model(nodes, inputs, "y", {"indices": indices}), folder)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(assignment=assignments())
def test_random_assignments_compute_the_same(tmp_path: Path, assignment: Assignment) -> None:
    path = scattered(assignment, tmp_path)
    read = read_model(path, mode=Mode.INFER)
    (scatter,) = (each for each in read.graph.nodes if each.op == "ScatterND")
    assert read.graph.type_of(scatter.inputs[1]).shape == (assignment.parts, 1)
    feeds = random_feeds(read.graph)
    np.testing.assert_array_equal(emitted(read, feeds)["y"], run(path, feeds)["y"])


def test_only_assignments_along_one_dimension_change(tmp_path: Path) -> None:
    """All pairs of elements of a matrix with two rows and two columns."""
    elements = list(itertools.product(range(2), repeat=2))
    changed = []
    for pair in itertools.permutations(elements, 2):
        nodes = [node("ScatterND", "x indices z", "y")]
        held = {"indices": np.asarray(pair)}
        path = saved(model(nodes, {"x": [2, 2], "z": [2]}, "y", held), tmp_path)
        read = read_model(path, mode=Mode.INFER)
        if [each.op for each in read.graph.nodes] != ["ScatterND"]:
            changed.append(pair)
        feeds = random_feeds(read.graph)
        np.testing.assert_array_equal(emitted(read, feeds)["y"], run(path, feeds)["y"])
    column = [((0, each), (1, each)) for each in range(2)]
    row = [((each, 0), (each, 1)) for each in range(2)]
    assert sorted(changed) == sorted(column + row)


@pytest.mark.parametrize("constant", ["x", "z"])
def test_samples_are_followed_through_an_assignment(tmp_path: Path, constant: str) -> None:
    """`y[:, 1:] = z`, where the old or the new elements are a constant."""
    shapes = {"x": (3, 4), "z": (3, 3)}
    assignment = Assignment((3, 4), 2, 1, (1, 2, 3), flat=False, reduction="none")
    given_name = next(name for name in shapes if name != constant)
    held = {"indices": assignment.indices(), constant: np.ones(shapes[constant], np.float32)}
    nodes = [node("ScatterND", "x indices z", "y")]
    path = saved(model(nodes, {given_name: list(shapes[given_name])}, "y", held), tmp_path)
    read = read_model(path, mode=Mode.INFER)
    assert batch_axes_of(read.graph).values["y"] == (BatchDimension(0),)
    part = read_model(path, mode=Mode.INFER, batch=1)
    feeds = random_feeds(read.graph)
    sample = {name: array[:1] for name, array in feeds.items()}
    np.testing.assert_array_equal(emitted(part, sample)["y"], run(path, feeds)["y"][:1])


@pytest.mark.parametrize(
    "indices",
    [np.array(1), integers(), np.full((3, 1, 3), 1), np.full((3, 1, 2), 4)],
    ids=["no dimension", "no index", "too deep", "out of range"],
)
def test_indices_that_do_not_fit_are_left_to_other_checks(
    tmp_path: Path, indices: np.ndarray
) -> None:
    nodes = [node("ScatterND", "x indices z", "y")]
    held = {"indices": indices, "z": floats(3, 1)}
    path = saved(model(nodes, {"x": [3, 4]}, "y", held, types={"y": [3, 4]}), tmp_path)
    try:
        read = read_model(path, mode=Mode.INFER)
    except ModelError as error:
        assert "scatternd_y" in str(error)
    else:
        assert [each.op for each in read.graph.nodes] == ["ScatterND"]
