"""Replicas: what replicad may ask, how often it is done, and how many there are at most."""

from __future__ import annotations

import json
import os
import pwd
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from policy.service_jobs import ServicePolicy, ServicesPolicy
from sluice.actd import server
from sluice.actd.jobs import Jobs
from sluice.actd.server import Actd
from sluice.exchange.acts import ActError, Proof, Request, parse_answer, render_request
from sluice.exchange.launches import LaunchRequest, parse_launch, render_launch
from tests.unit.actd.world import World

SERVE = 990
_SBATCH = """
for word in "$@"; do case $word in
    --job-name=*) name=${word#*=};; --qos=*) qos=${word#*=};; --export-file=*) cat /dev/fd/${word#*=} >SEEN/exported;;
esac; done
[ -e SEEN/refuse ] && { cat SEEN/refuse >&2; exit 1; }
number=$(cat SEEN/next 2>/dev/null || echo 100); echo $((number + 1)) >SEEN/next
echo "$@" >>SEEN/calls; cat >SEEN/script
echo "$number RUNNING alice ${qos:-physics} $name" >>SEEN/jobs
[ -e SEEN/lost ] && { echo "sbatch: error: Socket timed out on send/recv operation" >&2; exit 1; }
echo $number
"""


class Serve:
    """The helper of `world` with a policy of services."""

    def __init__(self, world: World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.monkeypatch = world, monkeypatch
        (world.slurm / "bin/sbatch").write_text("#!/bin/sh\n" + _SBATCH.replace("SEEN", str(world.seen)))
        self.conf = folder / "etc"
        self.conf.mkdir()
        (self.conf / "slurm.conf").write_text("SlurmctldHost=ctl1\nSlurmctldHost=ctl2(10.0.0.2)\nSlurmUser=root\n")
        world.config["SLURM_CONF"] = str(self.conf / "slurm.conf")
        me = pwd.getpwuid(os.getuid())

        def known(name: str) -> pwd.struct_passwd:
            if name == "sluice-serve":
                return pwd.struct_passwd((name, "x", SERVE, SERVE, "", "/", "/bin/sh"))
            if name in ("alice", "root", me.pw_name):
                return me
            raise KeyError(name)

        monkeypatch.setattr(server.pwd, "getpwnam", known)
        self.write(words={}, pair={"most": 2})

    def write(self, **services: dict[str, Any]) -> None:
        usual = {"tenant": "physics", "user": "alice", "engine": "vllm", "model": "/m", "gres": "gpu:1", "most": 1}
        policy = ServicesPolicy(
            services={name: ServicePolicy(name=name, **{**usual, **own}) for name, own in services.items()}
        )
        (self.conf / "sluice.services.json").write_text(policy.render())
        (self.conf / "sluice.callers.json").write_text(policy.render_callers())
        for name in ("sluice.services.json", "sluice.callers.json"):
            os.utime(self.conf / name, ns=(time.time_ns(), time.time_ns()))

    @property
    def actd(self) -> Actd:
        return self.world.actd

    def ask(self, do: str, service: str = "words", launch: str = "a" * 16, *, lent: bool = False) -> dict[str, Any]:
        words = {"version": 2, "do": do, "service": service, "launch": launch, "lent": lent}
        line = json.dumps(words).encode() + b"\n"
        return parse_answer(self.actd.answer(line, SERVE))

    def launch(self, launch: str = "a" * 16, service: str = "words") -> int:
        return int(self.ask("launch_replica", service, launch)["job_id"])

    def refusal(self, do: str, *words: str) -> ActError:
        with pytest.raises(ActError) as caught:
            self.ask(do, *words)
        return caught.value

    def jobs(self) -> list[str]:
        path = self.world.seen / "jobs"
        return path.read_text().splitlines() if path.exists() else []

    def became(self, number: int, state: str) -> None:
        lines = [line.replace("RUNNING", state) if line.startswith(f"{number} ") else line for line in self.jobs()]
        (self.world.seen / "jobs").write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def serve(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    return Serve(world, tmp_path, monkeypatch)


def test_a_launch_is_the_policys_job_alone(serve: Serve) -> None:
    assert serve.launch() == 100
    (call,) = serve.world.calls()
    for word in ("--account=physics", "--gres=gpu:1", f"--job-name=sluice-serve.words.{'a' * 16}", "--no-requeue"):
        assert word in call.split()
    script = serve.world.read("script")
    spec = json.loads(script.splitlines()[2])
    assert spec["registries"] == ["ctl1:6824", "10.0.0.2:6824"] and spec["registry_uid"] == SERVE
    assert script.splitlines()[1].split()[1].endswith("bin/sluice-replica")
    assert serve.world.read("exported").split("\0")[1] == "USER=alice"
    (entry,) = serve.world.audited()
    assert (entry["user"], entry["action"], entry["subject"]) == ("sluice-serve", "serve launch", "100")
    assert entry["detail"]["launch"] == "a" * 16 and entry["detail"]["account"] == "physics"


def test_the_same_launch_is_one_job(serve: Serve) -> None:
    assert serve.launch() == serve.launch() == 100
    serve.world.begin()
    assert serve.launch() == 100 and len(serve.jobs()) == 1


def test_a_launch_whose_answer_was_lost_is_found_in_slurm(serve: Serve) -> None:
    (serve.world.seen / "lost").touch()
    assert serve.refusal("launch_replica").status == 503 and len(serve.jobs()) == 1
    (serve.world.seen / "lost").unlink()
    assert serve.launch() == 100 and len(serve.jobs()) == 1


def test_a_launch_that_may_still_come_is_not_made_again_and_counts(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch has timed out, and slurmctld has not taken its message yet."""
    real = Jobs.queue

    def lost(*_: Any, **__: Any) -> int:
        raise ActError(503, "Socket timed out", retry_after=5)

    monkeypatch.setattr(Jobs, "queue", lost)
    for launch in ("a" * 16, "b" * 16):
        assert serve.refusal("launch_replica", "words", launch).status == 503
    monkeypatch.setattr(Jobs, "queue", real)
    assert "not known yet" in serve.refusal("launch_replica").what and not serve.jobs()
    assert serve.refusal("launch_replica", "words", "c" * 16).status == 409, "both could still become jobs"
    serve.world.begin()
    serve.actd.recover()
    assert serve.refusal("launch_replica", "words", "c" * 16).status == 409, "also for the next process"
    now = time.time()
    monkeypatch.setattr("sluice.actd.replicas.time.time", lambda: now + 20)
    assert serve.launch() == 100 and serve.launch("c" * 16) == 101
    monkeypatch.setattr("sluice.actd.replicas.time.time", lambda: now + 3600)
    assert "begun long ago" in serve.refusal("launch_replica", "words", "b" * 16).what


def test_launches_go_on_while_those_of_the_process_before_are_found(serve: Serve) -> None:
    before = serve.actd.replicas._before

    class Until(float):
        def __lt__(self, now: float) -> bool:
            before["found meanwhile"] = 0.0
            return super().__lt__(now)

    before["mark"] = Until(0.0)
    assert serve.launch() == 100


def test_never_more_living_jobs_than_the_most_and_one(serve: Serve) -> None:
    assert [serve.launch(one * 16) for one in "ab"] == [100, 101]
    error = serve.refusal("launch_replica", "words", "c" * 16)
    assert error.status == 409 and "at most 1" in error.what
    serve.became(100, "PENDING")
    assert serve.refusal("launch_replica", "words", "c" * 16).status == 409
    serve.became(101, "CANCELLED")
    assert serve.launch("c" * 16) == 102
    assert [serve.launch(one * 16, "pair") for one in "def"] == [103, 104, 105], "each service has its own"


def test_guaranteed_replicas_are_bounded_and_all_others_are_over_quota_work(serve: Serve) -> None:
    serve.write(words={"most": 5, "guaranteed": 1}, own={"most": 5})
    assert [serve.launch(one * 16) for one in "ab"] == [100, 101], "one and its successor"
    error = serve.refusal("launch_replica", "words", "c" * 16)
    assert error.status == 409 and "over-quota work" in error.what
    assert serve.ask("launch_replica", "words", "c" * 16, lent=True)["job_id"] == 102
    serve.became(100, "COMPLETED")
    assert serve.launch("d" * 16) == 103
    assert serve.ask("launch_replica", "own", "e" * 16, lent=True)["job_id"] == 104, "it does not borrow"
    assert [line.split()[3] for line in serve.jobs()] == ["physics", "physics", "sluice_over", "physics", "physics"]


def test_nor_when_all_ask_at_once(serve: Serve) -> None:
    answers: list[bytes] = []

    def ask(number: int) -> None:
        line = render_launch(LaunchRequest("launch_replica", "pair", f"{number:016x}"))
        answers.append(serve.actd.answer(line, SERVE))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(serve.jobs()) == 3 and sum(b'"status": 409' in one for one in answers) == 9


def test_what_slurm_refuses_was_not_done(serve: Serve) -> None:
    (serve.world.seen / "refuse").write_text("sbatch: error: Invalid account\n")
    error = serve.refusal("launch_replica")
    assert error.status == 422 and "Invalid account" in error.what
    (serve.world.seen / "refuse").unlink()
    assert serve.launch() == 100


def test_no_other_service_and_no_other_user(serve: Serve) -> None:
    assert serve.refusal("launch_replica", "other").status == 404
    serve.write(words={"paused": True}, roots={"user": "root"}, nobodys={"user": "no-such-user"})
    assert serve.refusal("launch_replica", "words").status == 422
    assert serve.refusal("launch_replica", "roots").status == 403
    assert serve.refusal("launch_replica", "nobodys").status == 403
    assert not serve.jobs() and not serve.world.calls()
    assert {one["action"] for one in serve.world.audited()} == {"serve refused"}


def test_it_ends_the_job_of_that_name_and_user_alone(serve: Serve) -> None:
    serve.launch()
    with (serve.world.seen / "jobs").open("a") as jobs:
        jobs.write(f"7 RUNNING mallory physics sluice-serve.words.{'e' * 16}\n8 RUNNING alice physics train\n")
        jobs.write(f"9 RUNNING alice physics sluice-serve.pair.{'d' * 16}\n")
    for launch in ("e" * 16, "d" * 16, "f" * 16):
        assert serve.ask("end_replica", "words", launch) == {"schema_version": 1, "job_id": None, "living": False}
    assert not [call for call in serve.world.calls() if call.startswith("scancel")]
    assert serve.ask("end_replica")["job_id"] == 100
    assert serve.world.calls()[-1] == "scancel --verbose 100"
    serve.became(100, "COMPLETED")
    assert serve.ask("end_replica")["living"] is False
    assert len([call for call in serve.world.calls() if call.startswith("scancel")]) == 1


def test_a_service_that_has_gone_from_the_policy_can_be_ended(serve: Serve) -> None:
    serve.launch()
    serve.write(pair={})
    serve.world.begin()
    assert serve.refusal("launch_replica").status == 404
    assert serve.ask("end_replica")["job_id"] == 100
    assert serve.refusal("end_replica", "never").status == 404


def test_replicad_may_ask_nothing_else_and_nobody_else_this(serve: Serve) -> None:
    proof = serve.world.proof("alice")
    line = render_request(Request("submit", proof, {"script": "#!/bin/sh\n"}, "id", None, ""))
    with pytest.raises(ActError) as caught:
        parse_answer(serve.actd.answer(line, SERVE))
    assert caught.value.status == 400 and not serve.world.calls()
    launch = render_launch(LaunchRequest("launch_replica", "words", "a" * 16))
    for uid in (0, 33, None):
        with pytest.raises(ActError) as caught:
            parse_answer(serve.actd.answer(launch, uid))
        assert caught.value.status == 400 and not serve.jobs()
    assert serve.world.refusal("launch_replica", service="words", launch="a" * 16).status == 400
    assert Proof("sluice", "").text == ""


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "null", "[]", "[" * 400, '{"version":2}',
        '{"version":1,"do":"launch_replica","service":"a","launch":"0123456789abcdef","lent":false}',
        '{"version":2,"do":"submit","service":"a","launch":"0123456789abcdef","lent":false}',
        '{"version":2,"do":["launch_replica"],"service":"a","launch":"0123456789abcdef","lent":false}',
        '{"version":2,"do":"launch_replica","service":"../a","launch":"0123456789abcdef","lent":false}',
        '{"version":2,"do":"launch_replica","service":"-a","launch":"0123456789abcdef","lent":false}',
        '{"version":2,"do":"launch_replica","service":"a b","launch":"0123456789abcdef","lent":false}',
        '{"version":2,"do":"launch_replica","service":"a","launch":"0123456789ABCDEF","lent":false}',
        '{"version":2,"do":"launch_replica","service":"a","launch":"0123456789abcdef\\n","lent":false}',
        '{"version":2,"do":"launch_replica","service":"a","launch":7,"lent":false}',
        '{"version":2,"do":"launch_replica","service":"a","launch":"0123456789abcdef","user":"root","lent":false}',
        '{"version":2,"do":"launch_replica","service":"a","launch":"0123456789abcdef"}',
        '{"version":2,"do":"launch_replica","service":"a","launch":"0123456789abcdef","lent":1}',
    ],
)  # fmt: skip
def test_hostile_lines(text: str) -> None:
    with pytest.raises(ActError) as caught:
        parse_launch(text.encode())
    assert caught.value.status == 400
