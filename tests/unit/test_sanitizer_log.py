"""The soak continues after one known fault of slurmctld itself, and after no other."""

from __future__ import annotations

import pytest

from tests.integration.sanitizer import START, complaints, is_stocks_own, sanitizer_ends

# As in a run of 5,525 jobs, with slurmctld's words in between.
REPORT = """\
=================================================================
==126216==ERROR: AddressSanitizer: attempting double-free on 0x603000491d70 in thread T10 (dbinx):
slurmctld: restoring original state of nodes
    #0 0x7f352eab76a8 in __interceptor_free ../../../../src/libsanitizer/asan/asan_malloc_linux.cpp:52
    #1 0x7f352e8c02a5 in slurm_hostlist_destroy (/usr/lib/x86_64-linux-gnu/slurm-wlm/libslurmfull.so+0xb22a5)
    #2 0x7f352850367a in acct_storage_p_node_inx (/usr/lib/slurm-wlm/accounting_storage_slurmdbd.so+0xa67a)
slurmctld: error: job 5: grp_used_tres_run_secs underflow
    #3 0x7f352e975fd3  (/usr/lib/x86_64-linux-gnu/slurm-wlm/libslurmfull.so+0x167fd3)

0x603000491d70 is located 0 bytes inside of 32-byte region [0x603000491d70,0x603000491d90)
AddressSanitizer: CHECK failed: sanitizer_common.h:496 "((i)) < ((size_))" (0x6020, 0x44b) (tid=126229)
    #0 0x7f352eac22aa in CheckUnwind ../../../../src/libsanitizer/asan/asan_rtl.cpp:67
"""
FIRST = f"{START}22.05.8 started\nslurmctld: Recovered state of 4 nodes\n"


def test_its_own_fault_is_known_and_the_rest_of_the_log_is_kept() -> None:
    reports, rest = sanitizer_ends(FIRST + REPORT + FIRST)
    assert [is_stocks_own(report) for report in reports] == [True]
    assert complaints(rest) == {"slurmctld: error: job #: grp_used_tres_run_secs underflow"}
    assert rest.count(FIRST) == 2
    bit_of_another_node = "free on address which was not malloc()-ed: 0x603000491d70"
    reports, _ = sanitizer_ends(FIRST + REPORT.replace("double-free on 0x603000491d70", bit_of_another_node))
    assert [is_stocks_own(report) for report in reports] == [True]


@pytest.mark.parametrize(
    ("known", "other"),
    [
        ("attempting double-free on", "heap-use-after-free on address"),
        ("(dbinx)", "(srvcn)"),
        ("acct_storage_p_node_inx", "acct_storage_p_job_start"),
        ("(/usr/lib/x86_64-linux-gnu/slurm-wlm/libslurmfull.so+0x167fd3)", "/src/slurm_plugin/hook/hook.c:7"),
    ],
)
def test_no_other_end_is_taken_for_it(known: str, other: str) -> None:
    assert known in REPORT
    reports, _ = sanitizer_ends(FIRST + REPORT.replace(known, other))
    assert [is_stocks_own(report) for report in reports] == [False]


def test_a_frame_of_a_later_stack_does_not_make_it_known() -> None:
    frame = (
        "    #2 0x7f352850367a in acct_storage_p_node_inx (/usr/lib/slurm-wlm/accounting_storage_slurmdbd.so+0xa67a)\n"
    )
    other = REPORT.replace(frame, "    #2 0x7f352850367a in job_start (/usr/sbin/slurmctld-wlm+0xa67a)\n")
    allocated = "allocated by thread T10 (dbinx) here:\n    #0 0x7f352eab83b7 in calloc (libasan.so+0x1)\n"
    reports, _ = sanitizer_ends(FIRST + other + allocated + frame)
    assert [is_stocks_own(report) for report in reports] == [False]


def test_an_end_without_a_word_of_the_sanitizers_is_none_of_its() -> None:
    assert sanitizer_ends(FIRST + FIRST) == ([], FIRST + FIRST)
