"""How a block of a tensor is given to the operator, which pads both ends alike."""

from __future__ import annotations

from dataclasses import dataclass

from ...geometry import Window


@dataclass(frozen=True)
class Crop:
    """How a transposed convolution's full reach becomes what is wanted of it, along one dimension.

    The operator crops `padding` from both ends and adds `extra` behind; `before` and `after` are left to crop
    (or, where negative, to fill with zeros) once it is done.
    """

    padding: int
    extra: int
    before: int
    after: int

    @staticmethod
    def of(window: Window, before: int, after: int) -> Crop:
        if before >= 0 and 0 <= before - after < max(window.stride, window.dilation):
            return Crop(before, before - after, 0, 0)
        padding = max(0, min(before, after))
        return Crop(padding, 0, before - padding, after - padding)
