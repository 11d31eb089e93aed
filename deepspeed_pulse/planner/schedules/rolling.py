"""Orders of several backbones whose steps run into one another (:mod:`deepspeed_pulse.ir.carried`).

One backbone begins and ends with the step, another (or all others) is cut in the middle: what of its own order comes
late is carried into the next step. There is no start and no end then at which ranks wait, so a step can be as short as
the work of its fullest rank. List scheduling finds such orders, when enough cuts and priorities are tried: by chance,
from a seed, and always the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from deepspeed_pulse.ir.keys import Key, key_of
from deepspeed_pulse.ir.schedule import FORWARDS, SPLIT, WHOLE, Action, Op, Schedule
from deepspeed_pulse.planner.bounds import CriticalPaths
from deepspeed_pulse.planner.links import Ports
from deepspeed_pulse.planner.problem import Problem
from deepspeed_pulse.planner.schedules.listing import Cap, reserves

TRIALS = 600
"""Orders that are tried where there are few actions; fewer, by their number, where there are many."""

_FEW_ACTIONS, _FEWEST = 400, 20
_PROVEN = 1e-9
_PERIODS = (1, 2, 3, 4, 6, 8, 12)
"""Between two microbatches, in mean forwards of a stage."""

_AHEAD = (0, 0, 3, 6, 12, 24, -6)
"""By how much what is carried goes before the rest, in the same unit."""

_LEADS = (0, 3, 6, -3)
"""The same of backwards before forwards."""

_NOISES = (0, 0, 1, 3)
_EARLIEST, _LATEST = 0.15, 0.85
"""Where in a backbone's own order it is cut."""


@dataclass(frozen=True, kw_only=True)
class Rolling:
    """An order of a step among others alike, which actions it carries, and its period."""

    schedule: Schedule
    carried: frozenset[Action]
    period_ms: float


def rolling_orders(
    problem: Problem, cap: Cap | None, *, split: bool, bound_ms: float, seed: int = 0, trials: int = TRIALS
) -> Iterator[Rolling]:
    """Each with a shorter period than those before, until one takes ``bound_ms``. ``cap``: on stashes of each rank."""
    board, rng = _Board(problem, cap, split), random.Random(seed)
    best = float("inf")
    share = min(1.0, _FEW_ACTIONS / len(board.actions))
    for _ in range(max(_FEWEST, int(trials * share * share))):
        drawn = _Drawn.of(board, rng)
        late = board.late_part(drawn.moving, drawn.cut, drawn.share)
        found = board.listed(board.actions, late, drawn.rank_by(board, late, rng)) if late else None
        if found is not None and found.period_ms < best * (1 - _PROVEN):
            best = found.period_ms
            yield found
        if best <= bound_ms * (1 + _PROVEN):
            return


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """What is tried: which backbones are cut, where, under which share of the cap, and what goes first."""

    moving: tuple[int, ...]
    cut: float
    share: float
    periods: tuple[int, ...]
    ahead: int
    lead: int
    noise: int

    @classmethod
    def of(cls, board: _Board, rng: random.Random) -> _Drawn:
        count = len(board.problem.placement.backbones)
        fixed = rng.randrange(count)
        others = [index for index in range(count) if index != fixed]
        return cls(
            moving=tuple(others) if rng.random() < 0.5 else (rng.choice(others),),
            cut=rng.uniform(_EARLIEST, _LATEST),
            share=rng.choice((0.5, 0.75, 1.0)),
            periods=tuple(rng.choice(_PERIODS) for _ in range(count)),
            ahead=rng.choice(_AHEAD),
            lead=rng.choice(_LEADS),
            noise=rng.choice(_NOISES),
        )

    def rank_by(self, board: _Board, late: Collection[Action], rng: random.Random) -> Callable[[Action], float]:
        """What has the longest way to go first; the smallest value goes first."""
        unit = board.unit_ms
        values: dict[Action, float] = {}
        for action in board.actions:
            value = -board.tail_ms[action.stage, action.op] / unit
            value += self.periods[board.problem.placement.backbone_of(action.stage)] * action.microbatch
            value -= self.ahead if action in late else 0
            value -= self.lead if action.op not in FORWARDS else 0
            value += rng.random() * self.noise
            values[action] = value + (1e6 if action.op is Op.WEIGHT_GRAD else 0.0)
        return values.__getitem__


class _Board:
    """The actions of a problem, what each waits for, and how long its messages take."""

    def __init__(self, problem: Problem, cap: Cap | None, split: bool) -> None:
        self.problem, self.cap, self.ops = problem, cap, SPLIT if split else WHOLE
        microbatches, stages = range(problem.plan.microbatches), range(problem.num_stages)
        self.actions = [Action(stage, op, m) for stage in stages for op in self.ops for m in microbatches]
        self.actions += problem.extra_actions
        by_key = {key_of(action): action for action in self.actions}
        self.needs = {a: [by_key[key] for key in problem.step(a).needs] for a in self.actions}
        self.following: dict[Action, list[Action]] = {a: [] for a in self.actions}
        for action, needed in self.needs.items():
            for other in needed:
                self.following[other].append(action)
        self.reserve = [0.0] * problem.num_stages if cap is None else reserves(problem.placement, cap)
        self.unit_ms = sum(problem.costs.forward_ms) / problem.num_stages or 1.0
        paths = CriticalPaths(problem, split=split)
        columns = {(a.stage, a.op): a for a in self.actions}
        self.tail_ms = {c: paths.tail_ms[key_of(a)[:2]] + problem.duration_ms(a) for c, a in columns.items()}
        self._alone: dict[tuple[int, float], list[tuple[float, Action]] | None] = {}

    def late_part(self, moving: Sequence[int], cut: float, share: float) -> frozenset[Action]:
        """What of some backbones starts after a share of the time that each takes alone; empty where one cannot run."""
        found: list[Action] = []
        for index in moving:
            starts = self._alone_starts(index, share)
            if starts is None:
                return frozenset()
            end = max(start for start, _ in starts)
            found += [action for start, action in starts if start >= cut * end]
        return frozenset(found)

    def _alone_starts(self, index: int, share: float) -> list[tuple[float, Action]] | None:
        if (index, share) not in self._alone:
            own = [a for a in self.actions if self.problem.placement.backbone_of(a.stage) == index]
            starts: list[tuple[float, Action]] = []
            ran = self.listed(own, (), lambda a: float(a.op in FORWARDS), share=share, starts=starts)
            self._alone[index, share] = None if ran is None else starts
        return self._alone[index, share]

    def listed(
        self,
        actions: Sequence[Action],
        late: Collection[Action],
        rank_by: Callable[[Action], float],
        *,
        share: float = 1.0,
        starts: list[tuple[float, Action]] | None = None,
    ) -> Rolling | None:
        """Earliest start first, then by ``rank_by``; None where the cap, or a share of it, stops it."""
        run = _Run(self, actions, frozenset(late), rank_by, share)
        while run.step(starts):
            pass
        if run.left:
            return None
        schedule = tuple(map(tuple, run.rows))
        return Rolling(schedule=schedule, carried=frozenset(late), period_ms=max(run.ends_ms()))


@dataclass
class _Queue:
    """Actions of one stage and op in the order in which they run."""

    actions: list[Action]
    at: int = 0

    @property
    def head(self) -> Action | None:
        return self.actions[self.at] if self.at < len(self.actions) else None


@dataclass
class _RankState:
    queues: list[_Queue] = field(default_factory=list)
    free_ms: float = 0.0
    live: float = 0.0
    late_left: dict[int, int] = field(default_factory=dict)
    """Per backbone, carried actions that have not run yet."""


class _Run:
    """One list scheduling."""

    def __init__(
        self,
        board: _Board,
        actions: Sequence[Action],
        late: frozenset[Action],
        rank_by: Callable[[Action], float],
        share: float,
    ) -> None:
        self.board, self.late, self.rank_by, self.share = board, late, rank_by, share
        problem = board.problem
        self.placement, self.left = problem.placement, len(actions)
        self.rows: list[list[Action]] = [[] for _ in range(problem.num_ranks)]
        self._ranks = [_RankState() for _ in range(problem.num_ranks)]
        self._ports = Ports()
        self._landed_ms = 0.0
        self._ready: dict[Key, float] = {}
        self._missing: dict[Action, int] = {}
        self._queue_of: dict[tuple[int, Op], _Queue] = {}
        for action in sorted(actions, key=lambda a: (a not in late, a.microbatch)):
            self._missing[action] = sum(n in late or action not in late for n in board.needs[action])
            self._add(action)
        for action in late if board.cap else ():
            if action.op is board.ops[-1] and Action(action.stage, Op.FORWARD, action.microbatch) not in late:
                self._ranks[self.placement[action.stage]].live += board.cap.weights[action.stage]  # type: ignore[union-attr]
        self._best = [self._candidate(rank) for rank in range(problem.num_ranks)]

    def _add(self, action: Action) -> None:
        rank = self._ranks[self.placement[action.stage]]
        queue = self._queue_of.get((action.stage, action.op))
        if queue is None:
            queue = self._queue_of[action.stage, action.op] = _Queue([])
            rank.queues.append(queue)
        queue.actions.append(action)
        if action in self.late:
            backbone = self.placement.backbone_of(action.stage)
            rank.late_left[backbone] = rank.late_left.get(backbone, 0) + 1

    def _candidate(self, rank: int) -> tuple[float, float, int, Action | None]:
        """Earliest start, what decides among equals, rank and action; None when nothing can run yet."""
        state = self._ranks[rank]
        best: tuple[float, float, int, Action | None] = (float("inf"), 0.0, rank, None)
        for queue in state.queues:
            action = queue.head
            if action is None or self._missing[action] or not self._may_run(state, rank, action):
                continue
            found = (max(state.free_ms, self._ready.get(key_of(action), 0.0)), self.rank_by(action), rank, action)
            if found[:3] < best[:3]:
                best = found
        return best

    def _may_run(self, state: _RankState, rank: int, action: Action) -> bool:
        if action not in self.late and state.late_left.get(self.placement.backbone_of(action.stage), 0):
            return False
        cap = self.board.cap
        if cap is None or action.op is not Op.FORWARD:
            return True
        return state.live + self.board.reserve[action.stage] <= max(
            self.share * cap.limits[rank], self.board.reserve[action.stage]
        ) * (1 + _PROVEN)

    def step(self, starts: list[tuple[float, Action]] | None) -> bool:
        """Run the action that can start first; False when none can."""
        start, _, rank, action = min(self._best, key=lambda found: found[:3])
        if action is None:
            return False
        if starts is not None:
            starts.append((start, action))
        touched = {rank, *self._end(rank, action, start)}
        for other in touched:
            self._best[other] = self._candidate(other)
        return True

    def _end(self, rank: int, action: Action, start: float) -> Iterator[int]:
        """Book an action; the ranks that may go on then."""
        board, state = self.board, self._ranks[rank]
        end = state.free_ms = start + board.problem.duration_ms(action)
        self.rows[rank].append(action)
        self._queue_of[action.stage, action.op].at += 1
        self.left -= 1
        if action in self.late:
            state.late_left[self.placement.backbone_of(action.stage)] -= 1
        if board.cap is not None and action.op is Op.FORWARD:
            state.live += board.cap.weights[action.stage]
        elif board.cap is not None and action.op is board.ops[-1]:
            state.live -= board.cap.weights[action.stage]
        arrived: dict[int, float] = {}
        for message in board.problem.step(action).sends:
            _, arrived[message.target_stage] = self._ports.send(board.problem.way(message), end)
        self._landed_ms = max([self._landed_ms, *arrived.values()])
        for following in board.following[action]:
            if (following in self.late and action not in self.late) or following not in self._missing:
                continue
            self._missing[following] -= 1
            key = key_of(following)
            self._ready[key] = max(self._ready.get(key, 0.0), arrived.get(following.stage, end))
            yield self.placement[following.stage]

    def ends_ms(self) -> list[float]:
        """When each rank is free, and all messages have arrived."""
        return [self._landed_ms, *(state.free_ms for state in self._ranks)]
