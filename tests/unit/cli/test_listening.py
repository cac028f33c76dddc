"""Where services may listen: the same for all that clients of other hosts reach."""

from __future__ import annotations

import importlib
import os

import pytest
from click.testing import CliRunner

from sluice.base.errors import UsageError

SERVICES = ("web", "gateway", "gateway_rpc")


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--address", "gpu1"], "--address: 'gpu1'"),
        (["--address", "10.0.0.1"], "without TLS, .* could be read on the way"),
        (["--certificate", "c.pem"], "belong together"),
        (["--address", "10.0.0.1", "--key", "k.pem", "--without-tls"], "belong together"),
    ],
)
def test_an_address_on_which_others_could_read_is_refused(
    service: str, arguments: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    command = importlib.import_module(f"sluice.cli.{service}").command
    result = CliRunner().invoke(command, arguments)
    assert isinstance(result.exception, UsageError)
    with pytest.raises(UsageError, match=why):
        raise result.exception


@pytest.mark.parametrize(
    ("service", "option"), [("web", "--proxy"), ("gateway", "--proxy"), ("gateway", "--metrics-from")]
)
def test_an_option_with_a_wrong_network_is_named(service: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    command = importlib.import_module(f"sluice.cli.{service}").command
    result = CliRunner().invoke(command, [option, "10.0.0.1/8"])
    assert isinstance(result.exception, UsageError) and str(result.exception).startswith(f"{option}: 10.0.0.1/8")
