"""The state of a distributed model as plain tensors: in memory, or in a file that loads without convmesh."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter, tree_map

from .checkpoint import files
from .checkpoint.ranks import Ranks
from .checkpoint.shards import Piece, full_box
from .errors import CheckpointError

State = dict[str, Any]
Tree = TypeVar("Tree")


@overload
def full_state_dict(model: nn.Module, *, cpu: bool = True, all_ranks: bool = False) -> State: ...
@overload
def full_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, cpu: bool = True, all_ranks: bool = False
) -> tuple[State, State]: ...
def full_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    cpu: bool = True,
    all_ranks: bool = False,
) -> State | tuple[State, State]:
    """Return the state of a model as plain tensors, as if it had never been distributed. All ranks must call this.

    A replicated tensor is not copied: as in `model.state_dict()`, the result shares its memory, unless it is moved to
    the CPU. A sharded one (FSDP) is gathered, one tensor at a time.

    Args:
        model: The module, distributed or not, with FSDP or without, compiled or not.
        optimizer: Its optimizer.
        cpu: Whether to move the tensors to the CPU. Each leaves the device before the next one is gathered.
        all_ranks: Whether all ranks get the result. By default the first rank of the model's mesh does.

    Returns:
        The state dict of the model as if it was never distributed; with an optimizer, the pair of both states. On ranks
        other than the first, empty dicts, unless `all_ranks`.

    Examples:
        >>> model = convmesh.distribute(nn.Conv2d(1, 2, 3), mesh)
        >>> state = convmesh.full_state_dict(model)
        >>> if dist.get_rank() == 0:
        ...     torch.save(state, "model.pt")
        ...     found = nn.Conv2d(1, 2, 3).load_state_dict(torch.load("model.pt"))  # on any machine
    """
    own = _state(model)
    kept = all_ranks or _is_first(own)
    found = _full(own, cpu, kept)
    if optimizer is None:
        return found
    return found, _full(optimizer.state_dict(), cpu, kept)


def export(model: nn.Module, path: str | Path) -> Path:
    """Write the parameters and buffers of a model as one safetensors file. All ranks must call this.

    The file does not need convmesh: load it with `safetensors.torch.load_file`. The first rank of the model's mesh
    writes it, and only that rank needs to see the folder. Sharded tensors (FSDP) are gathered one at a time, so that no
    rank ever holds all of them. A tensor with two names (tied weights) is written under both. The file appears only
    when it is complete.

    To continue training later, use `save_checkpoint`, which saves optimizers and more.

    Args:
        model: The module, distributed or not.
        path: The file, such as `"model.safetensors"`. An existing file is replaced.

    Returns:
        The path.

    Raises:
        CheckpointError: On all ranks: the file cannot be written, or an entry of the state is no tensor, or has a dtype
            that safetensors does not support.

    Examples:
        >>> model = convmesh.distribute(nn.Conv2d(1, 2, 3), mesh)
        >>> path = convmesh.export(model, "model.safetensors")
        >>> from safetensors.torch import load_file
        >>> nn.Conv2d(1, 2, 3).load_state_dict(load_file(path))  # on any machine
        <All keys matched successfully>
    """
    path = Path(path)
    ranks = Ranks(model, None, f"export to {path}", "another folder, or more room on the disk")
    state = _state(model)
    pieces = ranks.agree(lambda: _pieces(state))
    arriving = _full_tensors([state[piece.name] for piece in pieces])
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise CheckpointError(f"export: {path} is a folder\n  remedy: a file in it, {path / 'model.safetensors'}")
        files.write(unfinished, pieces, lambda _: files.bytes_of(next(arriving)), files.BLOCK_BYTES)
        os.replace(unfinished, path)

    def take_part() -> None:
        try:
            if ranks.first:
                write()
        finally:
            unfinished.unlink(missing_ok=True)
            for _ in arriving:  # the other ranks' all-gathers need this one, even after a failed write
                pass

    ranks.agree(take_part)
    return path


def _state(model: nn.Module) -> State:
    """Return the model's state dict under the names from before compilation; tied weights are one object."""
    state: State = dict(get_model_state_dict(model))
    first: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        name = name.replace("_orig_mod.", "")
        if name in state:
            state[name] = state[first.setdefault(id(tensor), name)]
    return state


def _full(state: Tree, cpu: bool, kept: bool) -> Tree:
    """Replace DTensors by full tensors, each made once.

    Every rank takes part in the all-gathers; where the result is not `kept`, an empty one is returned.
    """
    tensors = {id(leaf): leaf for leaf in tree_iter(state) if isinstance(leaf, torch.Tensor)}
    made: dict[int, torch.Tensor] = {}
    for key, full in zip(tensors, _full_tensors(tensors.values()), strict=True):
        if kept:
            made[key] = full.cpu() if cpu else full
        del full  # before the next one is gathered
    if not kept:
        return type(state)()
    full_state: Tree = tree_map(lambda leaf: made.get(id(leaf), leaf), state)
    return full_state


def _full_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the full tensor of each tensor, on every rank of its mesh."""
    for tensor in tensors:
        full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield full.detach()


def _is_first(state: Mapping[str, Any]) -> bool:
    """Whether this is the first of the ranks that hold any of the state. FSDP's mesh may have more than the model's."""
    meshes = {tensor.device_mesh for tensor in state.values() if isinstance(tensor, DTensor)}
    ranks = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    return not dist.is_initialized() or dist.get_rank() == min(ranks, default=0)


def _pieces(state: Mapping[str, Any]) -> list[Piece]:
    """Return what is to be written, without values. Wide dtypes come first, so that all are aligned."""
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"export: {name} is a {type(value).__name__}, and safetensors has tensors only\n"
                                  "  remedy: torch.save(convmesh.full_state_dict(model), path)")  # fmt: skip
        if not files.is_known(value.dtype):
            raise CheckpointError(f"export: {name} has dtype {value.dtype}, which safetensors does not know\n"
                                  "  remedy: torch.save(convmesh.full_state_dict(model), path)")  # fmt: skip
    empty = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in state.items()}
    pieces = [Piece(name, full_box(tuple(value.shape)), value) for name, value in empty.items()]
    return sorted(pieces, key=lambda piece: -piece.data.itemsize)
