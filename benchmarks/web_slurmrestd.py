"""Debian's slurmrestd as the peer of `benchmarks web`: listings of jobs over its socket, timed by curl.

It needs 80 KiB of memory for each job that it lists."""

from __future__ import annotations

import shutil
import statistics
import time

from benchmarks.web_site import WebSite, percentile
from dev_cluster.layout import INSIDE

_RUNS = 3
_VERSIONS = ("v0.0.41", "v0.0.40", "v0.0.39", "v0.0.38", "v0.0.37")
_USER = "u0"


def measure(site: WebSite) -> dict[str, float]:
    """Milliseconds and KiB of a listing; nothing where slurmrestd or curl is not installed, or it lists nothing."""
    if shutil.which("slurmrestd") is None or shutil.which("curl") is None:
        return {}
    folder = site.cluster.layout.scratch / "slurmrestd"
    folder.mkdir()
    folder.chmod(0o777)
    path = f"{INSIDE}/scratch/slurmrestd/socket"
    site.cluster.start_program("slurmrestd", ["slurmrestd", "-a", "rest_auth/local", f"unix:{path}"], user=_USER)
    began = time.monotonic()
    while not (folder / "socket").exists() and time.monotonic() < began + 30:
        time.sleep(0.1)

    def ask(version: str) -> tuple[float, float, str]:
        words = ["curl", "-s", "-o", "/dev/null", "-w", "%{time_total} %{size_download} %{http_code}"]
        words += ["--unix-socket", path, f"http://localhost/slurm/{version}/jobs"]
        took, size, status = site.cluster.run(words, user=_USER, cwd="/", timeout=900).stdout.split()
        return 1000 * float(took), float(size) / 1024, status

    version = next((one for one in _VERSIONS if ask(one)[2] == "200"), None)
    if version is None:
        return {}
    taken = [ask(version) for _ in range(_RUNS)]
    times = [took for took, _, _ in taken]
    pid = int(site.cluster.run(["pgrep", "-o", "-x", "slurmrestd"], cwd="/").stdout.split()[0])
    return {
        "snapshot_process_most_mib": site.memory_mib(pid)[1],
        "jobs_100_p50_ms": statistics.median(times),
        "jobs_100_p99_ms": percentile(times, 0.99),
        "jobs_100_kib": taken[-1][1],
    }
