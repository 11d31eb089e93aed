"""A choice as DeepSpeed's config, to run it again without choosing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_pulse.engine.plans.choosing import Chosen

CHOICE_KEY = "pulse_choice"
"""In the config: what was chosen and from what. DeepSpeed and this package do not read it."""

_OF_THE_PLAN = ("placement", "waves", "schedule", "profile", "cluster", "memory_gb", "solver_seconds", "plan_cache")
"""Settings that a plan makes void."""


def pinned(config: Mapping[str, Any], chosen: Chosen, plan_path: str) -> dict[str, Any]:
    """A run's config, batch settings settled, with the numbers that were chosen, the plan's path, and the choice."""
    block, pipeline = config.get("pulse"), config.get("pipeline")
    kept = {k: v for k, v in block.items() if k not in _OF_THE_PLAN} if isinstance(block, Mapping) else {}
    return {
        **config,
        "pipeline": {**(pipeline or {}), "stages": chosen.choice.pipeline_ranks},
        "pulse": {**kept, "plan": plan_path},
        CHOICE_KEY: {
            "auto": list(chosen.asked.names),
            "options": [option.told() for option in chosen.options],
            "rejected": list(chosen.reasons),
        },
    }
