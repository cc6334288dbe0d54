"""Simulated machines: namespaces of this machine, each with an address, processes, a host name, /tmp and /dev/shm.

All share this machine's processors and clock, so they do not show speeds. Needs root on Linux.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
_NET = "10.77.0"
OPERATOR = f"{_NET}.254"
_MEMORY = Path("/sys/fs/cgroup/memory")  # cgroups version 1
_DISABLED, _FORWARDING = "0", "3"  # states of a bridge's port
# The first process of a machine. It mounts the machine's own directories, and adopts orphaned processes. Folders below
# /tmp that are needed stay visible.
_INIT = """
mount --make-rprivate /
for kept in $KEPT; do mkdir -p "$FOLDER/tmp/${kept#/tmp/}"; mount --bind "$kept" "$FOLDER/tmp/${kept#/tmp/}"; done
mount --rbind "$FOLDER/tmp" /tmp
mount -t tmpfs -o size=2g tmpfs /dev/shm
mount -t proc proc /proc
if [ -n "$GROUP" ]; then
    mount -t tmpfs tmpfs /sys/fs/cgroup
    mkdir /sys/fs/cgroup/all /sys/fs/cgroup/memory
    mount -t cgroup -o memory cgroup /sys/fs/cgroup/all
    mount --bind "/sys/fs/cgroup/all/$GROUP" /sys/fs/cgroup/memory
    echo 0 > /sys/fs/cgroup/memory/cgroup.procs
fi
hostname "$NAME"
echo ready
while :; do sleep 1000 & wait; done
"""


def lacking() -> str | None:
    """The reason why machines cannot be created here. None if they can."""
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    if missing := [name for name in ("ip", "bridge", "unshare", "nsenter") if shutil.which(name) is None]:
        return f"{', '.join(missing)} is not installed"
    name = f"raylm{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return tried.stderr.strip()
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


def lacking_memory_limits() -> str | None:
    """The reason why the memory of machines cannot be limited here. None if it can."""
    return None if os.access(_MEMORY / "cgroup.procs", os.W_OK) else f"{_MEMORY} is not writable"


class Machine:
    """A simulated machine. /tmp/home is its home and that of all its processes.

    ``memory`` limits the bytes of all its processes together, in the same files as a container's limit. Only the link
    of a ``relayed`` machine can be slow.
    """

    def __init__(
        self, network: str, number: int, folder: Path, memory: int | None = None, *, relayed: bool = False
    ) -> None:
        self.address, self.name = f"{_NET}.{number}", f"node{number}"
        self.folder, self._network, self._port = folder / self.name, network, f"t{number}"
        self._hub = f"{network}hub"
        self._begun: list[subprocess.Popen[bytes]] = []  # running commands
        self._namespace = f"{network}n{number}"
        self._group = None if memory is None else _MEMORY / self._namespace
        if self._group is not None:
            self._group.mkdir()
            (self._group / "memory.limit_in_bytes").write_text(str(memory))
        _ip("netns", "add", self._namespace)
        self._relay: subprocess.Popen[str] | None = None
        if relayed:
            self._relay = self._begin_relay()
        else:
            _ip("-n", self._hub, "link", "add", self._port, "type", "veth", "peer", "eth0", "netns", self._namespace)
        _ip("-n", self._hub, "link", "set", self._port, "master", "br0", "up")
        _ip("-n", self._namespace, "link", "set", "lo", "up")
        _ip("-n", self._namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", self._namespace, "link", "set", "eth0", "up")
        self.start()

    @property
    def home(self) -> Path:
        """The home's path for this process."""
        return self.folder / "tmp" / "home"

    def start(self) -> None:
        """Start with an empty /tmp, except for its home."""
        for one in (self.folder / "tmp").glob("*"):
            if one != self.home and not one.is_mount():
                shutil.rmtree(one, ignore_errors=True)
        self.home.mkdir(parents=True, exist_ok=True)
        needed = {str(ROOT), sys.prefix, sys.base_prefix}
        kept = " ".join(sorted(path for path in needed if path.startswith("/tmp/")))
        command = ["ip", "netns", "exec", self._namespace, "unshare", "-m", "-p", "-u", "-i", "--fork", "--kill-child"]
        given = {"FOLDER": str(self.folder), "NAME": self.name, "KEPT": kept}
        given["GROUP"] = "" if self._group is None else self._group.name
        self._parent = subprocess.Popen(
            [*command, "bash", "-c", _INIT],
            env=os.environ | given,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # unshare complains when the first process is killed
            text=True,
        )
        assert self._parent.stdout is not None
        with self._parent.stdout as said:
            assert said.readline() == "ready\n"
        children = Path(f"/proc/{self._parent.pid}/task/{self._parent.pid}/children").read_text()
        self._init = int(children)
        self.plug(in_=True)

    def run(self, *command: str, timeout_s: float = 200, **environment: str) -> str:
        """The output of a command. A failed command raises an error."""
        return _run([*self._inside(environment), *command], timeout_s)

    def begin(self, *command: str, **environment: str) -> None:
        """Start a command that runs until the machine ends."""
        command = (*self._inside(environment), *command)
        self._begun.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    def _inside(self, environment: dict[str, str]) -> list[str]:
        entry = ["nsenter", "-t", str(self._init), "-m", "-n", "-p", "-u", "-i", "--"]
        if self._group is not None:
            entry += ["sh", "-c", 'echo 0 > /sys/fs/cgroup/memory/cgroup.procs; exec "$@"', "sh"]
        ctrl_c = "--default-signal=INT"  # otherwise SIGINT is ignored if the tests run in the background
        return [*entry, "env", "-i", ctrl_c, *_variables("/tmp/home", environment)]

    def _begin_relay(self) -> subprocess.Popen[str]:
        far = f"u{self._port}"  # the machine's device
        command = [sys.executable, "-m", "tests.nodes.relay", self._port, far]
        inside = ["ip", "netns", "exec", self._hub]
        both = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        relay = subprocess.Popen([*inside, *command], **both, text=True, cwd=ROOT)
        assert relay.stdout is not None
        with relay.stdout as said:
            assert said.readline() == "ready\n"
        _ip("-n", self._hub, "link", "set", far, "name", "eth0", "netns", self._namespace)
        return relay

    def slow(self, delay_s: float, loss: float = 0.0) -> None:
        """From now on, delay each frame to and from the machine by ``delay_s``, and lose the fraction ``loss``."""
        assert self._relay is not None
        assert self._relay.stdin is not None
        self._relay.stdin.write(f"{delay_s} {loss}\n")
        self._relay.stdin.flush()

    def plug(self, *, in_: bool) -> None:
        """Connect or disconnect the network. Disconnecting sends no packet to either side."""
        state = _FORWARDING if in_ else _DISABLED
        _run(["ip", "netns", "exec", self._hub, "bridge", "link", "set", "dev", self._port, "state", state], 60)

    def kill(self) -> None:
        """Kill all processes at once. Other machines see closed connections."""
        os.kill(self._init, signal.SIGKILL)
        self._parent.wait()
        for one in self._begun:
            one.wait()
        self._begun.clear()

    def power_off(self) -> None:
        """Disconnect the network first, so that no other machine sees a closed connection."""
        self.plug(in_=False)
        self.kill()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop all processes during the block."""
        members = self.members()
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in members:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def runs(self, actor: str) -> bool:
        """Whether one of its processes is a Ray actor of this class."""
        return any(actor in (Path("/proc") / str(pid) / "cmdline").read_text() for pid in self.members())

    def members(self) -> list[int]:
        def namespace(pid: str) -> str:
            with suppress(OSError):
                return os.readlink(f"/proc/{pid}/ns/pid")
            return ""

        own = namespace(str(self._init))
        pids = [name for name in os.listdir("/proc") if name.isdecimal() and name != str(self._init)]
        return [int(pid) for pid in pids if namespace(pid) == own]

    def remove(self) -> None:
        self._parent.poll()
        if self._parent.returncode is None:
            self.kill()
        if self._relay is not None:
            self._relay.communicate()  # it ends when its standard input closes
        _run(["ip", "netns", "del", self._namespace], 60)
        if (group := self._group) is not None:
            until(lambda: not (group / "cgroup.procs").read_text(), "processes are left")
            group.rmdir()

    def most_memory(self) -> int:
        """The maximum memory of a machine with a limit, in bytes."""
        assert self._group is not None
        return int((self._group / "memory.max_usage_in_bytes").read_text())


class Network:
    """Some machines on a switch, with an operator beside them. Leaving the context ends all of them.

    ``memory`` limits the machines with these numbers, in bytes. The links of ``relayed`` machines can be slow.
    """

    def __init__(
        self, machines: int, folder: Path, memory: dict[int, int] | None = None, relayed: Collection[int] = ()
    ) -> None:
        self._prefix, self._folder, self._count = f"rl{os.getpid()}", folder, machines
        self._memory, self._relayed = memory or {}, relayed
        self._hub = f"{self._prefix}hub"
        self.machines: list[Machine] = []
        self.home = folder / "operator"

    def __enter__(self) -> Network:
        self.home.mkdir(parents=True)
        _ip("netns", "add", self._hub)
        try:
            _ip("-n", self._hub, "link", "set", "lo", "up")
            _ip("-n", self._hub, "link", "add", "br0", "type", "bridge")
            _ip("-n", self._hub, "addr", "add", f"{OPERATOR}/24", "dev", "br0")
            _ip("-n", self._hub, "link", "set", "br0", "up")
            for number in range(1, self._count + 1):
                memory, relayed = self._memory.get(number), number in self._relayed
                self.machines.append(Machine(self._prefix, number, self._folder, memory, relayed=relayed))
        except BaseException:
            self.__exit__()
            raise
        return self

    def operator(self, *command: str, timeout_s: float = 200, **environment: str) -> str:
        """The output of a command of the operator."""
        return _run([*self._as_operator(environment), *command], timeout_s)

    def begin(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command of the operator."""
        command = (*self._as_operator(environment), *command)
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)

    @property
    def inside_operator(self) -> list[str]:
        """The command prefix that enters the operator's network."""
        return ["ip", "netns", "exec", self._hub]

    def _as_operator(self, environment: dict[str, str]) -> list[str]:
        return [*self.inside_operator, "env", "-i", *_variables(str(self.home), environment)]

    def __exit__(self, *_: object) -> None:
        for machine in self.machines:
            machine.remove()
        _ip("netns", "del", self._hub)


def _variables(home: str, given: dict[str, str]) -> list[str]:
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    usual = {"HOME": home, "USER": "root", "LANG": "C.UTF-8", "PATH": path, "RAY_AUTH_MODE": "token"}
    usual |= {"RAY_worker_niceness": "0", "OMP_WAIT_POLICY": "PASSIVE", "RAY_USAGE_STATS_ENABLED": "0"}
    return [f"{name}={value}" for name, value in (usual | given).items()]


def _run(command: list[str], timeout_s: float) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments], 60)


def until(condition: object, what: str, timeout_s: float = 300) -> None:
    """Wait until ``condition`` returns true. An exception counts as false."""
    assert callable(condition)
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        with suppress(Exception):
            if condition():
                return
        time.sleep(0.25)
    raise TimeoutError(what)
