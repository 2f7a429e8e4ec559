"""Which module is at work: forward by hooks of all modules, backward by marks on the nodes of autograd's graph."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_iter

from .. import _torch
from ..comm import caller
from .trace import LOSS, OPTIMIZER, WEIGHTS, Phase

_MARK = "convmesh layer"


class Layers:
    """Context manager that knows which module is at work in this thread.

    Modules have backward hooks too, but these do not let an in-place activation follow. A node belongs to the innermost
    module whose outputs depend on it.
    """

    def __init__(self) -> None:
        self.roots: dict[nn.Module, str] = {}  # those that no other module has called, and what their names begin with
        self.optimizers: list[torch.optim.Optimizer] = []
        self._names: dict[nn.Module, str] = {}
        self._lines: dict[str, str | None] = {}
        self._stack: list[nn.Module] = []
        self._stepping = 0
        self.returned: Callable[[torch.Tensor, str], None] = lambda tensor, name: None

    def __enter__(self) -> Layers:
        if not _by_thread:
            _handles.extend((
                register_module_forward_pre_hook(_for_this_thread(Layers._enter)),
                register_module_forward_hook(_for_this_thread(Layers._leave), always_call=True),
                register_optimizer_step_pre_hook(_for_this_thread(Layers._begin_optimizer)),
                register_optimizer_step_post_hook(_for_this_thread(Layers._end_optimizer)),
            ))  # fmt: skip
        _by_thread[get_ident()] = self
        return self

    def __exit__(self, *error: object) -> None:
        del _by_thread[get_ident()]
        while not _by_thread and _handles:
            _handles.pop().remove()

    def at_work(self) -> tuple[str, Phase]:
        """Return the name of the module at work, or of what else is, and the phase."""
        if self._stepping:
            return OPTIMIZER, Phase.OPTIMIZER
        backward = _torch.in_backward()
        if self._stack:  # in a backward pass where activations are computed once more
            return self._names[self._stack[-1]], Phase.BACKWARD if backward else Phase.FORWARD
        if not backward:
            return LOSS, Phase.FORWARD
        node = _torch.running_node()
        if node is None or hasattr(node, "variable"):  # where a parameter collects its gradient, and afterwards
            return WEIGHTS, Phase.BACKWARD
        return node.metadata.get(_MARK, LOSS), Phase.BACKWARD

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if module not in self._names:
            self._name(module)
        self._stack.append(module)
        if self._names[module] not in self._lines:
            self._lines[self._names[module]] = caller()

    def line(self) -> str | None:
        """Return where in the user's code the operator at work is called, or in a backward pass its module."""
        name, phase = self.at_work()
        return caller() if phase is Phase.FORWARD else self._lines.get(name)

    def _name(self, root: nn.Module) -> None:
        """Name a module's parts. The first one called is the model; others, such as losses, have their class's name
        first."""
        prefix = "" if not self.roots else type(root).__name__
        self.roots[root] = prefix
        for name, module in root.named_modules():
            self._names.setdefault(module, ".".join(filter(None, (prefix, name))) or type(root).__name__)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if module not in self._stack:
            return
        while self._stack.pop() is not module:  # one that has raised has left nothing else behind
            pass
        name = self._names[module]
        outputs = [tensor for tensor in tree_iter(output) if isinstance(tensor, torch.Tensor)]
        for tensor in outputs:
            self.returned(tensor, name)
        waiting: list[Any] = [tensor.grad_fn for tensor in outputs]
        while waiting:
            node = waiting.pop()
            if node is None or hasattr(node, "variable") or _MARK in node.metadata:
                continue
            node.metadata[_MARK] = name
            waiting += [following for following, _ in node.next_functions]

    def _begin_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._stepping += 1
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)

    def _end_optimizer(self, *_: Any) -> None:
        self._stepping -= 1


# All threads share the hooks: torch goes through those of optimizers while simulated ranks take turns, and nobody may
# add any then.
_by_thread: dict[int, Layers] = {}
_handles: list[Any] = []


def _for_this_thread(method: Callable[..., None]) -> Callable[..., None]:
    def hook(*args: Any) -> None:
        layers = _by_thread.get(get_ident())
        if layers is not None:
            method(layers, *args)

    return hook
