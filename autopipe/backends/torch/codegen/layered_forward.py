"""The source of `forward` with one function per class of repeated layers (`--style layers`).

Names of variables and attributes come from the model (see `value_names` and `attribute_paths`). The
function of a layer class gets the parameters of one layer as `p`. The `p` of the stage has a list
with one such object per layer, over which `forward` loops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopipe.backends.torch.codegen.attribute_paths import (
    AttributePaths,
    model_path,
    path_in_layer,
)
from autopipe.backends.torch.codegen.block import kind_of, rename_tokens, tokens_read
from autopipe.backends.torch.codegen.layer_functions import (
    FORWARD_SUFFIX,
    Call,
    Function,
    Item,
    LayerLoop,
    variables_read,
)
from autopipe.backends.torch.codegen.statement import Statement, tuple_code, wrapped_call
from autopipe.backends.torch.codegen.value_names import NameHint
from autopipe.backends.torch.codegen.variable_names import (
    NamedVariables,
    name_variables,
)
from autopipe.ir.layer_names import numbers_of
from autopipe.ir.program import assignment_name
from autopipe.ir.words import count_text


@dataclass(frozen=True, slots=True)
class ModelNames:
    """Names in a model from which names in generated code follow, by token."""

    parameters: Mapping[str, str]
    """Name in the model of each parameter and constant."""
    scopes: Mapping[str, str]
    """Name of the first node that reads each parameter, constant or random key."""
    hints: Mapping[str, NameHint]
    """Suggested names of variables."""
    sizes: Mapping[str, int]
    """Size of each variable in bytes."""


@dataclass(frozen=True, slots=True)
class LayeredForward:
    """The source of a stage in layered form."""

    text: str
    arguments: tuple[str, ...]
    """Names of the arguments of `forward` after `p`."""
    results: tuple[str, ...]
    """Code of the results of `forward`."""
    attributes: tuple[tuple[str, str | int], ...]
    """(path, token) of each attribute of `p`: w3 for parameter 3, c3 for constant 3, or the key of
    a random operator. A number in a path is an index in a list of layers.
    """
    recorded: Mapping[str, str]
    """Name under which `autopipe launch --values` records each variable."""


def layered_forward(
    items: Sequence[Item],
    arguments: Mapping[str, str],
    results: Mapping[str, str],
    names: ModelNames,
    moves_arguments: bool = False,
) -> LayeredForward:
    """Return the source of a stage whose `forward` consists of `items`.

    `arguments` and `results` have the tokens that `forward` gets and returns, in order, with
    suggested names. A suggested name of "" means that the name follows from the operator.

    By default, the caller of a function refers to the arguments until the function returns. With
    `moves_arguments`, the function frees the arguments that `forward` does not read again.
    """
    writer = _Writer(items, arguments, results, names, moves_arguments)
    return writer.write()


class _Writer:
    """One run of `layered_forward`."""

    def __init__(
        self,
        items: Sequence[Item],
        arguments: Mapping[str, str],
        results: Mapping[str, str],
        names: ModelNames,
        moves_arguments: bool,
    ) -> None:
        self.items = items
        self.moved = _moved_arguments(items, results) if moves_arguments else {}
        """For each function, the indices of the arguments that it frees."""
        self.results = results
        self.names = names
        functions = dict.fromkeys(
            item.function for item in items if not isinstance(item, Statement)
        )
        self.functions: list[Function] = list(functions)
        self.paths = AttributePaths()
        """Paths of the attributes of the stage's `p`."""
        self.lists = {
            each.name: self.paths.reserve(f"{each.name.removesuffix(FORWARD_SUFFIX).rstrip('_')}s")
            for each in self.functions
            if each.is_shared
        }
        """Attribute with the layers of each shared function, by its name."""
        self.attributes: dict[str, str | int] = {}
        self.root_codes: dict[str, str] = {}
        """Code of the parameters, constants and random keys that are attributes of the stage's
        `p`.
        """
        self.reserved = {each.name for each in self.functions}
        self.stems = self._stems(arguments)
        self.function_names: dict[str, NamedVariables] = {}
        """Variables of each function by the function's name."""
        self.arguments = arguments

    def _stems(self, arguments: Mapping[str, str]) -> dict[str, NameHint]:
        """Return the hint of each variable. The stem of a variable that follows another one is the
        stem of that one.
        """
        found = {token: NameHint(name) for token, name in arguments.items()}
        for token, hint in self.names.hints.items():
            origin = None if hint.follows is None else found.get(hint.follows)
            stem = hint.stem if origin is None else origin.stem
            found[token] = NameHint(stem, hint.follows)
        return found

    def write(self) -> LayeredForward:
        """Return the source and what describes it."""
        texts = [self._function_text(each) for each in self.functions]
        forward = self._name_forward()
        codes = self._codes(self._statements_of_forward(), forward)
        lines = self._body_lines(self.items, forward, codes)
        arguments = tuple(forward.names[each] for each in self.arguments)
        results = [codes[each] if each in codes else self._root_code(each) for each in self.results]
        head = wrapped_call(f"def forward({', '.join(['p', *arguments])}):", "")
        text = "\n".join([*head, *lines, f"    return {tuple_code(results)}", ""])
        helpers = [
            rename_tokens(each.helper, self.root_codes)
            for each in self._statements_of_forward()
            if each.helper
        ]
        return LayeredForward(
            "\n\n".join([*helpers, *texts, text]),
            arguments,
            tuple(results),
            tuple(self.attributes.items()),
            self._recorded(forward),
        )

    def _statements_of_forward(self) -> list[Statement]:
        """Return the statements of `forward` itself."""
        return [each for each in self.items if isinstance(each, Statement)]

    def _name_forward(self) -> NamedVariables:
        """Return the names of the variables of `forward`. The function of a loop names the
        variables with which the loop starts, and the model names the results of `forward`.
        """
        preferred = {token: name for token, name in self.results.items() if name}
        for item in self.items:
            if isinstance(item, LayerLoop):
                inside = self.function_names[item.function.name].names
                tokens = item.function.instances[0]
                for start, place in zip(item.starts, item.carried, strict=True):
                    preferred[start] = inside[tokens[item.function.arguments[place]]]

        def hint_of(token: str) -> NameHint:
            """Return the suggested name of a variable."""
            if token in preferred:
                return NameHint(preferred[token])
            return self.stems.get(token, NameHint())

        return name_variables(
            self.items,
            self.arguments,
            self.results,
            hint_of,
            self.names.sizes,
            self.reserved,
        )

    def _function_text(self, function: Function) -> str:
        """Return the source of a function."""
        tokens = function.instances[0]
        arguments: dict[str, str] = {}
        for place in function.arguments:
            # The first layer often reads the result of an embedding. The name of the operand of the
            # second layer is more typical.
            typical = function.instances[min(1, len(function.instances) - 1)][place]
            arguments[tokens[place]] = self.stems.get(typical, NameHint()).stem
        results = [tokens[place] for place in function.results]
        variables = name_variables(
            function.statements,
            arguments,
            results,
            lambda token: self.stems.get(token, NameHint()),
            self.names.sizes,
            self.reserved,
            kept=[
                token
                for index, token in enumerate(arguments)
                if index not in self.moved.get(function.name, ())
            ],
        )
        self.function_names[function.name] = variables
        held = self._layer_codes(function) if function.is_shared else None
        codes = self._codes(function.statements, variables, held)
        lines = self._body_lines(function.statements, variables, codes)
        given = ", ".join(["p", *(variables.names[each] for each in arguments)])
        returned = [codes.get(each, each) for each in results]
        helpers = [rename_tokens(each.helper, codes) for each in function.statements if each.helper]
        text = "\n".join(
            [
                *(["@recompute"] if function.flowing is not None else []),
                *wrapped_call(f"def {function.name}({given}):", ""),
                *self._docstring(function),
                *lines,
                f"    return {_returned(returned, function.flowing)}",
                "",
            ]
        )
        return "\n\n".join([*helpers, text])

    def _docstring(self, function: Function) -> list[str]:
        """Return the docstring of the function of a layer class: which layers it computes."""
        if not function.is_shared:
            return []
        count = count_text(len(function.instances), "layer")
        text = f"One of the {count} `p.{self.lists[function.name]}`"
        # Exporters number layers in the names of their parameters. The parameters of a segment can
        # belong to two layers of the model.
        numbers = {
            numbers_of([self.names.parameters.get(each[place], "") for each in function.instances])
            for place in function.held
            if kind_of(function.instances[0][place]) == "w"
        }
        known = sorted(each for each in numbers if each)
        if len(known) == len(numbers) and all(each == _consecutive(each) for each in known):
            first = known[0]
            text += f", numbers {first[0]} to {first[-1]} of the model"
            if len(known) > 1:
                return [
                    f'    """{text}.',
                    "    Each of them begins inside a layer of the model and ends inside the next.",
                    '    """',
                ]
        return [f'    """{text}."""']

    def _layer_codes(self, function: Function) -> dict[str, str]:
        """Return the code of the parameters, constants and random keys of a layer, by the tokens of
        the first instance. Record the attributes of all layers.
        """
        paths = AttributePaths()
        codes: dict[str, str] = {}
        for place in function.held:
            tokens = [each[place] for each in function.instances]
            path = paths.reserve(
                path_in_layer(
                    [self.names.parameters.get(each, "") for each in tokens],
                    [self.names.scopes.get(each, "") for each in tokens],
                    kind_of(tokens[0]),
                )
            )
            codes[tokens[0]] = f"p.{path}"
            for index, token in enumerate(tokens):
                name = f"{self.lists[function.name]}.{index}.{path}"
                self.attributes[name] = _attribute_value(token)
        return codes

    def _codes(
        self,
        statements: Sequence[Statement],
        variables: NamedVariables,
        held: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """Return the code of each token that the statements of a function contain. `held` has the
        code of parameters, constants and random keys; None if they are attributes of the stage's
        `p`.
        """
        codes = dict(variables.names)
        if held is not None:
            return {**codes, **held}
        for token in dict.fromkeys(token for each in statements for token in tokens_read(each)):
            if kind_of(token) in "wc":
                codes[token] = self._root_code(token)
        return codes

    def _root_code(self, token: str) -> str:
        """Return the code of a parameter or constant that is an attribute of the stage's `p`."""
        if token not in self.root_codes:
            name = self.names.parameters.get(token, "")
            scope = self.names.scopes.get(token, "")
            path = self.paths.reserve(model_path(name, scope, kind_of(token)))
            self.root_codes[token] = f"p.{path}"
            self.attributes[path] = _attribute_value(token)
        return self.root_codes[token]

    def _body_lines(
        self, items: Sequence[Item], variables: NamedVariables, codes: Mapping[str, str]
    ) -> list[str]:
        """Return the source lines of the body of a function, without its return statement.
        `variables` are the variables of the function, and `codes` has the code of each token.
        """
        lines: list[str] = []
        facts = ""
        for item, freed in zip(items, variables.freed, strict=True):
            if isinstance(item, Statement):
                lines += self._statement_lines(item, codes, facts)
                facts = item.facts
            else:
                lines += self._call_lines(item, variables)
                facts = ""
            if freed:
                lines.append(f"    del {', '.join(freed)}")
        return lines

    def _statement_lines(
        self, statement: Statement, codes: Mapping[str, str], facts: str
    ) -> list[str]:
        """Return the source lines of a statement. `facts` are the facts of the statement before it,
        which are not repeated.
        """
        named = Statement(
            tuple(codes.get(each, each) for each in statement.targets),
            rename_tokens(statement.code, codes),
            facts="" if statement.facts == facts else statement.facts,
        )
        return named.wrapped_lines()

    def _call_lines(self, item: Call | LayerLoop, variables: NamedVariables) -> list[str]:
        """Return the source lines of a call, or of a loop over calls."""
        function = item.function
        names = variables.names
        values = [names.get(each, each) for each in item.reads]
        targets = [names.get(each, each) for each in item.writes]
        moved = [values[index] for index in self.moved.get(function.name, ())]
        # `pop` removes the only reference of the caller, so the function can free the argument.
        values = [f"{each}.pop()" if each in moved else each for each in values]
        wrapping = [
            f"    {each} = [{each}]  # The function can free an argument that is popped off a list."
            for each in moved
        ]
        assigned = ", ".join(targets)
        if function.flowing is not None and len(targets) == 1:
            assigned = f"({assigned},)"
        if isinstance(item, Call):
            layer = "p"
            if function.is_shared:
                layer = f"p.{self.lists[function.name]}[{item.instance}]"
            call = f"{function.name}({', '.join([layer, *values])})"
            return [*wrapping, *wrapped_call(f"    {assigned} = {call}", "    ")]
        layers = f"p.{self.lists[function.name]}"
        first = item.calls[0].instance
        last = item.calls[-1].instance
        if last - first + 1 < len(function.instances):
            layers += f"[{first}:{last + 1}]"
        call = f"{function.name}({', '.join(['layer', *values])})"
        return [
            f"    for layer in {layers}:",
            *(f"    {each}" for each in wrapping),
            *wrapped_call(f"        {assigned} = {call}", "        "),
        ]

    def _recorded(self, forward: NamedVariables) -> dict[str, str]:
        """Return `LayeredForward.recorded`."""
        inside = _Assignments("forward", 1, forward.names)
        calls_of: Counter[str] = Counter()
        recorded: dict[str, str] = {}
        for item in self.items:
            if isinstance(item, Statement):
                recorded |= inside.record(item.targets, item.targets)
                continue
            for call in item.calls if isinstance(item, LayerLoop) else (item,):
                function = call.function
                calls_of[function.name] += 1
                own = function.instances[call.instance]
                tokens = dict(zip(function.instances[0], own, strict=True))
                names = self.function_names[function.name].names
                of_call = _Assignments(function.name, calls_of[function.name], names)
                for statement in function.statements:
                    targets = statement.targets
                    recorded |= of_call.record(
                        [tokens.get(each, each) for each in targets], targets
                    )
                # In a loop, each iteration assigns to the variables of the last one.
                recorded |= inside.record(call.writes, item.writes)
        return recorded


def _moved_arguments(items: Sequence[Item], results: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Return, for each function, the indices of the arguments that no item reads after any of its
    calls. `results` are the variables that `forward` returns.
    """
    last_reader: dict[str, int] = {}
    for index, item in enumerate(items):
        last_reader |= dict.fromkeys(variables_read(item), index)
    last_reader |= dict.fromkeys(results, len(items))
    moved: dict[str, set[int]] = {}
    for index, item in enumerate(items):
        if not isinstance(item, Statement):
            reads = item.reads
            # All iterations of a loop read the arguments that no iteration computes.
            places = item.carried if isinstance(item, LayerLoop) else range(len(reads))
            dying = {
                place
                for place in places
                if last_reader[reads[place]] == index and reads.count(reads[place]) == 1
            }
            name = item.function.name
            moved[name] = moved[name] & dying if name in moved else dying
    return {name: tuple(sorted(places)) for name, places in moved.items()}


class _Assignments:
    """Counts the assignments to each variable in one call of a function."""

    def __init__(self, function: str, call: int, names: Mapping[str, str]) -> None:
        self.function = function
        self.call = call
        self.names = names
        self.counts: Counter[str] = Counter()

    def record(self, tokens: Sequence[str], targets: Sequence[str]) -> dict[str, str]:
        """Count the assignment of the variables `tokens` to the names of the variables `targets`.
        Return the names under which they are recorded, by token.
        """
        found: dict[str, str] = {}
        for token, target in zip(tokens, targets, strict=True):
            if target in self.names:
                name = self.names[target]
                self.counts[name] += 1
                found[token] = assignment_name(self.function, self.call, name, self.counts[name])
        return found


def _consecutive(numbers: Sequence[int]) -> tuple[int, ...]:
    """Return as many consecutive numbers as `numbers`, from its first one."""
    return tuple(range(numbers[0], numbers[0] + len(numbers)))


def _attribute_value(token: str) -> str | int:
    """Return the value of a token in `LayeredForward.attributes`."""
    return int(token, 16) if kind_of(token) == "k" else token.removeprefix("p.")


def _returned(results: Sequence[str], flowing: int | None) -> str:
    """Return the code of the results of a function. A function that backward recomputes returns two
    tuples, the first with the `flowing` results through which gradients flow.
    """
    if flowing is None:
        return ", ".join(results)
    return f"{tuple_code(results[:flowing])}, {tuple_code(results[flowing:])}"
