# ruff: noqa: E501  (one case a line)
"""Good and broken GRES configurations: what lint predicts and the daemons are asked to confirm.

`{dev}` is a folder with the devices gpu0 to gpu7, a plain file, and nothing else. Each case names the rules that must
apply; that the daemons complain about just those is what the tests check.
"""

from __future__ import annotations

from dataclasses import dataclass

ALL = "Name=gpu File={dev}/gpu[0-3]"
TYPES = "Name=gpu Type=a File={dev}/gpu[0-1]\nName=gpu Type=b File={dev}/gpu[2-3]"


@dataclass(frozen=True)
class Case:
    name: str
    gres_conf: str | None
    codes: tuple[str, ...] = ()
    gres: str = "gpu:4"
    types: str = "gpu,shard"
    more: str = ""  # further lines of slurm.conf
    newer: tuple[str, ...] | None = None  # the rules since Slurm 23.02.7, where they differ


READING = [
    Case("files in one line", ALL),
    Case("a line each", "\n".join(f"Name=gpu File={{dev}}/gpu{i}" for i in range(4))),
    Case("for the node by name", "NodeName=n1 Name=gpu File={dev}/gpu[0-3]"),
    Case("for another node too", ALL + "\nNodeName=n2 Name=gpu File=/dev/none0", ("SL052",)),
    Case("keys in any case", "NAME=gpu FILE={dev}/gpu[0-3] COUNT=4"),
    Case("continued line", "Name=gpu \\\n  File={dev}/gpu[0-3] # all\n"),
    Case("quoted value", 'Name=gpu File="{dev}/gpu[0-3]"'),
    Case("escaped hash", "Name=gpu File={dev}/gpu[0-3] Type=a\\#b", gres="gpu:a#b:4", codes=("SL044", "SL045", "SL046")),
    Case("cores", "Name=gpu File={dev}/gpu[0-1] Cores=0-7\nName=gpu File={dev}/gpu[2-3] Cores=8-15"),
    Case("links", "\n".join(f"Name=gpu File={{dev}}/gpu{i} Links={','.join('-1' if i == j else '2' for j in range(4))}" for i in range(4))),
    Case("types", "Name=gpu Type=a File={dev}/gpu[0-1]\nName=gpu Type=b File={dev}/gpu[2-3]", gres="gpu:a:2,gpu:b:2"),
    Case("types in the other order", "Name=gpu Type=b File={dev}/gpu[2-3]\nName=gpu Type=a File={dev}/gpu[0-1]", gres="gpu:a:2,gpu:b:2"),
    Case("AutoDetect off", "NodeName=n1 AutoDetect=off\n" + ALL),
    Case("same flags", "Name=gpu File={dev}/gpu[0-1] Flags=amd_gpu_env\nName=gpu File={dev}/gpu[2-3] Flags=amd_gpu_env"),
    Case("flags inherited", "Name=gpu File={dev}/gpu[0-1] Flags=amd_gpu_env\nName=gpu File={dev}/gpu[2-3]"),
    Case("shards", ALL + "\nName=shard Count=400 File={dev}/gpu[0-3]", gres="gpu:4,shard:400"),
    Case("shards without File", ALL + "\nName=shard Count=401", gres="gpu:4,shard:401"),
    Case("shards in Gres only", ALL, gres="gpu:4,shard:400"),
    Case("shards of some", ALL + "\nName=shard Count=100 File={dev}/gpu0", gres="gpu:4,shard:100"),
    Case("shards of none, then of some", ALL + "\nName=shard Count=0 File={dev}/gpu0\nName=shard Count=300 File={dev}/gpu[1-3]", gres="gpu:4,shard:300"),
    Case("shards of types", f"{TYPES}\nName=shard Type=a Count=200 File={{dev}}/gpu[0-1]\nName=shard Type=b Count=100 File={{dev}}/gpu[2-3]", gres="gpu:a:2,gpu:b:2,shard:a:200,shard:b:100"),
    Case("shards of a type without File", "Name=gpu Type=a File={dev}/gpu[0-3]\nName=shard Type=a Count=400", gres="gpu:a:4,shard:a:400"),
    Case("shards without a type", f"{TYPES}\nName=shard Type=a Count=200 File={{dev}}/gpu[0-1]\nName=shard Type=b Count=100 File={{dev}}/gpu[2-3]", gres="gpu:a:2,gpu:b:2,shard:300", codes=("SL044",)),
    Case("several files a device", "Name=gpu MultipleFiles={dev}/gpu0,{dev}/gpu1\nName=gpu MultipleFiles={dev}/gpu2,{dev}/gpu3", gres="gpu:2", types="gpu"),
    Case("a GRES without files", ALL + "\nName=bandwidth Count=20M", gres="gpu:4,bandwidth:20M", types="gpu,bandwidth"),
    Case("no GRES", "", gres="", types="gpu"),
    # the files themselves
    Case("not key=value", "rubbish\n" + ALL, ("SL001",)),
    Case("words after a value", ALL + " and more", ("SL001",)),
    Case("open quote", 'Name=gpu Type="a b File={dev}/gpu[0-3]', ("SL001", "SL044", "SL045", "SL046")),
    Case("pairs after AutoDetect", "AutoDetect=off Name=gpu\n" + ALL, ("SL001",)),
    Case("unknown key", ALL + " Cuont=4", ("SL002",)),
    Case("unknown key for another node", ALL + "\nNodeName=n2 Name=gpu Cuont=4", ("SL002", "SL052")),
    Case("unknown first key", "Type=a Name=gpu\n" + ALL, ("SL002",)),
    Case("NodeName after Name", "Name=gpu NodeName=n1 File={dev}/gpu[0-3]", ("SL002",)),
    Case("key twice", ALL + " Count=4 Count=4", ("SL004",)),
    # slurm.conf
    Case("shard without gpu", "Name=shard Count=4", ("SL010", "SL016", "SL046"), gres="shard:4", types="shard"),
    Case("a type twice", ALL, ("SL011",), types="gpu,gpu"),
    Case("Gres not in GresTypes", ALL, ("SL012",), gres="gpu:4,nic:1"),
    Case("unreadable count", ALL, ("SL013", "SL044"), gres="gpu:4x"),
    Case("typed and untyped", "Name=gpu Type=a File={dev}/gpu[0-1]", ("SL014", "SL044", "SL046"), gres="gpu:a:1,gpu:1"),
    Case("shards but no gpu", "Name=shard Count=4 File={dev}/gpu0", ("SL016", "SL046"), gres="shard:4"),
    Case("node twice", ALL, ("SL017",), more="NodeName=n1"),
    Case("no GresTypes", ALL, ("SL019",), types=""),
    # line by line
    Case("no name", "NodeName=n1 Count=1\n" + ALL, ("SL020",)),
    Case("name not in GresTypes", ALL + "\nName=nic Count=1", ("SL021",)),
    Case("unknown AutoDetect", "AutoDetect=all\n" + ALL, ("SL022",)),
    Case("AutoDetect twice", "NodeName=n1 AutoDetect=rsmi\nNodeName=n1 AutoDetect=off\n" + ALL, ("SL023",)),
    Case("AutoDetect on a line for all", ALL + " AutoDetect=off", ("SL024",)),
    Case("threads for cores", "Name=gpu File={dev}/gpu[0-1] Cores=0-7\nName=gpu File={dev}/gpu[2-3] Cores=16-31", ("SL026",)),
    Case("no cores", ALL + " Cores=x", ("SL027",)),
    Case("missing file", "Name=gpu File={dev}/plain/gpu0", ("SL028",), gres="gpu:1"),
    Case("not a device", "Name=gpu File={dev}/plain", ("SL029",), gres="gpu:1"),
    Case("both kinds of files", "Name=gpu File={dev}/gpu0 MultipleFiles={dev}/gpu1,{dev}/gpu2", ("SL030",), gres="gpu:1", types="gpu"),
    Case("MultipleFiles with one", "Name=gpu MultipleFiles={dev}/gpu0", ("SL031",), gres="gpu:1", types="gpu"),
    Case("flags differ", "Name=gpu File={dev}/gpu0 Flags=nvidia_gpu_env\nName=gpu File={dev}/gpu1 Flags=amd_gpu_env", ("SL032",), gres="gpu:2"),
    Case("flags after none", "Name=gpu File={dev}/gpu0\nName=gpu File={dev}/gpu1 Flags=amd_gpu_env", ("SL032",), gres="gpu:2"),
    Case("flags and none", "Name=gpu File={dev}/gpu0 Flags=nvidia_gpu_env,no_gpu_env", ("SL033",), gres="gpu:1"),
    Case("unknown flag", ALL + " Flags=cuda_env", ("SL034",)),
    Case("links without itself", "Name=gpu File={dev}/gpu0 Links=0,1", ("SL035",), gres="gpu:1"),
    Case("links that are no numbers", "Name=gpu File={dev}/gpu0 Links=-1,NV4", ("SL035",), gres="gpu:1"),
    Case("links with two selves", "Name=gpu File={dev}/gpu0 Links=-1,-1", ("SL035",), gres="gpu:1"),
    Case("empty links", 'Name=gpu File={dev}/gpu0 Links=""', ("SL035",), gres="gpu:1"),
    Case("count in words", "Name=gpu File={dev}/gpu0 Count=one", ("SL036",), gres="gpu:1"),
    Case("negative count", "Name=bandwidth Count=-1", ("SL036",), gres="bandwidth:2", types="gpu,bandwidth"),
    Case("count against files", ALL + " Count=3", ("SL037",)),
    Case("unreadable NodeName", "NodeName=n[1- Name=gpu File={dev}/gpu0", ("SL038", "SL045", "SL046"), gres="gpu:1"),
    # together
    Case("some without File", "Name=gpu File={dev}/gpu0\nName=gpu Count=1", ("SL040", "SL045", "SL046"), gres="gpu:2"),
    Case("some without Type", "Name=gpu Type=a File={dev}/gpu0\nName=gpu File={dev}/gpu1", ("SL041", "SL044", "SL045", "SL046"), newer=("SL041", "SL045", "SL046"), gres="gpu:a:2"),
    Case("repeated record", "Name=bandwidth Count=1\nName=bandwidth Count=1", ("SL042",), gres="bandwidth:2", types="gpu,bandwidth"),
    Case("file twice", "Name=gpu File={dev}/gpu0\nName=gpu File={dev}/gpu0", ("SL043",), gres="gpu:2"),
    Case("more than configured", ALL, ("SL044",), gres="gpu:2"),
    Case("another type", "Name=gpu Type=a File={dev}/gpu[0-3]", ("SL044", "SL045", "SL046"), gres="gpu:b:4"),
    Case("type in gres.conf only", "Name=gpu Type=a File={dev}/gpu[0-3]", ("SL044",)),
    Case("type in slurm.conf only", ALL, ("SL044", "SL045", "SL046"), newer=("SL045", "SL046"), gres="gpu:a:4"),
    Case("fewer than configured", ALL, ("SL045", "SL046"), gres="gpu:5"),
    Case("no gres.conf", None, ("SL045", "SL046")),
    Case("shards of another file", "Name=gpu File={dev}/gpu[0-1]\nName=shard Count=100 File={dev}/gpu3", ("SL046", "SL047"), gres="gpu:2,shard:100"),
    Case("shards that do not divide", ALL + "\nName=shard Count=401 File={dev}/gpu[0-3]", ("SL046", "SL048"), gres="gpu:4,shard:401"),
    Case("shards twice without File", ALL + "\nName=shard Count=4\nName=shard Count=4", ("SL042", "SL046", "SL055"), gres="gpu:4,shard:8"),
    Case("a type of shards in slurm.conf only", "Name=gpu Type=a File={dev}/gpu[0-3]\nName=shard Count=400 File={dev}/gpu[0-3]", ("SL044",), newer=(), gres="gpu:a:4,shard:a:400"),
    Case("types of shards in slurm.conf only", f"{TYPES}\nName=shard Count=400 File={{dev}}/gpu[0-3]", ("SL044", "SL046", "SL055"), newer=("SL046", "SL055"), gres="gpu:a:2,gpu:b:2,shard:a:200,shard:b:200"),
    Case("several files with shards", "Name=gpu MultipleFiles={dev}/gpu0,{dev}/gpu1", ("SL049",), newer=(), gres="gpu:1"),
]  # fmt: skip

# Cases that slurmd accepts and slurmctld judges when the node registers.
REGISTERING = [
    *(
        case
        for case in READING
        if not case.codes and case.types == "gpu,shard" and "NodeName" not in (case.gres_conf or "")
    ),
    Case("fewer than configured", ALL, ("SL045", "SL046"), gres="gpu:5"),
    Case(
        "shards that do not divide",
        ALL + "\nName=shard Count=401 File={dev}/gpu[0-3]",
        ("SL046", "SL048"),
        gres="gpu:4,shard:401",
    ),
    Case("more than configured", ALL, ("SL044",), gres="gpu:2"),
    Case("another type", "Name=gpu Type=a File={dev}/gpu[0-3]", ("SL044", "SL045", "SL046"), gres="gpu:b:4"),
    Case(
        "links too long",
        "Name=gpu Type=a File={dev}/gpu0 Links=-1,2,2\nName=gpu Type=a File={dev}/gpu1 Links=2,-1,2",
        ("SL050",),
        gres="gpu:a:2",
    ),
    Case(
        "links too long, unused",
        "Name=gpu File={dev}/gpu0 Links=-1,2,2\nName=gpu File={dev}/gpu1 Links=2,-1,2",
        gres="gpu:2",
    ),
    Case(
        "some without cores", "Name=gpu File={dev}/gpu0 Cores=0-7\nName=gpu File={dev}/gpu1", ("SL051",), gres="gpu:2"
    ),
    Case("cores beyond the node", "Name=gpu File={dev}/gpu[0-3] Cores=0-31", ("SL026",)),
    Case(
        "shards of another file",
        "Name=gpu File={dev}/gpu[0-1]\nName=shard Count=100 File={dev}/gpu3",
        ("SL046", "SL047"),
        gres="gpu:2,shard:100",
    ),
]
