"""The result of reading a model file: its graph, its floating-point tensors with the reason why
each is trained or not, and its unsupported operators.
"""

from __future__ import annotations

import difflib
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Graph, Node, Parameter, Value
from autopipe.ir.memo import MAX_CACHED_GRAPHS, memoize
from autopipe.ir.ops import OPERATORS, operator_of, qualified_name
from autopipe.ir.ops.unsupported import GRADIENT, REASONS, REASONS_BY_DOMAIN
from autopipe.ir.problem import SCORES, Mode, Scores
from autopipe.passes.frontend.cleanup import STOP_GRADIENT
from autopipe.passes.frontend.control_flow import nodes_within
from autopipe.passes.frontend.decompositions.registry import decomposition_of
from autopipe.passes.frontend.device_annotations import Configuration
from autopipe.passes.frontend.fusion.rules import FUSED
from autopipe.passes.frontend.parameters import quote_names
from autopipe.passes.frontend.protobuf_scan import CONTROL_OPERATORS
from autopipe.passes.frontend.sequences import SEQUENCE_OPERATORS

if TYPE_CHECKING:
    import onnx

    from autopipe.passes.frontend.load import Source
    from autopipe.passes.frontend.merged_parameters import UntiedParameters
    from autopipe.passes.frontend.parameters import Role


def unsupported_reason(operator: str) -> str:
    """Return for messages why an operator is not supported. `operator` is its name with the domain
    as prefix.
    """
    import onnx.defs

    domain, _, name = operator.rpartition(".")
    if operator in REASONS:
        return REASONS[operator]
    if domain == "com.microsoft" and name.endswith("Grad"):
        return GRADIENT
    if domain:
        return REASONS_BY_DOMAIN.get(
            domain, f"a custom operator of domain {domain!r}, which only its makers can compute"
        )
    if onnx.defs.has(name):
        return "an operator of ONNX that autopipe does not define"
    near = difflib.get_close_matches(name, [each for each in OPERATORS if "." not in each], n=1)
    return f"ONNX has no such operator{f', did you mean {near[0]!r}?' if near else ''}"


@dataclass(frozen=True, slots=True)
class Origin:
    """A node of the file, and the nodes of the graph that compute its results.

    - `position`: position of the node in the file.
    - `values`: distinct pairs (name in the file, name in the graph) of the values that the node
      reads and writes. Values that the graph does not have are omitted.
    - `readers`: indices of the origins whose nodes read a result of this node.
    """

    position: int
    title: str
    values: tuple[tuple[str, str], ...]
    readers: tuple[int, ...]
    writes: int | None
    """Index of the graph's node that writes results of this node, or that fusion created for this
    node (for example the transposition of the keys of attention). None if there is none.
    """
    renames: int | None
    """Index of the graph's node whose result this node only gives another name; None if this node
    does more.
    """


def owners_of(origins: Sequence[Origin]) -> tuple[int | None, ...]:
    """Return for each origin (a node of the file) the index of the graph's node that owns it; None
    if there is none.

    The owner is the node that writes results of the origin. The owner of an origin that was removed
    or fused is the node that owns all readers of its results, if that is a single node.
    """
    owners = [each.renames if each.writes is None else each.writes for each in origins]
    for index in range(len(origins) - 1, -1, -1):
        if owners[index] is None:
            found = {owners[reader] for reader in origins[index].readers}
            owners[index] = found.pop() if len(found) == 1 else None
    return tuple(owners)


@memoize(MAX_CACHED_GRAPHS)
def origins_of(source: Source, aliases: Mapping[str, str], graph: Graph) -> tuple[Origin, ...]:
    """Return for each node of `source`, in topological order, the nodes of `graph` that compute its
    results. `aliases` maps names in the file that only rename a value to that value.
    """
    # If an Identity renames a value to an output, the graph may contain the value under that name
    # only.
    renamed = {aliases[name]: name for name in graph.outputs if name in aliases}

    def name_of(name: str) -> str | None:
        """Return the name in the graph of a value of the file; None if the graph does not have the
        value.
        """
        if graph.has(name):
            return name
        name = aliases.get(name, name)
        return name if graph.has(name) else renamed.get(name)

    readers: dict[str, list[int]] = {}
    for index, node in enumerate(source.nodes):
        for name in node.input:
            readers.setdefault(name, []).append(index)
    written: set[int] = set()
    found = []
    for node, position in zip(source.nodes, source.positions, strict=True):
        results = [name for name in node.output if name]
        known_results = (own for name in results if (own := name_of(name)) is not None)
        producers = [
            producer for own in known_results if (producer := graph.producer(own)) is not None
        ]
        writes = next((producer for producer in producers if producer not in written), None)
        written.update(producers)
        names = ((name, name_of(name)) for name in dict.fromkeys((*node.input, *results)) if name)
        found.append(
            Origin(
                position=position,
                title=f"{node.op_type} {node.name!r}",
                values=tuple((name, own) for name, own in names if own is not None),
                readers=tuple(
                    dict.fromkeys(reader for name in results for reader in readers.get(name, ()))
                ),
                writes=writes,
                renames=producers[0] if producers and writes is None else None,
            )
        )
    return _assign_created_nodes(found, graph)


def _assign_created_nodes(nodes: list[Origin], graph: Graph) -> tuple[Origin, ...]:
    """Return the origins `nodes`, after assigning the nodes of the graph that no node of the file
    writes because fusion created them.

    A created node is assigned to an origin (a node of the file) that was fused. The created node
    must read a value of the origin, and the owner of the origin must read a result of the created
    node. The owner is the graph's node that owns all readers of the origin's results.
    """
    owners = owners_of(nodes)
    free: dict[tuple[str, int], int] = {}
    for index in range(len(owners) - 1, -1, -1):
        origin = nodes[index]
        owner = owners[index]
        if origin.writes is None and origin.renames is None and owner is not None:
            free.update(((own, owner), index) for _, own in origin.values)
    for made in sorted(set(range(len(graph.nodes))) - {each.writes for each in nodes}):
        own = graph.nodes[made]
        after = [reader for name in own.outputs for reader in graph.consumers().get(name, ())]
        for found in [
            free[name, reader] for name in own.inputs for reader in after if (name, reader) in free
        ][:1]:
            if nodes[found].writes is None:
                nodes[found] = replace(nodes[found], writes=made)
    return tuple(nodes)


@dataclass(frozen=True, slots=True)
class Unsupported:
    """An operator without definition, the number of its nodes, and the name of the first of
    them.
    """

    operator: str
    count: int
    node: str
    reason: str
    """Why the operator is not supported, for messages."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A floating-point tensor of the file that the graph reads: whether it is trained, and why or
    why not.
    """

    value: Value
    trained: bool
    why: str
    doubtful: bool = False
    refused: bool = False
    """True if the loss depends on the tensor, but the exporter computed it from parameters in an
    unknown way. Training it instead of the parameters is then rejected.
    """


@dataclass(frozen=True, slots=True)
class Model:
    """The graph of one forward pass of an ONNX file on one micro-batch, and information about the
    file.
    """

    graph: Graph
    path: Path
    digest: str
    """SHA-256 of the file without the data of its large tensors, its annotations and its format
    version.
    """
    batch: int | None
    """Number of samples of one forward pass; None if no input has a batch dimension."""
    loss: str
    """Name of the output that is the loss; "" if there is none."""
    mode: Mode
    nodes_before: int
    """Number of nodes of the file, before cleanup and fusion."""
    configurations: tuple[Configuration, ...]
    unsupported: tuple[Unsupported, ...]
    warnings: tuple[str, ...]
    source: Source | None = field(default=None, repr=False, compare=False)
    """The parsed file, from which graphs for other batch sizes are built. None if the graph was not
    read from a file.
    """
    aliases: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Names in the file that only rename a value, and the name of that value."""
    tensors: tuple[Tensor, ...] = field(default=(), repr=False, compare=False)
    """Floating-point tensors of the file that the graph reads, each with whether and why it is
    trained.
    """
    scores: Scores = "keep"
    """`keep` if the losses of the graph save their logits for the backward pass; `recompute` if
    they compute the logits again.
    """
    unknown_detached: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """Operators and names of nodes for which the file declares that an operand is detached, but not
    which operand.
    """
    unrecorded: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """Ways to stop gradients in PyTorch that the file does not record. If the exported module uses
    one of them, the graph trains tensors that the module does not train.
    """
    other: Graph | None = field(default=None, repr=False, compare=False)
    """The graph with the other value of `scores`; None if only one value is considered."""
    loss_choices: tuple[str, ...] = ()
    """Outputs each of which can be the loss. () unless there are several and the user named
    none.
    """

    def with_scores(self, scores: Scores) -> Model:
        """Return the model whose losses save (`keep`) or recompute (`recompute`) their logits.
        Return this model if it does so already, or if the other value of `scores` is not
        considered.
        """
        if self.other is None or scores == self.scores:
            return self
        return replace(self, graph=self.other, other=self.graph, scores=scores)

    @property
    def forms(self) -> tuple[Model, ...]:
        """This model, and, if the other value of `scores` is considered too, the model with that
        value. The value states whether losses save or recompute their logits.
        """
        return (
            self,
            *(
                self.with_scores(each)
                for each in SCORES
                if self.other is not None and each != self.scores
            ),
        )

    @property
    def fused(self) -> dict[str, int]:
        """Number of nodes that were fused from several nodes of the file, by operator."""
        own = (
            Counter(node.op_type for node in self.source.nodes)
            if self.source is not None
            else Counter()
        )
        found = Counter(node.op for node in self.graph.nodes if node.op in FUSED)
        return {
            operator: count - own[operator]
            for operator, count in found.most_common()
            if count > own[operator]
        }

    @property
    def origins(self) -> tuple[Origin, ...]:
        """For each node of the file, the nodes of the graph that compute its results; () if the
        model was not read from a file.
        """
        return () if self.source is None else origins_of(self.source, self.aliases, self.graph)


REMOVED = frozenset({"Constant", "Identity", "CastLike", "Shape", "Size"})
"""Operators that do not remain in a graph, because all shapes are static."""


def unsupported_operators(graph: Graph) -> tuple[Unsupported, ...]:
    """Return the operators of a graph that have no definition in `OPERATORS`, most frequent
    first.
    """
    return _list_undefined([(qualified_name(node), node.name) for node in graph.nodes])


def require_readable(source: Source) -> None:
    """Raise ModelError if the file contains operators that autopipe does not define and whose
    results ONNX cannot infer. The error lists all of them, including operators in bodies of control
    flow.

    An undefined operator that ONNX can infer is accepted here: it may be evaluated while the model
    is read, and is checked afterwards. Also raises ModelError if the operands or attributes of a
    node violate ONNX's specification.
    """
    import onnx.checker
    import onnx.defs

    context = onnx.checker.C.CheckerContext()
    context.ir_version = onnx.IR_VERSION
    context.opset_imports = dict(source.opsets)
    opsets = dict(source.opsets)
    unreadable = []
    for node in nodes_within(source.nodes):
        domain = "" if node.domain == "ai.onnx" else node.domain
        if not domain and node.op_type in CONTROL_OPERATORS:
            continue
        name = f"{domain}.{node.op_type}" if domain else node.op_type
        flow = any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute)
        known = onnx.defs.has(node.op_type, opsets.get(domain, 1), domain)
        read = name in OPERATORS or name in REMOVED or name in SEQUENCE_OPERATORS
        read = read or decomposition_of(node) is not None
        if not read and (flow or domain or not known):
            unreadable.append((name, node.name))
        elif (
            known and name != "Constant" and not _is_deprecated(node, opsets.get(domain, 1), domain)
        ):
            # Constant nodes are not checked, because their data may not be loaded.
            try:
                onnx.checker.check_node(node, context)
            except onnx.checker.ValidationError as error:
                reason = str(error).strip().splitlines()[0]
                raise ModelError(
                    f"the node violates the ONNX specification: {reason}",
                    where=f"{node.op_type} {node.name!r}",
                ) from error
    if unreadable:
        raise unsupported_error(_list_undefined(unreadable))


def _is_deprecated(node: onnx.NodeProto, opset: int, domain: str) -> bool:
    """True if ONNX has deprecated the operator, for example GroupNormalization of opset 18."""
    import onnx.defs

    return bool(onnx.defs.get_schema(node.op_type, opset, domain).deprecated)


def unsupported_error(unsupported: tuple[Unsupported, ...]) -> ModelError:
    """Return the error for unsupported operators, with their counts and reasons."""
    names = ", ".join(f"{each.operator} ({each.count})" for each in unsupported)
    reasons: dict[str, list[str]] = {}
    for each in unsupported:
        reasons.setdefault(each.reason, []).append(each.operator)
    hint = "; ".join(f"{', '.join(operators)}: {reason}" for reason, operators in reasons.items())
    return ModelError(
        f"the model uses operators that are not supported: {names}",
        hint=hint,
        where=repr(unsupported[0].node),
    )


def _list_undefined(uses: list[tuple[str, str]]) -> tuple[Unsupported, ...]:
    """Return the operators in `uses` without a definition in `OPERATORS`, most frequent first.
    `uses` lists (operator, node name) of each node.
    """
    counts = Counter(name for name, _ in uses)
    first = dict(reversed(uses))
    return tuple(
        Unsupported(name, count, first[name], unsupported_reason(name))
        for name, count in counts.most_common()
        if name not in OPERATORS
    )


UNREACHED = "no gradient reaches it"
"""Reason that messages state for an untrained parameter to which no gradient flows."""


def stopped_parameters(graph: Graph, loss: str) -> dict[str, tuple[str, ...]]:
    """Return the parameters on which the loss depends although they receive no gradient from it.
    The key is the operator and name of the node that stops the gradient, the value the names of the
    parameters.

    `graph` must still mark these parameters as trainable.
    """
    connected = {loss}
    reached = {loss}
    for node in reversed(graph.nodes):
        if not connected.isdisjoint(node.outputs):
            connected.update(node.inputs)
        if not reached.isdisjoint(node.outputs) and not _stops_gradients(graph, node):
            reached.update(node.inputs)
    carried: dict[str, frozenset[str]] = {}
    for each in graph.parameters:
        name = each.value.name
        if each.trainable and name in connected and name not in reached:
            carried[name] = frozenset({name})
    found: dict[str, list[str]] = {}
    known: set[str] = set()
    for node in graph.nodes:
        through = frozenset[str]().union(
            *(carried[name] for name in node.inputs if name in carried)
        )
        if not through or connected.isdisjoint(node.outputs):
            continue
        if _stops_gradients(graph, node):
            found.setdefault(f"{node.op} {node.name!r}", []).extend(sorted(through - known))
            known |= through
        else:
            carried.update((name, through) for name in node.outputs)
    return {title: tuple(names) for title, names in found.items() if names}


def _stops_gradients(graph: Graph, node: Node) -> bool:
    """True if no gradient flows from a node's results to its operands: its gradient is zero or
    undefined, or no result is floating-point.
    """
    row = operator_of(node)
    if row is not None and (row.has_zero_gradient or not row.differentiable):
        return True
    return not any(graph.type_of(name).dtype.is_floating for name in node.outputs if name)


def freeze_unreached(graph: Graph, loss: str) -> Graph:
    """Return the graph in which parameters that no gradient of the output `loss` reaches are marked
    as not trainable.
    """
    reached = {loss}
    for node in reversed(graph.nodes):
        row = operator_of(node)
        if not reached.isdisjoint(node.outputs) and (row is None or row.differentiable):
            reached.update(
                name for name in node.inputs if name and graph.type_of(name).dtype.is_floating
            )
    kept = tuple(
        replace(each, trainable=False)
        if each.trainable and each.value.name not in reached
        else each
        for each in graph.parameters
    )
    return graph if kept == graph.parameters else replace(graph, parameters=kept)


def values_before_stops(graph: Graph) -> frozenset[str]:
    """Return the names of all values on which a StopGradient depends."""
    found: set[str] = set()
    for node in reversed(graph.nodes):
        if node.op == STOP_GRADIENT or not found.isdisjoint(node.outputs):
            found.update(name for name in node.inputs if name)
    return frozenset(found)


def freeze_refused(graph: Graph, roles: Mapping[str, Role]) -> Graph:
    """Return the graph in which tensors that the exporter computed from parameters in an unknown
    way are marked as not trainable.
    """
    kept = tuple(
        replace(each, trainable=False) if is_refused(each, roles) else each
        for each in graph.parameters
    )
    return graph if kept == graph.parameters else replace(graph, parameters=kept)


def is_refused(parameter: Parameter, roles: Mapping[str, Role]) -> bool:
    """True if a tensor is marked as trainable although the exporter computed it from parameters in
    an unknown way.
    """
    role = roles.get(parameter.value.name)
    return parameter.trainable and role is not None and role.refused


def list_tensors(
    graph: Graph, roles: Mapping[str, Role], refused: frozenset[str]
) -> tuple[Tensor, ...]:
    """Return the floating-point tensors of the file that `graph` reads, with the reason why each is
    trained or not. Constants of one element are omitted. `refused` names tensors that must not be
    trained because their origin is unknown and the loss depends on them.
    """
    found = []
    for each in graph.parameters:
        role = roles.get(each.value.name)
        if role is not None and each.value.dtype.is_floating:
            name = each.value.name
            lost = role.trained and not each.trainable and not role.refused
            why, doubtful = (UNREACHED, False) if lost else (role.why, role.doubtful)
            found.append(Tensor(each.value, each.trainable, why, doubtful, name in refused))
    for constant in graph.constants:
        role = roles.get(constant.value.name)
        if role is not None and constant.value.elements > 1:
            found.append(Tensor(constant.value, False, role.why, role.doubtful))
    return tuple(found)


def require_trainable(model: Model) -> None:
    """Raise ModelError if a plan would train tensors that the exporter computed from parameters in
    an unknown way, instead of the parameters. Also raise ModelError if the model is to be trained
    and the file declares a detached operand without identifying it.
    """
    if model.unknown_detached and model.mode is Mode.TRAIN:
        message = "training is refused: an operand is detached, but the file does not say which one"
        hint = "export with autopipe export, or with optimize=False"
        raise ModelError(message, hint=hint, where=f"{model.path}: {model.unknown_detached[0]}")
    refused = [each for each in model.tensors if each.refused]
    if not refused:
        return
    names = tuple(each.value.name for each in refused)
    first = names[0]
    message = (
        f"training is refused: {quote_names(names)} would be trained in place of parameters; "
        f"{first!r} is {refused[0].why}"
    )
    them, itself = (
        (first, "the tensor itself") if len(names) == 1 else (json.dumps(names), "the tensors")
    )
    trainable, frozen = (shlex.quote(f"model.{key}={them}") for key in ("trainable", "frozen"))
    hint = (
        f"autopipe export keeps parameters apart; --set {trainable} trains {itself}, "
        f"--set {frozen} keeps {'it as it is' if len(names) == 1 else 'them as they are'}"
    )
    raise ModelError(message, hint=hint, where=str(model.path))


def training_warnings(
    tensors: tuple[Tensor, ...],
    apart: UntiedParameters,
    left_out: list[str],
    stopped: Mapping[str, tuple[str, ...]],
) -> tuple[str, ...]:
    """Return warnings on four kinds of tensors:

    - tensors for which the file does not determine whether they are trained;
    - parameters that the file lacks, listed in `left_out`;
    - tensors that are refused, because the exporter computed them from parameters in an unknown
      way;
    - parameters whose gradient a node stops. `stopped` contains them by the node's operator and
      name.
    """
    known = {each.value.name for each in tensors}
    split = [name for name in apart.doubtful if name in known]
    trained = [each.value.name for each in tensors if each.doubtful and each.trained]
    kept = [each.value.name for each in tensors if each.doubtful and not each.trained]
    told = (
        (trained, "trained, though nothing in the file says so; model.frozen decides"),
        (kept, "not trained, though nothing in the file says so; model.trainable decides"),
        (
            left_out,
            (
                "not in the file, since its data change nothing yet; exporting with optimize=False "
                "keeps it"
            ),
        ),
        (split, "trained apart from others whose data are equal: exporters merge such parameters"),
    )
    found = [f"{quote_names(tuple(names))}: {what}" for names, what in told if names]
    refused = {each.why: [] for each in tensors if each.refused}  # type: dict[str, list[str]]
    for each in tensors:
        if each.refused:
            refused[each.why].append(each.value.name)
    found += [f"{quote_names(tuple(names))}: {why}" for why, names in refused.items()]
    found += [
        f"{quote_names(names)}: never changed by a gradient, since {title} stops it"
        for title, names in stopped.items()
    ]
    return tuple(found)
