"""Which modules of a model are kept whole, and after which of them it may be cut.

A *list of blocks* is a container most of whose weights lie in modules with parts of their own: ``down_blocks``,
``transformer_blocks``, but not the linear layer and dropout of ``to_out``. A module with such a list somewhere inside
is *opened*: its own forward is traced. Every other module is a *leaf*: it is called as it is. Adapters and
parametrizations on a module are no parts of it: a model is cut alike with and without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from deepspeed_pulse.errors import GraphError, did_you_mean
from deepspeed_pulse.models.units import base_name

Blocks = Literal["auto"] | Sequence[str]

PARAMETRIZATIONS = "parametrizations"
"""The child in which torch keeps how the weights of a module are computed."""

CHILDLESS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
"""Of torch's, without children: one that is there is an adapter that a user has registered."""


@dataclass(frozen=True, kw_only=True)
class Outline:
    """``opened``: paths whose forward is traced. ``items``: paths of blocks, leaves and opened ones.

    ``whole``: an opened item that hands on one value stays one layer, but for ``containers``, which only hold blocks.
    ``glue``: functions that are kept whole too.
    """

    opened: frozenset[str]
    items: frozenset[str]
    containers: frozenset[str]
    whole: bool
    glue: tuple[Callable[..., Any], ...] = ()

    @property
    def blocks(self) -> frozenset[str]:
        """Leaves after which the model is cut."""
        return self.items - self.opened

    def around(self, path: str) -> Iterator[str]:
        """Opened items that a path lies in, outermost first."""
        parts = path.split(".")
        above = (".".join(parts[:count]) for count in range(1, len(parts)))
        return (one for one in above if one in self.items)


def outline(
    model: nn.Module, blocks: Blocks = "auto", *, fine: bool = False, kept: frozenset[str] = frozenset()
) -> Outline:
    """The outline of a model; with ``fine``, blocks are opened too and their parts are the blocks.

    ``blocks``: paths of modules, or of containers whose items are meant. ``kept``: paths of modules whose own lists are
    not blocks. Raises :class:`GraphError` for a path that the
    model does not have, or that lies inside another.
    """
    items = _items(model, kept) if blocks == "auto" else _named(model, blocks)
    opened = {""}
    for path in items:
        parts = path.split(".")
        opened |= {".".join(parts[:count]) for count in range(len(parts))}
    items, parts_of = set(items), model.get_submodule
    if fine and blocks == "auto":
        for path in sorted(items - opened):
            parts_inside = [name for name, part in _parts(parts_of(path)).items() if _is_composite(part)]
            if path not in kept and len(parts_inside) > 1 and not isinstance(parts_of(path), nn.Sequential):
                opened.add(path)
                items |= {f"{path}.{name}" for name in parts_inside}
    containers = (path for path in items if isinstance(model.get_submodule(path), (nn.ModuleList, nn.Sequential)))
    return Outline(opened=frozenset(opened), items=frozenset(items), containers=frozenset(containers), whole=not fine)


def _items(model: nn.Module, kept: frozenset[str]) -> set[str]:
    """Paths of what stands in lists of blocks."""
    found = set[str]()
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{one}.") for one in kept)
        if path and not inside and not _is_added(model, path, module) and _is_list_of_blocks(module):
            found |= {f"{path}.{name}" for name, item in module.named_children() if has_weights(item)}
    return found


def _is_list_of_blocks(module: nn.Module) -> bool:
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return False
    weighty = [item for item in module.children() if has_weights(item)]
    composite = [item for item in weighty if _is_composite(item)]
    least = 2 if isinstance(module, nn.Sequential) else 1
    return len(composite) >= least and 2 * len(composite) > len(weighty)


def _is_composite(module: nn.Module) -> bool:
    while (base := base_name(module)) is not None:
        module = getattr(module, base)
    return any(map(has_weights, _parts(module).values()))


def _parts(module: nn.Module) -> dict[str, nn.Module]:
    """The children of a module by name; none of one with an adapter, which is called as it is."""
    if base_name(module) is not None or type(module) in CHILDLESS:
        return {}
    return {name: child for name, child in module.named_children() if name != PARAMETRIZATIONS}


def _is_added(model: nn.Module, path: str, module: nn.Module) -> bool:
    """Whether a module computes weights of another, or is a container of adapters."""
    *above, last = path.split(".")
    has_adapter = base_name(model.get_submodule(".".join(above))) is not None
    return PARAMETRIZATIONS in (*above, last) or (has_adapter and isinstance(module, nn.ModuleDict))


def has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _named(model: nn.Module, blocks: Sequence[str]) -> set[str]:
    listed = isinstance(blocks, (list, tuple, set, frozenset))
    if not listed or not blocks or not all(isinstance(one, str) for one in blocks):
        raise GraphError(f'blocks: expected "auto" or a list of paths of modules, found {blocks!r}')
    modules: Mapping[str, nn.Module] = dict(model.named_modules())
    found = set[str]()
    for path in blocks:
        if path not in modules or not path:
            raise GraphError(
                f"blocks: {type(model).__name__} has no module {path!r}{did_you_mean(path, modules)}; its first are "
                f"{', '.join(_few(modules))}"
            )
        container = isinstance(modules[path], (nn.ModuleList, nn.ModuleDict))
        found |= {f"{path}.{name}" for name, _ in modules[path].named_children()} if container else {path}
    for path in sorted(found):
        if inside := [other for other in found if other.startswith(f"{path}.")]:
            raise GraphError(f"blocks: {inside[0]} lies inside {path}, which is kept whole; name one of the two")
    return found


def _few(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    return iter([path for path in modules if path and "." not in path][:12])
