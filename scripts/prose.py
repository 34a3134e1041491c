#!/usr/bin/env python3
"""Count the constructions that make prose hard to read, per 1,000 words.

    python scripts/prose.py                           docstrings, comments and messages of autopipe
    python scripts/prose.py autopipe/ir --worst 20    the 20 hardest texts of a folder
    python scripts/prose.py docs README.md --limit 30 exit with 1 if the rate exceeds 30

The script reads the docstrings, comments and message strings of Python files and the paragraphs
of Markdown files. Each rule of `RULES` matches one construction and has a weight. The rate of a
folder is the sum of the weights per 1,000 words. The docstrings of torch and click have rates of
10 to 12. The rate describes many texts; a single text with hits can be clear.
"""

from __future__ import annotations

import argparse
import ast
import heapq
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]

RULES: dict[str, tuple[float, str]] = {
    "what-clause": (1.5, r"\bwhat\b"),
    "where-for-if": (
        0.7,
        r"\bwhere\b"
        r"(?! (the|a|an|each|every) \w+ (is|are|lives?|starts?|ends?|begins?)\b)",
    ),
    "preposition-and-relative": (
        1.0,
        r"\b(of|by|for|with|in|on|to|from|over|after|into|along|behind|beside|against|as|but|than|"
        r"between|until|without) (which|whose|whom|those|what|that)\b",
    ),
    "stranded-preposition": (
        0.7,
        r"\b(of|by|for|with|on|to|from|over|into|along|against)(?=[.;:](\s|$)|$)",
    ),
    "bare-pronoun": (
        0.6,
        r"\b(those|ones|others|theirs|one another|the same|the rest|such|one's)\b",
    ),
    "personification": (
        0.8,
        r"\b(knows?|asks?|asked|tells?|told|hears?|sees?|wants?|wanted|minds?|meets?|met|mean so|"
        r"promises?|speaks?|say|says|said|word on)\b",
    ),
    "stand-lie-come": (
        1.2,
        r"\b(stands?|stood|lies?|lay|lying|go(es)? by|comes? (to|of|back)|came (to|of)|"
        r"goes (to|with|on))\b",
    ),
    "weak-verb": (
        0.45,
        r"\b(takes?|taken|gives?|given|holds?|held|keeps?|kept|leaves?|left|puts?|made|had|has|"
        r"gets?|gone|goes)\b",
    ),
    "who": (
        0.8,
        r"\b(who|whom|whoever|whatever|whichever|nobody|somebody|nothing|anything)\b",
    ),
    "archaic-adverb": (
        1.0,
        r"\b(anew|alike|besides?|at hand|for good|anyhow|but for|apart|further|elsewhere|together|"
        r"whole|alone|meanwhile|once|so(?=[.,;:]|$)|too(?=[.,;:]|$))\b",
    ),
    "superlative": (0.6, r"\b(least|fewest|greatest|most)\b"),
    "distributive-article": (1.2, r"\b(an?|one) [a-z][\w-]+ an? [a-z][\w-]+(?=[ ,.;:)]|$)"),
    "own-and-ours": (0.9, r"\b(ours|own)\b"),
    "vague-passive": (
        0.6,
        r"\b(is|are|be|was|were) (said|told|asked|meant|known|wanted|counted|had|met|done|tried|"
        r"taken|made|put|held|kept|given|left|found|settled|worked out)\b",
    ),
    "how-many": (
        1.0,
        r"\b(as (many|few|much|far|often|long)|by how much|how (many|far|long|often))\b",
    ),
    "private-term": (
        0.6,
        r"\b(places?|lanes?|room|figures?|settled?|forms?|units?|stretch(es)?|narrow|wide|"
        r"spell(ed|ing|s)?|drawn|equals|stand-ins?|price[ds]?|shares?|claims?|weigh(s|ed)?|"
        r"division)\b",
    ),
    "is-no": (0.7, r"\b(is|are|has|have|with|of|knows?) no\b(?! longer)"),
    "none-where": (0.7, r"\b(None|nothing|none|empty) (where|for what|of it)\b"),
    "fragment-opening": (
        1.5,
        r"\A(As|Of|By|On|To|With|Where|Which|Those|These|The same|For (what|each|every)|"
        r"In (what|which|the)|From|Made|Mapped|Equal|How|Some|No|All)\b",
    ),
}
"""Weight and pattern of each construction. Text in backticks is removed before matching."""

_COMPILED = {name: (weight, re.compile(text, re.I)) for name, (weight, text) in RULES.items()}
_TOOL_COMMENT = re.compile(r"noqa|type:|fmt:|pragma")
_CODE_BLOCK = re.compile(r"```.*?```", re.S)


@dataclass(frozen=True, slots=True)
class Text:
    """A docstring, comment, message or paragraph, and the file and line where it starts."""

    kind: str
    path: Path
    line: int
    words: str


@dataclass(slots=True)
class Total:
    """Counts over all texts of one kind."""

    texts: int = 0
    words: int = 0
    weight: float = 0.0
    hits: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        """Weighted hits per 1,000 words."""
        return 1000 * self.weight / max(self.words, 1)

    def add(self, text: str) -> None:
        """Add the hits and words of one text."""
        found = count_rule_hits(text)
        self.texts += 1
        self.words += word_count(text)
        self.weight += total_weight(found)
        self.hits.update(found)


def _without_code(text: str) -> str:
    """Return `text` with a word in place of each passage in backticks."""
    return re.sub(r"`[^`]*`", " X ", text)


def count_rule_hits(text: str) -> Counter[str]:
    """Return the number of matches of each rule that matches `text`."""
    without_code = _without_code(text)
    counts = {name: len(rule.findall(without_code)) for name, (_, rule) in _COMPILED.items()}
    return +Counter(counts)


def total_weight(found: Counter[str]) -> float:
    """Return the sum of the weights of the rules that matched."""
    return sum(RULES[name][0] * count for name, count in found.items())


def word_count(text: str) -> int:
    """Return the number of words, each passage in backticks counted as one."""
    return len(re.findall(r"[A-Za-z][\w'-]*", _without_code(text)))


def _constant_text(node: ast.AST) -> str | None:
    """Return the text of a string or f-string, with a name in backticks for each inserted value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (
            str(each.value) if isinstance(each, ast.Constant) else "`x`" for each in node.values
        )
        return "".join(parts)
    return None


def _python_texts(path: Path, source: str) -> Iterator[Text]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield Text("docstring", path, getattr(node, "lineno", 1), docstring)
        elif isinstance(node, ast.Call):
            keywords = [
                each.value for each in node.keywords if each.arg in {"help", "short_help", "hint"}
            ]
            is_error = re.search(r"(Error|\.refuse|\.warn)$", ast.unparse(node.func))
            for each in [*keywords, *(node.args if is_error else ())]:
                message = _constant_text(each)
                if message and " " in message:
                    yield Text("message", path, each.lineno, message)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        comment = token.string.lstrip("#: ")
        is_prose = len(comment) > 10 and not _TOOL_COMMENT.match(comment)
        if token.type == tokenize.COMMENT and is_prose:
            yield Text("comment", path, token.start[0], comment)


def _markdown_texts(path: Path, source: str) -> Iterator[Text]:
    without_code = _CODE_BLOCK.sub(lambda block: "\n" * block.group().count("\n"), source)
    line = 1
    for part in re.split(r"(\n\s*\n)", without_code):
        is_prose = len(part.split()) > 5 and not part.lstrip().startswith(("#", "|", "!"))
        if is_prose:
            yield Text("paragraph", path, line, part.strip())
        line += part.count("\n")


def collect_texts(paths: Iterable[Path]) -> Iterator[Text]:
    """Yield the texts of Python and Markdown files, and of such files below folders."""
    for path in paths:
        files = [path]
        if path.is_dir():
            files = sorted(each for suffix in ("*.py", "*.md") for each in path.rglob(suffix))
        for file in files:
            source = file.read_text(encoding="utf-8")
            if file.suffix == ".md":
                yield from _markdown_texts(file, source)
            else:
                yield from _python_texts(file, source)


def totals_by_kind(found: Iterable[Text]) -> dict[str, Total]:
    """Return the counts of the texts by kind."""
    by_kind: dict[str, Total] = {}
    for text in found:
        by_kind.setdefault(text.kind, Total()).add(text.words)
    return by_kind


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rates, and return 1 if one exceeds `--limit`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / "autopipe"])
    parser.add_argument("--worst", type=int, default=0, help="print the N hardest texts")
    parser.add_argument("--limit", type=float, help="exit with 1 if a rate exceeds this")
    options = parser.parse_args(arguments)
    found = list(collect_texts(options.paths))
    by_kind = totals_by_kind(found)
    for kind, total in by_kind.items():
        print(f"{kind:10} {total.texts:6} texts {total.words:8} words {total.rate:6.1f}")
    rules = sum((total.hits for total in by_kind.values()), Counter[str]())
    print(", ".join(f"{name} {count}" for name, count in rules.most_common()))
    hardest = heapq.nlargest(
        options.worst,
        found,
        key=lambda text: total_weight(count_rule_hits(text.words)) / max(word_count(text.words), 1),
    )
    for text in hardest:
        line = " ".join(text.words.split())[:150]
        print(f"{text.path}:{text.line} [{text.kind}] {line}")
    exceeded = options.limit is not None and any(
        total.rate > options.limit for total in by_kind.values()
    )
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
