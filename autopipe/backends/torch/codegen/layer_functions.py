"""Fold the repeated layers of a stage into functions: one function per layer class, and a loop or
calls in `forward`.

The input is the flat form of `forward`: one statement per operator. A token is a variable, a
parameter, a constant or a random key (the key of a random operator). A block of statements becomes
a call if another block has an equal canonical form (see `autopipe.backends.torch.codegen.block`).
So the folded program runs exactly the operators of the flat one, in the same order.

A function frees the values that it computes where the flat form frees them. Its arguments are freed
by the caller after the call. The caller of a function therefore keeps the input of a layer until
the layer ends, where the flat form may free it earlier.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from autopipe.backends.torch.codegen.block import (
    ARGUMENT_ORDER,
    TOKEN,
    Block,
    block_of,
    function_name,
    kind_of,
    local_names,
    rename_tokens,
)
from autopipe.backends.torch.codegen.statement import Statement, tuple_code, wrapped_call
from autopipe.ir.repeats import Wiring, find_repeats

_HEAVY_CALL: Final = re.compile(r"\b(linear|matmul|bmm|conv\d?d?|conv_transpose\d?d?|einsum)\(")
"""Pattern of the call of a matmul or a convolution."""
_MIN_SAVED_LINES: Final = 4
"""Minimum number of lines by which a function must shorten the stage."""
_MIN_LOOP_CALLS: Final = 2
"""Minimum number of calls that a loop replaces."""


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


class _Folding:
    """One run of `fold_layers`."""

    def __init__(
        self, statements: Sequence[Statement], results: frozenset[str], names: Mapping[str, str]
    ) -> None:
        self.statements = statements
        self.names = names
        self.tokens = [TOKEN.findall(each.code) for each in statements]
        """For each statement, the tokens that it reads, in order."""
        self.readers: dict[str, list[int]] = defaultdict(list)
        """For each token, the indices of the statements that read it. A result of `forward` also
        has the index after the last statement.
        """
        for index, tokens in enumerate(self.tokens):
            for token in set(tokens):
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
                lines += rename_tokens(self.statements[index], renamed).lines()
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

    def _equal_blocks(self) -> Iterator[list[Block]]:
        """Yield lists of two or more blocks that are equal except for their tokens. Lists
        whose function would save fewer than `_MIN_SAVED_LINES` lines are omitted.
        """
        for repeat in find_repeats(*self._labels()):
            by_form: dict[str, list[Block]] = defaultdict(list)
            for start in repeat.starts:
                block = block_of(self.statements, start, start + repeat.length)
                by_form[block.canonical].append(block)
            for blocks in by_form.values():
                saved = (len(blocks) - 1) * repeat.length - 2 * len(blocks)
                if len(blocks) > 1 and saved >= _MIN_SAVED_LINES:
                    yield blocks

    def _labels(self) -> tuple[np.ndarray, Wiring, np.ndarray, np.ndarray]:
        """Return (labels, wiring, has_parameter, is_heavy), the arguments of `find_repeats`, with
        one entry per statement.

        labels: a number, equal for statements that are equal except for their tokens.
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
        for statement, tokens in zip(self.statements, self.tokens, strict=True):
            text = TOKEN.sub(lambda match: kind_of(match[0]), statement.code)
            shape = tuple(target == "_" for target in statement.targets)
            key = (text, shape, statement.facts)
            labels.append(known.setdefault(key, len(known)))
            variables = [each for each in tokens if kind_of(each) == "x"]
            operands.append(
                tuple(numbers.setdefault(each, -1 - len(numbers)) for each in variables)
            )
            for target in statement.targets:
                numbers[target] = written
                written += 1
            first_result.append(written)
        has_parameter = [any(kind_of(each) == "w" for each in tokens) for tokens in self.tokens]
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

    def _calls(self, blocks: Sequence[Block]) -> list[_Call]:
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
        arguments.sort(key=lambda place: ARGUMENT_ORDER[kind_of(first.tokens[place])])
        results = [
            place
            for place in places
            if first.tokens[place] in inner
            and any(self._is_read_later(block, block.tokens[place]) for block in blocks)
        ]
        name = function_name(blocks, self.names, self.function_names)
        local = local_names(blocks, arguments, self.names)
        calls = []
        for block in blocks:
            given = tuple(block.tokens[place] for place in arguments)
            returned = tuple(block.tokens[place] for place in results)
            computed = set(block.tokens) - set(given)
            dead = dict.fromkeys(
                each
                for statement in self.statements[block.start : block.stop]
                for each in statement.dead
                if each not in computed
            )
            calls.append(_Call(block, name, given, returned, tuple(dead)))
        self.functions.append(self._function_text(calls, local))
        return calls

    def _is_read_later(self, block: Block, variable: str) -> bool:
        """Return True if a statement after the block, or the return statement, reads a variable."""
        return any(reader >= block.stop for reader in self.readers[variable])

    def _function_text(self, calls: Sequence[_Call], local: Mapping[str, str]) -> str:
        """Return the source of the function that `calls` call. `local` has the name inside the
        function of each token of the first block.
        """
        first = calls[0]
        kept = {*first.arguments, *first.results}
        lines = []
        for statement in self.statements[first.block.start : first.block.stop]:
            dead = tuple(each for each in statement.dead if each not in kept)
            lines += rename_tokens(replace(statement, dead=dead, name=""), local).lines()
        arguments = ", ".join(["p", *(local[each] for each in first.arguments)])
        return "\n".join(
            [
                *wrapped_call(f"def {first.function}({arguments}):", ""),
                f'    """One of {len(calls)} equal layers."""',
                *lines,
                f"    return {', '.join(local[each] for each in first.results)}",
                "",
            ]
        )

    def _call_lines(self, run: Sequence[_Call], renamed: dict[str, str]) -> list[str]:
        """Return the lines of consecutive calls of one function: a loop if the calls can form one,
        otherwise one call after the other. `renamed` has the new names of variables; the new names
        of the results of a loop are added.
        """
        loop = self._loop_of(run)
        if loop is not None:
            return self._loop_lines(run, loop, renamed)
        lines = []
        for call in run:
            values = [renamed.get(each, each) for each in call.arguments]
            dead = [renamed.get(each, each) for each in call.dead]
            code = f"{call.function}({', '.join(['p', *values])})"
            lines += wrapped_call(f"    {', '.join(call.results)} = {code}", "    ")
            lines[-1] += f"; del {', '.join(dead)}" if dead else ""
        return lines

    def _loop_of(self, run: Sequence[_Call]) -> _Loop | None:
        """Return the loop that replaces the consecutive calls in `run`, None if there is none.

        In a loop, all results of a call except the last are arguments of the next call and are read
        nowhere else. The other variables that calls read are equal in all calls. Parameters,
        constants and random keys may differ between calls.
        """
        if len(run) < _MIN_LOOP_CALLS:
            return None
        first = run[0]
        pairs = list(itertools.pairwise(run))
        carried: dict[int, int] = {}
        varying: list[int] = []
        for place, argument in enumerate(first.arguments):
            if kind_of(argument) != "x":
                varying.append(place)
            elif any(call.arguments[place] != argument for call in run):
                sources = {
                    call.results.index(value) if value in call.results else None
                    for call, value in ((call, after.arguments[place]) for call, after in pairs)
                }
                source = sources.pop()
                if sources or source is None or source in carried:
                    return None
                carried[source] = place
        if len(carried) < len(first.results):
            return None
        # The loop assigns its results to the variables that the first call reads in their place,
        # which overwrites these variables. So no later statement may read them.
        if any(
            self._is_read_later(first.block, first.arguments[each]) for each in carried.values()
        ):
            return None
        for call, following in pairs:
            if any(self._is_read_later(following.block, result) for result in call.results):
                return None
        places = tuple(carried[index] for index in range(len(first.results)))
        return _Loop(places, tuple(varying))

    def _loop_lines(self, run: Sequence[_Call], loop: _Loop, renamed: dict[str, str]) -> list[str]:
        """Return the lines of a loop over the calls in `run`. `renamed` has the new names of
        variables; the new names of the results of the last call are added.
        """
        first = run[0]
        starts = [first.arguments[place] for place in loop.carried]
        self.hidden.update(starts)
        for call in run[:-1]:
            self.hidden.update(call.results)
        table = []
        for call in run:
            row = tuple_code([call.arguments[place] for place in loop.varying])
            table += wrapped_call(f"        {row},", "        ")
        fixed = [
            argument for place, argument in enumerate(first.arguments) if place not in loop.varying
        ]
        values = [renamed.get(each, each) for each in fixed]
        targets = [renamed.get(each, each) for each in starts]
        renamed |= dict(zip(run[-1].results, targets, strict=True))
        dead = [
            renamed.get(each, each)
            for call in run
            for each in call.dead
            if each not in {call.arguments[place] for place in loop.carried}
        ]
        call_code = f"{first.function}({', '.join(['p', *values, '*weights'])})"
        return [
            "    for weights in (",
            *table,
            "    ):",
            *wrapped_call(f"        {', '.join(targets)} = {call_code}", "        "),
            *([f"    del {', '.join(dict.fromkeys(dead))}"] if dead else []),
        ]


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the function of a layer class."""

    block: Block
    function: str
    arguments: tuple[str, ...]
    """Variables, parameters, constants and random keys of the caller, in the order of the
    function's arguments.
    """
    results: tuple[str, ...]
    """Variables of the caller that get the results."""
    dead: tuple[str, ...]
    """Variables of the caller that no statement after the block reads."""


@dataclass(frozen=True, slots=True)
class _Loop:
    """A loop that replaces consecutive calls of one function. Positions are indices in
    `_Call.arguments`.
    """

    carried: tuple[int, ...]
    """For each result of the function, the position of the argument that has its value in the next
    iteration.
    """
    varying: tuple[int, ...]
    """Positions of the parameters, constants and random keys, which each iteration has of its
    own.
    """
