"""Every way into a model, not only its call: gradients are summed, constants allowed, and values are one process's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributions import Normal

import convmesh
from tests.compare import assert_close
from tests.harness import Pool
from tests.training.small_net import assert_same_gradients

DIMS = {"data": 0, "h": 2}


class Gaussian:
    """The latents of one picture, as other packages have them."""

    def __init__(self, mean: torch.Tensor, scale: torch.Tensor):
        self.mean, self.scale = mean, scale

    def sample(self) -> torch.Tensor:
        return self.mean + self.scale * torch.randn(self.mean.shape, dtype=self.mean.dtype)


@dataclass
class Encoded:
    latents: Gaussian
    again: Normal


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(8, 3, 3, padding=1))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(F.interpolate(z, scale_factor=2.0))
        return made * torch.linspace(0.5, 1, made.shape[2], dtype=made.dtype).view(-1, 1)

    def twice(self, z: torch.Tensor) -> torch.Tensor:
        return self(z) + torch.ones(3, 1, 1, dtype=z.dtype) * self(-z)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.decoder = Decoder()

    def encode(self, x: torch.Tensor) -> Encoded:
        mean, scale = self.encoder(x).chunk(2, 1)
        return Encoded(Gaussian(mean, scale), Normal(mean, scale.exp()))

    def decode(self, z: torch.Tensor, *, shift: bool = True) -> torch.Tensor:
        shifts = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=z.dtype).view(1, 4, 1, 1)
        decoded: torch.Tensor = self.decoder(z + shifts if shift else z)
        return decoded

    def steps(self, z: torch.Tensor, value: int) -> Generator[torch.Tensor, float | None, int]:
        """With constants in every step, and numbers that its user sends."""
        for number in range(value):
            try:
                factor = yield self.decode(z) * torch.full((3, 1, 1), number + 1.0, dtype=z.dtype)
            except KeyError:
                factor = 3.0
            z = z * (factor or 1.0)
        return value

    @torch.no_grad()
    def generate(self, count: int) -> torch.Tensor:
        z = torch.randn(count, 4, 4, 3, dtype=torch.float64)
        return self.decode(z + 0 * next(self.encoder.parameters()).sum())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x).latents.mean)


Way = Callable[[Any, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]


def latents() -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * 4 * 5 * 3, dtype=torch.float64).reshape(4, 4, 5, 3).sin()


def picture() -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * 3 * 10 * 6, dtype=torch.float64).reshape(4, 3, 10, 6).cos()


def by_a_method(model: Any, place: Any) -> torch.Tensor:
    return model.decode(place(latents()), shift=True)


def by_sampling(model: Any, place: Any) -> torch.Tensor:
    torch.manual_seed(5)
    encoded = model.encode(place(picture()))
    return model.decode(encoded.latents.sample() + encoded.again.rsample())


def by_a_generator(model: Any, place: Any) -> torch.Tensor:
    steps = model.steps(place(latents()), value=3)
    made = [next(steps), steps.send(0.5), steps.throw(KeyError("stop"))]
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert end.value.value == 3
    for first in model.steps(place(latents()), value=2):
        made.append(first)
        break  # and it is closed
    return sum(made)


def by_a_submodule(model: Any, place: Any) -> torch.Tensor:
    return model.decoder(place(latents())) + model.decoder.twice(place(latents()))


def by_a_layer(model: Any, place: Any) -> torch.Tensor:
    return model.decoder.layers[0](place(latents()))


def converted(model: Any, place: Any) -> torch.Tensor:
    model.float().double()
    return by_a_method(model, place)


def unfrozen(model: Any, place: Any) -> torch.Tensor:
    model.requires_grad_(False)
    by_a_method(model, place)
    model.requires_grad_(True)
    return by_a_layer(model, place)


def generated_then_decoded(model: Any, place: Any) -> torch.Tensor:
    torch.manual_seed(3)
    return model.generate(2).sum() + by_a_method(model, place)


def functional(model: Any, place: Any) -> torch.Tensor:
    """With parameters that are none of the module's own, and with what was computed of them."""
    parameters = dict(model.named_parameters())
    moved = {name: parameter * 2 for name, parameter in parameters.items()}
    x = place(picture())
    return torch.func.functional_call(model, parameters, (x,)) + torch.func.functional_call(model, moved, (x,))


def functional_leaves(model: Any, place: Any) -> torch.Tensor:
    leaves = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    torch.func.functional_call(model, leaves, (place(picture()),)).square().mean().backward()
    for name, parameter in model.named_parameters():
        parameter.grad = leaves[name].grad
    return model(place(picture()))


def by_a_transform(model: Any, place: Any) -> torch.Tensor:
    """torch.func has parameters of its own around those of the model."""
    x = place(picture())

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        made: torch.Tensor = torch.func.functional_call(model, parameters, (x,))
        return made.square().mean()

    gradients = torch.func.grad(loss)({name: one.detach() for name, one in model.named_parameters()})
    return sum(one.square().sum() for one in gradients.values()) * by_a_method(model, place)


WAYS: dict[str, Way] = {
    way.__name__: way
    for way in (by_a_method, by_sampling, by_a_generator, by_a_submodule, by_a_layer, converted, unfrozen,
                generated_then_decoded, functional, functional_leaves, by_a_transform)
}  # fmt: skip


def build(mesh: DeviceMesh | None) -> Autoencoder:
    torch.manual_seed(0)
    model = Autoencoder().double()
    return model if mesh is None else convmesh.distribute(model, mesh)


def check(mesh: DeviceMesh, name: str) -> None:
    expected, model = build(None), build(mesh)
    wanted = WAYS[name](expected, lambda tensor: tensor)
    wanted.square().mean().backward()
    actual = WAYS[name](model, lambda tensor: convmesh.shard(tensor, mesh, **DIMS))
    assert_close(actual.detach().full_tensor(), wanted.detach())
    actual.square().mean().backward()
    assert_same_gradients(model, expected)
    convmesh.disable()


def test_gradients_are_summed_whichever_way_a_model_is_entered(pool: Pool) -> None:
    pool.run_cases(check, list(WAYS), mesh=(2, 2), names=tuple(DIMS))


def check_class(mesh: DeviceMesh) -> None:
    model = build(mesh)
    assert isinstance(model, Autoencoder)
    assert type(model).__qualname__ == "Autoencoder"
    copied = copy.deepcopy(model)
    z = convmesh.shard(latents(), mesh, **DIMS)
    copied.decode(z).square().mean().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    expected = build(None)
    expected.decode(latents()).square().mean().backward()
    assert_same_gradients(copied, expected)
    encoded = model.encode(convmesh.shard(picture(), mesh, **DIMS))
    assert isinstance(encoded.latents, Gaussian)
    assert type(pickle.loads(pickle.dumps(build(None).decoder))) is Decoder
    with pytest.raises(convmesh.ShardingError, match=r"is a plain torch\.Tensor\n  remedy: convmesh\.shard"):
        model.decode(latents())
    with pytest.raises(convmesh.ShardingError, match=r"is a plain torch\.Tensor\n  remedy: convmesh\.shard"):
        model.decoder(latents())
    # Outside of the model a plain tensor may be anything, also after a call that has failed.
    with pytest.raises((convmesh.ShardingError, RuntimeError), match=r"plain|mixed"):
        z * torch.ones(4, 1, 1, 1, dtype=torch.float64)
    assert model(convmesh.shard(picture(), mesh, **DIMS)).shape == (4, 3, 10, 6)
    check_interrupted(model, mesh)
    convmesh.disable()


def check_interrupted(model: Autoencoder, mesh: DeviceMesh) -> None:
    """After Ctrl-C in the middle of a call, the next one is the outermost again."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for call in (model, model.decoder, model.decode):
        handle = model.decoder.layers[1].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            call(convmesh.shard(picture() if call is model else latents(), mesh, **DIMS))
        handle.remove()
        with pytest.raises(convmesh.ShardingError, match=r"is a plain torch\.Tensor\n  remedy: convmesh\.shard"):
            model(picture())


def test_a_model_stays_of_its_class(pool: Pool) -> None:
    pool.run(check_class, mesh=(2, 2), names=tuple(DIMS))
