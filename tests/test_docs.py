"""README and site: words, links, command lines, configs and the names that errors end with."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path

import pytest
from support.pages import NOT_RUN, ROOT, Block, blocks, name_of, pages, ranks_of, steps

from deepspeed_pulse.cli.parser import make_parser
from deepspeed_pulse.config import parse_pulse
from deepspeed_pulse.errors import PulseError

PAGES = [name_of(page) for page in pages()]
RUN = [name for name in PAGES if ranks_of(ROOT / name) or any(step.file for step in steps(ROOT / name))]
LINK = re.compile(r"(?<!`)!?\[[^\]]*\]\(([^)\s]+)\)")


def words(text: str) -> int:
    """Without tables, code and what a script writes."""
    text = re.sub(r"<!-- [^>]*written by.*?(<!-- end|\Z)", "", text, flags=re.DOTALL)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return len([word for line in prose.splitlines() if not line.startswith("|") for word in line.split()])


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 1200
    program = next(block.text for block in blocks(ROOT / "README.md") if block.title)
    assert len([line for line in program.splitlines() if line.strip()]) <= 30
    gains = text.partition("<!-- written")[2].partition("<!-- end")[0]
    assert sum(line.startswith("|") for line in gains.splitlines()) <= 2 + 8


@pytest.mark.parametrize("name", sorted(name_of(page) for page in ROOT.glob("benchmarks/*/README.md")))
def test_what_stands_beside_tables_is_short(name: str) -> None:
    assert words((ROOT / name).read_text()) <= 300


def anchors(page: Path) -> set[str]:
    """As the site and other readers of Markdown make them."""
    found = set()
    for line in page.read_text().splitlines():
        if line.startswith("#"):
            title, _, given = line.lstrip("# ").partition(" { #")
            found.add(re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-"))
            found.add(given.removesuffix(" }"))
    return found


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    """Into the checkout; pages that the site makes from code are there when it is built."""
    page = ROOT / name
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    made = {"pulse_block.md", "commands.md", "files.md", "figures.md"}
    for link in LINK.findall(text):
        path, _, anchor = link.partition("#")
        if "://" in link or Path(path).name in made:
            continue
        target = (page.parent / path).resolve() if path else page
        site = ROOT / "docs" / target.name if not target.exists() else target
        assert target.exists() or site.exists(), f"{name}: {link}"
        assert not anchor or anchor in anchors(target), f"{name}: {link}"


@pytest.mark.parametrize("name", PAGES)
def test_every_block_is_run_or_is_only_shown(name: str) -> None:
    for block in blocks(ROOT / name):
        shown = block.language == "sh" or block.language in NOT_RUN or name == NOT_WHOLE
        assert block.title or shown, f"{name}:{block.line}"
        if block.language == "json":
            checks_json(block)
        if block.language == "python":
            ast.parse(block.text)


NOT_WHOLE = "docs/any_model.md"
"""Its snippet takes any model, and tests/models/traced runs many."""


def checks_json(block: Block) -> None:
    found = json.loads(block.text)
    if isinstance(found, dict) and "pulse" in found:
        parse_pulse(found["pulse"])


OTHER_COMMANDS = {"python", "deepspeed", "make", "pip", "export", "cd", "git", "PYTHONPATH=tests"}


@pytest.mark.parametrize("name", PAGES)
def test_command_lines_are_ones(name: str) -> None:
    """``ds_pulse``'s parser takes them, ``make`` has them, scripts are there."""
    parser, targets = make_parser(""), (ROOT / "Makefile").read_text()
    files = {step.file for step in steps(ROOT / name)}
    for step in steps(ROOT / name):
        if step.file is not None:
            continue
        command, *rest = step.words
        where = f"{name}:{step.line}: {step.text}"
        assert command == "ds_pulse" or command in OTHER_COMMANDS, where
        if command == "ds_pulse":
            parser.parse_args(rest)
        if command == "make":
            assert all(re.search(rf"^{word}:", targets, re.MULTILINE) for word in rest if "=" not in word), where
        if command in ("python", "deepspeed"):
            scripts = [word for word in rest if word.endswith(".py")]
            assert all(script in files or (ROOT / script).is_file() for script in scripts), where


def test_commands_in_the_middle_of_a_sentence_are_ones() -> None:
    parser = make_parser("")
    for name in PAGES:
        for line in re.findall(r"`(ds_pulse [^`\n]+\.json[^`\n]*)`", (ROOT / name).read_text()):
            try:
                parser.parse_args(shlex.split(line)[1:])
            except PulseError as problem:
                raise AssertionError(f"{name}: {line}: {problem}") from None


def names_in_errors() -> set[str]:
    """Short names that messages end with."""
    found: set[str] = set()
    for path in (ROOT / "deepspeed_pulse").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "more" and isinstance(node.value, ast.Constant):
                found.add(node.value.value)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "errors.py" not in str(path):
                found.update(re.findall(r"\[docs: ([\w-]+)\]", node.value))
    return found


def test_errors_lead_to_sections() -> None:
    page = ROOT / "docs" / "errors.md"
    sections = set(re.findall(r"^### ([\w-]+)$", page.read_text(), re.MULTILINE))
    assert names_in_errors() == sections
    every = every_class(PulseError) - {PulseError}
    classes = {kind.__name__ for kind in every if kind.__module__ == PulseError.__module__}
    assert {name.lower() for name in classes} <= anchors(page)


def every_class(kind: type[Exception]) -> set[type[Exception]]:
    return {kind} | {found for below in kind.__subclasses__() for found in every_class(below)}


def test_an_error_ends_with_its_section() -> None:
    problem = PulseError("x" * 5000, more="memory")
    assert str(problem).endswith("x [docs: memory]")
    assert str(PulseError("short")) == "short"
    assert str(PulseError("one\n  two", more="memory")) == "one\n  two\n[docs: memory]"


def test_added_lines_of_a_diff_stand_in_a_program_that_runs() -> None:
    """Of the migration from accelerate and DeepSpeed; diffusion-pipe's own files are not here."""
    for name in ("docs/migrate/accelerate.md", "docs/migrate/deepspeed.md"):
        page = ROOT / name
        programs = " ".join("".join(step.text.split()) for step in steps(page) if step.file)
        for block in (block for block in blocks(page) if block.language == "diff"):
            for line in block.text.splitlines():
                added = "".join(line[1:].split())
                if line.startswith("+") and added and added != '"pulse":{}':
                    assert added.rstrip(",") in programs, f"{name}: {line}"
