"""The failover journal before a site's own burst buffer plugin: stock burst_buffer/lua, on real daemons.

The site's script writes down each call of Slurm's. The journal's folder is a file system of its own, of 1 MiB.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dev_cluster.cluster import DevCluster
from dev_cluster.layout import PLUGIN_SEARCH
from policy.compiled import FILE_NAME, CompiledPolicy, Global
from sluice.base.run import CommandError
from tests.integration.jobs import sbatch
from tests.integration.settled import block_saving, fresh_status, let_it_save, until
from tests.journal_reader import read_journal
from tests.programs.build import build_library

pytestmark = pytest.mark.cluster

INSIDE = "/run/sluice-cluster"
STAGES = ["setup", "data_in", "paths", "pre_run", "post_run", "data_out", "teardown"]
SCRIPT = f"""
local function note(name, job)
    local file = io.open("{INSIDE}/calls/" .. tostring(job), "a")
    file:write(name .. "\\n")
    file:close()
end
function slurm_bb_pools()
    return slurm.SUCCESS, '{{"pools": [{{"id": "fast", "quantity": 1000, "granularity": 1}}]}}'
end
function slurm_bb_job_process(path)
    local file = io.open(path)
    local text = file:read("*all")
    file:close()
    if string.find(text, "no such dataset") then
        return slurm.ERROR, "the site knows no such dataset"
    end
    return slurm.SUCCESS
end
function slurm_bb_get_status(...) return slurm.SUCCESS, "the site's status" end
function slurm_bb_setup(job) note("setup", job) return slurm.SUCCESS end
function slurm_bb_data_in(job) note("data_in", job) return slurm.SUCCESS end
function slurm_bb_test_data_in(job) return slurm.SUCCESS end
function slurm_bb_test_data_out(job) return slurm.SUCCESS end
function slurm_bb_real_size(job) return slurm.SUCCESS end
function slurm_bb_paths(job) note("paths", job) return slurm.SUCCESS end
function slurm_bb_pre_run(job) note("pre_run", job) return slurm.SUCCESS end
function slurm_bb_post_run(job) note("post_run", job) return slurm.SUCCESS end
function slurm_bb_data_out(job) note("data_out", job) return slurm.SUCCESS end
function slurm_bb_job_teardown(job) note("teardown", job) return slurm.SUCCESS end
"""


class Site:
    """A cluster with burst_buffer/lua."""

    def __init__(self, cluster: DevCluster) -> None:
        self.cluster = cluster
        self.state = cluster.layout.state
        self.calls = cluster.folder / "calls"

    def submit(self, *options: str, body: str = "true", buffer: bool = True) -> str:
        ask = "#BB_LUA pool=fast capacity=1\n" if buffer else ""
        script = self.cluster.folder / "job.sh"
        script.write_text(f"#!/bin/sh\n{ask}{body}\n")
        script.chmod(0o755)
        return sbatch(self.cluster, "-t5", *options, f"{INSIDE}/job.sh")

    def done(self, job: str) -> list[str]:
        """What the site's script was called for."""
        path = self.calls / job
        return path.read_text().split() if path.exists() else []

    def job_state(self, job: str) -> str:
        shown = self.cluster.run(["squeue", "-h", "-t", "all", "-j", job, "-o", "%T"], check=False).stdout.strip()
        return shown or "MISSING"

    def pools(self) -> str:
        return self.cluster.run(["scontrol", "show", "burst"], check=False).stdout

    def report(self) -> dict[str, Any]:
        return fresh_status(self.cluster)

    def counter(self, name: str) -> int:
        return int(self.report()["counters"].get(name, 0))

    def journal(self, on: bool) -> None:
        """The one line by which it is switched on."""
        CompiledPolicy(settings=Global(journal=on)).write(self.cluster.layout.slurm / FILE_NAME)

    def submitted(self) -> set[str]:
        """What is in the journal, whose file system only the controller sees."""
        copy = self.cluster.layout.scratch / "journal"
        copy.mkdir(exist_ok=True)
        self.cluster.run(
            ["sh", "-c", f"cp {INSIDE}/state/sluice.journal/*.journal {INSIDE}/scratch/journal/"], node="ctl1"
        )
        return {str(one.job_id) for one in read_journal(copy).entries if one.kind == "submit"}

    def answers(self) -> bool:
        return self.cluster.run(["squeue", "-h"], check=False, timeout=20).returncode == 0


@pytest.fixture(scope="module", params=["native", pytest.param("trixie", marks=pytest.mark.trixie)])
def site(request: pytest.FixtureRequest, make_shared_cluster: Callable[..., DevCluster]) -> Iterator[Site]:
    root = {} if request.param == "native" else {"root": request.getfixturevalue("trixie_root")}
    description = {
        "nodes": [{"names": "n[1-2]", "platform": "none"}],
        "controllers": 1,
        "accounting": False,
        "users": [{"name": "alice"}],
        "slurm_conf": "DefMemPerCPU=10\nSchedulerParameters=bf_interval=1,sched_interval=2\n",
        "sluice": {
            "level": "admit",
            "policy": CompiledPolicy().render(),
            "environment": {"LD_PRELOAD": f"{INSIDE}/late.so"},
        },
    }
    cluster = make_shared_cluster(description, **root)
    build_library("late_unload", cluster.folder / "late.so")
    found = Site(cluster)
    found.calls.mkdir()
    found.calls.chmod(0o777)
    (cluster.layout.slurm / "burst_buffer.lua").write_text(SCRIPT)
    conf = cluster.layout.slurm / "slurm.conf"  # as `sluice plugin install` leaves a site that has that plugin
    conf.write_text(conf.read_text().replace("BurstBufferType=burst_buffer/sluice", "BurstBufferType=burst_buffer/lua"))
    before = [f"{INSIDE}/plugins/burst_buffer_sluice.so", PLUGIN_SEARCH / "burst_buffer_lua.so"]
    cluster.run(["ln", "-sf", *before], node="ctl1")
    cluster.stop_daemon("slurmctld@ctl1")
    (found.state / "sluice.journal").mkdir()
    folder = f"{INSIDE}/state/sluice.journal"
    cluster.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700,uid=64030", "tmpfs", folder], node="ctl1")
    cluster.start_daemon("slurmctld@ctl1")
    until(found.pools, lambda shown: "fast" in shown)
    yield found


def test_off_it_only_forwards(site: Site) -> None:
    status = site.cluster.run(["scontrol", "show", "bbstat", "x"]).stdout
    assert "the site's status" in status
    assert "lua" in site.pools().split("\n")[0]
    assert site.cluster.run(["scontrol", "show", "config"]).stdout.count("burst_buffer/lua") == 1
    job = site.submit()
    until(lambda: site.done(job), lambda calls: bool(calls == STAGES))
    with pytest.raises(CommandError, match="the site knows no such dataset"):
        site.submit(body="# no such dataset")
    listed = site.cluster.run(["ls", f"{INSIDE}/state/sluice.journal"], node="ctl1").stdout
    assert listed == ""


def test_one_line_switches_the_journal_on(site: Site) -> None:
    started = site.report()["started"]
    site.journal(True)
    until(lambda: site.counter("journal.open"), lambda value: bool(value == 1))
    assert site.report()["started"] == started


def test_what_either_refuses_is_refused(site: Site) -> None:
    entries = site.counter("journal.entries")
    with pytest.raises(CommandError, match="the site knows no such dataset"):
        site.submit(body="# no such dataset")
    assert site.counter("journal.entries") == entries
    with pytest.raises(CommandError, match=r"could not be made safe.*No space left on device") as refused:
        site.submit(body="#" * 1_500_000)
    assert "the site knows" not in str(refused.value)
    until(lambda: site.counter("journal.refused"), lambda value: bool(value == 1))
    assert "JobID=" not in site.pools()  # the site's plugin has forgotten it
    job = site.submit()  # both work on
    until(lambda: site.done(job), lambda calls: bool(calls == STAGES))


def test_a_job_with_a_buffer_is_there_again(site: Site) -> None:
    let_it_save(site.cluster)
    until(lambda: block_saving(site.cluster), bool)
    time.sleep(1.1)  # the state's time has whole seconds
    held = site.submit("-H", body=f"echo ran >> {INSIDE}/calls/ran.$SLURM_JOB_ID")
    cancelled = site.submit("-H")
    site.cluster.run(["scancel", cancelled], user="alice")
    site.cluster.stop_daemon("slurmctld@ctl1", number=signal.SIGKILL)
    site.cluster.start_daemon("slurmctld@ctl1")
    until(site.answers, bool)
    (site.state / "job_state.new").rmdir()
    assert site.job_state(held) == "PENDING"
    assert site.job_state(cancelled) in ("MISSING", "CANCELLED")
    until(site.pools, lambda shown: "fast" in shown)
    site.cluster.run(["scontrol", "release", held])
    until(lambda: site.done(held), lambda calls: bool(calls == STAGES))
    assert site.done(f"ran.{held}") == ["ran"]


def test_reconfigured_both_go_on(site: Site) -> None:
    site.cluster.run(["scontrol", "reconfigure"])
    shown = ["scontrol", "show", "bbstat", "x"]
    until(lambda: site.cluster.run(shown, check=False).stdout, lambda said: "the site's status" in said)
    held = site.submit("-H")
    until(lambda: held in site.submitted(), bool)


def test_that_the_plugin_is_missing_is_said_when_it_is_and_not_at_an_orderly_stop(site: Site) -> None:
    """slurmctld unloads it before all else when it ends, and in 24.11 when it is reconfigured."""
    log, conf = site.cluster.log("slurmctld@ctl1"), site.cluster.layout.slurm / "slurm.conf"

    def said() -> int:
        return log.read_text().count("its burst_buffer plugin is not loaded")

    site.cluster.stop_daemon("slurmctld@ctl1")
    assert said() == 0
    conf.write_text(conf.read_text().replace("BurstBufferType=burst_buffer/lua", ""))
    site.cluster.start_daemon("slurmctld@ctl1")
    until(said, lambda times: times == 1)
