"""Addresses of this host and free TCP ports, for engines that serve over HTTP or start a process group."""

import socket

OUTSIDE = ("192.0.2.1", 9)
"""An address that is nobody's, for documentation: https://www.rfc-editor.org/rfc/rfc5737."""


def host_address() -> str:
    """The address under which other hosts find this one; the loopback's where there is no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent: it only makes the system choose an interface.
            probe.connect(OUTSIDE)
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def free_port(preferred: int = 0, host: str = "127.0.0.1") -> int:
    """``preferred`` where nothing listens there, otherwise a port that is free now; 0 prefers none.

    Another process may take it before it is used: whoever starts a server tries again with another one.
    """
    for port in dict.fromkeys((preferred, 0)):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except (OSError, OverflowError):
                continue
            return int(probe.getsockname()[1])
    raise OSError(f"no TCP port is free on {host}")
