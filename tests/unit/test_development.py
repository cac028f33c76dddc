"""What a contributor relies on: help, hooks and editors that agree with the Makefile, pages that name real files."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))


def make(*arguments: str) -> str:
    words = ["make", "--no-print-directory", *arguments]  # these tests may run below make
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout


def paths_named(text: str) -> set[str]:
    """Words in backquotes that look like a path of the repository; what is in `build` is not committed."""
    words = (word for quoted in re.findall(r"`([^`\n]+)`", text) for word in quoted.split())
    return {word for word in words if re.fullmatch(r"(?!build/)\w[\w.-]*/[\w./-]*", word)}


def test_modules_of_tests_have_names_of_their_own() -> None:
    """pytest imports them by their last name: of two with the same, one fails when all are collected."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_make_help_has_a_line_for_every_target() -> None:
    assert "lint" in TARGETS
    assert {line.split()[0] for line in make("help").splitlines() if len(line.split()) > 1} == TARGETS


def test_every_target_is_phony() -> None:
    (phony,) = re.findall(r"^\.PHONY:((?:.*\\\n)*.*)$", MAKEFILE, re.MULTILINE)
    assert set(phony.replace("\\", "").split()) == TARGETS


def test_make_lint_installs_no_package_and_compiles_nothing() -> None:
    recipe = make("-n", "-B", "lint")
    assert "install-packages" not in recipe and "cmake" not in recipe


def test_hooks_before_a_commit_do_what_make_lint_does() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local", "nothing is fetched"
    linters = [line for line in make("-n", "lint").splitlines() if re.match(r"\.venv/bin/(?!pip)|tools/", line)]
    assert [hook["entry"] for hook in repository["hooks"]] == linters


def test_editors_and_formatters_have_one_line_length() -> None:
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["line-length"]
    assert f"max_line_length = {ruff}\n" in (ROOT / ".editorconfig").read_text()
    assert f"ColumnLimit: {ruff}\n" in (ROOT / ".clang-format").read_text()


def test_the_development_container_calls_targets_that_exist() -> None:
    text = (ROOT / ".devcontainer/devcontainer.json").read_text()
    container = json.loads(re.sub(r"^//.*$", "", text, flags=re.MULTILINE))
    (called,) = re.findall(r"&& make (.*)$", container["onCreateCommand"])
    assert set(called.split()) <= TARGETS


@pytest.mark.parametrize("template", sorted((ROOT / ".github").rglob("*.md")), ids=lambda path: path.stem)
def test_templates_ask_for_what_the_doctor_says(template: Path) -> None:
    assert "`sluice doctor --json`" in template.read_text()


@pytest.mark.parametrize(
    "page", ["CONTRIBUTING.md", ".github/pull_request_template.md", ".github/ISSUE_TEMPLATE/bug.md"]
)
def test_pages_for_contributors_name_paths_and_targets_that_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    assert [path for path in sorted(paths_named(text)) if not (ROOT / path).exists()] == []
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= TARGETS


def test_what_is_added_often_is_described_in_ten_lines_with_names_of_files_that_exist() -> None:
    _, *lists = (ROOT / "CONTRIBUTING.md").read_text().partition("## How to add")[2].split("\n### ")
    assert len(lists) == 5
    for text in lists:
        title, *lines = (line for line in text.splitlines() if line)
        assert len(lines) <= 10, title
        for name in re.findall(r"`(\w+\.(?:py|c|h|yaml))`", text):
            rooms = (ROOT / room for room in ("gpu_sim", "native", "prolog_epilog", "tests"))
            assert any(path for room in rooms for path in room.rglob(name)), f"{title}: {name}"
