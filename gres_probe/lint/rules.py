"""The rules of `sluice lint`, and what it found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from gres_probe.inventory import Inventory
from sluice.base.slurm_version import OLDEST, SlurmVersion
from sluice.slurm.slurm_conf import ConfigFile, Place, SlurmConf


class Severity(StrEnum):
    """The consequence of a mistake."""

    FATAL = "fatal"  # a daemon refuses to start, or ends at a reconfiguration
    ERROR = "error"  # a node is not given jobs, or GRES are missing
    WARNING = "warning"  # it works, though perhaps not as meant


class Source(StrEnum):
    """Which program reports the mistake."""

    SLURMD = "slurmd"
    SLURMCTLD = "slurmctld"
    SLUICE = "sluice"  # Slurm reports nothing


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of mistake. `says` is a regular expression for the daemon's own message, empty for Source.SLUICE."""

    code: str
    title: str
    severity: Severity
    source: Source
    remedy: str
    says: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake at one place; `nodes` are those that it concerns (empty: the cluster as a whole)."""

    rule: Rule
    what: str
    place: Place
    nodes: tuple[str, ...] = ()


@dataclass(slots=True)
class Site:
    """All that lint reads."""

    slurm: SlurmConf
    gres: ConfigFile | None = None  # the gres.conf that all nodes share
    node_gres: Mapping[str, ConfigFile] = field(
        default_factory=dict
    )  # a node's own gres.conf goes before the shared one
    inventories: Mapping[str, Inventory] = field(default_factory=dict)
    local_nodes: frozenset[str] = frozenset()  # nodes whose device files are those of this machine
    version: SlurmVersion = OLDEST
    topology: Path | None = None  # topology.yaml
    topology_conf: ConfigFile | None = None
    nics: Path | None = None  # nics.sluice.conf, also where it is missing

    def gres_of(self, node: str) -> ConfigFile | None:
        """The gres.conf that this node reads."""
        return self.node_gres.get(node, self.gres)


def _rules(*rules: Rule) -> dict[str, Rule]:
    return {rule.code: rule for rule in rules}


_FATAL, _ERROR, _WARNING = Severity.FATAL, Severity.ERROR, Severity.WARNING
_SLURMD, _SLURMCTLD, _SLUICE = Source.SLURMD, Source.SLURMCTLD, Source.SLUICE

RULES = _rules(
    # ---- the files
    Rule("SL001", "not key=value", _FATAL, _SLURMD, "correct the line; quote values with spaces",
         "Parse error in file|error opening/reading"),
    Rule("SL002", "unknown key", _FATAL, _SLURMD, "correct or remove the key",
         "unrecognized key|Parse error in file|error opening/reading"),
    Rule("SL003", "included file cannot be read", _FATAL, _SLURMD, "create the file or remove the Include line",
         r"cannot stat file|unable to read|Include.* failed|error opening/reading"),
    Rule("SL004", "key twice on a line", _WARNING, _SLURMD, "keep one; the last one counts",
         "specified more than once"),
    # ---- topology.yaml and topology.conf
    Rule("SL005", "topology.yaml cannot be read", _FATAL, _SLURMCTLD,
         "write a list of topologies, each with its name and one of block, flat, ring, torus3d and tree",
         "Failed to load topology.yaml|Failed to initialize topology plugin"),
    Rule("SL006", "node of the topology is not in slurm.conf", _WARNING, _SLURMCTLD, "correct or remove it",
         "Invalid hostnames in .* configuration"),
    Rule("SL007", "topology of a partition is not in topology.yaml", _FATAL, _SLURMCTLD,
         "add it to topology.yaml, or correct Topology", "Invalid partition topology"),
    Rule("SL008", "topology.conf has no effect", _WARNING, _SLUICE, "remove it, or topology.yaml, which comes first"),
    Rule("SL070", "topology.conf cannot be read", _FATAL, _SLURMCTLD,
         "write lines SwitchName= with Nodes or Switches, or BlockName= with Nodes and BlockSizes=",
         "unrecognized key|Parse error in file|something wrong with opening/reading conf file|hostlist_create"),
    Rule("SL071", "switch or block is defined twice", _FATAL, _SLURMCTLD, "give each a name of its own",
         "has already been defined"),
    Rule("SL072", "switch has both nodes and switches, or neither", _FATAL, _SLURMCTLD, "give it one of the two",
         "has (n?either|both) child switches (nor|and) nodes|lacks children"),
    Rule("SL073", "switch below it does not exist", _FATAL, _SLURMCTLD, "add its line, or correct the name",
         "has invalid child"),
    Rule("SL074", "switches are a loop", _FATAL, _SLURMCTLD, "a switch cannot be above itself: see sluice fabric check",
         "is not a tree|has invalid child"),
    Rule("SL075", "node is below two leaf switches or blocks", _WARNING, _SLURMCTLD,
         "name it once; sluice fabric discover makes one of switches that share nodes",
         "Multiple leaf switches contain nodes"),
    Rule("SL076", "node is on no switch", _WARNING, _SLURMCTLD, "add it: jobs with several nodes do not get it",
         "lack access to"),
    Rule("SL077", "no switch is above all nodes", _WARNING, _SLUICE, "add one, unless jobs must not span them"),
    Rule("SL078", "block has fewer nodes than the first of BlockSizes", _WARNING, _SLUICE,
         "lower it: segments are planned by whole blocks of that size"),
    # ---- slurm.conf
    Rule("SL010", "shared GRES without gpu in GresTypes", _FATAL, _SLURMD, "add gpu to GresTypes",
         "requires that gres/gpu also be configured"),
    Rule("SL011", "GresTypes repeats a name", _WARNING, _SLURMD, "name it once", "Duplicate plugin .* ignored"),
    Rule("SL012", "Gres of a node is not in GresTypes", _ERROR, _SLURMCTLD, "add it to GresTypes in slurm.conf",
         "Invalid GRES configured on node"),
    Rule("SL013", "count in Gres cannot be read", _ERROR, _SLURMD, "write gpu:TYPE:COUNT", "Bad GRES configuration"),
    Rule("SL014", "Gres mixes typed and untyped counts", _FATAL, _SLURMD, "give every gpu of the node a type, or none",
         "GRES in slurm.conf have a type while others do not"),
    Rule("SL015", "shared GRES need select/cons_tres", _FATAL, _SLURMCTLD, "set SelectType=select/cons_tres",
         "Use of shared gres requires"),
    Rule("SL016", "node has shards but no gpu", _FATAL, _SLURMD, "add the node's gpu to Gres",
         "shared gres of .* but no gres that is sharing|SHARED specified without any SHARING|failed to merge SHARED"),
    Rule("SL017", "node is defined twice", _FATAL, _SLURMD, "keep one NodeName line for the node",
         "Duplicated NodeHostName|Duplicated NodeName"),
    Rule("SL018", "hostlist cannot be read", _ERROR, _SLUICE, "write it as node[01-04,07]"),
    Rule("SL019", "GresTypes is not set", _ERROR, _SLUICE, "set GresTypes=gpu in slurm.conf"),
    # ---- gres.conf, line by line
    Rule("SL020", "line without Name", _ERROR, _SLURMD, "add Name=gpu", "Invalid GRES data, no type name"),
    Rule("SL021", "Name is not in GresTypes", _ERROR, _SLURMD, "add it to GresTypes in slurm.conf, or remove the line",
         "Ignoring gres.conf record, invalid name"),
    Rule("SL022", "AutoDetect value is unknown", _ERROR, _SLURMD, "use nvml, rsmi, oneapi or off",
         "unknown autodetect flag"),
    Rule("SL023", "AutoDetect of one node contradicts itself", _FATAL, _SLURMD, "keep one AutoDetect for the node",
         "duplicate node-local AutoDetect"),
    Rule("SL024", "AutoDetect on a line without NodeName", _ERROR, _SLURMD, "put AutoDetect on a line of its own",
         "In-line AutoDetect requires NodeName"),
    Rule("SL025", "AutoDetect checks hand-written lines", _WARNING, _SLUICE,
         "add AutoDetect=off for the node, or leave Cores and Links to AutoDetect"),
    Rule("SL026", "Cores are beyond the node's cores", _ERROR, _SLURMD,
         "gres.conf counts cores, not threads: use 0 to sockets x cores - 1",
         r"Invalid GRES data for .*(Cores|CPUs)=|xcpuinfo_abs_to_mac: failed|invalid GRES core specification"),
    Rule("SL027", "Cores cannot be read", _ERROR, _SLUICE, "write a list as 0-15,32-47"),
    Rule("SL028", "device file is missing", _FATAL, _SLURMD, "correct File, or load the driver before slurmd starts",
         "can't stat gres.conf file|Waiting for gres.conf file"),
    Rule("SL029", "File is not a device", _ERROR, _SLURMD, "name the GPU's device file",
         "is not a valid character or block device"),
    Rule("SL030", "File and MultipleFiles on one line", _FATAL, _SLURMD, "keep one of them", "mutually exclusive"),
    Rule("SL031", "MultipleFiles with one file", _FATAL, _SLURMD, "use File", "does not contain multiple files"),
    Rule("SL032", "environment flags differ between lines", _FATAL, _SLURMD,
         "put the same Flags on every line of the GRES on the node", "does not match env flags"),
    Rule("SL033", "no_gpu_env with other environment flags", _FATAL, _SLURMD, "keep one of them",
         'contains "no_gpu_env"'),
    Rule("SL034", "flag is unknown", _WARNING, _SLUICE, "correct or remove it; Slurm ignores it"),
    Rule("SL035", "Links cannot be read", _ERROR, _SLURMD, "write one number per gpu of the node, -1 for itself",
         "gres_links_validate|Ignoring invalid Links"),
    Rule("SL036", "Count cannot be read", _FATAL, _SLURMD, "write a whole number, with K, M or G if need be",
         "invalid count"),
    Rule("SL037", "Count differs from the number of files", _FATAL, _SLURMD, "remove Count, or name Count files",
         "count does not match File value"),
    Rule("SL038", "hostlist cannot be read", _ERROR, _SLUICE, "write it as node[01-04,07]; Slurm skips the line"),
    Rule("SL039", "File cannot be read", _FATAL, _SLURMD, "write it as /dev/nvidia[0-3]",
         "can't parse File=|can't stat gres.conf file|Waiting for gres.conf file"),
    # ---- gres.conf, the lines of a node together, against its Gres
    Rule("SL040", "some lines have File, others not", _FATAL, _SLURMD, "give every line of the GRES a File, or none",
         'some records have "File" specification'),
    Rule("SL041", "some lines have Type, others not", _FATAL, _SLURMD, "give every line of the GRES a Type, or none",
         'some records have "Type=" specification'),
    Rule("SL042", "repeated line without File and Type", _FATAL, _SLURMD, "join the lines, with one Count",
         "duplicate records for"),
    Rule("SL043", "device file named twice", _FATAL, _SLURMD, "name each file once",
         "duplicate device file name|failed to load configuration"),
    Rule("SL044", "more in gres.conf than in slurm.conf", _WARNING, _SLURMD, "raise the count in the node's Gres",
         "more configured than expected in slurm.conf"),
    Rule("SL045", "gpu without File", _ERROR, _SLURMD, "name the device files of the node's gpus in gres.conf",
         'SHARING configuration lacks "File"|Ignoring file-less GPU'),
    Rule("SL046", "fewer on the node than slurm.conf says", _ERROR, _SLURMCTLD, "lower the count in Gres, or add lines",
         "count reported lower than configured|count too low"),
    Rule("SL047", "shards for a file that is not the node's gpu", _ERROR, _SLURMD, "name the file of one of its gpus",
         "Discarding gres/'shared' configuration"),
    Rule("SL048", "Count of shards does not divide by its files", _WARNING, _SLUICE,
         "use a multiple of the number of files; Slurm rounds down"),
    Rule("SL049", "MultipleFiles with shards", _ERROR, _SLUICE,
         "use File with the device's own file: with shard or mps, this Slurm takes every file for a gpu"),
    Rule("SL050", "Links of another length than the node's gpus", _ERROR, _SLURMCTLD, "write one number per gpu",
         "Invalid GRES Links value"),
    Rule("SL051", "only some lines have Cores", _ERROR, _SLURMCTLD, "give every line of the GRES Cores, or none",
         "has CPUs configured for only some"),
    Rule("SL052", "node of gres.conf is not in slurm.conf", _WARNING, _SLUICE, "correct NodeName or remove the line"),
    Rule("SL053", "GRES has File on some nodes only", _ERROR, _SLURMCTLD, "give it a File on every node, or on none",
         'lacks "File=" parameter'),
    Rule("SL054", "shards without a type: a backup controller that takes over drains the node", _WARNING, _SLUICE,
         "give shards their GPUs' Type in slurm.conf and gres.conf, as sluice gres write does; if a node has several, "
         "after each takeover: scontrol reconfigure, and resume the node"),
    Rule("SL055", "shards of several lines, some without File", _FATAL, _SLURMD,
         "give each line a File, and where slurm.conf has a Type, that Type", "multiple configurations with"),
    Rule("SL056", "shards of some nodes of a partition have a type, of others none", _WARNING, _SLUICE,
         "give all of them a type, or none: of a job on both Slurm counts only what has no type"),
    # ---- the hardware
    Rule("SL060", "another number of GPUs than the inventory", _ERROR, _SLUICE, "write again with: sluice gres write"),
    Rule("SL061", "device file is not in the inventory", _ERROR, _SLUICE, "write again with: sluice gres write"),
    Rule("SL062", "fewer cores than the node line says", _ERROR, _SLUICE,
         "correct Sockets, CoresPerSocket, ThreadsPerCore"),
    Rule("SL063", "less memory than the node line says", _ERROR, _SLUICE, "lower RealMemory"),
    Rule("SL064", "Cores are not those near the GPU", _WARNING, _SLUICE, "write again with: sluice gres write"),
    Rule("SL065", "GPU that could not be read", _WARNING, _SLUICE, "see: sluice probe on the node"),
    Rule("SL066", "shards exceed the GPU's memory", _ERROR, _SLUICE, "write again with: sluice gres write"),
    Rule("SL067", "Type differs from the model", _WARNING, _SLUICE, "write again with: sluice gres write"),
    Rule("SL068", "another number of RDMA interfaces than the inventory", _ERROR, _SLUICE,
         "write again with: sluice gres write --nics"),
    # ---- nics.sluice.conf
    Rule("SL080", "nics.sluice.conf cannot be read", _ERROR, _SLUICE,
         "write again with: sluice gres write --nics; then scontrol reconfigure"),
    Rule("SL081", "nics.sluice.conf is not what the inventory says", _WARNING, _SLUICE,
         "write again with: sluice gres write --nics; then scontrol reconfigure"),
)  # fmt: skip
