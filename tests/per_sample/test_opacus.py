"""Ghost clipping of Opacus, with convmesh's norms, against Opacus' own clipping of gradients that it makes."""

from __future__ import annotations

import doctest
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import convmesh
from convmesh.opacus import PerSampleLoss
from convmesh.per_sample import layer_norms
from tests.batching.oracle import assert_same
from tests.compare import assert_close
from tests.harness import Pool

KINDS = [(nn.Conv1d, nn.ConvTranspose1d), (nn.Conv2d, nn.ConvTranspose2d), (nn.Conv3d, nn.ConvTranspose3d)]
GEOMETRIES: list[dict[str, Any]] = [
    {"kernel_size": 3},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1, "groups": 2},
    {"kernel_size": 2, "dilation": 2, "padding": "same"},
    {"kernel_size": 3, "padding": "same", "padding_mode": "reflect", "bias": False},
    {"kernel_size": 3, "padding": 1, "padding_mode": "circular", "stride": 2},
    {"kernel_size": 3, "padding": "valid", "padding_mode": "replicate"},
]
TRANSPOSED: list[dict[str, Any]] = [
    {"kernel_size": 3},
    {"kernel_size": 2, "stride": 2, "bias": False},
    {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1, "groups": 2},
    {"kernel_size": 3, "stride": 2, "dilation": 3, "padding": 2, "output_padding": 2},
    {"kernel_size": 3, "dilation": 4, "padding": 2, "output_padding": 3},
    {"kernel_size": 1, "stride": 3, "output_padding": 2},
]


@pytest.fixture(autouse=True)
def _said_by_opacus() -> Iterator[None]:
    """That noise is not from a secure generator, and that hooks also fire for inputs without a gradient."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def one_by_one(layer: nn.Module, x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    named = dict(layer.named_parameters())
    samples = [
        torch.autograd.grad(layer(x[i : i + 1]), list(named.values()), gradient[i : i + 1]) for i in range(len(x))
    ]
    return {
        name: torch.stack([each.norm() for each in own])
        for name, own in zip(named, zip(*samples, strict=True), strict=True)
    }


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_norms_of_every_kind_of_convolution(ndim: int, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for options in TRANSPOSED if transposed else GEOMETRIES:
        layer = KINDS[ndim - 1][transposed](4, 6, **options).double()
        x = torch.randn(3, 4, *(5, 4, 4)[:ndim]).double()
        gradient = torch.randn_like(layer(x))
        expected = one_by_one(layer, x, gradient)
        ghost = GradSampleModuleFastGradientClipping(layer, loss_reduction="sum")
        for works in ((0, 1, 1), (1, 0, 1)):  # by gram matrices, a sample at a time; by the gradient
            monkeypatch.setattr(layer_norms, "_work", lambda *_, works=works: works)
            monkeypatch.setattr(layer_norms, "WORKSPACE", 8 if works[0] == 0 else 2**20)
            ghost(x).backward(gradient)
            assert_same({name: each._norm_sample for name, each in layer.named_parameters()}, expected)
        monkeypatch.undo()


class Segmenter(nn.Module):
    """A small U-Net without concatenation, with something of everything; down to one pixel and many channels."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        widths = [2, 6, 12, 48]
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.GroupNorm(2, b) for b in widths[1:])
        self.middle = nn.Conv2d(48, 48, 3, padding="same", groups=2)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairwise([6, *widths[1:]]))
        self.scale = nn.InstanceNorm2d(6, affine=True)
        self.head = nn.Conv2d(6, classes, 3, padding=1, padding_mode="replicate")

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.down, self.norms, strict=True):
            x = F.relu(norm(layer(x)))
        x = self.middle(x)
        for layer in reversed(self.up):
            x = F.relu(layer(x))
        return self.head(self.scale(x))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Segmenter(12), nn.Linear(12, 5)
        self.words = nn.Embedding(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        words = self.words((x[:, 0, :3, 0] > 0).long()).sum(1)
        return self.head(self.body(x).mean((2, 3)).tanh() + words)


def data(model: type[nn.Module], count: int = 7) -> TensorDataset:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(count, 2, 16, 8, dtype=torch.float64, generator=random)
    shape, classes = ((count, 16, 8), 3) if model is Segmenter else ((count,), 3)
    return TensorDataset(x, torch.randint(classes, shape, generator=random))


def trained(
    kind: type[nn.Module], mode: str, place: Callable[[nn.Module], nn.Module], shard: Callable[..., tuple[Any, Any]],
    *, batch: int = 3, poisson: bool = False, noise_seed: int = 3,
) -> dict[str, Tensor]:  # fmt: skip
    """Three steps of PrivacyEngine."""
    torch.manual_seed(0)
    module = place(kind().double())
    torch.manual_seed(5)
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.5)
    criterion: Any = PerSampleLoss(nn.CrossEntropyLoss())
    made = PrivacyEngine().make_private(
        module=module, optimizer=optimizer, criterion=criterion, data_loader=DataLoader(data(kind), batch_size=batch),
        noise_multiplier=0.5, max_grad_norm=0.5, grad_sample_mode=mode, poisson_sampling=poisson,
        noise_generator=torch.Generator().manual_seed(noise_seed),
    )  # fmt: skip
    private, optimizer, criterion, loader = made if mode == "ghost" else (made[0], made[1], criterion, made[2])
    for x, y in loader:
        x, y = shard(x, y)
        optimizer.zero_grad()
        criterion(private(x), y).backward()
        optimizer.step()
    return {
        name: each.full_tensor() if isinstance(each, DTensor) else each.detach()
        for name, each in module.named_parameters()
    }


def as_it_is(*values: Any) -> Any:
    return values if len(values) > 1 else values[0]


class Small(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 16, 5, stride=3), nn.Flatten(), nn.Linear(64, 3))


@pytest.mark.parametrize("kind", [Classifier, Segmenter])
def test_training_equals_opacus_own_clipping(kind: type[nn.Module]) -> None:
    """By functorch: its hooks take every padding for zeros."""
    expected = trained(kind, "functorch", as_it_is, as_it_is)
    assert_same(trained(kind, "ghost", as_it_is, as_it_is), expected)


def test_batches_drawn_one_sample_at_a_time_of_which_some_are_empty() -> None:
    sizes: list[int] = []

    def noted(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        sizes.append(len(x))
        return x, y

    expected = trained(Small, "hooks", as_it_is, noted, batch=1, poisson=True)
    assert min(sizes) == 0
    assert max(sizes) > 1
    assert_same(trained(Small, "ghost", as_it_is, as_it_is, batch=1, poisson=True), expected)


@pytest.mark.slow  # MONAI is no part of the core tests
def test_a_loss_that_takes_all_samples_together_is_taken_apart() -> None:
    from monai.losses import DiceLoss

    dice = DiceLoss(to_onehot_y=True, softmax=True, batch=True)
    output, target = torch.randn(3, 4, 5, 5), torch.randint(4, (3, 1, 5, 5))
    expected = torch.stack([dice(output[i : i + 1], target[i : i + 1]) for i in range(3)])
    assert_same(PerSampleLoss(dice, "none")(output, target), expected)
    assert_same(PerSampleLoss(dice, "sum")(output, target), expected.sum())
    assert PerSampleLoss(dice, "none")(output[:0], target[:0]).shape == (0,)


class Scaled(nn.Conv2d):
    """A layer that Opacus knows nothing of."""


def refuse_on_ranks(mesh: DeviceMesh) -> None:
    layer = convmesh.distribute(nn.Sequential(nn.Conv2d(2, 2, 1), Scaled(2, 2, 1)), mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ghost = GradSampleModuleFastGradientClipping(layer)
        output = ghost(convmesh.shard(torch.randn(2, 2, 4, 4), mesh, h=2))
        with pytest.raises(convmesh.ShardingError, match="Scaled gradients of a rank's own part"):
            output.sum().backward()


def test_the_example_of_the_loss() -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(PerSampleLoss, "", globs={"torch": torch, "nn": nn})
    assert doctest.DocTestRunner().run(test) == (0, 3)


def train_on_ranks(mesh: DeviceMesh, kind: type[nn.Module]) -> None:
    """Every rank draws other noise: the first one's counts."""
    dims = {"data": 0, "h": 2} if mesh.ndim == 2 else {"h": 2}
    of_targets = {"data": 0, "h": 1} if mesh.ndim == 2 else {"h": 1}
    of_labels = {"data": 0} if mesh.ndim == 2 else {}

    def shard(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return convmesh.shard(x, mesh, **dims), convmesh.shard(y, mesh, **(of_targets if y.ndim > 1 else of_labels))

    # On the larger mesh two samples at a time, for the smallest layers.
    at_once = mock.patch.object(layer_norms, "WORKSPACE", 2000 if mesh.ndim == 2 else layer_norms.WORKSPACE)
    with warnings.catch_warnings(), at_once:
        warnings.simplefilter("ignore")
        expected = trained(kind, "ghost", as_it_is, as_it_is)
        actual = trained(
            kind, "ghost", lambda module: convmesh.distribute(module, mesh), shard, noise_seed=3 + mesh.get_rank()
        )
    for name, value in actual.items():
        assert_close(value, expected[name])


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_samples_sharded_over_space(pool: Pool, mesh: tuple[int, ...]) -> None:
    pool.run_cases(train_on_ranks, [Classifier, Segmenter], mesh=mesh, names=("data", "h")[-len(mesh) :])


def test_layers_whose_norms_would_be_of_a_part_are_refused(pool: Pool) -> None:
    pool.run(refuse_on_ranks, mesh=(2,), names=("h",))
