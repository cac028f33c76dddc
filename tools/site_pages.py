"""Hook of mkdocs: makes pages of the top folder's texts and the man pages, pictures, and references from the code."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import api_reference
import metrics_reference
import policy_reference
import report_reference

from sluice.base.run import run_command

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_ROOT = Path(__file__).resolve().parent.parent
_TOP_PAGES = {
    "README.md": "readme.md",
    "README.zh-CN.md": "readme.zh-CN.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
}
_REFERENCES = {
    "api.md": api_reference.reference,
    "metrics.md": metrics_reference.reference,
    "policy.md": policy_reference.reference,
    "report-fields.md": report_reference.reference,
}
"""What follows the text of a page."""


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds what is not in docs/ as a page or picture."""
    from mkdocs.structure.files import File

    for uri, content in {**_top_pages(), **_man_pages(), **_pictures()}.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Adds the reference; lists as GitHub reads them become lists that Python-Markdown reads, too, outside of code."""
    if page.file.src_uri.startswith("man/"):
        return markdown
    if reference := _REFERENCES.get(page.file.src_uri):
        markdown += "\n\n" + reference()
    parts = re.split(r"^(```.*?^```)$", markdown, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [_clear_lists(part) for part in parts[::2]]
    return "".join(parts)


def _clear_lists(text: str) -> str:
    """A blank line before each list, four spaces before what belongs to an item, and eight before its code."""
    unfenced = re.sub(r"^ {2,3}```\w*\n(.*?)^ {2,3}```$", _indent_code, text, flags=re.MULTILINE | re.DOTALL)
    indented = re.sub(r"^ {1,3}(?=\S)", "    ", unfenced, flags=re.MULTILINE)
    return re.sub(r"^([^-\s].*\n)(?=- )", r"\1\n", indented, flags=re.MULTILINE)


def _indent_code(fenced: re.Match[str]) -> str:
    return "\n" + textwrap.indent(textwrap.dedent(fenced[1]), " " * 8)


def _top_pages() -> dict[str, str]:
    return {page: _as_seen_from_docs((_ROOT / name).read_text()) for name, page in _TOP_PAGES.items()}


def _as_seen_from_docs(text: str) -> str:
    for name, page in _TOP_PAGES.items():
        text = text.replace(f"]({name}", f"]({page}")
    return text.replace("](docs/", "](")


def _man_pages() -> dict[str, str]:
    pages: dict[str, str] = {}
    index = ["# Man pages", "", "| page | |", "|---|---|"]
    for path in sorted((_ROOT / "docs/man").iterdir()):
        name, _, section = path.name.rpartition(".")
        html = run_command(["mandoc", "-T", "html", "-O", "fragment", str(path)], timeout=60).stdout
        body = html[html.index('<div class="manual-text">') : html.index('<table class="foot">')]
        pages[f"man/{path.name}.md"] = f"# {name}({section})\n\n{body}"
        index.append(f"| [{name}({section})]({path.name}.md) | {_summary(path)} |")
    return pages | {"man/index.md": "\n".join(index) + "\n"}


def _summary(path: Path) -> str:
    """The text after the dash in the section NAME."""
    found = re.search(r"^\.SH NAME\n.* \\- (.*)$", path.read_text(), re.MULTILINE)
    return found[1].replace("\\-", "-") if found else ""


def _pictures() -> dict[str, str]:
    return {
        f"pictures/{path.stem}.svg": run_command(["dot", "-Tsvg", str(path)], timeout=60).stdout
        for path in sorted((_ROOT / "docs/pictures").glob("*.dot"))
    }
