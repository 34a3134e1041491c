"""Fold the repeated layers of a stage into functions: one function per layer class, and a loop or
calls in `forward`.

The input is the flat form of `forward`: one statement per operator. A token is a variable, a
parameter, a constant or a random key (the key of a random operator). A block of statements becomes
a call if another block has an equal canonical form (see `autopipe.backends.torch.codegen.block`).
So the folded program runs exactly the operators of the flat one, in the same order.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from autopipe.backends.torch.codegen.block import (
    Block,
    block_of,
    kind_of,
    text_without_tokens,
    tokens_read,
)
from autopipe.backends.torch.codegen.identifiers import identifier, numbered_name
from autopipe.backends.torch.codegen.statement import Statement
from autopipe.ir.layer_names import DEFAULT_NAME, layer_name
from autopipe.ir.repeats import Wiring, find_repeats

_HEAVY_CALLS: Final = (
    "linear",
    "matmul",
    "bmm",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "einsum",
)
"""Functions of matmuls and convolutions."""
_MIN_SAVED_LINES: Final = 4
"""Minimum number of lines by which a function must shorten the stage."""
_MIN_LOOP_CALLS: Final = 2
"""Minimum number of calls that a loop replaces."""


FORWARD_SUFFIX: Final = "_forward"
"""End of the name of a function whose name would otherwise be `layer`, the variable of loops."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that computes one or more equal blocks of statements, its instances."""

    name: str
    statements: tuple[Statement, ...]
    """Statements of the first instance."""
    instances: tuple[tuple[str, ...], ...]
    """Tokens of each instance. Token k of one instance corresponds to token k of every other
    one.
    """
    arguments: tuple[int, ...]
    """Indices, in an instance, of the variables that the function gets from its caller."""
    results: tuple[int, ...]
    """Indices, in an instance, of the variables that the function returns."""
    flowing: int | None = None
    """Number of results, from the first, through which gradients flow, if backward recomputes the
    function; otherwise None.
    """
    is_shared: bool = True
    """True if the function gets a layer as `p`, False if it gets the `p` of the stage."""

    @property
    def held(self) -> tuple[int, ...]:
        """Indices, in an instance, of the parameters, constants and random keys."""
        tokens = self.instances[0]
        return tuple(index for index, token in enumerate(tokens) if kind_of(token) != "x")


@dataclass(frozen=True, slots=True)
class Call:
    """A statement that calls a function."""

    function: Function
    instance: int
    """Index of the instance that the call computes."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Variables of the caller that the call passes."""
        tokens = self.function.instances[self.instance]
        return tuple(tokens[index] for index in self.function.arguments)

    @property
    def writes(self) -> tuple[str, ...]:
        """Variables of the caller to which the call assigns its results."""
        tokens = self.function.instances[self.instance]
        return tuple(tokens[index] for index in self.function.results)


@dataclass(frozen=True, slots=True)
class LayerLoop:
    """A loop over consecutive calls of one function.

    Each result of a call is an argument of the next call, and nothing else reads it. The other
    arguments are equal in all calls.
    """

    calls: tuple[Call, ...]
    carried: tuple[int, ...]
    """For each result of the function, the index of the argument that has its value in the next
    iteration.
    """

    @property
    def function(self) -> Function:
        """The function that each iteration calls."""
        return self.calls[0].function

    @property
    def starts(self) -> tuple[str, ...]:
        """For each result of the function, the variable that has its value before the loop."""
        reads = self.calls[0].reads
        return tuple(reads[index] for index in self.carried)

    @property
    def reads(self) -> tuple[str, ...]:
        """Variables of the caller that the loop reads."""
        return self.calls[0].reads

    @property
    def writes(self) -> tuple[str, ...]:
        """Variables of the caller that have the results of the last iteration."""
        return self.calls[-1].writes


Item = Statement | Call | LayerLoop
"""A part of the body of `forward`."""


def variables_read(item: Item) -> tuple[str, ...]:
    """Return the distinct variables that an item reads, in order."""
    if isinstance(item, Statement):
        read = tokens_read(item)
        return tuple(dict.fromkeys(each for each in read if kind_of(each) == "x"))
    return tuple(dict.fromkeys(item.reads))


def variables_written(item: Item) -> tuple[str, ...]:
    """Return the variables that an item assigns. In a statement, "_" stands for a result that no
    statement reads.
    """
    return item.targets if isinstance(item, Statement) else item.writes


def fold_layers(
    statements: Sequence[Statement],
    results: Sequence[str],
    names: Mapping[str, str],
    used: set[str],
) -> list[Item]:
    """Return the body of `forward` with calls in place of repeated layers, given the form with one
    statement per operator.

    `results` are the variables that `forward` returns. `names` has the name in the model of each
    parameter and constant, such as `p.w3`. `used` has the function names that are taken, to which
    the new ones are added. The result depends only on the arguments.
    """
    folding = _Folding(statements, frozenset(results), names, used)
    return with_loops(folding.fold(), results)


class _Folding:
    """One run of `fold_layers`."""

    def __init__(
        self,
        statements: Sequence[Statement],
        results: frozenset[str],
        names: Mapping[str, str],
        used: set[str],
    ) -> None:
        self.statements = statements
        self.names = names
        self.used = used
        self.tokens = [tokens_read(each) for each in statements]
        """For each statement, the tokens that it reads, in order."""
        self.last_reader: dict[str, int] = {}
        """For each token, the index of the last statement that reads it. For a result of `forward`,
        this is the index after the last statement.
        """
        for index, tokens in enumerate(self.tokens):
            self.last_reader |= dict.fromkeys(tokens, index)
        self.last_reader |= dict.fromkeys(results, len(statements))

    def fold(self) -> list[Statement | Call]:
        """Return the body with one call per repeated block."""
        calls: dict[int, tuple[Call, Block]] = {}
        for blocks in self._equal_blocks():
            function = self._function(blocks)
            calls |= {
                block.start: (Call(function, instance), block)
                for instance, block in enumerate(blocks)
            }
        items: list[Statement | Call] = []
        index = 0
        while index < len(self.statements):
            if index in calls:
                call, block = calls[index]
                items.append(call)
                index = block.stop
            else:
                items.append(self.statements[index])
                index += 1
        return items

    def _equal_blocks(self) -> Iterator[list[Block]]:
        """Yield lists of two or more blocks that are equal except for their tokens, in the order of
        the statements. Lists whose function would save fewer than `_MIN_SAVED_LINES` lines are
        omitted.
        """
        for repeat in find_repeats(*self._labels()):
            by_form: dict[str, list[Block]] = defaultdict(list)
            for start in sorted(repeat.starts):
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
            shape = tuple(target == "_" for target in statement.targets)
            key = (text_without_tokens(statement), shape, statement.facts)
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
            has and _is_heavy(each)
            for has, each in zip(has_parameter, self.statements, strict=True)
        ]
        return (
            np.array(labels),
            Wiring(operands, np.array(first_result)),
            np.array(has_parameter, dtype=bool),
            np.array(is_heavy, dtype=bool),
        )

    def _function(self, blocks: Sequence[Block]) -> Function:
        """Return the function that computes `blocks`, which have equal canonical forms."""
        first = blocks[0]
        statements = tuple(self.statements[first.start : first.stop])
        inner = {target for statement in statements for target in statement.targets}
        places = range(len(first.tokens))
        arguments = tuple(
            place
            for place in places
            if first.tokens[place] not in inner and kind_of(first.tokens[place]) == "x"
        )
        results = tuple(
            place
            for place in places
            if first.tokens[place] in inner
            and any(self._is_read_later(block, block.tokens[place]) for block in blocks)
        )
        instances = tuple(block.tokens for block in blocks)
        name = function_name(instances, self.names, self.used)
        return Function(name, statements, instances, arguments, results)

    def _is_read_later(self, block: Block, variable: str) -> bool:
        """Return True if a statement after the block, or the return statement, reads a variable."""
        return self.last_reader.get(variable, -1) >= block.stop


def _is_heavy(statement: Statement) -> bool:
    """True if the statement calls a matmul or a convolution, at once or with a deferred weight
    gradient (`p.weight_grads(F.linear, …)`).
    """
    code = statement.code.removeprefix("p.weight_grads(")
    name = code.replace(",", "(").partition("(")[0]
    return name.rpartition(".")[2] in _HEAVY_CALLS


def function_name(
    instances: Sequence[Sequence[str]], names: Mapping[str, str], used: set[str]
) -> str:
    """Return a name for the function that computes `instances` (see `Function`), derived from the
    names of their parameters. `names` has the name in the model of each parameter and constant,
    such as `p.w3`. `used` has the names that are taken; the new name is added to it.
    """
    slots = [
        tuple(names.get(token, "") for token in tokens)
        for tokens in zip(*instances, strict=True)
        if kind_of(tokens[0]) == "w"
    ]
    name = layer_name(slots) or DEFAULT_NAME
    if name == DEFAULT_NAME:
        name = f"{name}{FORWARD_SUFFIX}"
    found = numbered_name(identifier(name), used.__contains__)
    used.add(found)
    return found


def with_loops(items: Sequence[Statement | Call], results: Sequence[str]) -> list[Item]:
    """Return the body of `forward` with loops in place of consecutive calls of one function.
    `results` are the variables that `forward` returns.
    """
    last_reader: dict[str, int] = {}
    for index, item in enumerate(items):
        last_reader |= dict.fromkeys(variables_read(item), index)
    last_reader |= dict.fromkeys(results, len(items))
    found: list[Item] = []
    index = 0
    while index < len(items):
        run = _calls_of_one_function(items, index)
        carried = _carried_results(run, index, last_reader)
        if carried is None:
            found.append(items[index])
            index += 1
        else:
            found.append(LayerLoop(tuple(run), carried))
            index += len(run)
    return found


def _calls_of_one_function(items: Sequence[Statement | Call], start: int) -> list[Call]:
    """Return the consecutive calls, from index `start`, of the function that the item there calls;
    [] for a statement and for a function that gets the `p` of the stage.
    """
    found: list[Call] = []
    for item in items[start:]:
        if not isinstance(item, Call) or not item.function.is_shared:
            break
        if found and item.function is not found[0].function:
            break
        found.append(item)
    return found


def _carried_results(
    run: Sequence[Call], start: int, last_reader: Mapping[str, int]
) -> tuple[int, ...] | None:
    """Return `LayerLoop.carried` for a loop over `run`, consecutive calls from index `start`; None
    if no loop can replace them. `last_reader` has the index of the last item that reads each
    variable.
    """
    if len(run) < _MIN_LOOP_CALLS:
        return None
    carried: dict[int, int] = {}
    for place, argument in enumerate(run[0].reads):
        if any(call.reads[place] != argument for call in run):
            sources = {
                before.writes.index(after.reads[place])
                if after.reads[place] in before.writes
                else None
                for before, after in itertools.pairwise(run)
            }
            source = sources.pop()
            if sources or source is None or source in carried:
                return None
            carried[source] = place
    if len(carried) < len(run[0].writes):
        return None
    # The loop assigns its results to the variables that the first call reads in their place, which
    # overwrites these variables. So no later item may read them.
    starts = [run[0].reads[place] for place in carried.values()]
    if len(set(starts)) < len(starts):
        return None
    if any(last_reader.get(each, -1) > start for each in starts):
        return None
    for index, call in enumerate(run[:-1], start):
        if any(last_reader.get(result, -1) > index + 1 for result in call.writes):
            return None
    return tuple(carried[index] for index in range(len(run[0].writes)))
