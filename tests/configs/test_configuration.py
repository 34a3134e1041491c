"""A configuration: what is taken, what is refused and where, and that it survives being written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autopipe.configs import configuration as c
from autopipe.configs.configuration import (
    Choice,
    dump_configuration,
    load_configuration,
    resolve_cluster,
)
from autopipe.configs.yaml_source import Entry, Place
from autopipe.ir import problem
from autopipe.ir.codec import schema_keys
from autopipe.ir.errors import ConfigurationError
from tests.configs.texts import parse_configuration

EVERYTHING = """\
model: {path: models/gpt.onnx, dims: {batch: 8, seq: 128}, batch_axes: {ids: 1, mask: null}, frozen: ["re:.*bias"]}
mode: train
batch_size: 64
micro_batches: 8            # or micro_batch_size, or auto
loss: {cross_entropy: {logits: logits, labels: labels}}
optimizer: {name: adamw, lr: 1.0e-3, betas: [0.9, 0.95]}
precision: bf16
recompute: auto
cluster: {preset: summit, nodes: 2}
gpus: 8
costs: measured.json
strategy: {name: graphpipe, epsilon: 0.1}
schedule: {name: tessel, time_limit: 10}
constraints:
  - {match: "re:.*embed.*", devices: all, split: {v: 4}}
  - {match: "encoder/*", stage: 0, devices: [0, 1]}
memory_limit: 14GiB
time_limit: 30
seed: 7
"""

REFUSED = {
    "unknown key": (
        "mode: train\nbatchsize: 4\n",
        "c.yaml:2: unknown key 'batchsize' (did you mean 'batch_size'?)",
    ),
    "unknown key within": (
        "optimizer:\n  name: sgd\n  learning: 1\n",
        "c.yaml:3: unknown key 'learning' in optimizer (known: name, lr, momentum, nesterov, "
        "weight_decay, betas, eps, "
        "zero_stage, groups, loss_scale)",
    ),
    "missing key": (
        "constraints:\n  - {stage: 1}\n",
        "c.yaml:2: constraints[0] has neither match nor layers, expected one of them",
    ),
    "nodes and layers": (
        "constraints:\n  - {match: a, layers: [0, 1], stage: 1}\n",
        "c.yaml:2: constraints[0] has both match and layers, expected one of them",
    ),
    "three layers": (
        "constraints:\n  - {layers: [0, 1, 2], stage: 1}\n",
        "c.yaml:2: constraints[0].layers: 3 items where 2 are expected",
    ),
    "no for text": ("loss: no\n", "c.yaml:1: loss is no (which YAML reads as false)"),
    "number for text": ("loss: 5\n", "c.yaml:1: loss is 5 (expected text"),
    "quoted number": ('batch_size: "8"\n', "c.yaml:1: batch_size is '8' (write 8 without quotes)"),
    "fraction for whole": ("gpus: 1.5\n", "c.yaml:1: gpus is 1.5 (expected a whole number from 1"),
    "truth for number": ("gpus: yes\n", "c.yaml:1: gpus is yes (which YAML reads as true)"),
    "no devices": ("gpus: 0\n", "c.yaml:1: gpus is 0 (it must be at least 1)"),
    "too many devices": (
        "gpus: 100000000000\n",
        "c.yaml:1: gpus is 100000000000 (it must be at most 1048576)",
    ),
    "fewer than no devices": ("gpus: -4\n", "c.yaml:1: gpus is -4"),
    "scalar for mapping": (
        "strategy: pipedream\n",
        "c.yaml:1: strategy is 'pipedream' (expected a mapping with name)",
    ),
    "mapping for scalar": ("seed: {a: 1}\n", "c.yaml:1: seed is a mapping"),
    "list for scalar": ("seed:\n  - 1\n", "c.yaml:1: seed is a list"),
    "nothing for a value": ("precision:\n", "c.yaml:1: precision is nothing"),
    "near word": (
        "precision: fp23\n",
        "c.yaml:1: precision: 'fp23' is none of fp32, tf32, bf16, fp16 (did you mean 'fp32'?)",
    ),
    "near word in a union": ("micro_batches: autos\n", "(did you mean 'auto'?)"),
    "size": (
        "memory_limit: 14gb\n",
        "c.yaml:1: memory_limit is '14gb' (expected a size such as 14GiB",
    ),
    "no memory": ("memory_limit: 0B\n", "c.yaml:1: memory_limit is 0B"),
    "indivisible": (
        "batch_size: 64\nmicro_batches: 6\n",
        "c.yaml:2: micro_batches 6 does not divide batch_size 64 (use a divisor",
    ),
    "indivisible size": (
        "micro_batch_size: 3\nbatch_size: 64\n",
        "c.yaml:1: micro_batch_size 3 does not divide",
    ),
    "both": (
        "micro_batches: 2\nmicro_batch_size: 4\n",
        "c.yaml:2: micro_batches and micro_batch_size exclude",
    ),
    "two clusters": (
        "cluster:\n  preset: summit\n  file: a.yaml\n",
        "c.yaml:3: cluster.preset and cluster.file",
    ),
    "cluster's name": (
        "cluster: {preset: sumit}\n",
        "c.yaml:1: cluster preset 'sumit' is unknown (did you mean 'summit'?)",
    ),
    "costs' name": ("costs: rofline\n", "c.yaml:1: costs: 'rofline' is not a path"),
    "momentum": (
        "optimizer: {name: adamw,\n momentum: 0.9}\n",
        "c.yaml:2: optimizer adamw does not support",
    ),
    "betas": (
        "optimizer: {betas: [0.9]}\n",
        "c.yaml:1: optimizer.betas: 1 item where 2 are expected",
    ),
    "beta of 1": (
        "optimizer: {name: adamw, betas: [0.9, 1]}\n",
        "c.yaml:1: optimizer.betas are [0.9, 1.0]",
    ),
    "idle constraint": (
        "constraints:\n- {match: a}\n",
        "c.yaml:2: constraints[0] requires nothing of",
    ),
    "pattern": (
        'constraints:\n- {match: "re:(", stage: 1}\n',
        "c.yaml:2: constraints[0].match: 're:(' is no regular",
    ),
    "frozen pattern": (
        'model: {frozen: ["re:["]}\n',
        "c.yaml:1: model.frozen[0]: 're:[' is no regular",
    ),
    "device twice": (
        "constraints:\n- {match: a, devices: [1, 1]}\n",
        "c.yaml:2: constraints[0].devices is [1, 1]",
    ),
    "absent device": (
        "gpus: 4\nconstraints:\n- {match: a, devices: [4]}\n",
        "c.yaml:3: constraints[0] lists device 4",
    ),
    "degree": (
        "constraints:\n- {match: a, split: {n: 0}}\n",
        "c.yaml:2: constraints[0].split.n is 0",
    ),
    "dims": (
        "model: {dims: {batch: x}}\n",
        "c.yaml:1: model.dims.batch is 'x' (expected a whole number from 0 up to 1099511627776)",
    ),
    "loss": (
        "loss:\n  crossentropy: {}\n",
        "c.yaml:2: unknown key 'crossentropy' in loss (did you mean 'cross_entropy'?)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    text, expected = REFUSED[case]
    with pytest.raises(ConfigurationError) as caught:
        parse_configuration(text, "c.yaml")
    assert expected in str(caught.value)
    assert str(caught.value).startswith("c.yaml:") and "\n" not in str(caught.value)


def test_every_key_arrives(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(EVERYTHING)
    read = load_configuration(path)
    place = Place("")
    assert read == c.Configuration(
        model=c.Model(
            path=str(tmp_path / "models/gpt.onnx"),
            dims=(("batch", 8), ("seq", 128)),
            batch_axes=(("ids", 1), ("mask", None)),
            frozen=("re:.*bias",),
        ),
        mode="train",
        batch_size=64,
        micro_batches=8,
        loss=c.Loss(c.CrossEntropy("logits", "labels")),
        optimizer=c.Optimizer("adamw", lr=0.001, betas=(0.9, 0.95)),
        precision="bf16",
        recompute="auto",
        cluster=c.ClusterChoice(preset="summit", nodes=2),
        gpus=8,
        costs=str(tmp_path / "measured.json"),
        strategy=Choice("graphpipe", (("epsilon", Entry(0.1, place)),)),
        schedule=Choice("tessel", (("time_limit", Entry(10, place)),)),
        constraints=(
            c.Constraint("re:.*embed.*", devices="all", split=(("v", 4),)),
            c.Constraint("encoder/*", stage=0, devices=(0, 1)),
        ),
        memory_limit=14 * 2**30,
        time_limit=30.0,
        seed=7,
    )
    assert [wish.for_problem() for wish in read.constraints] == [
        problem.Constraint("re:.*embed.*", None, (), (("v", 4),)),
        problem.Constraint("encoder/*", 0, (0, 1)),
    ]
    assert read.optimizer.for_problem() == problem.Optimizer("adamw", 0.001, betas=(0.9, 0.95))


def test_defaults() -> None:
    assert load_configuration() == c.Configuration()
    partial = parse_configuration(
        "cluster: {nodes: 2}\noptimizer: {lr: 1}\nstrategy: {depth: 3}\n", "c.yaml"
    )
    assert partial.cluster == c.ClusterChoice(nodes=2)
    assert partial.optimizer == c.Optimizer(lr=1.0)
    assert (partial.strategy.name, dict(partial.strategy.options)["depth"].value) == ("auto", 3)


def load(
    tmp_path: Path, text: str, *assignments: str, dims: tuple[str, ...] = (), **words: str
) -> c.Configuration:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    flags = {"--" + name.replace("_", "-"): word for name, word in words.items()}
    return load_configuration(path, flags, dims, assignments)


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    read = load(
        tmp_path, EVERYTHING, "optimizer.lr=0.5", "constraints=[]", "loss=no", dims=("seq=64",), gpus="4", mode="infer",
        memory_limit="1GB", time_limit="1e1",
    )  # fmt: skip
    assert (read.gpus, read.mode, read.memory_limit, read.time_limit) == (4, "infer", 10**9, 10.0)
    assert read.optimizer == c.Optimizer("adamw", lr=0.5, betas=(0.9, 0.95))
    assert read.constraints == () and read.loss == "no"
    assert read.model.dims == (("batch", 8), ("seq", 64))


@pytest.mark.parametrize("key", ["frozen", "trainable"])
def test_one_pattern_stands_for_a_list_of_one(tmp_path: Path, key: str) -> None:
    patterns = {
        "target.*": ("target.*",),
        "*.bias": ("*.bias",),
        "*": ("*",),
        "re:(?!head\\.).*": ("re:(?!head\\.).*",),
        "1": ("1",),
        "[]": (),
        "[a, '*.b']": ("a", "*.b"),
    }
    for word, expected in patterns.items():
        assert (
            getattr(load_configuration(assignments=[f"model.{key}={word}"]).model, key) == expected
        )
    assert getattr(load(tmp_path, f"model: {{{key}: target.*}}\n").model, key) == ("target.*",)
    with pytest.raises(
        ConfigurationError, match=re.escape(f"model.{key} is a mapping (expected a list of text)")
    ):
        load_configuration(assignments=[f"model.{key}={{a: 1}}"])
    with pytest.raises(
        ConfigurationError, match=re.escape("write text that begins with * in quotes")
    ):
        load_configuration(assignments=[f"model.{key}=[*.bias]"])


def test_another_choice_leaves_no_options_behind(tmp_path: Path) -> None:
    other = load(
        tmp_path,
        EVERYTHING,
        "schedule.units=3",
        strategy="pipedream",
        schedule="tessel",
        cluster="h200",
    )
    assert other.strategy == Choice("pipedream")
    assert [name for name, _ in other.schedule.options] == ["time_limit", "units"]
    assert other.cluster == c.ClusterChoice(preset="h200")
    same = load(tmp_path, EVERYTHING, "cluster.devices_per_node=2", cluster="summit")
    assert same.cluster == c.ClusterChoice(preset="summit", nodes=2, devices_per_node=2)
    file = load(tmp_path, EVERYTHING, "cluster.nodes=3", cluster="my/cluster.yaml")
    assert file.cluster == c.ClusterChoice(file=str(Path.cwd() / "my/cluster.yaml"), nodes=3)


def test_of_two_keys_that_exclude_each_other_the_flag_stays(tmp_path: Path) -> None:
    by_size = load(tmp_path, EVERYTHING, micro_batch_size="4")
    assert (by_size.micro_batches, by_size.micro_batch_size) == ("auto", 4)
    by_number = load(tmp_path, "micro_batch_size: 4\n", micro_batches="2")
    assert (by_number.micro_batches, by_number.micro_batch_size) == (2, None)
    with pytest.raises(ConfigurationError, match="exclude each other"):
        load(tmp_path, "seed: 1\n", micro_batches="2", micro_batch_size="4")


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("sed=1", "--set sed=1: unknown key 'sed' (did you mean 'seed'?)"),
        ("optimizer.lr='1e3'", "optimizer.lr is '1e3' (write 1e3 without quotes)"),
        ("seed", "--set is 'seed', expected KEY=VALUE"),
        ("a..b=1", "--set is 'a..b=1', expected KEY=VALUE"),
        ("seed=[", "--set seed=[: not YAML"),
        ("seed.x=1", "--set seed.x=1: seed is a mapping"),
        ("gpus=0", "--set gpus=0: gpus is 0"),
    ],
)
def test_bad_settings(assignment: str, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(expected)):
        load_configuration(assignments=[assignment])


def test_an_exponent_makes_a_number_with_or_without_a_point(tmp_path: Path) -> None:
    """As YAML 1.2 has it; and text that looks so is written in quotes."""
    for text, rate in (("1e-4", 1e-4), ("3E-5", 3e-5), (".5e1", 5.0), ("2.5e+0", 2.5)):
        assert load(tmp_path, f"optimizer: {{lr: {text}}}\n").optimizer.lr == rate
        assert load_configuration(assignments=[f"optimizer.lr={text}"]).optimizer.lr == rate
        assert load_configuration(words={"--lr": text}).optimizer.lr == rate
    named = load(tmp_path, "loss: '1e3'\n")
    assert load(tmp_path, c.dump_configuration(named)) == named


def test_flags_of_keys_inside_others() -> None:
    read = load_configuration(words={"--optimizer": "adamw", "--lr": "3e-4", "--recompute": "auto"})
    assert (read.optimizer, read.recompute) == (c.Optimizer("adamw", lr=3e-4), "auto")
    with pytest.raises(ConfigurationError, match="--lr fast"):
        load_configuration(words={"--lr": "fast"})


def test_a_clusters_family_is_suggested() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'h100-80gb'") as caught:
        load_configuration(words={"--cluster": "h100"})
    assert caught.value.where == "--cluster h100"


def test_an_input_without_a_batch_axis_is_named_by_a_flag() -> None:
    assert load_configuration(batch_axes=["mask=null", "ids=1"]).model.batch_axes == (
        ("mask", None),
        ("ids", 1),
    )
    with pytest.raises(ConfigurationError, match="--batch-axis ids=none"):
        load_configuration(batch_axes=["ids=none"])


def test_bad_flags() -> None:
    with pytest.raises(
        ConfigurationError, match=re.escape("--gpus x: gpus is 'x' (expected a whole number from 1")
    ):
        load_configuration(words={"--gpus": "x"})
    with pytest.raises(ConfigurationError, match=re.escape("--dim is 'batch', expected NAME=SIZE")):
        load_configuration(dims=["batch"])
    with pytest.raises(
        ConfigurationError, match=re.escape("--micro-batches 3: micro_batches 3 does not divide")
    ):
        load_configuration(words={"--batch-size": "8", "--micro-batches": "3"})


COUNTS = st.integers(1, 2**31)
DEVICES = st.integers(1, 2**20)
TEXT = st.text(max_size=10)
NAMES = TEXT.filter(lambda text: text != "name")
RATES = st.floats(0, 1e300)
PATHS = st.text(max_size=8).map(
    lambda text: "/d/" + text.replace("\0", "").replace("/", "_") + ".x"
)
SCALARS = st.none() | st.booleans() | st.integers(-(2**62), 2**62) | RATES | TEXT
OPTIONS = st.dictionaries(NAMES, SCALARS.map(lambda value: Entry(value, Place(""))), max_size=3)
CHOICES = st.builds(Choice, TEXT, OPTIONS.map(lambda options: tuple(options.items())))


def pairs(values: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[tuple[str, object], ...]]:
    return st.dictionaries(TEXT, values, max_size=3).map(lambda named: tuple(named.items()))


CONSTRAINTS = st.builds(
    c.Constraint,
    match=TEXT.filter(lambda text: text and not text.startswith("re:")),
    stage=st.integers(0, 99),
    devices=st.none()
    | st.just("all")
    | st.lists(st.integers(0, 9), min_size=1, unique=True).map(tuple),
    split=st.none() | pairs(COUNTS),
)
# Their product is a batch size, of which 2^40 is the largest.
MICRO_BATCHES = st.integers(1, 2**16)
SIZES = st.integers(1, 2**24)
BATCHES = st.tuples(
    MICRO_BATCHES, SIZES, st.sampled_from(["micro_batches", "micro_batch_size", "auto", "open"])
).map(
    lambda drawn: {
        "open": {"micro_batches": drawn[0]},
        "auto": {"batch_size": drawn[0]},
    }.get(drawn[2], {"batch_size": drawn[0] * drawn[1], drawn[2]: drawn[0]})
)
CLUSTERS = st.one_of(
    st.builds(
        c.ClusterChoice, preset=st.sampled_from(["summit", "a100-80gb"]), nodes=st.none() | DEVICES
    ),
    st.builds(c.ClusterChoice, file=PATHS, devices_per_node=st.none() | DEVICES),
)
DECAYS = st.floats(0, 0.999)
OPTIMIZERS = st.one_of(
    st.builds(c.Optimizer, name=st.just("sgd"), lr=RATES, momentum=RATES, weight_decay=RATES),
    st.builds(
        c.Optimizer, name=st.just("adamw"), betas=st.tuples(DECAYS, DECAYS), eps=st.just(1e-6)
    ),
)
FIELDS = st.fixed_dictionaries(
    {
        "model": st.builds(
            c.Model,
            path=st.none() | PATHS,
            dims=pairs(COUNTS),
            batch_axes=pairs(st.none() | st.integers(0, 9)),
            frozen=st.lists(TEXT.filter(lambda text: not text.startswith("re:")), max_size=3).map(
                tuple
            ),
        ),
        "mode": st.sampled_from([None, "train", "infer"]),
        "loss": st.none() | TEXT | st.builds(c.Loss, st.builds(c.CrossEntropy, TEXT, TEXT)),
        "optimizer": OPTIMIZERS,
        "precision": st.sampled_from(["fp32", "tf32", "bf16", "fp16"]),
        "recompute": st.sampled_from(["none", "full", "auto"]),
        "cluster": CLUSTERS,
        "gpus": st.none() | st.integers(10, 10**6),
        "costs": st.sampled_from(["roofline", "pase-paper"]) | PATHS,
        "strategy": CHOICES,
        "schedule": CHOICES,
        "constraints": st.lists(CONSTRAINTS, max_size=3).map(tuple),
        "memory_limit": st.none() | COUNTS,
        "time_limit": st.none() | st.floats(1e-9, 1e9),
        "seed": st.integers(0, 2**62),
    }
)


WORDS = st.sampled_from(
    ["model", "dims", "loss", "cross_entropy", "optimizer", "betas", "cluster", "preset", "inline", "levels", "device",
     "strategy", "name", "constraints", "match", "devices", "all", "auto", "memory_limit", "1GiB", "1e3", "re:(", "a.b"]
)  # fmt: skip
TREES = st.recursive(
    SCALARS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | TEXT, inner, max_size=3),
    max_leaves=12,
)


@given(
    st.dictionaries(
        st.sampled_from([key.name for key in schema_keys(c.Configuration)]),
        TREES,
        min_size=1,
        max_size=4,
    )
)
def test_any_document_is_taken_or_refused_with_its_line(document: dict[str, object]) -> None:
    try:
        read = parse_configuration(yaml.safe_dump(document), "c.yaml")
    except ConfigurationError as error:
        assert re.match(r"c\.yaml:\d+: ", str(error)) and "\n" not in str(error)
    else:
        assert parse_configuration(dump_configuration(read), "effective") == read


@given(FIELDS, BATCHES)
def test_what_is_dumped_is_read_back(fields: dict[str, object], batches: dict[str, object]) -> None:
    whole = c.Configuration(**fields, **batches)  # type: ignore[arg-type]
    text = dump_configuration(whole)
    assert parse_configuration(text, "c.yaml") == whole
    assert dump_configuration(parse_configuration(text, "c.yaml")) == text


def test_links_between_nodes_have_a_factor() -> None:
    text = "cluster: {preset: h100-80gb, internode_bandwidth_factor: 0.5}\ngpus: 16\n"
    half, whole = (
        resolve_cluster(parse_configuration(each, "c.yaml"))
        for each in (text, text.replace("0.5", "1"))
    )
    assert half.link(0, 1) == whole.link(0, 1)
    assert half.link(0, 8).bandwidth_bytes_per_s == whole.link(0, 8).bandwidth_bytes_per_s / 2
    assert half.link(0, 8).latency_s == whole.link(0, 8).latency_s
    groups = parse_configuration(
        "cluster: {preset: a100-v100, internode_bandwidth_factor: 0.5}\ngpus: 16\n", "c.yaml"
    )
    assert resolve_cluster(groups).link(0, 8).bandwidth_bytes_per_s == 12.5e9 / 2
    assert resolve_cluster(groups).link(8, 9).bandwidth_bytes_per_s == 50e9
