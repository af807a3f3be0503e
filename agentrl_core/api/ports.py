"""Free TCP ports, for engines that serve over HTTP or start a process group."""

import socket


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
