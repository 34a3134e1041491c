"""Orders in PyTorch's CSV format: read and written as torch does, and rejected with line and
column.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as pipelining

from autopipe.api.timeline_figure import plan_picture
from autopipe.api.timeline_files import orders_csv
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.schedule import StageGraph
from autopipe.passes.schedule.csv_order import read_orders, schedule_from_rows
from tests.cli.drawing.examples import chain_plan

RANKS = 4
MICRO_BATCHES = 8


def torch_schedule(name, chunks):
    """Return one of torch's schedules, for stages without a module."""
    stages = [
        SimpleNamespace(
            num_stages=RANKS * chunks,
            group_size=RANKS,
            group_rank=0,
            group=None,
            submod=None,
            stage_index=index,
        )
        for index in range(chunks)
    ]
    schedule = getattr(pipelining, name)
    schedule._initialize_stages = lambda *_: None
    return schedule(stages, MICRO_BATCHES, loss_fn=lambda *_: None)


def loaded_by_torch(path, stages):
    runtime = object.__new__(pipelining._PipelineScheduleRuntime)
    runtime.pipeline_order = {}
    runtime._stages = []
    runtime._defer_pp_recv = False
    runtime.pp_group_size = RANKS
    runtime._num_stages = stages
    runtime._n_microbatches = MICRO_BATCHES
    # Torch 2.15 reads these attributes; the values are its defaults.
    runtime._unshard_lookahead = "full"
    runtime._max_active_stages = 3
    runtime._defer_reduce_grad_wait = False
    runtime._max_outstanding_sends = None
    runtime._load_csv(str(path), format="compute_only")
    return runtime


def flattened(actions):
    return [part for each in actions if each is not None for part in each.sub_actions or (each,)]


def dump_computations(schedule, path):
    """Write the order of a torch schedule without communication. Torch 2.9 writes such orders only
    in this format.
    """
    has_formats = "format" in inspect.signature(schedule._dump_csv).parameters
    schedule._dump_csv(str(path), *(["compute_only"] if has_formats else []))


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("ScheduleInterleaved1F1B", 2),
        ("ScheduleInterleavedZeroBubble", 2),
        ("ScheduleLoopedBFS", 2),
        ("ScheduleZBVZeroBubble", 2),
        ("ScheduleDualPipeV", 2),
    ],
)
def test_orders_of_torch_are_read_unchanged(name, chunks, tmp_path):
    theirs = torch_schedule(name, chunks)
    path = tmp_path / "order.csv"
    dump_computations(theirs, path)
    rows = read_orders(path)
    assert [[str(cell.task) for cell in row] for row in rows] == [
        [str(action) for action in flattened(theirs.pipeline_order[rank])] for rank in range(RANKS)
    ]
    of_rank = theirs.stage_index_to_group_rank
    groups = tuple((of_rank[stage],) for stage in range(RANKS * chunks))
    graph = StageGraph(RANKS, groups, tuple((stage, stage + 1) for stage in range(len(groups) - 1)))
    schedule = schedule_from_rows(rows, str(path), graph, MICRO_BATCHES, train=True)
    assert schedule.micro_batches == MICRO_BATCHES


def test_torch_reads_written_files_and_writes_them_back(tmp_path):
    plan, timeline = chain_plan(RANKS, MICRO_BATCHES)
    ours = tmp_path / "ours.csv"
    theirs = tmp_path / "theirs.csv"
    ours.write_text(orders_csv(plan_picture(plan, timeline)))
    runtime = loaded_by_torch(ours, RANKS)
    assert [list(map(str, runtime.pipeline_order[rank])) for rank in range(RANKS)] == [
        list(map(str, order)) for order in plan.schedule.tasks
    ]
    dump_computations(runtime, theirs)
    rows = read_orders(theirs)
    assert tuple(tuple(cell.task for cell in row) for row in rows) == plan.schedule.tasks


CHAIN = StageGraph(2, ((0,), (1,)), ((0, 1),))


@pytest.mark.parametrize(
    ("text", "place", "says"),
    [
        ("0F0,0B0\n1F0, 1X0\n", "2:6", "'1X0' is not a task"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0\n", "1:5", "'0SEND_F0' is a communication action"),
        ("0F0,0UNSHARD,0B0\n1F0,1B0\n", "1:5", "'0UNSHARD' is a communication action"),
        ("0F0,(1F0;)OVERLAP_F_B\n", "1:5", "'' is not a task"),
        ("0F0,0B0\n1F0,0F1,1B0\n", "2:5", "the file has 2 micro-batches, but the step has 1"),
        ("0F0,0B0,1F0\n1B0\n", "1:9", "stage 1 is not on device 0"),
        ("0F0,0B0\n1F0,1B0\n2F0\n", "3:1", "row 3 has tasks, but the cluster has 2 devices"),
        ("0F0,0F0\n1F0,1B0\n", "1:5", "0F0 occurs twice"),
        ("0F0,0B0\n1F0\n", "2:1", "stage 1 runs F on micro-batch 0"),
        ("0F0,0B0\n", "2", "stage 1 runs nothing on micro-batch 0"),
        ("0B0,0F0\n1F0,1B0\n", "1:1", "0B0 waits for 0F0, which can never run"),
        ("0F0,0W0,0I0\n1F0,1B0\n", "1:5", "0W0 waits for 0I0, which can never run"),
        ("\n,,\n", "", "the file lists no tasks"),
        ("0F99999999999999999999\n", "1:1", "is not a task"),
    ],
)
def test_an_unsuitable_file_is_rejected_with_its_position(tmp_path, text, place, says):
    path = tmp_path / "order.csv"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        schedule_from_rows(read_orders(path), str(path), CHAIN, 1, train=True)
    assert caught.value.where == (f"{path}:{place}" if place else str(path))
    assert says in caught.value.message
    assert "\n" not in str(caught.value)


def test_empty_cells_and_spaces_are_ignored(tmp_path):
    path = tmp_path / "order.csv"
    path.write_bytes(b'0F0,,, 0I0 ,0W0\r\n"",1F0,1B0\r\n\r\n')
    schedule = schedule_from_rows(read_orders(path), str(path), CHAIN, 1, train=True)
    assert schedule.grid() == "0: 0F0 0I0 0W0\n1: 1F0 1B0"


@pytest.mark.parametrize(
    "make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_bytes(b"\xff")]
)
def test_an_unreadable_file_is_rejected(tmp_path, make):
    make(tmp_path / "order.csv")
    with pytest.raises(ConfigurationError, match=r"order\.csv"):
        read_orders(tmp_path / "order.csv")
