"""What benchmarks do to profiles and plans before these are simulated."""

from __future__ import annotations

from dataclasses import replace

from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.profile import Profile


def slower(profile: Profile, times: float) -> Profile:
    """The profile of a device that takes so many times as long."""
    layers = (
        replace(
            layer,
            forward_ms=layer.forward_ms * times,
            backward_ms=layer.backward_ms * times,
            weight_grad_ms=(layer.weight_grad_ms or 0.0) * times,
            input_grad_ms=None if layer.input_grad_ms is None else layer.input_grad_ms * times,
        )
        for layer in profile.layers
    )
    return replace(profile, layers=tuple(layers))


def halved(profile: Profile) -> Profile:
    """Halves that take as long as each other; what has no parameters has no half for them."""
    layers = []
    for layer in profile.layers:
        weights = layer.backward_ms / 2 if layer.param_bytes else 0.0
        layers.append(replace(layer, weight_grad_ms=weights, input_grad_ms=layer.backward_ms - weights))
    return replace(profile, layers=tuple(layers))


def with_relays(plan: Plan, profile: Profile) -> Plan:
    """Skips through every stage between their ends; values with several readers stay as they are."""
    lone = [skip for skip in profile.skips if sum(other.name == skip.name for other in profile.skips) == 1]
    ends = {skip.name: (plan.stage_of(skip.source), plan.stage_of(skip.target)) for skip in lone}
    routes = [
        replace(route, hops=tuple((s, s + 1) for s in range(*ends[route.name]))) if route.name in ends else route
        for route in plan.routes
    ]
    return replace(plan, routes=tuple(routes))
