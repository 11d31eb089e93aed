"""What mkdocs calls: pages made from code and from files beside ``docs/``, and links that fit where a page lies."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))

import commands  # noqa: E402
import figures  # noqa: E402
import formats  # noqa: E402
import keys  # noqa: E402

BESIDE = {"CHANGELOG.md": "CHANGELOG.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}
BESIDE |= {f"benchmarks/{p.parent.name}/README.md": f"figures/{p.parent.name}.md" for p in ROOT.glob("benchmarks/*/R*")}

"""Files of the checkout that are pages too."""

MADE = {
    "reference/pulse_block.md": keys.page,
    "reference/commands.md": commands.page,
    "reference/files.md": formats.page,
    "figures.md": figures.page,
}
"""Pages by what makes them."""

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that no file of ``docs/`` holds."""
    from mkdocs.structure.files import File

    for source, page in BESIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    for page, make in MADE.items():
        files.append(File.generated(config, page, content=make()))
    for schema in sorted((ROOT / "deepspeed_pulse" / "schemas").iterdir()):
        files.append(File.generated(config, f"reference/schemas/{schema.name}", abs_src_path=str(schema)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links between files of the checkout become links between pages, or the file's name where it is no page."""
    here = page.file.src_uri
    if here.startswith("figures/"):  # wide tables: they get the room of both menus
        page.meta["hide"] = ["navigation", "toc"]
    source = next((source for source, made in BESIDE.items() if made == here), f"docs/{here}")
    pieces, end = [], 0
    for block in _CODE.finditer(markdown):
        pieces += [_with_links(markdown[end : block.start()], source, here), block[0]]
        end = block.end()
    return "".join([*pieces, _with_links(markdown[end:], source, here)])


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """A picture is a link to itself: on a phone it is opened to be read."""
    return re.sub(r'<img [^>]*src="([^"]+)"[^>]*/?>', r'<a href="\1">\g<0></a>', html)


def _with_links(text: str, source: str, here: str) -> str:
    return _LINK.sub(lambda link: _link(link, source, here), text)


def _link(link: re.Match[str], source: str, here: str) -> str:
    picture, text, target, anchor = link[1], link[2], link[3], link[4] or ""
    if ":" in target:
        return link[0]
    path = os.path.normpath(PurePosixPath(source).parent / target)
    if path.startswith("docs/"):
        page = path.removeprefix("docs/")
    elif path in BESIDE:
        page = BESIDE[path]
    else:
        return text if text.strip("`") == path else f"{text} (`{path}`)"
    return f"{picture}[{text}]({os.path.relpath(page, PurePosixPath(here).parent)}{anchor})"
