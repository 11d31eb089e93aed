"""Where one rank gets each named value, where it reads it, and when it lets it go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from deepspeed_pulse.ir.graph import NamedValue
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.schedule import Action, Op


class Usage:
    """Named values on one rank of a plan.

    A value is *held* from its origin on this rank (the forward of the stage that stashes it, or that
    it arrives for) to the backward of that stage; without backward to the last forward that uses it.
    Values stashed and popped within one stage and sent nowhere are never held.
    """

    def __init__(self, plan: Plan, values: Sequence[NamedValue], rank: int) -> None:
        self._origin: dict[str, int] = {}
        self._last_use: dict[str, int] = {}
        self._exports: dict[int, list[str]] = defaultdict(list)
        self._read_here: set[str] = set()
        self._arrived: set[str] = set()
        hops = {route.name: route.hops for route in plan.routes}
        for value in values:
            self._add(plan, value, hops.get(value.name, ()), rank)

    def _add(self, plan: Plan, value: NamedValue, hops: Sequence[tuple[int, int]], rank: int) -> None:
        source = None if value.source is None else plan.stage_of(value.source)
        here = {s for s in map(plan.stage_of, value.targets) if plan.placement[s] == rank and s != source}
        sent_from = {a for a, _ in hops if plan.placement[a] == rank}
        arrivals = [b for _, b in hops if plan.placement[b] == rank]
        if arrivals:
            self._origin[value.name] = arrivals[0]
            self._arrived.add(value.name)
        elif source is not None and plan.placement[source] == rank and here | sent_from:
            self._origin[value.name] = source
            self._exports[source].append(value.name)
        else:
            return
        self._last_use[value.name] = max({self._origin[value.name]} | here | sent_from)
        if here:
            self._read_here.add(value.name)

    def exports(self, stage: int) -> tuple[str, ...]:
        """Names stashed in ``stage`` (on this rank) that are needed outside it."""
        return tuple(self._exports[stage])

    def stays(self, name: str) -> bool:
        """True when a value stashed on this rank is popped on it."""
        return name in self._read_here and name not in self._arrived

    def arrived(self, name: str) -> bool:
        """True when the value came from another rank."""
        return name in self._arrived

    def passed_on(self, name: str, stage: int) -> bool:
        """True when a value came from another rank only to be sent on, by ``stage`` the last time."""
        return name in self._arrived and name not in self._read_here and self._last_use[name] == stage

    def sent_away(self, action: Action) -> tuple[str, ...]:
        """Values whose data is let go before their gradients: sent on by this forward, and read by no stage here."""
        if action.op is not Op.FORWARD:
            return ()
        return tuple(n for n, s in self._last_use.items() if s == action.stage and n not in self._read_here)

    def dropped(self, action: Action, *, training: bool) -> tuple[str, ...]:
        """Values let go when ``action`` and its sends are done."""
        if training and action.op not in (Op.BACKWARD, Op.INPUT_GRAD):
            return ()  # those of extra forwards are kept apart
        done = self._origin if training else self._last_use
        return tuple(name for name, stage in done.items() if stage == action.stage)
