"""How users declare layers: DeepSpeed's specs plus the names a layer stashes and pops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.pipe import module as upstream

from deepspeed_pulse.errors import GraphError
from deepspeed_pulse.ir.graph import Graph, Layer

Names = str | Sequence[str]


def _names(names: Names) -> tuple[str, ...]:
    found: Any = (names,) if isinstance(names, str) else names
    if not isinstance(found, Sequence) or any(not isinstance(name, str) or not name for name in found):
        raise GraphError(f"stash and pop take a non-empty name or a sequence of names, found {names!r}")
    return tuple(found)


def _name(name: str | None) -> str | None:
    if name is not None and (not isinstance(name, str) or not name):
        raise GraphError(f"a layer's name: expected a non-empty word or None, found {name!r}")
    return name


def _module_class(typename: Any) -> Any:
    if not isinstance(typename, type) or not issubclass(typename, torch.nn.Module):
        raise GraphError(f"LayerSpec: expected a class of modules and the arguments to build one, found {typename!r}")
    return typename


class LayerSpec(upstream.LayerSpec):
    """DeepSpeed's ``LayerSpec`` with ``stash``, ``pop`` and ``layer_name``; all else goes to the module.

    A layer that pops is called ``forward(hidden, *popped)``; one that stashes returns
    ``(hidden, *stashed)``, both in the order declared.
    """

    reads_files = False
    """True for a layer whose ``build`` reads weights, but under ``torch.device("meta")`` does not."""

    def __init__(
        self,
        typename: type[torch.nn.Module],
        *module_args: Any,
        stash: Names = (),
        pop: Names = (),
        layer_name: str | None = None,
        **module_kwargs: Any,
    ) -> None:
        super().__init__(_module_class(typename), *module_args, **module_kwargs)
        self.stash, self.pop, self.layer_name = _names(stash), _names(pop), _name(layer_name)

    def coming(self) -> AbstractContextManager[None]:
        """Meanwhile it is built, behind those that came before it. For a layer that shares work with the next ones."""
        return nullcontext()


class TiedLayerSpec(upstream.TiedLayerSpec):
    """DeepSpeed's ``TiedLayerSpec`` with ``stash``, ``pop`` and ``layer_name``.

    With ``forward_fn`` the layer is called ``forward_fn(module, hidden, *popped)``.
    """

    def __init__(
        self,
        key: str,
        typename: type[torch.nn.Module],
        *module_args: Any,
        forward_fn: Callable[..., Any] | None = None,
        tied_weight_attr: str | list[str] = "weight",
        stash: Names = (),
        pop: Names = (),
        layer_name: str | None = None,
        **module_kwargs: Any,
    ) -> None:
        if not isinstance(key, str) or not key:
            raise GraphError(f"TiedLayerSpec: expected a name that layers with the same weights share, found {key!r}")
        if forward_fn is not None and not callable(forward_fn):
            raise GraphError(f"TiedLayerSpec {key!r}: forward_fn: expected a function or None, found {forward_fn!r}")
        typename = _module_class(typename)
        super().__init__(
            key, typename, *module_args, forward_fn=forward_fn, tied_weight_attr=tied_weight_attr, **module_kwargs
        )
        self.stash, self.pop, self.layer_name = _names(stash), _names(pop), _name(layer_name)


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A module or function together with its names; made by :func:`spec`."""

    layer: torch.nn.Module | Callable[..., Any]
    stash: tuple[str, ...]
    pop: tuple[str, ...]
    name: str | None


def spec(
    layer: torch.nn.Module | Callable[..., Any], *, stash: Names = (), pop: Names = (), name: str | None = None
) -> Declared:
    """Declare the names that a plain ``nn.Module`` or function stashes and pops."""
    if not callable(layer) or (isinstance(layer, type) and issubclass(layer, torch.nn.Module)):
        raise GraphError(f"spec() takes a module or a function, found {layer!r}")
    return Declared(layer=layer, stash=_names(stash), pop=_names(pop), name=_name(name))


def unwrap(layer: Any) -> Any:
    """What upstream's ``PipelineModule`` is given for a layer of the list."""
    return layer.layer if isinstance(layer, Declared) else layer


@contextmanager
def in_a_row(layers: Iterable[Any]) -> Iterator[None]:
    """Meanwhile these layers of the list are built, one after the other."""
    with ExitStack() as stack:
        for bare in map(unwrap, layers):
            if isinstance(bare, LayerSpec):
                stack.enter_context(bare.coming())
        yield


def describe(index: int, layer: Any) -> Layer:
    """Name, stash and pop of a layer of the list; the name falls back to ``INDEX.ClassName``."""
    given = layer.name if isinstance(layer, Declared) else getattr(layer, "layer_name", None)
    named = None if isinstance(layer, torch.nn.Module) else layer
    return Layer(
        name=given or f"{index}.{type_name(layer)}", stash=getattr(named, "stash", ()), pop=getattr(named, "pop", ())
    )


def type_name(layer: Any) -> str:
    """Name of a layer's class or function."""
    bare = unwrap(layer)
    if isinstance(bare, upstream.LayerSpec):
        return str(bare.typename.__name__)
    if isinstance(bare, torch.nn.Module):
        return type(bare).__name__
    return str(getattr(bare, "__name__", type(bare).__name__))


def loads_its_own_way(module: torch.nn.Module) -> bool:
    """It has a loading of its own, which may take other entries than torch's."""
    names = ("load_state_dict", "_load_from_state_dict")
    overridden = any(getattr(type(module), name) is not getattr(torch.nn.Module, name) for name in names)
    return overridden or bool(module._load_state_dict_pre_hooks)


def keys_not_loaded(module: torch.nn.Module) -> list[str]:
    """Of a state dict, what torch's loading does not know: constants of quantized weights (bitsandbytes), for one."""
    parts = [(f"{path}." if path else "", part) for path, part in module.named_modules(remove_duplicate=False)]
    own_way = tuple(start for start, part in parts if loads_its_own_way(part))
    known = {f"{start}{name}" for start, part in parts for name in (*part._parameters, *part._buffers, "_extra_state")}
    return [key for key in module.state_dict() if key not in known and not key.startswith(own_way)]


def graph_of(layers: Sequence[Any], first: int = 0) -> Graph:
    """The declarations of a layer list, numbered from ``first``; a GraphError where they do not fit together."""
    return Graph(layers=tuple(describe(index, layer) for index, layer in enumerate(layers, first)))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A layer list with a batch ``(inputs, labels)`` to try it on; tensors may be on the meta device.

    ``microbatch_size``: samples in the batch; None: the leading size of the first layer's input.
    """

    name: str
    layers: Sequence[Any]
    batch: Any
    microbatch_size: int | None = None

    @property
    def graph(self) -> Graph:
        return graph_of(self.layers)


class TiedCall:
    """A tied module with the ``forward_fn`` of one of its layers; saves and loads the module's state."""

    def __init__(self, module: torch.nn.Module, forward_fn: Callable[..., Any]) -> None:
        self.module, self._forward_fn = module, forward_fn

    def __call__(self, *args: Any) -> Any:
        return self._forward_fn(self.module, *args)

    def to(self, where: torch.device | torch.dtype) -> TiedCall:
        self.module.to(where)
        return self

    def parameters(self) -> Any:
        return self.module.parameters()

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> Any:
        return self.module.load_state_dict(state, strict=strict)
