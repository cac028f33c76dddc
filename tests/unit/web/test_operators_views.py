"""What operators' views get, and what their forms ask of root's helper."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sluice.client import models
from sluice.web.access import Viewer
from sluice.web.pages import operators
from sluice.web.pages.view import Done
from sluice.web.problems import ProblemError
from tests.web.demo_site import Demo, DemoSite


@pytest.fixture
def site(tmp_path: Path) -> DemoSite:
    return DemoSite(Demo(40), tmp_path)


def viewer(site: DemoSite, user: str = "oper") -> Viewer:
    return Viewer(user, site.site.store)


def asked(site: DemoSite) -> list[tuple[str, dict[str, Any]]]:
    """Notes what the helper is asked."""
    found: list[tuple[str, dict[str, Any]]] = []
    answer = site.site.acts.ask

    async def ask(viewer: Viewer, do: str, **words: Any) -> dict[str, Any]:
        found.append((do, words))
        return await answer(viewer, do, **words)

    site.site.acts.ask = ask  # type: ignore[method-assign]
    return found


def test_nodes_are_chosen_by_state_type_and_name_a_page_at_a_time(
    site: DemoSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    def names(**words: str) -> list[str]:
        return [row["name"] for row in operators.nodes_view(site.site, viewer(site), words)["nodes"]]

    site.snapshot.put_one("nodes", "gpu01", {**site.site.store.rows("nodes")["gpu01"], "reason": "changed"})
    site.snapshot.put_one("gpus", "gpu01/0", {**site.site.store.rows("gpus")["gpu01/0"], "temperature_c": 99.0})
    site.apply()  # what changed is last in the store, and not on the page
    assert (
        names()[0] == "gpu01"
        and names(state="out") == ["gpu05"]
        and names(type="mi300x") == ["gpu04"]
        and names(q="U02") == ["gpu02"]
    )
    monkeypatch.setattr(operators, "ON_A_PAGE", 2)
    pages = [names(page=text) for text in ("1", "2", "3", "4", "x", "-1")]
    assert pages == [
        ["gpu01", "gpu02"],
        ["gpu03", "gpu04"],
        ["gpu05"],
        ["gpu05"],
        ["gpu01", "gpu02"],
        ["gpu01", "gpu02"],
    ]


def test_a_node_shows_its_own_and_what_a_tenant_may_not_see_is_left_out(site: DemoSite) -> None:
    seen = operators.node_view(site.site, viewer(site), "gpu03")
    assert sorted(row["state"] for row in seen["health"]) == ["fault", "out"]
    assert {one["kind"] for one in seen["history"]} == {"health.fault", "health.out", "health.requeue"}
    site.snapshot.put_one("gpus", "gpu03/0", {**site.site.store.rows("gpus")["gpu03/0"], "temperature_c": 99.0})
    site.apply()
    seen = operators.node_view(site.site, viewer(site), "gpu03")
    assert [gpu["index"] for gpu in seen["gpus"]] == list(range(8)) and seen["drawing"].bars
    mine = operators.node_view(site.site, viewer(site, "farid"), "gpu03")
    assert mine["health"] == [] and {job["user"] for job in mine["jobs"]} <= {"farid"}
    assert {one["fields"].get("job") for one in mine["history"]} <= {job["id"] for job in mine["jobs"]}
    for name in ("gpu99", "x" * 300, "../gpu03"):
        with pytest.raises(ProblemError) as missing:
            operators.node_view(site.site, viewer(site), name)
        assert missing.value.status == 404


def test_forms_ask_for_what_their_fields_say_and_for_nothing_else(site: DemoSite) -> None:
    done = asked(site)

    def send(form: Any, **fields: str) -> Any:
        return asyncio.run(form(site.site, viewer(site), fields, {"silence": fields.get("id", "")}))

    there = send(operators.return_form, node="gpu03", gpus="5", reason="card replaced", back="node")
    assert there == Done("/nodes/gpu03", "GPU 5: returned to service")
    send(operators.silence_form, rule="gpu-out", seconds="3600", comment="known")
    send(operators.end_silence_form, id="0123456789ab")
    assert done == [
        ("health-return", {"node": "gpu03", "gpus": [5], "reason": "card replaced"}),
        ("silence", {"rule": "gpu-out", "subject": "*", "seconds": 3600, "comment": "known"}),
        ("silence-end", {"id": "0123456789ab"}),
    ]
    for form, fields in (
        (operators.return_form, {"node": "a b"}), (operators.silence_form, {"rule": "x", "seconds": "forever"}),
        (operators.silence_form, {"seconds": "3600"}), (operators.end_silence_form, {"id": "../policy"}),
    ):  # fmt: skip
        with pytest.raises(ProblemError):
            send(form, **fields)
    assert len(done) == 3


def test_a_policy_is_checked_then_planned_then_applied_by_the_plans_hash(site: DemoSite) -> None:
    done = asked(site)

    def send(**fields: str) -> dict[str, Any]:
        found = asyncio.run(operators.policy_form(site.site, viewer(site, "root"), fields, {}))
        assert isinstance(found, dict)
        return found

    bad = send(do="plan", text="tenants: {physics: -1}\r\n")
    assert bad["checked"]["mistakes"] and bad["plan"] is None and bad["text"] == "tenants: {physics: -1}\n"
    plan = send(do="plan", text="tenants: {}\n")
    models.PolicyPlan.model_validate(plan["plan"])  # as root's helper writes it
    assert [change["sign"] for change in plan["changes"]] == ["+", "~", "-", "~"]
    assert plan["changes"][1]["lines"][:2] == [("-", "GrpTRES: gres/gpu=16"), ("+", "GrpTRES: gres/gpu=24")]
    assert [sign for sign, _ in plan["changes"][3]["lines"]] == ["-", "+"]
    assert send(do="apply", hash=plan["plan"]["hash"])["applied"]["changes"] == 4
    assert [do for do, _ in done] == ["policy-check", "policy-check", "policy-plan", "policy-apply"]
    assert done[-1][1] == {"hash": "a" * 64}
    with pytest.raises(ProblemError):
        send(do="apply", hash="../../etc")


def test_power_is_shown_by_who_draws_most(site: DemoSite, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"name": "hungry", "gpus": 8, "power_w": 9e3, "bound_w": 9e3, "capped_gpus": 0, "silent_gpus": 0}
    site.snapshot.put_one("power-nodes", "hungry", row)
    site.apply()
    monkeypatch.setattr(operators, "ON_A_PAGE", 4)
    found = operators.power_view(site.site, viewer(site), {})
    assert [one["name"] for one in found["nodes"]] == ["hungry", "gpu01", "gpu02", "gpu03"] and found["left_out"] == 2
    assert [one["name"] for one in found["budgets"]] == ["hall", "row1", "guests"] and len(found["tenants"]) == 4


def test_events_are_found_by_kind_and_text_the_newest_first(site: DemoSite) -> None:
    def kinds(**words: str) -> list[str]:
        return [one["kind"] for one in operators.events_view(site.site, viewer(site), words)["events"]]

    assert kinds()[0] == "health.warning" and kinds(kind="failover") == ["failover.back"]
    assert kinds(q="XID") == ["health.out", "health.fault"]
    failover = operators.failover_view(site.site, viewer(site), {})
    assert [one["kind"] for one in failover["findings"]] == ["remark", "ok", "ok"]
    assert [one["kind"] for one in failover["history"]] == ["drill", "failover.back", "takeover"]
