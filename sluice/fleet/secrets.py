"""Words that nobody may see: what a driver read as credentials, taken out of what its provider says."""

from __future__ import annotations

import base64
import json
import re
from urllib.parse import quote, quote_plus

HIDDEN = "***"
_ESCAPE = re.compile("%[0-9A-F]{2}")
_SHORTEST = 4  # a shorter word would take a part of each sentence


class Secrets:
    """Those of one pool."""

    def __init__(self) -> None:
        self._words: tuple[str, ...] = ()

    def add(self, given: object) -> None:
        """All texts of credentials, also nested ones."""
        words = {form for word in _texts(given) if len(word) >= _SHORTEST for form in _forms(word)}
        self._words = tuple(
            sorted({*self._words, *words}, key=len, reverse=True)
        )  # longest first: one may have another

    def hide(self, text: str) -> str:
        """The text without them."""
        for word in self._words:
            text = text.replace(word, HIDDEN)
        return text


def _texts(given: object) -> list[str]:
    if isinstance(given, dict):
        given = list(given.values())
    if isinstance(given, list | tuple):
        return [word for one in given for word in _texts(one)]
    return [] if given is None or isinstance(given, bool) else [str(given)]


def _forms(word: str) -> set[str]:
    """As it is, as in a URL, in JSON, and in both kinds of Base64, which may lack the filling at their end."""
    data = word.encode()
    in_url = {quote(word, safe=""), quote_plus(word)}
    in_url |= {_ESCAPE.sub(lambda found: found[0].lower(), one) for one in in_url}
    encoded = {encode(data).decode().rstrip("=") for encode in (base64.b64encode, base64.urlsafe_b64encode)}
    return {word, *in_url, json.dumps(word)[1:-1], *encoded}
