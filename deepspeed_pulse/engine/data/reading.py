"""Which ranks of a pipeline read data, what of it they read, and that they read the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_pulse.engine.data.agreement import (
    check_something_trains,
    difference_in_data,
    raise_everywhere,
    told_by_first,
    who_has_data,
)
from deepspeed_pulse.engine.data.batches import (
    LABELS,
    ShapeKeeper,
    StepBatches,
    can_travel,
    check_iterator,
    entry_text,
    kind,
    warn_of_unread,
)
from deepspeed_pulse.engine.gradients.placeholders import is_placeholder
from deepspeed_pulse.errors import BatchError
from deepspeed_pulse.ir.graph import Graph, NamedValue
from deepspeed_pulse.ir.plan import Plan, Route

CHECKED_STEPS, CHECK_EVERY = 3, 100
"""Data is compared between ranks in the first steps, then now and then."""

MODES = ("train", "eval", "forward")
"""Kinds of step: training, evaluation with a loss, forward only. Each has its own shapes and readers of data."""


class ReadingEngine(PipelineEngine):
    """``PipelineEngine`` whose ranks may each read data, or be sent what they need of it."""

    _plan: Plan
    _breakdown: Any
    _watchdog: Any
    _compute_loss: bool
    _told_difference = False

    def _prepare_reading(self) -> None:
        module = self.module
        self._names = [value.name for value in module.graph.batch_entries]
        self._data_names = [value.name for value in module.job.reading_graph.batch_entries]
        self._pipelines = self.grid.topology().get_axis_comm_lists("pipe")
        self._readers: dict[str, tuple[bool, ...]] = {}
        self._shapes = {
            mode: ShapeKeeper(
                module.job.reading_graph,
                module.input_name,
                dynamic=module.dynamic_shape,
                rules=module.job.entry_rules,
                input_made=module.frozen is not None and module.frozen.makes_input,
                plain=None if mode == "train" else module.graph,
                made=() if module.frozen is None else module.frozen.names,
            )
            for mode in MODES
        }
        self._steps = dict.fromkeys(MODES, 0)
        self._is_encoded = dict.fromkeys(MODES, False)
        """Kinds of step whose data has what frozen parts would give."""

    def set_dataloader(self, loader: Any) -> None:
        """Every rank reads its own data."""
        self.training_dataloader = loader
        self.data_iterator = iter(loader)

    def set_dataiterator(self, iterator: Any) -> None:
        """Every rank that is given an iterator draws from it."""
        self.training_dataloader = None
        self.data_iterator = iterator

    def _begin_reading(self, micro_batches: int, mode: str) -> None:
        self._checking = self._is_checked(mode, self._steps[mode])
        self._batches = self._step_batches(micro_batches, mode, self._steps[mode])

    def _is_checked(self, mode: str, steps: int) -> bool:
        return mode == "train" and (steps < CHECKED_STEPS or steps % CHECK_EVERY == 0)

    def _step_batches(self, micro_batches: int, mode: str, steps: int) -> StepBatches:
        """The data of the step after so many of its kind."""
        checked = self._is_checked(mode, steps) and self.data_iterator is not None
        return StepBatches(
            None if self.data_iterator is None else self._timed_next_batch,
            micro_batches,
            self._shapes[mode].split,
            torch.device(self.device),
            [*self._names, *(name for name in self._data_names if name not in self._names)],
            self._entries_to_check() if checked else (),
        )

    def _timed_next_batch(self) -> Any:
        """A generator that yields inside ``torch.no_grad()`` leaves it on for whoever draws: layers must not see it."""
        gradients = torch.set_grad_enabled(torch.is_grad_enabled())
        with self._watchdog.aside("the data loader"), self._breakdown.drawing(), gradients:
            return self._next_batch()

    def _agree_on_data(self, mode: str) -> tuple[bool, ...]:
        """Once per mode: all ranks look at their first batch, and learn who reads data."""
        has_data = self.data_iterator is not None
        if mode in self._readers:
            if self._readers[mode][self.stage_id] != has_data:
                before, now = ("one", "none") if not has_data else ("none", "one")
                raise BatchError(
                    f"pipeline rank {self.stage_id} was given {before} data iterator in the first step and {now} now; "
                    "give each rank the same kind of argument in every step"
                )
            if not self.module.dynamic_shape:
                self._batches.first()
            return self._readers[mode]
        problem: Exception | None = None
        try:
            check_iterator(self.data_iterator)
            first = self._batches.first()
            if first is not None and mode == "train" and self.is_first_stage() and self.grid.data_parallel_id == 0:
                warn_of_unread(first)
        except StopIteration:
            problem = BatchError(
                f"rank {self.global_rank}: the data iterator is empty: expected the batches of at least one step"
            )
        except Exception as found:  # whatever a loader raises
            problem = found
        self._watchdog.go_on("the start of a step: waiting for all ranks to have their first batch", meets=True)
        raise_everywhere(problem, "the first batch cannot be drawn", dist.get_world_size())
        if mode == "train":
            ours = (p for name, p in self.module.named_parameters() if not is_placeholder(name))
            check_something_trains(ours, dist.get_world_size())
        readers = who_has_data(has_data, self._plan.placement[0], self._pipelines)
        if self.module.frozen is not None and mode != "train":
            self._is_encoded[mode] = told_by_first(
                self._has_results if self.is_first_stage() else None,
                self.grid.pp_group[self._plan.placement[0]],
                self.grid.get_pipe_parallel_group() if self.num_stages > 1 else None,
            )
        if self.module.frozen is not None and not self._is_encoded[mode] and not all(readers):
            raise BatchError(
                f"frozen parts run on any rank, so every rank reads data: pipeline rank {readers.index(False)} was "
                "given none; pass the same data_iter on every rank, or evaluate on data that has the parts' results"
            )
        self._check_routed(readers)
        self._readers[mode] = readers
        return readers

    def _has_results(self) -> bool:
        first = self._batches.first()
        return first is not None and first.is_encoded

    def _agree_on_shapes(self) -> list[int]:
        """What stands for the shapes of this step's microbatches, as the first rank draws them."""
        keys: list[int] = told_by_first(
            self._batches.draw_all if self.is_first_stage() else None,
            self.grid.pp_group[self._plan.placement[0]],
            self.grid.get_pipe_parallel_group() if self.num_stages > 1 else None,
        )
        self._batches.expect(keys)
        return keys

    def _check_routed(self, readers: tuple[bool, ...]) -> None:
        """What ranks without data read is sent to them, so it must be tensors."""
        routes = entry_routes(self._plan, self._entries(self.module.graph), readers)
        if not routes:
            return
        problem: Exception | None = None
        first = self._batches.first()
        for route in routes if first is not None else ():
            value = first.value(route.name)
            if not can_travel(value) and problem is None:
                rank = self._plan.placement[route.hops[0][1]]
                problem = BatchError(
                    f"{entry_text(route.name)} cannot be sent: expected a tensor or a tuple of tensors, found "
                    f"{kind(value)}; pipeline rank {rank} reads it and was given no data: pass data_iter on every "
                    "rank, or make it a tensor"
                )
        raise_everywhere(problem, "the first batch cannot be sent", dist.get_world_size())

    @property
    def _reads_labels(self) -> bool:
        return self.module.loss_fn is not None and self._compute_loss

    def _entries(self, graph: Graph) -> list[NamedValue]:
        """Batch entries that layers pop, and the labels where a loss function reads them."""
        return [*graph.batch_entries, *([_labels(graph)] if self._reads_labels else [])]

    def _compare_data(self, mode: str) -> None:
        """At the end of a step that is checked: the ranks of a pipeline have read the same."""
        if self._checking and self.num_stages > 1:
            names = self._all_checked()
            mine = self._batches.checksums
            found = difference_in_data(
                names,
                [mine.get(name) for name in names],
                first_rank=self._plan.placement[0],
                group=self.grid.get_pipe_parallel_group(),
                size=self.num_stages,
                device=torch.device(self.device),
            )
            if found is not None:
                self._tell_difference(*found, step=self._steps[mode] + 1)
        self._steps[mode] += 1

    def _tell_difference(self, name: str, rank: int, *, step: int) -> None:
        """Labels of other data than the inputs are what upstream trains with too: a program of its keeps training."""
        problem = (
            f"step {step}: {entry_text(name)} of pipeline rank {rank} differ from those of the first pipeline rank; "
            "every rank of a pipeline must draw the same batches: seed noise, timesteps and shuffling by step and "
            "data-parallel index, or give data_iter to the first rank only"
        )
        if name != LABELS or not self.module.job.keeps_cuts:
            raise BatchError(problem)
        if not self._told_difference and self.is_last_stage():
            print(f"pulse: warning: trained as upstream does, on the last rank's labels: {problem}", flush=True)
        self._told_difference = True

    def _all_checked(self) -> list[str]:
        return [*self._data_names, LABELS]

    def _entries_to_check(self) -> list[str]:
        """What this rank reads of the batch: everything on the first rank."""
        if self.is_first_stage():
            return self._all_checked()
        mine, graph = set(self.module._local_layers), self.module.graph
        model = {v.name: mine & set(v.targets) for v in graph.batch_entries}
        # what frozen parts read, any rank may read
        read = [name for name in self._data_names if model.get(name, True)]
        return [*read, LABELS] if self.is_last_stage() else read


def _labels(graph: Any) -> NamedValue:
    return NamedValue(name=LABELS, source=None, targets=(len(graph.layers) - 1,))


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
