"""Hosts on one machine: network namespaces behind a switch, each with a link of a chosen rate in both directions.

Every host is a namespace with one end of a veth pair, ``link0``; the other end is a port of a bridge, in a namespace of
its own. A token bucket (``tc tbf``) at each end holds the rate: the host's limits what it sends, the port's what it
receives. All devices and addresses live inside these namespaces, so nothing of it can reach the machine's own network,
and to remove the namespaces removes everything.

It needs root and Debian's ``iproute2``; :func:`refusal` says in a sentence what is missing.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

DEVICE = "link0"
"""The host's end of its link, the same name in every host."""
PREFIX = "dsmuon-"
"""How the names of all namespaces made here begin; then follow the maker's process id and its start time."""

_ADDRESSES = ipaddress.ip_network("10.77.0.0/24")
_COMMAND_TIMEOUT = 20.0
_PATIENCE = 5.0
# Bytes that TCP hands over at once, and all the buckets let pass whole: to cut 64 KB into packets of 1514 bytes took
# more of the cores than the training step did.
_SEGMENT = 12_000
# Seconds of the rate that may leave at once after silence, and bytes that may queue. Nothing is ever dropped: what the
# ranks of one step send is less.
_BURST_SECONDS = 0.0005
_QUEUE_BYTES = 64_000_000


class NetworkUnavailable(RuntimeError):
    """Namespaces cannot be made here; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class LinkEnd:
    """One end of a link, where a token bucket can be put.

    Attributes:
        namespace: Where the device is.
        device: Its name there.
    """

    namespace: str
    device: str


@dataclass(slots=True)
class HostNetwork:
    """Hosts behind a switch; a context manager that makes them and removes them on every way out.

    Attributes:
        hosts: How many.
        name: How the names of its namespaces begin.
    """

    hosts: int
    name: str = field(default_factory=lambda: f"{PREFIX}{os.getpid()}-{_start_time(os.getpid())}-")

    def __enter__(self) -> HostNetwork:
        """Make the namespaces; leftovers of processes that are gone are removed first.

        Raises:
            NetworkUnavailable: If the machine does not allow it.
        """
        if not 1 <= self.hosts <= 200:
            raise ValueError(f"hosts must be between 1 and 200, got {self.hosts}")
        if reason := refusal():
            raise NetworkUnavailable(reason)
        remove_leftovers()
        try:
            self._make()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @property
    def switch(self) -> str:
        """The namespace of the bridge."""
        return f"{self.name}switch"

    def host(self, number: int) -> str:
        """Return the namespace of a host."""
        return f"{self.name}host{number}"

    def address(self, number: int) -> str:
        """Return a host's address, which exists in its namespace only."""
        return str(_ADDRESSES[number + 1])

    def prefix(self, number: int) -> list[str]:
        """Return what to put before a command that shall run on a host."""
        return ["ip", "netns", "exec", self.host(number)]

    @property
    def ends(self) -> list[LinkEnd]:
        """Both ends of every link, host by host."""
        return [
            end
            for number in range(self.hosts)
            for end in (LinkEnd(self.host(number), DEVICE), LinkEnd(self.switch, f"port{number}"))
        ]

    def _make(self) -> None:
        _ip("netns", "add", self.switch)
        _ip("-n", self.switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "bridge0", "up")
        for number in range(self.hosts):
            host, port = self.host(number), f"port{number}"
            _ip("netns", "add", host)
            # Both ends are made where they belong: the machine's own namespace never sees them.
            peer = ["type", "veth", "peer", "name", port, "netns", self.switch]
            _ip("-n", host, "link", "add", DEVICE, *peer)
            _ip("-n", self.switch, "link", "set", port, "master", "bridge0", "up")
            _ip("-n", host, "address", "add", f"{self.address(number)}/{_ADDRESSES.prefixlen}", "dev", DEVICE)
            _ip("-n", host, "link", "set", DEVICE, "gso_max_size", str(_SEGMENT), "up")
            _ip("-n", host, "link", "set", "lo", "up")
            _run([*self.prefix(number), "sh", "-c", _TCP_SETTINGS])

    def remove(self) -> None:
        """End the processes in the namespaces and remove the namespaces; may be called twice."""
        _remove([name for name in namespaces() if name.startswith(self.name)])


# Connections of a training run are warm, and losses are rare: the window depends on bytes acknowledged, not on a model
# of the path (bbr paces by its own estimate of the rate), and stays open between steps.
_TCP_SETTINGS = (
    "echo reno > /proc/sys/net/ipv4/tcp_congestion_control && "
    "echo 0 > /proc/sys/net/ipv4/tcp_slow_start_after_idle"
)


def refusal() -> str:
    """Return why hosts cannot be made on this machine, in a sentence; empty if they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    missing = [name for name in ("ip", "tc") if _program(name) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2 (apt-get install iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root: run it as root, for example with sudo"
    trial = f"{PREFIX}{os.getpid()}-{_start_time(os.getpid())}-trial"
    try:
        _ip("netns", "add", trial)
        _ip("-n", trial, "link", "add", DEVICE, "type", "veth", "peer", "name", "port0")
        limit_rate([LinkEnd(trial, DEVICE)], 1e9)
    except subprocess.SubprocessError as error:
        return f"this machine does not allow network namespaces with limited links: {_what_it_said(error)}"
    finally:
        _remove([name for name in namespaces() if name == trial])
    return ""


def limit_rate(ends: Sequence[LinkEnd], rate: float | None) -> None:
    """Set the rate of link ends while they are in use.

    The bucket holds half a millisecond of the rate, and one segment of TCP at least. It charges a segment as the
    packets that a real link would carry.

    Args:
        ends: The ends; each limits what leaves there.
        rate: Bits a second on the wire; ``None`` for no limit.
    """
    for end in ends:
        where = ["tc", "-n", end.namespace, "qdisc"]
        if rate is None:
            # Without a bucket there is nothing to remove, which is an error for tc.
            subprocess.run(
                [*where, "del", "dev", end.device, "root"], capture_output=True, timeout=_COMMAND_TIMEOUT
            )
            continue
        burst = max(_SEGMENT + 1000, int(rate / 8 * _BURST_SECONDS))
        bucket = ["tbf", "rate", f"{int(rate)}bit", "burst", str(burst), "limit", str(_QUEUE_BYTES)]
        _run([*where, "replace", "dev", end.device, "root", *bucket])


def link_bytes(device: str = DEVICE) -> tuple[int, int]:
    """Return the bytes that the kernel counted as sent and received on a device of this process's namespace."""
    folder = Path("/sys/class/net") / device / "statistics"
    return int((folder / "tx_bytes").read_text()), int((folder / "rx_bytes").read_text())


def namespaces() -> list[str]:
    """Return the names of the namespaces made here, by any process."""
    folder = Path("/run/netns")
    if not folder.is_dir():
        return []
    return sorted(name for name in os.listdir(folder) if name.startswith(PREFIX))


def remove_leftovers() -> list[str]:
    """Remove the namespaces of processes that are gone; return their names."""
    gone = [name for name in namespaces() if not _maker_lives(name)]
    _remove(gone)
    return gone


def _maker_lives(name: str) -> bool:
    pid, _, rest = name.removeprefix(PREFIX).partition("-")
    with contextlib.suppress(OSError, ValueError):
        # Another process may have got the number since.
        return _start_time(int(pid)) == rest.partition("-")[0]
    return False


def _start_time(pid: int) -> str:
    """Return when a process started, in ticks since the machine did."""
    # The field after the command's closing bracket; the command itself may hold spaces and brackets.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _remove(names: Sequence[str]) -> None:
    """Remove namespaces; their processes were started here, and nowhere else can one get there by accident."""
    deadline = time.monotonic() + _PATIENCE
    for name in names:
        while time.monotonic() < deadline:
            found = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True, timeout=_COMMAND_TIMEOUT
            )
            if not (pids := found.stdout.split()):
                break
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=_COMMAND_TIMEOUT)


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout


def _program(name: str) -> str | None:
    """Find a program also where users' search paths do not look."""
    return shutil.which(
        name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    )


def _what_it_said(error: subprocess.SubprocessError) -> str:
    said = getattr(error, "stderr", None)
    return (said.strip() if isinstance(said, str) and said.strip() else str(error)).replace("\n", "; ")
