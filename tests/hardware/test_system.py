"""Other people's machines, as folders."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from trimtab.hardware import system

pytestmark = pytest.mark.alone


def plant(root: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    """Write ``files`` below ``root``."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


XEON = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu avx2 avx512f avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8

processor\t: 1
model name\t: something else
"""
GRAVITON = """processor\t: 0
Features\t: fp asimd asimddp sve i8mm bf16
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""


def test_an_intel_processor(tmp_path: pathlib.Path) -> None:
    root = plant(tmp_path, {"proc/cpuinfo": XEON})
    assert system.cpu_name(root) == "Intel(R) Xeon(R) Platinum 8480+ (family 6, model 143)"
    assert system.isa({}, root) == ("amx_bf16", "amx_int8", "avx2", "avx512_bf16", "avx512_vnni", "avx512f")


def test_an_arm_processor(tmp_path: pathlib.Path) -> None:
    root = plant(tmp_path, {"proc/cpuinfo": GRAVITON})
    assert system.cpu_name(root) == "ARM Neoverse-V1 (implementer 0x41)"
    assert system.isa({}, root) == ("bf16", "i8mm", "neon", "sve")


def test_without_proc_torch_is_asked(tmp_path: pathlib.Path) -> None:
    assert system.cpu_name(tmp_path)
    found = system.isa({"avx512_f": True, "avx512_vnni": True, "amx_int8": False, "l2_cache_size": 1}, tmp_path)
    assert set(found) >= {"avx512f", "avx512_vnni"}
    assert "amx_int8" not in found


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "400000 100000"}, 4.0),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "200000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "300000 100000",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/docker/x\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
        ({"sys/fs/cgroup/cpu.max": "garbage"}, None),
        ({"sys/fs/cgroup/cpu.max": "100 0"}, None),
    ],
)
def test_cpu_quota(tmp_path: pathlib.Path, files: dict[str, str], quota: float | None) -> None:
    assert system.cpu_quota(plant(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"sys/fs/cgroup/memory.max": "max"}, None),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "2000000000"}, 2000.0),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n0::/\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "512000000",
            },
            512.0,
        ),
    ],
)
def test_memory_limit(tmp_path: pathlib.Path, files: dict[str, str], limit: float | None) -> None:
    assert system.memory_limit_mb(plant(tmp_path, files)) == limit


def test_caches_that_cores_share_count_once(tmp_path: pathlib.Path) -> None:
    files = {}
    for core, shared in enumerate(["0-1", "0-1", "2-3", "2-3"]):
        folder = f"sys/devices/system/cpu/cpu{core}/cache"
        files |= {f"{folder}/index0/{k}": v for k, v in {"level": "1", "size": "32K", "shared_cpu_list": str(core)}.items()}
        files |= {f"{folder}/index3/{k}": v for k, v in {"level": "3", "size": "16M", "shared_cpu_list": shared}.items()}
    assert system.last_level_cache(plant(tmp_path, files)) == 2 * 16 * 2**20
    assert system.last_level_cache(tmp_path / "nowhere") is None


def test_the_named_compiler_wins(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "mycc"
    tool.write_text(f"#!{sys.executable}\nprint('mycc 1.2')\nprint('copyright')\n")
    tool.chmod(0o755)
    monkeypatch.setenv("CXX", f"{tool} -O2")
    assert system.compiler() == "mycc 1.2"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "gone"))
    assert system.compiler() is None


def test_this_machine() -> None:
    assert system.affinity() >= 1
    assert system.os_name()


THP = "sys/kernel/mm/transparent_hugepage/enabled"


@pytest.mark.skipif(not system.has_glibc(), reason="glibc only")
@pytest.mark.parametrize(
    ("enabled", "given", "expected"),
    [
        ("always [madvise] never", {}, "glibc.malloc.hugetlb=1"),
        ("always [madvise] never", {"GLIBC_TUNABLES": "glibc.malloc.check=1"}, "glibc.malloc.check=1:glibc.malloc.hugetlb=1"),
        ("always [madvise] never", {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, None),
        ("[always] madvise never", {}, None),
        ("always madvise [never]", {}, None),
        (None, {}, None),
    ],
)
def test_huge_pages_are_asked_for_where_the_kernel_gives_them_on_request(
    tmp_path: pathlib.Path, enabled: str | None, given: dict[str, str], expected: str | None
) -> None:
    root = plant(tmp_path, {} if enabled is None else {THP: enabled})
    found = system.huge_pages_variable(root, given)
    assert found == ({} if expected is None else {"GLIBC_TUNABLES": expected})


def test_the_variable_gives_huge_pages_to_a_new_process() -> None:
    variable = system.huge_pages_variable(environment={})
    if not variable:
        pytest.skip("this kernel or C library gives no huge pages on request")
    program = (
        "block = bytearray(64 * 2**20)\n"
        "print(sum(int(line.split()[1]) for line in open('/proc/self/smaps') if line.startswith('AnonHugePages')))"
    )
    words = [sys.executable, "-c", program]
    held = [
        int(subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ | more).stdout)
        for more in ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, variable)
    ]
    assert held[1] - held[0] > 32 * 1024, held
