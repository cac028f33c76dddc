"""The benchmarks of allocation and latency, on small inputs: that they measure what they say."""

from __future__ import annotations

import json

import pytest

from benchmarks import core_latency, openb, openb_trace
from sluice.base.errors import SluiceError
from sluice.core.placement import Policy

NODES = "sn,cpu_milli,memory_mib,gpu,model\n"
PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n"


@pytest.fixture
def nodes(tmp_path):
    path = tmp_path / "nodes.csv"
    path.write_text(NODES + "".join(f"n{i},32000,65536,4,{'A' if i % 4 else 'B'}\n" for i in range(16)))
    return path


@pytest.fixture
def pods(tmp_path):
    path = tmp_path / "openb_pod_list_small.csv"
    kinds = ["8000,8192,1,1000,", "4000,4096,1,470,", "4000,4096,1,500,B", "6000,4096,0,0,", "2000,4096,1,300,B|A"]
    path.write_text(PODS + "".join(f"p{i:03},{kinds[i % 5]}\n" for i in range(99, -1, -1)))
    return path


def test_reading(nodes, pods, tmp_path):
    assert openb_trace.read_nodes(nodes)[4] == openb_trace.Node(32000, 65536, 4, "B")
    read = openb_trace.read_pods(pods)
    assert len(read) == 100
    assert read[0] == openb_trace.PodShape(8000, 8192, 1, 1000, ())  # by name, not as listed
    assert read[4].models == ("A", "B")
    assert read[3].gpu_milli_in_all == 0
    spot = tmp_path / "spot.csv"
    spot.write_text("gpu_model,gpu_capacity_num,cpu_num,node_name\nX,8,96,0\n")
    assert openb_trace.read_nodes(spot, host_memory_mib_per_cpu=10) == [openb_trace.Node(96000, 960, 8, "X")]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("name,cpu_milli\n", "column 'memory_mib' is missing"),
        ("\0\ufffd", "column 'name' is missing"),
        (PODS + "p,1\n", ":2: the number of fields"),
        (PODS + f"p,{'9' * 5000},1,1,100,\n", ":2: cpu_milli '999"),
        (PODS + "p,1,1,1,1001,\n", ":2: 1 x 1001 gpu_milli"),
        (PODS + "p,1,1,2,500,\n", ":2: 2 x 500 gpu_milli"),
        (PODS + "p,1,1,1,100,\nq,x,1,1,1,\n", ":3: cpu_milli 'x': must be a whole number"),
        (PODS + "p,1,1,0,0,\n", "no pod asks a GPU"),
    ],
)
def test_bad_pods(tmp_path, text, complaint):
    path = tmp_path / "pods.csv"
    path.write_text(text)
    with pytest.raises(SluiceError, match=complaint):
        openb_trace.read_pods(path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "column 'cpu_milli' is missing"),
        (b"\xff\xdc\0PK\x03", "column 'cpu_milli' is missing"),
        (NODES.encode(), "no node with a GPU"),
        (NODES.encode() + b"n,1000,1,17,A\n", ":2: gpu '17': must be between 0 and 16"),
        (b"gpu_model,gpu_capacity_num,cpu_num,node_name\nX,8,-1,0\n", ":2: cpu_num '-1'"),
    ],
)
def test_bad_nodes(tmp_path, content, complaint):
    path = tmp_path / "nodes.csv"
    path.write_bytes(content)
    with pytest.raises(SluiceError, match=complaint):
        openb_trace.read_nodes(path)


def test_lists_without_models(tmp_path):
    path = tmp_path / "pods.csv"
    path.write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\np,4000,8192,1,470\n")
    assert openb_trace.read_pods(path) == [openb_trace.PodShape(4000, 8192, 1, 470, ())]


def test_typical_shapes(pods):
    read = openb_trace.read_pods(pods)
    assert [count for _, count in openb_trace.typical_shapes(read)] == [20] * 5
    assert len(openb_trace.typical_shapes(read, percent=60)) == 3
    assert len(openb_trace.typical_shapes(read, percent=61)) == 4


def test_arrivals(pods):
    read = openb_trace.read_pods(pods)
    order = openb.arrivals(read, 64000, seed=3)
    asked = sum(pod.gpu_milli_in_all for pod in order)
    assert sorted(map(repr, order[:100])) == sorted(map(repr, read))
    assert order == openb.arrivals(read, 64000, seed=3) != openb.arrivals(read, 64000, seed=4)
    assert 64000 * 1.3 - 1000 < asked <= 64000 * 1.3
    assert sum(pod.gpu_milli_in_all for pod in openb.arrivals(read, 20000, seed=3)) <= 26000  # fewer than listed


def test_allocation_is_read_where_all_has_been_asked(nodes, pods):
    replay = openb.Replay(openb_trace.read_nodes(nodes), openb_trace.read_pods(pods), seed=1)
    placed = replay.asked.cumsum() <= 32000  # the first half finds a place
    assert replay.allocation_percent(placed) == pytest.approx(50, abs=1)
    assert replay.allocation_percent(placed | True) == pytest.approx(100, abs=0.5)


def test_fragmented_share(tmp_path):
    """Two nodes of two GPUs; two shapes, a half and a whole GPU; the first pod leaves a half and three whole GPUs."""
    listed = [openb_trace.Node(4000, 1000, 2, "A")] * 2
    half, whole = openb_trace.PodShape(1000, 1, 1, 500, ()), openb_trace.PodShape(1000, 1, 1, 1000, ())
    replay = openb.Replay(listed, [half, whole], seed=1)
    replay.order, replay.numbers = [half], replay.numbers[:1] * 0 + replay.shapes.index(half)
    replay.asked, replay.counts = replay.asked[:1], replay.counts[:1] | True
    answer = replay.run(Policy.FIRST_FIT, learn=False)
    assert answer.fragmented_percent == pytest.approx(100 * (0 + 500) / 2 / 3500)


def test_openb(nodes, pods, tmp_path):
    published = tmp_path / "published.json"
    means = {"FGD": {"100": {"mean": 90.0}}, "Random": {"100": {"mean": 0.0}}}
    published.write_text(json.dumps({"allocation_percent": {"openb_pod_list_small": means}}))
    result = openb.run(nodes, [pods], published, seeds=2, first_seed=1)
    ours, fgd = result.figures["small_sluice_allocation_percent"], result.peer["small_fgd_allocation_percent"]
    assert 70 < ours <= 100
    assert result.figures["small_gain_over_fgd_points"] == pytest.approx(ours - fgd)
    assert result.figures["gain_over_fgd_least_points"] == result.figures["small_gain_over_fgd_points"]
    gains = result.spread["small_gain_over_fgd_points"]
    assert result.figures["small_gain_over_fgd_worst_seed_points"] == min(gains)
    assert result.figures["small_fgd_off_published_points"] == pytest.approx(abs(fgd - 90))
    assert result.must["small_random_off_published_points"] == ("<=", 0.3)
    again = openb.run(nodes, [pods], published, seeds=2, first_seed=1)
    for figure in ("allocation_percent", "fragmented_percent"):
        assert again.spread[f"small_sluice_{figure}"] == result.spread[f"small_sluice_{figure}"]
    published.write_text("{}")
    with pytest.raises(SluiceError, match="allocation_percent"):
        openb.run(nodes, [pods], published, seeds=1, first_seed=1)


def test_openb_with_moves(tmp_path):
    """Pods of a half leave holes of a half; where they move together, pods of a whole GPU start."""
    nodes, pods = tmp_path / "nodes.csv", tmp_path / "openb_pod_list_small.csv"
    nodes.write_text(NODES + "".join(f"n{i},64000,65536,4,A\n" for i in range(50)))
    kinds = ["1000,1024,1,300,", "1000,1024,1,420,", "1000,1024,1,650,", "1000,1024,1,1000,"]
    pods.write_text(PODS + "".join(f"p{i:03},{kinds[i % 4]}\n" for i in range(40)))
    options = {"published": None, "seeds": 4, "first_seed": 1, "migrate": True}
    result = openb.run(nodes, [pods], **options)
    figures = result.figures
    assert figures["small_sluice_moving_allocation_percent"] > figures["small_sluice_allocation_percent"]
    assert 0 < figures["small_sluice_moving_moved_percent_most"] <= 5
    assert figures["small_sluice_moving_plan_longest_ms"] > 0
    assert 0 < result.peer["small_fgd_moving_moved_percent"] <= 5
    assert result.must["small_sluice_moving_moved_percent_most"] == ("<=", 5)
    none = openb.run(nodes, [pods], **options, savable_percent=0)
    assert none.figures["small_sluice_moving_moved_percent_most"] == 0
    for policy, figure in (("sluice", none.figures), ("fgd", none.peer)):
        assert figure[f"small_{policy}_moving_allocation_percent"] == figure[f"small_{policy}_allocation_percent"]


def test_core_latency(nodes, pods):
    options = {"checked": 200, "use_percent": 60, "seeds": 1, "first_seed": 1, "peer_decisions": 20}
    result = core_latency.run(nodes, pods, decisions=2000, large_gpus=200, **options)
    figures = result.figures
    assert (figures["gpus"], figures["large_gpus"]) == (64, 200)
    assert figures["wrong_decisions"] == 0
    assert figures["checked_decisions"] == 200
    assert 50 < figures["use_percent"] <= 60
    assert figures["never_seen_before_share"] > 0.5
    assert 0 < figures["place_p50_us"] <= figures["place_p99_us"] <= figures["place_p999_us"]
    assert set(core_latency.MUST) <= set(figures)
    with pytest.raises(SluiceError, match="--large-gpus 64"):
        core_latency.run(nodes, pods, decisions=1000, large_gpus=64, **options)


def test_a_full_cluster_refuses(nodes, pods):
    load = core_latency.Load(openb_trace.read_nodes(nodes), openb_trace.read_pods(pods))
    answer = load.run(Policy.SLUICE, 100, 500, seed=1, checked=True)
    assert answer["wrong"] == 0
    assert 50 < answer["refused"] < 500
    assert answer["use_percent"] > 60


def test_grow():
    listed = [openb_trace.Node(1, 1, gpus, "A") for gpus in (8, 1)]
    assert [node.gpus for node in core_latency.grow(listed, 19)] == [8, 1, 8, 1, 1]
    assert sum(node.gpus for node in core_latency.grow(listed[:1], 20)) == 16
