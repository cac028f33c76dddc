"""Readers of job traces: what they take from a file, and what they say about a bad one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.base.errors import UsageError
from sluice.simulate.cluster_file import read_nodes
from sluice.simulate.traces import FORMATS, MICROSECOND, Trace, read_trace

OPENB = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
)
MURI = (
    "job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval,iteration_time,"
    "resource_time_0,resource_time_1,resource_time_2,priority\n"
)
PHILLY = (
    "job_id,user,num_gpu,submit_time,iterations,model_name,duration,interval,expect_time_list,expect_value_list,"
    "best_effort,job_type\n"
)
SACCT = "JobIDRaw|Account|User|Submit|Start|End|ElapsedRaw|State|Timelimit|NNodes|ReqTRES|AllocTRES\n"


def write(folder: Path, text: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def sacct_line(**changes: str) -> str:
    fields = {
        "JobIDRaw": "7",
        "Account": "physics",
        "User": "ada",
        "Submit": "2026-10-01T12:00:00",
        "Start": "2026-10-01T12:10:00",
        "End": "2026-10-01T13:10:00",
        "ElapsedRaw": "3600",
        "State": "COMPLETED",
        "Timelimit": "1-02:00:00",
        "NNodes": "2",
        "ReqTRES": "billing=1,cpu=1,gres/gpu=1,mem=1G,node=1",
        "AllocTRES": "billing=16,cpu=16,gres/gpu:a100=8,gres/gpu=8,mem=128G,node=2",
    }
    return "|".join({**fields, **changes}.values()) + "\n"


def sacct(folder: Path, *lines: str) -> Trace:
    return read_trace(write(folder, SACCT + "".join(lines)))


def test_openb(tmp_path: Path) -> None:
    text = OPENB + "a,4000,2048,1,250,T4|P100,LS,Running,100,900,160\nb,1000,1024,2,1000,,BE,Pending,120,,\n"
    trace = read_trace(write(tmp_path, text))
    (job,) = trace.jobs
    assert (trace.format, trace.share_unit, trace.left_out) == ("openb", "milli", {"never ran": 1})
    assert (job.submit, job.run, job.gpus, job.share) == (0, 740 * MICROSECOND, 1, 250)
    assert (job.cpus_milli, job.memory_mib, job.models, job.tenant) == (4000, 2048, ("T4", "P100"), "LS")


def test_muri_service_time_is_exact(tmp_path: Path) -> None:
    text = MURI + "0,16,1000,4378042,vgg16,16,1,1,332,83,68,110,0\n1,1,3500,3,dqn,1,1,1,7,1,1,1,0\n"
    first, second = read_trace(write(tmp_path, text)).jobs
    assert (first.submit, first.gpus, first.kind) == (0, 16, "vgg16")
    assert first.run == 4378042 * 332 * 1015  # microseconds
    assert second.submit == 2_500_000


def test_philly_deadlines(tmp_path: Path) -> None:
    text = PHILLY + "0,vc,4,12198,6910,resnet,211,8,282,10,0,strict\n1,vc,1,12200,1,resnet,50,1,99,10,1,best\n"
    strict, best_effort = read_trace(write(tmp_path, text)).jobs
    assert (strict.run, strict.deadline, strict.tenant) == (211 * MICROSECOND, 282 * MICROSECOND, "vc")
    assert best_effort.best_effort and best_effort.deadline == 0


def test_swf(tmp_path: Path) -> None:
    lines = [
        "; Version: 2",
        "1 10 5 3600 4 -1 -1 8 7200 2048 1 3 9 1 -1 -1 -1 -1",
        "2 20 5 60 4 -1 -1 -1 -1 -1 1 3 -1 -1 -1 -1 -1 -1",
        "3 30 -1 -1 -1 -1 -1 4 60 -1 5 3 9 1 -1 -1 -1 -1",
    ]
    trace = read_trace(write(tmp_path, "\n".join(lines)))
    asked, allocated = trace.jobs
    assert (asked.gpus, asked.estimate, asked.memory_mib, asked.tenant) == (8, 7200 * MICROSECOND, 16, "9")
    assert (allocated.gpus, allocated.estimate, allocated.tenant) == (4, 0, "")
    assert trace.left_out == {"never ran": 1}


def test_sacct(tmp_path: Path) -> None:
    (job,) = sacct(tmp_path, sacct_line()).jobs
    assert (job.submit, job.run, job.estimate) == (0, 3600 * MICROSECOND, 26 * 3600 * MICROSECOND)
    assert (job.gpus, job.nodes, job.cpus_milli, job.memory_mib) == (8, 2, 16000, 128 * 1024)
    assert (job.models, job.tenant, job.user) == ((), "physics", "ada")  # any model would have done


def test_sacct_gpu_models_are_those_that_were_asked(tmp_path: Path) -> None:
    typed = "cpu=1,gres/gpu:h100=2,gres/gpu=2"
    asked, allocated = sacct(tmp_path, sacct_line(ReqTRES=typed), sacct_line(JobIDRaw="8", ReqTRES="")).jobs
    assert (asked.models, allocated.models) == (("h100",), ("a100",))


def test_sacct_shards_are_mib_of_one_gpu(tmp_path: Path) -> None:
    trace = sacct(tmp_path, sacct_line(AllocTRES="cpu=2,gres/shard=10240,mem=4G,node=1"))
    assert (trace.share_unit, trace.jobs[0].share, trace.jobs[0].gpus) == ("mib", 10240, 1)


@pytest.mark.parametrize(
    ("changes", "left_out"),
    [
        ({"JobIDRaw": "7.batch"}, {}),
        ({"State": "PENDING", "Start": "Unknown"}, {"never started": 1}),
        ({"State": "CANCELLED by 1000", "Start": "None"}, {"never started": 1}),
        ({"State": "RUNNING", "End": "Unknown", "ElapsedRaw": ""}, {"running, without a time so far": 1}),
    ],
)
def test_sacct_leaves_out_what_did_not_run(tmp_path: Path, changes: dict[str, str], left_out: dict[str, int]) -> None:
    trace = sacct(tmp_path, sacct_line(), sacct_line(**{"JobIDRaw": "8", **changes}))
    assert len(trace.jobs) == 1 and trace.left_out == left_out


def test_sacct_running_jobs_count_with_the_time_so_far(tmp_path: Path) -> None:
    trace = sacct(tmp_path, sacct_line(State="RUNNING", End="Unknown", ElapsedRaw="90"))
    assert trace.jobs[0].run == 90 * MICROSECOND and sum(trace.left_out.values()) == 1


def test_sacct_cancelled_after_the_start_counts(tmp_path: Path) -> None:
    assert len(sacct(tmp_path, sacct_line(State="CANCELLED by 0")).jobs) == 1


def test_sacct_requeued_jobs_count_once(tmp_path: Path) -> None:
    trace = sacct(
        tmp_path,
        sacct_line(State="NODE_FAIL", ElapsedRaw="100"),
        sacct_line(Submit="2026-10-01T12:30:00", Start="2026-10-01T14:00:00", ElapsedRaw="700"),
    )
    (job,) = trace.jobs
    assert (job.submit, job.run) == (0, 700 * MICROSECOND)


def test_sacct_arrays_and_heterogeneous_components_are_jobs(tmp_path: Path) -> None:
    names = ("10", "11", "12+0", "12+1")
    assert [job.name for job in sacct(tmp_path, *(sacct_line(JobIDRaw=name) for name in names)).jobs] == list(names)


@pytest.mark.parametrize("name", ["a|b", "||", "two\nlines", "|\n|", "-x $(reboot) `id` %s", "\x1b[2J"])
def test_sacct_hostile_job_names(tmp_path: Path, name: str) -> None:
    header = "JobIDRaw|JobName|Submit|Start|ElapsedRaw|State|AllocTRES\n"
    line = f"7|{name}|2026-10-01T12:00:00|2026-10-01T12:10:00|60|COMPLETED|gres/gpu=1\n"
    after = "8|plain|2026-10-01T12:00:01|2026-10-01T12:10:00|61|COMPLETED|gres/gpu=2\n"
    first, second = read_trace(write(tmp_path, header + line + after)).jobs
    assert (first.name, first.run, first.gpus, second.gpus) == ("7", 60 * MICROSECOND, 1, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not of a known format"),
        ("hello\n", "not of a known format"),
        (OPENB, "no job"),
        (OPENB + "a,4000,2048,1,x,,LS,Running,100,900,160\n", ":2: gpu_milli 'x': must be a whole number"),
        (OPENB + "a,4000,2048,1,2000,,LS,Running,100,900,160\n", ":2: gpu_milli '2000': must be between 0 and 1000"),
        (OPENB + "a,4000\n", ":2: the number of fields"),
        (MURI + "0,0,1,1,m,1,1,1,1,1,1,1,0\n", ":2: num_gpu '0'"),
        (PHILLY + "0,vc,1,nan,1,m,1,1,1,1,0,s\n", ":2: submit_time 'nan'"),
        ("; SWF\n1 2 3\n", ":2: 3 fields"),
        ("; SWF\n1 -5 3 60 4 -1 -1 8 1 1 1 1 1 1 1 1 1 1\n", ":2: submit '-5'"),
        ("Submit|State\n", "column JobIDRaw or JobID is missing"),
        (SACCT + sacct_line(Submit="yesterday"), ":2: Submit 'yesterday': must be a time"),
        (SACCT + sacct_line(Timelimit="soon"), ":2: Timelimit 'soon'"),
        (SACCT + sacct_line(AllocTRES="gres/gpu=1,gres/shard=5"), ":2: TRES"),
        (SACCT + sacct_line(AllocTRES="gres/gpu"), ":2: TRES 'gres/gpu'"),
        (SACCT + sacct_line(AllocTRES="gres/gpu=-4"), ":2: gres/gpu '-4'"),
        (SACCT + sacct_line(AllocTRES="mem=lots"), ":2: mem 'lots'"),
        (SACCT + "7|short\n", ":2: 2 fields"),
    ],
)
def test_errors_name_file_line_and_value(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_trace(write(tmp_path, text))
    assert str(tmp_path / "trace") in str(caught.value) and words in str(caught.value)


GOOD = {
    "openb": OPENB + "a,4000,2048,1,250,T4,LS,Running,100,900,160\n",
    "muri": MURI + "0,16,1000,4378042,vgg16,16,1,1,332,83,68,110,0\n",
    "philly": PHILLY + "0,vc,4,12198,6910,resnet,211,8,282,10,0,strict\n",
    "swf": "1 10 5 3600 4 -1 -1 8 7200 2048 1 3 9 1 -1 -1 -1 -1\n",
    "sacct": SACCT + sacct_line(),
}


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(FORMATS), st.data())
def test_damaged_files_are_read_or_refused(tmp_path: Path, name: str, data: st.DataObject) -> None:
    """A good file with parts cut out, put in or doubled gives jobs within bounds, or a UsageError; nothing else."""
    text = GOOD[name]
    at, upto = sorted((data.draw(st.integers(0, len(text))), data.draw(st.integers(0, len(text)))))
    junk = data.draw(st.text(alphabet=st.sampled_from("0123456789.,|:-+=\n\r\t\"'\\eEnaif/G\x00\ufeffé"), max_size=12))
    path = tmp_path / "trace"
    path.write_bytes((text[:at] + junk + text[upto:] + data.draw(st.sampled_from(["", text]))).encode())
    try:
        trace = read_trace(path, name)
    except UsageError as error:
        assert str(path) in str(error) and "\n" not in error.what[len(str(path)) :].replace("\\n", "")
        return
    for job in trace.jobs:
        assert job.submit >= 0 and job.run >= 0 and job.gpus >= 0 and job.share >= 0


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(FORMATS), st.binary(max_size=300))
def test_any_bytes(tmp_path: Path, name: str, junk: bytes) -> None:
    path = tmp_path / "trace"
    path.write_bytes(junk)
    try:
        read_trace(path, name)
    except UsageError as error:
        assert str(path) in str(error)


SCONTROL = """NodeName=gpu1 Arch=x86_64 CoresPerSocket=16
   CPUAlloc=0 CPUEfctv=64 CPUTot=64 CPULoad=0.10
   Gres=gpu:h100:8(S:0-1),shard:h100:655360(S:0-1)
   RealMemory=1031000 AllocMem=0 FreeMem=1 Sockets=2 Boards=1
   State=DOWN+DRAIN ThreadsPerCore=2 TmpDisk=0

NodeName=cpu1 CPUTot=32 Gres=(null) RealMemory=64000
"""


def test_nodes_of_scontrol(tmp_path: Path) -> None:
    gpu, cpu = read_nodes(str(write(tmp_path, SCONTROL)))
    assert (gpu.name, gpu.gpus, gpu.model, gpu.cpus_milli, gpu.memory_mib) == ("gpu1", 8, "h100", 64000, 1031000)
    assert gpu.gpu_memory_mib == 81920
    assert (cpu.name, cpu.gpus) == ("cpu1", 0)


def test_nodes_of_csv_and_word(tmp_path: Path) -> None:
    openb = write(tmp_path, "sn,cpu_milli,memory_mib,gpu,model\nn0,64000,262144,2,P100\n", "openb")
    spot = write(tmp_path, "gpu_model,gpu_capacity_num,cpu_num,node_name\nA10,1,128,2\n", "spot")
    assert [(n.name, n.gpus, n.model, n.cpus_milli) for n in read_nodes(str(openb))] == [("n0", 2, "P100", 64000)]
    assert [(n.name, n.gpus, n.model, n.cpus_milli) for n in read_nodes(str(spot))] == [("2", 1, "A10", 128000)]
    assert len(read_nodes("16x4:a100")) == 16


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sn,cpu_milli,memory_mib,gpu,model\nn0,64000,262144,99,P100\n", ":2: gpu '99'"),
        ("sn,cpu_milli\nn0,64000\n", ":1: column 'memory_mib' is missing"),
        ("NodeName=a CPUTot=8 Gres=gpu:8:8:8 RealMemory=1\n", ":1: Gres 'gpu:8:8:8'"),
        ("NodeName=a CPUTot=8 Gres=gpu:20 RealMemory=1\n", ":1: Gres 'gpu:20': must be at most 16 GPUs"),
        ("NodeName=a CPUTot=8 RealMemory=1\n", "no node with a GPU"),
    ],
)
def test_errors_of_node_files(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_nodes(str(write(tmp_path, text)))
    assert words in str(caught.value)


@pytest.mark.parametrize("word", ["no-such-file", "0x8", "8x99"])
def test_bad_words_for_nodes(word: str) -> None:
    with pytest.raises(UsageError, match="--nodes"):
        read_nodes(word)
