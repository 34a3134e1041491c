"""Writing and removal of files and folders without loss of a file that autopipe did not write.

A file or a folder appears completely or not at all. If several files belong together, one of them,
the head, contains the SHA-256 digests of all of them and is replaced last. A file whose content
differs from its digest was edited after autopipe wrote it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

_DIGESTS_START: Final = ',\n "sha256": '
"""Text before the digests in the head of a folder, the JSON file that contains the digests of all
files of the folder. The digests are the last member of its JSON object.
"""
_AT_CURRENT_FOLDER: Final = -100
"""Linux's `AT_FDCWD`: relative paths refer to the working folder."""
_RENAME_EXCHANGE: Final = 2
"""`RENAME_EXCHANGE`, the flag of Linux's renameat2 that exchanges two paths."""
_EXCHANGE_UNSUPPORTED: Final = frozenset(
    {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}
)
"""Error numbers of a kernel or a file system that cannot exchange two paths."""


@contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Context manager that sets the file name of an OSError to `path` if the error has no file
    name, for example because the disk is full, or if it names a temporary file of
    `open_replacement_file`.
    """
    try:
        yield
    except OSError as error:
        is_temporary = error.filename is not None and Path(str(error.filename)).name.startswith(
            f".{path.name}."
        )
        if error.errno is not None and (error.filename is None or is_temporary):
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


@contextmanager
def open_replacement_file(path: Path) -> Iterator[IO[bytes]]:
    """Context manager that yields a temporary file to write, which replaces `path` at the end.
    After an error, it is removed instead.

    If `path` is a link, the file that it refers to is replaced. The permissions of the replaced
    file are kept. If `path` is a device, a pipe or an open descriptor, the bytes are written to it
    directly. Raise OSError with the name of the file if it cannot be written.
    """
    with add_path_to_errors(path):
        descriptor = open_descriptor(path)
        if descriptor is not None:
            with open(os.dup(descriptor), "wb") as stream:
                yield stream
            return
        path = follow_links(path)
        mode = _mode_of(path)
        if mode is not None and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            with open(path, "wb") as device:
                yield device
            return
        handle, made = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(handle, "wb") as file:
                yield file
            os.chmod(made, 0o644 if mode is None else stat.S_IMODE(mode))
            os.replace(made, path)
        except BaseException:
            # `made` does not exist if an interruption came after the file was renamed to `path`.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(made)
            raise


_DESCRIPTOR_PATH: Final = re.compile(r"(?:/dev/fd|/proc/(?:self|thread-self|\d+)/fd)/(\d+)")
_MAX_LINKS: Final = 40
"""Maximum length of a chain of symbolic links, equal to Linux's limit."""


def open_descriptor(path: Path) -> int | None:
    """Return the file descriptor to which a path such as /dev/stdout or /dev/fd/3 refers; None for
    other paths.
    """
    place = os.path.abspath(path)
    for _ in range(_MAX_LINKS):
        match = _DESCRIPTOR_PATH.fullmatch(place)
        if match is not None:
            return int(match[1])
        if not os.path.islink(place):
            return None
        place = os.path.normpath(os.path.join(os.path.dirname(place), os.readlink(place)))
    return None


def follow_links(path: Path) -> Path:
    """Return the absolute path of the file to which `path` refers. If `path` is not a link, links
    among its parent folders are not followed.
    """
    return Path(os.path.realpath(path)) if path.is_symlink() else path.absolute()


def _mode_of(path: Path) -> int | None:
    """Return the file type and permissions (`st_mode`) of the file at `path`, or None if the path
    does not exist.
    """
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def move_into_place(made: Path, path: Path) -> None:
    """Move the finished file `made` to `path`, by the rules of `open_replacement_file`. Both must
    be in one file system, unless `path` is a device, a pipe or an open descriptor, to which the
    bytes are copied.
    """
    if open_descriptor(path) is not None:
        with open(made, "rb") as source, open_replacement_file(path) as stream:
            shutil.copyfileobj(source, stream)
        os.unlink(made)
        return
    path = follow_links(path)
    mode = _mode_of(path)
    with add_path_to_errors(path):
        if mode is None or stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            os.replace(made, path)
            return
        with open(made, "rb") as source, open(path, "wb") as device:
            shutil.copyfileobj(source, device)
        os.unlink(made)


@contextmanager
def open_replacement_folder(folder: Path, head: str) -> Iterator[Path]:
    """Context manager that yields an empty temporary folder to fill, which replaces `folder` at the
    end. After an error, it is removed instead.

    At any moment, either the old or the new folder exists. If the file system cannot exchange two
    folders, the files are moved one by one, files called `head` last, so that
    `file_of_interrupted_write` can detect an interruption. The caller must check that the old
    folder contains no files of the user. Raise OSError if the folder cannot be written.
    """
    folder = Path(os.path.realpath(folder))
    with temporary_folder(f".{folder.name}.", folder.parent) as scratch:
        made = scratch / "made"
        made.mkdir()
        yield made
        if not folder.exists():
            made.rename(folder)
        elif not exchange_paths(made, folder):
            _move_files(made, folder, head)


def exchange_paths(one: Path, other: Path) -> bool:
    """Exchange two files or folders atomically. Return False if the system or the file system
    cannot do this.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    failed = renameat2(
        _AT_CURRENT_FOLDER,
        os.fsencode(one),
        _AT_CURRENT_FOLDER,
        os.fsencode(other),
        _RENAME_EXCHANGE,
    )
    if not failed:
        return True
    number = ctypes.get_errno()
    if number in _EXCHANGE_UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(other))


def _move_files(made: Path, folder: Path, head: str) -> None:
    """Move all files of the folder `made` into `folder`, files called `head` last, and then remove
    the other files of `folder`.
    """
    names = [path.relative_to(made) for path in sorted(made.rglob("*")) if not path.is_dir()]
    for parent in sorted({(folder / name).parent for name in names}):
        parent.mkdir(exist_ok=True)
    rename_all(
        [(made / name, folder / name) for name in sorted(names, key=lambda each: each.name == head)]
    )
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            # `rmdir` raises OSError if the folder still contains new files, and the folder remains.
            with contextlib.suppress(OSError):
                path.rmdir()
        elif path.relative_to(folder) not in names:
            path.unlink()


def rename_all(moves: Sequence[tuple[Path, Path]]) -> None:
    """Perform the renamings (source, target) in order. If Ctrl-C interrupts them, complete them
    before raising KeyboardInterrupt; a second Ctrl-C ends them at once.
    """
    interruption: KeyboardInterrupt | None = None
    for source, target in moves:
        try:
            os.replace(source, target)
        except KeyboardInterrupt as error:
            if interruption is not None:
                raise
            interruption = error
            if source.exists():
                os.replace(source, target)
    if interruption is not None:
        raise interruption


@contextmanager
def open_replacement_files(folder: Path, head: str, prefix: str) -> Iterator[Path]:
    """Context manager that yields an empty temporary folder to fill. At the end, its files replace
    the files of equal names in `folder`, the file `head` last. Other files of `folder` are not
    changed.

    The temporary folder is inside `folder`, and its name starts with `prefix`. If the process is
    killed while it renames files, the temporary folder remains, so that `file_of_interrupted_write`
    can detect the mixture of old and new files.
    """
    remove_abandoned_folders(folder, prefix)
    scratch, lock = _make_locked_folder(prefix, folder)
    has_started = False
    try:
        yield scratch
        names = sorted(
            set(os.listdir(scratch)) - {_MARKER_FILE}, key=lambda name: (name == head, name)
        )
        has_started = True
        rename_all([(scratch / name, follow_links(folder / name)) for name in names])
    finally:
        if not has_started or not (scratch / head).exists():
            shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


_MARKER_FILE: Final = ".autopipe-scratch"
"""Name of a file in each temporary folder of autopipe. A folder without this file is never removed.
"""


@contextmanager
def temporary_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Context manager that yields a new folder in `parent` (default: the system's folder for
    temporary files), and removes it at the end unless `keep_folder` was called.

    This process holds a lock on the folder until the end, so that `remove_abandoned_folders` can
    distinguish it from a folder whose process was killed.
    """
    path, lock = _make_locked_folder(prefix, parent)
    try:
        yield path
    finally:
        if (path / _MARKER_FILE).exists():
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


_TEMPORARY_PREFIX: Final = "autopipe-"


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """Context manager that yields a new temporary folder and removes it at the end. The temporary
    folders of killed autopipe processes are removed first. `purpose` becomes part of the folder's
    name.
    """
    remove_abandoned_folders(Path(tempfile.gettempdir()), _TEMPORARY_PREFIX)
    with temporary_folder(f"{_TEMPORARY_PREFIX}{purpose}-") as folder:
        yield folder


def keep_folder(folder: Path) -> None:
    """Keep a folder of `temporary_folder` or `scratch_folder`, for the user, instead of removing it
    at the end.
    """
    (folder / _MARKER_FILE).unlink()


def _make_locked_folder(prefix: str, parent: Path | None) -> tuple[Path, int]:
    """Return (path, descriptor) of a new folder. The open descriptor holds the lock of the
    folder.
    """
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            # The folder remains unlocked if the file system does not support locks.
            # `remove_abandoned_folders` cannot lock it either and does not remove it.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The marker file is created last, when the folder is locked. Other processes remove only
        # folders that have the marker and are not locked.
        (path / _MARKER_FILE).touch()
        return path, lock


def remove_abandoned_folders(parent: Path, *prefixes: str) -> None:
    """Remove the folders in `parent` whose names start with one of `prefixes` and whose processes
    ended without removing them.
    """
    try:
        names = [name for name in os.listdir(parent) if name.startswith(prefixes)]
    except OSError:
        return
    for name in names:
        path = parent / name
        if path.is_symlink() or not (path / _MARKER_FILE).is_file():
            continue
        # An error means that the folder is in use or belongs to another user, so it is not removed.
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(lock)


def digest_of(content: bytes) -> str:
    """Return the SHA-256 digest of a file's content."""
    return hashlib.sha256(content).hexdigest()


def add_digests(folder: Path, head: str) -> None:
    """Add the SHA-256 digests of all files directly in `folder` to the JSON object in its file
    `head`.
    """
    path = folder / head
    body = path.read_text(encoding="utf-8").rstrip().removesuffix("}").rstrip()
    names = [
        name
        for name in sorted(os.listdir(folder))
        if name not in (head, _MARKER_FILE) and (folder / name).is_file()
    ]
    digests = {name: digest_of((folder / name).read_bytes()) for name in names}
    digests[head] = digest_of(body.encode())
    path.write_text(body + _DIGESTS_START + FolderDigests(head, digests).text, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class FolderDigests:
    """SHA-256 digests of the files of a folder, by file name, as its file `head` states them."""

    head: str
    digests: Mapping[str, str]

    def holds(self, path: Path) -> bool:
        """Return True if the content of the file at `path` still has the digest for its name."""
        expected = self.digests.get(path.name)
        try:
            content = path.read_bytes()
        except OSError:
            return False
        if path.name == self.head:
            body, _, end = content.rpartition(_DIGESTS_START.encode())
            return expected == digest_of(body) and end == self.text.encode()
        return expected == digest_of(content)

    @property
    def text(self) -> str:
        """Text at the end of the head, the JSON file that contains the digests: the digests, and
        the closing brace of the file's JSON object.
        """
        return f"{json.dumps(self.digests)}}}\n"


def read_digests(path: Path) -> FolderDigests | None:
    """Return the digests in the head of a folder, the JSON file at `path` that contains the digests
    of all files of the folder. Return None if the file cannot be read or has no valid digests, for
    example because an earlier version of autopipe wrote it.
    """
    try:
        text = path.read_text(encoding="utf-8").rpartition(_DIGESTS_START)[2]
        digests = json.loads(text.rstrip().removesuffix("}"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(digests, dict) or path.name not in digests:
        return None
    return FolderDigests(path.name, digests)


def edited_files(paths: Iterable[Path], seals: Sequence[FolderDigests]) -> list[Path]:
    """Return the paths that exist and whose content has a digest in none of `seals`."""
    return [path for path in paths if path.exists() and not any(each.holds(path) for each in seals)]


def file_of_interrupted_write(
    folder: Path, own: FolderDigests | None, leftovers: Iterable[Path]
) -> Path | None:
    """Return a file of `folder` that a later command wrote before it was interrupted. The head of
    the folder, a JSON file with the digests of all files, does not describe such a file. Return
    None if there is none or if the head has no digests.

    `own` are the digests in the head of `folder`. `leftovers` are the heads that interrupted
    commands left in their temporary folders.
    """
    if own is None:
        return None
    for later in filter(None, map(read_digests, leftovers)):
        for name in sorted(later.digests):
            path = folder / name
            if name != own.head and path.exists() and later.holds(path) and not own.holds(path):
                return path
    return None
