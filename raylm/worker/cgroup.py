"""Cores and memory that this process may use, with the limits of a container."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_cores(cgroup: Path = _CGROUP) -> int:
    """Cores that this process may use: its CPU affinity, or the container's CPU quota if that is less."""
    cores = len(os.sched_getaffinity(0))
    limit = cgroup / "cpu.max"
    if not limit.exists():
        return cores
    quota, period = limit.read_text().split()
    return cores if quota == "max" else min(cores, ceil(int(quota) / int(period)))


def available_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Available memory in bytes: the machine's, or what the container's limit leaves if that is less."""
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    available = int(lines["MemAvailable"].split()[0]) * 1024
    limit = cgroup / "memory.max"
    if not limit.exists() or limit.read_text().strip() == "max":
        return available
    stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    used = int((cgroup / "memory.current").read_text()) - int(stat["inactive_file"])
    return min(available, int(limit.read_text()) - used)
