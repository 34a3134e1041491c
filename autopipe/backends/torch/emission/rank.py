"""The *when* of a rank as text: what each stage exchanges, and the step in three sections.

Operators whose parameters' gradients are left to the second half of a split backward.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace

from autopipe.backends.torch.emission.call import Call, Emitter
from autopipe.ir.layout import Box
from autopipe.ir.program import (
    Instruction,
    Loop,
    MessageBlock,
    Program,
    RankCode,
    Section,
    StageCode,
    StageOnRank,
    Verb,
)
from autopipe.ir.schedule import MicroBatchSlice

_LINE = 112


def stage_module(stage: int) -> str:
    """Module name of a stage's file."""
    return f"stage_{stage:02d}"


def rank_module(rank: int) -> str:
    """Module name of a rank's file."""
    return f"rank_{rank:03d}"


def emit_rank(program: Program, rank: RankCode, title: str) -> str:
    """The whole file of a rank. `title` is the docstring's text; it must be plain text of our own."""
    modules = "".join(f"import {stage_module(stage.stage)}\n" for stage in rank.stages)
    stages = "\n".join(_stage(program, rank.rank, stage) for stage in rank.stages)
    return (
        f'"""{title}"""\n\n'
        f"{modules}"
        "from autopipe.backends.torch import runtime\n\n"
        f"rank = runtime.Rank({rank.rank}, __file__)\n\n"
        f"{stages}\n\n\n"
        f"{_step(rank)}\n\n"
        'if __name__ == "__main__":\n'
        "    rank.main(step)\n"
    )


def _stage(program: Program, rank: int, wired: StageOnRank) -> str:
    code = program.stages[wired.stage]
    arguments = {value.name: f"x{position}" for position, value in enumerate(code.inputs)}
    module = stage_module(wired.stage)
    lines = [f"s{wired.stage} = rank.stage(", f"    {wired.stage},", f"    {module},"]
    lines += [
        f"    runtime.Data({arguments[data.tensor]!r}, {data.tensor!r}, {_slices(data.box)})," for data in wired.data
    ]
    lines += [
        f"    runtime.Receive({arguments[piece.tensor]!r}, {_piece(piece, piece.source_rank, piece.source_stage)}"
        f"{_part(piece.received, code.inputs[_position(code, piece)].shape)}{_turn(piece.target_turn)}),"
        for piece in wired.receives
    ]
    outputs = [value.name for value in code.outputs]
    for piece in wired.sends:
        position = outputs.index(piece.tensor)
        part = _part(piece.sent, code.outputs[position].shape) + _turn(piece.source_turn)
        lines.append(f"    runtime.Send({position}, {_piece(piece, piece.target_rank, piece.target_stage)}{part}),")
    if program.loss in outputs:
        share = _loss_share(program, wired.stage)
        lines.append(f"    runtime.Loss({outputs.index(program.loss)}, share={share!r}),")
    lines.append(")")
    return "\n".join(lines)


def _position(code: StageCode, piece: MessageBlock) -> int:
    return next(index for index, value in enumerate(code.inputs) if value.name == piece.tensor)


def _piece(piece: MessageBlock, rank: int, stage: int) -> str:
    gradient = "" if piece.needs_gradient else ", gradient=False"
    return f"rank={rank}, stage={stage}, channel={piece.channel}{gradient}"


def _part(box: Box, shape: tuple[int, ...]) -> str:
    return "" if box.shape == shape else f", box={_slices(box)}"


def _turn(turn: MicroBatchSlice) -> str:
    return "" if turn.of == 1 else f", slice=({turn.index}, {turn.of})"


def _slices(box: Box) -> str:
    return repr(tuple(zip(box.starts, box.stops, strict=True)))


def _loss_share(program: Program, stage: int) -> float:
    """This rank's share in the step's loss for each micro-batch: shares of all ranks and micro-batches add up to it."""
    output = next(each for each in program.outputs if each.value.name == program.loss)
    place = next(each for each in output.places if each.stage == stage)
    return 1.0 / (program.micro_batches * program.stages[stage].turns * place.copies)


def _step(rank: RankCode) -> str:
    lines = ["def step():"]
    for title, section in (("warm-up", rank.warm_up), ("repetend", rank.repetend), ("cool-down", rank.cool_down)):
        if section:
            lines.append(f"    # {title}")
            lines.extend(_section(section))
    if len(lines) == 1:
        lines.append("    pass")
    return "\n".join(lines) + "\n"


def _section(section: Section) -> list[str]:
    lines: list[str] = []
    straight: list[Instruction] = []
    for item in (*section, None):
        if isinstance(item, Instruction):
            straight.append(item)
            continue
        lines.extend(_lines(straight, "    ", [str(each.micro_batch) for each in straight]))
        straight = []
        if isinstance(item, Loop):
            lines.append(f"    for i in range({_range(item)}):")
            lines.extend(_lines(item.body, "        ", _indices(item)))
    return lines


def _range(loop: Loop) -> str:
    """The loop variable is the micro-batch of the body's first instruction; where strides differ, it counts."""
    if loop.strides:
        return str(loop.count)
    start = loop.body[0].micro_batch
    stop = start + loop.count * loop.stride
    if loop.stride != 1:
        return f"{start}, {stop}, {loop.stride}"
    return f"{start}, {stop}" if start else f"{stop}"


_TASK_ENDS = (Verb.FORWARD, Verb.BACKWARD, Verb.INPUT_GRADIENT, Verb.WEIGHT_GRADIENT)


def _lines(items: Sequence[Instruction], indent: str, indices: Sequence[str]) -> list[str]:
    """One line a task: what is posted before it, the task, and what it sends. `indices` spell the micro-batches."""
    lines: list[str] = []
    current: list[str] = []
    done = False
    for item, index in zip(items, indices, strict=True):
        if current and done and item.verb not in (Verb.SEND, Verb.SEND_GRADIENT):
            lines.append(indent + "; ".join(current))
            current, done = [], False
        source = "" if item.source is None else f", source={item.source}"
        current.append(f"s{item.stage}.{item.verb.value}({index}{source})")
        done = done or item.verb in _TASK_ENDS
    if current:
        lines.append(indent + "; ".join(current))
    return lines


def _indices(loop: Loop) -> list[str]:
    """The micro-batches of a loop's body, by its variable."""
    if loop.strides:
        terms = ("i" if stride == 1 else f"{stride} * i" for stride in loop.strides)
        return [_moved(term, each.micro_batch) for term, each in zip(terms, loop.body, strict=True)]
    first = loop.body[0].micro_batch
    return [_moved("i", each.micro_batch - first) for each in loop.body]


def _moved(term: str, offset: int) -> str:
    return f"{term} {'+' if offset > 0 else '-'} {abs(offset)}" if offset else term


_LIBRARIES = ("torch", "F", "operators")


def deferred(emitter: Emitter, call: Call) -> str:
    """The expression of `call` for the `WeightGradQueue`: `p.weight_grads(F.linear, x0, p.w1.t(), p.w2)`.

    What is not one call of a function becomes one of the tensors it reads.
    """
    code = emitter(call)
    function = _function(code)
    if function:
        return f"p.weight_grads({function}, {code[len(function) + 1 :]}"
    present = [index for index, each in enumerate(call.codes) if each is not None]
    names = tuple(None if each is None else f"y{index}" for index, each in enumerate(call.codes))
    tensors = ", ".join(call.arg(index) for index in present)
    arguments = ", ".join(f"y{index}" for index in present)
    return f"p.weight_grads(lambda {arguments}: {emitter(replace(call, codes=names))}, {tensors})"


def _function(code: str) -> str:
    """The library function that an expression is one call of; "" where it is something else."""
    tree = ast.parse(code, mode="eval").body
    if not isinstance(tree, ast.Call) or not tree.args:
        return ""
    function = ast.unparse(tree.func)
    is_name = all(each.isidentifier() for each in function.split("."))
    return function if is_name and function.split(".")[0] in _LIBRARIES and code.startswith(f"{function}(") else ""
