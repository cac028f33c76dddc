"""What a command shows as JSON, an endpoint gives, or the reason why not is written here."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from sluice.main import COMMANDS, sluice
from sluice.web.api import ENDPOINTS

_NODE, _FILES, _DEV, _CHANGES = "of one node", "of files on this host", "of a development cluster", "changes something"
_SITE = "of the site's installation, for root"
SHOWN = {
    "alerts list": "/alerts",
    "explain": "/jobs/{job}/explanation",
    "failover status": "/failover",
    "health list": "/health",
    "health history": "/health/history",
    "inventory": "/inventory",
    "policy show": "/policy",
    "quota show": "/tenants/{tenant}/quota",
    "tenant list": "/tenants",
    "tenant show": "/tenants/{tenant}",
    "tenant usage": "/tenants/{tenant}/usage",
    "whoami": "/whoami",
}
NOT_SHOWN = {
    "agent status": _NODE,
    "agent record": _NODE,
    "health check": _NODE,
    "mig plan": _NODE,
    "probe": _NODE,
    "topo": _NODE,
    "controllerd status": _SITE,
    "doctor": _SITE,
    "plugin status": _SITE,
    "token list": _SITE,
    "failover drill": _CHANGES,
    "failover history": _SITE,
    "policy check": _FILES,
    "lint": _FILES,
    "group": _FILES,
    "simulate": _FILES,
    "plan": "needs the policy file of who asks",
    "drift": "asks Slurm",
    "plugin check": _SITE,
    "shadow report": _FILES,
}


def commands_with_json(command: click.Command, name: str) -> Iterator[str]:
    if any(isinstance(one, click.Option) and "--json" in one.opts for one in command.params):
        yield name
    if isinstance(command, click.Group):
        for word, one in command.commands.items():
            yield from commands_with_json(one, f"{name} {word}")


def all_with_json() -> set[str]:
    found: set[str] = set()
    for name in COMMANDS:
        command = sluice.get_command(click.Context(sluice), name)
        assert command is not None
        found |= set(commands_with_json(command, name))
    return found


def test_each_command_with_json_has_an_endpoint_or_a_reason() -> None:
    of_groups = {"report": "reports are not served yet", "cluster": _DEV, "sim": _DEV}
    rest = {name for name in all_with_json() if name.partition(" ")[0] not in of_groups}
    assert sorted(rest ^ (set(SHOWN) | set(NOT_SHOWN))) == []


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_an_endpoint_that_is_named_is_there(name: str) -> None:
    assert SHOWN[name] in {one.path for one in ENDPOINTS} and name in all_with_json()
