"""What a folder of checkpoints holds, and whether a run may save there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autopipe.backends.torch.checkpoint import (
    FolderLock,
    check_can_save,
    check_has_no_checkpoints,
    check_not_in_use,
    commit_checkpoint,
    committed_steps,
    remove_leftovers,
    remove_old_checkpoints,
)
from autopipe.ir.errors import ConfigurationError

NOBODY = 65534
"""Number of the user without rights."""
OTHERS = ("notes", "step_00000003.tmp-1-ab", "step_7", "step_00000009.tmp-old")


def test_only_committed_ones_count(tmp_path: Path) -> None:
    for name in (*OTHERS, "step_00000012", "step_123456789"):
        (tmp_path / name).mkdir()
    assert committed_steps(tmp_path) == [12, 123456789]
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "notes",
        "step_7",
        "step_00000012",
        "step_123456789",
    }


def test_a_folder_that_can_be_made_is_left_as_it_was(tmp_path: Path) -> None:
    check_can_save(tmp_path)
    check_can_save(tmp_path / "new" / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_nothing_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for folder in (tmp_path / "link", tmp_path / "link" / "run"):
        with pytest.raises(ConfigurationError, match="link is a link to nothing"):
            check_can_save(folder)


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    """In a process without root's rights, which no permission binds."""
    tmp_path.chmod(0o555)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if os.getuid() == 0:
                os.setuid(NOBODY)
            check_can_save(tmp_path / "run")
        except ConfigurationError as error:
            status = 0 if error.message.endswith("cannot be written to: Permission denied") else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_lock_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(ConfigurationError, match="lock cannot be opened: Is a directory"):
        check_not_in_use(tmp_path)


def test_a_run_that_starts_anew_needs_a_folder_without_checkpoints(tmp_path: Path) -> None:
    check_has_no_checkpoints(tmp_path / "none")
    for name in OTHERS:
        (tmp_path / name).mkdir()
    check_has_no_checkpoints(tmp_path)
    (tmp_path / "step_00000012").mkdir()
    with pytest.raises(ConfigurationError, match="contains a checkpoint after 12 steps") as caught:
        check_has_no_checkpoints(tmp_path)
    assert "--resume" in caught.value.hint


def test_without_locks_of_the_file_system_nothing_is_said_to_be_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", unknown)
    lock = FolderLock(tmp_path)
    assert lock.held is False
    lock.release()


def test_a_folder_that_a_run_holds_is_refused_to_one_that_starts_anew(tmp_path: Path) -> None:
    check_not_in_use(tmp_path)
    assert not list(tmp_path.iterdir()), "a check writes nothing"
    lock = FolderLock(tmp_path)
    with pytest.raises(ConfigurationError, match="another run is writing checkpoints"):
        check_not_in_use(tmp_path)
    lock.release()
    check_not_in_use(tmp_path)


def test_a_folder_with_checkpoints_is_that_of_the_run_that_saved_them(tmp_path: Path) -> None:
    first = FolderLock(tmp_path)
    first.claim("one")
    (tmp_path / "step_00000002").mkdir()
    first.claim("one")
    first.release()
    later = FolderLock(tmp_path)
    with pytest.raises(ConfigurationError, match="contains a checkpoint after 2 steps"):
        later.claim("another")
    later.claim("one")


@pytest.mark.parametrize("extra", ["notes.txt", "own/weights.bin"])
def test_a_checkpoint_with_files_of_others_is_never_removed(tmp_path: Path, extra: str) -> None:
    for step in (1, 2, 3, 4):
        folder = tmp_path / f"step_{step:08d}"
        folder.mkdir()
        (folder / "rank_00000.safetensors").write_text("weights")
        (folder / "manifest.json").write_text("{}")
    for name in ("step_00000001", "step_00000009.tmp-crashed"):
        (tmp_path / name / extra).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / extra).write_text("mine")
    (tmp_path / "step_00000008.tmp-crashed").mkdir()
    remove_leftovers(tmp_path)
    remove_old_checkpoints(tmp_path, 1)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["step_00000001", "step_00000004", "step_00000009.tmp-crashed"]
    temporary = tmp_path / "step_00000001.tmp-again"
    temporary.mkdir()
    commit_checkpoint(temporary, "{}")
    assert [path.read_text() for path in tmp_path.glob(f"step_00000001.kept-*/{extra}")] == ["mine"]
