"""Lines on labels, tables, statistics and matrices, as in metrics and losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def region_means(x: Tensor) -> Tensor:
    """The mean of every labelled region, in every channel."""
    labels = (x.detach()[:, :1] * 2).long().clamp(0, 4).flatten(2).expand(-1, x.shape[1], -1)
    return x.new_zeros(x.shape[0], x.shape[1], 5).scatter_reduce(2, labels, x.flatten(2), "mean", include_self=False)


def greatest_by_label(x: Tensor) -> Tensor:
    labels = x.detach().argmax(1).flatten()
    return x.new_full((8,), -3.0).scatter_reduce(0, labels, x[:, 0].flatten(), "amax")


def filled_rows(x: Tensor) -> Tensor:
    return x.index_fill(2, torch.tensor([0, 3, -1]), 2.0)


def single_places(x: Tensor) -> Tensor:
    places = torch.tensor([0, 30, -5])
    return x.put(places, x.take(places + 1) * 2, accumulate=True)


def written_diagonal(x: Tensor) -> Tensor:
    y = x.clone()
    y.diagonal(1, 2, 3).mul_(3)
    y[0, 0].diagonal().fill_(2.0)
    return y


def determinants(x: Tensor) -> tuple[Tensor, Tensor]:
    """autograd has to know in which order the matrices are in memory."""
    return torch.linalg.det(x[:, :, :4, :4]), torch.linalg.det(x[:, :, 1:5, :4].contiguous())


def solutions(x: Tensor) -> Tensor:
    return torch.linalg.solve(x[..., :4, :4] + 5 * torch.eye(4, dtype=x.dtype), x[..., :4, 4:6])


def positions(x: Tensor) -> Tensor:
    """Learned positions, whose numbers the model makes itself; the table is a row of every channel."""
    table = x.mean((0, 3)).t()
    return x + F.embedding(torch.arange(x.shape[3]), table).t()[None, :, None]


def shifted_bits(x: Tensor) -> Tensor:
    whole = (x.detach() * 9).long()
    return (whole << 2) ^ (whole >> whole.clamp(0, 3))


def written_at_once(x: Tensor) -> Tensor:
    """Functions that torch has in place, too."""
    y = x.clone()
    return y.cumsum_(2).tril_(1).renorm_(2, 1, 1.5)
