"""Addresses of this host and free TCP ports, for engines that serve over HTTP or start a process group."""

import os
import socket
import sys
from typing import Any

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Names this host's network interface, by which gloo connects and under whose address others find it."""
OUTSIDE = ("192.0.2.1", 9)
"""An address that is nobody's, for documentation: https://www.rfc-editor.org/rfc/rfc5737."""


def host_address() -> str:
    """The address under which other hosts find this one: of the interface that ``GLOO_SOCKET_IFNAME`` names, else the
    one that packets leave by; the loopback's where there is no network."""
    if addresses := _addresses(named_interface()):
        return addresses[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: it only makes the system choose an interface.
            probe.connect(OUTSIDE)
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def named_interface() -> str:
    """The first interface that ``GLOO_SOCKET_IFNAME`` names; empty where it is not set."""
    return os.environ.get(INTERFACE, "").partition(",")[0]


def use_ray_interface() -> None:
    """Let gloo and :func:`host_address` use the interface of Ray's address of this node.

    Called in each of Ray's processes as it starts. What the user names stays, where this node has it.
    """
    # Such a process has it; engines that run without Ray import this module too.
    ray = sys.modules["ray"]
    if not _addresses(named_interface()):
        address = ray.util.get_node_ip_address()
        for name in _interfaces():
            if address in _addresses(name):
                os.environ[INTERFACE] = name
                return


def _interfaces() -> dict[str, Any]:
    """The addresses of each interface; nothing where an engine's environment has no psutil."""
    try:
        import psutil
    except ImportError:
        return {}
    return dict(psutil.net_if_addrs())


def _addresses(interface: str) -> list[str]:
    """Of an interface of this host, IPv4 first; those that are valid only on its link are left out."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = [each for each in _interfaces().get(interface, []) if each.family in families]
    return [
        each.address for each in sorted(found, key=lambda each: families.index(each.family)) if "%" not in each.address
    ]


def free_port(preferred: int = 0, host: str = "127.0.0.1") -> int:
    """``preferred`` where nothing listens there, otherwise a port that is free now; 0 prefers none.

    Another process may take it before it is used: whoever starts a server tries again with another one.
    """
    with held_port(preferred, host) as held:
        return int(held.getsockname()[1])


def held_port(preferred: int = 0, host: str = "127.0.0.1") -> socket.socket:
    """A socket that keeps a :func:`free_port` for a server that takes long to start.

    While it is open, only who binds with ``SO_REUSEADDR`` gets the port: most servers do, connections and
    :func:`free_port` do not.
    """
    for port in dict.fromkeys((preferred, 0)):
        held = socket.socket()
        try:
            held.bind((host, port))
        except (OSError, OverflowError):
            held.close()
            continue
        # Only now: it would let this bind succeed where another holds the port.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return held
    raise OSError(f"no TCP port is free on {host}")
