"""`sluice plugin` on a folder in place of a site: what it prints, and with which status it ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from policy.compiled import CompiledPolicy, Tenant
from sluice.cli.plugin import command
from sluice.plugin.builder import read_build, write_manifest

_REPORT = {
    "schema_version": 1,
    "host": "ctl1",
    "pid": 7,
    "started": 1763740000,
    "slurm_version": "22.05.8",
    "plugins": ["select", "job_submit"],
    "level": "admit",
    "level_asked": "place",
    "level_loaded": 1763740000,
    "level_error": "",
    "policy": {"source": "sha256:00", "checksum": "0badcafe", "loaded": 1763740000, "tenants": 3, "classes": 1},
    "policy_error": "",
    "counters": {"select.calls": 5},
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("etc", "state", "search", "bin"):
        (tmp_path / name).mkdir()
    (tmp_path / "etc/slurm.conf").write_text(f"StateSaveLocation={tmp_path}/state\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "etc/slurm.conf"))
    return tmp_path


def run(site: Path, *words: str, places: bool = True) -> Result:
    more = ["--search-dir", str(site / "search"), "--systemd-dir", str(site / "none")] if places else []
    return CliRunner().invoke(command, [*words, *more])


def test_status_shows_what_controllers_say(site: Path) -> None:
    assert "no slurmctld with the plugins has run" in run(site, "status").stderr
    (site / "state/sluice.status.ctl1").write_text(json.dumps(_REPORT))
    shown = run(site, "status", "-P", "-n")
    assert shown.exit_code == 0
    assert shown.stdout == "ctl1|admit|place|22.05.8|select,job_submit|0badcafe|3|1763740000|\n"
    assert "2025-11-21T15:46:40Z" in run(site, "status").stdout
    document = json.loads(run(site, "status", "--json").stdout)
    assert document["schema_version"] == 1 and document["installed"] is None and document["include_file"] == "missing"
    assert document["controllers"][0]["counters"] == {"select.calls": 5}
    (site / "state/sluice.status.ctl1").write_text(json.dumps({**_REPORT, "counters": {"select.hook_us_to_5": 3}}))
    document = json.loads(run(site, "status", "--json").stdout)
    assert document["controllers"][0]["counters"] == {"select.hook_us_to_5": 3, "select.own_us_to_5": 3}
    (site / "state/sluice.status.ctl1").write_text(json.dumps({**_REPORT, "policy_error": "cut \x1b[31moff"}))
    shown = run(site, "status", "-o", "host,error")
    assert shown.exit_code == 1
    assert "\x1b" not in shown.stdout and "cut [31moff" in shown.stdout


def test_level(site: Path) -> None:
    assert run(site, "level", places=False).stdout == "off\n"
    assert "no policy yet" in run(site, "level", "place", places=False).stderr
    assert (site / "etc/sluice.level").read_text() == "place\n"
    CompiledPolicy(tenants=[Tenant(account="a")]).write(site / "etc/sluice.policy")
    assert run(site, "level", "shadow", places=False).stderr == ""
    assert run(site, "level", places=False).stdout == "shadow\n"
    wrong = run(site, "level", "on", places=False)
    assert wrong.exit_code != 0 and getattr(wrong.exception, "usage", False)


def fake_slurm(site: Path, version: str) -> Path:
    (site / "sbin").mkdir(exist_ok=True)
    for name in ("slurmctld", "srun"):
        (site / "sbin" / name).write_text(f"#!/bin/sh\necho slurm-wlm {version}\n")
        (site / "sbin" / name).chmod(0o755)
    (site / "lib/slurm").mkdir(parents=True, exist_ok=True)
    (site / "lib/slurm/select_cons_tres.so").touch()
    return site


def fake_build(site: Path) -> Path:
    folder = site / "built"
    folder.mkdir()
    for name in ("select_cons_tres", "spank_sluice"):
        (folder / f"{name}.so").write_text(name)
    write_manifest(folder, (22, 5, 8))
    return folder


def test_install_check_disable_uninstall(site: Path) -> None:
    prefix = ["--slurm-prefix", str(fake_slurm(site, "22.05.8"))]
    done = run(site, "install", "--build", str(fake_build(site)), *prefix)
    assert done.exit_code == 0, done
    assert f"add to {site}/etc/slurm.conf on all hosts: Include sluice.plugins.conf" in done.stderr
    assert "restart" not in done.stdout and "plugins for Slurm 22.05.8" in done.stdout
    text = (site / "etc/sluice.plugins.conf").read_text()
    assert f"PluginDir={site}/search:{site}/lib/slurm" in text
    with (site / "etc/slurm.conf").open("a") as file:
        file.write("Include sluice.plugins.conf\n")
    found = json.loads(run(site, "check", "--json", *prefix).stdout)
    kinds = {one["what"]: one["kind"] for one in found["findings"]}
    assert kinds["plugins and slurmctld are both 22.05.8"] == "ok"
    assert kinds[f"{site}/etc/sluice.plugins.conf loads the plugins"] == "ok"
    fake_slurm(site, "22.05.9")
    shown = run(site, "check", *prefix)
    assert shown.exit_code == 1
    assert "problem: plugins for Slurm 22.05.8, but slurmctld is 22.05.9; build and install them again" in shown.stdout
    refused = run(site, "install", "--build", str(site / "built"), *prefix)
    assert refused.exit_code != 0 and "plugins fit one version only" in str(refused.exception)
    assert run(site, "disable").exit_code == 0
    assert "PluginDir" not in (site / "etc/sluice.plugins.conf").read_text()
    assert "switched off by sluice plugin disable" in run(site, "check", *prefix).stdout
    done = run(site, "uninstall")
    assert f"remove from {site}/etc/slurm.conf: Include sluice.plugins.conf" in done.stderr
    assert list((site / "search").iterdir()) == []


def test_what_a_package_brought_is_installed_and_not_built(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_slurm(site, "22.05.8")
    packaged = site / "packaged"
    monkeypatch.setattr("sluice.plugin.builder.PACKAGED", packaged)
    monkeypatch.setattr("sluice.plugin.builder.is_checkout", lambda: False)
    monkeypatch.setattr("sluice.cli.plugin._installed", lambda *_: (site / "sbin/slurmctld", (22, 5, 8)))
    monkeypatch.setattr("sluice.plugin.site.find_plugin_dir", lambda **_: site / "lib/slurm")
    monkeypatch.setattr("sluice.cli.plugin._build", lambda *_, **__: pytest.fail("built"))
    packaged.mkdir()
    brought = fake_build(site).rename(packaged / "22.05.8")
    assert "from" not in run(site, "status").stderr
    assert run(site, "install").exit_code == 0
    assert "installed here: for Slurm 22.05.8, from the package;" in run(site, "status").stderr
    current = site / "search/sluice/current"
    assert (current / "select_cons_tres.so").read_text() == "select_cons_tres" and current.resolve() != brought

    before = {path.name: path.read_bytes() for path in brought.iterdir()}
    (brought / "select_cons_tres.so").write_text("newer")  # an upgrade of the package
    write_manifest(brought, (22, 5, 8))
    assert (current / "select_cons_tres.so").read_text() == "select_cons_tres"
    assert json.loads(run(site, "status", "--json").stdout)["origin"] == "other"
    assert f"remark: {current}: not what the installed package has; sluice plugin install" in run(site, "check").stdout
    run(site, "install")
    assert json.loads(run(site, "status", "--json").stdout)["origin"] == "package"
    run(site, "uninstall")
    assert {path.name for path in brought.iterdir()} == set(before)

    monkeypatch.setattr("sluice.cli.plugin._build", lambda *_, **__: read_build(fake_build(site)))
    elsewhere = ["--slurm-prefix", str(site)]
    assert run(site, "install", *elsewhere).exit_code == 0  # not the distribution's Slurm: not its package either
    assert json.loads(run(site, "status", "--json").stdout)["origin"] == "other"
    shutil.rmtree(packaged)
    assert "built on this host or by --build" in run(site, "status").stderr


def test_changed_files_are_found(site: Path) -> None:
    prefix = ["--slurm-prefix", str(fake_slurm(site, "22.05.8"))]
    run(site, "install", "--build", str(fake_build(site)), *prefix)
    plugin = site / "search/sluice/current/select_cons_tres.so"
    plugin.write_text("changed")
    plugin.chmod(0o666)
    shown = run(site, "check", *prefix).stdout
    assert f"problem: {plugin}: not what was installed" in shown
    assert f"problem: {plugin.resolve()}: users other than root can change what slurmctld loads" in shown
    (site / "search/select_cons_tres.so").unlink()
    assert f"problem: {site}/search/select_cons_tres.so: missing" in run(site, "check", *prefix).stdout


def test_slurm_of_another_release_is_refused(site: Path) -> None:
    prefix = ["--slurm-prefix", str(fake_slurm(site, "25.05.2"))]
    refused = run(site, "build", *prefix, places=False)
    assert "Slurm 25.05.2: the plugins support 22.05 and 24.11" in str(refused.exception)
    fake_slurm(site, "22.05.8")
    source = site / "source"
    source.mkdir()
    refused = run(site, "build", "--slurm-source", str(source), *prefix, places=False)
    assert "not a configured source tree of Slurm" in str(refused.exception)
    (source / "slurm").mkdir()
    for name in ("config.h", "slurm/slurm_version.h"):
        (source / name).touch()
    (source / "META").write_text("  Version:\t22.05.7\n")
    refused = run(site, "build", "--slurm-source", str(source), *prefix, places=False)
    assert "Slurm 22.05.7, but slurmctld is 22.05.8; plugins fit one version only" in str(refused.exception)
