"""Pictures and videos as tokens: what the layers of transformers have in common.

The hidden state is ``(batch, tokens, channels)``. The last layer, which makes a picture of it again, has
to know how the patches lay; the first layer stashes that as the *shape* of :func:`patches_value`, so
that it is known without reading memory, on every device. In a wave both layers share a rank.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_pulse.engine.specs import Declared, spec
from deepspeed_pulse.models.units import Origin, Unit


class TokenUnit(Unit):
    """A unit that is given its popped values by keyword, and may stash its output as a long skip."""

    keywords: tuple[str, ...] = ()
    stashes_output = False

    def given(self, popped: tuple[Any, ...]) -> dict[str, Any]:
        """The popped values under the keywords they were declared with."""
        return dict(zip(self.keywords, popped, strict=True))

    def leave(self, hidden: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """The output, and once more when a later layer pops it as its skip."""
        return (hidden, hidden) if self.stashes_output else hidden


class Whole(TokenUnit):
    """One submodule, called as the model calls it."""

    def forward(self, hidden: Tensor, *popped: Any) -> Any:
        return self.leave(self.part()(hidden, **self.given(popped)))


class Piece(TokenUnit):
    """Some children of one block of the model, those that it has, and parts from elsewhere at their paths."""

    def __init__(
        self, model: nn.Module, origin: Origin, at: str, *children: str, elsewhere: tuple[str, ...] = ()
    ) -> None:
        block = model.get_submodule(at)
        present = (f"{at}.{child}" for child in children if getattr(block, child, None) is not None)
        super().__init__(model, origin, *present, *elsewhere)
        self.at = at

    @property
    def block(self) -> Any:
        """Holds the children under the names they have in the block."""
        return self.get_submodule(self.at)


class PictureHead(TokenUnit):
    """Norm, projection, and patches back to a picture."""

    PARTS: tuple[str, ...] = ("norm_out", "proj_out")

    def __init__(self, model: Any, origin: Origin) -> None:
        super().__init__(model, origin)
        self.patch_size = model.config.patch_size

    def forward(self, hidden: Tensor, patches: Tensor, temb: Tensor) -> Tensor:
        return unpatchify(self.tokens(hidden, temb), patches.shape, self.patch_size)

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


class Sharing(TokenUnit):
    """A layer that makes something together with the other layers of its kind on a rank."""

    shared: Remembered

    def sharing(self, shared: Remembered) -> Any:
        """This layer, after it was told what it shares."""
        self.shared = shared
        return self


def declare(
    unit: TokenUnit,
    *,
    pop: Mapping[str, str] = MappingProxyType({}),
    skip: str | None = None,
    stash: tuple[str, ...] = (),
    name: str = "",
) -> Declared:
    """Declare a unit's names.

    Args:
        pop: keyword of the unit to the name of the value that it is given.
        skip: the name under which the unit's output is stashed.
        stash: other names that it stashes.
    """
    unit.keywords, unit.stashes_output = tuple(pop), skip is not None
    stash = (*((skip,) if skip else ()), *stash)
    return spec(unit, stash=stash, pop=tuple(pop.values()), name=name or unit.paths[0])


def foreign(model: nn.Module, paths: Iterable[str], kinds: tuple[type[nn.Module], ...]) -> Iterator[str]:
    """Lines about submodules that are none of ``kinds``: they may read or return something else."""
    for path in paths:
        module = model.get_submodule(path)
        if not isinstance(module, kinds):
            yield f"{path} is a {type(module).__name__}, supported: {', '.join(kind.__name__ for kind in kinds)}"


def classes_beside(model_class: type[nn.Module], *names: str) -> tuple[type[nn.Module], ...]:
    """Classes by the names they have where a model is written; those that this diffusers has."""
    home = sys.modules[model_class.__module__]
    return tuple(getattr(home, name) for name in names if hasattr(home, name))


def numbered(model: Any, path: str) -> list[str]:
    """The paths of the items of a ``ModuleList``."""
    return [f"{path}.{index}" for index in range(len(model.get_submodule(path)))]


def same(*names: str) -> dict[str, str]:
    """Values whose keyword is their name."""
    return {name: name for name in names}


def patches_value(hidden: Tensor, sides: Sequence[int], patch_size: Sequence[int]) -> Tensor:
    """A value without content whose shape is the number of patches in height and width, for videos frames first."""
    counts = [side // patch for side, patch in zip(sides, patch_size, strict=True)]
    return hidden.new_zeros(counts, dtype=torch.bool)


def size_only(patches: Tensor, patch_size: Sequence[int]) -> Tensor:
    """A video ``(1, 1, frames, height, width)`` of that many patches, for what reads its shape and device only."""
    size = (count * length for count, length in zip(patches.shape, patch_size, strict=True))
    return patches.new_zeros(()).expand(1, 1, *size)


def unpatchify(tokens: Tensor, size: Sequence[int], patch_size: int) -> Tensor:
    """``(batch, tokens, patch * patch * channels)`` as ``(batch, channels, height, width)``."""
    grid = tokens.unflatten(1, tuple(size)).unflatten(-1, (patch_size, patch_size, -1))
    return grid.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
