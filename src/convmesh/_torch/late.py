"""DTensors whose placement is settled late, and seeing the calls that make new tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _device

from .names import Operator, Spec

_local = DTensor.__dict__["_local_tensor"]
_spec = DTensor.__dict__["_spec"]


class LateDTensor(DTensor):
    """A DTensor that has sizes, but no local tensor and no placement before somebody asks for one of them."""

    @staticmethod
    def of(kind: Any, local: torch.Tensor, spec: Spec) -> Any:
        """One of the class `kind`, with the sizes of `spec`, on the device of `local`."""
        return DTensor.__new__(kind, local, spec, requires_grad=False)

    def settle(self) -> None:
        """Call `become`."""
        raise NotImplementedError

    def become(self, local: torch.Tensor, spec: Spec) -> None:
        """From now on this is a DTensor like others, for whoever refers to it."""
        self.__class__ = DTensor  # type: ignore[assignment]
        _local.__set__(self, local)
        _spec.__set__(self, spec)

    def _get_local(self) -> torch.Tensor:
        self.settle()
        local: torch.Tensor = _local.__get__(self)
        return local

    def _get_spec(self) -> Spec:
        self.settle()
        spec: Spec = _spec.__get__(self)
        return spec

    _local_tensor = property(_get_local, _local.__set__)
    _spec = property(_get_spec, _spec.__set__)


def is_view_operator(operator: Operator) -> bool:
    return bool(operator._schema._is_view_op())


class DeviceContext(_device.DeviceContext):
    """What `with torch.device(...)` is: it sees the calls that make tensors. Activation checkpointing enters it again
    when it computes anew, which it does for no other mode."""

    def __init__(self) -> None:
        super().__init__(torch.get_default_device())
        contexts = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, _device.DeviceContext)]
        # Whether the user has chosen a device, in a context that checkpointing does not see because of this one.
        self._chosen: bool = bool(contexts) and getattr(contexts[-1], "_chosen", True)
        # A mode below that says so is entered again with this one, when activations are computed anew.
        self._below = next(
            (mode for mode in _get_current_function_mode_stack() if hasattr(mode, "computes_anew")), None
        )

    @property
    def is_plain(self) -> bool:
        """Whether a call comes to nothing but itself."""
        return self._below is None and not self._chosen

    # As `with torch.device(...)` does it. Those of its class go below all other modes, and there is room for one there.
    __enter__ = TorchFunctionMode.__enter__
    __exit__ = TorchFunctionMode.__exit__

    def stock(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """What happens without this context."""
        with self._forgotten():
            if self._chosen:
                return super().__torch_function__(function, types, args, kwargs)
            return function(*args, **kwargs)

    def _forgotten(self) -> AbstractContextManager[object]:
        below = self._below
        return nullcontext() if below is None or below in _get_current_function_mode_stack() else below


def in_transform() -> bool:
    """Within vmap, grad and the like of torch.func."""
    return torch._C._functorch.maybe_current_level() is not None
