"""`sluice probe`: the GPUs of this node."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sluice.base.sizes import format_mib
from sluice.base.text import one_line
from sluice.cli.tables import Column, TableOptions, table_options

if TYPE_CHECKING:
    from gres_probe.inventory import Gpu, Inventory, Partition

DEFAULT_TIMEOUT = 10.0  # seconds; gres_probe.probe's own
DROP_FOLDER = "/var/lib/sluice/inventory"


@dataclass(frozen=True, slots=True)
class Device:
    """A row: a GPU, or one partition of it."""

    node: str
    gpu: Gpu
    partition: Partition | None = None

    @property
    def index(self) -> str:
        """The vendor's ordinal, with the partition's after a colon."""
        return f"{self.gpu.index}:{self.partition.index}" if self.partition else str(self.gpu.index)


def _of_gpu(
    take: Callable[[Gpu], Any], of_partition: Callable[[Partition], Any] | None = None
) -> Callable[[Device], Any]:
    """A column's value: the GPU's, and for a partition its own where it has one."""

    def value(device: Device) -> Any:
        if device.partition is not None and of_partition is not None:
            return of_partition(device.partition)
        return take(device.gpu)

    return value


def _files(value: str | list[str]) -> str:
    """The first file and how many more there are; -P gives all."""
    if isinstance(value, str):
        return value
    return f"{value[0]} +{len(value) - 1}" if len(value) > 1 else "".join(value)


COLUMNS: list[Column[Device]] = [
    Column("node", lambda device: device.node),
    Column("index", lambda device: device.index, right=True),
    Column("vendor", _of_gpu(lambda gpu: gpu.vendor)),
    Column("model", _of_gpu(lambda gpu: gpu.model + " (no instances)" * gpu.partitioned, lambda part: part.profile)),
    Column("memory", _of_gpu(lambda gpu: gpu.memory_total_mib, lambda part: part.memory_mib), format_mib, right=True),
    Column("usable", _of_gpu(lambda gpu: gpu.memory_usable_mib, lambda part: part.memory_mib), format_mib, right=True),
    Column("used", _of_gpu(lambda gpu: gpu.memory_used_mib, lambda part: None), format_mib, right=True),
    Column("util", _of_gpu(lambda gpu: gpu.utilisation_percent, lambda part: None), lambda v: f"{v}%", right=True),
    Column("temp", _of_gpu(lambda gpu: gpu.temperature_c, lambda part: None), lambda v: f"{v}C", right=True),
    Column("slowdown", _of_gpu(lambda gpu: gpu.temperature_slowdown_c), lambda v: f"{v}C", right=True),
    Column("shutdown", _of_gpu(lambda gpu: gpu.temperature_shutdown_c), lambda v: f"{v}C", right=True),
    Column("power", _of_gpu(lambda gpu: gpu.power_limit_w), lambda v: f"{v}W", right=True),
    Column("powermax", _of_gpu(lambda gpu: gpu.power_limit_max_w), lambda v: f"{v}W", right=True),
    Column("numa", _of_gpu(lambda gpu: gpu.numa_node), right=True),
    Column("cores", _of_gpu(lambda gpu: gpu.cores)),
    Column("pci", _of_gpu(lambda gpu: gpu.pci_address)),
    Column("device", _of_gpu(lambda gpu: gpu.device_file, lambda part: part.device_files), _files),
    Column("minor", _of_gpu(lambda gpu: gpu.minor), right=True),
    Column("uuid", _of_gpu(lambda gpu: gpu.uuid, lambda part: part.uuid)),
    Column("capability", _of_gpu(lambda gpu: gpu.capability)),
    Column("driver", _of_gpu(lambda gpu: gpu.driver_version)),
    Column("firmware", _of_gpu(lambda gpu: gpu.firmware_version)),
    Column("ecc", _of_gpu(lambda gpu: gpu.ecc.enabled), lambda v: "on" if v else "off"),
    Column("corrected", _of_gpu(lambda gpu: gpu.ecc.corrected), right=True),
    Column("uncorrected", _of_gpu(lambda gpu: gpu.ecc.uncorrected), right=True),
    Column("health", _of_gpu(lambda gpu: str(gpu.health))),
    Column("reasons", _of_gpu(lambda gpu: "; ".join(gpu.health_reasons))),
    Column("nics", _of_gpu(lambda gpu: ",".join(gpu.nics))),
]
DEFAULT_COLUMNS = ("index", "vendor", "model", "memory", "used", "util", "temp", "numa", "cores", "device", "health")


def devices(inventory: Inventory) -> list[Device]:
    """The rows of one node: what Slurm can give to a job, i.e. partitions in the place of a GPU that has them."""
    rows = []
    for gpu in inventory.gpus:
        if gpu.partitions:
            rows += [Device(inventory.node, gpu, partition) for partition in gpu.partitions]
        else:
            rows.append(Device(inventory.node, gpu))
    return rows


def tell_problems(inventories: Iterable[Inventory]) -> bool:
    """Print what could not be read on standard error; True when there was anything."""
    reported = False
    for inventory in inventories:
        for problem in inventory.problems:
            remedy = f"; {problem.remedy}" if problem.remedy else ""
            line = f"sluice: {inventory.node}: {problem.vendor}: {problem.what}{remedy}"
            click.echo(one_line(line, limit=None), err=True)
            reported = True
    return reported


def root_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Where to look, for containers and tests, and how long."""
    for option in (
        click.option("--dev-root", type=click.Path(path_type=Path), metavar="DIR", help="In the place of /dev."),
        click.option(
            "--proc-root", type=click.Path(path_type=Path), metavar="DIR", default=Path("/proc"),
            help="In the place of /proc.",
        ),
        click.option(
            "--sys-root", type=click.Path(path_type=Path), metavar="DIR", default=Path("/sys"),
            help="In the place of /sys; device files are then looked for only below --dev-root.",
        ),
        click.option(
            "--timeout", type=click.FloatRange(min=0.1), default=DEFAULT_TIMEOUT, show_default=True, metavar="SECONDS",
            help="Give a vendor's driver up after this long.",
        ),
        click.option("--vendor", "vendors", multiple=True, metavar="NAME", help="Only this vendor; may be repeated."),
    ):  # fmt: skip
        command = option(command)
    return command


def probe_here(
    vendors: tuple[str, ...], timeout: float, sys_root: Path, proc_root: Path, dev_root: Path | None, node: str | None
) -> Inventory:
    """Probe this node as the options of `root_options` say."""
    from gres_probe.probe import probe_node

    if dev_root is None and sys_root == Path("/sys"):
        dev_root = Path("/dev")
    return probe_node(
        node=node,
        vendors=vendors or None,
        timeout=timeout,
        sys_root=sys_root,
        proc_root=proc_root,
        dev_root=dev_root,
    )


@click.command("probe")
@click.option("--json", "as_json", is_flag=True, help="The whole inventory as JSON.")
@table_options
@click.option("--node", metavar="NAME", help="The node's name in Slurm; default: SLURMD_NODENAME or the host name.")
@click.option(
    "--drop",
    type=click.Path(path_type=Path),
    is_flag=False,
    flag_value=Path(DROP_FOLDER),
    metavar="DIR",
    help=f"Write DIR/NODE.json instead of printing; without DIR to {DROP_FOLDER}.",
)
@root_options
@click.pass_context
def command(
    context: click.Context,
    as_json: bool,
    table: TableOptions,
    node: str | None,
    drop: Path | None,
    vendors: tuple[str, ...],
    timeout: float,
    sys_root: Path,
    proc_root: Path,
    dev_root: Path | None,
) -> None:
    """The GPUs of this node, of all vendors; exit 1 when one of them could not be read."""
    inventory = probe_here(vendors, timeout, sys_root, proc_root, dev_root, node)
    if drop is not None:
        from gres_probe.collect import write_inventory

        click.echo(f"wrote {write_inventory(drop, inventory)}", err=True)
    elif as_json:
        click.echo(inventory.to_json())
    else:
        rows = devices(inventory)
        if not rows and not table.asked:
            click.echo(f"{inventory.node}: no GPUs", err=True)
        else:
            table.print(COLUMNS, rows, default=DEFAULT_COLUMNS)
    if tell_problems([inventory]):
        context.exit(1)
