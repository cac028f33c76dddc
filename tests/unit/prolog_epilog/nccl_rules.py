"""The rules by which NCCL reads a topology file, written down from its public sources (src/graph, 2.18 to 2.28).

A reader of our own: it takes what NCCL's parser takes, and nothing else, so that a file that passes here is read there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

INNER = {"": {"system"}, "system": {"cpu"}, "cpu": {"pci", "nic"}, "pci": {"pci", "gpu", "nic"}, "nic": {"net"}}
NEEDED = {
    "system": {"version"},
    "cpu": {"numaid", "arch"},
    "pci": {"busid", "class", "link_speed", "link_width"},  # where none is found on the way from a GPU, none is added
    "net": {"name"},
}
SPEEDS = {"", *(f"{speed} GT/s PCIe" for speed in ("2.5", "5.0", "8.0", "16.0", "32.0", "64.0"))}
FUSED = ("vendor", "device", "subsystem_vendor", "subsystem_device")  # added where they lack, for some ranks only
_TAG = re.compile(r'<(/?)([a-z0-9]+)((?: [a-z_]+="[^"]*")*)(/?)>[ \n]*')  # one space before each attribute
_BUS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_MOST_TEXT, _MOST_ATTRIBUTES, _MOST_ELEMENTS = 255, 16, 256


@dataclass
class Element:
    name: str
    attributes: dict[str, str]
    inner: list[Element] = field(default_factory=list)

    def outline(self, indent: str = "") -> str:
        """What is below what: processors by NUMA node, the rest by PCI address."""
        words = {
            "cpu": f"cpu {self.attributes.get('numaid')}",
            "pci": self.attributes.get("busid", "").removeprefix("0000:"),
            "gpu": " ".join(["gpu", self.attributes.get("dev", "")]).strip(),
            "net": self.attributes.get("name", ""),
        }
        below = "".join(one.outline(indent + "  " * (self.name in ("cpu", "pci"))) for one in self.inner)
        return (f"{indent}{words[self.name]}\n" if self.name in words else "") + below

    def all(self) -> list[Element]:
        return [self, *(found for one in self.inner for found in one.all())]


def read(text: str) -> Element:
    """The system element, after all rules have been looked at."""
    top = Element("", {})
    at, open_ones = 0, [top]
    while at < len(text):
        tag = _TAG.match(text, at)
        assert tag, f"no element: {text[at : at + 40]!r}"
        at = tag.end()
        closing, name, attributes, single = tag.groups()
        if closing:
            assert open_ones.pop().name == name
            continue
        element = Element(name, dict(re.findall(r'([a-z_]+)="([^"]*)"', attributes)))
        _check(element, open_ones[-1])
        open_ones[-1].inner.append(element)
        if not single:
            open_ones.append(element)
        # Ranks of one node put their files together, where an element that is closed at once is another one.
        assert bool(single) == (name in ("gpu", "net"))
    assert open_ones == [top]
    found = top.all()[1:]
    assert len(found) <= _MOST_ELEMENTS
    buses = [one.attributes["busid"] for one in found if one.name == "pci"]
    assert len(set(buses)) == len(buses)
    (system,) = top.inner
    return system


def _check(element: Element, above: Element) -> None:
    attributes = element.attributes
    assert element.name in INNER.get(above.name, set()), f"{element.name} in {above.name}"
    assert NEEDED.get(element.name, set()) <= attributes.keys(), element
    assert len(attributes) <= _MOST_ATTRIBUTES
    assert all(len(word) < _MOST_TEXT for pair in attributes.items() for word in pair)
    if element.name == "system":
        assert attributes["version"] == "1"
    if element.name == "cpu" and attributes["arch"] == "x86_64":
        assert attributes["vendor"] in ("GenuineIntel", "AuthenticAMD")
        assert int(attributes["familyid"]) and int(attributes["modelid"])
    if element.name == "pci":
        assert _BUS.fullmatch(attributes["busid"])
        assert attributes["link_speed"] in SPEEDS and attributes["link_width"].isdecimal()
    if above.name == "pci" and element.name == "pci":
        assert above.attributes["class"] == "0x060400"  # else what is below it is not looked at
    if element.name == "gpu" and attributes:
        assert attributes["dev"].isdecimal() and attributes["sm"].isdecimal()
