"""What each layer of a network sends in a training step, observed by intercepting the collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .. import _torch
from ..comm import Traffic, count_traffic
from .layers import CONVOLUTIONS, TRANSPOSED, ConvolutionHalos, convolution_halos
from .settings import Shape

LOSS, WEIGHTS = "loss", "weight gradients"


@dataclass
class Layer:
    """The bytes that this rank sends for one layer in a step: for halos, for sums, and otherwise."""

    name: str
    kind: str
    halo: int = 0
    sums: int = 0
    other: int = 0
    sides: ConvolutionHalos | None = None


def _kind(module: nn.Module) -> str:
    """For example `Conv2d 3x3, stride 2`; the class name for other layers."""
    if not isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)):
        return type(module).__name__
    kernel, stride = "x".join(map(str, module.kernel_size)), module.stride[0]
    return f"{type(module).__name__} {kernel}{f', stride {stride}' if stride > 1 else ''}"


class CollectiveRecorder(_torch.TorchDispatchMode):
    """Attributes the bytes of every collective to the layer that is running.

    `exchanged` tells which collectives are halo exchanges: values to be summed may use an all-to-all as well.
    """

    def __init__(self, exchanged: Traffic) -> None:
        super().__init__()
        self.exchanged, self.exchanges = exchanged, 0
        self.layers: dict[str, Layer] = {}
        self.current_layer = self.layer(LOSS, "")

    def layer(self, name: str, kind: str) -> Layer:
        return self.layers.setdefault(name, Layer(name, kind))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor's own collectives arrive here afterwards
        namespace, name = func._schema.name.split("::")
        if namespace == "_c10d_functional" and not name.startswith(("wait", "_wrap")):
            size = args[0].numel() * args[0].element_size()
            use = self._use(name)
            setattr(self.current_layer, use, getattr(self.current_layer, use) + size)
        return func(*args, **(kwargs or {}))

    def _use(self, collective: str) -> str:
        """The kind of this collective: "halo", "sums" or "other"."""
        before, self.exchanges = self.exchanges, self.exchanged.exchanges
        if self.exchanges > before:
            return "halo"
        return "sums" if collective.startswith(("all_reduce", "all_to_all")) else "other"


class _LayerTracker:
    """Tracks which layer is running: in forward by module hooks, in backward by hooks of the autograd graph's nodes.

    Modules have backward hooks too, but these do not allow an in-place activation after the module.
    """

    def __init__(self, recorder: CollectiveRecorder, mesh: Shape):
        self.recorder, self.mesh = recorder, mesh
        self.known: set[Any] = set()

    def attach(self, name: str, module: nn.Module) -> list[Any]:
        """Hook a module so that it becomes the running layer, and return the handles of the hooks."""
        layer = self.recorder.layer(name, _kind(module))

        def enter(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            self.recorder.current_layer = layer

        def leave(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            x = inputs[0]
            layer.sides = convolution_halos(module, x.shape, output.shape, x.requires_grad, self.mesh)
            self.assign(output.grad_fn, layer, stop=x.grad_fn)
            self.recorder.current_layer = self.recorder.layer(LOSS, "")

        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]

    def assign(self, start: Any, layer: Layer, stop: Any = None) -> None:
        """Assign the nodes from `start` back to `stop`, or to nodes assigned before, to `layer`."""
        to_visit = [start]
        while to_visit:
            node = to_visit.pop()
            if node is None or node is stop or node in self.known:
                continue
            self.known.add(node)
            collects = hasattr(node, "variable")  # an AccumulateGrad node
            self._hook(node, self.recorder.layer(WEIGHTS, "") if collects else layer)
            to_visit += [next_node for next_node, _ in node.next_functions]

    def _hook(self, node: Any, layer: Layer) -> None:
        def set_current(gradients: object) -> None:
            self.recorder.current_layer = layer

        node.register_prehook(set_current)


def watch_step(model: nn.Module, forward: Callable[[], torch.Tensor], mesh: Shape) -> list[Layer]:
    """Run one forward and backward pass; return its layers in order, then the loss and the weight gradients."""
    with count_traffic() as exchanged:
        return _recorded(CollectiveRecorder(exchanged), model, forward, mesh)


def _recorded(
    recorder: CollectiveRecorder, model: nn.Module, forward: Callable[[], torch.Tensor], mesh: Shape
) -> list[Layer]:
    tracker = _LayerTracker(recorder, mesh)
    leaves = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    handles = [handle for name, module in leaves for handle in tracker.attach(name, module)]
    try:
        with recorder:
            loss = forward()
            tracker.assign(loss.grad_fn, recorder.layer(LOSS, ""))
            loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    outside = [recorder.layers.pop(name) for name in (LOSS, WEIGHTS) if name in recorder.layers]
    return [*recorder.layers.values(), *outside]
