"""Chapter: the same in a browser."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from typing import Any

from dev_cluster.demo.stage import SLUICE, Stage

WEB_USER = "sluice-web"
OPERATOR = "olga"
_PORT = 6823
_STORE = "/etc/sluice/tokens.json"


def page(stage: Stage, *, keep: bool) -> None:
    """Start the page, and print its address and two log-ins; `keep`: until it is interrupted."""
    stage.step(
        "The same in a browser, and for programs",
        "`sluice web` shows what the controllers' daemon knows, and has no right in Slurm: what a user changes is done "
        "by `sluice actd`, as that user, who has to prove who it is with each request.",
    )
    cluster = stage.cluster
    cluster.run(["sacctmgr", "-i", "modify", "user", OPERATOR, "set", "AdminLevel=Operator"])
    tokens = {user: _token(stage, user) for user in ("alice", OPERATOR)}
    cluster.run(["chgrp", WEB_USER, _STORE], node="ctl1", cwd="/")
    port = _free_port()
    cluster.start_program("actd", [*SLUICE, "actd"], node="ctl1")
    cluster.start_program("web", [*SLUICE, "web", "--port", str(port)], node="ctl1", user=WEB_USER)
    for user, count in (("alice", 1), ("alice", 4), ("bob", 8), ("bob", 8), ("bob", 8), ("carol", 2)):
        script = f"#!/bin/sh\n#SBATCH --gres=gpu:{count} -t60 -o/dev/null -J train-{count}\nsleep 3600\n"
        cluster.run(["sbatch"], user=user, input_text=script)
    address = f"http://127.0.0.1:{port}"
    stage.wait("the page shows the jobs", lambda: bool(_get(address, "jobs", tokens["alice"]).get("jobs")), 60)
    stage.wait(
        "the page knows Slurm's roles", lambda: _get(address, "whoami", tokens[OPERATOR]).get("level") == "operator", 90
    )
    print(f"   {address}  log in with one of these tokens, which hold for a day:")
    print(
        f"   alice, a tenant        {tokens['alice']}\n   {OPERATOR}, an operator      {tokens[OPERATOR]}", flush=True
    )
    if not keep:
        print("   It goes down now; `make demo KEEP=1` keeps it.")
        return
    print("   It is kept until you press Ctrl-C.", flush=True)
    while True:
        time.sleep(3600)


def _token(stage: Stage, user: str) -> str:
    words = ["token", "create", user, "--for", "1d", "--scope", "read", "--scope", "write"]
    return stage.cluster.run([*SLUICE, *words], node="ctl1", cwd="/").stdout.strip()


def _free_port() -> int:
    for port in (_PORT, 0):
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(one.getsockname()[1])
    raise AssertionError("the kernel always has a free port")


def _get(address: str, path: str, token: str) -> dict[str, Any]:
    """An answer of the API; empty while it is not there yet."""
    request = urllib.request.Request(f"{address}/api/v1/{path}", headers={"Authorization": f"Bearer {token}"})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - an address of our own
            found: dict[str, Any] = json.load(answer)
    except (urllib.error.URLError, TimeoutError):
        return {}
    return found
