"""Makes what a person does at the operator's page (docs/guides/page.md) one more device."""

from collections.abc import Mapping

from serl_client.driving import BACK, MOTIONS, TAKE, RemoteDriver

from robot_infra.interfaces import Hand

BESIDE = "a person beside the robot has it"


class PageDevice:
    """Gives the motions of whoever is at the controls of the page, hold to move.

    A takeover by the page is a press, and so is the hand-back; a motion alone only begins a demonstration.
    remote: what the network thread hears them by. is_hindered: a person beside the robot has it; they are told so.
    """

    moves, asks = frozenset((*MOTIONS, "gripper")), True
    legend: Mapping[str, str] = {"page": "in a browser: take over, hand back, ready, success, failure, discard"}

    def __init__(self) -> None:
        self.remote, self.is_hindered = RemoteDriver(), False
        self._has_person = False  # a person, here or elsewhere, drives

    def read(self) -> Hand:
        motion, gripper, presses = self.remote.read(BESIDE if self.is_hindered else "")
        words, has_person = list[str](), self._has_person
        for press in presses:
            if (press == TAKE and not has_person) or (press == BACK and has_person):
                words.append("toggle")
                has_person = not has_person
        if not self._has_person:
            return Hand(words=words, moved=bool(motion or gripper))
        return Hand({name: share for name, share in motion.items() if share}, gripper, words=words)

    def forget(self, *, hands_back: bool) -> None:
        """Do nothing: what is held without a takeover only begins a demonstration."""

    def hand_over(self, *, to_person: bool) -> None:
        self._has_person = to_person

    def close(self) -> None:
        """Do nothing: the client owns the connection."""
