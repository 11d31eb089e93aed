"""A profile as a table: a row a layer, the whole model below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.text import Text

from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.report import words
from deepspeed_pulse.report.table import Name, new_table

_UNITS = "params: parameters, in millions; kept: what a forward keeps for backward, of one microbatch"


def profile_table(profile: Profile, figures: Mapping[str, Sequence[float]], *, note: str) -> Group:
    """Parameters, ``figures`` and bytes of every layer; their sums; the named values.

    ``figures``: per layer, by heading; a heading that ends with ``%`` is not summed. ``note``: where they come from.
    """
    columns = {
        "params M": [count / 1e6 for count in words.param_counts(profile)],
        **figures,
        "kept MB": [layer.activation_bytes / 1e6 for layer in profile.layers],
    }
    output = [layer.output_bytes / 1e6 for layer in profile.layers]
    table = new_table(("layer", *columns, "output MB"), text=("layer",))
    for index, layer in enumerate(profile.layers):
        table.add_row(Name(layer.name), *(_figure(column[index]) for column in (*columns.values(), output)))
    sums = ("" if heading.endswith("%") else _figure(sum(column)) for heading, column in columns.items())
    table.add_section()
    table.add_row("all", *sums, "", style="bold")
    sizes = {skip.name: skip.bytes for skip in profile.skips}
    several = f"{', '.join(sizes)}; {words.megabytes(sum(sizes.values()))} in all" if sizes else "none"
    below = (words.profile_times(profile), f"named values: {several}", _UNITS, note)
    return Group(Text(words.profile_title(profile), style="bold"), table, *map(Text, below))


def layer_times(profile: Profile) -> dict[str, list[float]]:
    """Forward and backward of every layer, the weights' part and the spread if known, for :func:`profile_table`."""
    weights = [layer.weight_grad_ms for layer in profile.layers if layer.weight_grad_ms is not None]
    spread = [100 * layer.spread for layer in profile.layers if layer.spread is not None]
    return {
        "forward ms": [layer.forward_ms for layer in profile.layers],
        "backward ms": [layer.backward_ms for layer in profile.layers],
        **({"weights' ms": weights} if len(weights) == profile.num_layers else {}),
        **({"spread %": spread} if len(spread) == profile.num_layers else {}),
    }


def _figure(value: float) -> str:
    """Three digits, and all of them before the point."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"
