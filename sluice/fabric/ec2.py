"""EC2's DescribeInstanceTopology through boto3; it needs ec2:DescribeInstanceTopology and ec2:DescribeInstances."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sluice.base.errors import SluiceError, UsageError
from sluice.fabric.providers import Located

_SETTINGS = ("region", "tag", "endpoint")
_REMEDY = "check region, credentials and the right ec2:DescribeInstanceTopology"
_PAGE = 100  # of DescribeInstances; DescribeInstanceTopology has pages of its own


def read(settings: Mapping[str, str]) -> list[Located]:
    """Running instances and their network nodes; the node's name is the instance's tag `tag`, default Name."""
    unknown = sorted(settings.keys() - set(_SETTINGS))
    if unknown or not settings.get("region"):
        what = f"{unknown[0]!r} is not known" if unknown else "region is missing"
        raise UsageError(f"provider ec2: {what}", remedy=f"give --setting of {', '.join(_SETTINGS)}")
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ModuleNotFoundError as error:
        raise SluiceError("provider ec2: no boto3", remedy="pip install 'sluice-slurm[ec2]'") from error
    config = Config(connect_timeout=5, read_timeout=20, retries={"total_max_attempts": 4, "mode": "adaptive"})
    try:
        client = boto3.client(
            "ec2", region_name=settings["region"], endpoint_url=settings.get("endpoint"), config=config
        )
        paths = dict(_paths(client))
        names = dict(_names(client, settings.get("tag", "Name"), list(paths)))
    except (BotoCoreError, ClientError, ValueError) as error:
        raise SluiceError(f"provider ec2: {error}", remedy=_REMEDY) from error
    return [Located(names[instance], path) for instance, path in paths.items() if instance in names]


def _paths(client: Any) -> Iterable[tuple[str, tuple[str, ...]]]:
    token: dict[str, str] = {}
    while True:
        answer = client.describe_instance_topology(**token)
        for instance in answer.get("Instances", ()):
            yield instance["InstanceId"], tuple(instance.get("NetworkNodes", ()))
        if not answer.get("NextToken"):
            return
        token = {"NextToken": answer["NextToken"]}


def _names(client: Any, tag: str, instances: list[str]) -> Iterable[tuple[str, str]]:
    for start in range(0, len(instances), _PAGE):
        answer = client.describe_instances(InstanceIds=instances[start : start + _PAGE])
        for reservation in answer["Reservations"]:
            for instance in reservation["Instances"]:
                for one in instance.get("Tags", ()):
                    if one["Key"] == tag:
                        yield instance["InstanceId"], one["Value"]
