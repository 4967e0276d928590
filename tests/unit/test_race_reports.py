"""What racecheck reported, pair by pair."""

from __future__ import annotations

from paged_trt.scripts.gpu_host.race_reports import races

KERNEL = "void paged_trt::walk<__nv_bfloat16, (int)64, (bool)0>(paged_trt::Args)"
LOG = f"""========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at {KERNEL}+0x17000
=========     and Write access at {KERNEL}+0x10a30 [247 hazards]
=========     and Read access at {KERNEL}+0x10a40 [1 hazard]
=========
========= Warning: Race reported between Read access at other()+0x20 in other.cu:7
=========     and Write access at other()+0x10 in other.cu:5 [4 hazards]
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""


def test_hazards_of_a_pair_are_summed_over_reports_and_processes() -> None:
    kernel = "walk<__nv_bfloat16, 64, 0>"
    assert races([LOG, LOG, "========= ERROR SUMMARY: 0 errors"]) == [
        {
            "level": "error",
            "kernel": kernel,
            "access": "write +0x17000",
            "against": {"write +0x10a30": 494, "read +0x10a40": 2},
        },
        {
            "level": "warning",
            "kernel": "other()",
            "access": "read +0x20 other.cu:7",
            "against": {"write +0x10 other.cu:5": 8},
        },
    ]


def test_a_pair_of_two_kernels_names_both() -> None:
    log = LOG.replace(f"and Read access at {KERNEL}", "and Read access at other()")
    assert "other() read +0x10a40" in races([log])[0]["against"]


def test_what_is_no_report_is_passed_over() -> None:
    assert races(["", "=========     and Read access at other()+0x10 [3 hazards]"]) == []
