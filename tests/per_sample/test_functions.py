"""Per-sample gradients, norms and clipping against one backward per sample."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convmesh
from convmesh import per_sample
from convmesh.per_sample import layer_norms
from tests.batching.oracle import assert_same
from tests.per_sample.models import MODELS, B, Twice, images, network


@pytest.fixture(params=MODELS)
def problem(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor, Tensor]:
    make, inputs = MODELS[request.param]
    model = make().double()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
    frozen = dict(model.named_parameters()).get("0.bias")
    if frozen is not None:
        frozen.requires_grad_(False)
    return model, inputs(), torch.randint(0, 10, (B,))


def one_by_one(
    model: nn.Module, x: Tensor, y: Tensor, loss: Callable[..., Tensor] = F.cross_entropy
) -> dict[str, Tensor]:
    names, parameters = zip(*((name, p) for name, p in model.named_parameters() if p.requires_grad), strict=True)
    samples = [torch.autograd.grad(loss(model(x[i : i + 1]), y[i : i + 1]), parameters) for i in range(len(x))]
    return {name: torch.stack(each) for name, each in zip(names, zip(*samples, strict=True), strict=True)}


def norms_of(gradients: dict[str, Tensor]) -> Tensor:
    return torch.stack([each.flatten(1).square().sum(1) for each in gradients.values()]).sum(0).sqrt()


def test_gradients(problem: tuple[nn.Module, Tensor, Tensor]) -> None:
    want = one_by_one(*problem)
    model, x, y = problem
    assert_same(per_sample.per_sample_gradients(model, F.cross_entropy, x, y, randomness="different"), want)
    in_chunks = per_sample.per_sample_gradients(model, F.cross_entropy, x, y, chunk_size=2, randomness="different")
    assert_same(in_chunks, want)


@pytest.mark.parametrize("limit", [1, layer_norms.WORKSPACE])
def test_norms(problem: tuple[nn.Module, Tensor, Tensor], limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_norms, "WORKSPACE", limit)
    model, x, y = problem
    want = norms_of(one_by_one(*problem))
    assert_same(per_sample.per_sample_norms(model.eval(), F.cross_entropy, x, y), want)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_clipped_sum(problem: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, y = problem
    gradients = one_by_one(*problem)
    norms = norms_of(gradients)
    bound = norms.median().item()
    scales = (bound / norms).clamp(max=1)
    got = per_sample.clipped_gradient(model.eval(), F.cross_entropy, x, y, max_norm=bound)
    assert_same(got, {name: torch.einsum("b,b...->...", scales, each) for name, each in gradients.items()})


@pytest.mark.parametrize("outputs", [2, 64], ids=["gradient", "gram"])
def test_norm_of_a_convolution_by_either_way(outputs: int) -> None:
    model = nn.Sequential(nn.Conv2d(16, outputs, 3, groups=2, stride=2, dilation=2), nn.Flatten(), nn.LazyLinear(10))
    x, y = torch.randn(B, 16, 9, 9).double(), torch.randint(0, 10, (B,))
    model.double()(x)
    assert_same(per_sample.per_sample_norms(model, F.cross_entropy, x, y), norms_of(one_by_one(model, x, y)))


class Conditioned(nn.Module):
    """Several inputs, of which one may be missing, and several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.words, self.out = nn.Conv2d(3, 4, 3), nn.Embedding(5, 4), nn.Conv2d(4, 2, 3)

    def forward(self, x: Tensor, word: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> dict[str, Tensor]:
        y = self.conv(x) + self.words(word)[:, :, None, None] * scale
        return {"fine": y, "coarse": self.out(y if mask is None else y * mask)}


def squared(output: dict[str, Tensor], targets: tuple[Tensor, float]) -> Tensor:
    return (output["coarse"] - targets[0]).square().mean() + output["fine"].square().mean() * targets[1]


@pytest.mark.parametrize("by_name", [False, True])
def test_several_inputs_and_outputs(by_name: bool) -> None:
    model, x, word = Conditioned().double(), images(), torch.randint(0, 5, (B,))
    mask, target = torch.rand(B, 1, 8, 8).double(), torch.randn(B, 2, 6, 6).double()
    inputs = {"x": x, "word": word, "mask": mask, "scale": 0.5} if by_name else (x, word, 0.5, mask)
    parameters = dict(model.named_parameters())
    samples = [
        torch.autograd.grad(
            squared(model(x[i : i + 1], word[i : i + 1], 0.5, mask[i : i + 1]), (target[i : i + 1], 0.1)),
            list(parameters.values()),
        )
        for i in range(B)
    ]
    want = {name: torch.stack(each) for name, each in zip(parameters, zip(*samples, strict=True), strict=True)}
    norms = norms_of(want)
    assert_same(per_sample.per_sample_gradients(model, squared, inputs, (target, 0.1)), want)
    assert_same(per_sample.per_sample_norms(model, squared, inputs, (target, 0.1)), norms)
    got = per_sample.clipped_gradient(model, squared, inputs, (target, 0.1), max_norm=norms.min().item())
    scales = norms.min() / norms
    assert_same(got, {name: torch.einsum("b,b...->...", scales, each) for name, each in want.items()})


def test_norms_and_gradients_to_clip_are_of_one_forward_pass() -> None:
    """Dropout draws in every pass."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(256, 10)).double()
    x, y = images()[:1], torch.randint(0, 10, (1,))
    for _ in range(5):
        got = per_sample.clipped_gradient(model, F.cross_entropy, x, y, max_norm=0.1)
        assert_same(
            norms_of({name: each.unsqueeze(0) for name, each in got.items()}), torch.tensor([0.1], dtype=torch.float64)
        )


def test_what_a_layer_read_must_not_be_overwritten() -> None:
    class Overwriting(Twice):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            y = self.conv(x)
            x.add_(1)
            return (y + x).flatten(1)

    with pytest.raises(RuntimeError, match="overwritten in place"):
        per_sample.per_sample_norms(Overwriting().double(), F.cross_entropy, images(), torch.randint(0, 10, (B,)))


def written(output: Tensor, y: Tensor) -> Tensor:
    """A loss that writes what it is told into zeros of its own, as those of segmentation do; vmap cannot."""
    target = torch.zeros(output.shape, dtype=output.dtype).scatter_(1, y.unsqueeze(1), 1)
    return (target - output.softmax(1)).square().sum()


@pytest.mark.parametrize("randomness", ["error", "different"])
def test_a_loss_that_torch_cannot_map(randomness: str) -> None:
    model, x, y = network().double().eval(), images(), torch.randint(0, 10, (B,))
    model.get_parameter("0.bias").requires_grad_(False)  # its gradient is zero, up to rounding: a norm follows
    want = one_by_one(model, x, y, written)
    norms = norms_of(want)
    scales = (norms.median() / norms).clamp(max=1)
    assert_same(per_sample.per_sample_gradients(model, written, x, y, randomness=randomness), want)
    assert_same(per_sample.per_sample_norms(model, written, x, y), norms)
    got = per_sample.clipped_gradient(model, written, x, y, max_norm=norms.median().item())
    assert_same(got, {name: torch.einsum("b,b...->...", scales, each) for name, each in want.items()})


def dice(output: Tensor, y: Tensor) -> Tensor:
    """Of targets that torch cannot map, and says so in other words where convmesh has a rule for `one_hot`."""
    p, target = output.softmax(1), F.one_hot(y, 3).movedim(-1, 1).to(output.dtype)
    return 1 - 2 * (p * target).sum() / (p.sum() + target.sum())


@pytest.mark.parametrize("enabled", [False, True])
def test_a_dice_loss(enabled: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1)).double()
    x, y = images(), torch.randint(0, 3, (B, 10, 10))
    want = one_by_one(model, x, y, dice)
    with convmesh.enable() if enabled else nullcontext():
        assert_same(per_sample.per_sample_gradients(model, dice, x, y), want)
        assert_same(per_sample.per_sample_norms(model, dice, x, y), norms_of(want))


@pytest.mark.slow  # MONAI is no part of the core tests
def test_targets_of_one_hot() -> None:
    from monai.losses import DiceCELoss, LogHausdorffDTLoss

    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1)).double()
    x, y = images(), torch.randint(0, 3, (B, 1, 10, 10))
    for loss in (DiceCELoss(to_onehot_y=True, softmax=True), LogHausdorffDTLoss(to_onehot_y=True, softmax=True)):
        want = one_by_one(model, x, y, loss)
        assert_same(per_sample.per_sample_gradients(model, loss, x, y), want)
        assert_same(per_sample.per_sample_gradients(model, loss, x, y, chunk_size=2), want)
        assert_same(per_sample.per_sample_norms(model, loss, x, y), norms_of(want))


def test_random_numbers_are_never_drawn_unasked() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(256, 10)).double()
    with pytest.raises(RuntimeError, match="random"):
        per_sample.per_sample_gradients(model, written, images(), torch.randint(0, 10, (B,)))


def test_a_batch_of_none() -> None:
    model, x, y = network().double().eval(), images()[:0], torch.randint(0, 10, (0,))
    gradients = per_sample.per_sample_gradients(model, F.cross_entropy, x, y)
    assert {name: tuple(each.shape) for name, each in gradients.items()} == {
        name: (0, *parameter.shape) for name, parameter in model.named_parameters()
    }
    assert per_sample.per_sample_norms(model, F.cross_entropy, x, y).shape == (0,)
    clipped = per_sample.clipped_gradient(model, F.cross_entropy, x, y, max_norm=1.0)
    assert all(bool((each == 0).all()) for each in clipped.values())


@pytest.mark.parametrize("call", [per_sample.per_sample_gradients, per_sample.per_sample_norms])
def test_batch_norm_is_refused(call: Callable[..., object]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(256, 10)).double()
    with pytest.raises(ValueError, match=r"`1` is a batch norm .* no sample has a gradient of its own"):
        call(model, F.cross_entropy, images(), torch.randint(0, 10, (B,)))
    call(model.eval(), F.cross_entropy, images(), torch.randint(0, 10, (B,)))


def test_bad_input() -> None:
    model, x, y = network().double(), images(), torch.randint(0, 10, (B,))
    tracking = nn.InstanceNorm2d(3, affine=True, track_running_stats=True)
    with pytest.raises(ValueError, match="tracks running statistics"):
        per_sample.per_sample_gradients(tracking, F.mse_loss, x, x)
    with pytest.raises(ValueError, match="agree in their first size"):
        per_sample.per_sample_gradients(model, F.cross_entropy, x, y[:3])
    with pytest.raises(ValueError, match="`batch` is empty"):
        per_sample.per_sample_gradients(model, F.cross_entropy)
    with pytest.raises(ValueError, match="one number"):
        per_sample.per_sample_gradients(nn.Conv2d(3, 4, 3).double(), lambda output: output, x)
    with pytest.raises(ValueError, match=r"`max_norm` \(=0\) must be positive"):
        per_sample.clipped_gradient(model, F.cross_entropy, x, y, max_norm=0)
    with pytest.raises(ValueError, match="no trainable parameter"):
        per_sample.per_sample_gradients(nn.Flatten(), F.cross_entropy, x, y)
