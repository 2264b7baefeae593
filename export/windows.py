"""Windows: the positions of a convolution's or a pool's kernel on its input."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """A sliding kernel; every field has a number per spatial axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @staticmethod
    def of(kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> Window:
        """A window from torch's arguments, where one number means all axes, and no stride the kernel's size."""
        axes = len(kernel)
        options = (stride or kernel, padding, dilation)
        return Window(tuple(kernel), *(tuple(part) * (axes // len(part)) for part in options))

    @staticmethod
    def pool(kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> Window:
        """The window of a pool over two axes, where torch may give the kernel as one number."""
        return Window.of(tuple(kernel) * (2 // len(kernel)), stride, padding, dilation)

    @property
    def reach(self) -> tuple[int, ...]:
        """From the first to the last position under the kernel."""
        return tuple(spread * (taps - 1) for spread, taps in zip(self.dilation, self.kernel, strict=True))

    @property
    def taps(self) -> int:
        """The number of positions under the kernel."""
        return math.prod(self.kernel)

    @property
    def offsets(self) -> Iterator[tuple[int, ...]]:
        """Every tap by its place in the kernel."""
        return itertools.product(*map(range, self.kernel))

    def outputs(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The spatial sizes of the result."""
        each = zip(sizes, self.padding, self.reach, self.stride, strict=True)
        return tuple((size + 2 * pad - reach - 1) // step + 1 for size, pad, reach, step in each)

    def inputs(self, sizes: Sequence[int], more: Sequence[int]) -> tuple[int, ...]:
        """The smallest spatial sizes whose `outputs` are `sizes`, and `more` on each axis."""
        each = zip(sizes, self.padding, self.reach, self.stride, more, strict=True)
        return tuple((size - 1) * step - 2 * pad + reach + 1 + extra for size, pad, reach, step, extra in each)

    def overhang(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The padding that `ceil_mode` adds: the part of one more window, begun inside, that is past the end."""
        missing = []
        for size, pad, reach, step in zip(sizes, self.padding, self.reach, self.stride, strict=True):
            rest = (size + 2 * pad - reach - 1) % step
            begins = size + 2 * pad - reach - 1 - rest + step
            missing.append(step - rest if rest and begins < size + pad else 0)
        return tuple(missing)

    @property
    def trivial(self) -> bool:
        """Every position is its own patch."""
        return self.taps == 1 and set(self.stride) == {1} and set(self.padding) == {0}

    @property
    def tiles(self) -> bool:
        """Patches lie side by side."""
        return self.stride == self.kernel and set(self.padding) == {0} and set(self.dilation) == {1}
