"""Inference of the role of each tensor of a file: parameter, buffer or constant.

ONNX does not record roles. The evidence is, in descending priority: the user's choice; the file's
declarations (the metadata `autopipe.parameters`, or PyTorch's signature of the traced program); and
the name, uses and values of a tensor. A tensor that gradients reach is trained unless it is a
running statistic or a table computed from positions.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from autopipe.ir.errors import ConfigurationError, ModelError
from autopipe.ir.graph import Value
from autopipe.ir.ops import OPERATORS
from autopipe.ir.problem import matches_pattern
from autopipe.ir.words import join_first
from autopipe.passes.frontend.control_flow import nodes_within
from autopipe.passes.frontend.elements import read_stored_data
from autopipe.passes.frontend.merged_parameters import PRODUCER
from autopipe.passes.frontend.protobuf_scan import FLOATING
from autopipe.passes.frontend.signature import Signature
from autopipe.passes.frontend.tables import is_uniform, kind_of_table
from autopipe.passes.frontend.uses import (
    AFFINE_SLOTS,
    ELEMENTWISE,
    GATES,
    LIFTED,
    LOOKUP_SLOTS,
    VIEWS,
    Uses,
    scope_of,
)

if TYPE_CHECKING:
    from autopipe.passes.frontend.load import Source

STATISTICS = frozenset({("BatchNormalization", 3), ("BatchNormalization", 4)})
"""(operator, operand index) of running statistics."""
ANGLES = frozenset({"Sin", "Cos"})
"""Operators whose operand is an angle."""
ANGLE_STEPS = VIEWS | {"Expand", "Mul", "MatMul", "Concat", "Einsum", "Slice"}
"""Operators that may compute angles from a tensor of frequencies."""
BUFFERS = frozenset(
    {
        "final_logits_bias",
        "e_score_correction_bias",
        "inv_freq",
        "original_inv_freq",
        "masked_bias",
        "running_mean",
        "running_var",
        "embed_scale",
        "attn_mask",
        "relative_coords_table",
    }
)
"""Last components of the names that PyTorch's public models give to floating-point buffers."""
LARGEST_LOOK = 1 << 24
"""Maximum bytes of a tensor whose data are examined to infer its role."""
SCALES = frozenset(
    {("Mul", 0), ("Mul", 1)}
    | {(operator, slot) for operator, slot in AFFINE_SLOTS if operator.endswith("Normalization")}
)
"""(operator, operand index) of operands that are all ones or all zeros in a newly initialised
PyTorch model.
"""
SCALES_OF_WEIGHTS = frozenset(
    {("MatMulNBits", 2), ("MatMulNBits", 3), ("MatMulBnb4", 2), ("GatherBlockQuantized", 2)}
    | {("QMoE", slot) for slot in (3, 6, 9)}
)
"""(operator, operand index) of scales and zero points of quantised weights."""
MATRICES = frozenset({("MatMul", 1), ("Gemm", 1), ("Conv", 1)})
"""(operator, operand index) of weight matrices of layers."""
SIMILARITY = frozenset({("Exp", 0), ("Add", 1), ("Mul", 1)})
"""(operator, operand index) of two parameters that are applied to similarities, as in CLIP and
SigLIP: their scale, which is stored as a logarithm, and their offset.
"""
RESIZED = frozenset({("Resize", 0), ("Shape", 0)} | {("Concat", slot) for slot in range(4)})
"""(operator, operand index) of a table of position embeddings that is resized, and of rows of the
table that are not resized.
"""
BESIDE = (("Exp", 0), ("Resize", 0))
"""(operator, operand index) that identify modules with a scale of similarities, as in CLIP, or with
a table of position embeddings that is resized.
"""
STATED = "autopipe.parameters"
"""Metadata key of a JSON list of the names of all trained tensors of the file."""
UNRECORDED = ("no_grad", "requires_grad=False")
"""Ways to stop gradients in PyTorch that no exporter of PyTorch records."""
FROZEN = "autopipe.frozen"
"""Metadata key of a JSON list of the names of parameters that are not trained. `autopipe export`
lists the parameters with `requires_grad=False`.
"""
NAMED = 3
"""Maximum number of names in a message. The message only counts further names."""
Numbers = Callable[[], "np.ndarray | None"]
"""Returns the data of a tensor; None if they are not available."""


@dataclass(frozen=True, slots=True)
class Role:
    """Role of a tensor of the file: `trained` is True if it is trained, and `why` states the reason
    for messages.
    """

    trained: bool
    why: str
    doubtful: bool = False
    """True if the evidence is weak, so that the user is asked to check the role."""
    constant: bool = False
    """True if the tensor is a constant of the graph; False for parameters and buffers."""
    refused: bool = False
    """True if the exporter computed the tensor from parameters in an unknown way. Training it
    instead of the parameters is then rejected.
    """


def quote_names(names: tuple[str, ...]) -> str:
    """Return a list of quoted names for messages: the first `NAMED` names, and the number of
    further names.
    """
    return join_first([repr(name) for name in names], NAMED)


def computed_role(origins: tuple[str, ...], legacy: bool) -> Role:
    """Return the role of a tensor that the exporter computed from the parameters `origins` in an
    unknown way; () if the parameters are unknown, too. `legacy` is True for PyTorch's older
    exporter.
    """
    option = "do_constant_folding=False" if legacy else "optimize=False"
    if not origins:
        why = f"perhaps computed from parameters; export with {option} to train them"
    else:
        why = (
            f"computed from {quote_names(origins)}; export with {option} to train "
            f"{'them' if len(origins) > 1 else 'it'}"
        )
    return Role(True, why, refused=True)


SIGNED = Role(True, "a parameter, as the signature says")
"""Role of a tensor that PyTorch's signature declares as a parameter."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Infers the role of each floating-point tensor of a file."""

    uses: Uses
    stated: frozenset[str] | None
    """Names of the trained tensors according to the metadata `autopipe.parameters`; None if the
    file lacks the entry.
    """
    frozen: frozenset[str] | None
    """Names of untrained parameters according to the metadata `autopipe.frozen`; None if the file
    lacks the entry. If the file has it, all other parameters that PyTorch's exporter declares are
    trained.
    """
    signature: Signature
    from_torch: bool
    """True if a PyTorch exporter wrote the file. These exporters store every parameter as an
    initializer.
    """
    settled: bool
    """True if a PyTorch model was probably trained before export: it has named scales, and none of
    its named vectors lacks data or has only equal values. False for models whose parameters the
    file's metadata declare.
    """
    folded_scopes: Mapping[tuple[str, int], frozenset[str]]
    """For each (operator, operand index) of `BESIDE`, the modules that read a folded tensor, which
    the exporter computed, as this operand. No modules for files that PyTorch did not export.
    """
    samples: frozenset[int]
    """Fixed sizes of axis 0 of the inputs, 0 if the size is symbolic."""

    @property
    def unrecorded(self) -> tuple[str, ...]:
        """Ways to stop gradients in PyTorch that the file does not record; () if PyTorch did not
        export the file or if the file declares which parameters are trained.
        """
        if not self.from_torch or self.stated is not None or self.frozen is not None:
            return ()
        return UNRECORDED if self.signature else ("detach", "padding_idx", *UNRECORDED)

    def infer_role(self, value: Value, numbers: Numbers, in_node: bool = False) -> Role:
        """Return the role of the floating-point tensor `value`. `numbers` returns its data.
        `in_node` is True for the tensor of a Constant node.
        """
        name = value.name
        slots = self.uses.slots(name)
        if self.is_statistic(name):
            # A running statistic does not receive a gradient, so declarations of the file are
            # ignored.
            return Role(False, "a running statistic")
        if self.stated is not None:
            if name in self.stated:
                return Role(True, "stated by the file")
            return Role(False, "no parameter, as the file states", constant=True)
        if self.frozen is not None and name in self.frozen:
            return Role(False, "frozen, as the file states")
        if self.signature:
            return self._role_in_signature(value, numbers, slots)
        if slots and slots <= SCALES_OF_WEIGHTS:
            return Role(False, "scales of quantised weights")
        if any(
            operator in OPERATORS and slot in OPERATORS[operator].static for operator, slot in slots
        ):
            return Role(False, "an operator's setting", constant=True)
        if in_node and self.from_torch:
            return Role(False, "a constant of the graph", constant=True)
        if not value.shape and (not self.from_torch or LIFTED.fullmatch(name)):
            return Role(False, "a scalar", constant=True)
        return self._role_by_use(value, numbers, slots)

    def _is_spectral_vector(self, name: str) -> bool:
        """True if PyTorch's spectral normalization stores one of its two vectors under this name,
        beside the weight NAME_orig.
        """
        base = re.fullmatch(r"(.+)_[uv]", name)
        return base is not None and f"{base[1]}_orig" in self.uses.readers

    def _are_frequencies(self, value: Value, numbers: Numbers) -> bool:
        """True if a tensor that is only read to compute sines and cosines is probably a series of
        frequencies, not a parameter.
        """
        wide = sum(extent > 1 for extent in value.shape)
        if not self.from_torch or wide < 1:
            return True
        if LIFTED.fullmatch(value.name):
            return wide < 2
        return bool(self._kind_of_table(value, numbers, named=False))

    def is_filled_weight(self, name: str) -> bool:
        """True if the result `name` of a ConstantOfShape node is a weight, because operators read
        it as weight, scale or offset.

        False for files of PyTorch's exporters, which never write weights this way. If the file has
        the metadata `autopipe.parameters`, only that list decides.
        """
        if self.from_torch or self.stated is not None:
            return self.stated is not None and name in self.stated
        return self.uses.is_weight(name) or self._is_affine(name)

    def is_statistic(self, name: str) -> bool:
        """True if a BatchNormalization reads the tensor `name` as running mean or variance."""
        return bool(self.uses.slots(name) & STATISTICS)

    def _role_in_signature(
        self, value: Value, numbers: Numbers, slots: frozenset[tuple[str, int]]
    ) -> Role:
        """Return the role of a tensor of a file whose metadata contain PyTorch's signature: the
        parameters and buffers of the traced program. `slots` contains (operator, operand index) of
        the tensor's uses.
        """
        name = value.name
        if name in self.signature.buffers:
            return Role(False, "a buffer, as the signature says")
        if not self.signature.is_trained(name):
            return Role(False, "no parameter, as the signature says", constant=True)
        if self.frozen is not None and name in self.signature.parameters:
            return SIGNED
        if not LOOKUP_SLOTS.isdisjoint(slots) or name not in self.signature.parameters:
            table = self._kind_of_table(value, numbers, named=True)
            if table.startswith("a table"):
                # The data show an embedding table that is not trained, for example a table of
                # positions. The signature does not record this, so the data decide the role.
                return Role(False, table)
        if name in self.signature.parameters:
            return SIGNED
        origins = quote_names(self.signature.origins(name))
        sign = ", perhaps negated" if "neg" in self.signature.operators(name) else ""
        return Role(True, f"elements of {origins}{sign}, in a layout that the file does not tell")

    def _role_by_use(
        self, value: Value, numbers: Numbers, slots: frozenset[tuple[str, int]]
    ) -> Role:
        """Return the role of a tensor that the file does not declare, from its name, uses and data.
        `slots` contains (operator, operand index) of its uses.
        """
        name = value.name
        lifted = bool(LIFTED.fullmatch(name))
        if lifted and value.elements == 1:
            if (
                value.shape
                and self.from_torch
                and slots <= SIMILARITY
                and self._is_read_with_fold(name, ("Exp", 0))
            ):
                return Role(True, "by its use", doubtful=True)
            return Role(False, "a scalar", constant=True)
        if name.rpartition(".")[2] in BUFFERS:
            return Role(False, "a buffer, by its name", doubtful=not self.from_torch)
        if self._is_spectral_vector(name):
            return Role(False, "a buffer of spectral normalization, by its name")
        is_angle = _is_angle(self.uses, name)
        if is_angle and self._are_frequencies(value, numbers):
            return Role(False, "frequencies of sines and cosines")
        if any(
            operator in GATES and slot > 3 and (operator, slot) != ("LSTM", 7)
            for operator, slot in slots
        ):
            return Role(False, "an initial state", constant=True)
        table = self._kind_of_table(value, numbers, named=not lifted)
        if table:
            # A weight matrix may start with the data of a table, for example the identity. Only a
            # trained matrix is usually named, so a named matrix counts as trained, but its role is
            # marked doubtful.
            is_weight = self.from_torch and not lifted and bool(slots) and slots <= MATRICES
            return Role(
                is_weight,
                "by its use" if is_weight else table,
                doubtful=is_weight,
                constant=not is_weight,
            )
        if is_angle:
            return Role(True, "by its use", doubtful=not lifted)
        if value.bytes <= LARGEST_LOOK and (array := numbers()) is not None and is_uniform(array):
            return self._role_of_uniform(value, slots, lifted)
        return Role(True, "by its use")

    def _role_of_uniform(
        self, value: Value, slots: frozenset[tuple[str, int]], lifted: bool
    ) -> Role:
        """Return the role of a tensor whose values are all equal: a newly initialised parameter,
        such as a scale or an offset, or an untrained default. `lifted` is True if the exporter
        invented the tensor's name.
        """
        wide = [extent for extent in value.shape if extent > 1]
        if slots and slots <= AFFINE_SLOTS:
            return Role(True, "by its use")
        if not lifted and self.from_torch:
            return Role(True, "by its name")
        if self.from_torch and self.settled:
            return Role(False, "equal numbers, in a model that was trained", constant=True)
        elementwise = bool(slots) and all(operator in ELEMENTWISE for operator, _ in slots)
        if elementwise and len(wide) <= 1:
            if self.from_torch and lifted and len(value.shape) == 2 and value.shape[0] == 1:
                # A vector with a module's name may be an offset of a layer, which is trained. This
                # tensor is without such a name and is probably a buffer, for example the bias of
                # BART's logits.
                return Role(False, "equal numbers", constant=True, doubtful=True)
            told = value.shape[:1] != (1,) or value.shape[-1:] == (1,) if self.from_torch else False
            return Role(True, "by its use", doubtful=not told)
        if self.uses.is_weight(value.name) and len(wide) > 1:
            return Role(True, "by its use")
        if elementwise and self.from_torch and len(value.shape) > 1 and value.shape[-3:-2] != (1,):
            # Equal values may be the initial values of a new table of biases, as in Swin. The
            # tensor counts as trained, but the role is marked doubtful.
            return Role(True, "by its use", doubtful=True)
        if (
            self.from_torch
            and slots <= RESIZED
            and self._is_read_with_fold(value.name, ("Resize", 0))
        ):
            # Equal values may be the initial values of a part of a table of positions, as in BEiT.
            # The tensor counts as trained, but the role is marked doubtful.
            return Role(True, "by its use", doubtful=True)
        return Role(
            False,
            "equal numbers",
            constant=True,
            doubtful=lifted and self.from_torch and len(wide) > 1,
        )

    def _is_read_with_fold(self, name: str, slot: tuple[str, int]) -> bool:
        """True if a module that reads `name` also reads a folded tensor, which the exporter
        computed, as the operand `slot`: (operator, operand index). That tensor may be `name`
        itself.
        """
        return not self.folded_scopes[slot].isdisjoint(_reading_modules(self.uses, name))

    def _kind_of_table(self, value: Value, numbers: Numbers, named: bool) -> str:
        """Return which kind of table the data of a tensor are, for messages; "" if they may be a
        weight or are too large to examine. `named` is True if the tensor has a name of the module.
        """
        if value.bytes > LARGEST_LOOK or value.elements < 2:
            return ""
        array = numbers()
        return "" if array is None else kind_of_table(array, named)

    def _is_affine(self, name: str) -> bool:
        """True if a tensor is only used as scale or offset of a channel, written as an Unsqueeze
        followed by a Mul or Add.
        """
        readers = self.uses.readers.get(name, ())
        if not readers or any(node.op_type != "Unsqueeze" for node, _ in readers):
            return False
        return self.uses.slots(name) <= {("Mul", 0), ("Mul", 1), ("Add", 0), ("Add", 1)}


def roles_of(source: Source) -> Roles:
    """Return the object that infers roles of the tensors of a file. Raises ModelError if a metadata
    entry with names of parameters is malformed.
    """
    signature = Signature.of(source.graph, source.metadata)
    stated = _names_in_metadata(source.metadata, STATED)
    uses = Uses(nodes_within(source.nodes))
    lifted = [
        name for name in uses.readers if source.producer == PRODUCER and LIFTED.fullmatch(name)
    ]
    slots = {name: uses.slots(name) for name in lifted}
    return Roles(
        uses=uses,
        stated=stated,
        frozen=_names_in_metadata(source.metadata, FROZEN),
        signature=signature,
        from_torch=source.producer == PRODUCER,
        settled=source.producer == PRODUCER
        and not signature
        and stated is None
        and _is_probably_trained(source, uses),
        folded_scopes={
            slot: frozenset(
                scope
                for name in lifted
                if slot in slots[name]
                for scope in _reading_modules(uses, name)
            )
            for slot in BESIDE
        },
        samples=frozenset(
            info.type.tensor_type.shape.dim[0].dim_value
            for info in source.graph.input
            if info.type.tensor_type.shape.dim
        ),
    )


def _reading_modules(uses: Uses, name: str) -> set[str]:
    """Return the modules whose nodes, other than Identity, read the tensor `name`."""
    return {scope_of(node) for node, _ in uses.readers.get(name, ()) if node.op_type != "Identity"}


def _is_angle(uses: Uses, name: str) -> bool:
    """True if the tensor `name` is only used to compute sines and cosines."""
    ends = uses.slots(name, ANGLE_STEPS)
    return bool(ends) and all(operator in ANGLES for operator, _ in ends)


def _is_probably_trained(source: Source, uses: Uses) -> bool:
    """True if the model was probably trained before export: at least one vector with a name of the
    module is a scale, and none of the vectors with such names has equal or missing values.
    """
    scales = 0
    for tensor in source.graph.initializer:
        if tensor.data_type not in FLOATING or len(tensor.dims) != 1 or tensor.dims[0] < 2:
            continue
        slots = uses.slots(tensor.name)
        if LIFTED.fullmatch(tensor.name) or not slots or _is_angle(uses, tensor.name):
            continue
        array = read_stored_data(tensor.name, tensor, source.slices, source.path)
        if array is None or is_uniform(array):
            return False
        scales += slots <= SCALES
    return scales > 0


def _names_in_metadata(metadata: Mapping[str, str], key: str) -> frozenset[str] | None:
    """Return the names that the file lists under `key` in its metadata; None if the key is missing.
    Raises ModelError if the entry is not a JSON list of names.
    """
    text = metadata.get(key)
    if text is None:
        return None
    try:
        names = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ModelError(f"the model's metadata entry {key!r} is not valid JSON") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"the model's metadata entry {key!r} is not a list of names")
    return frozenset(names)


@dataclass(frozen=True, slots=True)
class TrainingChoice:
    """The user's choice of trained tensors: the patterns of `model.trainable` and `model.frozen`. A
    name that matches both is trained.
    """

    trainable: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    matched: set[str] = field(default_factory=set)
    """Patterns that have matched at least one name so far."""
    names: set[str] = field(default_factory=set)
    """Names that have been compared with the patterns so far."""

    def is_trained(self, name: str) -> bool | None:
        """Return True if the user chose to train the tensor `name`, False if the user froze it, and
        None if no pattern matches the name.
        """
        self.names.add(name)
        trainable, frozen = (
            [pattern for pattern in patterns if matches_pattern(pattern, name, key)]
            for key, patterns in (
                ("model.trainable", self.trainable),
                ("model.frozen", self.frozen),
            )
        )
        self.matched.update(trainable, frozen)
        return bool(trainable) if trainable or frozen else None

    def require_matched(self) -> None:
        """Raise ConfigurationError if a pattern has matched none of the compared names."""
        for key, patterns in (("model.trainable", self.trainable), ("model.frozen", self.frozen)):
            for pattern in patterns:
                if pattern not in self.matched:
                    raise ConfigurationError(
                        f"{key}: pattern {pattern!r} matches the full name of no floating-point "
                        "tensor",
                        hint=self._suggest_pattern(pattern, key)
                        or "list the names with autopipe inspect -v",
                    )

    def _suggest_pattern(self, pattern: str, key: str) -> str:
        """Return a hint for a pattern that matches no name: a longer pattern that matches, or a
        similar name. Return "" if there is neither.
        """
        prefix, text = ("re:", pattern[3:]) if pattern.startswith("re:") else ("", pattern)
        anything = ".*" if prefix else "*"
        for longer in (text + anything, anything + text, anything + text + anything):
            found = sorted(
                name for name in self.names if matches_pattern(prefix + longer, name, key)
            )
            if found:
                more = f" and {len(found) - 1} more" if len(found) > 1 else ""
                return f"{prefix + longer!r} matches {found[0]!r}{more}"
        near = difflib.get_close_matches(pattern, sorted(self.names), n=1)
        return f"did you mean {near[0]!r}?" if near else ""
