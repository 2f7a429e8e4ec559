"""The names of torch that convmesh uses: aliases, and the list of private ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.guards
import torch._functorch.partitioners
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.debug import _comm_mode

Operator = torch._ops.OpOverload
Handler = Callable[[Operator, tuple[Any, ...], dict[str, Any]], Any]
Spec = DTensorSpec
Store = dist.distributed_c10d.Store

VERSION = "0.2.0"  # of convmesh: it is part of the key of compiled code
OLDEST, TOO_NEW = (2, 13), (2, 16)

# All operators that start a collective, in eager and in compiled code.
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
    (DTensor, "__tensor_flatten__"),
    (DTensor, "__tensor_unflatten__"),
    (torch.Tensor, "_dtensor__new__"),
    (DTensorSpec, "shard_order"),
    (DTensorSpec, "is_default_device_order"),
    (DTensor._op_dispatcher, "unwrap_to_op_info"),
    (DTensor._op_dispatcher, "_propagate_op_sharding_dispatch_slow_path"),
    (DTensor._op_dispatcher, "_dispatch_get_local_results_slow_path"),
    (DTensor._op_dispatcher, "_dispatch_fast_path_python_tail"),
    (DTensor._op_dispatcher, "wrap"),
    (DTensor._op_dispatcher, "sharding_propagator"),
    (DTensor._op_dispatcher.sharding_propagator, "op_strategy_funcs"),
    (DTensor._op_dispatcher.sharding_propagator, "op_single_dim_strategy_funcs"),
    (torch._decomp, "decomposition_table"),
    (torch.utils._python_dispatch, "return_and_correct_aliasing"),
    (torch.utils._python_dispatch, "TorchDispatchMode"),
    (torch._C, "_current_graph_task_id"),
    (torch._C, "_current_autograd_node"),
    (torch.Tensor, "_post_accumulate_grad_hooks"),
    (torch.Tensor, "_backward_hooks"),
    (torch._C, "_dispatch_has_kernel_for_dispatch_key"),
    (torch.distributed.tensor._redistribute, "redistribute_local_tensor"),
    (torch.amp.GradScaler, "_maybe_opt_step"),
    (collectives, "all_to_all_single"),
    (collectives, "all_reduce"),
    (collectives, "AsyncCollectiveTensor"),
    (_comm_mode, "NATIVE_TO_PY_MAPPING"),
    (collectives, "_are_we_tracing"),
    (torch.utils._python_dispatch, "_disable_current_modes"),
    (torch.ops.aten._convolution_double_backward.default, "decompose"),
    (torch.library.Library, "_destroy"),
    (torch._C, "_DisablePythonDispatcher"),
    (torch._C, "_AutoDispatchBelowADInplaceOrView"),
    (torch.ops.aten.upsample_nearest2d.default, "py_kernels"),
    (torch.ops.aten.upsample_nearest2d.default, "_dispatch_cache"),
    (torch.compiler.config, "cache_key_tag"),
    (torch.fx.traceback, "current_meta"),
    (dist, "ProcessGroupGloo"),
    (dist.distributed_c10d._world, "pg_names"),
    (dist.distributed_c10d._world, "pg_group_ranks"),
    (dist.distributed_c10d, "_backend"),
    (dist.distributed_c10d, "_default_pg_init_method"),
    (dist.distributed_c10d, "_unregister_all_process_groups"),
    (dist.Backend, "_plugins"),
    (dist.Backend, "_BackendPlugin"),
    (torch._C._distributed_c10d, "_set_thread_isolation_mode"),
    (torch.distributed.device_mesh, "threading"),
    (torch.nn.parallel.DistributedDataParallel, "_active_ddp_module"),
    (torch.Tensor, "_version"),
    (torch._C, "_dispatch_keyset_full_after"),
    (torch._ops.OpOverload, "redispatch"),
    (torch._C._distributed_c10d, "_resolve_process_group"),
    (torch._C._distributed_c10d, "_register_work"),
    (dist.ProcessGroup, "alltoall_base"),
    (dist.distributed_c10d, "_get_default_store"),
    (dist.distributed_c10d, "_set_pg_timeout"),
    (torch.nn.parallel.DistributedDataParallel, "_get_active_ddp_module"),
    (dist.ProcessGroup, "_get_backend"),
    (dist.ProcessGroup, "_device_types"),
    *((torch.ops._c10d_functional, name) for name in COLLECTIVES),
    (DTensor._op_dispatcher, "_allow_implicit_replication"),
    (torch.autograd.Variable, "_execution_engine"),
    (torch._C, "_get_dispatch_mode"),
    (torch._C._TorchDispatchModeKey, "PROXY"),
    (torch._C, "_dispatch_get_all_op_names"),
    (torch._C, "_dispatch_key_for_device"),
    (torch._C, "_dispatch_has_kernel_for_dispatch_key"),
    (torch.utils._device, "DeviceContext"),
    (torch.overrides, "_get_current_function_mode_stack"),
    (torch._C._functorch, "maybe_current_level"),
    (torch._C, "_len_torch_dispatch_stack"),
    (torch._C, "_dispatch_keys"),
    (torch._C._autograd, "_profiler_enabled"),
    (torch._dynamo.guards.GuardBuilder, "DTENSOR_SPEC_MATCH"),
    (torch._dynamo.guards, "convert_to_concrete_values"),
    (torch._functorch.partitioners, "is_not_collective"),
    (torch._C._dynamo.eval_frame, "set_code_exec_strategy"),
    (torch._C._dynamo.eval_frame, "_FrameExecStrategy"),
    (torch._C._dynamo.eval_frame, "_FrameAction"),
    (torch._guards.TracingContext, "try_get"),
    (torch._subclasses.functional_tensor, "FunctionalTensor"),
    (torch._subclasses, "FakeTensor"),
    (torch, "_functionalize_unsafe_set"),
    (torch, "_from_functional_tensor"),
    (torch, "_sync"),
    (torch._C, "DispatchKeySet"),
    (torch._C, "DispatchKey"),
    (torch._C, "_SetExcludeDispatchKeyGuard"),
    (torch.autograd.forward_ad, "_current_level"),
    (torch.Tensor, "_is_zerotensor"),
    (torch.library, "get_kernel"),
)


def check_version() -> None:
    """Refuse torch releases that the private names were not tested with."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if not OLDEST <= (major, minor) < TOO_NEW:
        raise RuntimeError(
            f"convmesh extends torch's DTensor from {OLDEST[0]}.{OLDEST[1]} to below {TOO_NEW[0]}.{TOO_NEW[1]}, "
            f"and this is torch {torch.__version__}: install a torch release in that range, or another convmesh"
        )
