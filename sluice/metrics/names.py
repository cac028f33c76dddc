"""Every metric there is, by OpenMetrics' habits: base units, in the name; counters end in _total.

docs/metrics.md is made from this table.
A measurement is a kind of thing that is measured; its tags say which one. In InfluxDB it holds fields; in Prometheus
and VictoriaMetrics a metric is called MEASUREMENT_FIELD.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["gauge", "counter"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One field."""

    field: str
    kind: Kind
    help: str


@dataclass(frozen=True)
class Measurement:
    """A kind of thing, who measures it, and the tags that distinguish them."""

    name: str
    side: Literal["node", "controller", "both"]
    help: str
    tags: Mapping[str, str]
    metrics: tuple[Metric, ...]
    identity: tuple[str, ...] = ()
    """Fields that only name things, as setting `job_ids` says: integers or text, never metrics of their own."""
    by_field: Mapping[str, Metric] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_field", {metric.field: metric for metric in self.metrics})


def _gauge(name: str, text: str) -> Metric:
    return Metric(name, "gauge", text)


def _count(name: str, text: str) -> Metric:
    return Metric(f"{name}_total", "counter", text)


_GPU_TAGS = {
    "node": "its node",
    "gpu": "its UUID",
    "index": "its number in gres.conf; of MIG, of its first instance",
    "vendor": "nvidia, amd or intel",
    "model": "its model",
}
_NIC_COUNTS = (
    _count("transmit_bytes", "sent; of RoCE by RDMA only"),
    _count("receive_bytes", "received; of RoCE by RDMA only"),
    _count("link_downs", "times that the link went down"),
    _count("link_recoveries", "times that the link had to be trained again (InfiniBand)"),
    _count("symbol_errors", "symbol errors of InfiniBand; packets with a wrong checksum of Ethernet"),
    _count("receive_errors", "packets that were received with an error"),
    _count("transmit_discards", "packets that could not be sent"),
    _count(
        "transmit_wait_ticks", "the adapter's ticks in which the network took none of what it had to send (InfiniBand)"
    ),
    _count("retransmissions", "times that RDMA sent again: timeouts, and what receivers missed or were not ready for"),
    _count("out_of_sequence", "packets of RDMA that came out of order"),
    _count("congestion_marks", "packets that switches had marked for congestion (RoCE)"),
    _count("congestion_notifications", "requests of receivers to send more slowly (RoCE)"),
)
"""Since the node agent started, or of a job since it has the interface."""
_WHOSE = {"account": "the tenant's account", "user": "the user"}

MEASUREMENTS: tuple[Measurement, ...] = (
    Measurement(
        "sluice_gpu",
        "node",
        "A physical GPU, for all its users. What a vendor does not report is left out.",
        _GPU_TAGS,
        (
            _gauge("up", "1 where the driver answers for it, else 0"),
            _gauge("utilisation_ratio", "part of the time that it was busy"),
            _gauge("memory_bandwidth_ratio", "part of the time in which its memory was read or written"),
            _gauge("encoder_ratio", "part of the time that the video encoder was busy"),
            _gauge("decoder_ratio", "part of the time that the video decoder was busy"),
            _gauge("memory_used_bytes", "memory in use, the driver's own included where the vendor counts it"),
            _gauge("memory_total_bytes", "all of its memory"),
            _gauge("power_watts", "draw"),
            _gauge("power_limit_watts", "limit in force"),
            _count("energy_joules", "energy since the driver was loaded"),
            _gauge("temperature_celsius", "of the chip"),
            _gauge("memory_temperature_celsius", "of the memory"),
            _gauge("fan_ratio", "of full speed"),
            _gauge("clock_graphics_hertz", "clock of the compute units"),
            _gauge("clock_memory_hertz", "clock of the memory"),
            _gauge("clock_video_hertz", "clock of the video engines"),
            _gauge("throttled_power", "1 while the power limit slows it down"),
            _gauge("throttled_thermal", "1 while heat slows it down"),
            _gauge("throttled_brake", "1 while the power supply slows it down"),
            _gauge("throttled_hardware", "1 while another protection of the hardware slows it down"),
            _count("ecc_corrected_errors", "memory errors that were corrected, since the driver was loaded"),
            _count("ecc_uncorrected_errors", "memory errors that were not corrected"),
            _count("ras_uncorrected_errors", "uncorrected errors outside of memory (AMD, Intel)"),
            _gauge("remapped_rows", "rows of memory that were replaced"),
            _gauge("remap_pending", "1 where a row waits for a reset, or a page for a reboot"),
            _gauge("remap_failed", "1 where a row could not be replaced"),
            _gauge("retired_pages", "pages of memory that are not used any more"),
            _gauge("pcie_generation", "of the link now"),
            _gauge("pcie_lanes", "of the link now"),
            _count("pcie_replays", "packets that were sent again"),
            _count("xid_errors", "XID events of NVIDIA's driver since the agent started"),
            _gauge("links_up", "NVLinks, xGMI links or Xe Links that are up"),
            _gauge("links_down", "links that are down"),
            _count("link_errors", "replays, recoveries and CRC errors on them"),
            _count("link_transmit_bytes", "sent over them"),
            _count("link_receive_bytes", "received over them"),
        ),
    ),
    Measurement(
        "sluice_job",
        "node",
        "A job on one of its GPUs, shares and MIG instances included.",
        {
            "node": "the node",
            "gpu": "UUID of the GPU or MIG instance",
            **_WHOSE,
            "partition": "the job's",
            "slot": "0 and up: which of the jobs on this GPU",
        },
        (
            _gauge(
                "utilisation_ratio",
                "share of the GPU's time that was the job's, since the sample before; left out "
                "where the vendor does not report it for a shared GPU",
            ),
            _gauge("memory_used_bytes", "memory of its processes with their driver contexts"),
            _gauge("memory_limit_bytes", "limit in force; left out for whole GPUs without a cap"),
            _gauge("share_ratio", "part of the GPU, by memory, that it was given"),
            _count("energy_joules", "its part of the GPU's energy since it started"),
            _count("gpu_seconds", "time that was measured since it started"),
            _count("busy_seconds", "of that, the GPU's time that was the job's"),
            _gauge("processes", "processes on the GPU"),
        ),
        ("job",),
    ),
    Measurement(
        "sluice_nic",
        "node",
        "A network interface, for all its users. What its driver does not count is left out.",
        {"node": "its node", "nic": "its name", "kind": "ib (InfiniBand), roce or ethernet"},
        (
            _gauge("present", "0 where the adapter was there and is not any more, else 1"),
            _gauge("up", "1 where the links of all its ports are up, else 0"),
            _gauge(
                "full_counters", "counters of its ports that are at their maximum, until they are reset (InfiniBand)"
            ),
            *_NIC_COUNTS,
        ),
    ),
    Measurement(
        "sluice_jobnic",
        "node",
        "A job with GPUs on an RDMA interface that it can open. Counted while no other job could use it.",
        {
            "node": "the node",
            "nic": "the interface's name",
            **_WHOSE,
            "partition": "the job's",
            "slot": "0 and up: which of the jobs on this interface",
        },
        (_gauge("shared", "1 where another job could use it, for some of the job's time, else 0"), *_NIC_COUNTS),
        ("job",),
    ),
    Measurement(
        "sluice_process",
        "node",
        "A process on a GPU. Left out with `job_ids: none`.",
        {
            "node": "the node",
            "gpu": "UUID of the GPU or MIG instance",
            **_WHOSE,
            "slot": "0 and up: which of the processes on this GPU",
        },
        (
            _gauge("memory_used_bytes", "its memory with its driver context"),
            _gauge("utilisation_ratio", "share of the GPU's time that was its, where the vendor reports it"),
        ),
        ("job", "step", "pid"),
    ),
    Measurement(
        "sluice_agent",
        "node",
        "The node agent itself.",
        {"node": "the node", "vendor": "whose driver"},
        (
            _count("samples", "samples that were taken"),
            _count("samples_skipped", "samples that were due while the driver had not answered the one before"),
            _gauge("driver_up", "1 while the vendor's driver answers"),
            _gauge("sample_seconds", "time that the last sample took"),
        ),
    ),
    Measurement(
        "sluice_spool",
        "both",
        "Samples on their way to the database.",
        {"node": "the node or controller"},
        (
            _gauge("bytes", "on disk, waiting or kept to be sent again"),
            _count("dropped_bytes", "dropped as the spool was full, since the agent started"),
            _count("damaged_bytes", "skipped as the disk returned other data"),
        ),
    ),
    Measurement(
        "sluice_queue",
        "controller",
        "Jobs by partition and tenant.",
        {"cluster": "ClusterName", "partition": "the partition", "account": "the tenant's account"},
        (
            _gauge("pending_jobs", "waiting; an array's waiting tasks count each"),
            _gauge("running_jobs", "running"),
            _gauge("pending_gpus", "GPUs that the waiting jobs ask for, shares as parts"),
            _gauge("running_gpus", "GPUs that the running jobs have, shares as parts"),
            _gauge("oldest_wait_seconds", "the longest time that an eligible job has been waiting"),
        ),
    ),
    Measurement(
        "sluice_jobs",
        "controller",
        "Jobs that started or ended since the daemon began, by tenant.",
        {"cluster": "ClusterName", "account": "the tenant's account"},
        (
            _count("started", "jobs that started"),
            _count("ended", "jobs that ended in any way"),
            _count("failed", "of those, by failure, node failure, timeout or lack of memory"),
            _count("wait_seconds", "waits of those that started, from eligible to start, added up"),
            _count("submit_to_start_seconds", "the same from submission to start"),
            _count("decided", "jobs and arrays that Sluice decided upon first; left out without recorded decisions"),
            _count("submit_to_decision_seconds", "from submission to that decision, added up; up to 1 s more a job"),
        ),
    ),
    Measurement(
        "sluice_class",
        "controller",
        "GPUs by class: by type as in GRES.",
        {"cluster": "ClusterName", "class": "the type of GPU, e.g. h100"},
        (
            _gauge("gpus", "all GPUs of the class"),
            _gauge("available_gpus", "on nodes that new jobs can use"),
            _gauge("allocated_gpus", "that jobs have, shares as parts"),
            _gauge("allocation_ratio", "allocated of all"),
            _gauge(
                "utilisation_ratio",
                "mean of its reported GPUs (alerts.readings); without nodes of several types",
            ),
            _gauge(
                "fragmentation_ratio",
                "of the free GPUs on usable nodes, those on nodes that are partly allocated: they "
                "take no job that wants a whole node",
            ),
            _gauge("largest_free_gpus", "the most free GPUs on one node"),
            _gauge("nodes_unavailable", "nodes that are down, drained or do not answer"),
        ),
    ),
    Measurement(
        "sluice_tenant",
        "controller",
        "A tenant's use against its limits, its sub-tenants included.",
        {"cluster": "ClusterName", "account": "the tenant's account"},
        (
            _gauge("gpus", "in use"),
            _gauge("gpus_limit", "GPUs that it may use at once, where there is a limit"),
            _gauge("gpu_hours", "used in this period"),
            _gauge("gpu_hours_limit", "GPU-hours that it may use in a period, where there is a limit"),
            _gauge("jobs", "running"),
        ),
    ),
    Measurement(
        "sluice_pool",
        "controller",
        "Nodes that come and go, as fleetd of this controller says.",
        {"cluster": "ClusterName", "pool": "the pool in the policy"},
        (
            _gauge("on_nodes", "that have registered"),
            _gauge("launching_nodes", "asked for, or launched and not registered yet"),
            _gauge("ending_nodes", "whose machines are being ended"),
            _gauge("held_nodes", "that Slurm wants and that cannot be had"),
            _gauge("most_nodes", "all that the policy names"),
            _gauge("cost_hour", "price of an hour of its machines, in the site's currency"),
            _gauge("boot_seconds", "usual time from a launch until slurmd registers, learnt"),
            _gauge("oldest_wait_seconds", "the longest time that Slurm has waited for a node"),
            _gauge("without_capacity_seconds", "time for which it has had no capacity or quota for what Slurm wants"),
            _count("launches", "machines that the provider has made"),
        ),
    ),
    Measurement(
        "sluice_power",
        "controller",
        "Budgets of watts, as the leading controller keeps them.",
        {"cluster": "ClusterName", "budget": "the budget in the policy"},
        (
            _gauge("budget_watts", "that may be drawn now"),
            _gauge("measured_watts", "that its GPUs draw"),
            _gauge("bound_watts", "that its GPUs can draw at most by the caps in force"),
            _gauge("short_watts", "by which the lowest caps of its running jobs exceed it"),
            _gauge("capped_gpus", "with a cap below what they want"),
            _gauge("silent_gpus", "of nodes that do not report"),
            _gauge("lowered", "1 while it is lowered by hand or by a signal"),
        ),
    ),
    Measurement(
        "sluice_preflights",
        "controller",
        "Preflights of jobs of several nodes, since this controller's daemon started.",
        {"cluster": "ClusterName", "verdict": "passed, found (a part is at fault) or undecided"},
        (_count("seen", "how many"),),
    ),
    Measurement(
        "sluice_poolfailures",
        "controller",
        "Launches that came to nothing and machines that were lost.",
        {
            "cluster": "ClusterName",
            "pool": "the pool",
            "kind": "why: a difference of docs/elastic.md, e.g. no_capacity",
        },
        (_count("seen", "how often"),),
    ),
    Measurement(
        "sluice_scheduler",
        "controller",
        "slurmctld and Sluice's plugins in it.",
        {"cluster": "ClusterName"},
        (
            _gauge("main_cycle_seconds", "mean time of slurmctld's main cycles"),
            _gauge("backfill_cycle_seconds", "time of the last cycle of stock backfill"),
            _gauge("server_threads", "of slurmctld, busy with requests"),
            _gauge("agent_queue", "messages that slurmctld has to send"),
            _gauge("dbd_queue", "messages for slurmdbd that wait"),
            _gauge("submit_seconds", "mean time of job_submit/sluice for a submission"),
            _count("submissions", "submissions that it checked"),
            _gauge("decision_wait_median_seconds", "from submission to the first decision, of the latest 1000 jobs"),
            _gauge("decision_wait_p95_seconds", "the 95th percentile of that; left out without recorded decisions"),
            _gauge("hook_median_seconds", "at most, of half of the placement hook's decisions since slurmctld started"),
            _gauge("hook_p95_seconds", "at most, of 95 percent of them; left out where a millisecond is not enough"),
            _count("hook_calls", "calls of the placement hook"),
            _gauge("plan_seconds", "time of the last plan (backfill) of Sluice"),
            _gauge("plan_jobs", "jobs in it"),
            _count("plans", "plans"),
            _gauge("order_seconds", "time of the last computation of the order"),
            _gauge("decisions_dropped", "decisions that could not be recorded"),
            _gauge("records_dropped", "the same, by its name until 0.1.0"),
            _gauge("controllers_up", "controllers that answer"),
        ),
    ),
    Measurement(
        "sluice_events",
        "controller",
        "Events on the controllers: takeovers, drained nodes, health.",
        {"cluster": "ClusterName", "kind": "the kind of event"},
        (_count("seen", "events since the daemon began"),),
    ),
)
BY_NAME = {measurement.name: measurement for measurement in MEASUREMENTS}


def unknown(measurement: str, fields: Iterable[str]) -> list[str]:
    """Fields that the table does not have; for tests."""
    known = BY_NAME[measurement]
    return [name for name in fields if name not in known.by_field and name not in known.identity]
