"""What clients and replicas may make a gateway hold: bytes, connections and seconds."""

from __future__ import annotations

from typing import Final

from sluice.base.rates import Rate

MOST_HEAD: Final = 32 << 10
"""Bytes of a request's line and headers."""
MOST_HEADERS: Final = 100
MOST_PATH: Final = 2048
MOST_BODY: Final = 32 << 20
"""Bytes of a request's body: images are in it."""
MOST_UPLOAD: Final = 1 << 30
"""The same of an upload, which is read to its end also where its file is too large: the client gets an answer then."""
MOST_LOGGED: Final = 16 << 10
"""Characters of a prompt in the log, where its service has it there."""
SMALL_BODY: Final = 64 << 10
"""Up to this, bodies do not count against HELD_BODIES."""
HELD_BODIES: Final = 512 << 20
"""Bytes of all larger bodies that a worker holds."""
PARSED: Final = 200
"""Bytes that an object or a list of a body takes when it is parsed; they are held, too."""
FRAMING: Final = 8
"""Bytes around each byte of a body in chunks; what is more is a trailer, which the parser would hold whole."""
MOST_PIPELINED: Final = 8
"""Requests of a connection that wait for the answer to the one before."""
MOST_CONNECTIONS: Final = (8000, 4000, 2000)
"""Of a worker: all, those of a network (/24, /64), those of an address."""
HEAD_S: Final = 10.0
"""In which a request's head must have come; the first one of a connection also where its worker ends."""
BODY_S: Final = 60.0
"""In which its body must have come..."""
BODY_BYTES_S: Final = 64 << 10
"""...and one second more for so many bytes."""
IDLE_S: Final = 75.0
"""Of a connection without a request."""
WRITE_S: Final = 60.0
"""In which a client must take a part of its answer."""
WRITE_HIGH: Final = 256 << 10
"""Bytes of an answer that wait for the client before the replica is no longer read."""

MOST_ANSWER_HEAD: Final = 32 << 10
MOST_KEPT_ANSWER: Final = 1 << 20
"""Bytes of an answer that is not streamed which are kept until it is whole, so that another replica can be asked."""
MOST_EVENT: Final = 4 << 20
"""Bytes of one event of a stream."""
MOST_STORY: Final = 4 << 20
"""Bytes of a stream's text that are kept so that another replica can go on."""
MOST_STORY_TOKENS: Final = 1 << 20
"""Token ids of it that are kept."""
COMPACT: Final = 64 << 10
"""Bytes of events that are kept as they came, before their text is taken from them."""

CONNECT_S: Final = 3.0
"""To a replica, TLS included."""
FIRST_S: Final = 180.0
"""In which a replica that is heard must begin a stream..."""
SILENT_S: Final = 60.0
"""...and go on with it."""
SUSPECT_SILENT_S: Final = 2.0
"""The same for one that is not heard."""
PATIENCE_S: Final = 1.0
"""After which silence says that a replica takes at least so long; then after twice as long, ..."""
MOST_IDLE_UPSTREAM: Final = 256
"""Connections to a replica that are kept without a request."""
UPSTREAM_IDLE_S: Final = 60.0
MOST_FAILURES: Final = 3
"""Of a replica, one after the other, until it is left out: one request may be the reason of one."""
EJECT_S: Final = (1.0, 30.0)
"""How long a replica that failed is left out: at first, and at most."""
MOST_TRIES: Final = 4
"""Replicas that one request is sent to before its first byte: what ends engines is not sent to all of them."""
MOST_RESUMED: Final = 8
"""Replicas that go on with one stream."""
COUNT_S: Final = 10.0
"""In which another replica must count the prompt of a stream of which only the end did not come."""
AGAIN_S: Final = 0.05
"""Before a third replica is asked; four times that before the next one..."""

WAITING_S: Final = 5.0
"""Between comments in a stream that waits."""
MOST_DEADLINE_S: Final = 24 * 3600.0
SWEEP_S: Final = 0.25
"""Between looks at what is over."""
DEMAND_S: Final = 0.5
FAILED_KEYS: Final = (Rate(1000, 20), Rate(200, 5), Rate(30, 0.5))
"""Requests without a good key, a worker: of all, of a network, of an address."""
