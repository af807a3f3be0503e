"""Free ports."""

import socket

from agentrl_core.engine_kit.ports import free_port


def test_a_taken_port_gives_way_to_another() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port(port) not in (0, port)
    assert free_port(port) == port


def test_without_a_preference_any_free_port_will_do() -> None:
    assert free_port() > 0
