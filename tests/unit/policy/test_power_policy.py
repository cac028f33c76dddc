"""The policy's section `power`: what is refused, with its remedy, and what nodes, controllers and plugins read."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from policy import compiled
from policy.control_power import ControlBudget
from policy.document import check, parse
from policy.model import Policy
from policy.node import compile_node
from policy.power import parse_days, parse_watts, show_watts
from policy.power_compile import check_cluster, class_watts, compile_control, compiled_budgets, rule_watts
from policy.wanted import make
from sluice.base.errors import SluiceError
from tests.unit.policy.test_wanted import live

CLASSES = "classes: {a100: {types: [a100]}, l40s: {types: [l40s]}}\n"
TENANTS = "tenants: {physics: {members: [alice], guarantee: {gpus: 4}}, lab: {parent: physics, members: [bob]}}\n"
GPUS = "gpus: {a100: {idle: 50W, least: 100W, default: 400W, most: 400W}}"


def policy(power: str) -> Policy:
    return parse(f"{CLASSES}{TENANTS}power: {{{GPUS}, {power}}}\n")


def refused(power: str, gpus: str = GPUS) -> str:
    return "\n".join(map(str, check(f"{CLASSES}{TENANTS}power: {{{gpus}, {power}}}\n", source="f")[1]))


@pytest.mark.parametrize(
    ("text", "watts"), [("400", 400), ("400W", 400), ("90kW", 90_000), ("1.5 MW", 1_500_000), ("0.4kw", 400)]
)
def test_watts_as_people_write_them(text: str, watts: int) -> None:
    assert parse_watts(text) == watts


@pytest.mark.parametrize("text", ["", "-1W", "4 4", "1.5W", "2000MW", "90kWh", "1e3"])
def test_what_is_no_amount_of_watts(text: str) -> None:
    with pytest.raises(ValueError, match=r"write e\.g\.|want whole watts"):
        parse_watts(text)


def test_watts_are_shown_short() -> None:
    assert [show_watts(one) for one in (0, 999, 90_000, 1_500_000)] == ["0 W", "999 W", "90.0 kW", "1.50 MW"]


def test_days_go_over_the_weeks_end() -> None:
    assert parse_days("sat-mon") == (0, 5, 6) and parse_days("mon-sun") == tuple(range(7)) and parse_days("wed") == (2,)


@pytest.mark.parametrize(
    ("power", "said"),
    [
        ("caps: [{gpu: a100, watts: 500}]", "500 W is outside of what GPUs of class 'a100' take, 100 to 400 W"),
        ("caps: [{watts: 300, at_most: 900}]", "900 W is outside"),
        ("caps: [{watts: 300, at_most: 200}]", "at_most 200 W is less than watts 300 W"),
        ("caps: [{gpu: h100, watts: 300}]", "'h100' is not a class"),
        ("caps: [{tenant: nobody, watts: 300}]", "'nobody' is not a tenant"),
        ("budgets: [{name: b, tenant: nobody, watts: 1kW}]", "'nobody' is not a tenant"),
        ("budgets: [{name: b, watts: 1kW}]", "write one of nodes, switch and tenant"),
        ("budgets: [{name: b, nodes: n1, tenant: lab, watts: 1kW}]", "write one of nodes, switch and tenant"),
        ("budgets: [{name: b, nodes: '*', watts: 1kW}, {name: b, nodes: '*', watts: 2kW}]", "is given twice"),
        ("lower_first: [a, a]", "names 'a' twice"),
        ("budgets: [{name: b, nodes: '*', watts: 1kW, hours: [{days: mon-fri, from: '08:00', to: '18:00', watts: 1kW},"
         " {days: fri, from: '17:00', to: '20:00', watts: 2kW}]}]", "two of its hours have Fri 17:00"),
        ("budgets: [{name: b, nodes: '*', watts: 1kW, hours: [{from: '25:00', watts: 1kW}]}]", "not a time of day"),
        ("budgets: [{name: b, nodes: '*', watts: 1kW, hours: [{days: someday, watts: 1kW}]}]", "not days of the week"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_a_remedy(power: str, said: str) -> None:
    assert said in refused(power)


def test_what_gpus_draw_has_to_be_known_and_in_order() -> None:
    assert "not known what GPUs draw" in refused("budgets: [{name: b, nodes: '*', watts: 1kW}]", "price_kwh: 0.3")
    disordered = "gpus: {a100: {least: 200W, default: 100W, most: 400W}}"
    assert "want least <= default <= most" in refused("price_kwh: 1", disordered)
    idle = "gpus: {a100: {idle: 100W, least: 100W, default: 100W, most: 400W}}"
    assert "is not below least" in refused("price_kwh: 1", idle)


@pytest.mark.parametrize(
    ("power", "said"),
    [
        ("budgets: [{name: b, nodes: 'n[1-3]', watts: 9kW}]", "n3 is not a node of this cluster"),
        ("budgets: [{name: b, nodes: n1, watts: 9W}]", "9 W is less than the 400 W that its GPUs draw without jobs"),
        ("budgets: [{name: b, nodes: '*', watts: 1799W}]", "without jobs and with guaranteed ones"),
        ("budgets: [{name: b, tenant: lab, watts: 999W}]", "without jobs and with guaranteed ones"),
        ("budgets: [{name: b, nodes: '*', watts: 9kW, hours: [{days: sat, watts: 7W}]}]", "7 W is less than the 800 W"),
        ("budgets: [{name: b, switch: row9, watts: 9kW}]", "has no switch 'row9' (known: row1)"),
        ("lower_first: [nobody]", "'nobody' is not a QOS"),
    ],
)  # fmt: skip
def test_what_the_cluster_cannot_keep(tmp_path: Path, power: str, said: str) -> None:
    found = replace(live(tmp_path), switches={"row1": "n[1-2]"})
    with pytest.raises(SluiceError) as raised:
        check_cluster(policy(power), found, {"n1": {"a100": 8}, "n2": {"a100": 8}}, {"b": 1_000})
    assert said in raised.value.what and raised.value.remedy


def test_hours_over_midnight_and_over_the_weeks_end() -> None:
    hours = "[{days: sun, from: '22:00', to: '06:00', watts: 5kW}]"
    found = policy(f"budgets: [{{name: b, nodes: '*', watts: 9kW, hours: {hours}}}]")
    (budget,) = compiled_budgets(found, {}, {})
    assert budget.hours == ["0-360:5000", "9960-10080:5000"]


def test_a_budget_by_the_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    budget = ControlBudget(name="b", nodes="n[1-4]", watts=9000, hours=((480, 1080, 5000),))
    monday = 4 * 86_400  # 1970-01-05
    assert budget.watts_at(monday) == (9000, 480)
    assert budget.watts_at(monday + 9 * 3600) == (5000, 1080)
    assert budget.watts_at(monday + 20 * 3600) == (9000, 480)
    assert budget.has_node("n3") and not budget.has_node("n5")


def test_what_nodes_controllers_and_plugins_read() -> None:
    found = policy(
        "price_kwh: 0.3, thermal: {after: 5s}, lower_first: [lab], lowest_cap: 50%, "
        "caps: [{gpu: a100, tenant: lab, watts: 200}, {watts: 300, at_most: 350}], "
        "budgets: [{name: hall, nodes: '*', watts: 9kW}, {name: row, switch: row1, watts: 8kW}, "
        "{name: p, tenant: physics, watts: 2kW}]"
    )
    power = compile_node(found, {"row1": "n[1-2]"}).power
    assert [(cap.gpu_types, cap.accounts, cap.watts, cap.at_most) for cap in power.caps] == [
        (("a100",), ("lab",), 200, None), ((), (), 300, 350),
    ]  # fmt: skip
    assert power.report and power.thermal is not None and power.thermal.after_s == 5
    control = compile_control(found, {"row1": "n[1-2]"})
    assert [(one.name, one.nodes, one.accounts) for one in control.budgets] == [
        ("hall", "*", ()), ("row", "n[1-2]", ()), ("p", "", ("physics", "lab")),
    ]  # fmt: skip
    assert control.guaranteed == ("physics",) and control.lowest_percent == 50 and control.price_kwh == 0.3
    budgets = compiled_budgets(found, {"row1": "n[1-2]"}, {"row": 7})
    assert [(one.name, one.nodes, one.tenant) for one in budgets] == [
        ("hall", "*", None), ("row", "n[1-2]", None), ("p", None, "physics"),
    ]  # fmt: skip
    assert class_watts(found, "a100")["power_start_least_w"] == 200 and class_watts(found, "l40s") == {}
    assert dict(rule_watts(found, "lab"))["a100"] == {"power_w": 200, "power_most_w": 200}
    assert dict(rule_watts(found, "physics"))["a100"] == {"power_w": 300, "power_most_w": 350}
    text = compiled.CompiledPolicy(budgets=budgets).render()
    assert text.count("[budget ") == 3 and text.count("kept = 7") == 1


def test_budgets_keep_what_guarantees_start_with(tmp_path: Path) -> None:
    """Of a part of the nodes that part; of a tenant what is guaranteed to it and to those below it."""
    budgets = (
        "[{name: hall, nodes: '*', watts: 20kW}, {name: row, nodes: n1, watts: 9kW}, "
        "{name: lab, tenant: lab, watts: 9kW}]"
    )
    found = parse(
        "classes: {h100: {types: [h100]}}\n"
        "tenants:\n  physics: {guarantee: {gpus: 6}}\n  lab: {parent: physics, guarantee: {gpus: 2}}\n  guests: {}\n"
        f"power: {{gpus: {{h100: {{idle: 50W, least: 100W, default: 400W, most: 400W}}}}, budgets: {budgets}}}\n"
    )
    policy = make(found, live(tmp_path)).compiled
    assert {one.name: one.kept for one in policy.budgets} == {"hall": 6 * 190, "row": 2 * 190, "lab": 2 * 190}
    guaranteed = {one.account: [rule.gpus_guaranteed for rule in one.class_rules.values()] for one in policy.tenants}
    assert guaranteed == {"physics": [6], "lab": [2], "guests": []}


def test_a_plan_warns_where_guaranteed_jobs_can_have_more_than_their_part(tmp_path: Path) -> None:
    """Six of sixteen GPUs are guaranteed: three of them are kept watts for on each node, and all six can be on one."""
    text = (
        "level: {}\nclasses: {{h100: {{types: [h100]}}}}\ntenants:\n  physics: {{guarantee: {{gpus: 6}}}}\n"
        "power: {{gpus: {{h100: {{idle: 50W, least: 100W, default: 400W, most: 400W}}}}, "
        "budgets: [{{name: hall, nodes: '*', watts: 20kW}}, {{name: row, nodes: n1, watts: {}}}]}}\n"
    )
    needed = 8 * 50 + 6 * 190
    for watts, said in ((needed, 0), (needed - 1, 1)):
        notes = [note for note in make(parse(text.format("place", watts)), live(tmp_path)).notes if "power" in note]
        assert len(notes) == said and all("budget row: guaranteed jobs can have 6 GPUs there" in one for one in notes)
    assert "jobs wait for watts at level place" in "".join(
        make(parse(text.format("admit", 9000)), live(tmp_path)).notes
    )


def test_without_the_section_nothing_is_read() -> None:
    found = compile_node(parse("{}"))
    assert not found.power.caps and not found.power.report and not found.power_control.budgets
