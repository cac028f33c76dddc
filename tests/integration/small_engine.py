"""An engine with OpenAI's list of models, on the Unix socket of its first argument: it says what it is told, after the
seconds of its third argument. A stream counts, with so long between two numbers, until there is the file of the fourth.
"""

from __future__ import annotations

import json
import socketserver
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    """Requests of a connection."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """The list of models, whatever is asked for."""
        self._answer({"object": "list", "data": [{"id": sys.argv[2], "object": "model"}]})

    def do_POST(self) -> None:
        """The sky is blue; else what was said last."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked.get("stream"):
            self._count()
            return
        said = asked["messages"][-1]["content"]
        time.sleep(float(sys.argv[3]) if len(sys.argv) > 3 else 0)
        text = {"The sky is": "blue"}.get(said, said)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        head = {"id": "c", "object": "chat.completion", "created": 1, "model": sys.argv[2]}
        self._answer({**head, "choices": [choice], "usage": usage})

    def _count(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        number = 0
        while not Path(sys.argv[4]).exists():
            number += 1
            self._event({"index": 0, "finish_reason": None, "delta": {"content": f" {number}"}})
            time.sleep(float(sys.argv[3]))
        usage = {"prompt_tokens": 3, "completion_tokens": number, "total_tokens": number + 3}
        self._event({"index": 0, "finish_reason": "stop", "delta": {}})
        self._event(usage=usage)
        self._chunk("data: [DONE]\n\n")
        self._chunk("")

    def _event(self, *choices: dict[str, object], **more: object) -> None:
        head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": sys.argv[2]}
        self._chunk(f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n")

    def _chunk(self, text: str) -> None:
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())

    def _answer(self, document: dict[str, object]) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def address_string(self) -> str:
        """Of a Unix socket there is none."""
        return ""


if __name__ == "__main__":
    with socketserver.ThreadingUnixStreamServer(sys.argv[1], Handler) as server:
        server.serve_forever()
