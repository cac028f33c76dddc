"""Jobs of the past, written directly into a cluster's accounting database: a million cannot be run first."""

from __future__ import annotations

from dataclasses import dataclass

from dev_cluster.cluster import DevCluster
from dev_cluster.configuration import ACCT_DATABASE
from dev_cluster.layout import INSIDE

_NO_VALUE = 4294967294
FIRST_ID = 1_000_000


@dataclass(frozen=True, slots=True)
class History:
    """`jobs` jobs, submitted evenly from `start` to `end` (seconds since 1970) by all users of the cluster in turn.

    They wait up to 2,000 s and run up to `longest_s`, on one node with one to four GPUs each, every third one with a
    share of a GPU instead. One in twenty failed, and one in fifty was cancelled before it started.
    """

    jobs: int
    start: int
    end: int
    longest_s: int = 7200
    nodes: tuple[str, ...] = ("n1",)
    gpu_type: str = "h100"


def fill(cluster: DevCluster, history: History) -> None:
    """Write the jobs. The cluster must run with accounting. Raises CommandError with the database's words."""
    step = (history.end - history.start) / history.jobs
    nodes = ",".join(f"'{name}'" for name in history.nodes)
    table, columns = "sluice_job_table", (
        "mod_time, account, cpus_req, job_name, id_assoc, id_job, id_qos, id_resv, id_wckey, id_user, id_group, "
        "het_job_id, het_job_offset, state_reason_prev, mem_req, nodelist, nodes_alloc, node_inx, `partition`, "
        "priority, state, timelimit, time_submit, time_eligible, time_start, time_end, work_dir, tres_alloc, tres_req"
    )  # fmt: skip
    tres = "CONCAT('1=4,2=8192,4=1,5=4,', IF(seq % 3 = 0, CONCAT(@shard, '=', 10240 * (1 + seq % 2)), " \
        "CONCAT(@gpu, '=', 1 + seq % 4, ',', @typed, '=', 1 + seq % 4)))"  # fmt: skip
    # Runs and waits that look random and are the same each time: products with primes, taken modulo.
    rows = f"""
        SELECT seq, a.acct, a.id_assoc, {history.start} + FLOOR(seq * {step:.9f}) AS s,
               {history.start} + FLOOR(seq * {step:.9f}) + (seq * 7919) % 2000 AS b,
               {history.start} + FLOOR(seq * {step:.9f}) + (seq * 7919) % 2000 + (seq * 104729) % {history.longest_s}
                   AS e, seq % 50 = 49 AS never, {tres} AS tres
        FROM seq_1_to_{history.jobs} JOIN assocs a ON a.n = (seq * 31) % @users
    """
    sql = f"""
        SET unique_checks = 0;
        SET @gpu = (SELECT id FROM tres_table WHERE type = 'gres' AND name = 'gpu');
        SET @shard = (SELECT id FROM tres_table WHERE type = 'gres' AND name = 'shard');
        SET @typed = (SELECT id FROM tres_table WHERE type = 'gres' AND name = 'gpu:{history.gpu_type}');
        CREATE TEMPORARY TABLE assocs (n INT PRIMARY KEY, id_assoc INT, acct TINYTEXT) AS
            SELECT ROW_NUMBER() OVER (ORDER BY id_assoc) - 1 AS n, id_assoc, acct FROM sluice_assoc_table
            WHERE user != '' AND user != 'root' AND deleted = 0;
        SET @users = (SELECT COUNT(*) FROM assocs);
        INSERT INTO {table} ({columns})
        SELECT GREATEST(b, e), acct, 4, CONCAT('job', seq), id_assoc, {FIRST_ID} + seq, 1, 0, 0, 2000 + id_assoc, 2000,
               0, {_NO_VALUE}, 0, 8192, IF(never, '', ELT(1 + seq % {len(history.nodes)}, {nodes})), IF(never, 0, 1),
               '', 'main', 1, IF(never, 4, IF(seq % 20 = 0, 5, 3)), 120, s, s, IF(never, 0, b), IF(never, b, e), '/',
               IF(never, '', tres), tres
        FROM ({rows}) AS x;
        UPDATE sluice_event_table SET time_start = {history.start - 86400} WHERE node_name = '' AND time_end = 0;
    """  # noqa: S608 - made of numbers and this module's own words
    cluster.run(
        ["mysql", f"--socket={INSIDE}/database/mariadb.sock", "--user=root", ACCT_DATABASE], node="db",
        input_text=sql, timeout=1200,
    )  # fmt: skip


def roll_up(cluster: DevCluster, start: str, end: str) -> None:
    """Let slurmdbd count its usage again, for sreport; dates as sacctmgr reads them. It takes minutes for a million."""
    cluster.run(["sacctmgr", "--immediate", "rollup", start, end], timeout=1800)
