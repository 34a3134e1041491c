"""A run on one GPU, and the folder that is prepared for it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autopipe.cli.output import Output
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.output_kinds import check_writable
from benchmarks.cuda.fork_server import ForkServer
from benchmarks.cuda.processes import environment_of_python
from benchmarks.cuda.programs import Prepared, open_prepared, prepare
from benchmarks.cuda.rows import Rows
from benchmarks.cuda.session import Session

_SHOWN = 400
"""Maximum number of characters of a row that a line shows; the file has all."""


def make_folder(folder: Path, device: str, tiny: bool, note: Callable[[str], None]) -> Prepared:
    """Make the models, plans and programs of all rows in `folder`."""
    return prepare(folder, Rows(device, tiny).programs(), tiny, note)


def run_rows(
    seconds: float,
    prepared: Path | None,
    only: tuple[str, ...],
    device: str,
    tiny: bool,
    file: Path,
    output: Output,
) -> list[dict[str, Any]]:
    """Run the rows of all groups, or of those in `only`, within `seconds`, and return what each
    found.

    Raises ConfigurationError if the prepared folder cannot be read, if a group is unknown, or if
    there is no device.
    """
    check_writable(file)
    rows = Rows(device, tiny)

    def show(row: Mapping[str, Any]) -> None:
        output.record(row)
        words = [f"{name} {value}" for name, value in row.items() if name not in ("group", "row")]
        output.note(f"{row['row']}: {', '.join(words)}"[:_SHOWN])

    with tempfile.TemporaryDirectory(prefix="autopipe-cuda-") as name:
        scratch = Path(name)
        facts = {
            "device": device,
            "tiny": tiny,
            "seconds": seconds,
            "prepared": prepared is not None,
        }
        with Session(seconds, file, facts, show) as session:
            if prepared is None:
                folder = make_folder(scratch / "prepared", device, tiny, output.detail)
            else:
                folder = open_prepared(prepared.absolute(), tiny)
            phases = rows.phases(folder, session, scratch)
            names = [group.name for phase in phases for group in phase]
            if unknown := sorted(set(only).difference(names)):
                raise ConfigurationError(
                    f"there is no group {unknown[0]!r}", f"groups are {', '.join(names)}", "--only"
                )
            session.processes.server = ForkServer.start(environment_of_python(), scratch)
            chosen = (*only, "describe") if only else names
            session.run([[group for group in phase if group.name in chosen] for phase in phases])
    if error := session.found("describe").get("error"):
        raise ConfigurationError(
            f"nothing runs on the device: {error}", "use --tiny --device cpu", f"--device {device}"
        )
    return session.rows
