"""Documents that outlive a run: read as written, forgotten when not used, and no trouble when they
are damaged.
"""

from __future__ import annotations

import os
import threading

import pytest

from autopipe.passes.auto.plan_cache import JsonStore, cache_folder

FORM = "autopipe.test/1"


def document(number: int, size: int = 0) -> dict[str, object]:
    return {"format": FORM, "number": number, "filling": "x" * size}


def number_of(store: JsonStore, name: str) -> int | None:
    record = store.read(name, FORM)
    return None if record is None else record.get("number", int)


def test_what_is_written_is_read(tmp_path):
    store = JsonStore(tmp_path / "made" / "here")
    assert number_of(store, "a") is None
    store.write("a", document(1))
    store.write("a", document(2))
    assert number_of(store, "a") == 2
    assert store.read("a", "autopipe.other/1") is None, "another format"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 3}', '{"format": "autopipe.test/0"}', "\x00\xff"]
)
def test_a_damaged_document_is_none(tmp_path, text):
    store = JsonStore(tmp_path)
    store.write("a", document(1))
    (tmp_path / "a.json").write_bytes(text.encode("latin-1"))
    assert store.read("a", FORM) is None


def test_what_was_not_used_for_longest_makes_room(tmp_path):
    store = JsonStore(tmp_path, most_bytes=3500)
    (tmp_path / "notes.json").write_text('{"mine": true}' + " " * 5000)
    os.utime(tmp_path / "notes.json", (0, 0))
    for number in range(3):
        store.write(str(number), document(number, 1000))
        os.utime(tmp_path / f"{number}.json", (number, number))
    assert number_of(store, "0") == 0  # It is the last that was used now.
    store.write("3", document(3, 1000))
    assert [number_of(store, str(number)) for number in range(4)] == [0, None, 2, 3]
    assert (tmp_path / "notes.json").exists()


def test_a_folder_that_cannot_be_is_as_good_as_none(tmp_path):
    (tmp_path / "file").write_text("in the way")
    store = JsonStore(tmp_path / "file" / "answers")
    store.write("a", document(1))
    assert store.read("a", FORM) is None


def test_runs_share_a_folder(tmp_path):
    store = JsonStore(tmp_path, most_bytes=5000)
    seen: list[int | None] = []

    def run(own: int) -> None:
        for turn in range(30):
            store.write("shared", document(own, 500))
            store.write(f"{own} {turn}", document(own, 500))
            seen.append(number_of(store, "shared"))

    threads = [threading.Thread(target=run, args=(own,)) for own in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(seen) == 120
    assert set(seen) <= {None, 0, 1, 2, 3}
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".json"], (
        "nothing half-written stays"
    )


def test_where_documents_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOPIPE_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("AUTOPIPE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "autopipe"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "autopipe"
