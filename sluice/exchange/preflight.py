"""What is remembered of preflights: the results of classes, and which nodes are good, suspected or at fault."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from sluice.base.errors import SluiceError

STATE_FILE = "sluice.preflight.json"
"""In StateSaveLocation."""
NO_ANSWER = "no answer"
"""What a node says of a GPU whose test did not end."""
_MOST_RESULTS = 64  # of a class
_MOST_CLASSES = 256
_MOST_BYTES = 16 << 20

Class = tuple[str, str, bool]
Measured = tuple[float, float, str]


@dataclass
class Said:
    """What the last preflight said of a node."""

    time: float
    state: str  # good, suspected or faulty
    words: str
    gpus: list[str] = field(default_factory=list)  # that were measured, of a good node


@dataclass
class _Document:
    classes: list[tuple[str, str, bool, list[Measured]]] = field(default_factory=list)
    nodes: dict[str, Said] = field(default_factory=dict)
    schema_version: int = 1


_ADAPTER: TypeAdapter[_Document] = TypeAdapter(_Document)


class Memory:
    """Bounded in classes and results."""

    def __init__(self, document: _Document | None = None) -> None:
        document = document or _Document()
        self.past: dict[Class, list[Measured]] = {
            (model, kind, crosses): results for model, kind, crosses, results in document.classes
        }
        self.nodes = document.nodes

    @classmethod
    def load(cls, path: Path) -> Memory:
        """Nothing where there is no file. Raises SluiceError for one that cannot be read."""
        try:
            with path.open("rb") as file:
                return cls(_ADAPTER.validate_json(file.read(_MOST_BYTES)))
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise SluiceError(f"{path}: {error.strerror}") from error
        except ValidationError as error:
            raise SluiceError(
                f"{path}: not a state of preflights", remedy="it is written again; earlier results are lost"
            ) from error

    def render(self) -> str:
        """The file's content."""
        classes = [(*name, results) for name, results in self.past.items()]
        return json.dumps(_ADAPTER.dump_python(_Document(classes, self.nodes))) + "\n"

    @property
    def proved(self) -> dict[str, set[str]]:
        """Nodes whose last preflight was good, and that have been in service since; and which of their GPUs were
        measured since then."""
        return {name: set(said.gpus) for name, said in self.nodes.items() if said.state == "good"}

    @property
    def suspects(self) -> set[str]:
        """Nodes whose last preflight has found them at fault, or could not tell them from others at fault."""
        return {name for name, said in self.nodes.items() if said.state != "good"}

    def learn(self, good: Mapping[Class, Iterable[Measured]]) -> None:
        """Results of a preflight; the latest of each class are kept."""
        for name, results in good.items():
            self.past[name] = [*self.past.pop(name, ()), *results][-_MOST_RESULTS:]
        while len(self.past) > _MOST_CLASSES:
            del self.past[next(iter(self.past))]  # the one that was not measured for longest

    def judge(
        self, good: Mapping[str, set[str]], suspected: Iterable[str], faulty: Iterable[str], words: str, now: float
    ) -> None:
        """What a preflight has said of its nodes. `good`: with the GPUs that were measured."""
        proved = self.proved
        self.nodes |= {
            name: Said(now, "good", words, sorted(gpus | proved.get(name, set()))) for name, gpus in good.items()
        }
        for state, names in (("suspected", suspected), ("faulty", faulty)):
            self.nodes |= {name: Said(now, state, words) for name in names}

    def forget(self, away: Collection[str], known: Collection[str]) -> bool:
        """Nodes out of service are good no longer; those that Slurm does not know are gone. Whether there are such."""
        gone = [
            name for name, said in self.nodes.items() if name not in known or (name in away and said.state == "good")
        ]
        for name in gone:
            del self.nodes[name]
        return bool(gone)
