"""The set of tensors that a plan would train, compared with the parameters of the module that was
exported.

torch knows its parameters; the exported file has them renamed, folded, merged, copied and packed.
They are matched by name where the file kept it, else by their numbers, which hardly ever meet in
two tensors of a trained model. In a fresh model most numbers are ones and zeros, so that there only
names and counts of elements are left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from torch import nn

from autopipe.ir.graph import DType, FileSlice, Fill, FoldedSlice, Parameter
from autopipe.passes.frontend.read import read_model
from tests.exports.traced import Traced, file_of, module_of
from tests.exports.with_loss import Tensors

SAMPLED = 8
"""Numbers that are looked for first: most tensors hold none of another's."""
UNREAD = "rows that no position reads are not in the file"
"""Said where all that lacks has no gradient."""
NOT_EXPORTED: dict[tuple[str, str], str] = {
    ("cohere", "torchscript"): "the exporter ends with an internal error",
    ("fnet", "torchscript"): "the exporter knows no Fourier transform of several axes",
    ("longformer", "dynamo"): "torch.export meets a condition that depends on data",
    ("mamba2", "torchscript"): "the exporter writes a Transpose that ONNX Runtime refuses too",
    ("switch_transformers", "dynamo"): "torch.export meets a condition that depends on data",
    (
        "switch_transformers",
        "torchscript",
    ): "its experts take as many tokens as the data says (NonZero)",
}
"""Why there is no file to compare."""
COMPUTED = "the exporter computes this from parameters, which `optimize=False` keeps"
NORMALIZED = (
    "the exporter folds batch normalization into the weights before it, which `optimize=False` "
    "keeps"
)
TWICE = (
    "two products that are equal in a new model are one node, which `optimize=False` keeps apart"
)
REFUSED = (
    "training is refused, since the exporter computes this from parameters in a way that the file "
    "does not tell"
)
DROPPED = "the exporter drops what adds 0 or multiplies by 1, which `optimize=False` keeps"
PLAIN = "a table of zeros, looked up at fixed places, shows no rows"
EXPLAINED = (
    (DROPPED, "*-dynamo-fresh", "not trained here: *, all [01])"),
    (PLAIN, "swin-*-fresh", "trained here only: *(512)"),
    (PLAIN, "swin-*-fresh", "trained here only: *bias_table (4)"),
    (PLAIN, "swin-*-fresh", "not trained here: *.relative_position_bias_table *"),
    (PLAIN, "beit*-dynamo-fresh", "trained here only: *.relative_position_bias_table *"),
    ("cut in two", "siglip-torchscript-fresh", "*trained here*: onnx::Add_6[67]* (*)"),
    ("cut in two", "siglip-torchscript-fresh", "not trained here: *.in_proj_bias (48, all 0)"),
    ("cut in two", "beit*-torchscript-fresh", "trained here only: onnx::Concat_* (*)"),
    ("cut in two", "beit*-torchscript-fresh", "trained here only: onnx::Res*_* (*)"),
    (
        "cut in two",
        "beit*-torchscript-fresh",
        "not trained here: *.relative_position_bias_table (*, all 0)",
    ),
    ("cut in two", "beit*-torchscript-fresh", "not trained here: *.position_embeddings (*, all 0)"),
    ("cut in two", "detr-torchscript-fresh", "trained here only: onnx::Add_79* (*)"),
    ("cut in two", "detr-torchscript-fresh", "not trained here: *.in_proj_bias (48, all 0)"),
    ("", "*", f"*{UNREAD}"),
    (REFUSED, "gemma*", "not trained here: *norm.weight *"),
    (REFUSED, "rwkv-dynamo-*", "not trained here: *.attention.output.weight *"),
    (REFUSED, "rwkv-dynamo-*", "not trained here: *.feed_forward.value.weight *"),
    (REFUSED, "beit*-dynamo-*", "not trained here: *.relative_position_bias_table *"),
    (REFUSED, "swinv2-dynamo-*", "not trained here: *.logit_scale *"),
    (REFUSED, "detr-*", "not trained here: columns *"),
    (REFUSED, "detr-*", "not trained here: rows *"),
    (REFUSED, "detr-torchscript-*", "not trained here: queries *"),
    (REFUSED, "deepseek_v3-torchscript-*", "not trained here: *.mlp.gate.weight *"),
    (COMPUTED, "*-dynamo-*", "*.parametrizations.weight.original*"),
    (COMPUTED, "*-dynamo-*", "trained here only: mul (*)"),
    (TWICE, "rwkv-dynamo-fresh", "not trained here: *.time_mix_* (16)"),
    (COMPUTED, "xlnet-dynamo-*", "not trained here: model.transformer.layer.*.rel_attn.r (*)"),
    (COMPUTED, "xlnet-dynamo-*", "trained here only: einsum_*"),
    (COMPUTED, "deberta-dynamo-*", "trained here only: transpose_*"),
    (COMPUTED, "deberta-dynamo-*", "not trained here: *.pos_proj.*"),
    (COMPUTED, "deberta-dynamo-*", "not trained here: *.pos_q_proj.*"),
    (COMPUTED, "deberta-dynamo-*", "not trained here: *.rel_embeddings.*"),
    (COMPUTED, "swinv2-dynamo-*", "*trained here*.continuous_position_bias_mlp.0.weight*"),
    (COMPUTED, "detr-dynamo-*", "columns, rows: *"),
    (COMPUTED, "detr-dynamo-*", "trained here only: add_4/row *"),
    (COMPUTED, "detr-dynamo-*", "not trained here: queries *"),
    (COMPUTED, "detr-dynamo-*", "not trained here: transformer.decoder.layers.0.self_attn.*"),
    (COMPUTED, "style-dynamo-*", "trained here only: instance_norm/row *"),
    (COMPUTED, "style-dynamo-*", "not trained here: network.[gns]*"),
    (NORMALIZED, "*-dynamo-*", "*trained here*.convolution.weight *"),
    (NORMALIZED, "*-dynamo-*", "not trained here: *.normalization.*"),
    (NORMALIZED, "segformer-dynamo-*", "*trained here*: model.decode_head.*"),
    (NORMALIZED, "detr-dynamo-*", "*trained here*: backbone.*"),
    (NORMALIZED, "convolutions-dynamo-*", "*trained here*: network.*"),
)
"""Differences that are no mistakes: why, where the words do not say it, in which exports, and in
which words.
"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Elements by name, and each difference in words."""

    torch: int
    here: int
    differences: tuple[str, ...]


def trained_by_torch(
    module: nn.Module, inputs: Tensors
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The parameters that the loss reaches, by the name of `named_parameters()`, and their
    gradients.
    """
    module.zero_grad()
    module(*inputs.values()).backward()
    numbers = {}
    gradients = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.grad is not None:
            numbers[name], gradients[name] = parameter.detach().numpy(), parameter.grad.numpy()
    return numbers, gradients


def compared(traced: Traced) -> Comparison:
    """What torch trains and what a plan of the exported file would."""
    theirs, gradients = trained_by_torch(*module_of(traced))
    ours = trained_here(file_of(traced))
    return Comparison(_elements(theirs), _elements(ours), _differences(theirs, ours, gradients))


def unexplained(traced: Traced, differences: Sequence[str]) -> tuple[list[str], list[str]]:
    """The differences that nothing explains, and those that `EXPLAINED` does, after the reason that
    they share.
    """
    known = [(why, words) for why, names, words in EXPLAINED if fnmatchcase(traced.name, names)]
    wrong: list[str] = []
    explained: dict[str, list[str]] = {}
    for each in differences:
        why = next((why for why, words in known if fnmatchcase(each, words)), None)
        (wrong if why is None else explained.setdefault(why, [])).append(each)
    return wrong, [
        f"{why}: {', '.join(each)}" if why else "; ".join(each) for why, each in explained.items()
    ]


def _elements(tensors: Mapping[str, np.ndarray]) -> int:
    return sum(each.size for each in tensors.values())


def trained_here(path: Path) -> dict[str, np.ndarray]:
    """The numbers that each parameter that a plan of the file would train starts with."""
    graph = read_model(path).graph
    return {each.value.name: _numbers(each, path) for each in graph.parameters if each.trainable}


def _numbers(parameter: Parameter, path: Path) -> np.ndarray:
    place = parameter.storage
    if isinstance(place, Fill):
        return np.full(parameter.value.shape, place.value, np.float32)
    if not isinstance(place, FileSlice):
        # Drawn at random: like nothing of torch's.
        return np.full(parameter.value.shape, np.nan, np.float32)
    assert parameter.value.dtype is DType.FLOAT32, parameter.value
    file = path.parent / place.file if place.file else path
    numbers = np.fromfile(file, "<f4", place.length // 4, offset=place.offset)
    if not isinstance(place, FoldedSlice):
        return numbers
    if place.rows:
        columns = place.step * np.arange(parameter.value.shape[1])
        numbers = numbers[np.array(place.rows)[:, None] + columns]
    return (
        np.log(-numbers if place.form == "log of the negative" else numbers)
        if place.form
        else numbers
    )


def _differences(
    theirs: Mapping[str, np.ndarray],
    ours: Mapping[str, np.ndarray],
    gradients: Mapping[str, np.ndarray],
) -> tuple[str, ...]:
    """What does not match, in words that name the tensors."""
    found = []
    groups, left, extra = paired(theirs, ours)
    for names, places in groups:
        whole = np.concatenate([theirs[name].ravel() for name in names])
        here = np.concatenate([ours[name].ravel() for name in places])
        lacking = np.concatenate([gradients[name].ravel() for name in names])[~np.isin(whole, here)]
        if same(whole + 1, here):
            found.append(f"{names[0]}: here {places[0]} is 1 + it")
        elif whole.size != here.size:
            unread = (
                f", {UNREAD}"
                if whole.size == here.size + lacking.size and not lacking.any()
                else ""
            )
            other = "" if names == places else f" in {', '.join(places)}"
            found.append(f"{', '.join(names)}: {here.size} of {whole.size}{other}{unread}")
    for name in extra:
        of = next((each for each in sorted(theirs) if holds(theirs[each], ours[name])), None)
        found.append(
            f"trained here only: {name} ({ours[name].size})" + (f", a copy of {of}" if of else "")
        )
    return (*found, *(f"not trained here: {name} ({_described(theirs[name])})" for name in left))


def _described(array: np.ndarray) -> str:
    uniform = array.size > 1 and np.all(array == array.flat[0])
    return f"{array.size}, all {array.flat[0]:g}" if uniform else f"{array.size}"


Group = tuple[tuple[str, ...], tuple[str, ...]]
"""Names of torch's parameters and of those here that hold the same numbers."""


def paired(
    theirs: Mapping[str, np.ndarray], ours: Mapping[str, np.ndarray]
) -> tuple[list[Group], list[str], list[str]]:
    """Tensors that hold the same numbers; names of torch's and of ours that are left.

    Mostly one of each. ONNX's recurrent operators take all gates, directions and biases of a layer
    in one tensor each, and exporters cut the weights of packed projections apart.
    """
    pairs = {name: name for name in theirs if name in ours and same(theirs[name], ours[name])}
    left = set(ours) - set(pairs)
    for added in (0, 1):
        for name, array in sorted(theirs.items()):
            like = (
                each
                for each in sorted(left)
                if name not in pairs and same(array + added, ours[each])
            )
            other = next(like, None)
            if other is not None:
                pairs[name] = other
                left.remove(other)
    packed = list(
        _packed(
            {name: theirs[name] for name in theirs if name not in pairs}, {n: ours[n] for n in left}
        )
    )
    groups = [*(((name,), (other,)) for name, other in pairs.items()), *packed]
    taken = (
        {name for names, _ in groups for name in names},
        {name for _, names in groups for name in names},
    )
    return groups, sorted(set(theirs) - taken[0]), sorted(set(ours) - taken[1])


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two tensors hold the same numbers, whatever their order and the last bits of a
    logarithm taken back.
    """
    return one.size == other.size and np.allclose(
        np.sort(one, None), np.sort(other, None), rtol=1e-5, atol=1e-6
    )


def _packed(theirs: Mapping[str, np.ndarray], ours: Mapping[str, np.ndarray]) -> Iterator[Group]:
    """The connected components of tensors that hold most of each other's numbers."""
    groups = {(True, name): frozenset({(True, name)}) for name in theirs}
    groups |= {(False, name): frozenset({(False, name)}) for name in ours}
    for name, array in theirs.items():
        for other, numbers in ours.items():
            if holds(array, numbers) or holds(numbers, array):
                together = groups[True, name] | groups[False, other]
                groups.update(dict.fromkeys(together, together))
    for group in sorted({each for each in groups.values() if len(each) > 1}, key=sorted):
        yield (
            tuple(sorted(name for is_torchs, name in group if is_torchs)),
            tuple(sorted(name for is_torchs, name in group if not is_torchs)),
        )


def holds(whole: np.ndarray, part: np.ndarray) -> bool:
    """Whether most numbers of one tensor are numbers of another; one number repeated says
    nothing.
    """
    numbers = np.unique(part[part != 0])
    if numbers.size <= min(2, part.size - 1):
        return False
    sampled = numbers[:: -(-numbers.size // SAMPLED)]
    return all(float(np.isin(each, whole).mean()) > 0.5 for each in (sampled, numbers))
