"""Exported models, made once however many workers run the tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.passes.frontend.exports import export


@pytest.fixture(scope="session")
def exported(
    tmp_path_factory: pytest.TempPathFactory, worker_id: str
) -> Callable[[str, str, bool], Path]:
    """`exported(model, exporter, dynamic)` is the path of that export."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "exports"
    folder.mkdir(exist_ok=True)
    return lambda name, exporter, dynamic: export(name, exporter, dynamic, folder)
