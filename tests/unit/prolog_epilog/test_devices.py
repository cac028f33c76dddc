"""The node's GPUs by their numbers, and the hints for a task on them."""

from __future__ import annotations

import pytest

from gres_probe.inventory import Inventory
from prolog_epilog.devices import devices_of, select
from prolog_epilog.hints import hints, without_own
from sluice.base.errors import SluiceError
from tests.unit.prolog_epilog.examples import device


def test_hints_name_what_is_near() -> None:
    assert hints([device(0), device(5)]) == {
        "SLUICE_GPU_NUMA": "0,1",
        "SLUICE_GPU_CORES": "0-3",
        "SLUICE_GPU_NICS": "mlx5_0,mlx5_5",
        "NCCL_IB_HCA": "=mlx5_0,mlx5_5",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    assert hints([]) == {}
    assert hints([device(0, nics=("mlx5_0", "mlx5_1"))], ["mlx5_1", "mlx5_2"])["NCCL_IB_HCA"] == "=mlx5_1"
    assert "NCCL_IB_HCA" not in hints([device(0)], [])
    assert hints([device(0, vendor="intel", numa_node=None, cores="", nics=())]) == {
        "ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1"
    }


def test_what_a_user_has_set_is_left_out() -> None:
    export = {"NCCL_IB_HCA": "=mlx5_0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "SLUICE_GPU_NUMA": "0"}
    assert without_own(export, ["NCCL_IB_HCA", "PATH"]) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "SLUICE_GPU_NUMA": "0",
        "SLUICE_SET": "CUDA_DEVICE_ORDER=PCI_BUS_ID",
    }


def test_devices_are_numbered_as_in_gres_conf() -> None:
    with pytest.raises(SluiceError, match=r"GPU 2 of gres.conf: this node's drivers show 2 devices"):
        select([device(0), device(1)], [2])
    assert [one.uuid for one in select([device(0), device(1)], [1, 0])] == ["GPU-1", "GPU-0"]
    assert devices_of(Inventory("n1")) == []
