"""Pictures and videos as tokens: what the layers of transformers have in common.

The hidden state is ``(batch, tokens, channels)``. The last layer, which makes a picture of it again, has
to know how the patches lay; the first layer stashes that as the *shape* of a value without content, so
that it is known without reading memory, on every device. In a wave both layers share a rank.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_pulse.engine.specs import Declared
from deepspeed_pulse.models.units import Origin, Piece, Unit, declare


class PatchUnit(Unit):
    """A unit that knows the sides of a patch: height and width, for videos frames first."""

    def __init__(self, model: Any, origin: Origin) -> None:
        super().__init__(model, origin)
        size = model.config.patch_size
        if not isinstance(size, int):
            self.patch = tuple(size)
        elif hasattr(model.config, "patch_size_t"):
            self.patch = (model.config.patch_size_t or 1, size, size)  # CogVideoX 1.0 has no patches over frames
        else:
            self.patch = (size, size)

    def patches(self, hidden: Tensor, *sides: int) -> Tensor:
        """A value without content whose shape is the number of patches along the sides."""
        counts = [side // patch for side, patch in zip(sides, self.patch, strict=True)]
        return hidden.new_zeros(counts, dtype=torch.bool)


class PatchHead(PatchUnit):
    """Norm, projection, and patches back to a picture or video."""

    PARTS: tuple[str, ...] = ("norm_out", "proj_out")
    channels_first = False

    def forward(self, hidden: Tensor, patches: Tensor, temb: Tensor) -> Tensor:
        return unpatchify(self.tokens(hidden, temb), patches.shape, self.patch, channels_first=self.channels_first)

    def tokens(self, hidden: Tensor, temb: Tensor) -> Tensor:
        """``(batch, tokens, patch * patch * channels)``."""
        return self.proj_out(self.norm_out(hidden, temb))


class Remembered:
    """What is computed from a few tensors alone, kept while they stay the same objects with the same content.

    Layers that read the same table (rotary angles, masks) share one of these: on each rank the table is made
    once for a microbatch, and held once for all their backwards, instead of being sent.
    """

    def __init__(self) -> None:
        self._sources: tuple[Tensor, ...] = ()
        self._versions: tuple[int, ...] = ()
        self._result: Any = None

    def __deepcopy__(self, memo: Any) -> Remembered:
        return self  # copies of layers share as the layers do

    def get(self, compute: Callable[[], Any], *sources: Tensor) -> Any:
        """``compute()``, or what it gave when it was last asked for with these ``sources``."""
        if any(source.is_inference() for source in sources):
            return compute()  # such tensors do not tell whether they were changed
        versions = tuple(source._version for source in sources)
        same_objects = len(sources) == len(self._sources) and all(map(operator.is_, sources, self._sources))
        if not same_objects or versions != self._versions:
            self._sources, self._versions, self._result = sources, versions, compute()
        return self._result


class Sharing(Unit):
    """A layer that makes something together with the other layers of its kind on a rank."""

    shared: Remembered

    def sharing(self, shared: Remembered) -> Any:
        """This layer, after it was told what it shares."""
        self.shared = shared
        return self


def halves(attention: Piece, feed_forward: Piece, *, pop: Mapping[str, str]) -> Iterator[Declared]:
    """A block as two layers: its attention, and its feed-forward with what the attention stashes for it."""
    modulation = f"{attention.at}.modulation"
    yield declare(attention, pop=pop, stash=(modulation,), name=f"{attention.at}.attn")
    yield declare(feed_forward, pop={"modulation": modulation}, name=f"{attention.at}.ff")


def size_only(patches: Tensor, patch_size: Sequence[int]) -> Tensor:
    """A video ``(1, 1, frames, height, width)`` of that many patches, for what reads its shape and device only."""
    size = (count * length for count, length in zip(patches.shape, patch_size, strict=True))
    return patches.new_zeros(()).expand(1, 1, *size)


def unpatchify(tokens: Tensor, counts: Sequence[int], patch: Sequence[int], *, channels_first: bool = False) -> Tensor:
    """``(batch, tokens, patch * patch * channels)`` as ``(batch, channels, height, width)``, for videos frames first.

    ``channels_first``: before the sides of a patch in each token.
    """
    n = len(counts)
    within = (-1, *patch) if channels_first else (*patch, -1)
    grid = tokens.unflatten(1, tuple(counts)).unflatten(-1, within)
    channel, first = (n + 1, n + 2) if channels_first else (2 * n + 1, n + 1)
    grid = grid.permute(0, channel, *(axis for side in range(n) for axis in (1 + side, first + side)))
    for side in reversed(range(n)):
        grid = grid.flatten(2 + 2 * side, 3 + 2 * side)
    return grid
