"""Process-wide state that every simulated rank needs for itself: random state, warnings, globals of this library."""

from __future__ import annotations

import random
import sys
import warnings
from copy import copy
from typing import Any

import numpy
import torch

from .. import _torch, api
from ..batching import choice, machines
from ..comm import agreed_facts, traffic
from ..comm.failures import first_failure, interception
from ..ops.shape import merged_dims
from ..training import idle_optimizers
from ..training.checkpoint import pending

# (owner, attribute). Ranks begin with copies of the caller's values.
PER_RANK: tuple[tuple[Any, str], ...] = (
    *_torch.OF_A_PROCESS,
    (warnings, "filters"),
    (warnings, "showwarning"),
    (warnings, "_showwarnmsg_impl"),  # what `catch_warnings(record=True)` sets
    (sys, "stdout"),
    (sys, "stderr"),
    (api, "_told"),
    (agreed_facts, "_answers"),
    (agreed_facts, "_occasion"),
    (traffic, "_counters"),
    (first_failure, "_mine"),
    (interception, "_observers"),
    (choice, "_settings"),
    (choice, "listeners"),
    (machines, "_agreed_for_plain"),
    (merged_dims, "_remembered"),
    (idle_optimizers, "_distributed"),
    (pending, "_last"),
)


class ProcessState:
    """The values of a rank while it is suspended."""

    def __init__(self) -> None:
        """Copy the current values."""
        self._values = [getattr(owner, name) for owner, name in PER_RANK]
        self._random = torch.get_rng_state(), random.getstate(), numpy.random.get_state(legacy=False)
        self._dtype = torch.get_default_dtype()

    def forked(self) -> ProcessState:
        """Return the values that a process forked now would have."""
        other = copy(self)
        other._values = [copy(value) if isinstance(value, list | dict) else value for value in self._values]
        return other

    def restore(self) -> None:
        for (owner, name), value in zip(PER_RANK, self._values, strict=True):
            setattr(owner, name, value)
        torch.set_rng_state(self._random[0])
        random.setstate(self._random[1])
        numpy.random.set_state(self._random[2])
        torch.set_default_dtype(self._dtype)
