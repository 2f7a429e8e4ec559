"""One training step, sample by sample: a model, its loss and a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.utils._pytree import tree_map_only

from ..batching.machines import agreed_on
from . import samples
from .batch_layout import BatchLayout
from .layer_calls import Use, run_by_layer
from .layer_gradients import gradients_of, scaled_sum
from .layer_norms import WORKSPACE, squared_norms_of, squares_of, sum_of
from .samples import UnmappableError, batch_size

Loss = Callable[..., Tensor]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Step:
    """A model, its loss and a batch, in the form in which this rank computes with them."""

    model: nn.Module
    loss_fn: Loss
    batch: tuple[Any, ...]
    trainable: Tensors
    fixed: Tensors  # all other parameters and buffers
    layout: BatchLayout | None

    @classmethod
    def of(cls, model: nn.Module, loss_fn: Loss, batch: tuple[Any, ...]) -> Step:
        samples.check_independent(model)
        batch_size(batch)
        trainable, fixed = samples.parameters_of(model)
        layout = BatchLayout.of(samples.tensors_of(batch))
        if layout is not None and layout.samples_are_local:
            trainable, fixed, batch = (
                layout.full_tensors(trainable),
                layout.full_tensors(fixed),
                samples.local_parts(batch),
            )
        elif layout is not None:
            trainable = {name: layout.replicated(value) for name, value in trainable.items()}
            fixed = {name: layout.replicated(value) for name, value in fixed.items()}
        return cls(model, loss_fn, batch, trainable, fixed, layout)

    @property
    def own_samples(self) -> BatchLayout | None:
        """The layout of the batch if this rank computes its own samples with plain tensors, else None."""
        return self.layout if self.layout is not None and self.layout.samples_are_local else None

    @property
    def has_plain_tensors(self) -> bool:
        return self.layout is None or self.own_samples is not None

    def same_algorithms(self) -> AbstractContextManager[None]:
        """Context manager in which ranks with the same samples compute the same bits."""
        return nullcontext() if self.layout is None else agreed_on(self.layout.mesh, self.layout.placements)

    def output(self, trainable: Tensors, inputs: Any) -> Any:
        kwargs = inputs if isinstance(inputs, dict) else {}
        args = inputs if isinstance(inputs, tuple) else () if kwargs else (inputs,)
        return functional_call(self.model, {**trainable, **self.fixed}, args, kwargs)

    def losses(self, trainable: Tensors) -> Tensor:
        """[B]"""
        return samples.losses_of(self.loss_fn, self.output(trainable, self.batch[0]), *self.batch[1:])

    def by_layer(self, trainable: Tensors, keep_graph: bool = False) -> tuple[Tensor, dict[str, list[Use]]] | None:
        size = batch_size(self.batch)
        return run_by_layer(self.model, trainable, partial(self.losses, trainable), size, keep_graph) if size else None

    def parts(self, at_once: int) -> Iterator[Step]:
        for start in range(0, batch_size(self.batch), at_once):
            own = itemgetter(slice(start, start + at_once))
            yield replace(self, batch=tree_map_only(Tensor, own, self.batch))

    def gradients(self, chunk_size: int | None, randomness: str) -> Tensors:
        size = batch_size(self.batch)
        if size == 0:
            return {name: value.new_zeros((0, *value.shape)) for name, value in self.trainable.items()}
        # torch's vmap rules for losses and norms write in place, which DTensors do not support.
        if self.has_plain_tensors:
            with suppress(UnmappableError):
                return self.gradients_by(samples.map_with_vmap, chunk_size=chunk_size, randomness=randomness)
        parts = [each.gradients_by_layer() for each in self.parts(chunk_size or size)]
        return {name: torch.cat([part[name] for part in parts]) for name in self.trainable}

    def gradients_by(self, map_samples: Callable[..., Any], **options: Any) -> Tensors:
        def loss(parameters: Tensors, *sample: Any) -> Tensor:
            inputs, *others = tree_map_only(Tensor, lambda each: each.unsqueeze(0), sample)
            return samples.single_number(self.loss_fn(self.output(parameters, inputs), *others))

        gradients: Tensors = map_samples(partial(grad(loss), self.trainable), *self.batch, **options)
        return gradients

    def gradients_by_layer(self) -> Tensors:
        run = self.by_layer(self.trainable)
        if run is None:
            return self.gradients_by(samples.map_with_loop)
        size, gradients = batch_size(self.batch), {}
        for name, value in self.trainable.items():
            each = [gradients_of(*use) for use in run[1][name]]
            gradients[name] = sum_of(each) if each else value.new_zeros(size, *value.shape)
        return gradients

    def norms(self, run: tuple[Tensor, dict[str, list[Use]]] | None) -> Tensor:
        """[B]"""
        if run is not None:
            squares = [squared_norms_of(uses) for uses in run[1].values() if uses]
            return sum_of(squares).sqrt() if squares else run[0].detach() * 0
        at_once = max(1, WORKSPACE // sum(value.nbytes for value in self.trainable.values()))
        parts = [part.gradients(None, "error").values() for part in self.parts(at_once)]
        norms = [sum_of([squares_of(each) for each in part]).sqrt() for part in parts]
        return torch.cat(norms) if norms else next(iter(self.trainable.values())).new_zeros(0)

    def clipped(self, max_norm: float) -> Tensors:
        """Return the clipped sum, from one forward pass: in another one, dropout might differ.

        The inputs and output gradients of the layers also give the sum. DTensors and embeddings need another backward
        pass.
        """
        if batch_size(self.batch) == 0:
            return {name: torch.zeros_like(value) for name, value in self.trainable.items()}
        leaves = {name: value.detach().requires_grad_() for name, value in self.trainable.items()}
        sums_by_layer = self.has_plain_tensors and not any(
            isinstance(each, nn.Embedding) for each in self.model.modules()
        )
        run = self.by_layer(leaves, keep_graph=not sums_by_layer)
        norms = self.norms(run)
        scales = (max_norm / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1)
        if run is not None and sums_by_layer:
            return {name: scaled_sum(run[1][name], scales, value) for name, value in self.trainable.items()}
        with torch.enable_grad():
            scaled = ((self.losses(leaves) if run is None else run[0]) * scales).sum()
        gradients = torch.autograd.grad(scaled, list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, gradients, strict=True))
