"""The page that lists the benchmarks."""

from __future__ import annotations

from pathlib import Path

HEAD = """# Figures

Every figure of this project comes with the command that gets it again. Most benchmarks write their own tables.

| benchmark | command |
| --- | --- |
"""


def page() -> str:
    """As Markdown."""
    rows = []
    for readme in sorted((Path(__file__).parents[2] / "benchmarks").glob("*/README.md")):
        title = readme.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        name = readme.parent.name
        rows.append(f"| [{title}](figures/{name}.md) | `python benchmarks/{name}/run.py` |")
    return HEAD + "\n".join(rows) + "\n"
