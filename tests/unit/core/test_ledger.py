from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from sluice.core import lib
from sluice.core.errors import CoreError
from sluice.core.ledger import ALIGNMENT, UNLIMITED, Ledger, Shape

GIB = 2**30
SHAPE = Shape(devices=2, owners=2, processes=4)


def new_ledger(region: mmap.mmap | None = None) -> Ledger:
    ledger = Ledger.create(region or mmap.mmap(-1, SHAPE.size()), SHAPE)
    for device in range(SHAPE.devices):
        ledger.set_device(device, capacity=80 * GIB, granularity=2 * 2**20)
        ledger.set_quota(0, device, UNLIMITED)
        ledger.set_quota(1, device, 10 * GIB)
    return ledger


def test_life_of_a_charge() -> None:
    ledger = new_ledger()
    process = ledger.join(1, pid=77, start=5)
    charge = ledger.reserve(process, 0, 3 * GIB - 1)
    assert (charge.asked, charge.charged, charge.device, charge.committed) == (3 * GIB - 1, 3 * GIB, 0, False)
    assert ledger.owner_usage(1, 0).reserved == 3 * GIB
    ledger.commit(process, charge)
    ledger.set_context(process, 0, 500 * 2**20)
    usage = ledger.process_usage(process, 0)
    assert (usage.limit, usage.slack, usage.context) == (10 * GIB, 1, 500 * 2**20)
    assert usage.charged == usage.committed == 3 * GIB + 500 * 2**20
    assert ledger.device_usage(0).available == 77 * GIB - 500 * 2**20
    ledger.release(process, charge)
    assert charge.charged == 0
    assert ledger.reap(77, 5) == 500 * 2**20
    assert ledger.device_usage(0).charged == 0
    assert ledger.device_usage(0).peak == 3 * GIB + 500 * 2**20
    ledger.audit()


def test_refusals_say_which_limit() -> None:
    ledger = new_ledger()
    small, large = ledger.join(1, 77, 1), ledger.join(0, 78, 1)
    with pytest.raises(CoreError, match="owner 1 holds 0 of its quota of 10737418240") as quota:
        ledger.reserve(small, 0, 10 * GIB + 1)
    assert quota.value.code == lib.SLUICE_ERROR_QUOTA
    with pytest.raises(CoreError, match="0 of 85899345920 are taken") as capacity:
        ledger.reserve(large, 0, 80 * GIB + 1)
    assert capacity.value.code == lib.SLUICE_ERROR_CAPACITY
    assert ledger.device_usage(0).refused == ledger.owner_usage(1, 0).refused == 1


def test_oversubscription() -> None:
    ledger = new_ledger()
    ledger.set_device(1, capacity=80 * GIB, oversubscription_permille=1250)
    assert ledger.device_usage(1).limit == 100 * GIB


def test_processes_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(bytes(SHAPE.size()))
    with path.open("r+b") as file:
        ledger = new_ledger(mmap.mmap(file.fileno(), 0))
    pid = os.fork()
    if pid == 0:
        with path.open("r+b") as file:
            mine = Ledger(mmap.mmap(file.fileno(), 0))
        mine.reserve(mine.join(0, os.getpid(), 9), 1, GIB)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    (left,) = ledger.processes()
    assert (left.owner, left.pid, left.start) == (0, pid, 9)
    assert ledger.device_usage(1).charged == GIB
    assert ledger.reap(left.pid, left.start) == GIB
    assert ledger.processes() == []


def test_fragmentation() -> None:
    ledger = new_ledger()
    first, second = ledger.join(0, 1, 1), ledger.join(0, 2, 1)
    ledger.reserve(first, 0, 30 * GIB)
    ledger.reserve(second, 1, 20 * GIB)
    found = ledger.fragmentation()
    assert (found.free, found.largest, found.largest_device) == (110 * GIB, 60 * GIB, 1)
    assert found.external_permille == 454


def test_bad_regions() -> None:
    with pytest.raises(CoreError, match="129 devices"):
        Shape(129, 1, 1).size()
    assert SHAPE.size() % ALIGNMENT == 0
    with pytest.raises(CoreError, match="holds no ledger"):
        Ledger(mmap.mmap(-1, SHAPE.size()))
    with pytest.raises(CoreError, match="needs"):
        Ledger.format(mmap.mmap(-1, SHAPE.size() - 64), SHAPE)
    with pytest.raises(CoreError, match="is not in the ledger"):
        new_ledger().reserve(1 << 16, 0, 1)
