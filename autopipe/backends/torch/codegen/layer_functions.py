"""Fold the repeated layers of a stage into functions: one function per layer class, and a loop or
calls in `forward`.

The input is the flat form of `forward` or of recomputed segments: one statement per operator. A
token is a variable, a parameter, a constant or a random key (the key of a random operator). The
*canonical form* of a block of statements is its text with each token replaced by a number, in the
order of first occurrence. A block becomes a call if another block has an equal canonical form. So
the folded program runs exactly the operators of the flat one, in the same order.

A function frees the values that it computes where the flat form frees them. Its arguments are freed
by the caller after the call. The caller of a function therefore keeps the input of a layer until
the layer ends, where the flat form may free it earlier.
"""

from __future__ import annotations

import builtins
import itertools
import keyword
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from autopipe.ir.layer_names import DEFAULT_NAME, layer_name, suffix_after_number
from autopipe.ir.repeats import Wiring, find_repeats

MAX_LINE_LENGTH: Final = 120
"""Maximum number of columns of a generated line, unless a single call is longer."""
_COMMENT_COLUMN: Final = 72
"""Column at which comments of short statements start."""
_TOKEN: Final = re.compile(r"\bp\.w\d+\b|\bp\.c\d+\b|\bx\d+\b|\b0x[0-9a-f]{16}\b")
"""Pattern of a token: a parameter, a constant, a variable, or a random key (the key of a random
operator).
"""
_HEAVY_CALL: Final = re.compile(r"\b(linear|matmul|bmm|conv\d?d?|conv_transpose\d?d?|einsum)\(")
_RESERVED: Final = (
    frozenset(
        {"p", "torch", "F", "operators", "recompute", "forward", "math", "weights", *dir(builtins)}
    )
    | frozenset(keyword.kwlist)
    | frozenset(keyword.softkwlist)
)
"""Names that generated functions, arguments and variables must not have."""
_MIN_SAVED_LINES: Final = 4
"""Minimum number of lines by which a function must shorten the stage."""
_MAX_NAME_CHARACTERS: Final = 40


@dataclass(frozen=True, slots=True)
class Statement:
    """A line of a generated function: `targets = code; del dead  # comment`."""

    targets: tuple[str, ...]
    """Variables that the statement assigns; "_" for a result that no statement reads."""
    code: str
    dead: tuple[str, ...] = ()
    """Variables that no later statement reads."""
    name: str = ""
    """Name of the operator for the comment."""
    facts: str = ""
    """Shape of the first result, and splits of the operator over devices, for the comment."""

    def lines(self, margin: str = "    ") -> list[str]:
        """Return the source lines. The comment precedes the statement if a line would be too
        long.
        """
        drop = f"; del {', '.join(self.dead)}" if self.dead else ""
        assigned = f"{', '.join(self.targets)} = " if self.targets else ""
        statement = f"{margin}{assigned}{self.code}{drop}"
        comment = " ".join(filter(None, (self.name, self.facts)))
        if not comment:
            return [statement]
        pad = max(2, _COMMENT_COLUMN - len(statement))
        if len(statement) + pad + len(comment) <= MAX_LINE_LENGTH:
            return [f"{statement}{' ' * pad}# {comment}"]
        return [f"{margin}# {comment}", statement]


@dataclass(frozen=True, slots=True)
class FoldedBody:
    """The source of a stage in folded form: the texts of the functions of its layers, and the lines
    of the body of `forward`, which calls them.
    """

    functions: tuple[str, ...]
    lines: tuple[str, ...]
    renamed: Mapping[str, str]
    """New names of variables whose names in the folded form differ from those in the flat form (one
    statement per operator), by old name.
    """
    hidden: frozenset[str]
    """Variables of the flat form (one statement per operator) whose values no variable of `forward`
    has in the folded form, or that a loop overwrites.
    """


@dataclass(frozen=True, slots=True)
class _Block:
    """The statements of one layer, with indices [start, stop). A token is a variable, a parameter,
    a constant or a random key.
    """

    start: int
    stop: int
    canonical: str
    """Text of the statements, with a number in place of each token. Blocks with equal texts can
    share a function.
    """
    tokens: tuple[str, ...]
    """Distinct tokens in the order of their first occurrence."""


def fold_layers(
    statements: Sequence[Statement],
    results: Sequence[str],
    names: Mapping[str, str],
) -> FoldedBody:
    """Fold the repeated layers of a body of `forward` that has one statement per operator.

    `results` are the variables that `forward` returns. `names` has the name in the model of each
    parameter and constant, such as `p.w3`. The result depends only on the arguments.
    """
    folding = _Folding(statements, frozenset(results), names)
    return folding.fold()


@dataclass(frozen=True, slots=True)
class SegmentBody:
    """The body of a segment (operations that backward recomputes together), with one statement per
    operator.
    """

    number: int
    statements: tuple[Statement, ...]
    arguments: tuple[str, ...]
    """Variables that the segment reads from outside."""
    flowing: tuple[str, ...]
    """Variables of its results through which gradients flow."""
    others: tuple[str, ...]
    """Variables of its other results."""


@dataclass(frozen=True, slots=True)
class SegmentFunction:
    """The function of one or several segments."""

    name: str
    text: str
    weights: Mapping[int, tuple[str, ...]]
    """For each segment that shares the function, by its number, the parameters and constants that
    its call passes.
    """


def fold_segments(
    segments: Sequence[SegmentBody], names: Mapping[str, str]
) -> list[SegmentFunction]:
    """Return one function for each set of two or more equal segments, which have parameters. A
    segment consists of operations that backward recomputes together. Other segments keep a function
    of their own. `names` has the name in the model of each parameter and constant, such as `p.w3`.
    """
    found: list[SegmentFunction] = []
    used: set[str] = set()
    by_form: dict[object, list[tuple[SegmentBody, _Block]]] = defaultdict(list)
    for segment in segments:
        block = _Folding(segment.statements, frozenset(), names).block(0, len(segment.statements))
        place = {token: index for index, token in enumerate(block.tokens)}
        if all(name in place for name in (*segment.arguments, *segment.flowing, *segment.others)):
            ends = (segment.arguments, segment.flowing, segment.others)
            form = (block.canonical, *(tuple(place[name] for name in each) for each in ends))
            by_form[form].append((segment, block))
    for equal in by_form.values():
        # Only segments with a weight (kind "w") can call a shared function, because the runtime
        # identifies the segment of a call by its weights.
        if len(equal) > 1 and any(_kind_of(token) == "w" for token in equal[0][1].tokens):
            found.append(_segment_function(equal, names, used))
    return found


def _segment_function(
    equal: Sequence[tuple[SegmentBody, _Block]], names: Mapping[str, str], used: set[str]
) -> SegmentFunction:
    """Return the function that computes the segments in `equal`, which are equal except for their
    variables, parameters, constants and random keys. The parameters and constants are the elements
    of the function's argument `weights`, so that autograd does not take them for operands of the
    segment. `names` has the name in the model of each parameter and constant. `used` has the
    function names that are taken, to which the new name is added.
    """
    first, block = equal[0]
    blocks = [each for _, each in equal]
    folding = _Folding(first.statements, frozenset(), names)
    folding.function_names = used
    held = [place for place, token in enumerate(block.tokens) if _kind_of(token) != "x"]
    held.sort(key=lambda place: _ARGUMENT_ORDER[_kind_of(block.tokens[place])])
    # `_ARGUMENT_ORDER` sorts parameters first, because the runtime distinguishes the segments of
    # one function by the first weight.
    inputs = [block.tokens.index(name) for name in first.arguments]
    name = folding.function_name(blocks)
    local = folding.local_names(blocks, [*inputs, *held])
    unpacked = tuple_code([local[block.tokens[place]] for place in held])
    lines = wrapped_call(f"    {unpacked} = weights", "    ")
    for statement in first.statements:
        lines += _renamed(replace(statement, name=""), local).lines()
    ends = [
        tuple_code([local[each] for each in values]) for values in (first.flowing, first.others)
    ]
    arguments = ", ".join(local[each] for each in first.arguments)
    text = "\n".join(
        [
            "@recompute",
            f"def {name}(p, weights, {arguments}):",
            f'    """One of {len(equal)} equal layers."""',
            *lines,
            f"    return {', '.join(ends)}",
            "",
        ]
    )
    weights = {segment.number: tuple(own.tokens[place] for place in held) for segment, own in equal}
    return SegmentFunction(name, text, weights)


class _Folding:
    """One run of `fold_layers`."""

    def __init__(
        self, statements: Sequence[Statement], results: frozenset[str], names: Mapping[str, str]
    ) -> None:
        self.statements = statements
        self.names = names
        self.readers: dict[str, list[int]] = defaultdict(list)
        """For each variable, parameter, constant and random key, the indices of the statements that
        read it. A result of `forward` also has the index after the last statement.
        """
        for index, statement in enumerate(statements):
            for token in dict.fromkeys(_TOKEN.findall(statement.code)):
                self.readers[token].append(index)
        for name in results:
            self.readers[name].append(len(statements))
        self.functions: list[str] = []
        self.function_names: set[str] = set()
        self.hidden: set[str] = set()

    def fold(self) -> FoldedBody:
        """Return the functions of the repeated blocks, and the body that calls them."""
        calls: dict[int, _Call] = {}
        for blocks in self._equal_blocks():
            calls |= {call.block.start: call for call in self._calls(blocks)}
        lines: list[str] = []
        renamed: dict[str, str] = {}
        index = 0
        while index < len(self.statements):
            call = calls.get(index)
            if call is None:
                lines += _renamed(self.statements[index], renamed).lines()
                index += 1
                continue
            run = [call]
            # `run` collects the calls of one function that directly follow each other, because
            # `_call_lines` can write them as a loop.
            while (following := calls.get(run[-1].block.stop)) is not None:
                if following.function != call.function:
                    break
                run.append(following)
            lines += self._call_lines(run, renamed)
            for each in run:
                block = range(each.block.start, each.block.stop)
                written = {name for place in block for name in self.statements[place].targets}
                self.hidden |= written - set(each.results)
            index = run[-1].block.stop
        return FoldedBody(tuple(self.functions), tuple(lines), renamed, frozenset(self.hidden))

    def _equal_blocks(self) -> Iterator[list[_Block]]:
        """Yield lists of two or more blocks that are equal except for their variables, parameters,
        constants and random keys. Lists whose function would save fewer than `_MIN_SAVED_LINES`
        lines are omitted.
        """
        for repeat in find_repeats(*self._labels()):
            by_form: dict[str, list[_Block]] = defaultdict(list)
            for start in repeat.starts:
                block = self.block(start, start + repeat.length)
                by_form[block.canonical].append(block)
            for blocks in by_form.values():
                saved = (len(blocks) - 1) * repeat.length - 2 * len(blocks)
                if len(blocks) > 1 and saved >= _MIN_SAVED_LINES:
                    yield blocks

    def _labels(self) -> tuple[np.ndarray, Wiring, np.ndarray, np.ndarray]:
        """Return (labels, wiring, has_parameter, is_heavy), the arguments of `find_repeats`, with
        one entry per statement.

        labels: a number, equal for statements that are equal except for the numbers in the names of
        variables, parameters, constants and random keys.
        wiring: the variables that the statement reads and computes.
        has_parameter: True if the statement reads a parameter.
        is_heavy: True if it is a matmul or a convolution with a parameter.
        """
        known: dict[tuple[object, ...], int] = {}
        numbers: dict[str, int] = {}
        labels = []
        operands = []
        first_result = [0]
        written = 0
        for statement in self.statements:
            text = _TOKEN.sub(_kind, statement.code)
            shape = tuple(target == "_" for target in statement.targets)
            key = (text, shape, statement.facts)
            labels.append(known.setdefault(key, len(known)))
            variables = [each for each in _TOKEN.findall(statement.code) if each[0] == "x"]
            operands.append(
                tuple(numbers.setdefault(each, -1 - len(numbers)) for each in variables)
            )
            for target in statement.targets:
                numbers[target] = written
                written += 1
            first_result.append(written)
        has_parameter = [bool(re.search(r"\bp\.w\d", each.code)) for each in self.statements]
        is_heavy = [
            has and _HEAVY_CALL.search(each.code) is not None
            for has, each in zip(has_parameter, self.statements, strict=True)
        ]
        return (
            np.array(labels),
            Wiring(operands, np.array(first_result)),
            np.array(has_parameter, dtype=bool),
            np.array(is_heavy, dtype=bool),
        )

    def block(self, start: int, stop: int) -> _Block:
        """Return the block of the statements from `start` to `stop` - 1."""
        numbers: dict[str, int] = {}

        def number(match: re.Match[str]) -> str:
            token = match[0]
            return f"<{_kind(match)}{numbers.setdefault(token, len(numbers))}>"

        texts = []
        for statement in self.statements[start:stop]:
            code = _TOKEN.sub(number, statement.code)
            targets = ", ".join(
                each if each == "_" else _TOKEN.sub(number, each) for each in statement.targets
            )
            texts.append(f"{targets} = {code} # {statement.facts}")
        return _Block(start, stop, "\n".join(texts), tuple(numbers))

    def _calls(self, blocks: Sequence[_Block]) -> list[_Call]:
        """Write the function that computes `blocks`, which have equal canonical forms, and return
        the call that replaces each block.
        """
        first = blocks[0]
        inner = {
            target
            for statement in self.statements[first.start : first.stop]
            for target in statement.targets
        }
        places = range(len(first.tokens))
        arguments = [place for place in places if first.tokens[place] not in inner]
        arguments.sort(key=lambda place: _ARGUMENT_ORDER[_kind_of(first.tokens[place])])
        results = [
            place
            for place in places
            if first.tokens[place] in inner
            and any(self._is_read_later(block, block.tokens[place]) for block in blocks)
        ]
        name = self.function_name(blocks)
        local = self.local_names(blocks, arguments)
        self.functions.append(
            self._function_text(first, len(blocks), name, arguments, results, local)
        )
        return [
            _Call(
                block,
                name,
                tuple(block.tokens[place] for place in arguments),
                tuple(block.tokens[place] for place in results),
                tuple(
                    dict.fromkeys(
                        each
                        for statement in self.statements[block.start : block.stop]
                        for each in statement.dead
                        if each
                        not in set(block.tokens) - {block.tokens[place] for place in arguments}
                    )
                ),
            )
            for block in blocks
        ]

    def _is_read_later(self, block: _Block, variable: str) -> bool:
        """Return True if a statement after the block, or the return statement, reads a variable."""
        return any(reader >= block.stop for reader in self.readers[variable])

    def function_name(self, blocks: Sequence[_Block]) -> str:
        """Return a unique name for the function that replaces `blocks`, derived from the names of
        their parameters in the model.
        """
        slots = [
            tuple(self.names.get(token, "") for token in tokens)
            for tokens in zip(*(block.tokens for block in blocks[:4]), strict=True)
            if tokens[0].startswith("p.w")
        ]
        return _unique(_identifier(layer_name(slots) or DEFAULT_NAME), self.function_names)

    def local_names(self, blocks: Sequence[_Block], arguments: Sequence[int]) -> dict[str, str]:
        """Return, for each variable, parameter, constant and random key of the first block, its
        name inside the function. `arguments` are the indices, in the block's `tokens`, of the
        values that the function gets from its caller.
        """
        first = blocks[0]
        used: set[str] = set()
        numbers = itertools.count()
        names: dict[str, str] = {}
        taken = set(arguments)
        inner = [place for place in range(len(first.tokens)) if place not in taken]
        for place in (*arguments, *inner):
            token = first.tokens[place]
            kind = _kind_of(token)
            if kind == "x":
                names[token] = f"v{next(numbers)}"
            elif place in taken:
                known = tuple(self.names.get(each.tokens[place], "") for each in blocks[:4])
                stem = suffix_after_number(known) or _DEFAULT_STEMS[kind]
                names[token] = _unique(_identifier(stem), used)
        return names

    def _function_text(
        self,
        block: _Block,
        count: int,
        name: str,
        arguments: Sequence[int],
        results: Sequence[int],
        local: Mapping[str, str],
    ) -> str:
        returned = [block.tokens[place] for place in results]
        kept = {*returned, *(block.tokens[place] for place in arguments)}
        lines = []
        for statement in self.statements[block.start : block.stop]:
            own = tuple(each for each in statement.dead if each not in kept)
            lines += _renamed(replace(statement, dead=own, name=""), local).lines()
        head = (
            f"def {name}({', '.join(['p', *(local[block.tokens[place]] for place in arguments)])}):"
        )
        return "\n".join(
            [
                *wrapped_call(head, ""),
                f'    """One of {count} equal layers."""',
                *lines,
                f"    return {', '.join(local[each] for each in returned)}",
                "",
            ]
        )

    def _call_lines(self, run: Sequence[_Call], renamed: dict[str, str]) -> list[str]:
        """Return the lines of consecutive calls of one function: a loop if `_loop_lines` returns
        one, otherwise one call after the other. `renamed` has the new names of variables; the new
        names of the loop's results are added.
        """
        loop = self._loop_lines(run, renamed)
        if loop is not None:
            return loop
        lines = []
        for call in run:
            values = [renamed.get(each, each) for each in call.arguments]
            dead = [renamed.get(each, each) for each in call.dead]
            code = f"{call.function}({', '.join(['p', *values])})"
            lines += wrapped_call(f"    {', '.join(call.results)} = {code}", "    ")
            lines[-1] += f"; del {', '.join(dead)}" if dead else ""
        return lines

    def _loop_lines(self, run: Sequence[_Call], renamed: dict[str, str]) -> list[str] | None:
        """Return the lines of a loop over the calls in `run`; None if they cannot form a loop.

        In a loop, all results of a call except the last are arguments of the next call and are read
        nowhere else. The other variables that calls read are equal in all calls. Parameters,
        constants and random keys may differ between calls. The results of the last call get new
        names, which are added to `renamed`.
        """
        first = run[0]
        if len(run) < _MIN_LOOP_CALLS:
            return None
        carried: dict[int, int] = {}
        varying: list[int] = []
        for place in range(len(first.arguments)):
            values = [call.arguments[place] for call in run]
            if _kind_of(values[0]) != "x":
                varying.append(place)
            elif len(set(values)) > 1:
                sources = [
                    call.results.index(value) if value in call.results else -1
                    for call, value in zip(run, values[1:], strict=False)
                ]
                if len(set(sources)) != 1 or sources[0] < 0:
                    return None
                carried[place] = sources[0]
        if sorted(carried.values()) != list(range(len(first.results))):
            return None
        end = run[-1].block.stop
        # The loop assigns its results to the variables that its first call reads, which overwrites
        # them. So no later statement may read these variables.
        starts = [first.arguments[place] for place in carried]
        if len(set(starts)) != len(starts):
            return None
        for place in carried:
            start = first.arguments[place]
            if any(reader >= first.block.stop for reader in self.readers[start]) or any(
                first.arguments[other] == start
                for other in range(len(first.arguments))
                if other != place
            ):
                return None
        for call in run[:-1]:
            for result in call.results:
                if any(
                    reader >= end or not _is_next_call(run, call, reader)
                    for reader in self.readers[result]
                    if reader >= call.block.stop
                ):
                    return None
        self.hidden |= {*starts, *(result for call in run[:-1] for result in call.results)}
        by_result = {result: place for place, result in carried.items()}
        targets = [
            renamed.get(name := first.arguments[by_result[index]], name)
            for index in range(len(first.results))
        ]
        fixed = [place for place in range(len(first.arguments)) if place not in varying]
        values = [renamed.get(name := first.arguments[place], name) for place in fixed]
        table = []
        for call in run:
            row = ", ".join(call.arguments[place] for place in varying)
            table += wrapped_call(f"        ({row}{',' if len(varying) == 1 else ''}),", "        ")
        assigned = ", ".join(targets)
        for index, result in enumerate(run[-1].results):
            renamed[result] = targets[index]
        dead = [
            renamed.get(each, each)
            for call in run
            for each in call.dead
            if each not in {call.arguments[place] for place in carried}
        ]
        drop = [f"    del {', '.join(dict.fromkeys(dead))}"] if dead else []
        body = f"        {assigned} = {first.function}({', '.join(['p', *values, '*weights'])})"
        return ["    for weights in (", *table, "    ):", *wrapped_call(body, "        "), *drop]


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the function of a layer class."""

    block: _Block
    function: str
    arguments: tuple[str, ...]
    """Variables, parameters, constants and random keys of the caller, in the order of the
    function's arguments.
    """
    results: tuple[str, ...]
    """Variables of the caller that get the results."""
    dead: tuple[str, ...]
    """Variables of the caller that no statement after the block reads."""


_MIN_LOOP_CALLS: Final = 2
_ARGUMENT_ORDER: Final = {"x": 0, "w": 1, "c": 2, "k": 3}
"""Order of the arguments of a function: variables, parameters, constants, random keys."""
_DEFAULT_STEMS: Final = {"w": "weight", "c": "constant", "k": "random_key"}


def _kind(match: re.Match[str]) -> str:
    return _kind_of(match[0])


def _kind_of(token: str) -> str:
    """Return the kind of a token as a letter: x for a variable, w for a parameter, c for a
    constant, k for the key of a random operator.
    """
    return {"x": "x", "0": "k"}.get(token[0]) or token[2]


def _renamed(statement: Statement, names: Mapping[str, str]) -> Statement:
    """Return a statement with other names of its variables, parameters, constants and keys."""
    if not names:
        return statement

    def new(match: re.Match[str]) -> str:
        return names.get(match[0], match[0])

    return replace(
        statement,
        targets=tuple(names.get(each, each) for each in statement.targets),
        code=_TOKEN.sub(new, statement.code),
        dead=tuple(names.get(each, each) for each in statement.dead),
    )


def _is_next_call(run: Sequence[_Call], call: _Call, reader: int) -> bool:
    """Return True if the statement with index `reader` belongs to the call that follows `call` in
    the list `run`.
    """
    following = run[run.index(call) + 1]
    return following.block.start <= reader < following.block.stop


def _identifier(text: str) -> str:
    """Return a Python identifier for a text: ASCII letters, digits and underscores only."""
    found = re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")[:_MAX_NAME_CHARACTERS].lower()
    found = f"n_{found}" if not found or found[0].isdigit() else found
    # Generated code uses names such as x0, v1 or segment_2 for variables and functions. An
    # underscore distinguishes an equal identifier from these names.
    if found in _RESERVED or re.fullmatch(r"[a-z]\d+|(segment|loop)_\d+", found):
        found = f"{found}_"
    return found


def _unique(name: str, used: set[str]) -> str:
    """Return the name, with a number if it is in `used`, and add it to `used`."""
    found = name
    for number in itertools.count(2):
        if found not in used:
            break
        found = f"{name}_{number}"
    used.add(found)
    return found


def wrapped_call(line: str, margin: str) -> list[str]:
    """Return a line that ends with a call or a tuple in parentheses, with line breaks between its
    elements if it is too long.
    """
    if len(line) <= MAX_LINE_LENGTH:
        return [line]
    indent = f"{margin}    "
    start = line.index("(") + 1
    pieces = line[start:].split(", ")
    lines = [f"{line[:start]}{pieces[0]}"]
    for piece in pieces[1:]:
        if len(lines[-1]) + len(piece) + 3 > MAX_LINE_LENGTH:
            lines[-1] += ","
            lines.append(f"{indent}{piece}")
        else:
            lines[-1] += f", {piece}"
    return lines


def tuple_code(elements: Sequence[str]) -> str:
    """Return the code of a tuple of the given expressions."""
    return f"({', '.join(elements)}{',' if len(elements) == 1 else ''})"
