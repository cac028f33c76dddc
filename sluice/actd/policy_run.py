"""Run by `sluice actd` in a process of its own, as root: checks, plans and applies a policy file that was sent, and
changes services in the one that is there.

Standard input is one JSON object, standard output another one. A plan's name is a digest of all that it would change,
and of the policy file that is there: applied is only what was seen.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from policy import document
from policy.access import Caller
from policy.changes import show
from policy.edit import change_replicas, edited, save
from policy.site import Comparison, Site
from sluice.base.errors import SluiceError, UsageError
from sluice.base.files import write_atomic

_MOST_LINES = 20_000


def check(text: str) -> dict[str, Any]:
    """All its mistakes."""
    policy, problems = document.check(text, source="policy")
    mistakes = [{name: value for name, value in asdict(one).items() if name != "source"} for one in problems]
    tenants = None if policy is None else len(policy.tenants)
    unenforced = [] if policy is None or problems else list(policy.unenforced())
    return {"schema_version": 1, "mistakes": mistakes, "tenants": tenants, "unenforced": unenforced}


def plan(site: Site, path: Path, text: str) -> tuple[Comparison, dict[str, Any]]:
    """What would change. Raises SluiceError."""
    comparison = site.compare(document.Source(path, text, document.parse(text, source="policy")))
    shown = comparison.document()
    seen = {name: shown[name] for name in ("cluster", "version")} | {"changes": _lasting(shown["changes"])}
    seen["there"] = document.digest(path.read_text()) if path.exists() else ""
    return comparison, {
        "schema_version": 1,
        "hash": hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest(),
        **{name: shown[name] for name in ("cluster", "version", "changes", "notes")},
        "lines": list(show(comparison.changes))[:_MOST_LINES],
    }


def _lasting(changes: list[dict[str, Any]]) -> list[Any]:
    """The changes without what depends on the moment: the time in a compiled file, and the checksum over it."""
    text = re.sub(r"(generated-s = |checksum = crc32:)\w+", "", json.dumps(changes))
    return list(json.loads(text))


def apply(site: Site, path: Path, text: str, wanted: str, who: Caller) -> dict[str, Any]:
    """Make the changes of a plan, and its text the policy file. Raises SluiceError, PlanChangedError."""
    was = document.read(path) if path.exists() else None
    comparison, made = plan(site, path, text)
    if made["hash"] != wanted:
        raise PlanChangedError("the plan has changed since it was shown", remedy="make a new plan, and look at it")
    said: list[str] = []

    def before() -> None:
        if was is None:
            write_atomic(path, text)
        else:
            save(comparison.source, was)

    done, left = site.apply(comparison, who=who, progress=said.append, before=before)
    return {"schema_version": 1, "hash": wanted, "changes": len(done), "left": len(left), "messages": said[:100]}


def change_service(site: Site, path: Path, asked: dict[str, Any], who: Caller) -> dict[str, Any]:
    """Scale, pause or resume a service in the policy file, and apply it. Nothing else is changed by it: where the file
    has more that is not applied, or other services share its replicas, it is refused. Raises SluiceError,
    PlanChangedError.
    """
    was = document.read(path)
    before = site.compare(document.load(path), keep_level=True)
    if before.changes:
        raise PlanChangedError(
            f"{path}: {len(before.changes)} changes in it are not applied", remedy="plan and apply the policy first"
        )
    name, words = asked["service"], {word: asked.get(word) for word in ("least", "most", "paused")}
    source = edited(path, lambda policy: change_replicas(policy, name, **words))
    there = before.source.policy.services
    if shared := [one for one, now in source.policy.services.items() if one != name and now != there.get(one)]:
        raise UsageError(
            f"{path}: service {name!r} shares its replicas with {', '.join(shared[:10])} by an anchor",
            remedy="write the fields of each out, or change the file by hand",
        )
    said: list[str] = []
    comparison = site.compare(source, keep_level=True)
    done, _ = site.apply(
        comparison, who=who, action="serve change", progress=said.append, before=lambda: save(source, was)
    )
    return {"schema_version": 1, "service": name, "changes": len(done), "messages": said[:100]}


class PlanChangedError(SluiceError):
    """What would change is not what was seen."""


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """One request. Raises SluiceError."""
    if asked["do"] == "policy-check":
        return check(asked["text"])
    site = Site(*(None if asked[name] is None else Path(asked[name]) for name in ("conf", "prefix", "state")))
    if asked["do"] == "policy-drift":
        return site.drift().document()
    path = Path(asked["path"])
    if asked["do"] == "policy-plan":
        return plan(site, path, asked["text"])[1]
    who = Caller(asked["user"], asked["uid"], asked["level"])
    if asked["do"] == "service-change":
        return change_service(site, path, asked, who)
    return apply(site, path, asked["text"], asked["hash"], who)


def main() -> None:
    """Answer the object on standard input."""
    try:
        found = {"ok": run(json.load(sys.stdin))}
    except PlanChangedError as error:
        found = {"error": {"status": 409, "what": error.what, "remedy": error.remedy}}
    except SluiceError as error:
        status = 422 if error.usage or isinstance(error, document.PolicyError) else 503
        found = {"error": {"status": status, "what": error.what, "remedy": error.remedy}}
    except OSError as error:
        what = f"{error.filename or 'policy'}: {error.strerror}"
        found = {"error": {"status": 503, "what": what, "remedy": "see the log of sluice-actd"}}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
