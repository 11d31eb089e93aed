"""Pages of the documentation as what a reader does with them: files that are saved, command lines that are run.

A block with a title is a file; a later block of the same title goes on with it. A block ``sh`` has command lines, run
in the order of the page in the folder of its files. Others are shown only: ``text``, ``diff``, JSON without a title.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_RUN = {"", "text", "diff", "json", "bash"}
"""Languages of blocks that need no title and are not run: ``bash`` is a script of Slurm's."""

_BLOCK = re.compile(r"^([ ]*)```(\w*)(?:[ ]title=\"([^\"]+)\")?[ ]*\n(.*?)^\1```[ ]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """``line``: of its first line in the page."""

    language: str
    title: str | None
    text: str
    line: int


@dataclass(frozen=True)
class Step:
    """A file that is saved, or a command line that is run: ``file`` is None."""

    file: str | None
    text: str
    line: int

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @property
    def ranks(self) -> int | None:
        """Of a command line that starts ranks."""
        found = re.match(r"deepspeed --num_accelerators (\d+) ", self.text)
        return int(found[1]) if found else None


def pages() -> list[Path]:
    """README, site, examples, benchmarks, and what stands beside them."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/*/README.md")]
    return sorted(path for path in found if path.parts[len(ROOT.parts)] not in (".venv", "out", "build"))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        inner = "".join(line.removeprefix(found[1]) for line in found[4].splitlines(keepends=True))
        yield Block(found[2], found[3], inner, text[: found.start()].count("\n") + 2)


def steps(page: Path) -> list[Step]:
    """What a reader does, in order; a file stands where its last block is."""
    found: list[Step] = []
    for block in blocks(page):
        if block.title:
            begun = next((step for step in found if step.file == block.title), None)
            before = begun.text + "\n\n" if begun else ""
            found = [step for step in found if step is not begun]
            found.append(Step(block.title, before + block.text, block.line))
        elif block.language == "sh":
            lines = block.text.replace("\\\n", " ").splitlines()
            commands = [re.sub(r"\s+", " ", line).strip() for line in lines]
            found += [Step(None, line, block.line) for line in commands if line and not line.startswith("#")]
    return found


def ranks_of(page: Path) -> int | None:
    """Ranks of a page's programs, the most of its command lines."""
    return max((step.ranks for step in steps(page) if step.ranks), default=None)
