"""YAML's traps, each refused in one line with its place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autopipe.configs.yaml_source import (
    MAX_FILE_BYTES,
    Dumper,
    Entry,
    read_file,
    read_setting,
    read_text,
)
from autopipe.ir.errors import ConfigurationError

REFUSED = {
    "duplicate key": (
        "seed: 1\nseed: 2\n",
        "f.yaml:2: the key 'seed' occurs twice (first in line 1)",
    ),
    "duplicate key, quoted": ('a: 1\nb: 1\n"a": 2\n', "f.yaml:3: the key 'a' occurs twice"),
    "duplicate key within": ("o:\n  lr: 1\n  lr: 2\n", "f.yaml:3: the key 'lr' occurs twice"),
    "boolean key": ("seed: 1\nno: 2\n", "f.yaml:2: YAML does not read the key no as text"),
    "number key": ("1: 2\n", "f.yaml:1: YAML does not read the key 1 as text"),
    "empty key": ("?\n: 2\n", "f.yaml:1: YAML does not read the key"),
    "list as key": ("? [a]\n: 2\n", "f.yaml:1: a key is a list or a mapping"),
    "merge key": ("<<: {a: 1}\n", "f.yaml:1: YAML does not read the key << as text"),
    "alias": ("a: &x [1]\nb: *x\n", "f.yaml:1: anchors and aliases are not supported"),
    "dangling alias": ("a: *x\n", "f.yaml:1: anchors and aliases are not supported"),
    "tag": ("a: 1\nb: !!python/object/apply:os.system [ls]\n", "f.yaml:2: the tag"),
    "harmless tag": ("a: !!str 1\n", "f.yaml:1: the tag"),
    "local tag": ("a: !x 1\n", "f.yaml:1: the tag '!x' is not supported"),
    "not a number": ("a: .nan\n", "f.yaml:1: .nan is not a finite number"),
    "infinity": ("a: 1\nb: [-.inf]\n", "f.yaml:2: -.inf is not a finite number"),
    "overflow": ("a: 1.0e+999\n", "f.yaml:1: 1.0e+999 is not a finite number"),
    "large integer": ("a: " + "9" * 5000 + "\n", "f.yaml:1: the number is too large"),
    "base 8": ("a: 010\n", "f.yaml:1: YAML does not read 010 as a decimal number"),
    "base 16": ("a: 0x10\n", "f.yaml:1: YAML does not read 0x10 as a decimal number"),
    "base 60": ("a: 1:30\n", "f.yaml:1: YAML does not read 1:30 as a decimal number"),
    "base 60 with a fraction": ("a: 1:30.5\n", "f.yaml:1: YAML reads 1:30.5 in base 60"),
    "several documents": ("a: 1\n---\nb: 2\n", "f.yaml:2: several documents where one is expected"),
    "list": ("- 1\n", "f.yaml:1: the document is not a mapping"),
    "scalar": ("\n\nhello\n", "f.yaml:3: the document is not a mapping"),
    "empty": ("", "f.yaml: the file is empty"),
    "comment alone": ("# nothing\n", "f.yaml: the file is empty"),
    "deep": (
        "a: " + "[" * 100 + "]" * 100 + "\n",
        "f.yaml:1: the YAML is nested deeper than 32 levels",
    ),
    "very deep": ("a: " + "[" * 50000, "f.yaml:1: the YAML is nested deeper than 32 levels"),
    "syntax": ("a: 1\nb: [1\n", "f.yaml:3: not YAML"),
    "tab": ("a:\n\tb: 1\n", "f.yaml:2: not YAML"),
    "control character": ("a: 1\nb: \x07\n", "f.yaml:2: the text contains a control character"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    text, expected = REFUSED[case]
    with pytest.raises(ConfigurationError) as caught:
        read_text(text, "f.yaml")
    message = str(caught.value)
    assert message.startswith(expected)
    assert "\n" not in message and len(message) < 300


def test_an_alias_bomb_is_refused_before_it_grows() -> None:
    lines = ["a0: &a0 [x, x]"] + [
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)
    ]
    with pytest.raises(ConfigurationError, match="anchors and aliases"):
        read_text("\n".join(lines), "f.yaml")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"absent\.yaml: the file cannot be read: No such file"
    ):
        read_file(tmp_path / "absent.yaml")
    with pytest.raises(ConfigurationError, match="the file cannot be read: Is a directory"):
        read_file(tmp_path)
    with pytest.raises(ConfigurationError, match="the file cannot be read"):
        read_file("a\0b")
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"a: 1\nname: caf\xe9\n")
    with pytest.raises(ConfigurationError, match=r"latin\.yaml:2: the file is not UTF-8"):
        read_file(latin)
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigurationError, match="too large"):
        read_file(large)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(b"\xef\xbb\xbfseed: 1\n")
    assert read_file(path).plain() == {"seed": 1}


def test_entries_know_their_lines_and_values() -> None:
    document = read_text("a: 1\nb:\n  - yes\n  - {c: x, d: 1.5e+1}\ne: null\n", "f.yaml")
    assert document.plain() == {"a": 1, "b": [True, {"c": "x", "d": 15.0}], "e": None}
    assert isinstance(document.value, dict)
    items = document.value["b"].value
    assert isinstance(items, tuple)
    assert [str(item.place) for item in items] == ["f.yaml:3", "f.yaml:4"]
    assert str(document.value["b"].place) == "f.yaml:2"


def test_a_setting_is_read_as_yaml_and_named_in_errors() -> None:
    assert read_setting("{a: [1, x]}", "--set").plain() == {"a": [1, "x"]}
    assert read_setting("", "--set").plain() is None
    with pytest.raises(ConfigurationError, match=re.escape("--set a=[1: not YAML")):
        read_setting("[1", "--set a=[1")


TEXT = st.text(max_size=12)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=15,
)


@given(st.dictionaries(TEXT, VALUES, min_size=1, max_size=4))
def test_what_yaml_writes_is_read_back(value: dict[str, object]) -> None:
    entry: Entry = read_text(yaml.dump(value, Dumper=Dumper), "f.yaml")
    assert entry.plain() == value


@given(st.text(alphabet="ab:-[]{}&*!|>'\"#%@`?, \n\t012.e~<=\\\x00\x85\ufeff", max_size=60))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    try:
        entry = read_text(text, "f.yaml")
    except ConfigurationError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(entry.value, dict)
