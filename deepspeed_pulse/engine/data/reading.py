"""Which ranks of a pipeline read data, what of it they read, and that they read the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from deepspeed_pulse.engine.backbones import Head
from deepspeed_pulse.engine.collectives import decided_in_pipeline, raise_everywhere
from deepspeed_pulse.engine.data.agreement import (
    check_optimizer,
    check_something_trains,
    difference_in_data,
    same_data,
    who_has_data,
)
from deepspeed_pulse.engine.data.batches import (
    ShapeKeeper,
    StepBatches,
    check_iterator,
    entry_text,
    kind,
    warn_of_unread,
)
from deepspeed_pulse.engine.observation.watchdog import Watchdog
from deepspeed_pulse.engine.seat import Seat
from deepspeed_pulse.errors import BatchError
from deepspeed_pulse.ir.graph import Graph, NamedValue
from deepspeed_pulse.ir.plan import Plan, Route
from deepspeed_pulse.runtime.payload import can_travel

CHECKED_STEPS, CHECK_EVERY = 3, 100
"""Data is compared between ranks in the first steps, then now and then."""

SAME_DATA = (
    "data-parallel replica {} has read the same inputs, entries and labels as one before it: both train as one would, "
    "on fewer samples than the batch size says; give each its own: DistributedSampler(dataset, "
    "num_replicas=engine.grid.data_parallel_size, rank=engine.grid.data_parallel_id), noise and timesteps by "
    "engine.grid.data_parallel_id too"
)

MODES = ("train", "eval", "forward")
"""Kinds of step: training, evaluation with a loss, forward only. Each has its own shapes and readers of data."""


class Reading:
    """The data of a rank's steps: read by itself where it was given an iterator, else sent to it.

    Args:
        engine: draws batches from its iterator.
        watchdog: told while ranks wait for data.
        drawing: times the drawing of a batch.
    """

    batches: StepBatches
    """Of the step."""

    def __init__(
        self,
        engine: Any,
        seat: Seat,
        plan: Plan,
        watchdog: Watchdog,
        drawing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        module = engine.module
        self._engine, self._module, self._seat = engine, module, seat
        self._plan, self._watchdog, self._drawing = plan, watchdog, drawing
        self._first, self._last = plan.placement[0], plan.placement[-1]
        self._heads: tuple[Head, ...] = module.job.heads
        self._labels = {
            head.labels: plan.placement[stages[-1]]
            for head, stages in zip(self._heads, plan.placement.backbones, strict=True)
        }
        """By name, the rank that reads them."""
        self._names = [value.name for value in module.graph.batch_entries]
        self._data_names = [value.name for value in module.job.reading_graph.batch_entries]
        self._readers: dict[str, tuple[bool, ...]] = {}
        self._drawn: tuple[tuple[int, str, Any], StepBatches] | None = None
        """Data of a step that has not begun, and for which one it was drawn from what."""
        form = module.job.batch_form
        self._shapes = {
            mode: ShapeKeeper(
                form=form,
                dynamic=module.dynamic_shape,
                plain=None if mode == "train" else replace(form, graph=module.job.encoded_graph, made=()),
                made=() if module.frozen is None else module.frozen.results,
            )
            for mode in MODES
        }
        self._steps = dict.fromkeys(MODES, 0)
        self._is_encoded = dict.fromkeys(MODES, False)
        self._told_difference = self._told_same = False

    def problem_with_first(self, micro_batches: int, mode: str, ahead: StepBatches | None) -> Exception | None:
        """Draw the first microbatch of a step that is about to begin; what keeps this rank from it, if anything does.

        Ranks that read nothing can only be told. It is a StopIteration where data is over that was there before.
        ``ahead``: the step's data, where that was read during the one before.
        """
        iterator, is_new = self._engine.data_iterator, mode not in self._readers
        if not is_new and self._readers[mode][self._seat.rank] is (iterator is None):
            before, now = ("none", "one") if iterator is not None else ("one", "none")
            return BatchError(
                f"rank {self._engine.global_rank} was given {before} data iterator in the first step of its kind and "
                f"{now} now; give each rank the same kind of argument in every step"
            )
        if ahead is not None or iterator is None:
            return None
        self._mode = mode
        wanted = (micro_batches, mode, iterator)
        if self._drawn is None or self._drawn[0] != wanted:
            self._drawn = wanted, self._batches_of(micro_batches, self._steps[mode])
        try:
            check_iterator(iterator)
            first = self._drawn[1].first()
            is_first = self._seat.rank == self._first and self._seat.index == 0
            reads_all = self._module.job.conditioning is not None  # whatever an estimate is made of
            if is_new and first is not None and mode == "train" and is_first and not reads_all:
                warn_of_unread(first)
        except BatchError as found:
            self._drawn = None
            return BatchError(f"{self._where(mode)}: {found.text}", more=found.more)
        except Exception as found:  # whatever a loader raises
            self._drawn = None
            if not is_new or not isinstance(found, StopIteration):
                return found
            return BatchError(
                f"rank {self._engine.global_rank}: the data iterator is empty: expected the batches of at least one "
                "step"
            )
        return None

    def _where(self, mode: str) -> str:
        """Of the first microbatch of a step that is about to begin."""
        if mode == "train":
            return f"rank {self._engine.global_rank}, first microbatch of step {self._engine.global_steps + 1}"
        return f"rank {self._engine.global_rank}, first microbatch of evaluation {self._steps[mode] + 1}"

    def forget(self) -> None:
        """What was read for a step that did not come is not for the next one: the data may have been set back."""
        self._drawn = None

    def begin(self, micro_batches: int, mode: str, ahead: StepBatches | None) -> None:
        """Start a step. ``ahead``: as for :meth:`problem_with_first`."""
        self._mode = mode
        self._checking = self._is_checked(self._steps[mode])
        drawn = None if self._drawn is None else self._drawn[1]
        self._drawn = None
        self.batches = ahead or drawn or self._batches_of(micro_batches, self._steps[mode])

    def following(self, micro_batches: int) -> StepBatches:
        """The data of the next step of this kind."""
        return self._batches_of(micro_batches, self._steps[self._mode] + 1)

    @property
    def is_encoded(self) -> bool:
        """True for a kind of step whose data has what frozen parts would give."""
        return self._is_encoded[self._mode]

    @property
    def reads_labels(self) -> bool:
        """True where a loss function reads them."""
        return bool(self._reading_labels)

    @property
    def _reading_labels(self) -> list[Head]:
        """Backbones whose loss function reads labels."""
        computes = bool(self._engine._compute_loss)
        return [head for head in self._heads if computes and self._module.loss_function(head) is not None]

    def entries(self, graph: Graph) -> list[NamedValue]:
        """Batch entries that layers pop, and the labels where a loss function reads them."""
        labels = [NamedValue(name=h.labels, source=None, targets=(h.layers[-1],)) for h in self._reading_labels]
        return [*graph.batch_entries, *labels]

    def _is_checked(self, steps: int) -> bool:
        return self._mode == "train" and (steps < CHECKED_STEPS or steps % CHECK_EVERY == 0)

    def _batches_of(self, micro_batches: int, steps: int) -> StepBatches:
        """The data of the step after so many of its kind."""
        has_data = self._engine.data_iterator is not None
        return StepBatches(
            self._next_batch if has_data else None,
            micro_batches,
            self._shapes[self._mode].split,
            self._seat.device,
            list(dict.fromkeys((*self._names, *self._data_names))),
            self._entries_to_check() if has_data and self._is_checked(steps) else (),
            tuple(self._labels),
            checks_inputs=has_data and self._compares_replicas(steps),
        )

    def _compares_replicas(self, steps: int) -> bool:
        """In the first steps, until it was told."""
        first = self._mode == "train" and steps < CHECKED_STEPS
        return first and len(self._seat.pipelines) > 1 and not self._told_same

    def _next_batch(self) -> Any:
        """A generator that yields inside ``torch.no_grad()`` leaves it on for whoever draws: layers must not see it."""
        gradients = torch.set_grad_enabled(torch.is_grad_enabled())
        with self._watchdog.aside(), self._drawing(), gradients:
            return self._engine._next_batch()

    def agreed_readers(self) -> tuple[bool, ...]:
        """Which ranks read data. The first time of each mode, all ranks tell each other."""
        if self._mode in self._readers:
            return self._readers[self._mode]
        if self._mode == "train":
            check_optimizer(self._engine.optimizer)
            check_something_trains(self._module)
        readers = who_has_data(self._engine.data_iterator is not None, self._first, self._seat.pipelines)
        if len(self._heads) > 1 and not all(readers):
            raise BatchError(
                "several backbones begin on several ranks, so every rank reads data: pipeline rank "
                f"{readers.index(False)} was given none; pass data_iter on every rank"
            )
        if self._module.job.conditioning is not None and not all(readers):
            raise BatchError(
                "self_conditioning: estimates are made and read on several ranks, so every rank reads data: pipeline "
                f"rank {readers.index(False)} was given none; pass data_iter on every rank"
            )
        if self._module.frozen is not None:
            self._agree_on_encoding(readers)
        self._check_routed(readers)
        self._readers[self._mode] = readers
        return readers

    def _agree_on_encoding(self, readers: tuple[bool, ...]) -> None:
        if self._mode != "train":
            self._is_encoded[self._mode] = decided_in_pipeline(
                lambda: getattr(self.batches.first(), "is_encoded", False), self._first, self._seat
            )
        if not self.is_encoded and not all(readers):
            raise BatchError(
                f"frozen parts run on any rank, so every rank reads data: pipeline rank {readers.index(False)} was "
                "given none; pass the same data_iter on every rank, or evaluate on data that has the parts' results"
            )

    def agreed_shapes(self, micro_batches: int) -> list[int]:
        """What stands for the shapes of this step's microbatches; where they change, as the first rank draws them."""
        if not self._module.dynamic_shape:
            return [MODES.index(self._mode)] * micro_batches
        keys: list[int] = decided_in_pipeline(self.batches.draw_all, self._first, self._seat)
        self.batches.expect(keys)
        return keys

    def _check_routed(self, readers: tuple[bool, ...]) -> None:
        """What ranks without data read is sent to them, so it must be tensors."""
        routes = entry_routes(self._plan, self.entries(self._module.graph), readers)
        if not routes:
            return
        problem, first = None, self.batches.first()
        stuck = (route for route in routes if first is not None and not can_travel(first.value(route.name)))
        route = next(stuck, None)
        if first is not None and route is not None:
            problem = BatchError(
                f"{entry_text(route.name)} cannot be sent: expected a tensor or a tuple of tensors, found "
                f"{kind(first.value(route.name))}; pipeline rank {self._plan.placement[route.hops[0][1]]} reads it and "
                "was given no data: pass data_iter on every rank, or make it a tensor"
            )
        raise_everywhere(problem, "the first batch cannot be sent")

    def compare(self) -> None:
        """At the end of a step: in one that is checked, the ranks of a pipeline have read the same."""
        if self._checking and len(self._seat.ranks) > 1:
            names = [*self._data_names, *self._labels]
            sums = list(map(self.batches.checksums.get, names))
            found = difference_in_data(names, sums, first_rank=self._first, seat=self._seat)
            if found is not None:
                self._tell_difference(*found)
        if self._compares_replicas(self._steps[self._mode]):
            is_first = self._seat.rank == self._first
            sums = [self.batches.checksum_of_inputs, *self.batches.checksums.values()]
            self._tell_same(same_data(sums if is_first else None))
        self._steps[self._mode] += 1

    def _tell_difference(self, name: str, rank: int) -> None:
        """Labels of other data than the inputs are what upstream trains with too: a program of its keeps training."""
        problem = (
            f"step {self._steps[self._mode] + 1}: {entry_text(name)} of pipeline rank {rank} differ from those of the "
            "first pipeline rank; every rank of a pipeline must draw the same batches: seed noise, timesteps and "
            "shuffling by step and data-parallel index, or give data_iter to the first rank only"
        )
        if name not in self._labels or not self._module.job.keeps_cuts:
            raise BatchError(problem, more="data-differs")
        if not self._told_difference and self._seat.rank == self._last:
            print(f"pulse: warning: trained as upstream does, on the last rank's labels: {problem}", flush=True)
        self._told_difference = True

    def _tell_same(self, pipelines: Sequence[int]) -> None:
        """Of ``pipelines`` that train as others do, once."""
        if pipelines:
            self._told_same = True
            if self._engine.global_rank == 0:
                print(f"pulse: warning: {SAME_DATA.format(', '.join(map(str, pipelines)))}", flush=True)

    def _entries_to_check(self) -> list[str]:
        """What this rank reads of the batch: everything on the first rank."""
        if self._seat.rank == self._first:
            return [*self._data_names, *self._labels]
        mine = {index for index, _ in self._module.local_layers()}
        model = {v.name: mine & set(v.targets) for v in self._module.graph.batch_entries}
        # what frozen parts read, any rank may read
        read = [name for name in self._data_names if model.get(name, True)]
        return [*read, *(name for name, rank in self._labels.items() if rank == self._seat.rank)]


def entry_routes(plan: Plan, entries: Sequence[NamedValue], readers: tuple[bool, ...]) -> list[Route]:
    """Batch entries travel from the first rank, once to each rank that reads them and was given no data."""
    routes = []
    for entry in entries:
        first_read: dict[int, int] = {}
        for layer in entry.targets:
            stage = plan.stage_of(layer)
            first_read.setdefault(plan.placement[stage], stage)
        hops = tuple((0, stage) for rank, stage in first_read.items() if not readers[rank])
        if hops:
            routes.append(Route(name=entry.name, source_stage=0, hops=hops))
    return routes
