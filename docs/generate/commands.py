"""The page of ``ds_pulse``: every command's own help, from its parser."""

from __future__ import annotations

import argparse
import re

from deepspeed_pulse.cli.parser import make_parser

HEAD = """# ds_pulse

`ds_pulse` makes plans, shows them and reads what runs have written. `python -m deepspeed_pulse` is the same command.
It exits with status 0, with 1 for a check that failed, and with 2 for input that it cannot use; then it writes nothing.

This page is made from the command's own parser.

"""


def page() -> str:
    """As Markdown."""
    parser = make_parser("")
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {action.dest: action.help for action in commands._choices_actions}
    rows = [f"| [`ds_pulse {name}`](#{name}) | {helps[name]} |" for name in commands.choices]
    parts = [_part(name, str(helps[name]), each) for name, each in commands.choices.items()]
    return HEAD + "\n".join(["| command | what it does |", "| --- | --- |", *rows]) + "\n\n" + "\n".join(parts)


def _part(name: str, what: str, parser: argparse.ArgumentParser) -> str:
    usage = re.sub(r"\s+", " ", parser.format_usage().removeprefix("usage: ")).strip()
    lines = [f"## {name} {{ #{name} }}", "", f"{what[0].upper()}{what[1:]}.", "", "```text", _folded(usage), "```", ""]
    lines += ["| argument | meaning |", "| --- | --- |"]
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction):
            lines.append(f"| {_name(action)} | {_meaning(action)} |")
    return "\n".join(lines) + "\n"


def _name(action: argparse.Action) -> str:
    names = " ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
    takes = action.metavar if action.option_strings and isinstance(action.metavar, str) else ""
    return f"{names} {takes}".strip()


def _meaning(action: argparse.Action) -> str:
    said = [action.help or ""]
    if action.choices:
        said.append(" or ".join(f"`{choice}`" for choice in action.choices))
    if action.required and action.option_strings:
        said.append("required")
    if action.default not in (None, False, [], argparse.SUPPRESS) and "default" not in said[0]:
        said.append(f"default: `{action.default}`")
    return "; ".join(filter(None, said)).replace("|", "\\|").replace("{", "&#123;")


def _folded(usage: str, width: int = 100) -> str:
    """Breaks between arguments only."""
    lines = [""]
    for word in re.findall(r"\[[^\]]*\]|\S+", usage):
        if len(lines[-1]) + len(word) > width:
            lines.append("   ")
        lines[-1] = f"{lines[-1]} {word}" if lines[-1].strip() else lines[-1] + word
    return "\n".join(lines)
