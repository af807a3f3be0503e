"""Addresses of this host, and free ports."""

import os
import socket
import sys
from types import SimpleNamespace

import pytest

from agentrl_core.engine_kit.ports import INTERFACE, free_port, held_port, host_address, use_ray_interface


def test_the_address_is_that_of_the_interface_that_the_user_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERFACE, "lo,eth7")
    assert host_address() == "127.0.0.1"


def test_an_interface_that_is_not_here_says_nothing_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INTERFACE, raising=False)
    address = host_address()
    monkeypatch.setenv(INTERFACE, "nothing0")
    assert host_address() == address


def test_an_environment_without_psutil_starts_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(util=SimpleNamespace(get_node_ip_address=lambda: "::1")))
    monkeypatch.setenv(INTERFACE, "lo")
    use_ray_interface()
    assert os.environ[INTERFACE] == "lo" and host_address()


@pytest.mark.parametrize(
    ("named", "address", "expected"),
    [
        (None, "127.0.0.1", "lo"),
        ("nothing0", "127.0.0.1", "lo"),
        ("lo", "192.0.2.7", "lo"),
        (None, "192.0.2.7", None),
    ],
)
def test_a_process_of_ray_connects_by_the_interface_of_its_node_address(
    monkeypatch: pytest.MonkeyPatch, named: str | None, address: str, expected: str | None
) -> None:
    # Set, so that what the function sets is undone.
    monkeypatch.setenv(INTERFACE, "")
    if named is not None:
        monkeypatch.setenv(INTERFACE, named)
    ray = SimpleNamespace(util=SimpleNamespace(get_node_ip_address=lambda: address))
    monkeypatch.setitem(sys.modules, "ray", ray)
    use_ray_interface()
    assert (os.environ.get(INTERFACE) or None) == expected


def test_a_taken_port_gives_way_to_another() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port(port) not in (0, port)
    assert free_port(port) == port


def test_without_a_preference_any_free_port_will_do() -> None:
    assert free_port() > 0


def test_a_held_port_goes_to_a_server_and_to_nobody_else() -> None:
    with held_port() as held, socket.socket() as server, socket.socket() as client, socket.socket() as other:
        port = held.getsockname()[1]
        assert free_port(port) != port
        with held_port(port) as second:
            assert second.getsockname()[1] != port
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        client.connect(("127.0.0.1", port))
