"""How the loss of a batch depends on the losses of its parts: what the analysis says, and what the numbers say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autopipe.passes.analysis.batch_forms import LossKind
from autopipe.passes.analysis.loss_division import form_of
from autopipe.passes.frontend import read_model
from tests.passes.loss_cases import LOSSES, LossCase, batch, exported, loss_of


def measured_kind(path: Path) -> LossKind:
    """Return the kind of the loss by its values for two batches of equal size, and for both together."""
    parts = [batch(4, seed) for seed in (1, 2)]
    first, second = (loss_of(path, part) for part in parts)
    together = loss_of(path, {name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
    if np.isclose(together, (first + second) / 2, rtol=1e-5):
        return LossKind.MEAN
    return LossKind.SUM if np.isclose(together, first + second, rtol=1e-5) else LossKind.MIXED


@pytest.mark.parametrize("case", LOSSES, ids=lambda case: case.name)
def test_the_analysis_says_what_the_numbers_say(case: LossCase, tmp_path: Path) -> None:
    path = exported(case, tmp_path)
    model = read_model(path)
    form = form_of(model, lambda samples: read_model(path, batch=samples))
    assert form is not None
    assert (form.kind, measured_kind(path)) == (case.kind, case.kind), str(form)
    assert bool(form.reason) == (case.kind is LossKind.MIXED)
