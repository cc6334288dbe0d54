"""Cores and memory that this process may use, with the limits of a container."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
# Version 2 and version 1 of cgroups: the file of a memory limit, that of the use, memory.stat, and the entry there of
# the files' pages that the kernel can take back.
_MEMORY = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def available_cores(cgroup: Path = _CGROUP) -> int:
    """Cores that this process may use: its CPU affinity, or the container's CPU quota if that is less."""
    cores = len(os.sched_getaffinity(0))
    if (limit := cgroup / "cpu.max").exists():
        quota, period = limit.read_text().split()
    elif (limit := cgroup / "cpu" / "cpu.cfs_quota_us").exists():
        quota, period = limit.read_text().strip(), limit.with_name("cpu.cfs_period_us").read_text()
    else:
        return cores
    return cores if quota in ("max", "-1") else min(cores, ceil(int(quota) / int(period)))


def available_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Available memory in bytes: the machine's, or what the container's limit leaves if that is less."""
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    available = int(lines["MemAvailable"].split()[0]) * 1024
    for limit, use, stat, inactive in _MEMORY:
        if not (cgroup / limit).exists() or (most := (cgroup / limit).read_text().strip()) == "max":
            continue
        entries = dict(line.split() for line in (cgroup / stat).read_text().splitlines())
        used = int((cgroup / use).read_text()) - int(entries.get(inactive, 0))
        available = min(available, int(most) - used)
    return available
