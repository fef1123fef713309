"""The proxy between an actor and its learner holds up, cuts and slows as it is told."""

import socket

from tests.faults.proxy import Proxy

HOLDS = (  # mode, its options, the directions that stand still
    ("half_open", {}, {"up", "down"}),
    ("one_way", {"direction": "up"}, {"down"}),
    ("one_way", {"direction": "down"}, {"up"}),
)


def heard(end, seconds=0.2):
    end.settimeout(seconds)
    try:
        return end.recv(100)
    except TimeoutError:
        return None


def test_the_proxy_holds_up_either_direction_and_goes_on_where_it_was():
    with (
        socket.create_server(("127.0.0.1", 0)) as learner,
        Proxy(*learner.getsockname()) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port)) as near,
        learner.accept()[0] as far,
    ):
        for mode, options, held in HOLDS:
            for direction, one, other in (("up", near, far), ("down", far, near)):
                proxy.set(mode, **options)
                one.sendall(b"while")
                assert heard(other) == (None if direction in held else b"while")
                proxy.set("pass")
                assert direction not in held or heard(other, 5.0) == b"while"
