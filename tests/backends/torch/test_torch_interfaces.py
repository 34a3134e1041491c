"""Torch's private interfaces as autopipe uses them: each name, signature and member, with the
installed torch.
"""

from __future__ import annotations

import ast
import inspect
import re
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
)

from autopipe.backends.torch import torch_interfaces
from autopipe.backends.torch.elastic_agent import RankAgent
from autopipe.backends.torch.rendezvous import RendezvousConfig, RendezvousHandler, SharedState

ROOT = Path(__file__).parents[3]
MODULE = Path(torch_interfaces.__file__)


@pytest.mark.parametrize("name", torch_interfaces.__all__)
def test_each_name_is_a_class_of_torch(name: str) -> None:
    found = getattr(torch_interfaces, name)
    assert isinstance(found, type)
    assert found.__module__.split(".")[0] == "torch"


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Unknown'"):
        _ = torch_interfaces.Unknown


def test_the_oldest_version_is_the_lower_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (
        f"torch>={torch_interfaces.OLDEST_TORCH_VERSION}" in project["optional-dependencies"]["run"]
    )


def test_an_import_takes_no_heavy_module_of_torch_along() -> None:
    script = (
        "import sys, torch, torch.distributed; before = set(sys.modules); "
        "import autopipe.backends.torch.torch_interfaces; print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert [name for name in done.stdout.split() if name.startswith("torch")] == []


def private_uses(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names of a source that are private in torch, by their text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if re.match(r"torch\b.*\._", each.name))
        elif (
            isinstance(node, ast.ImportFrom)
            and node.module is not None
            and node.module.split(".")[0] == "torch"
        ):
            names = [f"{node.module}.{each.name}" for each in node.names]
            yield from (name for name in names if "._" in name)
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if re.fullmatch(r"(torch|dist|F)(\.\w+)*\._\w+", name) and "__" not in name:
                yield name


def test_no_other_module_names_private_interfaces_of_torch() -> None:
    sources = [path for path in sorted((ROOT / "autopipe").rglob("*.py")) if path != MODULE]
    assert len(sources) > 100
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources
        for name in private_uses(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo",
        "import torch._inductor.config as kernels",
        "from torch._C import x",
        "from torch.utils import _pytree",
        "from torch.utils._pytree import tree_leaves",
        "torch._foreach_add_(x, y)",
        "torch.ops.aten._softmax(x)",
        "dist._broadcast(x)",
    ],
)
def test_each_way_to_name_them_is_found(text: str) -> None:
    assert list(private_uses(ast.parse(text)))


MEMBERS = [(*place, name) for place, names in torch_interfaces.MEMBERS.items() for name in names]


@pytest.mark.parametrize(("module", "kind", "name"), MEMBERS)
def test_each_member_exists(module: str, kind: str, name: str, tmp_path: Path) -> None:
    owner = getattr(import_module(module), kind)
    objects: dict[type, Any] = {
        LocalElasticAgent: lambda: LocalElasticAgent(
            _spec(), DefaultLogsSpecs(log_dir=str(tmp_path))
        ),
        torch_interfaces.BackendRendezvousStateHolder: _holder,
        SubprocessHandler: lambda: _handler(tmp_path),
        torch.nn.Module: lambda: torch.nn.Linear(1, 1),
        torch.autograd.graph.Node: lambda: torch.ones(1, requires_grad=True).exp().grad_fn,
    }
    # Members that a constructor makes, and members of subclasses, are on objects only.
    assert hasattr(owner, name) or hasattr(objects[owner](), name)


@pytest.mark.parametrize("kind", [RankAgent, RendezvousHandler, SharedState])
def test_private_methods_that_are_overridden_are_listed(kind: type) -> None:
    listed = {name for names in torch_interfaces.MEMBERS.values() for name in names}
    bases = [base for base in kind.__mro__[1:] if base is not object]
    own = {
        name for name in vars(kind) if name.startswith("_") and not name.startswith(("__", "_abc"))
    }
    assert {name for name in own if any(name in vars(base) for base in bases)} <= listed


def _handler(folder: Path) -> SubprocessHandler:
    files = [str(folder / name) for name in ("output", "errors")]
    handler = SubprocessHandler("true", (), {}, *files, local_rank_id=0, numa_options=None)
    handler.proc.wait()
    return handler


def test_elastic_starts_processes_by_a_function_and_afterwards_as_usual(tmp_path: Path) -> None:
    started: list[tuple[str, ...]] = []

    def start(command: tuple[str, ...], variables: dict[str, str], output: Any, errors: Any) -> Any:
        started.append(command)
        return subprocess.Popen(
            command, env=variables, stdout=output, stderr=errors, start_new_session=True
        )

    def run(name: str) -> str:
        (tmp_path / name).mkdir()
        logs = DefaultLogsSpecs(log_dir=str(tmp_path / name), redirects=Std.ALL)
        command = (
            sys.executable,
            {0: ("-c", "import os; print(os.environ['OWN'])")},
            {0: {"OWN": name}},
        )
        processes = start_processes("rank", *command, logs)
        result = processes.wait()
        assert result is not None
        assert not result.is_failed()
        return Path(result.stdouts[0]).read_text()

    with torch_interfaces.replace_process_start(start):
        assert run("ours") == "ours\n"
    assert [command[:2] for command in started] == [(sys.executable, "-c")]
    assert run("usual") == "usual\n"
    assert len(started) == 1


def _spec() -> WorkerSpec:
    return WorkerSpec(
        role="rank", local_world_size=1, entrypoint="true", args=("x",), rdzv_handler=RendezvousHandler(RendezvousConfig()), max_restarts=1,
        monitor_interval=0.1,
    )  # fmt: skip


def _settings() -> RendezvousSettings:
    patience = RendezvousTimeout(join=timedelta(seconds=1))
    return RendezvousSettings("run", 1, 2, patience, timedelta(seconds=5), 3)


def _holder() -> Any:
    return torch_interfaces.BackendRendezvousStateHolder(None, _settings())  # type: ignore[arg-type]


def test_settings_take_their_fields_in_this_order() -> None:
    settings = _settings()
    assert (settings.run_id, settings.min_nodes, settings.max_nodes) == ("run", 1, 2)
    assert settings.keep_alive_interval == timedelta(seconds=5)
    assert settings.keep_alive_max_attempt == 3


def test_a_state_of_nodes_has_these_fields() -> None:
    """The fields that `rendezvous` writes as JSON; a further one would be lost between nodes."""
    state = torch_interfaces.RendezvousState()
    fields = {
        name: value
        for name in dir(state)
        if name[0] != "_" and not callable(value := getattr(state, name))
    }
    assert fields == {
        "round": 0,
        "complete": False,
        "deadline": None,
        "closed": False,
        "participants": {},
        "wait_list": set(),
        "redundancy_list": set(),
        "last_heartbeats": {},
    }


def test_a_node_is_an_address_a_process_and_a_number() -> None:
    node = torch_interfaces.NodeDescGenerator().generate("here")
    assert node == torch_interfaces.NodeDesc("here", node.pid, 0)
    assert list(inspect.signature(torch_interfaces.NodeDesc).parameters) == [
        "addr",
        "pid",
        "local_id",
    ]


def test_a_rendezvous_says_these_four_things() -> None:
    assert list(inspect.signature(RendezvousInfo).parameters) == [
        "store",
        "rank",
        "world_size",
        "bootstrap_store_info",
    ]


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        (LocalElasticAgent.__init__, ("spec", "logs")),
        (LocalElasticAgent._start_workers, ("group",)),
        (LocalElasticAgent._monitor_workers, ("group",)),
        (LocalElasticAgent._shutdown, ()),
        (LocalElasticAgent._shutdown, (signal.SIGTERM,)),
        (DynamicRendezvousHandler.__init__, ("node", "settings", "backend", "store", "holder")),
        (DynamicRendezvousHandler._create_tcp_store_server, ("address", 1)),
        (DynamicRendezvousHandler.next_rendezvous, ()),
        (DynamicRendezvousHandler.num_nodes_waiting, ()),
        (torch_interfaces.BackendRendezvousStateHolder.sync, ()),
        (torch_interfaces.BackendRendezvousStateHolder._sanitize, ()),
    ],
)
def test_methods_of_elastic_accept_these_arguments(
    method: Any, arguments: tuple[object, ...]
) -> None:
    inspect.signature(method).bind("self", *arguments)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (RankAgent._start_workers, LocalElasticAgent._start_workers),
        (RankAgent._monitor_workers, LocalElasticAgent._monitor_workers),
        (RankAgent._shutdown, LocalElasticAgent._shutdown),
        (
            RendezvousHandler._create_tcp_store_server,
            DynamicRendezvousHandler._create_tcp_store_server,
        ),
        (RendezvousHandler.next_rendezvous, DynamicRendezvousHandler.next_rendezvous),
        (RendezvousHandler.num_nodes_waiting, DynamicRendezvousHandler.num_nodes_waiting),
        (SharedState.sync, torch_interfaces.BackendRendezvousStateHolder.sync),
    ],
)
def test_overrides_accept_all_that_elastic_passes(ours: Any, theirs: Any) -> None:
    """Torch passes arguments by the names and places of its own method."""
    parameters = inspect.signature(theirs).parameters
    inspect.signature(ours).bind(*parameters)
    required = [
        name for name, each in parameters.items() if each.default is inspect.Parameter.empty
    ]
    optional = {name: None for name in parameters if name not in required}
    inspect.signature(ours).bind(*required, **optional)


def test_a_failure_of_a_process_has_these_fields(tmp_path: Path) -> None:
    failure = ProcessFailure(local_rank=1, pid=2, exitcode=-9, error_file=str(tmp_path / "none"))
    assert (failure.local_rank, failure.exitcode, failure.signal_name()) == (1, -9, "SIGKILL")
    assert failure.error_file_data is not None
    assert failure.timestamp > 0


def test_a_store_listens_at_a_socket_that_is_open() -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    port = listener.getsockname()[1]
    made = torch_interfaces.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    other = torch_interfaces.TCPStore(
        "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10)
    )
    other.set("key", "value")
    assert torch_interfaces.PrefixStore("", made).underlying_store is not None
    assert made.get("key") == b"value"
    assert made.compare_set("number", "", "1") == b"1"


def test_users_of_a_storage() -> None:
    tensor = torch.zeros(4)
    alone = torch_interfaces.storage_users(tensor.untyped_storage())
    view = tensor[1:]
    assert torch_interfaces.storage_users(tensor.untyped_storage()) == alone + 1 == 3
    del view
    assert torch_interfaces.storage_users(tensor.untyped_storage()) == 2
    assert torch_interfaces.storage_key(tensor.untyped_storage()) == torch_interfaces.storage_key(
        tensor[1:].untyped_storage()
    )


def test_operators_on_lists() -> None:
    first = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    other = [torch.tensor([3.0, 4.0]), torch.tensor([5.0])]
    assert [each.tolist() for each in torch_interfaces.foreach_lerp(first, other, 0.5)] == [
        [2.0, 3.0],
        [4.0],
    ]
    assert [each.tolist() for each in torch_interfaces.foreach_mul(first, [2.0, 3.0])] == [
        [2.0, 4.0],
        [9.0],
    ]
    assert [each.item() for each in torch_interfaces.foreach_norm([torch.tensor([3.0, 4.0])])] == [
        5.0
    ]
    torch_interfaces.foreach_mul_(first, 2.0)
    torch_interfaces.foreach_add_(first, other, alpha=-1.0)
    assert [each.tolist() for each in first] == [[-1.0, 0.0], [1.0]]
    torch_interfaces.foreach_lerp_(first, other, 1.0)
    assert [each.tolist() for each in first] == [[3.0, 4.0], [5.0]]


def test_operators_of_loss_scaling() -> None:
    scale = torch.tensor(8.0)
    good_steps = torch.zeros((), dtype=torch.int32)
    overflow = torch.zeros(())
    gradients = [torch.tensor([8.0, 16.0])]
    torch_interfaces.unscale_and_find_overflow_(gradients, overflow, scale.reciprocal())
    assert gradients[0].tolist() == [1.0, 2.0]
    assert overflow.item() == 0.0
    torch_interfaces.unscale_and_find_overflow_(
        [torch.tensor([float("inf")])], overflow, scale.reciprocal()
    )
    assert overflow.item() == 1.0
    torch_interfaces.update_loss_scale_(scale, good_steps, overflow, 2.0, 0.5, 2000)
    assert (scale.item(), good_steps.item()) == (4.0, 0)


def test_a_check_on_the_device() -> None:
    torch_interfaces.assert_async(torch.tensor(True), "never")
    with pytest.raises(RuntimeError, match="the reason"):
        torch_interfaces.assert_async(torch.tensor(False), "the reason")


def test_kernels_of_attention_have_these_arguments() -> None:
    """CUDA alone runs the kernels; fake tensors on `meta` check their arguments."""
    query, key, value = torch.empty(3, 2, 4, 8, 16, device="meta", dtype=torch.bfloat16).unbind()
    flash = torch_interfaces.flash_attention(query, key, value, 0.0, True, False, scale=0.5)
    assert flash[0].shape == query.shape
    efficient = torch_interfaces.efficient_attention(
        query, key, value, None, True, 0.0, True, scale=0.5
    )
    assert efficient[0].shape == query.shape


def test_collectives_whose_results_are_one_tensor() -> None:
    for collective in (torch_interfaces.all_gather_flat, torch_interfaces.reduce_scatter_flat):
        inspect.signature(collective).bind("to", "from", group=None, async_op=True)


@pytest.mark.parametrize(
    ("operator", "count"),
    [
        (torch.ops.aten.add.Tensor, 1),
        (torch.ops.aten.max.dim, 2),
        (torch.ops.aten.native_layer_norm.default, 3),
    ],
)
def test_number_of_results(operator: Any, count: int) -> None:
    assert torch_interfaces.result_count(operator) == count


def test_tensors_within_nested_values() -> None:
    first, second, third = torch.ones(3, 2).unbind()
    found = torch_interfaces.nested_tensors({"a": (first, None), "b": [second, {"c": third}, 1]})
    assert all(map(torch.equal, found, (first, second, third)))
    assert len(found) == 3


def test_operators_of_batch_norm() -> None:
    """In training, of samples whose mean is 1: the statistics move by the momentum."""
    x = torch.tensor([[0.0], [2.0]])
    one = torch.ones(1)
    results = torch_interfaces.batch_norm(x, one, None, torch.zeros(1), one, True, 0.5, 0.0)
    assert results[0].flatten().tolist() == [-1.0, 1.0]
    assert results[3].item() == 0.5
    assert (
        torch_interfaces.batch_norm_without_statistics(x, one, None, True, 0.5, 0.0)[0][1].item()
        == 1.0
    )


def test_exchanges_of_fake_ranks_end_at_once() -> None:
    """A rank of a world that is not there; its collectives go through `completed_work_handle`."""
    script = """
import torch, torch.distributed as dist
from autopipe.backends.torch.torch_interfaces import FakeStore, TorchDispatchMode, completed_work_handle, result_count
class Done(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace != "c10d":
            return function(*args, **(kwargs or {}))
        done = completed_work_handle()
        return done if result_count(function) == 1 else (args[0], done)
dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
with Done():
    tensor = torch.ones(3)
    dist.all_reduce(tensor, async_op=True).wait()
    dist.send(tensor, 1)
    dist.all_to_all_single(torch.empty(4), torch.ones(4))
print("ended")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "ended\n", done.stderr


def test_the_compiler_keeps_no_pickles() -> None:
    script = """
from autopipe.backends.torch.torch_interfaces import configure_compiler
import torch._functorch.config as graphs
import torch._inductor.config as kernels
known = {"fx_graph_cache", "compile_threads"} <= kernels.get_config_copy().keys()
known = known and "enable_autograd_cache" in graphs.get_config_copy()
configure_compiler()
print(known, kernels.fx_graph_cache, graphs.enable_autograd_cache, kernels.compile_threads)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False", "False", "1"]


def test_fake_tensors_without_initialising_a_device() -> None:
    script = """
from torch._subclasses import fake_tensor
print(callable(fake_tensor.init_gpu_context), isinstance(fake_tensor.FakeTensorMode.avoid_device_init, property))
from autopipe.backends.torch.torch_interfaces import import_modules_that_look_for_cuda, stop_device_initialisation
import_modules_that_look_for_cuda()
stop_device_initialisation()
print(fake_tensor.FakeTensorMode().avoid_device_init, fake_tensor.init_gpu_context("cuda"))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "True", "True", "None"]


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch is built without NCCL")
def test_options_of_groups_over_nccl() -> None:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    torch_interfaces.set_timeout(options, timedelta(seconds=7))
    options.config.blocking = 1
    options.config.max_ctas = 4
    assert options._timeout == timedelta(seconds=7)
    assert (options.config.blocking, options.config.max_ctas) == (1, 4)


def test_gradients_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    x, w = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    y = torch.tanh(x @ w)
    gradient = torch.randn(3, 3)
    expected = torch.autograd.grad(y, (x, w), gradient, retain_graph=True)
    edges = [torch.autograd.graph.get_gradient_edge(each) for each in (x, w)]
    found = torch_interfaces.input_gradients([y], edges, [gradient], retain_graph=True)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    torch_interfaces.accumulate_gradients([torch.autograd.graph.get_gradient_edge(y)], [gradient])
    assert x.grad is not None and torch.equal(x.grad, expected[0])
    assert w.grad is not None and torch.equal(w.grad, expected[1])


def test_gradients_of_another_shape_or_path_are_rejected() -> None:
    x = torch.randn(3, requires_grad=True)
    other = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="shape"):
        torch_interfaces.accumulate_gradients([x * 2], [torch.ones(4)])
    with pytest.raises(RuntimeError, match="not have been used"):
        torch_interfaces.input_gradients([x * 2], [other], [torch.ones(3)])
