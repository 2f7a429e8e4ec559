"""Results of operators on one device, without values: on torch's fake tensors."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from .names import Operator
from .symbols import has_symbols_within, known
from .tensors import spec_of
from .tracing import no_modes

_log = logging.getLogger("torch._subclasses.fake_tensor")


def on_one_device(operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the operator's results for arguments of these sizes and strides, as fake tensors.

    None if they depend on values, or the operator has no fake kernel.
    """
    said_before = _log.disabled
    _log.disabled = True  # torch logs errors that are expected here
    try:
        return checked_on_one_device(operator, args, kwargs)
    except Exception:  # of many kinds, if there is no fake kernel; nothing is communicated here
        return None
    finally:
        _log.disabled = said_before


def checked_on_one_device(operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the results of an operator that has a fake kernel; mismatched arguments raise torch's own error."""
    mode = detect_fake_mode() if has_symbols_within((args, kwargs)) else None
    with no_modes(), mode or FakeTensorMode():
        models, options = tree_map(_model, (args, dict(kwargs)))
        return operator(*models, **options)


def _model(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return None
    if not isinstance(value, torch.Tensor):
        return known(value)
    meta: Any = spec_of(value).tensor_meta if isinstance(value, DTensor) else None
    shape, stride = (value.shape, value.stride()) if meta is None else (meta.shape, meta.stride)
    return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)


def suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """Return the memory format that torch's kernels assume for a tensor."""
    format: torch.memory_format = suggest_memory_format(tensor)
    return format
