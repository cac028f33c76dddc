"""Any program that serves OpenAI's paths: the service's `command`, with words in braces filled in."""

from __future__ import annotations

from sluice.exchange.serving import Abilities, ReplicaSpec
from sluice.serve.engines.base import KEY_VARIABLE, Engine, Place, Start


def fill(spec: ReplicaSpec, place: Place) -> Start:
    """The command. It listens on {socket}, or on {port} and then asks for the key of its environment."""
    words = {
        "{socket}": str(place.socket),
        "{port}": str(place.port),
        "{model}": str(place.model),
        "{service}": spec.service,
    }
    filled = []
    for word in spec.command:
        for name, value in words.items():
            word = word.replace(name, value)
        filled.append(word)
    on_port = any("{port}" in word for word in spec.command)
    environment = {
        "SLUICE_ENGINE_SOCKET": str(place.socket),
        "SLUICE_ENGINE_SLOTS": str(spec.slots),
        "SLUICE_MODEL": str(place.model),
        "SLUICE_SERVICE": spec.service,
    }
    if place.group.nodes > 1:
        environment |= {
            "SLUICE_NODES": str(place.group.nodes),
            "SLUICE_NODE_RANK": str(place.group.rank),
            "SLUICE_LEADER_HOST": place.group.host,
            "SLUICE_LEADER_PORT": str(place.group.port),
        }
    if on_port:
        return Start(tuple(filled), place.port, {**environment, KEY_VARIABLE: place.key}, secret=place.key)
    return Start(tuple(filled), place.socket, environment)


def abilities(spec: ReplicaSpec) -> Abilities:
    """All paths: what it does not have, it says itself. No stream goes on, as nothing is known of its templates."""
    del spec
    return Abilities(chat=True, completions=True, embeddings=True, responses=True, resume="none")


ENGINE = Engine(fill, abilities)
