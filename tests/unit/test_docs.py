"""README and docs/: links and walks name files that exist, tables match the layers, references have all fields."""

from __future__ import annotations

import re
import runpy
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from policy.model import Policy
from sluice.metrics.names import MEASUREMENTS
from sluice.report.fields import FIELDS

ROOT = Path(__file__).parents[2]
POLICY = runpy.run_path(str(ROOT / "tools/policy_reference.py"))
TUNING = (ROOT / "docs/tuning.md").read_text()
HOUSE = (ROOT / "docs/pictures/house.dot").read_text()
FOLDERS = "|".join(path.name for path in ROOT.iterdir() if path.is_dir())


def rows_of(table: str) -> list[set[str]]:
    """The rows of one of the house's tables, from the top."""
    (text,) = re.findall(rf"^  {table} \[label=<(.*?)</table>", HOUSE, re.MULTILINE | re.DOTALL)
    rows = (set(re.findall(r'<td port="[^"]*"[^>]*>([^<]*)<', line)) for line in text.splitlines())
    return [row for row in rows if row]


def reference(name: str) -> str:
    """What the site adds to a page."""
    return str(runpy.run_path(str(ROOT / f"tools/{name}_reference.py"))["reference"]())


# Links from pages of docs/ are mkdocs' (strict); it sees README as a page of docs/.
@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.stem)
def test_a_page_of_the_top_links_files_that_are_there(page: Path) -> None:
    named = {link for link in re.findall(r"\]\(([^)#]+)", page.read_text()) if "://" not in link}
    assert named
    assert [link for link in named if not (ROOT / link).is_file()] == []


FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
READMES = [(ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md")]


def test_both_readmes_show_the_same_commands() -> None:
    blocks = ([re.sub(r" *#.*", "", block) for block in FENCED.findall(text)] for text in READMES)
    assert next(blocks) == next(blocks)
    inline = (Counter(re.findall(r"`([^`]+)`", FENCED.sub("", text))) for text in READMES)
    assert next(inline) == next(inline)


def test_both_readmes_have_the_same_figures_and_links() -> None:
    figure = r"\d+(?:[.,]\d+)*(?: (?:%|us|ms|s|min|MiB|GiB)(?![a-z]))?"
    figures = (Counter(re.findall(figure, text)) for text in READMES)
    assert next(figures) == next(figures)
    links = (set(re.findall(r"\]\(([^)]+)", text)) - {"README.md", "README.zh-CN.md"} for text in READMES)
    assert next(links) == next(links)


def test_tests_that_pages_name_are_there() -> None:
    files: dict[str, str] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):  # several folders may have one of a name
        files[path.name] = files.get(path.name, "") + path.read_text()
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    named = re.findall(r"(test_\w+\.py)(?:::(test_\w+))?", pages)
    assert len(named) > 50
    assert [f"{name}::{test}" for name, test in named if f"def {test}" not in files.get(name, "")] == []


def test_references_have_every_field() -> None:
    assert [name for name in Policy.model_fields if f"| `{name}` |" not in reference("policy")] == []
    assert [one.name for one in FIELDS if f"| {one.name} | `{one.key}` |" not in reference("report")] == []
    assert [one.name for one in MEASUREMENTS if f"### `{one.name}`" not in reference("metrics")] == []
    assert "class `Cluster`" in reference("api")


def field_of(path: str) -> FieldInfo:
    """The field of the policy that a dotted path names; * is any name of a mapping."""
    section: type[BaseModel] = Policy
    *folders, last = path.replace(".*.", ".").split(".")
    for key in folders:
        section = POLICY["inner_models"](section.model_fields[key].annotation)[0]
    return section.model_fields[last]


def test_the_tuning_guide_has_settings_with_their_defaults() -> None:
    rows = re.findall(r"^\| `(\w+\.[\w.*]+)` \| ([^|]+) \|", TUNING, re.MULTILINE)
    assert len(rows) > 30
    assert {path: POLICY["default"](field_of(path)) for path, _ in rows} == dict(rows)


@pytest.mark.parametrize("example", re.findall(r"```yaml\n(.*?)```", TUNING, re.DOTALL))
def test_an_example_of_the_tuning_guide_is_a_policy(example: str) -> None:
    assert Policy.model_validate(yaml.safe_load(example))


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("walk-*.md")), ids=lambda page: page.stem)
def test_a_walk_names_files_that_are_there(page: Path) -> None:
    named = re.findall(rf"`((?:{FOLDERS})/[^`\s]+)`", page.read_text())
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("walk-*.md")), ids=lambda page: page.stem)
def test_a_walk_names_functions_of_the_file_in_its_row(page: Path) -> None:
    rows = re.findall(r"^\| `([^`]+)` \| `(\w+)`", page.read_text(), re.MULTILINE)
    assert rows
    assert [name for path, name in rows if name not in (ROOT / path).read_text()] == []


def test_the_house_has_the_layers_that_imports_keep() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (one["layers"] for one in contracts if one["id"] == "layers")
    assert rows_of("python") == [set(layer.split(" | ")) for layer in layers]


def test_the_house_has_the_layers_that_includes_keep() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    (table,) = re.findall(r"## C includes\n.*?```\n(.*?)```", page, re.DOTALL)
    height = {folder: -number for number, row in enumerate(rows_of("c")) for folder in row}
    for folder, *included in map(str.split, table.splitlines()):
        if folder not in {"tests", "fuzz"} and not re.match("native/(bench|fuzz|.*tests|include)", folder):
            assert all(height[folder] > height[one] for one in included if one != "native/include/sluice"), folder
