"""boto3's clients with the credentials that it finds, which no error shows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.session import get_session

from sluice.base.errors import SluiceError
from sluice.base.private import check_private
from sluice.fleet.driver import DriverSite, ProviderError
from sluice.fleet.drivers.ec2_failures import failure_of

T = TypeVar("T")
_FILES = {
    "shared-credentials-file": "credentials_file", "config-file": "config_file", "assume-role": "credentials_file",
}  # fmt: skip
"""By the way that boto3 found credentials: its setting with the path of the file that they may be in."""


class Account:
    """A pool's way to EC2. Raises SluiceError for credentials in a file that others can read, or bad settings."""

    def __init__(self, site: DriverSite) -> None:
        self._site = site
        core = get_session()
        self._session = boto3.Session(botocore_session=core, region_name=site.setting("region"))
        found = self._checked(self._session.get_credentials)
        if found is not None and found.method in _FILES:
            with suppress(FileNotFoundError):  # those with which a role is taken on may be elsewhere
                check_private(Path(core.get_config_variable(_FILES[found.method])).expanduser())

    def client(self, service: str) -> Any:
        """boto3's, which asks once and soon gives up. Raises SluiceError."""
        config = Config(connect_timeout=5, read_timeout=20, retries={"total_max_attempts": 1})
        endpoint = self._site.settings.get("endpoint")
        return self._checked(lambda: self._session.client(service, endpoint_url=endpoint, config=config))

    def _checked(self, make: Callable[[], T]) -> T:
        try:
            return make()
        except (BotoCoreError, ValueError) as error:
            raise SluiceError(f"pool {self._site.pool}: EC2: {error}", remedy="mend the pool's settings") from error

    def call(self, ask: Callable[[], T]) -> T:
        """What it answers. Raises ProviderError."""
        try:
            return ask()
        except (ClientError, BotoCoreError) as error:
            failure = failure_of(error)
        with suppress(ClientError, BotoCoreError):  # those of a role change: as they are now
            if (found := self._session.get_credentials()) is not None:
                self._site.secrets.add(list(found.get_frozen_credentials()))
        words = self._site.secrets.hide(failure.what)[:300]
        raise ProviderError(failure.kind, words)  # with nothing of the first error, whose request has headers
