"""Command line of the benchmarks; exit 0 when every must holds, 1 when one does not, 2 when it could not run."""

from __future__ import annotations

import json
import operator
import os
import platform
import shlex
import sys
import traceback
from importlib import import_module
from typing import Any

import click

from benchmarks import Result
from sluice.base.errors import SluiceError

# name -> (module, one line)
BENCHMARKS: dict[str, tuple[str, str]] = {
    "agent": ("benchmarks.agent", "the node agent's programs, and its watchdog's share of a core"),
    "restart": ("benchmarks.restart", "how long jobs go unwatched when the node agent is killed"),
    "hostile": ("benchmarks.hostile", "what a neighbour of a hostile tenant notices, attack by attack"),
    "core-latency": ("benchmarks.core_latency", "place, commit and release in the core, at scale"),
    "openb": ("benchmarks.openb", "GPU allocation on Alibaba's openb lists, compared with published policies"),
    "failover": ("benchmarks.failover", "SIGKILL of the leading controller under load, of stock Slurm and Sluice"),
    "journal": ("benchmarks.journal", "a submission with and without the failover journal"),
    "fabric": ("benchmarks.fabric", "discovering a fabric of 1,000 nodes, and gangs with what was discovered"),
    "preflight": ("benchmarks.preflight", "preflights of jobs on a simulated fabric: faults named, good nodes kept"),
    "gang": ("benchmarks.gang", "placing a gang of 64 nodes x 8 GPUs"),
    "muri": ("benchmarks.muri", "job completion time and makespan on the Muri traces"),
    "backfill": ("benchmarks.backfill", "a full conservative pass over 10,000 pending jobs"),
    "limiter": ("benchmarks.limiter", "the preloaded GPU memory limiter, compared with the bare driver"),
    "profile": ("benchmarks.profile", "what kernel profiles cost a program that launches"),
    "checkpoint": ("benchmarks.checkpoint", "work lost to failures and saves, compared with Daly's optimum"),
    "job-overhead": ("benchmarks.job_overhead", "a whole job under Sluice, compared with a bare process"),
    "ledger": ("benchmarks.ledger", "allocate and free in the shared GPU memory ledger"),
    "gate": ("benchmarks.gate", "one request through the gate of model services, alone and among processes"),
    "utilisation": ("benchmarks.utilisation", "GPU allocation at full offered load with departures"),
    "simulate": ("benchmarks.simulate", "replay of 100,000 jobs on 1,213 nodes"),
    "submit-hook": ("benchmarks.submit_hook", "job_submit/sluice for one submission, in isolation"),
    "submit-latency": ("benchmarks.submit_latency", "a submission to real daemons, with and without the plugins"),
    "site-factor": ("benchmarks.site_factor", "the order of 10,000 pending jobs, under slurmctld's locks and without"),
    "probe": ("benchmarks.probe", "sluice probe as a whole process"),
    "slurm-client": ("benchmarks.slurm_client", "listings of jobs and nodes through each backend of sluice/slurm"),
    "group": ("benchmarks.group", "grouping 100,000 GPUs"),
    "slurm-throughput": (
        "benchmarks.slurm_throughput",
        "time in select_p_job_test, stock Slurm and the placement hook",
    ),
    "slurm-gang": ("benchmarks.slurm_gang", "gangs among small jobs on real daemons"),
    "slurm-mixed": ("benchmarks.slurm_mixed", "waits where half of the jobs want no GPU, compared with stock Slurm"),
    "slurm-fragmentation": ("benchmarks.slurm_fragmentation", "GPU allocation and waits, compared with stock Slurm"),
    "slurm-backfill-parameters": (
        "benchmarks.slurm_backfill_parameters",
        "SchedulerParameters with the planner: what apply writes, Slurm's defaults",
    ),
    "policy-apply": ("benchmarks.policy_apply", "plan and apply of 1,000 tenants with 10,000 users"),
    "report": ("benchmarks.report", "the tenant report of a month, with many jobs in slurmdbd"),
    "power": ("benchmarks.power", "budgets of watts on public histories: kept, met when lowered, throughput"),
    "elastic-trace": ("benchmarks.elastic_trace", "cost and waits of elastic pools on a public history"),
    "web": ("benchmarks.web", "the REST API and its page with 100,000 jobs in slurmctld"),
    "serve": ("benchmarks.serve", "the gateway of model services, its limits, and what survives kills"),
    "elastic": ("benchmarks.elastic", "pools of nodes: from a registration to the job, and around a stock-out"),
    "serve-batching": ("benchmarks.serve_batching", "embeddings put together, compared with calls of one input"),
    "cluster-up": ("benchmarks.cluster_up", "time to boot a development cluster"),
}

_OPERATORS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq, "<": operator.lt, ">": operator.gt}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = ""
    try:
        with open("/proc/cpuinfo") as file:  # noqa: PTH123
            model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        pass
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def run_program(program: click.Command, module: str) -> None:
    """Run it as ``python -m MODULE``. Exit code 2 is an error or a defect; 1 says that a bound does not hold."""
    try:
        program(prog_name=f"python -m {module}", standalone_mode=False)
    except click.ClickException as error:
        error.show()
    except SluiceError as error:
        click.echo(f"benchmarks: {error}", err=True)
    except Exception:
        traceback.print_exc()
    else:
        return
    sys.exit(2)


def measure(name: str, options: dict[str, Any], command: list[str]) -> tuple[dict[str, Any], bool]:
    """Run one benchmark; its JSON object and whether every must holds."""
    module = import_module(BENCHMARKS[name][0])
    result: Result = module.run(**options)
    must: dict[str, tuple[str, float]] = module.MUST | result.must
    held = all(_OPERATORS[sign](result.figures[figure], bound) for figure, (sign, bound) in must.items())
    document = {
        "benchmark": name,
        "figures": result.figures,
        "spread": result.spread,
        "must": {figure: list(bound) for figure, bound in must.items()},
        "peer": result.peer,
        "machine": machine(),
        "versions": result.versions,
        "command": shlex.join(["python", "-m", "benchmarks", *command]),
    }
    return document, held


def print_table(document: dict[str, Any]) -> None:
    """Print figure, must and peer next to each other."""
    click.echo(f"\n{document['benchmark']}")
    for figure, value in document["figures"].items():
        sign, bound = document["must"].get(figure, ("", None))
        verdict = "" if bound is None else ("ok" if _OPERATORS[sign](value, bound) else "MISSED")
        goal = "" if bound is None else f"{sign} {bound:g}"
        peer = document["peer"].get(figure)
        click.echo(f"  {figure:<40} {value:>14.6g}  {goal:<12} {'' if peer is None else f'{peer:.6g}':>14}  {verdict}")


class BenchmarkGroup(click.Group):
    """Benchmarks by name, imported only when run."""

    def list_commands(self, context: click.Context) -> list[str]:
        """All names."""
        return list(BENCHMARKS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """A command with the benchmark's own options and --json."""
        if name not in BENCHMARKS:
            return None
        module = import_module(BENCHMARKS[name][0])

        def callback(as_json: bool, **options: Any) -> None:
            document, held = measure(name, options, sys.argv[1:])
            if as_json:
                click.echo(json.dumps(document))
            else:
                print_table(document)
            sys.exit(0 if held else 1)

        flag = click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object.")
        return click.Command(name, params=[flag, *module.OPTIONS], callback=callback, help=module.__doc__)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Help lines from the table of benchmarks."""
        with formatter.section("Benchmarks"):
            formatter.write_dl([(name, text) for name, (_, text) in BENCHMARKS.items()])


@click.command(cls=BenchmarkGroup, invoke_without_command=True)
@click.option("--list", "list_names", is_flag=True, help="Name every benchmark.")
@click.pass_context
def benchmarks(context: click.Context, list_names: bool) -> None:
    """Measure Sluice and what it is compared with."""
    if list_names:
        for name, (_, text) in BENCHMARKS.items():
            click.echo(f"{name}\t{text}")
    elif context.invoked_subcommand is None:
        click.echo(context.get_help())


if __name__ == "__main__":
    run_program(benchmarks, "benchmarks")
