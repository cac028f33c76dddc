"""Plugins go into a running site and out of it: nothing of Slurm's is lost, and no wrong version keeps it down."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import INSIDE
from sluice.base.errors import SluiceError
from sluice.base.run import run_command
from sluice.base.slurm_version import SlurmVersion, parse_slurm_version
from sluice.plugin import install as installation
from sluice.plugin.builder import PluginBuild, build_plugins, read_build, write_manifest
from sluice.plugin.install import Places
from sluice.plugin.site import INCLUDE, find_plugin_dir, read_site_options
from sluice.plugin.sources import SourcesUnavailableError, distribution_source, release_name
from sluice.plugin.status import check, include_state
from tests.integration.plugin_site import DESCRIPTION, POLICY, PluginSite

pytestmark = pytest.mark.cluster
MakeCluster = Callable[..., DevCluster]


def slurm_version(root: Path | None) -> SlurmVersion:
    program = "/usr/sbin/slurmctld"
    command = [program, "-V"] if root is None else ["chroot", str(root), program, "-V"]
    return parse_slurm_version(run_command(command).stdout)


def build_for(root: Path | None, output: Path) -> PluginBuild:
    try:
        source = distribution_source(slurm_version(root), suite=release_name(root or Path("/")))
    except SourcesUnavailableError as error:
        pytest.skip(f"no sources of Slurm: {error}")
    return build_plugins(source, output, plugin_dir=find_plugin_dir(root or Path("/")), root=root)


@pytest.fixture(scope="module", params=["native", pytest.param("trixie", marks=pytest.mark.trixie)])
def root(request: pytest.FixtureRequest) -> Path | None:
    """Whose Slurm: this system's, or Debian 13's."""
    if request.param == "native":
        return None
    tree: Path = request.getfixturevalue("trixie_root")
    return tree


@pytest.fixture(scope="module")
def build(root: Path | None, tmp_path_factory: pytest.TempPathFactory) -> PluginBuild:
    """All plugins, for that Slurm."""
    return build_for(root, tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def site(
    root: Path | None, make_shared_cluster: MakeCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PluginSite]:
    """A site of stock Slurm; the tests follow its life in order."""
    cluster = make_shared_cluster(DESCRIPTION, root=root)
    yield PluginSite(cluster, tmp_path_factory.mktemp("destdir"), slurm_version(root), root)


@pytest.fixture(scope="module")
def jobs(site: PluginSite) -> dict[str, int]:
    """Jobs from before the installation, that are there to its end."""
    running = site.submit("-w", "n1", "--wrap", "exec sleep 1000")
    site.wait(lambda: site.job(running) == "RUNNING")
    held = site.submit("-n1", "--hold", "--wrap", "true")
    waiting = site.submit(f"--dependency=afterok:{running}", "--wrap", "true")
    return {"running": running, "held": held, "waiting": waiting}


def check_jobs(site: PluginSite, jobs: dict[str, int]) -> None:
    """They are as they were, and new ones run."""
    assert site.job(jobs["running"]) == "RUNNING"
    assert site.job(jobs["held"]) == "PENDING"
    assert site.job(jobs["waiting"]) == "PENDING"
    done = site.cluster.run(["srun", "-n1", "-w", "n2", "hostname"], user="alice")
    assert done.stdout == "n2\n"
    assert done.stderr == ""


def test_installed_into_a_running_site(site: PluginSite, build: PluginBuild, jobs: dict[str, int]) -> None:
    result = site.install(build)
    assert any(f"Include {INCLUDE}" in line for line in result.left)
    assert any("daemon-reload" in line for line in result.left)
    site.include()
    site.restart()
    assert "libsluice_controller.so" in site.loaded() and "select_cons_tres.so" in site.loaded()
    site.wait(lambda: "select" in site.report()["plugins"])
    assert site.report()["level"] == "off" and site.report()["policy"] is None
    site.wait(lambda: site.job(jobs["running"]) == "RUNNING")
    check_jobs(site, jobs)


def test_the_installation_passes_a_check(site: PluginSite, root: Path | None) -> None:
    slurmctld = (root or Path("/")) / "usr/sbin/slurmctld-wlm"
    stock = (root or Path("/")) / site.stock.relative_to("/")
    options = read_site_options(site.conf)
    places = Places(conf=site.cluster.layout.slurm, search=site.cluster.layout.folder / "search", systemd=None)
    findings = check(places, options, slurm=site.version, slurmctld=slurmctld, stock=stock)
    assert [one for one in findings if one.kind != "ok"] == []


def test_commands_are_silent_on_every_host(site: PluginSite) -> None:
    for node in ("login", "ctl1", "n1", "c1"):
        for command in (["sinfo"], ["squeue"], ["scontrol", "show", "config"], ["sprio"], ["sdiag"]):
            done = site.cluster.run(command, node=node)
            assert "error" not in done.stderr and "sluice" not in done.stderr.lower(), (node, command, done.stderr)
    site.cluster.run(["sbatch", "-o", "/dev/null", "--wrap", "srun hostname"], user="alice")
    reports = [path.name for path in site.cluster.layout.state.glob("sluice.status.*")]
    assert reports == ["sluice.status.ctl1"]  # commands and slurmd load a plugin, too, and start nothing


def test_level_and_policy_without_restart(site: PluginSite, jobs: dict[str, int]) -> None:
    started = site.report()["started"]
    installation.write_level(site.places, "place")
    site.wait(lambda: site.report()["level_asked"] == "place")
    assert site.report()["level"] == "off"  # no policy yet
    site.set_policy()
    site.wait(lambda: site.report()["level"] == "place")
    assert site.report()["policy"]["tenants"] == 1 and site.report()["policy"]["source"] == "test"
    for level in ("shadow", "admit", "off", "place"):
        installation.write_level(site.places, level)
        site.wait(lambda level=level: site.report()["level"] == level)
    assert site.report()["started"] == started
    installation.write_level(site.places, "off")
    site.wait(lambda: site.report()["level"] == "off")
    check_jobs(site, jobs)


def test_a_damaged_policy_leaves_the_last_good_one(site: PluginSite, jobs: dict[str, int]) -> None:
    installation.write_level(site.places, "admit")
    site.wait(lambda: site.report()["level"] == "admit")
    path = site.cluster.layout.slurm / "sluice.policy"
    good = path.read_text()
    for broken in (good[:-20], good.replace("physics", "physiks"), "sluice-policy 7.0\n"):
        path.write_text(broken)
        site.wait(lambda: site.report()["policy_error"])
        assert site.report()["policy"]["source"] == "test" and site.report()["level"] == "admit"
        site.set_policy()
        site.wait(lambda: not site.report()["policy_error"])
    path.write_text(good[:-20])
    site.cluster.run(["scontrol", "reconfigure"])
    site.wait_up()
    site.wait(lambda: site.report()["policy_error"])
    path.write_text("")  # empty: none, at any level
    site.wait(lambda: site.report()["policy"] is None and site.report()["level"] == "off")
    installation.write_level(site.places, "off")
    site.wait(lambda: site.job(jobs["running"]) == "RUNNING")
    check_jobs(site, jobs)


def test_reconfigure_reloads(site: PluginSite, jobs: dict[str, int]) -> None:
    site.set_policy(POLICY.model_copy(update={"source": "second"}))
    installation.write_level(site.places, "admit")
    site.cluster.run(["scontrol", "reconfigure"])
    site.wait_up()
    site.wait(lambda: (site.report()["policy"] or {}).get("source") == "second" and site.report()["level"] == "admit")
    installation.write_level(site.places, "off")
    site.wait(lambda: site.report()["level"] == "off")
    check_jobs(site, jobs)


def wrong_version(build: PluginBuild, folder: Path) -> PluginBuild:
    """The same plugins as made for the release before."""
    major, minor, micro = build.slurm
    before = (major << 16 | minor << 8 | micro).to_bytes(4, "little")
    after = (major << 16 | minor << 8 | (micro - 1)).to_bytes(4, "little")
    folder.mkdir()
    for name in build.files:
        data = (build.folder / name).read_bytes()
        assert name == "libsluice_controller.so" or before in data
        (folder / name).write_bytes(data.replace(before, after))
    write_manifest(folder, (major, minor, micro - 1))
    return read_build(folder)


def test_an_upgraded_slurm_starts_without_the_plugins(
    site: PluginSite, build: PluginBuild, jobs: dict[str, int], tmp_path: Path
) -> None:
    old = wrong_version(build, tmp_path / "old")
    with pytest.raises(SluiceError, match=r"plugins fit one version only"):
        site.install(old)
    # What an upgrade of Slurm leaves: plugins that were right when they were installed.
    site.version = old.slurm
    site.install(old)
    site.version = build.slurm
    if old.has("job_submit_sluice"):
        site.cluster.stop_daemon("slurmctld@ctl1")
        site.cluster.start_daemon("slurmctld@ctl1")  # without the guard it ends: what the guard is for
        site.wait(lambda: next(d for d in site.cluster.daemons() if d.name == "slurmctld@ctl1").status is not None)
    else:
        site.cluster.stop_daemon("slurmctld@ctl1")
    done = site.cluster.run([site.places.current / "guard"], node="ctl1")
    assert "Slurm starts without Sluice's plugins" in done.stderr and "sluice plugin install" in done.stderr
    site.cluster.start_daemon("slurmctld@ctl1")
    site.wait_up()
    assert site.loaded() == set()
    assert include_state(site.places) == "stock"
    site.wait(lambda: site.job(jobs["running"]) == "RUNNING")
    check_jobs(site, jobs)
    site.install(build)  # the admin's answer
    site.restart()
    assert "select_cons_tres.so" in site.loaded()
    site.wait(lambda: site.job(jobs["running"]) == "RUNNING")
    check_jobs(site, jobs)


def test_the_guard_never_keeps_slurmctld_down(site: PluginSite) -> None:
    """Whatever has become of its files, it is quick and exits 0, and a missing plugin means stock Slurm."""
    folder = site.places.real(site.places.current).resolve()
    copy = folder.with_name("slurm-broken")
    shutil.copytree(folder, copy)
    include = site.cluster.layout.slurm / INCLUDE
    inside = site.places.versions / "slurm-broken/guard"
    try:
        (copy / "libsluice_controller.so").unlink()
        assert "libsluice_controller.so is missing" in site.cluster.run([inside], node="ctl1").stderr
        assert "PluginDir" not in include.read_text()
        facts = (copy / "facts").read_text()
        for broken in (facts.replace("/usr/sbin/slurmctld", "/nowhere"), "SLURM_VERSION=\n", "x = (\n", ""):
            (copy / "facts").write_text(broken)
            site.cluster.run([inside], node="ctl1")
        for name in ("facts", "on.conf", "stock.conf"):
            (copy / name).unlink()
            site.cluster.run([inside], node="ctl1")
        include.unlink()
        assert site.cluster.run([site.places.current / "guard"], node="ctl1").stderr == ""
        assert "PluginDir" in include.read_text()  # the right one writes it again
    finally:
        shutil.rmtree(copy)


def test_disabled_with_jobs_queued_and_running(site: PluginSite, jobs: dict[str, int]) -> None:
    installation.write_level(site.places, "place")
    site.set_policy()
    site.wait(lambda: site.report()["level"] == "place")
    installation.disable(site.places)
    site.wait(lambda: site.report()["level"] == "off")
    assert "select_cons_tres.so" in site.loaded()
    check_jobs(site, jobs)
    site.restart()
    assert site.loaded() == set()
    site.wait(lambda: site.job(jobs["running"]) == "RUNNING")
    check_jobs(site, jobs)


def test_uninstalled_with_jobs_queued_and_running(site: PluginSite, build: PluginBuild, jobs: dict[str, int]) -> None:
    site.install(build)
    site.restart()
    installation.write_level(site.places, "place")
    site.wait(lambda: site.report()["level"] == "place")
    result = installation.uninstall(site.places, read_site_options(site.conf))
    assert any("remove from" in line for line in result.left)
    site.wait(lambda: site.report()["level"] == "off")
    check_jobs(site, jobs)  # slurmctld still runs with what it has loaded
    site.cluster.run(["scontrol", "reconfigure"])
    site.wait_up()
    site.wait(lambda: site.job(jobs["running"]) == "RUNNING")
    check_jobs(site, jobs)
    site.restart()
    assert site.loaded() == set()
    assert list(site.places.real(site.places.search).iterdir()) == []
    site.conf.write_text(site.conf.read_text().replace(f"Include {INCLUDE}\n", ""))
    (site.cluster.layout.slurm / INCLUDE).unlink()
    site.restart()
    site.wait(lambda: site.job(jobs["running"]) == "RUNNING")
    check_jobs(site, jobs)
    site.cluster.run(["scancel", str(jobs["held"]), str(jobs["waiting"]), str(jobs["running"])])


def test_by_command(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """The same by `sluice plugin`, on the controller of a site that has a job_submit plugin of its own."""
    built = build_for(None, tmp_path / "built")
    description = {**DESCRIPTION, "slurm_conf": "JobSubmitPlugins=require_timelimit\n"}
    cluster = make_cluster(description)
    (cluster.layout.folder / "search").mkdir()
    search = ["--search-dir", str(INSIDE / "search"), "--systemd-dir", "/nowhere"]

    def sluice(*words: str, status: int = 0) -> tuple[str, str]:
        command = [sys.executable, "-m", "sluice.main", "plugin", *words]
        done = cluster.run(command, node="ctl1", check=False)
        assert done.returncode == status, done
        return done.stdout, done.stderr

    said = sluice("install", "--build", str(built.folder), *search)[1]
    assert "remove from /etc/slurm/slurm.conf: JobSubmitPlugins=require_timelimit" in said
    assert "before each start of slurmctld run" in said  # no systemd there
    include = cluster.layout.slurm / INCLUDE
    assert "JobSubmitPlugins=require_timelimit,sluice\n" in include.read_text()
    assert f"problem: /etc/slurm/slurm.conf: does not include {INCLUDE}" in sluice("check", *search, status=1)[0]
    conf = cluster.layout.slurm / "slurm.conf"
    conf.write_text(conf.read_text().replace("JobSubmitPlugins=require_timelimit", f"Include {INCLUDE}"))
    cluster.stop_daemon("slurmctld@ctl1")
    cluster.start_daemon("slurmctld@ctl1")
    site_waits = PluginSite.wait
    waiter = PluginSite.__new__(PluginSite)
    waiter.cluster = cluster
    status = [sys.executable, "-m", "sluice.main", "plugin", "status", "-P", "-n", *search]
    site_waits(waiter, lambda: "|off|off|" in cluster.run(status, node="ctl1", check=False).stdout)
    assert "problem" not in sluice("check", *search)[0]
    assert sluice("level")[0] == "off\n"
    assert "no policy yet" in sluice("level", "place")[1]
    POLICY.write(cluster.layout.slurm / "sluice.policy")
    site_waits(waiter, lambda: sluice("status", "-P", "-n", "-o", "level,tenants", *search)[0] == "place|1\n")
    assert "use one of off, admit" in sluice("level", "on", status=2)[1]
    refused = cluster.run(["sbatch", "--wrap", "true"], user="alice", check=False)  # the site's own plugin still judges
    assert refused.returncode != 0 and "Time limit" in refused.stderr
    sluice("disable", *search)
    assert "JobSubmitPlugins=require_timelimit\n" in include.read_text()
    said = sluice("uninstall", *search)[1]
    assert "put back into /etc/slurm/slurm.conf: JobSubmitPlugins=require_timelimit" in said
