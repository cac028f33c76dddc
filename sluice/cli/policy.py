"""`sluice policy`: the policy file itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from sluice.cli.site_options import file_option, policy_path


@click.group("policy")
def command() -> None:
    """The policy file: check it, show it, its JSON schema."""


@command.command()
def schema() -> None:
    """Print the JSON schema, for editors."""
    from policy.model import Policy

    click.echo(json.dumps(Policy.model_json_schema(by_alias=True), indent=2))


@command.command()
@file_option
@click.option("--json", "as_json", is_flag=True, help="The mistakes as JSON.")
@click.argument("file", type=click.Path(path_type=Path), required=False)
def check(path: Path | None, as_json: bool, file: Path | None) -> None:
    """Name every mistake with line, value and remedy. Exit 0: none, 1: some. Needs no cluster."""
    from dataclasses import asdict

    from policy import document

    name = policy_path(file or path)
    policy, problems = document.check(document.read(name), source=str(name))
    if as_json:
        mistakes = [asdict(problem) for problem in problems]
        click.echo(json.dumps({"schema_version": 1, "file": str(name), "mistakes": mistakes}, indent=2))
    else:
        for problem in problems:
            click.echo(str(problem))
        if policy is not None and not problems:
            for section in policy.unenforced():
                click.echo(f"{name}: {section}: accepted, but not yet enforced", err=True)
            services = f", {len(policy.services)} services" if policy.services else ""
            click.echo(f"{name}: {len(policy.tenants)} tenants{services}, no mistakes", err=True)
    if problems:
        sys.exit(1)


@command.command()
@file_option
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--defaults", is_flag=True, help="Also what the file leaves out.")
@click.argument("file", type=click.Path(path_type=Path), required=False)
def show(path: Path | None, as_json: bool, defaults: bool, file: Path | None) -> None:
    """Print the policy as it is understood: sizes in MiB, times in seconds."""
    import yaml

    from policy.document import load

    policy = load(policy_path(file or path)).policy
    document = policy.model_dump(mode="json", exclude_unset=not defaults, exclude_none=True, by_alias=True)
    if as_json:
        click.echo(json.dumps({"schema_version": 1, "policy": document}, indent=2))
    else:
        click.echo(yaml.safe_dump(document, sort_keys=False, width=120), nl=False)
