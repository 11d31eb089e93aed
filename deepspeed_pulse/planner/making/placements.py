"""Which placements are tried."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from deepspeed_pulse.errors import ConfigError, did_you_mean
from deepspeed_pulse.ir.placement import Placement
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.planner.job import Job, SearchOptions
from deepspeed_pulse.planner.partition.cuts import require_layers
from deepspeed_pulse.planner.schedules.heuristics import GENERATORS, generators_for

_PLACEMENTS = ("auto", "wave", "linear")


def placements(job: Job, options: SearchOptions) -> list[Placement]:
    """What to try, the preferred first. Raises when nothing can work."""
    profile, ranks, waves = job.profile, job.pipeline_ranks, options.waves
    placement, schedule = options.placement, options.schedule
    if placement not in _PLACEMENTS:
        expected = ", ".join(_PLACEMENTS)
        raise ConfigError(
            f"placement: expected one of {expected}, found {placement!r}{did_you_mean(placement, _PLACEMENTS)}"
        )
    wave, linear = Placement.wave(ranks, waves), Placement.linear(ranks)
    places = {"wave": [wave], "linear": [linear], "auto": [wave, linear]}[placement]
    if placement == "auto" and schedule == "interleaved":
        places = [Placement.loop(ranks, 2 * waves)]
    if options.boundaries is not None:
        places = _that_fit_boundaries(profile, places, options.boundaries)
    if placement == "auto":
        places = _that_fit_schedule(places, schedule)
        enough = [place for place in places if profile.num_layers >= len(place)]
        places = enough or places[-1:]
    for place in places:
        require_layers(profile, place)
        generators_for(schedule, place, split=options.split_backward)
    return places


def _that_fit_schedule(places: list[Placement], schedule: str) -> list[Placement]:
    if schedule not in GENERATORS:
        return places
    return [place for place in places if GENERATORS[schedule].fits(place)] or places


def _that_fit_boundaries(profile: Profile, places: list[Placement], boundaries: Sequence[int]) -> list[Placement]:
    cuts = list(boundaries)
    if not cuts or cuts[0] != 0 or cuts[-1] != profile.num_layers or any(a >= b for a, b in itertools.pairwise(cuts)):
        raise ConfigError(
            f"boundaries: expected strictly increasing layer indices from 0 to the layer count {profile.num_layers}, "
            f"found {cuts}"
        )
    fitting = [place for place in places if len(place) == len(cuts) - 1]
    if not fitting:
        expected = " or ".join(f"{len(place) - 1} ({place.name} placement)" for place in places)
        raise ConfigError(f"boundaries: expected {expected} inner cuts, found {len(cuts) - 2}: {cuts[1:-1]}")
    return fitting
