"""Batches of which every rank reads only its own region."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset

from ..geometry import shards
from ..sharding.errors import ShardingError
from .region import Region, assembled, read, region
from .same_data import compare

Dims = Mapping[str, int]


class Samples(Protocol):
    """A map-style data set. A sample is an array that can be read in part (see `shard`), or a tuple of such arrays."""

    def __getitem__(self, index: int, /) -> Any: ...
    def __len__(self) -> int: ...


class Loader:
    """An iterator over batches of DTensors. `loader` creates it."""

    def __init__(self, samples: Samples, mesh: DeviceMesh, batch_size: int, dims: tuple[Dims, ...], single: bool,
                 shuffle: bool, seed: int, drop_last: bool, options: dict[str, Any]):  # fmt: skip
        self.mesh, self.dims, self._single = mesh, dims, single
        self.shapes = tuple(tuple(array.shape) for array in _arrays(samples[0]))
        if len(self.shapes) != len(dims):
            raise ShardingError(f"loader: a sample has {len(self.shapes)} arrays, and dims speaks of {len(dims)}\n"
                                "  remedy: one dict for each array of a sample")  # fmt: skip
        facts = (
            f"{len(samples)} samples of shapes {self.shapes}, {dims}, {batch_size=}, {shuffle=}, {seed=}, {drop_last=}"
        )
        compare("loader", mesh, facts, "give all ranks the same samples and the same arguments")
        self._order = _Order(len(samples), batch_size, _place_in_batch(mesh, dims), shuffle, seed, drop_last)
        regions = tuple(self._region(shape, names) for shape, names in zip(self.shapes, dims, strict=True))
        options = {"generator": torch.Generator().manual_seed(seed), **options}  # the global one is the model's
        self._parts = DataLoader(
            _Regions(samples, self.shapes, regions), batch_sampler=self._order, collate_fn=_together, **options
        )

    def set_epoch(self, epoch: int) -> None:
        """Draw another order for the next pass, if `shuffle` is on. Call it on all ranks, before each epoch.

        Args:
            epoch: The number of the epoch; the order depends on it and on the seed.
        """
        self._order.epoch = epoch

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Any]:
        found = iter(self._parts)
        for size in self._order.sizes():
            parts, problem = self._next(found)
            batch = tuple(
                assembled("loader", part, (size, *shape), self.mesh, names, problem)
                for part, shape, names in zip(parts, self.shapes, self.dims, strict=True)
            )
            yield batch[0] if self._single else batch

    def _next(self, found: Iterator[Sequence[torch.Tensor]]) -> tuple[Sequence[torch.Tensor], str | None]:
        """The arrays of the next batch, or why there are none: other ranks, which read other samples, have to know."""
        try:
            return next(found), None
        except ShardingError as error:
            # A worker's error has its traceback before it, and where in that process it was behind it.
            said = error.args[0].rpartition("ShardingError: ")[2].partition("\n  at ")[0]
            return [torch.empty(0)] * len(self.shapes), "; ".join(map(str.strip, said.splitlines()))

    def _region(self, shape: tuple[int, ...], names: Dims) -> Region:
        """What this rank reads of each sample; the batch's own dimension is sharded by choosing samples."""
        return region((0, *shape), self.mesh, **names)[1:]


def loader(
    samples: Samples,
    mesh: DeviceMesh,
    *,
    batch_size: int,
    dims: Dims | Sequence[Dims],
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    **options: Any,
) -> Loader:
    """Iterate over a data set in batches of sharded DTensors. Each rank reads only what it owns.

    Ranks along the mesh dimension that shards the batch read different samples. Ranks that differ only in spatial mesh
    dimensions read different slices of the same samples.

    Args:
        samples: A map-style data set (`__getitem__`, `__len__`), the same on every rank. A sample is an array, or a
            tuple of arrays, that can be sliced (see `shard`). All samples have the shapes of the first one.
        mesh: A mesh whose dimensions have names.
        batch_size: The size of the global batch, over all ranks.
        dims: How a batch is sharded, in the terms of `shard`: `{"data": 0, "h": 2}`, where dimension 0 is the batch. If
            a sample is a tuple, a sequence with one dict for each array.
        shuffle: Draw a new order in each epoch; see `Loader.set_epoch`.
        seed: The seed of that order. It must be the same on all ranks.
        drop_last: Leave out the last batch if it is smaller than the others.
        **options: Passed to `torch.utils.data.DataLoader`: `num_workers`, `pin_memory`, and so on.

    Returns:
        An iterable of batches, with a length. A batch is a DTensor, or a tuple of them if `dims` is a sequence.

    Raises:
        ShardingError: The arrays of a sample do not match `dims`, are sharded differently along the batch, or have
            other shapes than the first sample; or the ranks give different samples or arguments.

    Examples:
        >>> images, labels = torch.randn(10, 1, 8, 8), torch.arange(10)
        >>> samples = list(zip(images, labels))
        >>> dims = {"data": 0, "h": 2}, {"data": 0}
        >>> batches = convmesh.loader(samples, mesh, batch_size=4, dims=dims, shuffle=True)
        >>> [tuple(x.shape) for x, y in batches]
        [(4, 1, 8, 8), (4, 1, 8, 8), (2, 1, 8, 8)]
    """
    single = isinstance(dims, Mapping)
    each: tuple[Dims, ...] = (dims,) if isinstance(dims, Mapping) else tuple(dims)
    return Loader(samples, mesh, batch_size, each, single, shuffle, seed, drop_last, options)


def _arrays(sample: Any) -> tuple[Any, ...]:
    return tuple(sample) if isinstance(sample, tuple | list) else (sample,)


def _place_in_batch(mesh: DeviceMesh, dims: tuple[Dims, ...]) -> tuple[int, int]:
    """(which part of each batch this rank has, of how many)"""
    cutting = {tuple(name for name, dim in names.items() if dim == 0) for names in dims}
    if len(cutting) > 1:
        raise ShardingError(
            f"loader: the arrays of a sample are sharded differently along the batch: {dims}\n"
            "  remedy: shard dimension 0 of all of them over the same mesh dimension"
        )
    (names,) = cutting
    if not names or mesh.get_coordinate() is None:
        return 0, 1
    return mesh.get_local_rank(names[0]), mesh[names[0]].size()


@dataclass
class _Order:
    """The samples of this rank in each batch: as torch.chunk splits a batch, so that it is a DTensor's part."""

    count: int
    batch_size: int
    place: tuple[int, int]
    shuffle: bool
    seed: int
    drop_last: bool
    epoch: int = 0

    def sizes(self) -> list[int]:
        whole, rest = divmod(self.count, self.batch_size)
        return [self.batch_size] * whole + ([rest] if rest and not self.drop_last else [])

    def __len__(self) -> int:
        return len(self.sizes())

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.count))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.count, generator=generator).tolist()
        here, parts = self.place
        for number, size in enumerate(self.sizes()):
            own = shards(size, (parts,))[here]
            first = number * self.batch_size
            # The last batch may have nothing for this rank; one sample tells the shapes and types all the same.
            yield order[first + own.start : first + own.stop] or [-1 - order[first]]


@dataclass(frozen=True)
class _Regions(Dataset[Any]):
    samples: Samples
    shapes: tuple[tuple[int, ...], ...]
    regions: tuple[Region, ...]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        """A negative index stands for nothing of the sample -1 - index."""
        nothing = index < 0
        arrays = _arrays(self.samples[-1 - index if nothing else index])
        found = tuple(tuple(array.shape) for array in arrays)
        if found != self.shapes:
            raise ShardingError(f"loader: sample {index} has shapes {found}, and the first one {self.shapes}\n"
                                "  remedy: pad or crop all samples to one shape")  # fmt: skip
        if nothing:
            return tuple(_empty(array, where) for array, where in zip(arrays, self.regions, strict=True))
        return tuple(read(array, where)[None] for array, where in zip(arrays, self.regions, strict=True))


def _empty(array: Any, where: Region) -> torch.Tensor:
    """No sample, of this rank's shape."""
    kind = read(array, tuple(slice(0, 0) for _ in where)).dtype
    return torch.empty((0, *(part.stop - part.start for part in where)), dtype=kind)


def _together(parts: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.cat(arrays) for arrays in zip(*parts, strict=True))
