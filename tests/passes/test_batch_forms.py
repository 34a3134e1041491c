"""How the loss of a batch depends on the losses of its parts: what the analysis says, and what the
numbers say.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autopipe.configs.cluster import build_cluster, cluster_preset
from autopipe.ir.errors import ModelError
from autopipe.passes.analysis.batch_forms import LossKind
from autopipe.passes.analysis.loss_division import form_of_loss
from autopipe.passes.frontend import read_model
from autopipe.passes.pipeline import Request, make_plan
from autopipe.passes.placement.data_parallel import DataParallel
from autopipe.passes.schedule.published.one_f_one_b import OneForwardOneBackward
from tests.passes.frontend.building import floats, integers, model, node, saved
from tests.passes.loss_cases import LOSSES, LossCase, batch, exported, loss_of


def measured_kind(path: Path) -> LossKind:
    """Return the kind of the loss by its values for two batches of equal size, and for both
    together.
    """
    parts = [batch(4, seed) for seed in (1, 2)]
    first, second = (loss_of(path, part) for part in parts)
    together = loss_of(
        path, {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    )
    if np.isclose(together, (first + second) / 2, rtol=1e-5):
        return LossKind.MEAN
    return LossKind.SUM if np.isclose(together, first + second, rtol=1e-5) else LossKind.MIXED


@pytest.mark.parametrize("case", LOSSES, ids=lambda case: case.name)
def test_the_analysis_says_what_the_numbers_say(case: LossCase, tmp_path: Path) -> None:
    path = exported(case, tmp_path)
    model = read_model(path)
    form = form_of_loss(model, lambda samples: read_model(path, batch=samples))
    assert form is not None
    # Losses of the parts do not make a ratio, totals do.
    measured = LossKind.MIXED if case.kind is LossKind.RATIO else case.kind
    assert (form.kind, measured_kind(path)) == (case.kind, measured), str(form)
    assert bool(form.reason) == (case.kind is LossKind.MIXED)


SINGLE = (
    "mean square",
    "sum of squares",
    "root mean square",
    "mean over chosen",
    "sum by a constant",
    "two losses",
    "covariance",
)
"""Losses that say in a file for one sample, too, how they depend on parts of a batch."""


@pytest.mark.parametrize("name", SINGLE)
def test_a_file_that_fixes_the_batch_to_one_sample_is_analysed(name: str, tmp_path: Path) -> None:
    case = next(each for each in LOSSES if each.name == name)
    path = exported(case, tmp_path, 1)
    form = form_of_loss(
        read_model(path), lambda samples: read_model(path, batch=samples, opened=True)
    )
    assert form is not None
    assert (form.kind, form.samples, form.divisor) == (case.kind, 1, None)


def test_a_division_by_a_batch_of_one_sample_is_a_divisor(tmp_path: Path) -> None:
    case = next(each for each in LOSSES if each.name == "sum by batch size")
    path = exported(case, tmp_path, 1)
    form = form_of_loss(
        read_model(path), lambda samples: read_model(path, batch=samples, opened=True)
    )
    assert form is not None
    assert (form.kind, form.samples, form.divisor) == (LossKind.SUM, 1, 1)


def test_a_model_that_is_read_on_one_sample_only_is_not_known_to_be_divisible(
    tmp_path: Path,
) -> None:
    """The shape in the file is that of one sample, whatever its batch axis says."""
    nodes = [
        node("Mul", "x w", "y"),
        node("Reshape", "y shape", "z"),
        node("ReduceMean", "z", "loss", keepdims=0),
    ]
    held = {"w": floats(6), "shape": integers(1, 3, 2)}
    path = saved(model(nodes, {"x": ["samples", 6]}, "loss", held), tmp_path)
    form = form_of_loss(
        read_model(path), lambda samples: read_model(path, batch=samples, opened=True)
    )
    assert form is not None
    assert (form.kind, form.samples) == (LossKind.UNKNOWN, None)
    assert "cannot be read on 2 and 4 samples" in form.reason
    assert "'reshape_z'" in form.reason


def test_more_of_the_largest_than_samples_are_refused_with_a_number_of_samples(
    tmp_path: Path,
) -> None:
    nodes = [
        node("Mul", "x w", "y"),
        node("ReduceSum", "y axis", "s", keepdims=0),
        node("TopK", "s k", "t places", axis=0),
        node("ReduceMean", "t", "loss", keepdims=0),
    ]
    held = {"w": floats(6), "axis": integers(1), "k": integers(3)}
    path = saved(model(nodes, {"x": ["samples", 6]}, "loss", held), tmp_path)
    with pytest.raises(
        ModelError, match=r"read for the batch size 16, but not for the batch size 1: .*topk_t"
    ) as error:
        read_model(path)
    assert "--dim samples=16" in error.value.hint
    form = form_of_loss(
        read_model(path, dims={"samples": 16}), lambda samples: read_model(path, batch=samples)
    )
    assert form is not None
    assert form.kind is LossKind.MIXED


def test_a_loss_that_is_a_number_on_one_sample_only_is_refused(tmp_path: Path) -> None:
    """As torch's exporter writes the sum of a cross-entropy without reduction: without the sum."""
    nodes = [node("MatMul", "x w", "y"), node("Squeeze", "y axis", "loss")]
    path = saved(
        model(nodes, {"x": ["samples", 6]}, "loss", {"w": floats(6, 1), "axis": integers(1)}),
        tmp_path,
    )
    read = read_model(path, loss="loss")
    form = form_of_loss(read, lambda samples: read_model(path, batch=samples, opened=True))
    assert form is not None
    assert (form.kind, form.reason) == (
        LossKind.MIXED,
        "on 2 samples the loss 'loss' is no number, its shape is [2]",
    )
    cluster = build_cluster(cluster_preset("cpu-local"), 1)
    request = Request(
        path, cluster, DataParallel(), OneForwardOneBackward(), batch_size=4, micro_batches=1
    )
    with pytest.raises(ModelError, match=r"the loss 'loss' has shape \[4\] for 4 samples"):
        make_plan(request)
