"""Passes on what a person elsewhere drives an actor's robot with, and what the actor tells them. Nothing is kept.

The actor decides who drives, and how old an input may be: serl_client/driving.py.
"""

from collections.abc import Mapping

from serl_client import messages as m
from serl_client.driving import check_drive, check_update
from serl_client.keys import owns

from serl_launcher.service.peers import Address, Forbidden, Peer, newest

DRIVERS = 256  # whose connections are known


class Driving:
    """Knows by which connection each driver has spoken last. peers: all that are connected."""

    def __init__(self, peers: Mapping[Address, Peer]) -> None:
        self._peers = peers
        self._drivers: dict[tuple[str, str], Address] = {}  # {(actor, driver): connection}

    def drive(self, peer: Peer, drive: m.Drive) -> m.DriverUpdate | None:
        """Pass an input on to its actor. Raises MessageError for a bad one, or one in another's name."""
        check_drive(drive)
        if not owns(peer.hello.actor, drive.driver):
            raise Forbidden(f"whoever drives is called {peer.hello.actor}, or so with / and anything behind it")
        actor = newest(self._peers.values(), drive.actor)
        if actor is None:
            return m.DriverUpdate(drive.driver, "", "this actor is not connected", 0, drive.number)
        self._drivers.pop((drive.actor, drive.driver), None)
        while len(self._drivers) >= DRIVERS:
            del self._drivers[next(iter(self._drivers))]
        self._drivers[drive.actor, drive.driver] = peer.address
        actor.send(drive)
        return None

    def update(self, peer: Peer, update: m.DriverUpdate) -> None:
        """Pass on what an actor tells a driver. Raises MessageError for what is no update."""
        check_update(update)
        address = self._drivers.get((peer.hello.actor, update.driver))
        if address in self._peers:
            self._peers[address].send(update)
