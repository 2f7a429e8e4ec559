"""Samples of a data set: their fields, their order, and the part of each that a rank reads."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard
from torch.utils.data import Dataset

from ..geometry import Interval, shards
from ..sharding.errors import ShardingError
from .arrays import kind_of, read, some
from .region import placements
from .same_data import checksum

Dims = Mapping[str, int]
Shape = tuple[int, ...]
Place = tuple[int, tuple[int, ...]]  # (shard index, mesh sizes) of a tensor dimension
OUTSIDE: Place = -1, ()  # for a rank outside of the mesh
COMPARED, SEEN = 4, 2**10  # how many batches of a pass ranks compare, and about how many elements of an array


class Samples(Protocol):
    """A map-style data set.

    A sample is an array that can be sliced (see `shard`), a number, a string or another value, or a tuple or dict of
    those.
    """

    def __getitem__(self, index: int, /) -> Any: ...
    def __len__(self) -> int: ...


def fields_of(sample: Any) -> tuple[Sequence[Any] | None, list[Any]]:
    """Return the names of a sample's fields (None for a single value), and their values; numbers become 0-d arrays."""
    named = isinstance(sample, Mapping)
    many = named or isinstance(sample, tuple | list)
    values = list(sample.values() if named else sample) if many else [sample]
    names = None if not many else list(sample) if named else range(len(values))
    return names, [np.asarray(v) if isinstance(v, bool | int | float | complex) else v for v in values]


def shape_of(value: Any) -> Shape | None:
    """Return the shape of an array; None for other values, such as strings, which are collected in a list."""
    return tuple(value.shape) if hasattr(value, "shape") and hasattr(value, "__getitem__") else None


def dims_of_fields(dims: Any, sample: Any) -> list[Dims | None]:
    """Return how batches of each field are sharded, according to `dims`; None for fields that are no arrays.

    Fields that `dims` does not mention are sharded along the batch dimension like the others.
    """
    names, values = fields_of(sample)
    by_name = isinstance(dims, Mapping) and any(isinstance(each, Mapping) for each in dims.values())
    given: dict[Any, Any] = dict(dims) if by_name else {0: dims} if isinstance(dims, Mapping) else dict(enumerate(dims))
    if isinstance(sample, Mapping) != by_name:
        raise ShardingError(
            f"loader: a sample is a {type(sample).__name__}, and dims is {dims!r}\n"
            '  remedy: for samples that are dicts, dims={"image": {"data": 0, "h": 2}, ...}; for others without names'
        )
    if (by_name and not given.keys() <= set(names or ())) or (not by_name and len(given) != len(values)):
        has = f"the fields {names}" if by_name else f"{len(values)} arrays"
        said = list(given) if by_name else len(given)
        raise ShardingError(f"loader: a sample has {has}, and dims speaks of {said}\n"
                            "  remedy: one dict for each array of a sample")  # fmt: skip
    fields = list(zip([0] if names is None else names, map(shape_of, values), values, strict=True))
    for key, shape, value in fields:
        if shape is None and given.get(key) is not None:
            raise ShardingError(f"loader: dims speaks of field {key!r}, which is a {type(value).__name__}\n"
                                "  remedy: leave it out, or None: what is no array is collected in a list")  # fmt: skip
    batch = {tuple(name for name, dim in names.items() if dim == 0) for names in given.values() if names is not None}
    if len(batch) > 1:
        raise ShardingError(
            f"loader: the arrays of a sample are sharded differently along the batch: {dims}\n"
            "  remedy: shard dimension 0 of all of them over the same mesh dimension"
        )
    along = {name: 0 for names in batch for name in names}
    return [None if shape is None else along if given.get(key) is None else given[key] for key, shape, _ in fields]


def places(mesh: DeviceMesh, dims: Dims, ndim: int) -> dict[int, Place]:
    """Return this rank's shard of each sharded dimension of a batch."""
    found: dict[int, Place] = {}
    sharded, here = placements(ndim, mesh, dims), mesh.get_coordinate()
    if here is None:
        return dict.fromkeys(range(ndim), OUTSIDE)
    for at, size, placement in zip(here, mesh.shape, sharded, strict=True):
        if isinstance(placement, Shard):
            place, sizes = found.get(placement.dim, (0, ()))
            found[placement.dim] = place * size + at, (*sizes, size)
    return found


class Key(NamedTuple):
    """The request for one sample to a data set."""

    number: int
    seed: int
    read: bool  # if False, only its shapes and dtypes are needed
    compared: bool  # whether ranks that read the same sample compare it


@dataclass
class Order:
    """The samples of this rank in each batch, divided as by torch.chunk, so that they are a DTensor's local tensor."""

    count: int
    batch_size: int
    place: Place
    shuffle: bool
    seed: int
    drop_last: bool
    epoch: int = 0
    first_batch: int = 0  # earlier ones were seen before an interruption

    def sizes(self) -> list[int]:
        whole, rest = divmod(self.count, self.batch_size)
        return [self.batch_size] * whole + ([rest] if rest and not self.drop_last else [])

    def __len__(self) -> int:
        return len(self.sizes())

    def __iter__(self) -> Iterator[list[Key]]:
        epoch, order = self.epoch, list(range(self.count))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            order = torch.randperm(self.count, generator=generator).tolist()
        sizes = list(enumerate(self.sizes()))
        for number, size in sizes[self.first_batch :]:
            own = _own(size, self.place)
            first = number * self.batch_size
            # The last batch may be empty on this rank; then one sample is needed for its shapes and dtypes.
            mine, compared = order[first + own.start : first + own.stop], self.compares(number)
            keys = [self._key(index, epoch, True, compared) for index in mine]
            yield keys or [self._key(order[first], epoch, False, False)]

    def compares(self, number: int) -> bool:
        """Whether ranks that read the same samples of a batch compare them: of the first ones of each pass."""
        return number - self.first_batch < COMPARED

    def _key(self, index: int, epoch: int, read: bool, compared: bool) -> Key:
        text = f"{self.seed} {epoch} {index}".encode()
        return Key(index, int.from_bytes(blake2b(text, digest_size=4).digest()), read, compared)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context manager that seeds the random numbers of torch (on the CPU), numpy and Python, then restores them."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed all devices
    np.random.seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


@dataclass(frozen=True)
class Regions(Dataset[Any]):
    """A data set of this rank's slices of each sample, with a batch dimension of 1 or 0, and the samples' shapes."""

    samples: Samples
    names: Sequence[Any] | None
    shapes: tuple[Shape | None, ...]
    any_shape: bool
    places: tuple[dict[int, Place], ...]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: Key) -> tuple[tuple[Any, ...], tuple[Shape | None, ...], int]:
        with seeded(key.seed):
            sample = self.samples[key.number]
            if isinstance(sample, Mapping) and isinstance(self.names, list) and sample.keys() >= set(self.names):
                sample = {name: sample[name] for name in self.names}  # in the order of the first sample
            names, values = fields_of(sample)
            shapes = tuple(map(shape_of, values))
            if names != self.names or not self._fits(shapes):
                raise ShardingError(
                    f"loader: sample {key.number} has shapes {_named(names, shapes)}, and the first one "
                    f"{_named(self.names, self.shapes)}\n  remedy: pad or crop all samples to one shape, or "
                    "batch_size=1; give all of them the same fields"
                )
            parts = [self._part(key, *field) for field in zip(values, shapes, self.places, strict=True)]
            seen = sum(map(_seen, values)) if key.compared else 0
        return tuple(parts), shapes, seen

    def _fits(self, shapes: tuple[Shape | None, ...]) -> bool:
        dims = [[None if shape is None else len(shape) for shape in each] for each in (shapes, self.shapes)]
        return shapes == self.shapes or (self.any_shape and dims[0] == dims[1])

    def _part(self, key: Key, value: Any, shape: Shape | None, places: dict[int, Place]) -> Any:
        if shape is None:
            return [value] if key.read else []
        own = [_own(size, places.get(dim)) for dim, size in enumerate(shape, 1)]
        if key.read:
            return read(value, tuple(slice(part.start, part.stop) for part in own))[None]
        kind = read(value, tuple(slice(0, 0) for _ in own)).dtype
        return torch.empty((0, *map(len, own)), dtype=kind)


def _seen(value: Any) -> int:
    """A number for some elements of an array that is in memory. A tensor may be a mapped file, of which a rank reads
    little beside its own region, and of other files nothing."""
    in_memory = shape_of(value) is not None and kind_of(value) != "file"
    return checksum(some(value, SEEN)) if in_memory else 0


def _own(size: int, place: Place | None) -> Interval:
    if place == OUTSIDE:
        return Interval(0, 0)
    return Interval(0, size) if place is None else shards(size, place[1])[place[0]]


def _named(names: Sequence[Any] | None, shapes: tuple[Shape | None, ...]) -> Any:
    return dict(zip(names, shapes, strict=True)) if isinstance(names, list) else shapes


def together(found: list[tuple[tuple[Any, ...], tuple[Shape | None, ...], int]]) -> tuple[list[Any], Any, int]:
    """Collate the slices of several samples into a batch; also return the shapes of a sample and a checksum."""
    fields = zip(*(parts for parts, *_ in found), strict=True)
    joined = [torch.cat(parts) if isinstance(parts[0], torch.Tensor) else list(chain(*parts)) for parts in fields]
    return joined, found[0][1], sum(seen for *_, seen in found)
