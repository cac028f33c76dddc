"""The page's languages. Texts are written in English, and a catalogue has those of each other language."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

TEMPLATES = Path(__file__).parents[1] / "templates"
LANGUAGES = {"en": "English", "zh": "中文"}

Say = Callable[..., str]
"""Turns an English text into the viewer's language; words in braces are given by name."""


@cache
def catalogue(language: str) -> dict[str, str]:
    """A language's texts by the English ones: of all its files."""
    found: dict[str, str] = {}
    for path in sorted(TEMPLATES.glob(f"{language}*.json")):
        found |= json.loads(path.read_text(encoding="utf-8"))
    return found


@cache
def say_in(language: str) -> Say:
    """How to say something."""
    texts = catalogue(language)

    def say(text: str, /, **words: object) -> str:
        found = texts.get(text, text)
        return found.format_map(words) if words else found

    return say


@cache
def _said(language: str) -> tuple[tuple[re.Pattern[str], str], ...]:
    """What problems say with names and numbers in it: how to see that it is said, and how to say it."""
    path = TEMPLATES / f"problems-{language}.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return tuple(
        (re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>.{1,2000}?)", re.escape(text)), re.DOTALL), said)
        for text, said in known.items()
    )


def translate_problem(language: str, text: str) -> str:
    """A problem's or a remedy's words in a language; as they are where it does not know them, as those of Slurm."""
    for pattern, said in _said(language):
        if (match := pattern.fullmatch(text)) is not None:
            return said.format_map(match.groupdict())
    return text


def choose(accepted: str) -> str:
    """A language for an Accept-Language header."""
    best, weight = "en", 0.0
    for piece in accepted[:512].split(","):
        name, _, quality = piece.strip().partition(";q=")
        try:
            mine = float(quality or 1)
        except ValueError:
            continue
        language = name.strip().lower().partition("-")[0]
        if language in LANGUAGES and mine > weight:
            best, weight = language, mine
    return best
