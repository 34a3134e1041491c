from __future__ import annotations

import pytest

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Split
from autopipe.ir.problem import Constraint
from autopipe.passes.placement.manual import Manual
from tests.passes.cost.graphs import Builder, cluster, perceptron, problem

GRAPH = perceptron([16] * 5)
"""matmul0 relu1 … matmul6 relu7."""


def place(*constraints: Constraint, graph: Graph = GRAPH, devices: int = 2) -> Placement:
    given = problem(graph, cluster(devices), constraints=constraints)
    Manual().requires(given)
    answer = Manual().run(given)
    answer.verify(graph)
    return answer


def test_nodes_without_a_stage_follow_what_they_read() -> None:
    answer = place(Constraint("matmul4", stage=1))
    assert [stage.nodes for stage in answer.stages] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [stage.devices for stage in answer.stages] == [(0,), (1,)]


def test_stages_with_micro_batches_of_their_own() -> None:
    """On two samples a stage of two devices shares them; on one, all its devices compute the
    same.
    """
    devices = (
        Constraint("re:.*[0-3]", devices=(0, 1)),
        Constraint("matmul4", stage=1, devices=(2, 3)),
    )
    first, second = place(*devices, Constraint("relu7", micro_batch_size=2), devices=4).stages
    assert (first.micro_batch_size, second.micro_batch_size) == (8, 2)
    assert second.splits_of(6) == (Split("m", 2),)
    first, second = place(*devices, Constraint("re:.*[4-7]", micro_batch_size=1), devices=4).stages
    assert (first.micro_batch_size, second.micro_batch_size, second.splits) == (8, 1, ())


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        (
            (Constraint("*", micro_batch_size=3),),
            "micro-batches of 3 samples, which do not divide the 8 samples of a micro-batch",
        ),
        (
            (
                Constraint("matmul4", stage=0, micro_batch_size=2),
                Constraint("relu7", micro_batch_size=1),
            ),
            "'matmul4' and the constraint on 'relu7' require different micro-batches of stage 0",
        ),
        (
            (
                Constraint("matmul4", stage=0, split=(("b", 2),), devices=(0, 1)),
                Constraint("*", micro_batch_size=1),
            ),
            "axis 'm' of the node into 2 parts, .* size 1 for micro-batches of 1 sample",
        ),
    ],
)
def test_micro_batches_that_there_cannot_be(
    constraints: tuple[Constraint, ...], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        place(*constraints)


def test_nodes_that_read_no_other_join_their_first_reader() -> None:
    builder = Builder(8, 16)
    weight = builder.node("Transpose", (builder.parameter("w", (16, 16)),), (16, 16), perm=(1, 0))
    graph = builder.finish(builder.matmul(builder.relu("x"), weight))
    answer = place(Constraint("relu1", stage=0), Constraint("matmul2", stage=1), graph=graph)
    assert [stage.nodes for stage in answer.stages] == [(1,), (0, 2)]


def test_devices_and_splits_are_taken_as_given() -> None:
    answer = place(
        Constraint("re:.*[0-3]", stage=0, devices=(1, 0)),
        Constraint("re:.*[4-7]", stage=1, devices=(2,)),
        Constraint("matmul0", split=(("n", 2),)),
        Constraint("matmul2", split=(("k", 2),)),
        devices=3,
    )
    assert [stage.devices for stage in answer.stages] == [(1, 0), (2,)]
    splits = dict(answer.stages[0].splits)
    assert splits[0] == (Split("n", 2),)
    assert splits[2] == (Split("k", 2),)
    assert splits[1] == (Split("x0", 2),), "the others share samples"


def test_b_is_the_axis_of_samples_whatever_its_name() -> None:
    (stage,) = place(Constraint("*", stage=0, devices=(), split=(("b", 2),))).stages
    assert stage.devices == (0, 1)
    assert {splits for _, splits in stage.splits} == {(Split("m", 2),), (Split("x0", 2),)}
    (whole,) = place(Constraint("*", stage=0, devices=(), split=(("b", 1),))).stages
    assert whole.splits == ()
    assert place(Constraint("*", stage=0, devices=(), split=())).stages == (whole,)


def test_several_axes_are_split_in_the_order_given() -> None:
    wish = Constraint("*", devices=(), split=(("b", 2), ("n", 2)))
    other = Constraint("a", split=(), nodes=("relu7",))
    (stage,) = place(wish, devices=8).stages
    splits = dict(stage.splits)
    assert splits[0] == (Split("m", 2), Split("n", 2)), "two devices are left over"
    assert splits[1] == (Split("x0", 2),), "it has no axis n"
    with pytest.raises(
        ConfigurationError, match=r"'relu7': the constraint on '\*' and a require different splits"
    ):
        place(wish, other, devices=8)


def test_an_axis_that_must_stay_whole_is_refused_by_name() -> None:
    builder = Builder(8, 16)
    query, key, value = (builder.parameter(name, (2, 4, 8, 16)) for name in "qkv")
    graph = builder.finish(
        builder.relu("x"), builder.node("Attention", (query, key, value), (2, 4, 8, 16))
    )
    with pytest.raises(
        ConfigurationError,
        match=r"'attention1': .* axis 'd' into 2 parts, but this axis cannot be",
    ):
        place(Constraint("*", devices=(), split=(("d", 2),)), graph=graph)


def test_one_device_may_host_several_stages() -> None:
    answer = place(
        Constraint("re:.*[01]", stage=0, devices=(0,)),
        Constraint("re:.*[23]", stage=1, devices=(1,)),
        Constraint("re:.*[4-7]", stage=2, devices=(0,)),
    )
    assert [stage.devices for stage in answer.stages] == [(0,), (1,), (0,)]


def test_pipelines_hold_the_whole_model_each() -> None:
    answer = place(
        Constraint("re:.*[0-3]", stage=0, devices=(0,)),
        Constraint("re:.*[4-7]", stage=1, devices=(1,)),
        Constraint("re:.*[0-5]", stage=0, devices=(1,), pipeline=1),
        Constraint("re:.*[67]", stage=1, devices=(0,), pipeline=1),
    )
    assert answer.pipelines == 2
    assert [(stage.pipeline, len(stage.nodes), stage.devices) for stage in answer.stages] == [
        (0, 4, (0,)),
        (0, 4, (1,)),
        (1, 6, (1,)),
        (1, 2, (0,)),
    ]


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        (
            (Constraint("*", stage=0, pipeline=2), Constraint("*", stage=0)),
            "for pipeline 2, but no constraint is for pipeline 1",
        ),
        ((), "neither the configuration nor the model defines any"),
        (
            (Constraint("matmul9", stage=0),),
            r"'matmul9' matches the name of no node \(use a node's name, such as 'matmul",
        ),
        ((Constraint("re:(", stage=0),), "is not a valid regular expression"),
        (
            (Constraint("matmul0", stage=0), Constraint("mat*", stage=1)),
            "'matmul0' and the constraint on 'mat\\*' require",
        ),
        (
            (Constraint("matmul4", stage=0), Constraint("matmul2", stage=1)),
            "'matmul4' assigns .* to which .*'matmul2' assigns",
        ),
        ((Constraint("matmul4", stage=2),), "assign no nodes to stage 1 of 3"),
        ((Constraint("matmul4", stage=-1),), "expected at least 0"),
        ((Constraint("matmul4", stage=1, devices=(5,)),), "requires device 5, but the cluster"),
        ((Constraint("matmul4", stage=1, devices=(1,)),), "assigns devices to stage 0"),
        (
            (Constraint("matmul0", devices=(0,)), Constraint("relu1", devices=(1,))),
            "'matmul0' and the constraint on 'relu1' require different devices for stage 0",
        ),
        ((Constraint("*", devices=(), split=(("q", 2),)),), "none of the matching nodes has"),
        (
            (Constraint("*", devices=(), split=(("b", 3),)),),
            r"'matmul0': .* 'm' into 3 parts, which do not divide its size 8 \(pad it to 9",
        ),
        (
            (Constraint("*", devices=(), split=(("b", 4),)),),
            r"split the node into 4 parts \(m:4\), which do not divide the 2 devices of stage 0",
        ),
        (
            (Constraint("*", devices=(), split=(("b", 2), ("n", 2))),),
            r"4 parts \(m:2, n:2\), which do not divide the 2 devices of stage 0",
        ),
        ((Constraint("*", devices=(), split=(("b", 2), ("m", 2))),), "splits axis 'm' twice"),
        (
            (Constraint("*", devices=(0, 1, 2)),),
            "'\\*' requires device 2, but the cluster has 2",
        ),
        (
            (Constraint("matmul0", split=(("n", 2),)), Constraint("mat*", split=(("k", 2),))),
            (
                "'matmul0': the constraint on 'matmul0' and the constraint on 'mat\\*' require "
                "different splits"
            ),
        ),
        (
            (Constraint("matmul0", split=(("n", 2),)), Constraint("mat*", split=())),
            "require different splits",
        ),
        (
            (Constraint("matmul2", stage=1), Constraint("matmul4", stage=2)),
            "2 devices cannot be divided evenly into 3",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_in_one_line(
    constraints: tuple[Constraint, ...], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        place(*constraints)
    assert "\n" not in str(caught.value)


def test_constraints_on_layers() -> None:
    """The nodes of layers are in their stages, also if a range is written as text."""
    answer = place(Constraint(layers=(0, 1), stage=0), Constraint(layers="layer[2:]", stage=1))
    assert [stage.nodes for stage in answer.stages] == [(0, 1, 2, 3), (4, 5, 6, 7)]


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ((Constraint(layers=(0, 4), stage=0),), "selects layer 4, but the model has 4"),
        ((Constraint(layers="tower", stage=0),), "'tower' names no layers of the model"),
        (
            (Constraint(layers=(0, 1), stage=0), Constraint("matmul2", stage=1)),
            "the constraint on layers \\[0, 1\\] and the constraint on 'matmul2' require different",
        ),
        (
            (Constraint(layers="layer[1]", devices=(7,)),),
            "the constraint on layers layer\\[1\\] requires device 7",
        ),
    ],
)
def test_wrong_constraints_on_layers_are_told(
    constraints: tuple[Constraint, ...], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        place(*constraints)
