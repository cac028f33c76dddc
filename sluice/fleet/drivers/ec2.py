"""EC2 through boto3. Credentials are found by boto3: the instance's role, else SlurmUser's own files.

A launch passes its token as ClientToken, which makes it idempotent at EC2, and looks for the token's tag first, as not
all that speak EC2's protocol keep that promise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sluice.base.errors import SluiceError
from sluice.base.text import one_line
from sluice.fleet.driver import DriverSite, Machine, Order, ProviderError
from sluice.fleet.drivers.ec2_account import Account
from sluice.fleet.drivers.ec2_events import Events, Warned

T = TypeVar("T")
log = logging.getLogger("sluice.fleet")
_GONE = frozenset({"shutting-down", "terminated", "stopping", "stopped"})
_NOTICES = ("marked-for-termination", "marked-for-stop")
"""What the status of a spot request is from the notice until its machine ends."""
_SETTINGS = (
    "region", "image", "endpoint", "subnet", "subnets", "security_groups", "instance_profile", "user_data", "spot",
    "events",
)  # fmt: skip


class Ec2:
    """The driver."""

    def __init__(self, site: DriverSite) -> None:
        site.only(*_SETTINGS)
        self._site = site
        self._image = site.setting("image")
        self._user_data = ""
        if "user_data" in site.settings:
            path = Path(site.setting("user_data"))
            try:
                self._user_data = path.read_text()
            except OSError as error:
                raise SluiceError(f"pool {site.pool}: {path}: {error.strerror}", remedy="SlurmUser reads it") from error
        account = Account(site)
        self._call = account.call
        self._ec2 = account.client("ec2")
        self._events = Events(account.client("sqs"), site.setting("events")) if "events" in site.settings else None

    def launch(self, order: Order) -> Machine:
        """As `Driver.launch`."""
        for machine in self._machines([{"Name": "tag:sluice-token", "Values": [order.token]}]):
            if not machine.ending:
                return machine
        answer = self._call(lambda: self._ec2.run_instances(**self._words(order)))
        return self._machine(answer["Instances"][0])

    def _words(self, order: Order) -> dict[str, Any]:
        settings = self._site.settings
        tags = [
            {"Key": key, "Value": value} for key, value in (*self._site.tags_of(order).items(), ("Name", order.node))
        ]
        words: dict[str, Any] = {
            "ImageId": self._image,
            "InstanceType": order.shape,
            "MinCount": 1,
            "MaxCount": 1,
            "ClientToken": order.token,
            "TagSpecifications": [{"ResourceType": kind, "Tags": tags} for kind in ("instance", "volume")],
            "InstanceInitiatedShutdownBehavior": "terminate",
        }
        if order.zone:
            words["Placement"] = {"AvailabilityZone": order.zone}
        if subnet := self._subnet(order.zone):
            words["SubnetId"] = subnet
        if groups := settings.get("security_groups"):
            words["SecurityGroupIds"] = groups
        if profile := settings.get("instance_profile"):
            words["IamInstanceProfile"] = {"Name": profile}
        if self._user_data:
            words["UserData"] = self._user_data.replace("{node}", order.node)
        if settings.get("spot") is True:
            words["InstanceMarketOptions"] = {"MarketType": "spot"}
        return words

    def _subnet(self, zone: str) -> object:
        subnets = self._site.settings.get("subnets")
        if not isinstance(subnets, dict):
            return self._site.settings.get("subnet")
        if zone not in subnets:
            raise ProviderError(
                "refused", f"EC2: settings.subnets has no subnet of zone {zone!r}; name it in the policy"
            )
        return subnets[zone]

    def terminate(self, machine: str) -> None:
        """As `Driver.terminate`."""
        try:
            self._call(lambda: self._ec2.terminate_instances(InstanceIds=[machine]))
        except ProviderError as error:
            if "InvalidInstanceID.NotFound" not in error.what:
                raise

    def machines(self) -> list[Machine]:
        """As `Driver.machines`."""
        found = self._machines([{"Name": f"tag:{key}", "Values": [value]} for key, value in self._site.tags.items()])
        notices = self._told(self._notices) if found and self._site.settings.get("spot") is True else {}
        events = self._warnings({one.id for one in found})
        warned = [(one, events.get(one.id, Warned())) for one in found]
        return [replace(one, notice=notices.get(one.id) or of.notice, at_risk=of.at_risk) for one, of in warned]

    def _warnings(self, machines: Collection[str]) -> dict[str, Warned]:
        """What the queue says of machines. No machine may be a mistake: then it keeps its messages."""
        if self._events is None or not machines:
            return {}
        try:
            self._call(self._events.forget)
        except ProviderError as error:
            log.warning("pool %s: messages stay in the queue of events: %s", self._site.pool, one_line(str(error)))
        return self._told(partial(self._events.read, machines))

    def _notices(self) -> dict[str, str]:
        filters = [{"Name": "status-code", "Values": list(_NOTICES)}]
        found = self._ec2.get_paginator("describe_spot_instance_requests").paginate(Filters=filters)
        requests = [one for page in found for one in page["SpotInstanceRequests"] if one.get("InstanceId")]
        return {one["InstanceId"]: f"EC2 spot: {one['Status']['Code']}" for one in requests}

    def _told(self, ask: Callable[[], dict[str, T]]) -> dict[str, T]:
        """By instance. Without it, a machine that is taken back is one that has vanished: no reason to fail."""
        try:
            return self._call(ask)
        except ProviderError as error:
            log.warning("pool %s: no notices of spot machines: %s", self._site.pool, one_line(str(error)))
            return {}

    def _machines(self, filters: list[dict[str, Any]]) -> list[Machine]:
        def pages() -> list[Machine]:
            found = self._ec2.get_paginator("describe_instances").paginate(Filters=filters)
            groups = [group for page in found for group in page["Reservations"]]
            return [self._machine(one) for group in groups for one in group["Instances"]]

        return self._call(pages)

    def _machine(self, one: dict[str, Any]) -> Machine:
        tags = {tag["Key"]: tag["Value"] for tag in one.get("Tags", ())}
        return Machine(
            id=one["InstanceId"],
            token=tags.get("sluice-token", ""),
            node=tags.get("sluice-node", ""),
            shape=one.get("InstanceType", ""),
            zone=one.get("Placement", {}).get("AvailabilityZone", ""),
            address=one.get("PrivateIpAddress", ""),
            ending=one["State"]["Name"] in _GONE,
        )


def make(site: DriverSite) -> Ec2:
    """The entry point. Raises SluiceError."""
    return Ec2(site)
