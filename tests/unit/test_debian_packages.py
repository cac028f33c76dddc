"""debian/ names what there is to package, and what packages do to a host is in their scripts."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from sluice.plugin.builder import PACKAGED, SUPPORTED

ROOT = Path(__file__).parents[2]
DEBIAN = ROOT / "debian"
UNITS = ROOT / "etc/systemd"
SCRIPTS = sorted(path for path in DEBIAN.iterdir() if path.suffix in (".preinst", ".postinst", ".prerm", ".postrm"))


def paragraphs() -> dict[str, dict[str, str]]:
    found = {}
    for text in (DEBIAN / "control").read_text().split("\n\n"):
        fields = dict(re.findall(r"^([A-Z][A-Za-z-]+): *((?:.*)(?:\n[ ].*)*)", text, re.MULTILINE))
        found[fields.get("Package", "")] = fields
    return found


def installed() -> list[list[str]]:
    """What the .install files name, and where it goes."""
    return [line.split() for path in DEBIAN.glob("*.install") for line in path.read_text().splitlines()]


def test_each_unit_is_in_one_package_under_its_prefix() -> None:
    units = [path for path in UNITS.iterdir() if path.is_file()]
    listed = Counter(source for source, folder in installed() if folder == "usr/lib/systemd/system")
    assert listed == {f"etc/systemd/{path.name}": 1 for path in units} and len(units) >= 11
    tree = re.findall(r"^TREE := debian/sluice(/\S+)$", (DEBIAN / "rules").read_text(), re.MULTILINE)
    for path in (*units, *UNITS.glob("*.d/*")):
        for program in re.findall(r"^ExecStart(?:Pre)?=[-+]*(\S+/bin/sluice)\b", path.read_text(), re.MULTILINE):
            assert [program] == [f"{prefix}/bin/sluice" for prefix in tree], path


def test_daemons_restart_with_an_upgrade_and_end_with_a_removal() -> None:
    rules = (DEBIAN / "rules").read_text()
    daemons = set(re.findall(r"^DAEMONS := (.*)", rules, re.MULTILINE)[0].split())
    lasting = {path.name for path in UNITS.glob("*.service") if "\nRestart=" in path.read_text()}
    assert daemons == lasting
    stopped = "".join((DEBIAN / f"sluice-{package}.prerm").read_text() for package in ("agent", "controller"))
    assert {name for name in daemons if name not in stopped} == set()


def test_the_spec_file_has_the_units_of_the_same_packages() -> None:
    spec = (ROOT / "packaging/sluice.spec").read_text()
    daemons = re.findall(r"^DAEMONS := (.*)", (DEBIAN / "rules").read_text(), re.MULTILINE)[0].split()
    macros = {name: words.split() for name, words in re.findall(r"^%global (\S+) (sluice-.*)", spec, re.MULTILINE)}
    assert macros["node_daemons"] + macros["controller_daemons"] == daemons
    for package, name in (("agent", "node"), ("controller", "controller")):
        (files,) = re.findall(rf"^%files {package}\n(.*?)^%", spec.replace("%{", "{"), re.MULTILINE | re.DOTALL)
        listed = [line.split()[0] for line in (DEBIAN / f"sluice-{package}.install").read_text().splitlines()]
        units = [Path(line).name for line in listed if line.startswith("etc/systemd/")]
        assert [Path(line).name for line in files.split() if "_unitdir" in line] == units
        (ends,) = re.findall(rf"^%global {name}_units %{{{name}_daemons}} (.*)", spec, re.MULTILINE)
        begun = {unit for unit in units if "[Install]" in (UNITS / unit).read_text()}
        assert {*macros[f"{name}_daemons"], *ends.split()} == begun, package
        assert f"%systemd_preun %{{{name}_units}}\n" in spec
        assert f"%systemd_postun_with_restart %{{{name}_daemons}}\n" in spec


def test_programs_man_pages_and_completion_are_listed() -> None:
    assert ["prolog_epilog/programs/*", "usr/libexec/sluice"] in installed()
    # Next to the SPANK plugin's helper, where entry/spank_sluice_limit.c looks for it.
    assert "debian/sluice/usr/libexec/sluice/sluice-launch" in (DEBIAN / "rules").read_text()
    assert "%{buildroot}%{_libexecdir}/sluice/sluice-launch" in (ROOT / "packaging/sluice.spec").read_text()
    names = [source for source, _ in installed()] + (DEBIAN / "sluice.bash-completion").read_text().split()[:1]
    assert {f"etc/completion/{path.name}" for path in (ROOT / "etc/completion").iterdir()} <= set(names)
    assert (DEBIAN / "sluice.manpages").read_text().split() == ["docs/man/*"]
    assert {path.suffix for path in (ROOT / "docs/man").iterdir()} == {".1", ".5"}


def test_each_supported_slurm_has_a_package_of_plugins() -> None:
    releases = {f"{major}.{minor:02}" for major, minor in SUPPORTED}
    packages = {name.rpartition("-")[2]: fields for name, fields in paragraphs().items() if "plugins" in name}
    assert set(packages) == releases
    for release, fields in packages.items():
        assert fields["Build-Profiles"] == f"<pkg.sluice.slurm-{release}>" and "${sluice:Slurm}" in fields["Depends"]
    assert f"{PACKAGED}/$(RELEASE)" in (DEBIAN / "rules").read_text()


def test_plugins_depend_on_one_release_in_all_revisions() -> None:
    shown = subprocess.run(
        [sys.executable, ROOT / "tools/plugin_package.py", "depends", "22.05.8"],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT)}, timeout=60,
    ).stdout  # fmt: skip
    lowest, highest = re.findall(r"slurm-wlm-basic-plugins \((\S+ \S+)\)", shown)
    assert (lowest, highest) == (">= 22.05.8", "<< 22.05.9~")
    for version, fits in {
        "22.05.8-4+deb12u3": True, "22.05.8-5": True, "22.05.7-9": False, "22.05.9-1": False, "22.05.9~rc1-1": False,
        "23.02.1-1": False,
    }.items():  # fmt: skip
        holds = [
            subprocess.run(["dpkg", "--compare-versions", version, *one.split()], check=False, timeout=60).returncode
            for one in (lowest, highest)
        ]
        assert (holds == [0, 0]) is fits, version


def test_what_builds_is_what_make_installs() -> None:
    lines = (ROOT / "tools/debian-packages.txt").read_text().splitlines()
    groups = {name: words.split() for name, _, words in (line.partition(": ") for line in lines if line[:1] != "#")}
    offered = {*groups["build"], *groups["plugins"], *groups["deb"]}
    wanted = re.sub(r" \([^)]*\)", "", paragraphs()[""]["Build-Depends"]).replace("\n", " ")
    assert {name.strip().replace("-compat", "") for name in wanted.split(",")} <= offered
    done = subprocess.run(["make", "-n", "deb"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert "tools/install-packages build plugins deb" in done.stdout
    assert all("--require-hashes" in line for line in (ROOT / "tools/deb").read_text().splitlines() if "/pip" in line)


def test_no_package_asks_enables_or_starts_anything() -> None:
    assert not list(DEBIAN.glob("*.config")) and not list(DEBIAN.glob("*.templates"))
    calls = re.findall(r"^\tdh_installsystemd.*", (DEBIAN / "rules").read_text(), re.MULTILINE)
    assert calls and all("--no-enable --no-start" in call for call in calls)
    assert [call.split()[3] for call in calls] == ["--restart-after-upgrade"] * 2 + ["--no-stop-on-upgrade"]
    assert len(SCRIPTS) >= 10
    for path in SCRIPTS:
        text = path.read_text()
        assert text.startswith("#!/bin/sh\nset -e\n") and text.endswith("#DEBHELPER#\n"), path
        assert "systemctl" not in text and "debconf" not in text, path
        assert "rm -rf /" not in text or '[ "$1" = purge ]' in text.partition("rm -rf /")[0], path
        subprocess.run(["sh", "-n", path], check=True, timeout=60)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "wheels/Some_Thing-1.2-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("Some_Thing-1.2.dist-info/METADATA", "Name: Some_Thing\nVersion: 1.2\nLicense: MIT\n\nText\n")
    return path


def sbom(wheel: Path, lock: str) -> subprocess.CompletedProcess[str]:
    tree = wheel.parents[1] / "tree"
    tree.mkdir(exist_ok=True)
    (tree / "one.so").write_bytes(b"\x7fELF!")
    (tree / "text.py").write_text("")
    (wheel.parents[1] / "lock").write_text(lock)
    return subprocess.run(
        [ROOT / "tools/sbom", wheel.parents[1] / "lock", wheel.parent, tree],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_the_bill_of_materials_has_every_dependency_with_its_hash(wheel: Path) -> None:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    lock = f"some-thing==1.2 \\\n    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{digest}\n"
    made = sbom(wheel, lock)
    assert made.returncode == 0, made.stderr
    assert made.stdout == sbom(wheel, lock).stdout
    document = json.loads(made.stdout)
    *scripts, library, file = document["components"]
    assert [(one["name"], bool(one["components"])) for one in scripts] == [("htmx.org", True), ("uplot", True)]
    assert library["purl"] == "pkg:pypi/some-thing@1.2" and library["hashes"][0]["content"] == digest
    assert library["licenses"] == [{"license": {"name": "MIT"}}]
    assert (file["name"], file["hashes"][0]["content"]) == ("one.so", hashlib.sha256(b"\x7fELF!").hexdigest())
    assert document["dependencies"][0]["dependsOn"] == [one["bom-ref"] for one in (*scripts, library)]


def test_a_file_that_the_lock_does_not_have_ends_the_build(wheel: Path) -> None:
    made = sbom(wheel, f"some-thing==1.2 \\\n    --hash=sha256:{'0' * 64}\n")
    assert made.returncode == 1 and "not in the lock file" in made.stderr
