"""The sections `services` and `serving`: every mistake is refused, and a replica's job is what the policy says."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from policy import service_jobs
from policy.document import check, parse
from policy.model import Policy
from policy.service_jobs import (
    ServicesFile,
    ServicesPolicy,
    account_rows,
    compile_services,
    has_budgets,
    limit_rows,
    parse_job_name,
    registries_of,
    replica_job,
    service_rows,
)
from sluice.base.errors import SluiceError, UsageError
from sluice.exchange.serving import ENGINES, ReplicaSpec
from sluice.exchange.serving import parse as parse_message

LAUNCH = "0123456789abcdef"
VLLM: dict[str, Any] = {"tenant": "nlp", "user": "nlp-serve", "engine": "vllm", "model": "/models/deepseek", "gpus": 1}
TRUSTED = {"parts_network": "trusted"}
PYTHON: dict[str, Any] = {"tenant": "nlp", "user": "nlp-serve", "engine": "python", "command": ["/opt/embed.py"]}


def policy_of(service: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    tenants = {
        "nlp": {
            "members": ["nlp-serve", {"name": "alice"}],
            "limit": {"gpus": 8, "gpu_memory": "160G"},
            "classes": ["h100", "mixed"],
            "partitions": ["gpu"],
        },
        "robotics": {"members": ["bob", "alice"]},
    }
    classes = {"h100": {"types": ["h100"]}, "mixed": {"types": ["a100", "a30"]}, "l40s": {"types": ["l40s"]}}
    services = {} if service is None else {"deepseek-7b": service}
    return {"tenants": tenants, "classes": classes, "services": services, **more}


def made(service: dict[str, Any] | None = None, **more: Any) -> ServicesPolicy:
    return compile_services(parse(yaml.safe_dump(policy_of(service, **more))))


def problems(document: dict[str, Any]) -> list[str]:
    return [str(one) for one in check(yaml.safe_dump(document))[1]]


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_can_be_served(engine: str) -> None:
    service = {**PYTHON, "engine": engine} if engine in ("openai", "python") else {**VLLM, "engine": engine}
    job = replica_job(made(service), "deepseek-7b", LAUNCH, registry_uid=99, program=Path("/x"), registries=["c:1"])
    assert job.spec.engine == engine and job.spec.health.startswith("/")


MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    # what is changed, part of the place, part of the text
    ({"tenant": "nobody"}, "services.deepseek-7b.tenant", "'nobody' is not a tenant (known: nlp, robotics)"),
    ({"user": "bob"}, "services.deepseek-7b.user", "'bob' is not a member of tenant 'nlp' (members: nlp-serve, alice)"),
    ({"engine": "ollama"}, "services.deepseek-7b.engine", "'ollama'"),
    ({"model": "deepseek-ai/deepseek-llm-7b"}, "services.deepseek-7b.model", "is not an absolute path"),
    ({"model": "/models/../etc/shadow"}, "services.deepseek-7b.model", "is not an absolute path"),
    ({"model": ""}, "services.deepseek-7b", "engine vllm needs a model; add model: /PATH"),
    ({"sha256": "ABC"}, "services.deepseek-7b.sha256", "'ABC'"),
    ({"stage": "scratch"}, "services.deepseek-7b.stage", "is not an absolute path"),
    ({"stage": "/models"}, "services.deepseek-7b", "has the model itself in it"),
    ({"command": ["/bin/vllm"]}, "services.deepseek-7b", "command is for the engines openai and python"),
    ({"gpu_memory": "10G"}, "services.deepseek-7b", "gpus and gpu_memory are two ways"),
    ({"gpus": 0}, "services.deepseek-7b.gpus", "greater than or equal to 1"),
    ({"gpus": None, "gpu_class": "h100"}, "services.deepseek-7b", "gpu_class 'h100' without GPUs"),
    ({"gpu_class": "b200"}, "services.deepseek-7b.gpu_class", "'b200' is not a class"),
    ({"gpu_class": "l40s"}, "services.deepseek-7b.gpu_class", "tenant 'nlp' may not use class 'l40s'"),
    ({"partition": "debug"}, "services.deepseek-7b.partition", "tenant 'nlp' may not use partition 'debug'"),
    ({"borrow": True}, "services.deepseek-7b.borrow", "tenant 'nlp' does not borrow"),
    ({"callers": ["nobody"]}, "services.deepseek-7b.callers", "'nobody' is not a tenant"),
    ({"callers": []}, "services.deepseek-7b", "callers is empty"),
    ({"callers": "all"}, "services.deepseek-7b.callers", "'all'"),
    ({"replicas": {"least": 3, "most": 2}}, "services.deepseek-7b.replicas", "least 3 is more than most 2; raise most"),
    ({"replicas": {"most": 0}}, "services.deepseek-7b.replicas.most", "greater than or equal to 1"),
    ({"replicas": {"most": 9}}, "services.deepseek-7b.gpus", "9 for 9 replicas is more than limit.gpus 8 of tenant"),
    ({"walltime": "20m"}, "services.deepseek-7b", "walltime 1200s is not more than ready_within 900s"),
    ({"walltime": 600}, "services.deepseek-7b.walltime", "600 has no unit"),
    ({"idle": "soon"}, "services.deepseek-7b.idle", "'soon' is not a duration"),
    ({"target": {"queue_delay": 2}}, "services.deepseek-7b.target.queue_delay", "2 has no unit: write e.g. 2ms or 2s"),
    ({"target": {"queue_delay": "0ms"}}, "services.deepseek-7b.target.queue_delay", "greater than 0"),
    ({"health": "health"}, "services.deepseek-7b.health", "'health'"),
    ({"logs": "logs"}, "services.deepseek-7b.logs", "is not an absolute path"),
    ({"logs": "/var/%u"}, "services.deepseek-7b.logs", "Slurm fills in"),
    ({"limits": {"concurrent": 0}}, "services.deepseek-7b.limits.concurrent", "greater than or equal to 1"),
    ({"priority": "urgent"}, "services.deepseek-7b.priority", "'urgent'"),
    ({"nodes": 2, "engine": "llama.cpp"}, "services.deepseek-7b", "a replica of llama.cpp is on one node"),
    ({"nodes": 2, "gpus": None, "gpu_memory": "8G"}, "services.deepseek-7b", "a part of one GPU is on one node"),
    ({"options": ["a\nb"]}, "services.deepseek-7b.options.0", "control characters"),
    ({"replica": {}}, "services.deepseek-7b.replica", "did you mean 'replicas'?"),
]


@pytest.mark.parametrize(("change", "place", "text"), MISTAKES, ids=[one[2][:40] for one in MISTAKES])
def test_mistakes_are_named_with_value_place_and_remedy(change: dict[str, Any], place: str, text: str) -> None:
    found = problems(policy_of({**VLLM, **change}))
    assert len(found) == 1, found
    assert f": {place}: " in found[0] and text in found[0] and "; " in found[0], found[0]


@pytest.mark.parametrize(
    ("engine", "word"),
    [
        ("vllm", "--port"),
        ("vllm", "--port=80"),
        ("vllm", "--por"),
        ("vllm", "--api_key=x"),
        ("vllm", "--host"),
        ("vllm", "--served_model_name"),
        ("vllm", "--config=/tmp/all.yaml"),
        ("sglang", "--model-path"),
        ("llama.cpp", "-m"),
        ("llama.cpp", "--api-key-file"),
        ("llama.cpp", "-np"),
        ("tei", "-p"),
        ("tei", "--uds-path=/x"),
    ],
)
def test_options_that_the_replica_sets_itself_are_refused(engine: str, word: str) -> None:
    found = problems(policy_of({**VLLM, "engine": engine, "options": [word, "x"]}))
    assert len(found) == 1 and f"{word!r} sets -" in found[0] and "take it out" in found[0], found


@pytest.mark.parametrize("word", ["--max-model-len", "--gpu-memory-utilization=0.9", "--model-impl", "--enable-lora"])
def test_other_options_are_kept(word: str) -> None:
    assert made({**VLLM, "options": [word, 8192, 0.5]}).services["deepseek-7b"].options == (word, "8192", "0.5")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"command": []}, "engine python needs the command"),
        ({"command": ["embed.py"]}, "'embed.py' is not the absolute path of a program"),
        ({"options": ["--x"]}, "engine python has no options of its own"),
        ({"command": ["/opt/embed.py", "{sockets}"]}, "{sockets} is not filled in"),
    ],
)
def test_commands_of_the_site(change: dict[str, Any], text: str) -> None:
    found = problems(policy_of({**PYTHON, **change}))
    assert len(found) == 1 and text in found[0], found


def test_braces_of_json_in_a_command_are_kept() -> None:
    command = ("/opt/embed.py", '{"a": {"b": 1}}', "{socket}")
    assert made({**PYTHON, "command": list(command)}).services["deepseek-7b"].command == command


def test_parts_of_a_replica_speak_over_a_network_that_the_site_trusts() -> None:
    wide = {**VLLM, "nodes": 2}
    (found,) = problems(policy_of(wide))
    assert "services.deepseek-7b.nodes" in found and "serving.parts_network: trusted" in found
    assert problems(policy_of(wide, serving=TRUSTED)) == []
    assert len(problems(policy_of(wide, serving={"parts_network": "encrypted"}))) == 1


def test_how_replicas_give_each_other_models() -> None:
    for given, wanted in (({}, "auto"), ({"serving": {"data_path": "ucx"}}, "ucx")):
        job = replica_job(
            made(VLLM, **given), "deepseek-7b", LAUNCH, registry_uid=99, program=Path("/x"), registries=["c:1"]
        )
        assert job.spec.data_path == wanted
    (problem,) = problems(policy_of(VLLM, serving={"data_path": "rdma"}))
    assert "serving.data_path" in problem and "'rdma'" in problem


def test_two_services_of_one_name_are_refused() -> None:
    one = "{tenant: nlp, user: nlp-serve, engine: vllm, model: /m}"
    text = f"tenants: {{nlp: {{members: [nlp-serve]}}}}\nservices:\n  a: {one}\n  a: {one}\n"
    with pytest.raises(UsageError, match="a"):
        parse(text)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "-a", "a" * 65, "a\n", "é"])
def test_names_that_no_job_can_have_are_refused(name: str) -> None:
    found = problems(policy_of() | {"services": {name: VLLM}})
    assert len(found) == 1 and "is not the name of a service" in found[0]


def test_a_mistake_in_a_service_with_a_capital_letter_has_its_place() -> None:
    found = problems(policy_of() | {"services": {"Qwen2.5-7B": {**VLLM, "cpus": 0}}})
    assert len(found) == 1 and ": services.Qwen2.5-7B.cpus: " in found[0]


@pytest.mark.parametrize(
    ("serving", "place"),
    [
        ({"registries": ["ctl-1"]}, "serving.registries"),
        ({"registries": ["ctl-1:99999"]}, "serving.registries"),
        ({"registries": ["ctl-1:6824", "ctl-1:6824"]}, "serving.registries"),
        ({"keys": {"alice": {}}}, "serving.keys"),
        ({"users": {"carol": {}}}, "serving.users.carol"),
        ({"tenants": {"nobody": {}}}, "serving.tenants.nobody"),
        ({"tenants": {"nlp": {"tokens": 5}}}, "serving.tenants.nlp.tokens"),
        ({"tenants": {"nlp": {"weight": 0}}}, "serving.tenants.nlp.weight"),
        ({"requests": "records"}, "serving.requests"),
    ],
)
def test_mistakes_of_serving(serving: dict[str, Any], place: str) -> None:
    found = problems(policy_of(VLLM, serving=serving))
    assert len(found) == 1 and f": {place}: " in found[0], found


def test_the_time_limits_of_a_tenant_hold_for_its_services() -> None:
    document = policy_of(VLLM, defaults={"max_time": "12h"})
    assert "86400s is more than the 43200s" in problems(document)[0]
    document["tenants"]["nlp"]["max_time"] = "2d"
    assert problems(document) == []


# ---- jobs ----


def job_of(service: dict[str, Any], **more: Any) -> service_jobs.ReplicaJob:
    return replica_job(
        made(service, **more), "deepseek-7b", LAUNCH, registry_uid=99, program=Path("/usr/bin/sluice-replica"),
        registries=["ctl-1:6824"],
    )  # fmt: skip


def test_a_replicas_job() -> None:
    job = job_of({**VLLM, "gpu_class": "h100", "cpus": 8, "memory": "64G", "partition": "gpu", "logs": "/var/log/nlp"})
    assert job.user == "nlp-serve" and job.name == f"sluice-serve.deepseek-7b.{LAUNCH}"
    assert job.arguments == (
        f"--job-name=sluice-serve.deepseek-7b.{LAUNCH}", "--account=nlp", "--partition=gpu", "--nodes=1",
        "--ntasks-per-node=1", "--cpus-per-task=8", "--mem=65536M", "--gres=gpu:h100:1", "--time=1440",
        "--signal=B:TERM@600", f"--output=/var/log/nlp/sluice-serve.deepseek-7b.{LAUNCH}.%j.log", "--no-requeue",
    )  # fmt: skip
    first, run, spec, end = job.script.splitlines()
    assert (first, run, end) == (
        "#!/bin/sh",
        "exec /usr/bin/sluice-replica <<'SLUICE_REPLICA'",
        "SLUICE_REPLICA",
    )
    assert parse_message(ReplicaSpec, spec.encode()) == job.spec
    assert job.spec.registries == ("ctl-1:6824",) and job.spec.registry_uid == 99 and job.spec.ready_s == 900


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpus": None, "gpu_memory": "20G"}, {"--gres=shard:20480"}),
        ({"gpus": None, "gpu_memory": "20G", "gpu_class": "h100"}, {"--gres=shard:20480", "--constraint=h100"}),
        ({"gpus": 2, "gpu_class": "mixed"}, {"--gres=gpu:2", "--constraint=a100"}),
        ({"gpus": 2, "nodes": 2}, {"--gres=gpu:2", "--nodes=2"}),
        ({"gpus": None}, set()),
        ({"walltime": "90m30s"}, {"--time=91"}),
    ],
)
def test_gpus_of_a_replica(change: dict[str, Any], words: set[str]) -> None:
    found = set(job_of({**VLLM, **change}, serving=TRUSTED).arguments)
    assert words <= found
    assert any(one.startswith("--gres") for one in words) == any(one.startswith("--gres") for one in found) or (
        "--time=91" in words
    )


@pytest.mark.parametrize(
    ("borrow", "tenant", "guaranteed", "lent"),
    [
        (True, {"borrow": True, "guarantee": {"gpus": 2}}, 2, True),
        (True, {"borrow": True}, 0, True),  # its default QOS is that of over-quota work
        (False, {"borrow": True, "guarantee": {"gpus": 2}}, None, False),
    ],
)
def test_lent_replicas_are_in_the_qos_that_is_taken_back(
    borrow: bool, tenant: dict[str, Any], guaranteed: int | None, lent: bool
) -> None:
    document = policy_of({**VLLM, "borrow": borrow, "replicas": {"least": 2, "most": 4}})
    document["tenants"]["nlp"] |= tenant
    policy = compile_services(Policy.model_validate(document))
    assert policy.services["deepseek-7b"].guaranteed == guaranteed

    def qos(*, lent: bool) -> bool:
        job = replica_job(
            policy, "deepseek-7b", LAUNCH, registry_uid=1, program=Path("/x"), registries=["c:1"], lent=lent
        )
        return "--qos=sluice_over" in job.arguments

    assert (qos(lent=False), qos(lent=True)) == (False, lent)


def test_the_least_replicas_of_a_service_that_borrows_fit_the_guarantee() -> None:
    document = policy_of({**VLLM, "borrow": True, "replicas": {"least": 3, "most": 4}})
    document["tenants"]["nlp"] |= {"borrow": True, "guarantee": {"gpus": 2}}
    (found,) = problems(document)
    assert "3 for 3 replicas is more than guarantee.gpus 2 of tenant 'nlp'" in found and "replicas.least" in found


def test_no_text_of_the_policy_leaves_its_place_in_the_script() -> None:
    hostile = ["SLUICE_REPLICA", "$(id)", "`id`", "'", '"; id #', "\u2028", "é"]
    job = job_of({**VLLM, "options": ["--x", *hostile]})
    lines = job.script.split("\n")
    assert lines.count("SLUICE_REPLICA") == 1 and lines[-2] == "SLUICE_REPLICA" and len(lines) == 5
    assert json.loads(lines[2])["options"] == ["--x", *hostile]
    assert lines[2].isascii()


def test_what_cannot_be_launched() -> None:
    policy = made(VLLM)
    for name, launch, text in (
        ("other", LAUNCH, "service 'other': not in the policy"),
        ("deepseek-7b", "../../x", "not 16 hexadecimal digits"),
        ("deepseek-7b", LAUNCH.upper(), "not 16 hexadecimal digits"),
        ("deepseek-7b", LAUNCH, "no replicad is known"),
    ):
        with pytest.raises(UsageError, match=text):
            replica_job(policy, name, launch, registry_uid=1, program=Path("/x"))
    with pytest.raises(UsageError, match="paused"):
        job_of({**VLLM, "paused": True})


def test_names_of_jobs() -> None:
    assert parse_job_name(f"sluice-serve.Qwen2.5.{LAUNCH}") == ("Qwen2.5", LAUNCH)
    for name in ("sluice-serve.x", f"x.{LAUNCH}", f"sluice-serve..{LAUNCH}x", f"sluice-serve.{LAUNCH}", ""):
        assert parse_job_name(name) is None
    assert registries_of(["ctl-1", "fd00::1"]) == ("ctl-1:6824", "[fd00::1]:6824")


# ---- rows ----


def test_rows_of_services_and_accounts() -> None:
    policy = made({**VLLM, "callers": "*", "paused": True, "first_token_deadline": "2m", "answer_within": "5m",
                   "log_prompts": True, "replicas": {"most": 2}})  # fmt: skip
    (row,) = service_rows(policy)
    wanted = {"callers": ("*",), "paused": True, "log_prompts": True, "deadline_s": 120, "answer_s": 300, "most": 2}
    assert asdict(row) | wanted == asdict(row)
    (usual,) = service_rows(made(VLLM))
    assert usual.callers == ("nlp",) and not usual.log_prompts
    accounts = {one.user: one.tenants for one in account_rows(policy)}
    assert accounts == {"nlp-serve": ("nlp",), "alice": ("nlp", "robotics"), "bob": ("robotics",)}


def test_limits_inherit_what_they_leave_out() -> None:
    serving = {
        "each_tenant": {"concurrent": 8, "queued": 50},
        "each_user": {"requests_per_minute": 60},
        "tenants": {"nlp": {"weight": 3, "queued": 500, "tokens": 1000}},
        "keys": {LAUNCH: {"tokens_per_minute": 7}},
    }
    scheduling = {"usage_period": "monthly"}
    policy = made({**VLLM, "limits": {"concurrent": 100}}, serving=serving, scheduling=scheduling)
    rows = {(one.kind, one.name): one for one in limit_rows(policy, {"nlp": 400})}
    nlp = rows["tenant", "nlp"]
    assert (nlp.limit.concurrent, nlp.limit.queued, nlp.weight, nlp.tokens_left) == (8, 500, 3, 600)
    assert rows["tenant", "*"].limit.queued == 50 and rows["tenant", "*"].tokens_left is None
    assert rows["user", "*"].limit.requests_per_minute == 60
    assert rows["key", LAUNCH].limit.tokens_per_minute == 7 and rows["key", "*"].limit.tokens_per_minute is None
    assert rows["service", "deepseek-7b"].limit.concurrent == 100
    assert has_budgets(policy) and not has_budgets(made(VLLM))
    over = {(one.kind, one.name): one.tokens_left for one in limit_rows(policy, {"nlp": 5000})}
    assert over["tenant", "nlp"] == 0


# ---- the file ----


def test_the_files_are_read_again_and_a_damaged_one_keeps_the_last(tmp_path: Path) -> None:
    path, callers = tmp_path / service_jobs.FILE_NAME, tmp_path / service_jobs.CALLERS_FILE
    file = ServicesFile(path)
    assert file.current().services == {} and not file.loaded
    policy = made(VLLM, serving={"each_user": {"concurrent": 3}})
    path.write_text(policy.render())
    assert file.current().services == policy.services and file.loaded
    assert file.current().accounts == {} and file.current().limits == ()  # nobody may call
    callers.write_text(policy.render_callers())
    assert file.current() == policy and file.current() is file.current()
    path.write_text(policy.render()[:-40])
    assert file.current() == policy and "sluice apply" in str(file.problem)
    path.write_text(made({**VLLM, "cpus": 2}).render())
    assert file.current().services["deepseek-7b"].cpus == 2 and file.problem is None
    callers.write_text("{")
    assert file.current().accounts == policy.accounts and file.problem is not None


def test_members_and_limits_are_not_in_the_file_that_everybody_reads() -> None:
    policy = made(VLLM, serving={"users": {"bob": {"concurrent": 77}}})
    assert "bob" not in policy.render() and "77" not in policy.render()
    assert "bob" in policy.render_callers() and "/models" not in policy.render_callers()


@pytest.mark.parametrize("text", ["", "[]", '{"schema_version": 2}', '{"services": {"a": {}}}', "{" * 100_000])
def test_files_that_are_none(text: str) -> None:
    with pytest.raises(SluiceError, match="sluice apply"):
        service_jobs.parse(text, source="x")
