"""Which submodule reads which: seen twice, in the graph that ``torch.export`` makes of a model and in a layer list.

Both are told in *parts*: the submodules that the units of the list were made of. An operation inside a part belongs to
it; one in no part (a concatenation in a block's own forward) is transparent and passes on what it was computed from. So
every part reads a set of other parts and of batch entries, whoever runs it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import MappingKey, tree_flatten_with_path, tree_leaves

Sources = frozenset[str]
Reads = dict[str, Sources]
"""Part to what it reads: parts by path, batch entries as ``batch NAME``."""

NOTHING: Sources = frozenset()


def parts_of(model: nn.Module, layers: Sequence[Any]) -> dict[str, nn.Module]:
    """The submodules that the layers borrow from the model, by their path in it."""
    paths = {id(module): path for path, module in model.named_modules()}
    borrowed = [dict(declared.layer.named_modules()).get(path) for declared in layers for path in declared.layer.paths]
    return {paths[id(part)]: part for part in borrowed if part is not None}  # the others are parameters


# ------------------------------------------------------------------------------------ the exported model


class _Whole(nn.Module):
    def __init__(self, model: nn.Module, forward: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model, self._forward = model, forward

    def forward(self, batch: Any) -> Tensor:
        return self._forward(self.model, batch)


def exported(model: nn.Module, batch: dict[str, Any], forward: Callable[[Any, Any], Tensor]) -> Any:
    """``torch.export`` of the model's own forward."""
    logging.disable(logging.DEBUG)  # pytest keeps every record, and torch traces into debug records by the thousand
    try:
        return torch.export.export(_Whole(model, forward), (batch,), strict=False)
    finally:
        logging.disable(logging.NOTSET)


def reads_of_export(program: Any, batch: dict[str, Any], parts: Iterable[str]) -> Reads:
    """What each part reads when the model runs its own forward."""
    by_depth = sorted(parts, key=len, reverse=True)
    sources = _placeholder_sources(program, batch)
    reads: dict[str, Sources] = defaultdict(frozenset)
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        found = frozenset().union(*(sources.get(used.name, NOTHING) for used in _read_by(node)))
        owner = _owner(node, by_depth)
        if owner is not None:
            reads[owner] |= found - {owner}
            found = found if _returns_its_input(node) else frozenset({owner})
        sources[node.name] = found
    return dict(reads)


def _read_by(node: Any) -> list[Any]:
    """The nodes whose content an operation reads; of the tensor whose type another takes on, that is none."""
    return node.all_input_nodes[:1] if str(node.target).startswith("aten.type_as.") else node.all_input_nodes


def _returns_its_input(node: Any) -> bool:
    """A conversion to the type that the tensor has already: nothing is computed, and later readers name this node."""
    if not str(node.target).startswith(("aten.to.", "aten.type_as.", "aten.contiguous.", "aten.dropout.")):
        return False
    return bool(node.meta["val"].dtype == node.all_input_nodes[0].meta["val"].dtype)


def _placeholder_sources(program: Any, batch: dict[str, Any]) -> dict[str, Sources]:
    names = [_dotted(path) for path, _ in tree_flatten_with_path(batch)[0]]
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    return {spec.arg.name: frozenset({f"batch {name}"}) for name, spec in zip(names, specs, strict=True)}


def _dotted(path: Any) -> str:
    """Keys of nested dicts joined by dots; a tuple of tensors is one entry."""
    return ".".join(key.key for key in path if isinstance(key, MappingKey))


def _owner(node: Any, parts: Sequence[str]) -> str | None:
    """The part in which a node was made; the innermost when a part lies within another."""
    for path, _ in reversed((node.meta.get("nn_module_stack") or {}).values()):
        inside = path.removeprefix("model.")
        for part in parts:  # the longest first
            if inside == part or inside.startswith(f"{part}."):
                return part
    return None


# ---------------------------------------------------------------------------------------- the layer list


@dataclass
class ListFlow:
    """What happened when a layer list ran.

    ``unused``: ``layer: name`` of every popped value, and every hidden state, that its layer did not look at.
    ``shapes``: of every named value.
    """

    reads: Reads = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


class _Tracker(TorchFunctionMode):
    """Remembers for every tensor which parts and entries it was computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.owner: str | None = None
        self.reads: dict[str, Sources] = defaultdict(frozenset)
        self.looked_at: Sources = NOTHING  # what became a plain number
        self._known: dict[int, tuple[Tensor, Sources]] = {}  # the tensor is kept, so that its id stays its own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in (Tensor.tolist, Tensor.item) or (func == Tensor.shape.__get__ and args[0].dtype == torch.bool):
            self.looked_at |= self.sources(args[0])
        made = _tensors(result)
        if made:
            found = frozenset().union(*(self.sources(used) for used in _tensors((args, kwargs))))
            if self.owner is not None:
                self.reads[self.owner] |= found - {self.owner}
                found = frozenset({self.owner})
            unchanged = {id(used) for used in _tensors((args, kwargs))} if not func.__name__.endswith("_") else ()
            for tensor in made:
                if id(tensor) not in unchanged:
                    self.mark(tensor, found)
        return result

    def sources(self, tensor: Tensor) -> Sources:
        known = self._known.get(id(tensor))
        return known[1] if known else NOTHING

    def mark(self, tensor: Tensor, sources: Sources) -> None:
        self._known[id(tensor)] = (tensor, sources)


def flow_of_list(layers: Sequence[Any], entries: dict[str, Any], parts: dict[str, nn.Module]) -> ListFlow:
    """Run the list once and watch its parts; the first entry is the first layer's input."""
    flow, tracker = ListFlow(), _Tracker()
    values: dict[str, Any] = {}
    for name, value in entries.items():
        for tensor in _tensors(value):
            tracker.mark(tensor, frozenset({f"batch {name}"}))
        values[name] = value
    hidden = values.pop(next(iter(entries)))
    with torch.no_grad(), _watching(tracker, parts):
        for declared in layers:
            given = {"hidden state": hidden, **{name: values[name] for name in declared.pop}}
            tokens = {name: f"{declared.name} {name}" for name in given if _tensors(given[name])}
            marked = [_with_token(tracker, value, tokens.get(name)) for name, value in given.items()]
            with tracker:
                output = declared.layer(*marked)
            used = _take_tokens(tracker, output, set(tokens.values()))
            flow.unused += [f"{declared.name}: {name}" for name, token in tokens.items() if token not in used]
            hidden, *stashed = output if declared.stash else (output,)
            values.update(zip(declared.stash, stashed, strict=True))
    flow.reads = dict(tracker.reads)
    flow.shapes = {name: tuple(value.shape) for name, value in values.items() if isinstance(value, Tensor)}
    return flow


def _with_token(tracker: _Tracker, value: Any, token: str | None) -> Any:
    """The same value as new tensors that also carry ``token``."""
    if isinstance(value, (tuple, list)):
        return tuple(_with_token(tracker, item, token) for item in value)
    if not isinstance(value, Tensor):
        return value
    alias = value.detach().clone()
    tracker.mark(alias, tracker.sources(value) | ({token} if token else NOTHING))
    return alias


def _take_tokens(tracker: _Tracker, output: Any, tokens: set[str]) -> set[str]:
    """Which tokens reached a part or the output; none is left afterwards."""
    used = tokens & tracker.looked_at
    for part, sources in tracker.reads.items():
        used |= sources & tokens
        tracker.reads[part] = sources - tokens
    for tensor in _tensors(output):
        used |= tracker.sources(tensor) & tokens
        tracker.mark(tensor, tracker.sources(tensor) - tokens)
    return used


@contextmanager
def _watching(tracker: _Tracker, parts: dict[str, nn.Module]) -> Iterator[None]:
    """Tell the tracker in which part the interpreter is."""
    outside: list[str | None] = []

    def enter(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            outside.append(tracker.owner)
            tracker.owner = path

        return hook

    def leave(*_: Any) -> None:
        tracker.owner = outside.pop()

    handles = [module.register_forward_pre_hook(enter(path)) for path, module in parts.items()]
    handles += [module.register_forward_hook(leave) for module in parts.values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
