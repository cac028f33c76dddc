"""An engine on several nodes: rank 0 answers when all other ranks have come, and ends when one of them leaves it.

`group_engine.py SOCKET`, with the environment that the engine `openai` has.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingMixIn, UnixStreamServer

NODES, RANK = int(os.environ["SLUICE_NODES"]), int(os.environ["SLUICE_NODE_RANK"])
LEADER = os.environ["SLUICE_LEADER_HOST"], int(os.environ["SLUICE_LEADER_PORT"])
HERE = f"{RANK} {socket.gethostname()} {os.getpid()}"


class Server(ThreadingMixIn, UnixStreamServer):
    """Says who is there."""

    daemon_threads = True
    parts: list[str] = []  # noqa: RUF012  # one server


class Handler(BaseHTTPRequestHandler):
    """/v1/models."""

    def address_string(self) -> str:
        return "socket"

    def do_GET(self) -> None:
        data = json.dumps({"data": Server.parts}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def watch(other: socket.socket) -> None:
    other.recv(1)
    os._exit(3)


def lead() -> None:
    found = [HERE]
    with socket.create_server(("", LEADER[1])) as listening:
        for _ in range(NODES - 1):
            other, _ = listening.accept()
            found.append(other.makefile().readline().strip())
            threading.Thread(target=watch, args=(other,), daemon=True).start()
    Server.parts = found
    Server(sys.argv[1], Handler).serve_forever()


def follow() -> None:
    while True:
        try:
            leader = socket.create_connection(LEADER, 5)
        except OSError:
            time.sleep(0.1)
            continue
        leader.settimeout(None)
        leader.sendall(f"{HERE}\n".encode())
        leader.recv(1)
        sys.exit(4)


(follow if RANK else lead)()
