"""Changes of the policy file by commands: comments, order and layout of what is not changed stay as they are."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from policy.document import PolicyError, Source, parse, read
from sluice.base.errors import SluiceError, UsageError
from sluice.base.files import write_atomic


def require_writable(path: Path) -> None:
    """Raise UsageError for a policy file that the caller may not write."""
    if not path.exists():
        raise UsageError(f"{path}: No such file or directory", remedy="name a policy file")
    if not os.access(path, os.W_OK) or not os.access(path.resolve().parent, os.W_OK):
        raise UsageError(
            f"{path}: you may not change it", remedy="ask who keeps the policy file, or name yours with --file"
        )


def edited(path: Path, change: Callable[[Any], None]) -> Source:
    """The policy after `change` of its document (a ruamel mapping); nothing is written. Raises PolicyError."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    text = read(path)
    parse(text, source=str(path))
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 120
    yaml.indent(mapping=2, sequence=4, offset=2)
    try:
        document = yaml.load(text) or {}
    except YAMLError as error:
        raise UsageError(f"{path}: {error}", remedy="correct the file") from error
    change(document)
    out = io.StringIO()
    yaml.dump(document, out)
    new = out.getvalue()
    try:
        return Source(path, new, parse(new, source=f"{path} (changed)"))
    except PolicyError as error:
        first = error.problems[0]
        raise UsageError(f"{first.place}: {first.what}", remedy=first.remedy) from error


def save(source: Source, was: str) -> None:
    """Write the file; owner, group and mode stay. Raises OSError, and SluiceError where it is no longer `was`."""
    if read(source.path) != was:
        raise SluiceError(f"{source.path}: somebody changed it in the meantime", remedy="try again")
    status = source.path.stat()
    write_atomic(source.path, source.text, mode=status.st_mode & 0o777, like=status)


def mapping_of(document: Any, name: str) -> Any:
    """What is below a name in the file, made where there is nothing."""
    if document.get(name) is None:
        document[name] = {}
    return document[name]


def existing(document: Any, name: str, section: str = "tenants") -> Any:
    """The mapping of a tenant, or of a name of another section, in the file. Raises UsageError."""
    names = mapping_of(document, section)
    if name not in names:
        known = ", ".join(list(names)[:10]) or "none"
        what = f"{section.removesuffix('s')} {name[:80]!r}"
        raise UsageError(f"{what}: not in the policy file", remedy=f"those are: {known}")
    return mapping_of(names, name)


def change_replicas(
    document: Any, service: str, *, least: int | None = None, most: int | None = None, paused: bool | None = None
) -> None:
    """How many replicas a service has, and whether it is paused; None leaves it. Raises UsageError."""
    one = existing(document, service, "services")
    for key, value in (("least", least), ("most", most)):
        if value is not None:
            mapping_of(one, "replicas")[key] = value
    if paused:
        one["paused"] = True
    elif paused is not None:
        take_out(one, "paused")
        if one.get("paused"):  # of a mapping that is merged into it
            one["paused"] = False


def take_out(mapping: Any, key: str) -> None:
    """Without a key. Raises UsageError where ruamel cannot."""
    try:
        mapping.pop(key, None)
    except KeyError as error:
        raise UsageError(
            f"{key!r}: other mappings have it from this one by an anchor", remedy="change the file by hand"
        ) from error


def value_of(word: str) -> Any:
    """The text after ``KEY=``: YAML, e.g. ``8``, ``640G``, ``[h100]``. Raises UsageError."""
    import yaml

    try:
        return yaml.safe_load(word)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{word!r}: not a value", remedy="write it as in the policy file, e.g. 8 or [a, b]") from error


def set_value(mapping: Any, key: str, word: str) -> None:
    """Set ``a.b.c`` of a mapping to a value; an empty one takes it out. Raises UsageError."""
    *path, last = key.split(".")
    if not all([*path, last]):
        raise UsageError(f"{key!r}: not a key", remedy="write it as e.g. limit.gpus")
    here = mapping
    for part in path:
        if here.get(part) is None:
            if word == "":
                return
            here[part] = {}
        here = here[part]
        if not hasattr(here, "keys"):
            raise UsageError(f"{key!r}: {part!r} is not a mapping in the file", remedy="see man sluice.yaml")
    if word == "":
        take_out(here, last)
    else:
        here[last] = value_of(word)


def pairs(words: tuple[str, ...]) -> list[tuple[str, str]]:
    """``KEY=VALUE`` words. Raises UsageError."""
    found = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UsageError(f"{word!r}: not KEY=VALUE", remedy="write it as e.g. limit.gpus=8; KEY= takes it out")
        found.append((key, value))
    return found
