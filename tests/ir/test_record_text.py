from __future__ import annotations

import json

from autopipe.ir.files import document_text


def test_lists_that_are_shared_are_written_as_often_as_they_stand():
    shared = [[0, 1.5], [1, 2.5]]
    own = [[2, None]]
    form = {"format": "x/1", "devices": 3, "tasks": (shared, own, shared), "none": []}
    plain = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in form.items()]
    assert document_text(form) == "{" + ",\n ".join(plain) + "}\n"
