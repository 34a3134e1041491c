"""Files and folders that are replaced: an interruption or a kill at any renaming leaves the old or
the new ones.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from autopipe.ir import output_files
from autopipe.ir.output_files import (
    add_digests,
    exchange_paths,
    file_of_interrupted_write,
    keep_folder,
    move_into_place,
    open_descriptor,
    open_replacement_file,
    open_replacement_files,
    open_replacement_folder,
    read_digests,
    remove_abandoned_folders,
    scratch_folder,
    temporary_folder,
)

HEAD = "head.json"
NAMES = ("a.txt", "b.txt", HEAD)


def write_set(folder: Path, version: str) -> None:
    """Write three files of one version, which the last one seals."""
    for name in NAMES[:-1]:
        (folder / name).write_text(f"{version} of {name}")
    (folder / HEAD).write_text(json.dumps({"version": version}))
    add_digests(folder, HEAD)


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def expected(tmp_path: Path, version: str) -> dict[str, str]:
    folder = tmp_path / f"expected {version}"
    folder.mkdir()
    write_set(folder, version)
    return contents(folder)


PRELUDE = """
import os, signal, sys
from pathlib import Path
from autopipe.ir import output_files
from tests.ir.test_output_files import HEAD, write_set

left = [int(sys.argv[1])]

def before(function):
    def killing(*arguments):
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return function(*arguments)
    return killing

os.replace, os.rename = before(os.replace), before(os.rename)
Path.rename = before(Path.rename)
output_files.exchange_paths = before(output_files.exchange_paths)
"""


def killed_at(number: int, body: str) -> bool:
    """Run `body` in a process that is killed before renaming number `number`; return True if it
    came that far.
    """
    script = PRELUDE + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", script, str(number)], capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


def test_a_kill_at_any_renaming_of_files_leaves_a_set_or_a_mixture_that_is_named(
    tmp_path: Path,
) -> None:
    old = expected(tmp_path, "old")
    new = expected(tmp_path, "new")
    found = []
    for number in itertools.count():
        folder = tmp_path / str(number)
        folder.mkdir()
        write_set(folder, "old")
        (folder / "notes.txt").write_text("mine")
        body = f"""
        with output_files.open_replacement_files(Path({str(folder)!r}), HEAD, ".new-") as made:
            write_set(made, "new")
        """
        was_killed = killed_at(number, body)
        own = {name: (folder / name).read_text() for name in NAMES}
        mixed = file_of_interrupted_write(
            folder, read_digests(folder / HEAD), folder.glob(f".new-*/{HEAD}")
        )
        assert (mixed is None) is (own in (old, new))
        found.append(None if mixed is None else mixed.name)
        with open_replacement_files(folder, HEAD, ".new-") as made:
            write_set(made, "new")
        assert contents(folder) == {**new, "notes.txt": "mine"}
        if not was_killed:
            break
    assert found == [None, "a.txt", "a.txt", None]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_kill_at_any_renaming_of_a_folder_leaves_the_old_or_the_new_one(
    tmp_path: Path, can_exchange: bool
) -> None:
    old = expected(tmp_path, "old")
    new = expected(tmp_path, "new")
    found = []
    for number in itertools.count():
        folder = tmp_path / str(number)
        folder.mkdir()
        write_set(folder, "old")
        body = f"""
        if not {can_exchange}:
            output_files.exchange_paths = lambda one, other: False
        with output_files.open_replacement_folder(Path({str(folder)!r}), HEAD) as made:
            write_set(made, "new")
        """
        was_killed = killed_at(number, body)
        mixed = file_of_interrupted_write(
            folder, read_digests(folder / HEAD), tmp_path.glob(f".{folder.name}.*/made/{HEAD}")
        )
        assert (mixed is None) is (contents(folder) in (old, new))
        found.append(None if mixed is None else mixed.name)
        if not was_killed:
            break
    assert contents(folder) == new
    assert found == ([None, None] if can_exchange else [None, "a.txt", "a.txt", None])


def interrupting(function: Callable[..., object], number: int, late: bool) -> Callable[..., object]:
    """Return `function` with a Ctrl-C at call `number`, before or after what it does."""
    left = [number]

    def interrupted(*arguments: object) -> object:
        left[0] -= 1
        if left[0] == -1 and not late:
            raise KeyboardInterrupt
        found = function(*arguments)
        if left[0] == -1:
            raise KeyboardInterrupt
        return found

    return interrupted


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("number", range(3))
def test_an_interruption_of_the_renaming_waits_for_the_last_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, late: bool
) -> None:
    new = expected(tmp_path, "new")
    folder = tmp_path / "folder"
    folder.mkdir()
    write_set(folder, "old")
    monkeypatch.setattr(os, "replace", interrupting(os.replace, number, late))
    with pytest.raises(KeyboardInterrupt), open_replacement_files(folder, HEAD, ".new-") as made:
        write_set(made, "new")
    assert contents(folder) == new


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("exists", [True, False])
def test_an_interruption_of_the_exchange_leaves_a_whole_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool, can_exchange: bool, exists: bool
) -> None:
    old = expected(tmp_path, "old")
    new = expected(tmp_path, "new")
    folder = tmp_path / "folder"
    if exists:
        folder.mkdir()
        write_set(folder, "old")
    if not can_exchange:
        monkeypatch.setattr(output_files, "exchange_paths", lambda one, other: False)
    monkeypatch.setattr(os, "replace", interrupting(os.replace, 1, late))
    monkeypatch.setattr(
        output_files,
        "exchange_paths",
        interrupting(output_files.exchange_paths, 0, late and can_exchange),
    )
    monkeypatch.setattr(Path, "rename", interrupting(Path.rename, 0, late))
    with pytest.raises(KeyboardInterrupt), open_replacement_folder(folder, HEAD) as made:
        write_set(made, "new")
    assert (contents(folder) if folder.exists() else None) in (new, old if exists else None)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("late", [False, True])
def test_an_interruption_of_a_files_renaming_leaves_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(os, "replace", interrupting(os.replace, 0, late))
    with pytest.raises(KeyboardInterrupt), open_replacement_file(path) as file:
        file.write(b"new")
    assert contents(tmp_path) == {"file": "new" if late else "old"}


def test_two_folders_are_exchanged(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not exchange_paths(tmp_path / "one", tmp_path / "other"):
        pytest.skip("this file system cannot exchange folders")
    assert sorted(contents(tmp_path)) == ["one/other", "other/one"]
    with pytest.raises(FileNotFoundError):
        exchange_paths(tmp_path / "one", tmp_path / "absent")


def test_links_are_followed_and_permissions_kept(tmp_path: Path) -> None:
    path = tmp_path / "below/real"
    link = tmp_path / "link"
    path.parent.mkdir()
    path.write_text("old")
    path.chmod(0o600)
    link.symlink_to("below/real")
    with open_replacement_file(link) as file:
        file.write(b"new")
    assert link.is_symlink() and path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    made = path.with_name("made")
    made.write_text("newer")
    move_into_place(made, link)
    assert link.is_symlink() and path.read_text() == "newer" and not made.exists()


def test_pipes_and_devices_are_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        with open_replacement_file(pipe) as file:
            file.write(b"through the pipe")
        assert reader.communicate()[0] == b"through the pipe"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    null = Path(os.devnull)
    with open_replacement_file(null) as file:
        file.write(b"nothing")
    assert stat.S_ISCHR(null.stat().st_mode)
    made = tmp_path / "made"
    made.write_text("nothing")
    move_into_place(made, null)
    assert stat.S_ISCHR(null.stat().st_mode) and not made.exists()


def test_what_is_written_to_an_open_file_follows_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "of the shell"
    link = tmp_path / "link"
    with path.open("wb") as shell:
        shell.write(b"first, ")
        shell.flush()
        link.symlink_to(f"/dev/fd/{shell.fileno()}")
        for place in (link, Path(f"/proc/self/fd/{shell.fileno()}")):
            with open_replacement_file(place) as file:
                file.write(b"second, ")
        made = tmp_path / "made"
        made.write_text("third")
        move_into_place(made, link)
    assert path.read_text() == "first, second, second, third"
    assert open_descriptor(Path("/dev/stdout")) == 1 and open_descriptor(path) is None


def test_a_device_without_room_is_named() -> None:
    with (
        pytest.raises(OSError, match="No space left on device: '/dev/full'"),
        open_replacement_file(Path("/dev/full")) as file,
    ):
        file.write(b"x")


def test_folders_of_dead_processes_are_removed_and_no_others(tmp_path: Path) -> None:
    body = f"""
    with output_files.temporary_folder("mine-", Path({str(tmp_path)!r})) as folder:
        (folder / "large").write_text("left behind")
        os.replace("absent", "absent")
    """
    assert killed_at(0, body)
    (tmp_path / "mine-but-not-autopipes").mkdir()
    (tmp_path / "mine-but-not-autopipes/notes.txt").write_text("keep me")
    with temporary_folder("mine-", tmp_path) as kept:
        keep_folder(kept)
    with temporary_folder("mine-", tmp_path) as held:
        assert len(list(tmp_path.iterdir())) == 4
        remove_abandoned_folders(tmp_path, "mine-")
        assert set(tmp_path.iterdir()) == {tmp_path / "mine-but-not-autopipes", kept, held}
    remove_abandoned_folders(tmp_path / "absent", "mine-")
    assert not held.exists()


def test_a_temporary_folder_of_a_killed_process_is_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f"""
    import tempfile
    tempfile.tempdir = {str(tmp_path)!r}
    with output_files.scratch_folder("launch") as folder:
        (folder / "report.jsonl").write_text("left behind")
        os.replace("absent", "absent")
    """
    assert killed_at(0, body)
    (left,) = tmp_path.glob("autopipe-launch-*/report.jsonl")
    (tmp_path / "autopipe-notes").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_folder("logs") as logs:
        assert not left.parent.exists() and logs.parent == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["autopipe-notes"]


def test_a_seal_tells_edited_files(tmp_path: Path) -> None:
    write_set(tmp_path, "old")
    found = read_digests(tmp_path / HEAD)
    assert found is not None and all(found.holds(tmp_path / name) for name in NAMES)
    for name in NAMES:
        path = tmp_path / name
        text = path.read_text()
        path.write_text(text.replace("old", "own"))
        assert not found.holds(path)
        path.write_text(text)
    (tmp_path / HEAD).write_text(json.dumps(json.loads((tmp_path / HEAD).read_text()), indent=4))
    assert read_digests(tmp_path / HEAD) is None
    assert read_digests(tmp_path / "absent") is None
