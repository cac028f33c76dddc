"""Installation into a folder in place of a site: every file, what is refused, and what the guard does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from sluice.base.errors import SluiceError, UsageError
from sluice.plugin import install as installation
from sluice.plugin.builder import MANIFEST, PluginBuild, check_supported, fresh_output, read_build, write_manifest
from sluice.plugin.install import HELPER, Places, holds_tasks, install, installed_build
from sluice.plugin.site import SiteOptions, read_site_options
from sluice.plugin.status import _check_burst_buffer, _check_limits, include_state, read_controllers

VERSION = (22, 5, 8)
STOCK = Path("/usr/lib/slurm")
NAMES = ("job_submit_sluice", "libsluice_controller", "select_cons_tres", "site_factor_sluice", "spank_sluice")


@pytest.fixture
def build(tmp_path: Path) -> PluginBuild:
    return make_build(tmp_path / "built")


def make_build(folder: Path, content: str = "") -> PluginBuild:
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.so").write_text(name + content)
    write_manifest(folder, VERSION)
    return read_build(folder)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    for folder in ("etc/slurm", "usr/local/lib", "etc/systemd/system"):
        (tmp_path / "root" / folder).mkdir(parents=True)
    return Places(destdir=tmp_path / "root")


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()}


def put(build: PluginBuild, places: Places, options: SiteOptions | None = None, **more: object) -> installation.Result:
    return install(build, places, slurm=VERSION, stock=STOCK, options=options, **more)  # type: ignore[arg-type]


def include(places: Places) -> str:
    return places.real(places.conf / "sluice.plugins.conf").read_text()


def test_what_is_put_where(build: PluginBuild, places: Places) -> None:
    result = put(build, places)
    root = places.destdir
    version = (root / "usr/local/lib/sluice/current").readlink().name
    assert version.startswith("slurm-22.05.8-")
    folder = f"usr/local/lib/sluice/{version}"
    assert files(root) == {
        *(f"usr/local/lib/{name}.so" for name in NAMES if name != "spank_sluice"),
        "usr/local/lib/sluice/current",
        *(f"{folder}/{name}.so" for name in NAMES),
        *(f"{folder}/{name}" for name in (MANIFEST, "facts", "guard", "on.conf", "stock.conf")),
        "etc/slurm/sluice.plugins.conf",
        "etc/slurm/plugstack.conf",
        "etc/slurm/plugstack.conf.d/sluice.conf",
        "etc/systemd/system/slurmctld.service.d/sluice-guard.conf",
    }
    assert (root / "usr/local/lib/select_cons_tres.so").read_text() == "select_cons_tres"
    assert include(places).splitlines()[1:] == [
        "PluginDir=/usr/local/lib:/usr/lib/slurm",
        "JobSubmitPlugins=sluice",
        "PrioritySiteFactorPlugin=site_factor/sluice",
    ]
    assert include_state(places) == "on"
    assert (
        "optional /usr/local/lib/sluice/current/spank_sluice.so"
        in (root / "etc/slurm/plugstack.conf.d/sluice.conf").read_text()
    )
    assert any("Include sluice.plugins.conf" in line for line in result.left)
    for path in root.rglob("*"):
        assert path.is_symlink() or not path.stat().st_mode & 0o022, path


def test_the_shipped_drop_in_is_what_install_writes(build: PluginBuild, places: Places) -> None:
    put(build, places)
    written = places.real(Path("/etc/systemd/system/slurmctld.service.d/sluice-guard.conf")).read_text().splitlines()
    shipped = Path(__file__).parents[3] / "etc/systemd/slurmctld.service.d/sluice-guard.conf"
    assert [line for line in shipped.read_text().splitlines() if not line.startswith("#")] == [
        line for line in written if not line.startswith("#")
    ]


def test_again_changes_nothing_and_another_build_replaces_it(
    build: PluginBuild, places: Places, tmp_path: Path
) -> None:
    put(build, places)
    before = files(places.destdir)
    put(build, places)
    assert files(places.destdir) == before
    other = make_build(tmp_path / "other", "!")
    put(other, places)
    link = places.real(places.search / "select_cons_tres.so")
    assert link.read_text() == "select_cons_tres!"
    third = make_build(tmp_path / "third", "?")
    put(third, places)
    folders = [path.name for path in places.real(places.versions).glob("slurm-*")]
    assert len(folders) == 2  # the current one and the one before


def test_a_plugin_that_is_no_more_loses_its_link(build: PluginBuild, places: Places, tmp_path: Path) -> None:
    put(build, places)
    folder = tmp_path / "less"
    folder.mkdir()
    (folder / "libsluice_controller.so").write_text("less")
    write_manifest(folder, VERSION)
    put(read_build(folder), places)
    assert [path.name for path in places.real(places.search).glob("*.so")] == ["libsluice_controller.so"]
    assert "JobSubmitPlugins" not in include(places)


def test_other_versions_are_refused(build: PluginBuild, places: Places) -> None:
    for version in ((22, 5, 9), (23, 2, 0), (24, 11, 5)):
        with pytest.raises(SluiceError, match=r"plugins for Slurm 22.05.8, but the installed slurmctld is"):
            install(build, places, slurm=version, stock=STOCK)
    assert files(places.destdir) == set()
    install(build, places, slurm=(22, 5, 9), stock=STOCK, spank_only=True)  # SPANK: major and minor
    with pytest.raises(SluiceError, match="plugins for Slurm"):
        install(build, places, slurm=(22, 6, 0), stock=STOCK, spank_only=True)
    with pytest.raises(
        SluiceError, match=r"support 22.05 and 24.11; job_submit and SPANK also 23.02, .*25.11 and 26.05;"
    ):
        check_supported((25, 5, 1))
    check_supported((26, 5, 5))


def limit_build(folder: Path) -> PluginBuild:
    made = make_build(folder)
    (made.folder / "spank_sluice_limit.so").write_text("limit")
    write_manifest(folder, VERSION)
    return read_build(folder)


def test_tasks_are_held_where_that_is_asked_for(places: Places, tmp_path: Path, build: PluginBuild) -> None:
    held = limit_build(tmp_path / "held")
    stack = places.real(Path("/etc/slurm/plugstack.conf.d/sluice.conf"))
    line = "required /usr/local/lib/sluice/current/spank_sluice_limit.so helper=/usr/libexec/sluice/sluice-task-init"
    put(held, places)
    assert "required" not in stack.read_text() and not holds_tasks(places)
    assert not places.real(places.search / "spank_sluice_limit.so").exists()  # slurmctld does not load it
    result = put(held, places, spank_only=True, limits=True)
    assert stack.read_text().splitlines()[1:] == ["optional /usr/local/lib/sluice/current/spank_sluice.so", line]
    assert any("prolog_epilog/programs" in one for one in result.left)
    put(held, places)  # an update does not leave tasks without limits
    assert holds_tasks(places)
    assert any("without the node agent's limits" in one for one in installation.disable(places).done)
    assert not holds_tasks(places)
    with pytest.raises(UsageError, match="has no spank_sluice_limit.so"):
        put(build, places, limits=True)


def test_submissions_pass_on_their_traces_where_that_is_asked_for(places: Places, build: PluginBuild) -> None:
    stack = places.real(Path("/etc/slurm/plugstack.conf.d/sluice.conf"))
    traced = "optional /usr/local/lib/sluice/current/spank_sluice.so trace"
    put(build, places)
    assert traced not in stack.read_text()
    put(build, places, trace=True)
    assert stack.read_text().splitlines()[1:] == [traced]
    put(build, places)  # an update leaves it
    installation.disable(places)
    assert stack.read_text().splitlines()[1:] == [traced]


def test_slurmd_is_given_what_tells_it_shares_by_gpu(places: Places, tmp_path: Path) -> None:
    held = limit_build(tmp_path / "held")
    (held.folder / "prep_script.so").write_text("prep")
    write_manifest(held.folder, VERSION)
    held = read_build(held.folder)
    link = places.real(places.search / "prep_script.so")
    install(held, places, slurm=(22, 5, 9), stock=STOCK, spank_only=True, limits=True)  # of another slurmd
    assert not link.exists()
    result = put(held, places, spank_only=True, limits=True)
    assert link.read_text() == "prep" and "restart slurmd on nodes" in result.left
    assert [path.name for path in places.real(places.search).glob("*.so")] == ["prep_script.so"]


def test_check_says_what_a_task_would_miss(places: Places, tmp_path: Path) -> None:
    held = limit_build(tmp_path / "held")

    def about_limits() -> list[tuple[str, str]]:
        made = installed_build(places)
        assert made is not None
        return [(one.kind, one.what) for one in _check_limits(places, made)]

    put(held, places)
    [(kind, what)] = about_limits()
    assert kind == "ok" and what.startswith("tasks start without limits on GPU memory")
    put(held, places, limits=True)
    assert about_limits()[0][0] == "remark" and "no job with GPUs could start" in about_limits()[0][1]
    helper = places.real(HELPER)
    helper.parent.mkdir(parents=True)
    helper.touch(mode=0o777)
    helper.chmod(0o777)
    [(kind, what)] = about_limits()
    assert kind == "problem" and "users other than root can change" in what
    with pytest.raises(UsageError, match="has no spank_sluice_limit.so"):
        put(make_build(tmp_path / "less"), places)  # every srun would fail


def test_spank_only_touches_nothing_of_slurmctld(build: PluginBuild, places: Places) -> None:
    put(build, places, spank_only=True)
    kinds = {Path(name).name for name in files(places.destdir)}
    assert "sluice.conf" in kinds and "guard" not in kinds and "sluice.plugins.conf" not in kinds
    assert not list(places.real(places.search).glob("*.so"))


def test_what_the_site_has_itself_is_kept(build: PluginBuild, places: Places) -> None:
    conf = places.real(places.conf / "slurm.conf")
    conf.write_text(
        "SelectType=select/linear\nPluginDir=/opt/own:/usr/lib/slurm\nJobSubmitPlugins=lua\n"
        "Include sluice.plugins.conf\nStateSaveLocation=/var/spool/slurmctld\n"
        "PrioritySiteFactorPlugin=site_factor/own\n"
    )
    options = read_site_options(conf)
    assert options == SiteOptions(
        plugin_dir="/opt/own:/usr/lib/slurm",
        job_submit="lua",
        site_factor="site_factor/own",
        select_type="select/linear",
        state_folder="/var/spool/slurmctld",
        includes_us=True,
    )
    result = put(build, places, options)
    assert include(places).splitlines()[1:] == [
        "PluginDir=/usr/local/lib:/opt/own:/usr/lib/slurm",
        "JobSubmitPlugins=lua,sluice",
    ]
    assert sum("remove from" in line for line in result.left) == 3
    assert any("placement needs" in line for line in result.left)
    assert any("order needs" in line for line in result.left)
    # Once they are taken out there, they come back with stock Slurm.
    assert read_site_options(conf) == options
    installation.disable(places)
    assert include(places).splitlines()[1:] == [
        "PluginDir=/opt/own:/usr/lib/slurm",
        "JobSubmitPlugins=lua",
        "PrioritySiteFactorPlugin=site_factor/own",
    ]


def with_adapter(tmp_path: Path) -> PluginBuild:
    tmp_path.mkdir(exist_ok=True)
    folder = make_build(tmp_path / "with").folder
    (folder / "burst_buffer_sluice.so").write_text("adapter")
    write_manifest(folder, VERSION)
    return read_build(folder)


def test_the_journals_plugin_is_loaded_in_any_case(places: Places, tmp_path: Path) -> None:
    put(with_adapter(tmp_path), places)
    assert include(places).splitlines()[-1] == "BurstBufferType=burst_buffer/sluice"
    installation.disable(places)
    assert "BurstBufferType" not in include(places)
    stands = {path.name for path in places.real(places.search).glob("burst_buffer_*.so")}
    assert stands == {"burst_buffer_sluice.so"}


@pytest.mark.parametrize("value", ["lua", "burst_buffer/lua"])
def test_it_is_found_before_the_sites_own_burst_buffer(places: Places, tmp_path: Path, value: str) -> None:
    """slurm.conf keeps its line; Slurm finds ours under that name first."""
    conf = places.real(places.conf / "slurm.conf")
    conf.write_text(f"BurstBufferType={value}\nInclude sluice.plugins.conf\n")
    options = read_site_options(conf)
    stock = places.real(STOCK)
    stock.mkdir(parents=True)
    assert "no burst_buffer_lua.so in" in next(_check_burst_buffer(places, options, STOCK)).what
    (stock / "burst_buffer_lua.so").write_text("the site's")
    result = put(with_adapter(tmp_path), places, options)
    assert "BurstBufferType" not in include(places)
    assert not any("BurstBufferType" in line for line in result.left)
    link = places.real(places.search / "burst_buffer_lua.so")
    assert link.read_text() == "adapter"
    assert [one.kind for one in _check_burst_buffer(places, options, STOCK)] == ["ok"]
    conf.write_text("Include sluice.plugins.conf\n")  # the site has given it up
    put(with_adapter(tmp_path / "again"), places, read_site_options(conf))
    assert not link.is_symlink()
    assert include(places).splitlines()[-1] == "BurstBufferType=burst_buffer/sluice"


def test_a_line_of_the_sites_for_our_own_plugin_has_to_go(places: Places, tmp_path: Path) -> None:
    conf = places.real(places.conf / "slurm.conf")
    conf.write_text("BurstBufferType=burst_buffer/sluice\nInclude sluice.plugins.conf\n")
    options = read_site_options(conf)
    result = put(with_adapter(tmp_path), places, options)
    assert any("remove from" in line and "BurstBufferType=burst_buffer/sluice" in line for line in result.left)
    assert "BurstBufferType" not in include(places)  # twice would be an error of every command
    assert [one.kind for one in _check_burst_buffer(places, options, STOCK)] == ["problem"]


def test_foreign_files_are_left_alone(build: PluginBuild, places: Places) -> None:
    foreign = places.real(places.search / "select_cons_tres.so")
    foreign.write_text("somebody's")
    with pytest.raises(SluiceError, match="not Sluice's; move it away"):
        put(build, places)
    assert foreign.read_text() == "somebody's"
    assert not places.real(places.conf / "sluice.plugins.conf").exists()
    foreign.unlink()
    stack = places.real(places.conf / "plugstack.conf")
    stack.write_text("optional private.so\n")
    result = put(build, places)
    assert stack.read_text() == "optional private.so\n"
    assert any("add to /etc/slurm/plugstack.conf: include" in line for line in result.left)


def test_a_search_folder_that_is_not_there(build: PluginBuild, places: Places, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"/nowhere: no such folder; name one that exists on every host"):
        put(build, Places(search=Path("/nowhere"), destdir=places.destdir))


def test_uninstalled(build: PluginBuild, places: Places) -> None:
    put(build, places)
    installation.write_level(places, "place")
    result = installation.uninstall(places, SiteOptions(includes_us=True))
    assert files(places.destdir) == {"etc/slurm/sluice.plugins.conf", "etc/slurm/plugstack.conf"}
    assert "PluginDir" not in include(places)  # slurm.conf may still name it: empty, not gone
    assert any("then remove /etc/slurm/sluice.plugins.conf" in line for line in result.left)
    installation.uninstall(places, SiteOptions())
    assert files(places.destdir) == {"etc/slurm/plugstack.conf"}


def test_what_starts_slurmctld_is_not_uninstalled(build: PluginBuild, places: Places) -> None:
    """The supervisor's drop-in, as it is shipped, would keep slurmctld from starting."""
    put(build, places)
    assert places.systemd is not None
    drop_in = places.systemd / "slurmctld.service.d/sluice-supervise.conf"
    shipped = Path(__file__).parents[3] / "etc/systemd/slurmctld.service.d/sluice-supervise.conf"
    text = shipped.read_text().replace("/usr/local/lib/sluice/current", str(places.current))
    for started in (text, text.replace("ExecStart=/", "ExecStart = -/")):
        places.real(drop_in).write_text(started)
        before = files(places.destdir)
        with pytest.raises(SluiceError, match=r"sluice-supervise.conf: starts slurmctld by .*; rm .*daemon-reload"):
            installation.uninstall(places, SiteOptions())
        assert files(places.destdir) == before  # nothing is half done
    places.real(drop_in).write_text(text.replace("ExecStart=/", "#ExecStart=/"))
    places.real(drop_in).with_name("gone.conf").symlink_to("nowhere")
    installation.uninstall(places, SiteOptions())
    for path in places.real(drop_in).parent.iterdir():
        path.unlink()
    installation.uninstall(places, SiteOptions())
    assert files(places.destdir) == {"etc/slurm/plugstack.conf"}


def test_levels(places: Places) -> None:
    assert installation.read_level(places) == "off"
    installation.write_level(places, "shadow")
    assert installation.read_level(places) == "shadow"
    with pytest.raises(UsageError, match="level 'on': not known; use one of off, admit, shadow, place"):
        installation.write_level(places, "on")
    places.real(places.conf / "sluice.level").write_text("\x1b[2J")
    with pytest.raises(SluiceError, match=r"is not off, admit, shadow, place; set one"):
        installation.read_level(places)


def test_reports_of_controllers(tmp_path: Path) -> None:
    (tmp_path / "sluice.status.ctl1").write_text('{"schema_version": 1, "level": "place"}')
    (tmp_path / "sluice.status.ctl2").write_text("{cut off")
    (tmp_path / "sluice.status.ctl3").write_text('{"schema_version": 99}')
    (tmp_path / "sluice.status.ctl4.new").write_text('{"schema_version": 1}')
    assert [one.host for one in read_controllers(tmp_path)] == ["ctl1"]
    assert read_controllers(tmp_path / "nowhere") == []


def test_builds_are_read_with_care(tmp_path: Path, build: PluginBuild) -> None:
    assert build.has("select_cons_tres") and not build.has("prep_script")
    (build.folder / MANIFEST).write_text("{}")
    with pytest.raises(UsageError, match=r"damaged .*make one with: sluice plugin build"):
        read_build(build.folder)
    with pytest.raises(UsageError, match="No such file"):
        read_build(tmp_path)
    with pytest.raises(UsageError, match="not empty"):
        fresh_output(build.folder, VERSION, False)
    assert fresh_output(None, VERSION, True, cache=tmp_path) == tmp_path / "built-22.05.8-address"


# ---- the guard ----


class Guarded:
    """An installation whose guard can be run here: its paths are this system's."""

    def __init__(self, build: PluginBuild, folder: Path) -> None:
        for name in ("conf", "search"):
            (folder / name).mkdir(parents=True)
        self.program = folder / "slurmctld"
        self.say("echo slurm-wlm 22.05.8")
        self.places = Places(conf=folder / "conf", search=folder / "search", systemd=None)
        install(build, self.places, slurm=VERSION, stock=STOCK, slurmctld=self.program)

    def say(self, script: str) -> None:
        self.program.write_text(f"#!/bin/sh\n{script}\n")
        self.program.chmod(0o755)

    def run(self) -> str:
        done = subprocess.run(
            [self.places.current / "guard"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
            env={"PATH": os.defpath},
        )
        assert done.stdout == ""
        return done.stderr


@pytest.fixture
def guarded(build: PluginBuild, tmp_path: Path) -> Guarded:
    return Guarded(build, tmp_path / "guarded")


def test_guard_leaves_the_right_version_alone(guarded: Guarded) -> None:
    before = (guarded.places.conf / "sluice.plugins.conf").stat()
    assert guarded.run() == ""
    after = (guarded.places.conf / "sluice.plugins.conf").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo slurm-wlm 22.05.9", "slurmctld is 22.05.9, the plugins are for 22.05.8"),
        ("echo slurm 24.11.5", "slurmctld is 24.11.5"),
        ("exit 1", "of unknown version"),
        ("sleep 60", "of unknown version"),
        ("kill -SEGV $$", "of unknown version"),
    ],
)
def test_guard_switches_to_stock_and_back(guarded: Guarded, script: str, words: str) -> None:
    guarded.say(script)
    said = guarded.run()
    assert words in said and "sluice plugin install" in said
    assert include_state(guarded.places) == "stock"
    assert guarded.run() == said  # and stays there
    guarded.say("echo slurm-wlm 22.05.8")
    assert guarded.run() == ""
    assert include_state(guarded.places) == "on"


def test_guard_keeps_disabled_disabled(guarded: Guarded) -> None:
    installation.disable(guarded.places)
    assert "switched off by: sluice plugin disable" in guarded.run()
    assert include_state(guarded.places) == "stock"


def test_guard_where_nothing_can_be_written(guarded: Guarded) -> None:
    include_file = guarded.places.conf / "sluice.plugins.conf"
    include_file.unlink()
    include_file.mkdir()  # so that root, too, cannot replace it
    (include_file / "x").touch()
    guarded.say("echo slurm 22.05.9")
    assert "Slurm starts without" in guarded.run()
