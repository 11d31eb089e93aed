"""Pictures and videos as tokens: what the layers of transformers have in common.

The hidden state is ``(batch, tokens, channels)``. The last layer, which makes a picture of it again, has
to know how the patches lay; the first layer stashes that as the *shape* of :func:`patches_value`, so
that it is known without reading memory, on every device. In a wave both layers share a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_pulse.engine.specs import Declared, spec
from deepspeed_pulse.errors import GraphError
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


def refuse(model: nn.Module, problems: Iterable[str]) -> None:
    """Raise a :class:`GraphError` that lists all problems, if there are any."""
    if found := list(problems):
        raise GraphError(f"this {type(model).__name__} cannot become a layer list:\n  " + "\n  ".join(found))


def same(*names: str) -> dict[str, str]:
    """Values whose keyword is their name."""
    return {name: name for name in names}


def patches_value(hidden: Tensor, *size: int) -> Tensor:
    """A value without content whose shape is ``size``: patches in height and width, for videos frames first."""
    return hidden.new_zeros(size, dtype=torch.bool)


def unpatchify(tokens: Tensor, size: Sequence[int], patch_size: int) -> Tensor:
    """``(batch, tokens, patch * patch * channels)`` as ``(batch, channels, height, width)``."""
    grid = tokens.unflatten(1, tuple(size)).unflatten(-1, (patch_size, patch_size, -1))
    return grid.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
