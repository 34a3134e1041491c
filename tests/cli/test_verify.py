"""What `autopipe verify` prints: a line a check, whose long names stay whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from autopipe.backends.torch.runtime import manifest
from autopipe.backends.torch.verification import Difference
from autopipe.cli import verification
from autopipe.cli.main import main
from autopipe.cli.verification import Check

LONG = "/transformer/h.11/attn/c_attn/weight_that_is_called_by_a_name_of_more_than_eighty_characters_in_all"


@pytest.fixture
def gradients_apart_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Makes `verify` find this difference without running anything."""

    def prepare(relative: float) -> None:
        def run(self: object, advance: Callable[[], None]) -> Iterator[Check]:
            yield Check("loss of the ranks", "one device", 1, Difference("loss", 0.0))
            yield Check("gradients of the ranks", "one device", 68, Difference(LONG, relative))

        monkeypatch.setattr(verification.Verification, "run", run)
        monkeypatch.setattr(manifest, "read_manifest", lambda folder: SimpleNamespace(precision="fp32"))

    return prepare


def test_equal_runs(
    gradients_apart_by: Callable[[float], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gradients_apart_by(6.9e-8)
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "compared                with        tensors  difference  worst",
        "loss of the ranks       one device        1    0.00e+00  loss",
        f"gradients of the ranks  one device       68    6.90e-08  {LONG}",
        "equal: the limit is 1e-05",
    ]


def test_runs_that_differ_name_the_worst_tensor(
    gradients_apart_by: Callable[[float], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gradients_apart_by(2e-3)
    assert main(["verify", str(tmp_path)]) == 5
    shown = capsys.readouterr()
    assert shown.out.endswith("not equal: the limit is 1e-05\n")
    assert shown.err == f"error: {LONG!r}: gradients of the ranks: 2.00e-03 away from one device (limit 1e-05)\n"


def test_a_tolerance_of_zero_is_taken_at_its_word(
    gradients_apart_by: Callable[[float], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gradients_apart_by(6.9e-8)
    assert main(["verify", str(tmp_path), "--tolerance", "0"]) == 5
    assert "not equal: the limit is 0\n" in capsys.readouterr().out


def test_a_plan_is_told_from_its_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text("{}")
    assert main(["verify", str(tmp_path)]) == 2
    hint = capsys.readouterr().err.splitlines()[1]
    assert hint == f"hint: it is a plan: autopipe codegen {tmp_path} makes {tmp_path / 'program'}"
