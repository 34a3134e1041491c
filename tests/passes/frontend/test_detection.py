"""Programs with NonMaxSuppression and pooled regions compute the results of onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.ir.errors import ModelError
from autopipe.passes.frontend import Model, read_model
from tests.passes.frontend.building import FLOAT, floats, integers, model, node, saved
from tests.passes.frontend.evaluated import both, emitted
from tests.passes.frontend.reference import run

IMAGES = 2
CLASSES = 2
BOXES = 9
MOST = 4
INPUTS = {
    "boxes": [IMAGES, BOXES, 4],
    "scores": [IMAGES, CLASSES, BOXES],
    "overlap": [1],
    "least": [1],
}
SUPPRESSED = node("NonMaxSuppression", "boxes scores most overlap least", "rows")


@pytest.fixture(scope="module", params=[0, 1], ids=["corners", "centres"])
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return a model whose outputs are the kept boxes and their number."""
    own = onnx.NodeProto()
    own.CopyFrom(SUPPRESSED)
    own.attribute.append(onnx.helper.make_attribute("center_point_box", request.param))
    nodes = [own, node("Shape", "rows", "shape", end=1)]
    return read_model(
        saved(
            model(nodes, INPUTS, "rows shape", {"most": integers(MOST)}),
            tmp_path_factory.mktemp("s"),
        )
    )


def same_rows(read: Model, feeds: dict[str, np.ndarray]) -> None:
    """Check that every output is onnxruntime's, followed by zeros."""
    found = emitted(read, feeds)
    expected = run(read.path, feeds)
    for name, array in expected.items():
        front = found[name][: len(array)] if array.ndim else found[name]
        np.testing.assert_allclose(front, array, rtol=1e-5, atol=1e-6)
        assert not array.ndim or not found[name][len(array) :].any()


EIGHTHS = st.integers(0, 8).map(lambda each: each / 8)


@given(
    st.lists(EIGHTHS, min_size=IMAGES * BOXES * 4, max_size=IMAGES * BOXES * 4),
    st.lists(EIGHTHS, min_size=IMAGES * CLASSES * BOXES, max_size=IMAGES * CLASSES * BOXES),
    st.sampled_from([0.0, 1 / 7, 0.25, 1 / 3, 0.5, 1.0]),
    st.sampled_from([-1.0, 0.0, 0.125, 0.3, 0.5, 1.0]),
)
def test_any_boxes(
    kept: Model, boxes: list[float], scores: list[float], overlap: float, least: float
) -> None:
    """Coordinates and scores are eighths, so that examples have equal boxes, empty boxes, equal
    scores, and overlaps that are equal to the limit.
    """
    feeds = {
        "boxes": np.array(boxes, np.float32).reshape(INPUTS["boxes"]),
        "scores": np.array(scores, np.float32).reshape(INPUTS["scores"]),
        "overlap": np.array([overlap], np.float32),
        "least": np.array([least], np.float32),
    }
    same_rows(kept, feeds)


def drawn(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.random(shape, np.float32) for name, shape in INPUTS.items()}


@given(st.integers(0, 999))
def test_boxes_of_any_numbers(kept: Model, seed: int) -> None:
    same_rows(kept, drawn(seed))


def test_rows_are_gathered_at_the_kept_boxes(tmp_path: Path) -> None:
    """Exports of YOLO end in rows of image, box, class and score."""
    nodes = [
        SUPPRESSED,
        node("Gather", "rows ends", "pair", axis=1),
        node("GatherND", "boxes pair", "taken"),
        node("GatherND", "scores rows", "score"),
        node("Unsqueeze", "score last", "column"),
        node("Cast", "rows", "numbers", to=FLOAT),
        node("Slice", "numbers first two last", "place"),
        node("Concat", "place taken column", "y", axis=1),
    ]
    held = {
        "most": integers(MOST),
        "ends": integers(0, 2),
        "last": integers(1),
        "first": integers(0),
    }
    read = read_model(saved(model(nodes, INPUTS, "y", {**held, "two": integers(2)}), tmp_path))
    for seed in range(4):
        same_rows(read, drawn(seed))


def test_boxes_are_kept_of_selected_boxes(tmp_path: Path) -> None:
    """A selected box with a negative score is kept before boxes that are not selected."""
    nodes = [
        node("Greater", "chosen half", "is"),
        node("NonZero", "is", "n"),
        node("Squeeze", "n first", "at"),
        node("Gather", "boxes at", "b", axis=1),
        node("Gather", "scores at", "s", axis=2),
        node("Neg", "s", "below"),
        node("NonMaxSuppression", "b below most overlap", "rows"),
        node("Gather", "rows two", "numbers", axis=1),
        node("Squeeze", "numbers last", "number"),
        node("Gather", "b number", "taken", axis=1),
    ]
    held = {"most": integers(99), "half": np.array(0.5, np.float32)}
    held |= {"first": integers(0), "last": integers(1), "two": integers(2)}
    inputs = {"boxes": [1, BOXES, 4], "scores": [1, 1, BOXES], "overlap": [1], "chosen": [BOXES]}
    read = read_model(
        saved(model(nodes, inputs, "rows taken", held), tmp_path), batch_axes=dict.fromkeys(inputs)
    )
    for seed in range(9):
        random = np.random.default_rng(seed)
        feeds = {name: random.random(shape, np.float32) for name, shape in inputs.items()}
        feeds["chosen"] *= seed / 4
        found = emitted(read, feeds)
        expected = run(read.path, feeds)
        kept = len(expected["rows"])
        np.testing.assert_array_equal(found["rows"][:kept], expected["rows"])
        np.testing.assert_array_equal(found["taken"][:, :kept], expected["taken"])
        assert not found["rows"][kept:].any()
        assert not found["taken"][:, kept:].any()


def test_a_file_that_keeps_no_box_is_rejected(tmp_path: Path) -> None:
    path = saved(
        model([node("NonMaxSuppression", "boxes scores", "y")], dict([*INPUTS.items()][:2]), "y"),
        tmp_path,
    )
    with pytest.raises(
        ModelError, match="the third operand, the maximum number of boxes per class, is absent"
    ):
        read_model(path)


def test_the_maximum_number_of_boxes_is_an_input(tmp_path: Path) -> None:
    inputs = {**INPUTS, "most": (onnx.TensorProto.INT64, [1])}
    read = read_model(
        saved(model([SUPPRESSED], inputs, "rows"), tmp_path), batch_axes=dict.fromkeys(inputs)
    )
    for most in (0, 1, 3, 99):
        same_rows(read, {**drawn(most), "most": integers(most)})


def test_max_pooling_of_regions(tmp_path: Path) -> None:
    """Some regions are outside of the image or smaller than a pixel."""
    random = np.random.default_rng(0)
    corners = random.uniform(-4, 26, (40, 2, 2)).astype(np.float32)
    regions = np.concatenate(
        [random.integers(0, 2, (40, 1)), np.sort(corners, 1).reshape(40, 4)], 1
    )
    arrays = [floats(2, 3, 9, 11), regions.astype(np.float32)]
    found, expected = both(
        tmp_path, "MaxRoiPool", arrays, domain="", pooled_shape=[3, 4], spatial_scale=0.5
    )
    np.testing.assert_array_equal(found["y"], expected["y"])
