"""What to do when a step takes another time, or more memory, than planned."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed_pulse.ir.run import Difference, RankMemory
from deepspeed_pulse.report import words

WORTH_SAYING = 0.2
"""Share of the planned time or memory from which on a difference is worth a warning."""

_EXPLAINS = 0.2
"""Share of the difference that a part must explain to be advised on."""

_LAYERS = "layers against their profile"
_FROZEN = "frozen parts against what they took when they were measured"


def warning(difference: Difference | None, *, crowded: str | None = None) -> list[str]:
    """Lines of a warning; none where time and memory are within 20 % of the plan, or nothing was predicted.

    ``crowded``: how ranks share a device, where they do: then that is why layers take longer.
    """
    lines = [] if difference is None or abs(difference.share) <= WORTH_SAYING else list(_time(difference, crowded))
    if difference is not None and difference.memory:
        lines += [line for rank, memory in enumerate(difference.memory) for line in _memory(rank, memory)]
    return lines


def _time(difference: Difference, crowded: str | None) -> Iterator[str]:
    ms = words.milliseconds
    longer = difference.share > 0
    yield (
        f"{'warning: ' if longer else ''}the step took {ms(difference.measured_ms)}, "
        f"{100 * abs(difference.share):.0f} % {'longer' if longer else 'shorter'} than the planned "
        f"{ms(difference.planned_ms)}; of that"
    )
    total = difference.measured_ms - difference.planned_ms
    parts = sorted(_parts(difference, crowded), key=lambda part: part[0] / total, reverse=True)
    for part_ms, what, knob in parts:
        measured_anew = what.startswith((_LAYERS, _FROZEN))  # other knobs only shorten
        explains = part_ms / total >= _EXPLAINS and (longer or measured_anew)
        yield f"  {part_ms:+.3g} ms: {what}{f'; {knob}' if explains else ''}"


def _parts(difference: Difference, crowded: str | None) -> Iterator[tuple[float, str, str]]:
    """(ms, what it is, which knob to turn)."""
    ms = words.milliseconds
    yield (
        difference.layers_ms,
        f"{_LAYERS} (most: stage {difference.stage}, {ms(difference.stage_measured_ms)} instead of "
        f"{ms(difference.stage_planned_ms)} a microbatch)",
        f"{crowded}, and plans count with a device for each"
        if crowded
        else "measure them again on this device while nothing else runs on it (ds_pulse profile, or example_batch=), "
        "for the plan may cut in the wrong places",
    )
    if difference.frozen_ms:
        yield (
            difference.frozen_ms,
            _FROZEN,
            "measure them again with batches of this size (example_batch=); of a plan_cache, remove frozen-*.json",
        )
    yield (
        difference.messages_ms,
        "waiting for messages beyond their planned time",
        'give the real bandwidth and latency of the links as a cluster file (key "cluster"), so that the plan '
        "counts with them",
    )
    yield (
        difference.pauses_ms,
        f"pauses of the ranks between actions ({ms(difference.mean_pause_ms)} each)",
        "that is the host's work: use larger microbatches, and give the ranks cores of their own",
    )
    yield (
        difference.outside_ms,
        "outside the actions: drawing the first batch, gradient reduction and optimizer beyond their planned time",
        "look for a slow data loader, profile with the optimizer that trains, and use more microbatches a step",
    )


def _memory(rank: int, memory: RankMemory) -> Iterator[str]:
    if memory.share <= WORTH_SAYING:
        return
    yield (
        f"warning: rank {rank} held {words.gigabytes(memory.measured_bytes)} GB, {100 * memory.share:.0f} % more than "
        f"the planned {words.gigabytes(memory.planned_bytes)} GB; of that"
    )
    total = memory.measured_bytes - memory.planned_bytes
    for part, num_bytes in memory.parts:
        if num_bytes:
            what, knob = _MEMORY[part]
            explains = num_bytes / total >= _EXPLAINS
            yield f"  {'+' if num_bytes > 0 else '-'}{words.megabytes(abs(num_bytes))}: {what}{f'; {knob}' * explains}"


_MEMORY = {
    "state": (
        "weights, gradients and optimizer state",
        "the profile is of other parameters, or of another precision: profile this model as it is trained",
    ),
    "activations": (
        "what forwards keep for backward",
        'measure the layers again with batches of this size (example_batch=), so that "memory_gb" is kept',
    ),
    "received": (
        "received and not used up yet, buffers of coming receives among it",
        "the rank is behind the plan or its messages come early; smaller microbatches make them smaller",
    ),
    "sent": (
        "sent and perhaps not taken yet",
        "the next rank is behind the plan; smaller microbatches make messages smaller",
    ),
    "recomputed": ("what a backward recomputes", "recompute fewer layers at a time (activation_checkpoint_interval)"),
    "gradients": (
        "gradients of values that wait for their backward, and copies of gradients that are being summed",
        "the rank is behind the plan; smaller microbatches make them smaller",
    ),
    "workspace": (
        "what a layer works with while it runs",
        "the profile is of another device or of other kernels: measure this model where it is trained",
    ),
    "frozen": ("frozen parts and their results", "measure them again with batches of this size"),
    "step": ("copies and roots that the optimizer's step makes and drops", "a fused optimizer makes fewer"),
    "communicators": ("buffers of communicators", 'smaller ones by "hccl_buffer_size" and P2P_HCCL_BUFFSIZE'),
}
"""Part of the memory: what it is, which knob to turn."""
