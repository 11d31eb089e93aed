"""The data of one step: drawn from this rank's iterator, split by name, checked."""

from __future__ import annotations

import hashlib
import warnings
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_pulse.engine.backbones import DEFAULT_INPUT, LABELS, Head, own_graph
from deepspeed_pulse.engine.rules import EntryRules
from deepspeed_pulse.errors import BatchError
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.runtime.payload import can_travel, is_dense, plainly

Rules = Sequence[EntryRules]


def flatten(inputs: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Entries of nested dicts by dotted name (``added_cond_kwargs.text_embeds``), in order; None stays.

    Raises a :class:`BatchError` where a key is no string, or two entries get one name.
    """
    found: dict[str, Any] = {}
    for key, value in inputs.items():
        if not isinstance(key, str):
            raise BatchError(f"expected names as keys of the inputs, found {key!r} in {prefix or 'the inputs'}")
        more = flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        twice = found.keys() & more.keys()
        if twice:
            raise BatchError(f"two entries of the batch are called {min(twice)!r}: once with a dot, once nested")
        found.update(more)
    return found


class SplitBatch:
    """One microbatch: the first layer's input, the named entries and the labels.

    Entries of nested dicts have dotted names; an entry that is None is absent. ``input_made``: the first layer's input
    is a frozen part's result, not in the data. ``rules``: of the models that the layers were made of.
    """

    is_encoded = False
    """True where the data has what frozen parts would give."""
    input_name: str | None = None
    """Of the first layer's input, where inputs are a dict that has it."""

    def __init__(
        self, batch: Any, graph: Graph, input_name: str, *, input_made: bool = False, rules: Sequence[EntryRules] = ()
    ) -> None:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise BatchError(
                f"expected a batch (inputs, labels), found {kind(batch)}; let the data iterator yield pairs, with "
                "None for labels that nothing reads"
            )
        inputs, self.labels = batch
        self.entries: Mapping[str, Any] = {}
        if isinstance(inputs, Mapping):
            named = flatten(inputs)
            given = {name: value for name, value in named.items() if value is not None}
            if not given:
                found = f"only None: {', '.join(named)}" if named else "an empty dict"
                raise BatchError(f"expected inputs with at least one entry, found {found}")
            if input_name not in named and input_name != DEFAULT_INPUT and not input_made:
                raise BatchError(
                    f"expected the first layer's input {input_name!r} among the batch's entries, found "
                    f"{', '.join(sorted(named))}; name one of them with PipelineModule(..., input=)",
                    more="first-input",
                )
            first = input_name if input_name in named or input_made else next(iter(given))
            if first not in given and not input_made:
                raise BatchError(f"expected the first layer's input to be a tensor or tensors, found {first!r}: None")
            inputs = None if input_made else given.pop(first)
            self.input_name = None if input_made else first
            self.entries = given
            self._check_names(graph, first, [name for name, value in named.items() if value is None])
            for each in rules:
                self.entries = each.apply(self.entries)
        elif graph.batch_entries:
            self._complain(graph, f"the inputs are {kind(inputs)}, not a dict with named entries")
        self.inputs: Any = None if input_made else _tensors(inputs)
        self._read = [value.name for value in graph.batch_entries]

    def _check_names(self, graph: Graph, first: str, absent: Sequence[str]) -> None:
        stashed = {name for layer in graph.layers for name in layer.stash}
        for name in self.entries:
            if name in stashed:
                raise BatchError(
                    f"the batch has an entry {name!r}, and layer {graph.values_source(name)} stashes a value of that "
                    "name; rename one of them"
                )
        missing = [v for v in graph.batch_entries if v.name not in self.entries]
        if missing:
            have = ", ".join(sorted(self.entries)) or "none"
            none = f"; None: {', '.join(absent)}" if absent else ""
            found = f"the batch's entries are: {have} (and {first!r}, the first layer's input{none})"
            self._complain(graph, found, missing)

    @staticmethod
    def _complain(graph: Graph, found: str, missing: Sequence[Any] | None = None) -> None:
        value = (missing or graph.batch_entries)[0]
        layer = graph.layers[value.targets[0]].name
        raise BatchError(
            f"layer {layer} pops {value.name!r}, which no layer stashes, so the batch must have it; {found}. "
            "Stash it in an earlier layer, add it to the batch, or correct the name"
        )

    def shapes(self) -> dict[str, str]:
        """Readable shape and dtype of everything in the batch that is read."""
        found = {"inputs": _shape(self.inputs), "labels": _shape(self.labels)}
        found.update({f"entry {name!r}": _shape(self.entries[name]) for name in self._read})
        return found

    def key(self) -> int:
        """A number that stands for these shapes, and for whole numbers and words, of which layers may make shapes."""
        plain = {name: self.entries[name] for name in self._read if isinstance(self.entries[name], (int, str))}
        text = repr((self.shapes(), plain))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    def unread(self) -> list[str]:
        """Entries that no layer pops."""
        return [name for name in self.entries if name not in self._read]

    def value(self, name: str) -> Any:
        """An entry, or the labels."""
        return self.labels if name == LABELS else self.entries[name]

    def input_of(self, backbone: int) -> Any:
        """What a backbone's first layer reads."""
        return self.inputs

    def part(self, backbone: int) -> SplitBatch:
        """What is a backbone's own."""
        return self


class JointBatch(SplitBatch):
    """One microbatch of several backbones: ``(inputs, labels)``, each a dict by backbone.

    ``graph``: of all of them; ``made``: inputs that frozen parts make; ``rules``: of each backbone.
    """

    def __init__(
        self, batch: Any, graph: Graph, heads: Sequence[Head], made: Collection[str], rules: Sequence[Rules]
    ) -> None:
        given, labels = _by_backbone(batch, heads)
        self._parts = dict[str, SplitBatch]()
        for head, own in zip(heads, rules, strict=True):
            name, part = str(head.name), own_graph(graph, head)
            try:
                self._parts[name] = SplitBatch(
                    (given[name], labels[name]), part, head.input, input_made=head.value(head.input) in made, rules=own
                )
            except BatchError as problem:
                raise BatchError(f"backbone {name}: {problem}{_whose(graph, head, heads, part)}") from None
        parts = list(zip(heads, self._parts.values(), strict=True))
        self.inputs = [part.inputs for _, part in parts]
        self.entries = {head.value(name): value for head, part in parts for name, value in part.entries.items()}
        self.labels = {head.labels: part.labels for head, part in parts}
        self._read = [value.name for value in graph.batch_entries]

    def shapes(self) -> dict[str, str]:
        return {f"{name}: {what}": text for name, part in self._parts.items() for what, text in part.shapes().items()}

    def value(self, name: str) -> Any:
        return self.labels[name] if name in self.labels else self.entries[name]

    def input_of(self, backbone: int) -> Any:
        return self.inputs[backbone]

    def part(self, backbone: int) -> SplitBatch:
        return list(self._parts.values())[backbone]


def _by_backbone(batch: Any, heads: Sequence[Head]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Inputs and labels of every backbone; None in place of labels means none for any."""
    names = [str(head.name) for head in heads]
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise BatchError(
            f"expected a batch (inputs, labels), each a dict by backbone ({', '.join(names)}), found {kind(batch)}"
        )
    inputs, labels = batch[0], dict.fromkeys(names) if batch[1] is None else batch[1]
    for what, given in (("inputs", inputs), ("labels", labels)):
        if not isinstance(given, Mapping) or set(given) != set(names):
            found = f"a dict of {', '.join(map(repr, given))}" if isinstance(given, Mapping) else kind(given)
            raise BatchError(
                f"{what}: expected a dict with a part for each backbone ({', '.join(names)}), found {found}"
            )
    return inputs, labels


def _whose(graph: Graph, head: Head, heads: Sequence[Head], part: Graph) -> str:
    """A hint where what a backbone lacks is another's value."""
    stashed = {name: layer for layer in graph.layers for name in layer.stash}
    for value in part.batch_entries:
        for other in heads:
            if other is not head and other.value(value.name) in stashed:
                return (
                    f". Backbone {other.name} stashes a value {value.name!r}, but backbones are independent: none "
                    "reads another's output in the same step"
                )
    return ""


@dataclass(frozen=True, kw_only=True)
class BatchForm:
    """What the batches of a job look like.

    Attributes:
        graph: of what reads them: layers, and frozen parts before them.
        heads: of the backbones.
        made: inputs of first layers that frozen parts make.
        rules: of each backbone, those of the models that its layers were made of.
    """

    graph: Graph
    heads: Sequence[Head]
    made: Collection[str] = ()
    rules: Sequence[Rules] = ((),)

    def split(self, batch: Any) -> SplitBatch:
        """A BatchError says what a batch lacks."""
        head = self.heads[0]
        if head.name is not None:
            return JointBatch(batch, self.graph, self.heads, self.made, self.rules)
        return SplitBatch(batch, self.graph, head.input, input_made=head.input in self.made, rules=self.rules[0])

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(head.labels for head in self.heads)


class StepBatches:
    """Microbatches of one step, drawn when first asked for and freed when released.

    Args:
        draw: next batch of this rank's iterator, or None when the rank was given none.
        num_microbatches: how many are drawn in all, read or not.
        split: makes a :class:`SplitBatch` and checks its shapes.
        device: where tensors are moved when they are read.
        entry_names: batch entries that layers pop.
        checked_entries: those whose checksum is taken.
        checks_inputs: that of what first layers read is taken, too.
        label_names: of the labels of every backbone.
    """

    def __init__(
        self,
        draw: Callable[[], Any] | None,
        num_microbatches: int,
        split: Callable[[Any], SplitBatch],
        device: torch.device,
        entry_names: Sequence[str],
        checked_entries: Sequence[str] = (),
        label_names: Sequence[str] = (LABELS,),
        *,
        checks_inputs: bool = False,
    ) -> None:
        self._draw, self._num, self._split, self._device = draw, num_microbatches, split, device
        self._entry_names = (*entry_names, *label_names)
        self._held: dict[int, SplitBatch] = {}
        self._drawn, self._ended = 0, False
        self._keys: Sequence[int] | None = None
        self.values: dict[tuple[str, int], Any] = {}
        """By name and microbatch, results of frozen parts that this rank reads, and entries on the device.

        Several layers may read an entry, and it goes there once.
        """
        self.on_release: Callable[[int], None] = lambda microbatch: None
        """Called with each microbatch whose data is needed no more."""
        self.is_encoded = False
        self.input_parts: Mapping[int, str] = {}
        """By backbone, the frozen part that makes its first layer's input."""
        self.checksums = dict.fromkeys(checked_entries, 0)
        self._checks_inputs, self.checksum_of_inputs = checks_inputs, 0

    def _get(self, microbatch: int) -> SplitBatch:
        while self._drawn <= microbatch:
            self._next()
        return self._held[microbatch]

    def _next(self) -> None:
        assert self._draw is not None
        try:
            drawn = self._draw()
        except StopIteration:
            self._ended = True
            if self._drawn == 0:
                raise
            raise BatchError(
                f"the data iterator ended after {self._drawn} of {self._num} microbatches; wrap the loader in "
                "deepspeed.utils.RepeatingLoader, or stop before the incomplete step"
            ) from None
        batch = self._held[self._drawn] = self._split(drawn)
        self._check_key(self._drawn)
        self._drawn += 1
        for name, checksum in self.checksums.items():
            self.checksums[name] = _checksum(batch.value(name), checksum)
        if self._checks_inputs:
            self.checksum_of_inputs = _checksum(batch.inputs, self.checksum_of_inputs)

    def first(self) -> SplitBatch | None:
        """The first microbatch, drawn if need be; None without an iterator."""
        return None if self._draw is None else self._get(0)

    def hold_all(self) -> None:
        """Draw every microbatch: what is drawn from here on belongs to the next step."""
        self._get(self._num - 1)

    def are_whole(self) -> bool:
        """Whether the data lasts for this step; draws every microbatch."""
        try:
            self.hold_all()
        except (StopIteration, BatchError):
            if not self._ended:
                raise
        return not self._ended

    def hold(self) -> None:
        """:meth:`hold_all`, where there is an iterator: the next step reads some of it."""
        if self._draw is not None:
            self.hold_all()

    def draw_all(self) -> list[int]:
        """Draw every microbatch; what stands for the shapes of each."""
        self.hold_all()
        return [self._held[m].key() for m in range(self._num)]

    def expect(self, keys: Sequence[int]) -> None:
        """Refuse batches, drawn already or not, whose shapes are not those the first rank of the pipeline has."""
        self._keys = keys
        for microbatch in self._held:
            self._check_key(microbatch)

    def _check_key(self, microbatch: int) -> None:
        batch = self._held[microbatch]
        if self._keys is not None and batch.key() != self._keys[microbatch]:
            raise BatchError(
                f"microbatch {microbatch}: expected the shapes that the first pipeline rank has drawn, found others "
                f"({'; '.join(f'{name} {shape}' for name, shape in batch.shapes().items())}); every rank of a pipeline "
                "must draw the same batches: choose buckets by step and data-parallel index"
            )

    def inputs(self, microbatch: int, backbone: int) -> Any:
        if backbone in self.input_parts:
            return self.values[self.input_parts[backbone], microbatch]
        return self._move(self._get(microbatch).input_of(backbone))

    def entry(self, name: str, microbatch: int) -> Any:
        if (name, microbatch) not in self.values:
            self.values[name, microbatch] = self.data_entry(name, microbatch)
        return self.values[name, microbatch]

    def data_entry(self, name: str, microbatch: int) -> Any:
        """An entry of the data, for who reads it once."""
        return self._move(self._get(microbatch).value(name))

    def part(self, microbatch: int, backbone: int) -> SplitBatch:
        """A backbone's own part of a microbatch."""
        return self._get(microbatch).part(backbone)

    def moved(self, value: Any) -> Any:
        """On the device."""
        return self._move(value)

    def has_entry(self, name: str) -> bool:
        return self._draw is not None and name in self._entry_names

    def release(self, microbatch: int) -> None:
        self._held.pop(microbatch, None)
        for key in [key for key in self.values if key[1] == microbatch]:
            del self.values[key]
        self.on_release(microbatch)

    def finish(self) -> None:
        """Draw what this rank did not read, so that all iterators advance alike."""
        while self._draw is not None and self._drawn < self._num:
            self._next()
            self._held.pop(self._drawn - 1)

    def _move(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            found = _on(self._device, value.detach())
            # set by a script for reentrant checkpoints in first layers; whatever made other tensors is none of ours
            return found.requires_grad_() if value.requires_grad and value.is_leaf else found
        if isinstance(value, (tuple, list)):
            return tuple(self._move(item) for item in value)
        if isinstance(value, Mapping):
            return {name: self._move(item) for name, item in value.items()}
        return value


@dataclass
class ShapeKeeper:
    """Splits batches; unless shapes may change, remembers the first batch's and refuses others.

    Args:
        form: of the batches.
        plain: the same without frozen parts, for batches that have what the parts ``made`` would give.
    """

    form: BatchForm
    dynamic: bool
    plain: BatchForm | None = None
    made: Sequence[str] = ()
    _first: dict[str, str] | None = field(default=None, init=False)
    _first_is_encoded: bool = field(default=False, init=False)

    def _has_results(self, batch: Any) -> bool:
        """True for a batch that has what layers read of the frozen parts."""
        pair = isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[0], Mapping)
        return bool(self.made) and pair and set(self.made) <= flatten(batch[0]).keys()

    def split(self, batch: Any) -> SplitBatch:
        if self.plain is not None and self._has_results(batch):
            found = self.plain.split(batch)
            found.is_encoded = True
        else:
            found = self.form.split(batch)
        if self.dynamic:
            return found
        shapes = found.shapes()
        if self._first is None:
            self._first, self._first_is_encoded = shapes, found.is_encoded
        if found.is_encoded is not self._first_is_encoded:
            kinds = ("raw data", "the results of the frozen parts")
            before, now = kinds[self._first_is_encoded], kinds[found.is_encoded]
            raise BatchError(
                f"expected a batch with {before} as the first, found {now}; give one kind to all evaluations"
            )
        if shapes != self._first:
            advice = "" if self.made else "for shapes that change pass PipelineModule(..., dynamic_shape=True); else "
            name = next(n for n in {**self._first, **shapes} if self._first.get(n) != shapes.get(n))
            raise BatchError(
                f"batch {name}: expected {self._first.get(name, 'nothing')} as in the first batch, found "
                f"{shapes.get(name, 'nothing')}; {advice}use drop_last=True"
            )
        return found


def warn_of_unread(batch: SplitBatch) -> None:
    """Say which entries go nowhere: data of a script's own, or a name that a layer was meant to pop."""
    if batch.unread():
        warnings.warn(f"no layer pops these entries of the batch: {', '.join(batch.unread())}", stacklevel=2)


def check_iterator(data: Any) -> None:
    """A loader is no iterator: each step would begin it anew, if it could be drawn from at all."""
    if data is not None and not hasattr(data, "__next__"):
        raise BatchError(
            f"expected an iterator of batches, found {kind(data)}; pass iter(deepspeed.utils.RepeatingLoader(loader))"
        )


def _tensors(inputs: Any) -> Any:
    if not can_travel(inputs):
        raise BatchError(f"expected the first layer's input to be a tensor or a tuple of tensors, found {kind(inputs)}")
    return inputs if isinstance(inputs, torch.Tensor) else tuple(inputs)


def entry_text(name: str) -> str:
    """A batch entry, or the labels, in words."""
    if name.endswith(LABELS):
        backbone = name.removesuffix(LABELS).removesuffix(".")
        return f"the labels of backbone {backbone}" if backbone else "the labels"
    return f"the values of batch entry {name!r}"


def kind(value: Any) -> str:
    """What a value is, with its article, for messages."""
    if value is None:
        return "None"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on a device, without the host waiting: it waits where it copies from pages that may be swapped out."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    accelerator = get_accelerator()
    if not accelerator.is_pinned(tensor):
        if tensor.layout is torch.strided and not is_dense(tensor):  # an expanded view: pinning writes by its strides
            tensor = tensor.contiguous()
        tensor = accelerator.pin_memory(tensor)
    return tensor.to(device, non_blocking=True)


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_shape(item) for item in value) + ")"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_shape(item)}" for name, item in value.items()) + "}"
    return type(value).__name__


_TELLING = (str, bytes, int, float, complex, type(None), torch.dtype, np.ndarray, np.generic)
"""What is written alike by every process that has the same."""


def _checksum(value: Any, start: int) -> int:
    if isinstance(value, torch.Tensor):
        flat = plainly(value.detach().cpu()).reshape(-1)
        return zlib.crc32(flat.view(torch.uint8).numpy().data, start) if flat.numel() else start
    if isinstance(value, Mapping):
        value = [item for pair in value.items() for item in pair]
    if isinstance(value, (tuple, list)):
        for item in value:
            start = _checksum(item, start)
        return start
    # other objects may tell their address
    told = repr(value) if isinstance(value, _TELLING) else type(value).__qualname__
    return zlib.crc32(told.encode(), start)
