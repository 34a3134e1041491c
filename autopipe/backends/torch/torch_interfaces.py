"""All uses of private interfaces of torch, and of public ones that differ between its versions.
Other modules of autopipe import them from here.

The supported versions are `OLDEST_TORCH_VERSION` and newer; docs/reference/versions.md lists the
versions that ran the tests. `MEMBERS` lists the private attributes and methods that other modules
read or override on torch's objects. `tests/backends/torch/test_torch_interfaces.py` checks each
name, signature and member.

The names in `_MODULE_AND_NAME` are imported at their first use, because torch's elastic agent, fake
tensors and compiler take up to a second each to import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, _engine_run_backward

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
    from torch._dynamo.exc import TorchDynamoException, Unsupported
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
    )
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
        _BackendRendezvousStateHolder as BackendRendezvousStateHolder,
    )
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc as NodeDesc
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
        _NodeDescGenerator as NodeDescGenerator,
    )
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
        _RendezvousState as RendezvousState,
    )
    from torch.nn.modules.batchnorm import _NormBase as NormBase
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "BackendRendezvousStateHolder",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeStore",
    "FakeTensor",
    "FakeTensorMode",
    "NodeDesc",
    "NodeDescGenerator",
    "NormBase",
    "PrefixStore",
    "RendezvousState",
    "Store",
    "TCPStore",
    "TorchDispatchMode",
    "TorchDynamoException",
    "Unsupported",
]

OLDEST_TORCH_VERSION = "2.11"
"""Oldest supported version of torch, equal to the lower bound in pyproject.toml."""

_RENDEZVOUS_MODULE = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_MODULE_AND_NAME = {
    "BackendRendezvousStateHolder": (_RENDEZVOUS_MODULE, "_BackendRendezvousStateHolder"),
    "DataDependentOutputException": (
        "torch._subclasses.fake_tensor",
        "DataDependentOutputException",
    ),
    "DynamicOutputShapeException": ("torch._subclasses.fake_tensor", "DynamicOutputShapeException"),
    "FakeStore": ("torch.testing._internal.distributed.fake_pg", "FakeStore"),
    "FakeTensor": ("torch._subclasses.fake_tensor", "FakeTensor"),
    "FakeTensorMode": ("torch._subclasses.fake_tensor", "FakeTensorMode"),
    "NodeDesc": (_RENDEZVOUS_MODULE, "_NodeDesc"),
    "NodeDescGenerator": (_RENDEZVOUS_MODULE, "_NodeDescGenerator"),
    "NormBase": ("torch.nn.modules.batchnorm", "_NormBase"),
    "PrefixStore": ("torch._C._distributed_c10d", "PrefixStore"),
    "RendezvousState": (_RENDEZVOUS_MODULE, "_RendezvousState"),
    "Store": ("torch._C._distributed_c10d", "Store"),
    "TCPStore": ("torch._C._distributed_c10d", "TCPStore"),
    "TorchDispatchMode": ("torch.utils._python_dispatch", "TorchDispatchMode"),
    "TorchDynamoException": ("torch._dynamo.exc", "TorchDynamoException"),
    "Unsupported": ("torch._dynamo.exc", "Unsupported"),
}
"""(torch module, name in it) of each name that this module imports at its first use."""

MEMBERS = {
    ("torch.distributed.elastic.agent.server.local_elastic_agent", "LocalElasticAgent"): (
        "_pcontext",
        "_remaining_restarts",
        "_monitor_workers",
        "_shutdown",
        "_start_workers",
    ),
    (_RENDEZVOUS_MODULE, "DynamicRendezvousHandler"): ("_create_tcp_store_server",),
    (_RENDEZVOUS_MODULE, "_BackendRendezvousStateHolder"): (
        "_dirty",
        "_last_sync_time",
        "_sanitize",
        "_state",
    ),
    ("torch.distributed.elastic.multiprocessing.subprocess_handler", "SubprocessHandler"): (
        "_popen",
        "_stdout",
        "_stderr",
    ),
    ("torch", "Tensor"): ("_base", "_backward_hooks"),
    ("torch.nn", "Module"): ("_backward_hooks", "_backward_pre_hooks"),
    ("torch.autograd.graph", "Node"): ("_sequence_nr",),
}
"""Private members of torch's classes that modules of autopipe use, by module and class."""


def __getattr__(name: str) -> Any:
    """Return the object of torch that this module calls `name`, and import its module at the first
    use. Raise AttributeError for a name that is not in `_MODULE_AND_NAME`.
    """
    if name not in _MODULE_AND_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _MODULE_AND_NAME[name]
    found = getattr(import_module(module), attribute)
    globals()[name] = found
    return found


# These operators are private in torch, but torch's optimizers and `torch.amp` use them.
assert_async = torch._assert_async
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_lerp = torch._foreach_lerp
foreach_lerp_ = torch._foreach_lerp_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_zero_ = torch._foreach_zero_
unscale_and_find_overflow_ = torch._amp_foreach_non_finite_check_and_unscale_
update_loss_scale_ = torch._amp_update_scale_
flash_attention: Callable[..., tuple[torch.Tensor, ...]] = (
    torch.ops.aten._scaled_dot_product_flash_attention
)
efficient_attention: Callable[..., tuple[torch.Tensor, ...]] = (
    torch.ops.aten._scaled_dot_product_efficient_attention
)
batch_norm = torch.ops.aten._native_batch_norm_legit_functional.default
batch_norm_without_statistics = torch.ops.aten._native_batch_norm_legit.no_stats

# Torch 2.13 has renamed the collectives whose result is one tensor instead of a list. The older
# name is used if the new name does not exist.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


Root = torch.Tensor | GradientEdge
"""A tensor with an autograd history, or the edge of the autograd graph that leads to it."""


def accumulate_gradients(roots: Sequence[Root], gradients: Sequence[torch.Tensor]) -> None:
    """Run the backward from `roots` with their `gradients`, and add the gradient of each leaf
    tensor to its `.grad`, as `torch.autograd.backward` does.

    `torch.autograd.backward` first compares shapes. Its first call imports sympy for this purpose,
    which takes a fifth of a second at the start of a rank. The autograd engine itself also rejects
    gradients of wrong shapes.
    """
    _engine_run_backward(
        tuple(roots),
        tuple(gradients),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def input_gradients(
    roots: Sequence[Root],
    inputs: Sequence[Root],
    gradients: Sequence[torch.Tensor],
    retain_graph: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of `inputs`, given the `gradients` of `roots`, as `torch.autograd.grad`
    does. Like `accumulate_gradients`, it avoids the import of sympy. Raise RuntimeError if no
    gradient reaches an input.
    """
    return _engine_run_backward(
        tuple(roots),
        tuple(gradients),
        retain_graph,
        False,
        tuple(inputs),
        False,
        accumulate_grad=False,
    )


@contextmanager
def replace_process_start(start: Callable[..., Any]) -> Iterator[None]:
    """Context manager during which torch elastic starts each process by calling `start` instead of
    `subprocess.Popen`.

    `start` is called with the command, the environment, and the files for standard output and
    errors; None stands for the stream of this process. It must return an object with the members
    `pid`, `poll` and `wait` of `Popen`, for a process that leads a session.
    """
    import torch.distributed.elastic.multiprocessing.api as processes
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            return start(args, env, self._stdout, self._stderr)

    module: Any = processes
    usual = module.get_subprocess_handler
    module.get_subprocess_handler = Handler
    try:
        yield
    finally:
        module.get_subprocess_handler = usual


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage's C++ object, which is equal for all Python objects that
    represent the storage.
    """
    key: int = storage._cdata
    return key


def storage_users(storage: torch.UntypedStorage) -> int:
    """Return the number of references to a storage: one per tensor that uses it, and one for the
    Python object `storage`.
    """
    return torch._C._storage_Use_Count(storage._cdata)


def abandon_capture(pool: Any) -> None:
    """Clean up after a failed capture of a CUDA graph: stop the redirection of memory allocation to
    `pool`, and reset the state of torch's CUDA random number generator.

    If the end of a capture raises an error, torch skips both. Memory of other streams would then
    never be freed, and drawing random numbers would raise an error.
    """
    device = torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:
        # An error of `_cuda_endAllocateToPool` means that the capture has ended normally. The graph
        # of the capture then releases the pool.
        return
    # Errors of the release are suppressed, because the error of the capture, which the caller
    # raises, is more informative.
    with suppress(RuntimeError):
        torch._C._cuda_releasePool(device, pool)
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())


def completed_work_handle() -> Any:
    """Return the handle of a finished collective, in the form that operators of the namespace
    `c10d` return.
    """
    from torch._C._distributed_c10d import FakeWork

    return FakeWork().boxed()


def result_count(operator: Any) -> int:
    """Return the number of results of a torch operator, as `__torch_dispatch__` receives it."""
    return len(operator._schema.returns)


def nested_tensors(value: object) -> list[torch.Tensor]:
    """Return the tensors in a nested structure of lists, tuples, mappings and registered classes,
    in the order in which `torch.export` flattens it.
    """
    return [
        each for each in torch.utils._pytree.tree_leaves(value) if isinstance(each, torch.Tensor)
    ]


def cpu_supports_bfloat16_kernels() -> bool:
    """Return True if oneDNN has bfloat16 kernels for the CPU of this machine."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set the time limit in the options of an NCCL process group."""
    options._timeout = timeout


def configure_compiler() -> None:
    """Configure torch's compiler to use no cache of compiled graphs and no worker processes,
    because both would read or write pickles.
    """
    import torch._functorch.config as graphs
    import torch._inductor.config as kernels

    kernels.fx_graph_cache = False
    graphs.enable_autograd_cache = False
    kernels.compile_threads = 1


def import_modules_that_look_for_cuda() -> None:
    """Import the modules of torch that check for a CUDA device only once, when they are
    imported.
    """
    import torch._dynamo
    import torch._inductor.utils  # noqa: F401


def stop_device_initialisation() -> None:
    """Prevent fake tensors from initialising the CUDA device, which they do by allocating a small
    tensor on it. The change lasts for the rest of the process.
    """
    from torch._subclasses import fake_tensor

    fake_tensor.init_gpu_context = lambda *_, **__: None  # type: ignore[assignment]
    mode_class: Any = fake_tensor.FakeTensorMode
    mode_class.avoid_device_init = property(lambda mode: True)
