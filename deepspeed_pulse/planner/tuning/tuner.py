"""One job's choices, bounded, planned and simulated, the most promising first."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from deepspeed_pulse.errors import ConfigError, InfeasibleError
from deepspeed_pulse.ir.choice import Choice, Trial, Verdict, may_step_apart
from deepspeed_pulse.ir.communicators import fewest_bytes
from deepspeed_pulse.ir.layout import Layout
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.ir.units import gigabytes
from deepspeed_pulse.planner.bounds import lower_bound_ms
from deepspeed_pulse.planner.cost import optimizer_ms, optimizer_shards, state_bytes, step_bytes
from deepspeed_pulse.planner.ideal import ideal_ms
from deepspeed_pulse.planner.job import UNLIMITED_BYTES, SearchOptions
from deepspeed_pulse.planner.make import MOST_FORWARDS, cuts, make_plan, rival
from deepspeed_pulse.planner.making.maker import TooSlow, are_few
from deepspeed_pulse.planner.making.ordered import ordered
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.recompute import cheapest_first
from deepspeed_pulse.planner.reduction import gathered_share, least_reduction_ms, summed_share
from deepspeed_pulse.planner.schedules.heuristics import GENERATORS, halves_tried
from deepspeed_pulse.planner.tuning.open_job import OpenJob

Progress = Callable[[int, int, float], None]
"""Told how many choices are decided, how many there are, and the most samples/s so far."""

_EXACT = 4
"""So many of the best are simulated; what cannot be among them is left out by its bound. Of finer stages, the best."""

_CONTENDERS = 3
"""So many of the best are searched for better orders, and as many of several waves or rounds for better cuts."""

_WORTH_CUTTING = 0.001
"""Of the best step, what other cuts must gain."""

_SHARED = 1 / 3
"""Of the time to search, what they share; the rest is for the one that is best then."""

_NO_GAIN = "fits with ZeRO stage 0, which gathers no weights at the end of a step"
_WORTH_HIDING = 0.05
"""Of a step: what one rank gains by several stages must exceed what their actions cost beyond the plan."""

_ALIKE = 0.03
"""Of a step: choices that close are taken for equally fast where hosts send. Messages and sums take cores from the work
there, more than each message's own cost, and plans know nothing of that."""

_WORTH_MORE = 0.01
"""Of a step: what memory must cost for loops of more rounds to be tried."""


class Tuner:
    """One job's choices and what is known of them so far.

    ``most_seconds``: after which no other choice is tried, once one is planned.
    """

    def __init__(self, job: OpenJob, most_seconds: float = math.inf) -> None:
        self._most_seconds, self._until = most_seconds, time.monotonic() + most_seconds
        self.job, self.sizes, self.given = job, job.sizes, job.given
        self._steps: list[float] = []
        self._cuts: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._kept: float = _EXACT
        self._decided = 0
        self._free_ms = math.inf
        """The shortest step without regard to memory."""

    def run(self, *, exhaustive: bool, progress: Progress | None) -> list[Trial]:
        """Every choice tried, those with the shortest bound first."""
        self._kept = math.inf if exhaustive else _EXACT
        trials: list[Trial] = []
        self._try(self.families(), trials, progress)
        if not exhaustive:
            self._kept = 1
        if _are_open(self.given.waves):
            self._try_more(self.given.waves[-1], False, trials, progress)
        if _are_open(self.given.loops) and self._memory_costs_time:
            self._try_more(self.given.loops[-1], True, trials, progress)
        return trials if self._is_late else self._cut_anew(trials)

    @property
    def _is_late(self) -> bool:
        """Others wait for an answer, and there is one. They do so by the clock, whatever else the processor does."""
        return bool(self._steps) and time.monotonic() > self._until

    def _cut_anew(self, trials: list[Trial]) -> list[Trial]:
        """Choices of several waves or rounds share cuts that do not count fill. The most promising get their own."""
        best = min(self._steps, default=math.inf)
        several = [
            number
            for number, trial in enumerate(trials)
            if _several(trial.choice) and trial.samples_per_second and self._ideal_ms(trial.choice) < best
        ]
        several.sort(key=lambda number: -(trials[number].samples_per_second or 0.0))
        for number in several[:_CONTENDERS]:
            choice, within_ms = trials[number].choice, (1 - _WORTH_CUTTING) * min(self._steps)
            found = rival(self.job.chosen(choice), self._options(choice), within_ms)
            if found is not None:
                trials[number] = _success(choice, found)
                self._steps.append(found.figures.step_ms)
        return trials

    def _try_more(self, most: int, loop: bool, trials: list[Trial], progress: Progress | None) -> None:
        """More waves or rounds than those that are given, one more at a time, as long as that makes it faster."""
        before = math.inf
        while min(self._steps, default=math.inf) < before:
            before, most = min(self._steps), most + 1
            self._try(self._families(partial(self._finer_shapes, most, loop)), trials, progress)

    def _try(self, families: Iterable[Choice], trials: list[Trial], progress: Progress | None) -> None:
        """Add what comes of more families. The first, one for each P, are quick to cut: then bounds exclude more."""
        apart = (found for family in families for found in self._apart(family))
        promising = sorted(apart, key=lambda found: (self._likely_ms(found[0]), found[0].pipeline_ranks))
        firsts: dict[int, tuple[Choice, list[Choice]]] = {}
        for found in promising:
            if not _several(found[0]):
                firsts.setdefault(found[0].pipeline_ranks, found)
        first = list(firsts.values())[:_EXACT]
        count = self._decided + len(promising)
        for family, stages in first + [found for found in promising if found not in first]:
            trials += self._untried(stages) if self._is_late else self._family(family, stages)
            self._decided += 1
            if progress is not None:
                best = max((t.samples_per_second or 0.0 for t in trials if t.plan), default=0.0)
                progress(self._decided, count, best)

    def families(self) -> Iterator[Choice]:
        """Choices that differ in more than the ZeRO stage.

        Raises:
            ConfigError: there are none.
        """
        found = False
        for family in self._families(self._shapes):
            found = True
            yield family
        if not found:
            raise self._nothing_is_tried()

    def _families(self, shapes: Callable[[int, int], list[tuple[int, bool]]]) -> Iterator[Choice]:
        for ranks in (n for n in range(1, self.job.world + 1) if self.job.world % n == 0):
            group = self.job.world // ranks
            for size in self._sizes(ranks, group):
                microbatches = self.job.global_batch // (group * size)
                for (waves, loop), layout in itertools.product(shapes(ranks, microbatches), self._layouts(ranks)):
                    choice = Choice(
                        pipeline_ranks=ranks,
                        data_parallel=group,
                        waves=waves,
                        microbatch_size=size,
                        microbatches=microbatches,
                        layout=layout,
                        loop=loop,
                    )
                    # One rank has several stages only to reduce later ones' gradients while it works on the earlier.
                    if (
                        ranks > 1
                        or waves == self._shapes(ranks, microbatches)[0][0]
                        or self._reduction_ms(choice) > _WORTH_HIDING * self._ideal_ms(choice)
                    ):
                        yield choice

    def least_size(self, choice: Choice) -> int:
        """The smallest microbatches that the choice's ranks could run."""
        return min(self._sizes(choice.pipeline_ranks, choice.data_parallel))

    def _sizes(self, ranks: int, group: int) -> tuple[int, ...]:
        share, rest = divmod(self.job.global_batch, group)
        if rest or self.given.pipeline_ranks not in (None, ranks):
            return ()
        return tuple(size for size in self.given.sizes_of(share, self.sizes.dividing(share)) if self.sizes.has(size))

    def _shapes(self, ranks: int, microbatches: int) -> list[tuple[int, bool]]:
        """Waves, and whether of a loop. Loops only shorten fill and drain, so beside others where those count."""
        schedule = self.given.schedule

        def fits(waves: int, loop: bool) -> bool:
            return schedule == "auto" or GENERATORS[schedule].fits(Placement.shaped(ranks, waves, loop=loop))

        shapes = [(waves, False) for waves in self.given.waves if fits(waves, False)]
        if are_few(microbatches, ranks) or not shapes:
            shapes += [(waves, True) for waves in self.given.loops if fits(waves, True)]
        return shapes

    def _finer_shapes(self, waves: int, loop: bool, ranks: int, microbatches: int) -> list[tuple[int, bool]]:
        """So many waves, or half of a loop's rounds, where the most that are given are tried and layers suffice."""
        given = (self.given.loops if loop else self.given.waves)[-1], loop
        suffice = 2 * ranks * waves <= fewest_layers(self.sizes.smallest)
        return [(waves, loop)] if ranks > 1 and suffice and given in self._shapes(ranks, microbatches) else []

    def _layouts(self, ranks: int) -> tuple[Layout, ...]:
        """One where both are the same."""
        if self.given.layout is not None:
            return (self.given.layout,)
        cluster, world = self.job.cluster, self.job.world
        same = ranks in (1, world) or world <= cluster.ranks_per_node or cluster.intra_node == cluster.inter_node
        return (Layout.PIPE_MAJOR,) if same else tuple(Layout)

    def _nothing_is_tried(self) -> ConfigError:
        """Says whether it is the batch, the microbatch size or the schedule."""
        size, schedule = self.given.microbatch_size, self.given.schedule
        if size is not None and not self.sizes.has(size):
            return ConfigError(
                f"microbatch size: expected one that a profile is for, found {size}: {self.sizes.described}; "
                "profile that size, or leave it to be chosen"
            )
        divide = (self._sizes(n, self.job.world // n) for n in range(1, self.job.world + 1) if self.job.world % n == 0)
        if any(divide):
            tried = (
                ["wave"] * any(self.given.waves)
                + ["linear"] * (0 in self.given.waves)
                + ["loop"] * any(self.given.loops)
            )
            return ConfigError(
                f"schedule {schedule!r} fits no placement that is tried ({', '.join(tried)}) on a divisor of "
                f"{self.job.world} ranks; use another schedule, or let the placement be chosen"
            )
        return self._nothing_divides()

    def _nothing_divides(self) -> ConfigError:
        smallest, given = self.sizes.smallest.microbatch_size, self.given
        pipelines = self.job.world // given.pipeline_ranks if given.pipeline_ranks else 1
        unit = smallest * pipelines * (given.microbatches or 1)
        below = self.job.global_batch // unit * unit
        near = " or ".join(str(batch) for batch in (below, below + unit) if batch)
        return ConfigError(
            f"global batch: {self.job.global_batch} samples are no whole number of microbatches on {self.job.world} "
            f"ranks: expected a multiple of (data-parallel pipelines x microbatch size), the smallest profile is for "
            f"microbatches of {smallest}; use {near}, or profile a smaller microbatch"
        )

    def _ideal_ms(self, choice: Choice) -> float:
        profile = self.sizes.at(choice.microbatch_size)
        if fewest_layers(profile) < len(choice.placement):
            return math.inf
        ideal = ideal_ms(
            profile,
            choice.placement,
            choice.microbatches,
            reduction_ms=self._reduction_ms(choice),
            split=halves_tried(self._order_options(), profile)[-1],
            apart=self._backbone_steps != "together",
        )
        return ideal + self._optimizer_ms(choice)

    def _likely_ms(self, choice: Choice) -> float:
        """What choices are tried by: the ideal, and sums that do not hide behind a rank's last backward.

        The bound lets them hide behind more, and is the same for many choices where these sums are most of a step.
        """
        profile, rules = self.sizes.at(choice.microbatch_size), self.given.rules(choice.zero_stage)
        share = summed_share(rules) + gathered_share(profile, rules, choice.data_parallel)
        hidden = sum(layer.backward_ms for layer in profile.layers)
        behind = max(0.0, share * self._reduction_ms(choice) - hidden)
        return self._ideal_ms(choice) + behind / choice.pipeline_ranks

    def _optimizer_ms(self, choice: Choice) -> float:
        """Of a rank's part of all parameters."""
        profile, rules = self.sizes.at(choice.microbatch_size), self.given.rules(choice.zero_stage)
        return optimizer_ms(profile, profile.param_bytes // choice.pipeline_ranks, rules, choice.data_parallel)

    def _reduction_ms(self, choice: Choice) -> float:
        """Of all gradients, at least."""
        return least_reduction_ms(self.sizes.at(choice.microbatch_size), self.job.cluster, choice.grid)

    @property
    def _within_ms(self) -> float:
        """A step that is worth simulating is no longer than this."""
        steps = sorted(self._steps)
        return steps[int(self._kept) - 1] * (1 + 1e-9) if self._kept <= len(steps) else math.inf

    @property
    def _memory_costs_time(self) -> bool:
        """What would be fastest does not fit. Finer stages may then be faster, as they leave less of it unused."""
        return self._free_ms < (1 - _WORTH_MORE) * min(self._steps, default=math.inf)

    # -- one family --------------------------------------------------------------------------

    def _apart(self, family: Choice) -> list[tuple[Choice, list[Choice]]]:
        """What is planned without regard to memory, and choices of ZeRO stages that differ from it in memory only.

        Any stage may be the fastest where a shared optimizer is quicker, early sums leave by the port of messages, or
        stage 0 gathers weights, too, as in bf16: there it sums all gradients where ZeRO-1 only scatters them.
        """
        stages = [replace(family, zero_stage=stage) for stage in self.zero_stages(family)]
        alike = {self._optimizer_ms(replace(family, zero_stage=stage)) for stage in (0, 1)}
        ported = any(link.one_port for link in (self.job.cluster.intra_node, self.job.cluster.inter_node))
        profile = self.sizes.at(family.microbatch_size)
        gathers = optimizer_shards(profile, self.given.rules(0), family.data_parallel) > 1
        if len(alike) == 1 and not ported and not gathers:
            return [(stages[0], stages)]
        return [(choice, [choice]) for choice in stages]

    def _family(self, family: Choice, stages: list[Choice]) -> Iterator[Trial]:
        verdict = self._excluded(family)
        if verdict is not None:
            yield from (replace(verdict, choice=choice) for choice in stages)
            return
        fits = False
        for number, choice in enumerate(stages):
            if fits:
                yield Trial(choice=choice, verdict=Verdict.NO_GAIN, reason=_NO_GAIN)
                continue
            try:
                free = self._free(choice)
            except TooSlow as slow:  # less memory makes nothing faster
                rest = stages[number:]
                yield from (self._too_slow(other, slow.bound_ms, any_cuts=slow.any_cuts) for other in rest)
                return
            fits = max(free.figures.peak_bytes) <= self.job.limit_bytes
            trial = _success(choice, free) if fits else self._within_memory(choice, free)
            if trial.plan is not None:
                self._steps.append(trial.plan.figures.step_ms)
            yield trial

    def _untried(self, stages: list[Choice]) -> Iterator[Trial]:
        reason = f"ranks wait, so after {self._most_seconds:g} s the best so far is taken; ds_pulse tune tries all"
        return (Trial(choice=choice, verdict=Verdict.UNTRIED, reason=reason) for choice in stages)

    def zero_stages(self, family: Choice) -> tuple[int, ...]:
        """Those that are tried of a family."""
        if self.given.zero_stage is not None:
            return (self.given.zero_stage,)
        return (0, 1) if family.data_parallel > 1 else (0,)

    def _excluded(self, family: Choice) -> Trial | None:
        """What needs no plan to be excluded."""
        profile, stages = self.sizes.smallest, len(family.placement)
        layers, forwards = fewest_layers(profile), stages * family.microbatches * max(1, len(profile.backbones))
        if layers < stages:
            reason = f"{stages} stages, {'a backbone' if profile.backbones else 'the model'} has {layers} layers"
            return Trial(choice=family, verdict=Verdict.LAYERS, reason=reason)
        if forwards > MOST_FORWARDS:
            reason = f"{forwards} forwards a step; at most {MOST_FORWARDS} are planned"
            return Trial(choice=family, verdict=Verdict.SIZE, reason=reason)
        bound_ms = self._ideal_ms(family)
        return self._too_slow(family, bound_ms) if bound_ms > self._within_ms else None

    def _too_slow(self, choice: Choice, bound_ms: float, *, any_cuts: bool = True) -> Trial:
        most = 1e3 * self.job.global_batch / bound_ms
        whose = "" if any_cuts else " with the cuts that were found"
        reason = f"at most {most:.4g} samples/s{whose}"
        return Trial(choice=choice, verdict=Verdict.SLOW, samples_per_second=most, reason=reason)

    def _free(self, family: Choice) -> Plan:
        """The plan without regard to memory.

        Its cuts do not depend on the microbatch size where costs are in proportion. Those of several waves take seconds
        to find and are no proven best: they are found once for P and G.
        """
        one = _several(family)
        key = (family.pipeline_ranks, family.waves, family.loop, family.zero_stage, None if one else family.layout)
        job = replace(self.job.chosen(family), memory_bytes=UNLIMITED_BYTES)
        if job.recompute == "auto":
            job = replace(job, recompute="none")
        if one and key not in self._cuts:
            self._cuts[key] = cuts(job, self._options(family))
        known = self._cuts.get(key) if one or self.sizes.in_proportion else None
        plan = make_plan(job, self._options(family, known))
        self._free_ms = min(self._free_ms, plan.figures.step_ms)
        self._cuts[key] = plan.boundaries
        return plan

    def frugal(self, choice: Choice, *, memory_bytes: int) -> Plan:
        """With every layer recomputed that frees anything."""
        job = replace(self.job.chosen(choice), memory_bytes=memory_bytes)
        if job.recompute == "auto":
            job = replace(job, recompute=sorted(cheapest_first(job.profile)))
        return make_plan(job, self._options(choice))

    def _options(self, choice: Choice, boundaries: tuple[int, ...] | None = None) -> SearchOptions:
        return replace(
            self._order_options(),
            placement="loop" if choice.loop else "wave" if choice.waves else "linear",
            waves=choice.waves or 1,
            boundaries=boundaries,
            within_ms=self._within_ms,
            part_skips=True,
            backbone_steps=self._backbone_steps,
        )

    def _order_options(self) -> SearchOptions:
        """Of any choice, without a search."""
        given = self.given
        return SearchOptions(schedule=given.schedule, split_backward=given.split_backward, solver_seconds=0.0)

    @property
    def _backbone_steps(self) -> str:
        """As asked for; where steps of their own cannot be, and need not, together."""
        return self.given.backbone_steps if may_step_apart(self.sizes.smallest.dtype) else "together"

    def _within_memory(self, choice: Choice, free: Plan) -> Trial:
        """A plan that fits, where the one without regard to memory does not."""
        least = self.least_held_bytes(choice)
        if least > self.job.limit_bytes:
            buffers = ", with the buffers of communicators," if self.job.cluster.communicators else ""
            state = f"weights, gradients, optimizer state and its step{buffers}"
            reason = f"{state} alone need {gigabytes(least, enough=True)} GB a rank"
            return Trial(choice=choice, verdict=Verdict.MEMORY, reason=reason, needed_bytes=least)
        speed = free.figures.samples_per_second
        if free.figures.step_ms > self._within_ms:  # less memory makes it no faster
            reason = f"{speed:.4g} samples/s without regard to memory"
            return Trial(choice=choice, verdict=Verdict.SLOW, samples_per_second=speed, reason=reason)
        cuts = free.boundaries if _several(choice) else None
        try:
            return _success(choice, make_plan(self.job.chosen(choice), self._options(choice, cuts)))
        except TooSlow as slow:
            return self._too_slow(choice, slow.bound_ms, any_cuts=slow.any_cuts)
        except InfeasibleError as problem:
            needed = problem.needed_bytes
            reason = f"needs {gigabytes(needed, enough=True)} GB a rank" if needed else str(problem)
            return Trial(choice=choice, verdict=Verdict.MEMORY, reason=reason, needed_bytes=needed)

    def least_held_bytes(self, choice: Choice) -> int:
        """No cuts have less on their fullest rank, which has an equal part of the weights or the largest layer's.

        State and step of what is trained, or, if that is more, frozen weights and the others with their gradients; and
        what communicators hold. Of backbones that step apart, one is the smallest share of a step.
        """
        profile, rules = self.sizes.at(choice.microbatch_size), self.given.rules(choice.zero_stage)
        weights = max(-(-profile.param_bytes // choice.pipeline_ranks), *(x.param_bytes for x in profile.layers))
        apart = len(profile.backbones) if self._backbone_steps != "together" else 1
        buffers = min(fewest_bytes(self.job.chosen(choice).grid, choice.placement, self.job.cluster))
        trained = state_bytes(profile, weights, rules, choice.data_parallel)
        trained += step_bytes(profile, weights // max(apart, 1), rules, choice.data_parallel)
        sizes = [x.frozen_bytes + 2 * x.param_bytes for x in profile.layers]
        return max(trained, -(-sum(sizes) // choice.pipeline_ranks), *sizes) + buffers

    # -- the best ----------------------------------------------------------------------------

    def searched(self, trials: list[Trial], seconds: float) -> list[Trial]:
        """With better orders of those that may be the best, in order again; most of the time is for the one that is."""
        trials = self.in_order(trials)
        within = min(trial.plan.figures.step_ms for trial in trials if trial.plan)
        contenders = [t for t in trials[:_CONTENDERS] if t.plan and self._least_ms(t.plan) < within]
        if not contenders or seconds <= 0:
            return trials
        shared = 0.0
        if contenders[1:] or contenders[0] is not trials[0]:
            shared = _SHARED * seconds
            trials = self._searched(trials, contenders, shared / len(contenders))
        return self._searched(trials, trials[:1], seconds - shared)

    def _least_ms(self, plan: Plan) -> float:
        """No order of its cuts that may be has a shorter step."""
        figures, least = plan.figures, plan.figures.lower_bound_ms
        if self.given.split_backward is False and not plan.carries:  # figures do not know that halves may not be
            problem = Problem(plan, self.sizes.at(plan.microbatch_size), self.job.cluster)
            least = max(least, lower_bound_ms(problem, plan.microbatches))
        return least + figures.optimizer_ms

    def _searched(self, trials: list[Trial], chosen: list[Trial], seconds: float) -> list[Trial]:
        better = {id(trial): self._better(trial, seconds) for trial in chosen}
        return self.in_order(better.get(id(trial), trial) for trial in trials)

    def in_order(self, trials: Iterable[Trial]) -> list[Trial]:
        """The best first: the fastest, or of those about as fast the one that sends least, where hosts send."""
        ranked = sorted(trials, key=rank_of)
        if not (self.job.cluster.intra_node.overhead_us or self.job.cluster.inter_node.overhead_us):
            return ranked
        most_ms = (1 + _ALIKE) * ranked[0].planned.figures.step_ms
        alike = [trial for trial in ranked if trial.plan and trial.plan.figures.step_ms <= most_ms]
        lightest = min(alike, key=self._sent_bytes)
        return [lightest, *(trial for trial in ranked if trial is not lightest)]

    def _sent_bytes(self, trial: Trial) -> int:
        """Of all ranks in a step: messages of every pipeline, and sums over pipelines as rings make them."""
        choice, figures = trial.choice, trial.planned.figures
        messages = choice.data_parallel * choice.microbatches * figures.p2p_bytes_per_microbatch
        return messages + 2 * (choice.data_parallel - 1) * self.sizes.at(choice.microbatch_size).param_bytes

    def _better(self, trial: Trial, seconds: float) -> Trial:
        choice, job = trial.choice, self.job.chosen(trial.choice)
        steps = self._backbone_steps
        options = replace(self._order_options(), solver_seconds=seconds, backbone_steps=steps)
        try:
            plan = ordered(trial.planned, job, options)
        except InfeasibleError:  # a better order may keep more activations, and leave no room
            return trial
        return min(trial, _success(choice, plan), key=rank_of)


def fewest_layers(profile: Profile) -> int:
    """Of the model, or of the backbone that has the fewest."""
    return min((end - first for first, end in (part.layers for part in profile.backbones)), default=profile.num_layers)


def _are_open(counts: tuple[int, ...]) -> bool:
    """Several numbers of waves, or of rounds, are tried: more are, where those are faster."""
    return len([count for count in counts if count]) > 1


def _several(choice: Choice) -> bool:
    """Its cuts come from a local search, which takes seconds."""
    return choice.waves > 1 or choice.loop


def rank_of(trial: Trial) -> tuple[bool, float, int, int, int]:
    """With a plan first, the fastest first; among equals fewer pipeline ranks, less memory, fewer stages."""
    return (
        trial.plan is None,
        -round(trial.samples_per_second or 0.0, 9),
        trial.choice.pipeline_ranks,
        trial.needed_bytes or 0,
        len(trial.choice.placement),
    )


def _success(choice: Choice, plan: Plan) -> Trial:
    figures = plan.figures
    speed, needed = figures.samples_per_second, max(figures.peak_bytes)
    return Trial(choice=choice, verdict=Verdict.PLANNED, plan=plan, samples_per_second=speed, needed_bytes=needed)
