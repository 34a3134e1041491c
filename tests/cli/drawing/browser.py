"""A page in a real browser without a window: what a script on it sees."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="neither chromium nor google-chrome is installed"
)

_SEEN = """
seen.title = document.title;
document.body.append(Object.assign(document.createElement("pre"), { id: "seen", textContent: JSON.stringify(seen) }));
"""


def seen_by(page: str, script: str, folder: Path, width: int = 1000) -> dict[str, Any]:
    """What `script` puts into `seen` at the end of the page. Nothing may be said on the console."""
    assert BROWSER is not None
    (folder / "page.html").write_text(
        page.replace("</body>", f"<script>const seen = {{}};{script}{_SEEN}</script></body>")
    )
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--window-size={width},900",
    ]
    done = subprocess.run(
        [BROWSER, *flags, f"--user-data-dir={folder / 'profile'}", "--dump-dom", f"file://{folder / 'page.html'}"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    written = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert written, done.stdout[-2000:]
    found: dict[str, Any] = json.loads(html.unescape(written[1]))
    return found
