"""Weights that a layer itself changes in its forward: normalised in place, as EDM2 does it.

autograd refuses a backward behind a later forward of that layer, as it cannot know that a weight which is normalised
again stays what it was. Where it does so, every forward finds and leaves the weight under the same two numbers of
autograd's count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed_pulse.errors import GraphError
from deepspeed_pulse.ir.effects import Effects
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.ir.plan import Plan
from deepspeed_pulse.ir.schedule import Op

_SEEN = "_pulse_versions"
"""Attribute of a weight: its numbers before and after the last forward of its layer."""

_ROUNDING = 8
"""Units in the last place of its largest number by which a weight may differ that was normalised once more."""


def settled(run: Callable[[], Any], weights: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Names of those weights that further runs leave as they are, up to rounding."""

    def after() -> dict[str, torch.Tensor]:
        run()
        return {name: weight.detach().clone() for name, weight in weights.items()}

    once, again = after(), after()
    return tuple(name for name in weights if _is_close(again[name], once[name]))


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if not expected.is_floating_point() or not expected.numel():
        return torch.equal(found, expected)
    most = _ROUNDING * torch.finfo(expected.dtype).eps * expected.abs().amax()
    return bool(((found - expected).abs() <= most).all())


@contextmanager
def found_again(weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """Around a forward of the layer that changes these weights to what they are."""
    begun = begin_forward(weights)
    yield
    end_forward(weights, begun)


def begin_forward(weights: Sequence[torch.Tensor]) -> list[int]:
    """Weights that nobody has changed since the last forward get the numbers it began with; the numbers they have."""
    for weight in weights:
        before, after = getattr(weight, _SEEN, (None, None))
        if before is not None and weight._version == after:
            set_version(weight, before)
    return [weight._version for weight in weights]


def end_forward(weights: Sequence[torch.Tensor], begun: Sequence[int]) -> None:
    """Remember the numbers of a forward that began with these."""
    for weight, before in zip(weights, begun, strict=True):
        setattr(weight, _SEEN, (before, weight._version))


def set_version(weight: torch.Tensor, version: int) -> None:
    """Autograd counts on from there: whoever calls it knows that the tensor is what it was at that number."""
    change: Any = torch._C._autograd._unsafe_set_version_counter
    try:
        change((weight,), (version,))
    except TypeError:  # an older torch takes one
        change(weight, version)


def check_unsettled(plan: Plan, graph: Graph, effects: Sequence[Effects]) -> None:
    """Raise a GraphError for a weight that each forward makes another.

    For a trained one where backwards wait for what it was, for any where its layer runs again in backward.
    """
    check_run_once(graph, effects, plan.recompute)
    for index, effect in enumerate(effects):
        if effect.unsettled and _overlaps(plan, plan.stage_of(index)):
            raise changes_while_others_wait(graph.layers[index].name, effect.unsettled[0])


def check_run_once(graph: Graph, effects: Sequence[Effects], recompute: Collection[int]) -> None:
    """Raise a GraphError for a weight that each forward makes another, of a layer that runs again in backward."""
    for index, effect in enumerate(effects):
        weights = (*effect.unsettled, *effect.unsettled_frozen)
        if weights and index in recompute:
            raise _unsettled(
                graph.layers[index].name,
                weights[0],
                "and runs again in backward (it is recomputed): that would change the weight once more, and gradients "
                "would be those of another one",
                ", make it a buffer if it does not train, or do not recompute this layer "
                "(activation_checkpoint_interval, checkpointable_layers)",
            )


def changes_while_others_wait(layer: str, weight: str) -> GraphError:
    """The error for a trained weight that each forward makes another."""
    return _unsettled(
        layer,
        weight,
        "while microbatches before wait for their backward: their gradients would be those of another weight",
    )


def _unsettled(layer: str, weight: str, why: str, or_else: str = "") -> GraphError:
    return GraphError(
        f"layer {layer} changes its weight {weight} in every forward, and each time to something else, {why}; change "
        f"it after engine.train_batch, under torch.no_grad(), on every rank that holds it{or_else}",
        more="in-place",
    )


def _overlaps(plan: Plan, stage: int) -> bool:
    """Whether a forward of the stage runs between that of another microbatch and the end of its backward."""
    waiting: set[int] = set()
    for action in (one for one in plan.schedule[plan.placement[stage]] if one.stage == stage):
        if action.op in (Op.BACKWARD, Op.WEIGHT_GRAD):
            waiting.discard(action.microbatch)
        elif action.op in (Op.FORWARD, Op.EXTRA_FORWARD):
            if waiting - {action.microbatch}:
                return True
            if action.op is Op.FORWARD:
                waiting.add(action.microbatch)
    return False
