"""How many cases of each collection are run, and how many are not, by reason: `python -m
tests.conformance.summary`.
"""

from __future__ import annotations

import collections

import click

from tests.conformance.cases import COLLECTIONS, all_cases, resolved, skips


def table() -> list[tuple[str, ...]]:
    """One row a reason, one column a collection; the first row counts the cases that are run."""
    counts: dict[str, collections.Counter[str]] = {"run": collections.Counter()}
    for kind, name in all_cases():
        reason = "run" if name in resolved() else skips().get(name, "run")
        counts.setdefault(reason, collections.Counter())[kind] += 1
    total = collections.Counter(kind for kind, _ in all_cases())
    rows = [("", *COLLECTIONS)]
    for reason, counted in [*counts.items(), ("all", total)]:
        rows.append((reason, *(str(counted[kind]) for kind in COLLECTIONS)))
    return rows


def main() -> None:
    """Print the table."""
    rows = table()
    width = max(len(row[0]) for row in rows)
    for reason, *numbers in rows:
        click.echo(reason.ljust(width) + "".join(number.rjust(20) for number in numbers))


if __name__ == "__main__":
    main()
