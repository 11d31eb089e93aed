"""How every picture looks."""

from __future__ import annotations

from typing import Any

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "hatch.linewidth": 0.5,
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
