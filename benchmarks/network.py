"""Hosts on one machine: network namespaces behind a switch, each with a link of a chosen rate in both directions.

Every host is a namespace with one end of a veth pair, ``link0``; the other end is a port of a bridge, in a namespace of
its own. A token bucket (``tc tbf``) at each end holds the rate: the host's limits what it sends, the port's what it
receives. All devices and addresses live inside these namespaces, so nothing of it can reach the machine's own network.

A namespace has no name, only a process that waits in it and ends with the process that made it, even if that one is
killed; the kernel removes a namespace and its devices with its last process.

It needs root, ``unshare`` and ``nsenter`` of util-linux, and Debian's ``iproute2``; :func:`refusal` says in a sentence
what is missing.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DEVICE = "link0"
"""The host's end of its link, the same name in every host."""

End = tuple[int, str]
"""One end of a link, where a token bucket can be put: a process of its namespace, and the device's name there."""

_ADDRESSES = ipaddress.ip_network("10.77.0.0/24")
_COMMAND_TIMEOUT = 20.0
# Bytes that TCP hands over at once, and all the buckets let pass whole: to cut 64 KB into packets of 1514 bytes took
# more of the cores than the training step did.
_SEGMENT = 12_000
# Seconds of the rate that may leave at once after silence, and bytes that may queue. Nothing is ever dropped: what the
# ranks of one step send is less.
_BURST_SECONDS = 0.0005
_QUEUE_BYTES = 64_000_000
# Connections of a training run are warm, and losses are rare: the window depends on bytes acknowledged, not on a model
# of the path (bbr paces by its own estimate of the rate), and stays open between steps.
_TCP_SETTINGS = (
    "echo reno > /proc/sys/net/ipv4/tcp_congestion_control && "
    "echo 0 > /proc/sys/net/ipv4/tcp_slow_start_after_idle"
)


@dataclass(frozen=True, slots=True)
class HostNetwork:
    """Hosts behind a switch.

    Attributes:
        switch: The process that holds the bridge's namespace.
        hosts: The processes that hold the hosts' namespaces.
    """

    switch: int
    hosts: list[int]

    def address(self, number: int) -> str:
        """Return a host's address, which exists in its namespace only."""
        return str(_ADDRESSES[number + 1])

    def prefix(self, number: int) -> list[str]:
        """Return what to put before a command that shall run on a host."""
        return inside(self.hosts[number])

    @property
    def ends(self) -> list[End]:
        """Both ends of every link, host by host."""
        return [
            end
            for number, host in enumerate(self.hosts)
            for end in ((host, DEVICE), (self.switch, f"port{number}"))
        ]


@contextlib.contextmanager
def host_network(hosts: int) -> Iterator[HostNetwork]:
    """Make that many hosts and a switch, and remove them on every way out; processes in them must end before.

    Raises:
        subprocess.SubprocessError: If the machine does not allow it.
    """
    with contextlib.ExitStack() as opened:
        switch, *own = (opened.enter_context(_namespace()) for _ in range(hosts + 1))
        network = HostNetwork(switch, own)
        _ip(switch, "link", "add", "bridge0", "type", "bridge")
        _ip(switch, "link", "set", "bridge0", "up")
        for number, host in enumerate(own):
            port, address = f"port{number}", f"{network.address(number)}/{_ADDRESSES.prefixlen}"
            # Both ends are made where they belong: the machine's own namespace never sees them.
            _ip(host, "link", "add", DEVICE, "type", "veth", "peer", "name", port, "netns", str(switch))
            _ip(switch, "link", "set", port, "master", "bridge0", "up")
            _ip(host, "address", "add", address, "dev", DEVICE)
            _ip(host, "link", "set", DEVICE, "gso_max_size", str(_SEGMENT), "up")
            _ip(host, "link", "set", "lo", "up")
            _run([*inside(host), "sh", "-c", _TCP_SETTINGS])
        yield network


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """Yield a process in a new network namespace; it ends when its input does."""
    command = ["unshare", "--net", "sh", "-c", "echo && exec cat"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as holder:
        assert holder.stdout is not None
        if (said := holder.stdout.readline()) != "\n":
            raise subprocess.CalledProcessError(1, command, stderr=said)
        yield holder.pid


def inside(process: int) -> list[str]:
    """Return what to put before a command that shall run in the network namespace of a process."""
    return ["nsenter", f"--net=/proc/{process}/ns/net"]


def refusal() -> str:
    """Return why hosts cannot be made on this machine, in a sentence; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root: run it as root, for example with sudo"
    if missing := [name for name in ("unshare", "nsenter", "ip", "tc") if shutil.which(name) is None]:
        return f"{' and '.join(missing)} not found: it needs Linux, util-linux and iproute2 (apt-get install iproute2)"
    try:
        with host_network(1) as trial:
            limit_rate(trial.ends, 1e9)
    except subprocess.SubprocessError as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        return f"this machine does not allow network namespaces with limited links: {said}"
    return ""


def limit_rate(ends: Sequence[End], rate: float | None) -> None:
    """Set the rate of link ends while they are in use.

    The bucket holds half a millisecond of the rate, and one segment of TCP at least. It charges a segment as the
    packets that a real link would carry.

    Args:
        ends: The ends; each limits what leaves there.
        rate: Bits a second on the wire; ``None`` for no limit.
    """
    for process, device in ends:
        where = [*inside(process), "tc", "qdisc"]
        if rate is None:
            # Without a bucket there is nothing to remove, which is an error for tc.
            subprocess.run(
                [*where, "del", "dev", device, "root"], capture_output=True, timeout=_COMMAND_TIMEOUT
            )
            continue
        burst = max(_SEGMENT + 1000, int(rate / 8 * _BURST_SECONDS))
        bucket = ["tbf", "rate", f"{int(rate)}bit", "burst", str(burst), "limit", str(_QUEUE_BYTES)]
        _run([*where, "replace", "dev", device, "root", *bucket])


def link_bytes() -> tuple[int, int]:
    """Return the bytes that the kernel counted as sent and received on the link of this process's host."""
    devices = dict(line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:])
    counters = {name.strip(): counts.split() for name, counts in devices.items()}[DEVICE]
    return int(counters[8]), int(counters[0])


def _ip(process: int, *arguments: str) -> None:
    _run([*inside(process), "ip", *arguments])


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT)
