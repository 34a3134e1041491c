"""Documents of autopipe in JSON files: plans, schedules, measured costs, manifests, checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from autopipe.ir.codec import Record
from autopipe.ir.errors import ConfigurationError


class JsonRecord(Record):
    """A value of the JSON document in `file`."""

    __slots__ = ("file",)
    is_plain = True

    def __init__(self, value: Any, file: str, parent: JsonRecord | None = None, key: str | int = "") -> None:
        self.value, self.file, self.parent, self.key = value, file, parent, key

    @property
    def display(self) -> str:
        text = json.dumps(self.value, default=str)
        return text if len(text) <= 40 else text[:37] + "..."

    def child(self, value: Any, key: str | int) -> JsonRecord:
        return JsonRecord(value, self.file, self, key)

    def error(self, message: str, hint: str = "") -> ConfigurationError:
        return ConfigurationError(message, hint=hint, where=self.file)

    def refusal(self, expected: str) -> ConfigurationError:
        return self.error(f"{self.path or 'the document'} is {self.display}", f"expected {expected}")

    def lacks(self, key: str, hint: Any) -> ConfigurationError:
        return self.error(f"{self.child(None, key).path} is missing", "write the file anew")


def read_record(path: Path, form: str) -> JsonRecord:
    """The JSON document in `path`, an object whose `format` is `form`. Raises ConfigurationError for a file that cannot
    be read, is not JSON, or has another format."""
    where = str(path)

    def refuse_constant(text: str) -> NoReturn:
        raise ValueError(f"{text} is no number")

    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse_constant)
    except OSError as error:
        raise ConfigurationError(f"cannot read the file: {error.strerror}", where=where) from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"not JSON: {error}", where=where) from error
    record = JsonRecord(document, where)
    found = record.get("format", str)
    if found != form:
        raise record.error(f"the format is {found!r}", f"this autopipe reads {form!r}; write the file anew")
    return record


def record_text(form: dict[str, object]) -> str:
    """The document as JSON, an entry of the outer object a line: compact files, and differences that can be read."""
    lines = [f"{json.dumps(key)}: {_value_text(value)}" for key, value in form.items()]
    return "{" + ",\n ".join(lines) + "}\n"


def _value_text(value: object) -> str:
    """A value as JSON. What a list holds many times is worked out once: devices that do the same share their tasks."""
    if not isinstance(value, list | tuple):
        return json.dumps(value, allow_nan=False)
    texts = {key: json.dumps(entry, allow_nan=False) for key, entry in {id(each): each for each in value}.items()}
    return "[" + ", ".join(texts[id(each)] for each in value) + "]"
