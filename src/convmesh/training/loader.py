"""Batches as DTensors; each rank reads only its own region."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, IterableDataset

from ..sharding.errors import ShardingError
from .arrays import ArrayLike, Entries, kind_of
from .errors import CheckpointError
from .region import assembled
from .same_data import compare
from .samples import Dims, Order, Regions, Samples, dims_of_fields, fields_of, places, seeded, shape_of, together

DRAWN = (
    "samples[index] has to be the same on all ranks: seed random numbers of a generator of its own, which MONAI's "
    "transforms have, with torch.initial_seed() there"
)


class Loader:
    """An iterator over batches of DTensors. `loader` creates it."""

    def __init__(self, samples: Samples | ArrayLike, mesh: DeviceMesh, batch_size: int, dims: Any, shuffle: bool,
                 seed: int, drop_last: bool, options: dict[str, Any]):  # fmt: skip
        samples = _with_indices(samples)
        with seeded(seed % 2**32):  # it may draw random numbers, and those of the program belong to the model
            first = samples[0]
        self.mesh, self.dims = mesh, dims_of_fields(dims, first)
        self._names, values = fields_of(first)
        self.shapes = tuple(map(shape_of, values))
        any_shape = batch_size == 1
        known = tuple(None if shape is None else ("any",) * len(shape) if any_shape else shape for shape in self.shapes)
        facts = f"{len(samples)} samples of shapes {known}, {dims}, {batch_size=}, {shuffle=}, {seed=}, {drop_last=}"
        compare("loader", mesh, facts, "give all ranks the same samples and the same arguments")
        each = [places(mesh, names or {}, len(shape or ()) + 1)
                for names, shape in zip(self.dims, self.shapes, strict=True)]  # fmt: skip
        place = next((place[0] for place in each if 0 in place), (0, (1,)))
        along = {name for names in self.dims for name, dim in (names or {}).items() if dim == 0}
        self._copies = [dim for dim, name in enumerate(mesh.mesh_dim_names or ()) if name not in along]
        self._order = Order(len(samples), batch_size, place, shuffle, seed, drop_last)
        self._done, self._finished, self._resumed = 0, False, False
        self._counted = False  # whether the program calls `set_epoch`
        options = {"generator": torch.Generator().manual_seed(seed), **options}  # the global generator is the model's
        self._parts = DataLoader(
            Regions(samples, self._names, self.shapes, any_shape, tuple(each)),
            batch_sampler=self._order, collate_fn=together, **options,
        )  # fmt: skip

    @property
    def epoch(self) -> int:
        """The epoch of the next pass: set by `set_epoch`, or loaded."""
        return self._order.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass. Call it on all ranks, before each epoch.

        The order of samples, if `shuffle` is on, and the seed that each sample is read with depend on the epoch. In an
        epoch that was loaded, the next pass continues where the saved one stopped.

        Args:
            epoch: The number of the epoch.
        """
        self._counted = True
        if epoch != self._order.epoch:
            self._order.epoch = epoch
            self._done, self._finished, self._resumed = 0, False, False

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this loader: the epoch, and the number of batches taken.

        After a complete pass the position is the beginning of the next epoch, if `set_epoch` is used; without it all
        passes are of one epoch, also the one after a restart. `torchdata.StatefulDataLoader` does the same. Give the
        loader to `save_checkpoint` by a name, or save this state yourself. It is the same on all ranks, and loads on
        any number of them.
        """
        epoch, done = (self.epoch + self._counted, 0) if self._finished else (self.epoch, self._done)
        return {"epoch": epoch, "batches": done, **self._kind()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass begin where another loader of the same data stopped. Earlier batches are not read.

        Args:
            state: What `state_dict` returned.

        Raises:
            CheckpointError: The state is that of a loader of other data, or with other arguments.
        """
        kind = {name: state.get(name) for name in self._kind()}
        if kind != self._kind():
            raise CheckpointError(f"loader: the state is of {kind}, and this loader has {self._kind()}\n"
                                  "  remedy: the same data and the same arguments as when it was saved")  # fmt: skip
        self._order.epoch, self._done = state["epoch"], state["batches"]
        self._finished, self._resumed = False, True

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Any]:
        done = self._done if self._resumed else 0
        self._order.first_batch, self._done, self._finished, self._resumed = done, done, False, False
        found = iter(self._parts)
        for number, size in list(enumerate(self._order.sizes()))[done:]:
            parts, shapes, seen, problem = self._next(found)
            batch = self._assembled(size, parts, shapes, problem)
            if self._order.compares(number):
                compare(
                    "loader",
                    self.mesh,
                    "samples",
                    DRAWN,
                    values=partial(torch.tensor, seen % 2**62),
                    copies_along=self._copies,
                )
            self._done += 1
            yield batch
        self._finished = True

    def _kind(self) -> dict[str, Any]:
        order = self._order
        names = ("count", "batch_size", "shuffle", "seed", "drop_last")
        return {name: getattr(order, name) for name in names}

    def _next(self, found: Iterator[Any]) -> tuple[Sequence[Any], Sequence[Any], int, str | None]:
        """Return the slices of the next batch, the shapes of a sample, a checksum of what was read, and an error.

        The error is for the other ranks, which read other samples and have to know of the error.
        """
        try:
            return *next(found), None
        except ShardingError as error:
            # A worker's error message has a traceback before it, and the place in that process after it.
            said = error.args[0].rpartition("ShardingError: ")[2].partition("\n  at ")[0]
            parts = [torch.empty(0)] * len(self.shapes)
            return parts, self.shapes, 0, "; ".join(map(str.strip, said.splitlines()))

    def _assembled(self, size: int, parts: Sequence[Any], shapes: Sequence[Any], problem: str | None) -> Any:
        """Return a batch: like a sample, with DTensors in place of arrays."""
        fields = [
            part if names is None else assembled("loader", part, (size, *shape), self.mesh, names, problem)
            for part, shape, names in zip(parts, shapes, self.dims, strict=True)
        ]
        if self._names is None:
            return fields[0]
        return dict(zip(self._names, fields, strict=True)) if isinstance(self._names, list) else tuple(fields)


def _with_indices(samples: Any) -> Samples:
    """A file's array has entries along its first dimension, each of which ranks read in part."""
    if shape_of(samples) and kind_of(samples) == "file":
        return Entries(samples)
    if isinstance(samples, IterableDataset) or not (hasattr(samples, "__getitem__") and hasattr(samples, "__len__")):
        raise ShardingError(
            f"loader: a {type(samples).__name__} has no samples[index], by which ranks find those that they read\n"
            "  remedy: a data set with __getitem__ and __len__; of a stream, convmesh.shard(batch, mesh, ...), if all "
            "ranks read all of it, or convmesh.from_region(part, shape, mesh, ...)"
        )
    return samples  # type: ignore[no-any-return]


def loader(
    samples: Samples | ArrayLike,
    mesh: DeviceMesh,
    *,
    batch_size: int,
    dims: Dims | Sequence[Dims | None] | Mapping[str, Dims],
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    **options: Any,
) -> Loader:
    """Iterate over a data set in batches of sharded DTensors. Each rank reads only what it owns.

    Ranks along the mesh dimension that shards the batch read different samples. Ranks that differ only in spatial mesh
    dimensions read different slices of the same samples.

    While `samples[index]` runs, and while its result is sliced, the random numbers of torch (on the CPU), numpy and
    Python are seeded by `seed`, the epoch and the index. So an augmentation draws the same numbers on all ranks that
    read a sample, for any number of ranks and workers, and different ones in the next epoch. Other generators can be
    seeded with `torch.initial_seed()`. See [Augmentation](training.md#augmentation).

    Args:
        samples: A map-style data set (`__getitem__`, `__len__`), the same on every rank. A sample is an array that can
            be sliced (see `shard`), or a tuple, list or dict of arrays, numbers, strings and other values. All samples
            have the fields of the first one, and with a batch size above 1 its shapes. Or an array of all samples, in a
            file, too (zarr, HDF5, a memory map).
        mesh: A mesh whose dimensions have names.
        batch_size: The size of the global batch, over all ranks.
        dims: How a batch is sharded, as in `shard`: `{"data": 0, "h": 2}`, where dimension 0 is the batch. If a sample
            is a tuple, a sequence with one such dict for each field; if it is a dict, such dicts by name. Numbers and
            arrays that are left out (None in a sequence) are sharded along the batch like the others. Strings and other
            values of the samples that this rank reads are collected in a list.
        shuffle: Draw a new order in each epoch; see `Loader.set_epoch`.
        seed: The seed of that order and of the samples. It must be the same on all ranks.
        drop_last: Leave out the last batch if it is smaller than the others.
        **options: Passed to `torch.utils.data.DataLoader`: `num_workers`, `pin_memory`, and so on. Copies from pinned
            memory to the device are asynchronous.

    Returns:
        An iterable of batches, with a length. A batch is like a sample, with DTensors in place of arrays and numbers.

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
        >>> named = [{"image": x, "label": int(y), "file": f"{y}.png"} for x, y in samples]
        >>> batches = convmesh.loader(named, mesh, batch_size=4, dims={"image": {"data": 0, "h": 2}})
        >>> batch = next(iter(batches))
        >>> tuple(batch["label"].shape), len(batch["file"])  # two of the four samples are this rank's
        ((4,), 2)
    """
    return Loader(samples, mesh, batch_size, dims, shuffle, seed, drop_last, options)
