"""The one exception family of the project."""

from __future__ import annotations


class SluiceError(Exception):
    """Something that a person can correct.

    `what` says what is wrong and names the value and the place; `remedy` says what to do about it.
    `usage` marks a mistake in the request (exit code 2) rather than a failure to carry it out (exit code 1).
    `logged`: the log of the daemon has it already, so what catches it does not log it.
    """

    logged = False

    def __init__(self, what: str, *, remedy: str = "", usage: bool = False) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy
        self.usage = usage

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}" if self.remedy else self.what


class UsageError(SluiceError):
    """The request is not valid: a bad option, name or file. Nothing was done."""

    def __init__(self, what: str, *, remedy: str = "") -> None:
        super().__init__(what, remedy=remedy, usage=True)
