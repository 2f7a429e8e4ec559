"""The graph that a compiler traces, as far as it has come: what is made of what."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._functorch import partitioners
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import Node, traceback
from torch.fx.experimental.proxy_tensor import get_proxy_slot

# Of these an operand gives the shape alone: a compiler may let go of it.
SHAPES = frozenset({
    *(f"{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")),
    *(f"new_{name}" for name in ("empty", "empty_strided", "zeros", "ones", "full")),
    *("fill", "zero", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset"),
})  # fmt: skip
_PASS = "partitioner_tag"  # by which torch says of what it has traced which pass that is part of
MOST = 400  # nodes that are looked at: what is further away counts as unseen, which costs a node or two

_library = torch.library.Library("convmesh", "FRAGMENT")
_library.define("nothing(Tensor[] of, ScalarType dtype) -> Tensor", tags=[torch.Tag.pt2_compliant_tag])
_library.impl("nothing", lambda of, dtype: of[0].new_zeros((), dtype=dtype), "CompositeExplicitAutograd")


def nothing(of: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Zero, of which a compiler knows no more than what it is made of."""
    zero: torch.Tensor = torch.ops.convmesh.nothing(of, dtype)
    return zero


def unseen(result: torch.Tensor, origins: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those of `origins` that a compiler does not see in a result, as far as we know. None, if no graph is made here:
    then nobody drops anything."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None:
        return []
    node = _node_of(result)
    return [origin for origin in origins if not _is_made_of(node, _node_of(origin))]


def of_this_pass(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Without what was made in the forward pass, while the backward pass is traced: it keeps nothing in that."""
    if not in_backward_pass():
        return [*tensors]
    return [tensor for tensor in tensors if (node := _node_of(tensor)) is None or node.meta.get(_PASS) != "is_forward"]


def in_backward_pass() -> bool:
    return bool(traceback.current_meta.get(_PASS) == "is_backward")


def drop_dead_communication() -> Callable[[], None]:
    """Let a compiler drop all dead code of a backward pass; returns what undoes that.

    torch's partitioner copies recomputable nodes into the backward graph, and then drops unused collectives from it,
    but not the inputs of these. An exchange among such inputs would run once more on one rank alone.
    """
    before = partitioners.is_not_collective

    def stays(node: Node) -> bool:
        return before(node) and node.is_impure()

    def undo() -> None:
        if partitioners.is_not_collective is stays:
            partitioners.is_not_collective = before

    partitioners.is_not_collective = stays
    return undo


def _node_of(tensor: torch.Tensor) -> Node | None:
    """What makes a tensor in the graph; None where there is none, or it does not know the tensor."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if mode is None:
        return None
    if isinstance(tensor, FunctionalTensor):
        torch._sync(tensor)  # type: ignore[attr-defined]  # with what was written to views of it
        tensor = torch._from_functional_tensor(tensor.elem)
    node: Node | None = get_proxy_slot(tensor, mode.tracer, None, lambda found: found.proxy.node)
    return node


def _is_made_of(result: Node | None, origin: Node | None) -> bool:
    if result is None or origin is None:
        return False
    seen, ahead = {result}, [result]
    while ahead and len(seen) < MOST:
        node = ahead.pop()
        if node is origin:
            return True
        new = [one for one in _operands(node) if one not in seen and not one < origin]
        seen.update(new)
        ahead += new
    return False


def _operands(node: Node) -> Sequence[Node]:
    """Those whose numbers it uses."""
    name = getattr(node.target, "_opname", "").removesuffix("_")
    if name in SHAPES:
        return ()
    return [node.args[1]] if name == "copy" and isinstance(node.args[1], Node) else node.all_input_nodes
