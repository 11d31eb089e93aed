"""How every picture looks."""

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "hatch.linewidth": 0.5,
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
