"""One weight in several layers: found by identity, trained as one wherever its layers lie.

Every rank has the same list of modules, so every rank sees the same holders. Where they lie on several
ranks, each of these holds a copy: the first rank's values are everybody's at the start, and gradients are
summed over the ranks before the optimizer's step, as DeepSpeed does for ``TiedLayerSpec``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe import module as upstream

from deepspeed_pulse.engine.specs import TiedCall, unwrap


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A parameter or buffer that several layers hold."""

    tensor: torch.Tensor
    holders: tuple[tuple[int, str], ...]
    """Layer index and name in that layer, in forward order."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that hold it, each once."""
        return tuple(dict.fromkeys(layer for layer, _ in self.holders))

    @property
    def name(self) -> str:
        """Its name in the whole model: the first of its holders."""
        layer, name = self.holders[0]
        return f"{layer}.{name}"


@dataclass(frozen=True, kw_only=True)
class Tie:
    """Ranks of this rank's pipeline that hold copies of the same weights, by global rank, and their process group."""

    ranks: tuple[int, ...]
    group: Any


def _find_shared(layers: Mapping[int, Iterable[tuple[str, torch.Tensor]]]) -> list[Shared]:
    """Tensors that several ``layers``, given by index with all names in each, hold; in the order of first holders."""
    holders: dict[torch.Tensor, list[tuple[int, str]]] = {}
    for layer, named in layers.items():
        for name, tensor in named:
            holders.setdefault(tensor, []).append((layer, name))
    found = (Shared(tensor=tensor, holders=tuple(where)) for tensor, where in holders.items())
    return [shared for shared in found if len(shared.layers) > 1]


class SharedWeights:
    """What layers of a list share: modules in it are there on every rank, others share nothing that can be seen."""

    def __init__(self, layers: Sequence[Any]) -> None:
        bare = {index: unwrap(layer) for index, layer in enumerate(layers)}
        self._modules = {index: layer for index, layer in bare.items() if isinstance(layer, torch.nn.Module)}
        modules = self._modules.items()
        self.parameters = _find_shared({i: m.named_parameters(remove_duplicate=False) for i, m in modules})
        self.buffers = _find_shared({i: m.named_buffers(remove_duplicate=False) for i, m in modules})
        self.names = {shared.tensor: shared.name for shared in self.parameters}
        """Of what is shared, in the whole model: the same on every rank."""
        self._ties: dict[tuple[int, ...], Tie] = {}
        """By the layers that share."""
        self._here: frozenset[int] = frozenset()
        """Layers of this rank."""
        self._watched: dict[str, tuple[torch.Tensor, int]] = {}
        self.num_watches = 0

    def overlaps(self) -> Iterator[tuple[str, str]]:
        """Names of trainable parameters of two layers that are two objects in one piece of memory."""
        names = {p: (i, name) for i, module in self._modules.items() for name, p in module.named_parameters()}
        spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, *where) for p, where in names.items() if _is_dense(p))
        for (_, end, *first), (start, _, *second) in itertools.pairwise(spans):
            if start < end and first[0] != second[0]:
                yield f"{first[0]}.{first[1]}", f"{second[0]}.{second[1]}"

    def connect(self, module: Any) -> None:
        """Make the process groups of weights that lie on several ranks of a ``PipelineModule``, cut and built.

        Collective in the world.
        """
        self._here = frozenset(index for index, _ in module.local_layers())
        sharing = dict.fromkeys(shared.layers for shared in (*self.parameters, *self.buffers))
        ranks_of = {layers: tuple(sorted(set(map(module.stage_owner, layers)))) for layers in sharing}
        for ranks in dict.fromkeys(ranks for ranks in ranks_of.values() if len(ranks) > 1):
            for members in _copies(module._grid, ranks):
                group = dist.new_group(list(members))
                if module.global_rank in members:
                    tie = Tie(ranks=members, group=group)
                    self._ties.update({layers: tie for layers in sharing if ranks_of[layers] == ranks})
        for shared, tie in self._tied(self.parameters):
            # upstream's mark: norms count the copy of the first rank only
            shared.tensor.ds_pipe_replicated = module.global_rank != tie.ranks[0]  # type: ignore[attr-defined]

    def _tied(self, found: Iterable[Shared]) -> Iterator[tuple[Shared, Tie]]:
        """Of what this rank shares with others."""
        for shared in found:
            if shared.layers in self._ties:
                yield shared, self._ties[shared.layers]

    def watch_buffers(self) -> None:
        """Remember the shared buffers as they are now."""
        self._watched = self._buffer_states()
        self.num_watches += 1

    def changed_buffer(self) -> str | None:
        """Name of a shared buffer that was written to or replaced since."""
        pairs = zip(self._watched.items(), self._buffer_states().values(), strict=True)
        return next((name for (name, before), now in pairs if now[0] is not before[0] or now[1] != before[1]), None)

    def _buffer_states(self) -> dict[str, tuple[torch.Tensor, int]]:
        holders = [holder for shared in self.buffers for holder in shared.holders]
        found = {f"{layer}.{name}": self._modules[layer].get_buffer(name) for layer, name in holders}
        return {name: (buffer, buffer._version) for name, buffer in found.items()}

    @property
    def copies(self) -> list[torch.Tensor]:
        """Weights of this rank that others hold too, whether or not they train now."""
        return [shared.tensor for shared, _ in self._tied(self.parameters)]

    def weights_and_groups(self) -> list[tuple[torch.Tensor, Any]]:
        """Trainable weights of this rank that others hold too, with their groups, in one order on all ranks."""
        return [
            (shared.tensor, tie.group) for shared, tie in self._tied(self.parameters) if shared.tensor.requires_grad
        ]

    @torch.no_grad()
    def synchronize(self) -> None:
        """Give every copy the values of the first rank's: initial values, and those just loaded."""
        for shared, tie in self._tied(self.parameters):
            _broadcast(shared.tensor, tie)
        for shared, tie in self._tied(self.buffers):
            # moving to a device makes another tensor for each module of this rank, and leaves other ranks' on the host
            first, *others = (self._modules[i].get_buffer(name) for i, name in shared.holders if i in self._here)
            _broadcast(first, tie)
            for other in others:
                if other is not first:
                    other.copy_(first)


def ties_of(module: Any) -> list[tuple[int, ...]]:
    """Pipeline ranks that hold copies of the same weights, tied or shared; for these there are process groups."""
    keys = dict[Any, list[int]]()
    for index, layer in enumerate(module._layer_specs):
        if isinstance(layer, upstream.TiedLayerSpec):
            keys.setdefault(layer.key, []).append(index)
    shared = [one.layers for one in (*module.shared.parameters, *module.shared.buffers)]
    tied, apart = (
        [tuple(sorted(set(map(module.stage_owner, indices)))) for indices in found] for found in (keys.values(), shared)
    )
    return [*tied, *(ranks for ranks in apart if len(ranks) > 1)]  # upstream makes a group of a rank alone too


def build_tied(module: Any, layers: range) -> None:
    """Build tied modules as their first layer would be, so that initial weights do not depend on the plan.

    Fills the module's ``tied_modules`` and ``tied_weight_attrs``; ``layers``: those to be built next, by index.
    """
    tied = [(i, layer) for i, layer in enumerate(module._layer_specs) if isinstance(layer, upstream.TiedLayerSpec)]
    for key in dict.fromkeys(layer.key for index, layer in tied if index in layers):
        if key in module.tied_modules:
            continue
        first, spec = next(found for found in tied if found[1].key == key)
        if module.seed_layers:
            (module.seed_fn or upstream.ds_utils.set_random_seed)(module.base_seed + first)
        module.tied_modules[key] = spec.build()
    tie_all_parameters(module)


def tie_all_parameters(module: Any) -> None:
    """Layers of one key share a module, so every parameter of it is tied, not only ``tied_weight_attr``."""
    for key, tied in module.tied_modules.items():
        module.tied_weight_attrs[key] = [name for name, _ in tied.named_parameters()]


def adopt_tied_calls(functions: list[Any], tied_modules: Mapping[str, Any]) -> None:
    """Replace, in place, what upstream makes of a tied ``forward_fn``: saves and loads its module's state too."""
    for position, function in enumerate(functions):
        if isinstance(function, partial) and function.func is not None and len(function.args) == 1:
            module = function.args[0]
            if any(module is tied for tied in tied_modules.values()):
                functions[position] = TiedCall(module, function.func)


def _broadcast(tensor: torch.Tensor, tie: Tie) -> None:
    """In place, as bytes: backends differ in the dtypes they know."""
    if tensor.is_meta or not tensor.numel():
        return
    as_bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    dist.broadcast(as_bytes, src=tie.ranks[0], group=tie.group)
    told = as_bytes.view(tensor.dtype).view(tensor.shape)
    if not torch.equal(told, tensor):
        tensor.copy_(told)


def _is_dense(parameter: torch.Tensor) -> bool:
    """Trained, and the only one in the memory that it spans."""
    steps = zip(parameter.shape, parameter.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps)
    return parameter.requires_grad and not parameter.is_meta and 0 < parameter.numel() == span


def _copies(grid: Any, ranks: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Global ranks of these pipeline ranks in every replica."""
    slices = range(grid.get_slice_parallel_world_size())
    for data in range(grid.data_parallel_size):
        for model in slices:
            where = {"data": data, "model": model} if len(slices) > 1 else {"data": data}
            yield tuple(grid.stage_to_global(stage_id=rank, **where) for rank in ranks)
