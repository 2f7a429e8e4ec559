"""All of torch's private names that convmesh uses. Nothing else in the library touches one.

`REQUIRED` lists them, so that a test can say which one a new torch release has lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OutputSharding
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, return_and_correct_aliasing

Operator = torch._ops.OpOverload
Handler = Callable[[Operator, tuple[Any, ...], dict[str, Any]], Any]
Spec = DTensorSpec
Store = dist.distributed_c10d.Store

VERSION = "0.1.0"  # of convmesh: it is part of the key of compiled code
OLDEST, TOO_NEW = (2, 13), (2, 16)

# Everything that starts a communication, in eager and in compiled code.
COLLECTIVES = (
    "all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_",
    "all_gather_into_tensor", "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor", "reduce_scatter_tensor_out", "reduce_scatter_tensor_coalesced",
    "all_to_all_single", "broadcast", "broadcast_",
)  # fmt: skip

REQUIRED: tuple[tuple[object, str], ...] = (
    (DTensor, "_op_dispatcher"),
    (DTensor._op_dispatcher, "_custom_op_handlers"),
    (DTensor, "_local_tensor"),
    (DTensor, "_spec"),
    (torch.Tensor, "_dtensor__new__"),
    (DTensorSpec, "shard_order"),
    (DTensorSpec, "is_default_device_order"),
    (DTensor._op_dispatcher, "unwrap_to_op_info"),
    (DTensor._op_dispatcher, "_propagate_op_sharding_dispatch_slow_path"),
    (DTensor._op_dispatcher, "_dispatch_get_local_results_slow_path"),
    (DTensor._op_dispatcher, "_dispatch_fast_path_python_tail"),
    (DTensor._op_dispatcher, "wrap"),
    (torch.utils._python_dispatch, "return_and_correct_aliasing"),
    (torch.utils._python_dispatch, "TorchDispatchMode"),
    (torch._C, "_current_graph_task_id"),
    (torch._C, "_dispatch_has_kernel_for_dispatch_key"),
    (torch.distributed.tensor._redistribute, "redistribute_local_tensor"),
    (collectives, "all_to_all_single"),
    (collectives, "all_reduce"),
    (collectives, "AsyncCollectiveTensor"),
    (collectives, "_are_we_tracing"),
    (torch.utils._python_dispatch, "_disable_current_modes"),
    (torch.ops.aten._convolution_double_backward.default, "decompose"),
    (torch.library.Library, "_destroy"),
    (torch._C, "_DisablePythonDispatcher"),
    (torch.ops.aten.upsample_nearest2d.default, "py_kernels"),
    (torch.ops.aten.upsample_nearest2d.default, "_dispatch_cache"),
    (torch.compiler.config, "cache_key_tag"),
    (torch._C, "_current_graph_task_id"),
    (torch._C, "_storage_Use_Count"),
    (torch._C, "_dispatch_keyset_full_after"),
    (torch._ops.OpOverload, "redispatch"),
    (torch._C._distributed_c10d, "_resolve_process_group"),
    (dist.distributed_c10d, "_get_default_store"),
    (dist.distributed_c10d, "_set_pg_timeout"),
    (dist.ProcessGroup, "_get_backend"),
    (dist.ProcessGroup, "_device_types"),
    *((torch.ops._c10d_functional, name) for name in COLLECTIVES),
    (DTensor._op_dispatcher, "_allow_implicit_replication"),
    (torch.autograd.Variable, "_execution_engine"),
    (torch._C, "_get_dispatch_mode"),
    (torch._C._TorchDispatchModeKey, "PROXY"),
    (torch._C, "_dispatch_get_all_op_names"),
)


def check_version() -> None:
    """Refuse a torch release that the private names below were never tried with."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if not OLDEST <= (major, minor) < TOO_NEW:
        raise RuntimeError(
            f"convmesh extends torch's DTensor from {OLDEST[0]}.{OLDEST[1]} to below {TOO_NEW[0]}.{TOO_NEW[1]}, "
            f"and this is torch {torch.__version__}: install a torch release in that range, or another convmesh"
        )


def handlers() -> dict[Operator, Handler]:
    """DTensor's table of operators that are handled apart; it is consulted on every call."""
    table: dict[Operator, Any] = DTensor._op_dispatcher._custom_op_handlers
    return table


def local_of(tensor: DTensor) -> torch.Tensor:
    """This rank's part, without recording the access for autograd as `to_local` does."""
    local: torch.Tensor = tensor._local_tensor
    return wait(local)  # a redistribution may hand on a tensor whose collective is still under way


def noted(tensor: Any, name: str) -> Any:
    """What was noted at this rank's memory, None for nothing. None also while tracing, and beside a collective."""
    local = getattr(tensor, "_local_tensor", None)
    return getattr(local.untyped_storage(), name, None) if type(local) is torch.Tensor else None


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Where the tensor's parts lie: hashable, and so the key by which plans are cached."""
    spec: DTensorSpec = tensor._spec
    # The first test spares the second, which is slow, in nearly all calls.
    if type(tensor._local_tensor) is torch.Tensor or not tracing():
        return spec
    _compile_for_this_rank()
    return _settled(spec)


def eager_spec_of(tensor: DTensor) -> DTensorSpec:
    """The same where nothing is traced, which takes longer to find out than a short rule may take."""
    spec: DTensorSpec = tensor._spec
    return spec


def _cache_tag() -> str:
    """Compiled code is of this rank and of this release."""
    return f"convmesh-{VERSION}-rank-{dist.get_rank()}"


def _compile_for_this_rank() -> None:
    """Keep torch.compile from handing one rank the code of another.

    Its cache on disk knows a DTensor by its global layout, which all ranks share, while their code differs.
    """
    if _cache_tag() not in torch.compiler.config.cache_key_tag:
        torch.compiler.config.cache_key_tag += _cache_tag()


def compile_for_any_rank() -> None:
    """Put back what `_compile_for_this_rank` has changed."""
    if dist.is_initialized():
        tag = torch.compiler.config.cache_key_tag
        torch.compiler.config.cache_key_tag = tag.replace(_cache_tag(), "")


def _settled(spec: DTensorSpec) -> DTensorSpec:
    """Without symbolic sizes: a plan holds for the sizes that it was made for, and int() makes the compiler know."""
    meta = spec.tensor_meta
    assert meta is not None, "a DTensor's spec knows its shape"
    shape, stride = tuple(int(size) for size in meta.shape), tuple(int(step) for step in meta.stride)
    return DTensorSpec(spec.mesh, spec.placements, TensorMeta(torch.Size(shape), stride, meta.dtype))


def plain_order(spec: DTensorSpec) -> bool:
    """A dimension that is cut over several mesh dimensions is cut over the first of them first."""
    strided = any(isinstance(placement, _StridedShard) for placement in spec.placements)
    return not strided and plain(spec.shard_order)


def plain(shard_order: Any) -> bool:
    return DTensorSpec.is_default_device_order(shard_order)


def no_modes() -> AbstractContextManager[Any]:
    """For real numbers and meta tensors of one's own, also while torch.compile traces."""
    return _disable_current_modes()


def in_rank_order(mesh: DeviceMesh) -> bool:
    """Ranks ascend along every mesh dimension. A process group sorts its ranks, so else its order is not the mesh's."""
    with no_modes():  # the mesh's own numbers are real, also while torch.compile traces
        ranks = mesh.mesh
        return all(bool((ranks.diff(dim=dim) > 0).all()) for dim in range(ranks.dim()))


def make_spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> DTensorSpec:
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, dtype))


def opened(args: tuple[Any, ...]) -> tuple[tuple[DTensorSpec | None, ...], list[Any], DeviceMesh] | None:
    """Where each argument lies, and this rank's part of it; None and the argument itself for what is no tensor.
    And the mesh of the last one.

    None for calls that need a closer look: while tracing, where a collective is under way, beside plain tensors.
    """
    specs: list[DTensorSpec | None] = []
    values: list[Any] = []
    for argument in args:
        if type(argument) is DTensor:
            local = argument._local_tensor
            if type(local) is not torch.Tensor:
                return None
            spec = argument._spec
            specs.append(spec)
            values.append(local)
        elif isinstance(argument, torch.Tensor):
            return None
        else:
            specs.append(None)
            values.append(argument)
    return tuple(specs), values, spec.mesh


def wrap(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor below autograd, where the public constructor would record itself."""
    # Past __init__, which does nothing but keep torch.compile out, and takes as long as the rest.
    tensor: DTensor = DTensor.__new__(DTensor, local, spec, requires_grad=False)
    return tensor


def relocate(tensor: DTensor, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Let a DTensor hold the same values in another placement from now on, whoever refers to it."""
    tensor._local_tensor, tensor._spec = local, spec


def owns_storage(local: torch.Tensor) -> bool:
    """No other tensor looks at the same memory."""
    storage = local.untyped_storage()
    # One reference is the tensor's, and one is `storage` here.
    return bool(torch._C._storage_Use_Count(storage._cdata) <= 2)


def redistribute(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> torch.Tensor:
    moved: torch.Tensor = redistribute_local_tensor(local, source, target)
    return wait(moved)


def tracing() -> bool:
    """Under torch.compile, where sizes may be symbols."""
    return bool(collectives._are_we_tracing())


def all_to_all(
    buffer: torch.Tensor, receive_counts: Sequence[int], send_counts: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Start sending; the result is there after `wait`. A functional collective, so that compilers can trace it."""
    return _kept(collectives.all_to_all_single(_after_the_last(buffer), list(receive_counts), list(send_counts), group))


def all_reduce(tensor: torch.Tensor, op: str, group: dist.ProcessGroup) -> torch.Tensor:
    """Start reducing over a group; the result is there after `wait`. A functional collective, too."""
    return _kept(collectives.all_reduce(_after_the_last(tensor), op, group))


# While a graph is traced: its tracer, and the result of the last communication in it.
_last: tuple[Any, torch.Tensor] | None = None


def _tracer() -> Any:
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) if tracing() else None
    return None if mode is None else mode.tracer


def _after_the_last(tensor: torch.Tensor) -> torch.Tensor:
    """Make a communication depend on the one before it in the same graph.

    A compiler may reorder what does not depend on each other, by the graph, and the ranks' graphs differ.
    """
    if _last is None or _tracer() is not _last[0]:
        return tensor
    return tie(tensor, tokens=[_last[1].reshape(-1)[:1]])


def _kept(result: torch.Tensor) -> torch.Tensor:
    global _last
    tracer = _tracer()
    if tracer is None:
        _last = None
    elif result.numel():
        _last = (tracer, result)
    return result


def tie(result: torch.Tensor, *operands: torch.Tensor, tokens: Sequence[torch.Tensor | None] = ()) -> torch.Tensor:
    """Make the compiler believe that `result` depends on its operands and on exchanges, on every rank.

    It drops or moves a collective of which a rank uses nothing, and then the other ranks wait for the wrong one.
    A token is a number that came with an exchange.
    """
    if not tracing():
        return result
    never = [operand.reshape(-1)[:0].any() for operand in operands if operand is not result]
    never += [((token == token) & (token != token)).any() for token in tokens if token is not None]
    for false in never:
        result = result | false if result.dtype == torch.bool else result + false.to(result.dtype)
    return result


def autograd_keys(name: str) -> tuple[str, ...]:
    """Where a function has to be registered to stand in for an operator above autograd, for all kinds of tensors.

    What torch makes of other operators at once it prefers to anything that is registered for all backends alike.
    """
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CompositeImplicitAutograd"):
        return ("Autograd",)
    return tuple(f"Autograd{backend}" for backend in ("CPU", "CUDA", "XPU", "HPU", "MPS", "PrivateUse1", "Meta"))


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """The result of a collective, once it is there."""
    return tensor.wait() if isinstance(tensor, collectives.AsyncCollectiveTensor) else tensor


def intercept_collectives(
    around: Callable[[Operator, tuple[Any, ...], Callable[[], Any]], Any],
    failed: Callable[[torch.Tensor, RuntimeError], Exception],
) -> Callable[[], None]:
    """Let `around(operator, args, run)` run every functional collective, and raise `failed(tensor, error)` where a wait
    for one raises `error`; returns what undoes that.

    The place is the last one before the backend, so compiled code comes by as well, and what a compiler only traces
    is known by its device. Collectives of `torch.distributed` itself (`dist.all_reduce`) do not pass here.
    """
    library = torch.library.Library("_c10d_functional", "IMPL")
    beyond = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    await_it = torch.ops._c10d_functional.wait_tensor.default.redispatch

    def starting(operator: Operator) -> Callable[..., Any]:
        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            first = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
            if first.is_meta:
                return operator.redispatch(keys & beyond, *args, **kwargs)
            return around(operator, args, lambda: operator.redispatch(keys & beyond, *args, **kwargs))

        return run

    def waiting(keys: Any, tensor: torch.Tensor) -> Any:
        try:
            return await_it(keys & beyond, tensor)
        except RuntimeError as error:
            raise failed(tensor, error) from error

    for name in COLLECTIVES:
        kernel = starting(getattr(torch.ops._c10d_functional, name).default)
        library.impl(name, kernel, "BackendSelect", with_keyset=True)
    library.impl("wait_tensor", waiting, "BackendSelect", with_keyset=True)
    return library._destroy


def name_of(operator: Operator) -> str:
    """Without namespace and overload."""
    return operator._schema.name.partition("::")[2]


def group_called(group: dist.ProcessGroup | str) -> dist.ProcessGroup:
    """The process group that a functional collective was given, by its name or itself."""
    if isinstance(group, dist.ProcessGroup):
        return group
    found: dist.ProcessGroup = torch._C._distributed_c10d._resolve_process_group(dist.distributed_c10d.GroupName(group))
    return found


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long a collective of this group may take; torch's default where its backend does not say."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    said: timedelta | None = getattr(options, "_timeout", None)
    return default_pg_timeout if said is None else said


def inherit_timeout(group: dist.ProcessGroup) -> None:
    """Give a group that nobody set a time-out for the one that was given to `init_process_group`.

    torch makes the groups of a mesh with a time-out of its own, of half an hour.
    """
    world = dist.group.WORLD
    assert world is not None, "a group is part of an initialised world"
    wanted = timeout_of(world)
    if timeout_of(group) in (default_pg_timeout, default_pg_nccl_timeout) and timeout_of(group) != wanted:
        dist.distributed_c10d._set_pg_timeout(wanted, group)


def store() -> Store:
    """Where all ranks can leave each other messages without a collective."""
    found: Store = dist.distributed_c10d._get_default_store()
    return found


def stock(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What DTensor itself does for an operator whose rule leaves this call alone; a view stays a view."""
    dispatcher = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(operator, args, kwargs)
    found = dispatcher._propagate_op_sharding_dispatch_slow_path(operator, args, kwargs, info, try_cache=True)
    if not isinstance(found, OutputSharding):
        return found  # an operator that was taken apart
    info.output_sharding = found
    results = dispatcher._dispatch_get_local_results_slow_path(operator, args, info)
    if operator._schema.is_mutable:
        out = signature(operator).has_out
        return dispatcher._dispatch_fast_path_python_tail(
            operator, args, kwargs, info.compute_mesh, found, results, True, not out, out
        )
    result = dispatcher.wrap(results, found.output_spec)
    return as_view(operator, args, kwargs, result) if operator._schema._is_view_op() else result


def as_view(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Tell torch that a view operator's result shares its memory with the operand."""
    return return_and_correct_aliasing(operator, args, kwargs, result)


def memory_of(tensor: torch.Tensor) -> int:
    """Tells tensors apart that look at different memory, also where there is none of it."""
    return int(tensor.untyped_storage()._cdata)


def shares_memory(view: DTensor, base: torch.Tensor) -> bool:
    """Whether torch knows the one for a view of the other's memory, beyond what autograd believes."""
    return memory_of(view) == memory_of(base)


def view_rule(handler: Handler) -> Handler:
    """A view operator's rule: in inference mode torch wants views of other tensors to be other tensors too."""

    @wraps(handler)
    def run(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_inference_mode_enabled() or args[0].is_inference():
            return handler(operator, args, kwargs)
        with torch.inference_mode(False):
            return handler(operator, args, kwargs)

    return run


def in_backward() -> bool:
    """Whether autograd is running: it makes plain zeros where a gradient is missing, and writes into no gradient."""
    return bool(torch._C._current_graph_task_id() != -1)


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Call back at the end of the backward pass that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def replicates_implicitly() -> bool:
    """Whether DTensor's own operators take a plain tensor for one that is the same on every rank."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


def replicate_implicitly(on: bool) -> None:
    DTensor._op_dispatcher._allow_implicit_replication = on


def composite(operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What torch itself does for an operator that is made of others."""
    return operator.decompose(*args, **kwargs)


def keep_whole(operator: Operator) -> Callable[[], None]:
    """Keep torch.compile from taking an operator apart before DTensor sees it; returns what undoes that.

    Tensors of other kinds are still treated as before.
    """
    kernels = operator.py_kernels
    before = dict(kernels)

    def replacement(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not isinstance(args[0], DTensor):
                return kernel(*args, **kwargs)
            with torch._C._DisablePythonDispatcher():
                return operator(*args, **kwargs)

        return run

    def undo() -> None:
        kernels.update(before)
        operator._dispatch_cache.clear()

    kernels.update({key: replacement(kernel) for key, kernel in before.items()})
    operator._dispatch_cache.clear()
    return undo


def arguments(operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """All arguments of a call in the order of the operator's schema."""
    defaults = _defaults(operator)
    if not kwargs:
        return args + tuple([default for _, default in defaults[len(args) :]])
    return args + tuple([kwargs.get(name, default) for name, default in defaults[len(args) :]])


@lru_cache(maxsize=4096)
def _defaults(operator: Operator) -> tuple[tuple[str, Any], ...]:
    return tuple((argument.name, argument.default_value) for argument in operator._schema.arguments)


@dataclass(frozen=True)
class Signature:
    """What the schema of an operator on lists of tensors says about its arguments, by position."""

    names: tuple[str, ...]
    lists: tuple[int, ...]
    written: frozenset[int]
    by_name: int  # the arguments from here on are passed by name

    @property
    def has_out(self) -> bool:
        """It writes into tensors that are given by name, for its results."""
        return any(number >= self.by_name for number in self.written)


@lru_cache(maxsize=1024)
def signature(operator: Operator) -> Signature:
    schema = operator._schema.arguments
    return Signature(
        tuple(argument.name for argument in schema),
        tuple(number for number, argument in enumerate(schema) if str(argument.type) == "List[Tensor]"),
        frozenset(number for number, argument in enumerate(schema) if argument.alias_info and argument.is_write),
        next((number for number, argument in enumerate(schema) if argument.kwarg_only), len(schema)),
    )


@lru_cache(maxsize=1)
def writing_operators() -> tuple[Operator, ...]:
    """All of torch's own operators that write into an argument."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if space == "aten" and (packet.endswith("_") or overload):
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            if operator._schema.is_mutable:
                found.append(operator)
    return tuple(found)


def takes_tensors(operator: Operator) -> bool:
    """Not one of those on numbers, strings or lists, of which torch.jit has many."""
    return str(operator._schema.arguments[0].type) in ("Tensor", "List[Tensor]") or any(
        str(argument.type) == "Tensor" for argument in operator._schema.arguments
    )


def gives_one_tensor(operator: Operator) -> bool:
    return [str(result.type) for result in operator._schema.returns] == ["Tensor"]


def is_composite(operator: Operator) -> bool:
    """Whether it is made of other operators before DTensor sees it, but in inference mode."""
    made, own = (
        torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)
        for key in ("CompositeImplicitAutograd", "CPU")
    )
    return bool(made and not own)


def call(operator: Operator, values: Sequence[Any]) -> Any:
    """Call with all arguments in the order of the schema."""
    known = signature(operator)
    named = dict(zip(known.names[known.by_name :], values[known.by_name :], strict=True))
    return operator(*values[: known.by_name], **named)
