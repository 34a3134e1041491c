"""Generation of the module of a rank. It contains the sends and receives of each stage on the rank,
and the function `step` with three sections: warm-up, steady state and cool-down.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from autopipe.ir.graph import COUNTED_LABELS, Value
from autopipe.ir.layout import TensorSlice
from autopipe.ir.program import (
    Instruction,
    Loop,
    MessageSlice,
    Opcode,
    Program,
    RankCode,
    Section,
    StageOnRank,
)
from autopipe.ir.schedule import MicroBatchSlice


def stage_module(stage: int) -> str:
    """Return the name of the module of a stage."""
    return f"stage_{stage:02d}"


def rank_module(rank: int) -> str:
    """Return the name of the module of a rank."""
    return f"rank_{rank:03d}"


def emit_rank(
    program: Program, rank: RankCode, title: str, arguments: Sequence[Sequence[str]]
) -> str:
    """Return the source text of the module of a rank. `title` is the docstring of the module. It
    must not contain text from the model, because models are untrusted. `arguments` has the names of
    the arguments of `forward` of each stage.
    """
    modules = "".join(f"import {stage_module(stage.stage)}\n" for stage in rank.stages)
    stages = "\n".join(
        _stage_declaration(program, stage, arguments[stage.stage]) for stage in rank.stages
    )
    return (
        f'"""{title}"""\n\n'
        f"{modules}"
        "from autopipe.backends.torch import runtime\n\n"
        f"rank = runtime.Rank({rank.rank}, __file__)\n\n"
        f"{stages}\n\n\n"
        f"{_step_function(rank)}\n\n"
        'if __name__ == "__main__":\n'
        "    rank.main(step)\n"
    )


def _stage_declaration(program: Program, wired: StageOnRank, arguments: Sequence[str]) -> str:
    """Return the statement that declares a stage on a rank, with its data inputs, receives, sends,
    and the weight of its loss. `arguments` has the names of the arguments of the stage's `forward`.
    """
    code = program.stages[wired.stage]
    inputs = {
        value.name: (argument, value)
        for argument, value in zip(arguments, code.inputs, strict=True)
    }
    outputs = [value.name for value in code.outputs]
    lines = [
        f"s{wired.stage} = rank.stage(",
        f"    {wired.stage},",
        f"    {stage_module(wired.stage)},",
    ]
    for data in wired.data:
        slices = _slices_code(data.box)
        lines.append(f"    runtime.Data({inputs[data.tensor][0]!r}, {data.tensor!r}, {slices}),")
    for block in wired.receives:
        argument, value = inputs[block.tensor]
        ends = _port_declaration(block, block.source_rank, block.source_stage)
        part = _slice_argument(block, block.received, value, block.target_slice, block.source_slice)
        lines.append(f"    runtime.Recv({argument!r}, {ends}{part}),")
    for block in wired.sends:
        position = outputs.index(block.tensor)
        ends = _port_declaration(block, block.target_rank, block.target_stage)
        part = _slice_argument(
            block, block.sent, code.outputs[position], block.source_slice, block.target_slice
        )
        lines.append(f"    runtime.Send({position}, {ends}{part}),")
    # `weight` is the factor of each loss and each number of labels. Over all ranks and
    # micro-batches, the weighted losses add up to the loss of the step, and the weighted numbers to
    # the fraction of the step's labels that are not ignored.
    for kind, name in (("Loss", program.loss), ("Labels", COUNTED_LABELS)):
        if program.train and name in outputs:
            output = next(each for each in program.outputs if each.value.name == name)
            place = next(each for each in output.places if each.stage == wired.stage)
            weighed = code.ratio if program.labels is None else program.labels
            weight = 1.0 / (program.micro_batches * weighed * place.copies)
            if program.loss_division.weight is not None:
                weight = program.loss_division.weight / place.copies
            lines.append(f"    runtime.{kind}({outputs.index(name)}, weight={weight!r}),")
    return "\n".join([*lines, ")"])


def _port_declaration(block: MessageSlice, rank: int, stage: int) -> str:
    """Return the arguments of a send or receive that identify the rank and stage at its other end,
    and its channel.
    """
    gradient = "" if block.needs_gradient else ", gradient=False"
    return f"rank={rank}, stage={stage}, channel={block.channel}{gradient}"


def _slice_argument(
    block: MessageSlice,
    box: TensorSlice,
    value: Value,
    turn: MicroBatchSlice,
    other: MicroBatchSlice,
) -> str:
    """Return the arguments of a send or receive that differ from their defaults: the type of the
    message, the slice `box` of the local tensor `value`, and the micro-batches. `turn` has the
    micro-batches of this stage and `other` those of the stage at the other end.
    """
    part = "" if block.dtype is value.dtype else f", dtype={block.dtype.value!r}"
    part += "" if box.shape == value.shape else f", offsets={_slices_code(box)}"
    part += "" if turn.of == 1 else f", slice=({turn.index}, {turn.of})"
    return part if other.of == 1 else f"{part}, part={other.index}"


def _slices_code(box: TensorSlice) -> str:
    """Return the code of a slice of a tensor: a tuple with a pair (start, stop) per dimension."""
    return repr(tuple(zip(box.starts, box.stops, strict=True)))


def _step_function(rank: RankCode) -> str:
    """Return the source text of the function that runs a step."""
    lines: list[str] = []
    for title, section in (
        ("warm-up", rank.warm_up),
        ("steady state (Tessel: repetend)", rank.repetend),
        ("cool-down", rank.cool_down),
    ):
        if section:
            lines += [f"    # {title}", *_section_lines(section)]
    return "\n".join(["def step():", *(lines or ["    pass"]), ""])


def _section_lines(section: Section) -> list[str]:
    """Return the lines of a section of the step; a loop becomes a `for` statement."""
    lines: list[str] = []
    for _, group in groupby(section, key=type):
        items = list(group)
        straight = [each for each in items if isinstance(each, Instruction)]
        lines += _task_lines(straight, "    ", [str(each.micro_batch) for each in straight])
        for loop in (each for each in items if isinstance(each, Loop)):
            lines += [
                f"    for i in range({_range_arguments(loop)}):",
                *_task_lines(loop.body, "        ", _micro_batch_indices(loop)),
            ]
    return lines


def _range_arguments(loop: Loop) -> str:
    """Return the arguments of `range` for a loop. The loop variable is the micro-batch of the first
    instruction in the body or, if the instructions have different strides, the number of the
    iteration.
    """
    if loop.strides:
        return str(loop.count)
    start = loop.body[0].micro_batch
    stop = start + loop.count * loop.stride
    if loop.stride != 1:
        return f"{start}, {stop}, {loop.stride}"
    return f"{start}, {stop}" if start else str(stop)


_COMPUTING_OPCODES = (
    Opcode.FORWARD,
    Opcode.BACKWARD,
    Opcode.BACKWARD_INPUT,
    Opcode.BACKWARD_WEIGHT,
)


def _task_lines(items: Sequence[Instruction], indent: str, indices: Sequence[str]) -> list[str]:
    """Return one line per task: the receives before the task, the task itself, and its sends.
    `indices` has the code of the micro-batch of each instruction.
    """
    lines: list[list[str]] = []
    done = False
    for item, index in zip(items, indices, strict=True):
        if not lines or (done and item.opcode not in (Opcode.SEND, Opcode.SEND_GRADIENT)):
            lines.append([])
            done = False
        source = "" if item.source is None else f", source={item.source}"
        part = "" if item.part is None else f", part={item.part}"
        lines[-1].append(f"s{item.stage}.{item.opcode.value}({index}{source}{part})")
        done = done or item.opcode in _COMPUTING_OPCODES
    return [indent + "; ".join(calls) for calls in lines]


def _micro_batch_indices(loop: Loop) -> list[str]:
    """Return, for each instruction in the body of a loop, the code of its micro-batch as a function
    of the loop variable `i`.
    """
    if loop.strides:
        terms = ("i" if stride == 1 else f"{stride} * i" for stride in loop.strides)
        return [
            _offset_term(term, each.micro_batch)
            for term, each in zip(terms, loop.body, strict=True)
        ]
    first = loop.body[0].micro_batch
    return [_offset_term("i", each.micro_batch - first) for each in loop.body]


def _offset_term(term: str, offset: int) -> str:
    """Return the code of the sum of `term` and the number `offset`."""
    return f"{term} {'+' if offset > 0 else '-'} {abs(offset)}" if offset else term
