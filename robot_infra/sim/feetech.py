"""Simulates a bus of Feetech STS3215 servos behind a pseudo-terminal: an SO-101 without an SO-101.

Source: Feetech's protocol 0 (packets FF FF ID LENGTH INSTRUCTION PARAMETERS CHECKSUM) and the STS memory table, as
lerobot.motors.feetech has them.
"""

import argparse
import json
import math
import os
import select
import signal
import struct
import sys
import threading
import tty
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from serl_client import clock
from serl_client.closing import Closing

from robot_infra.pace import run_first

MOTORS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")  # ids 1 to 6
ENDS = ((800, 3300), (900, 3200), (900, 3100), (850, 3200), (0, 4095), (2000, 3500))  # of each one's range, steps
MIDDLE = 2047  # of a turn of 4096 steps
SPEED = 3000.0  # steps per second
MODEL, FIRMWARE = 777, (3, 10)
PING, READ, WRITE, SYNC_READ, SYNC_WRITE, BROADCAST = 1, 2, 3, 0x82, 0x83, 0xFE
MODEL_AT, ID_AT, MIN_AT, MAX_AT, OFFSET_AT, TORQUE_AT, GOAL_AT, PRESENT_AT = 3, 5, 9, 11, 31, 40, 42, 56  # in the table
SIGNS = {OFFSET_AT: 11, GOAL_AT: 15, PRESENT_AT: 15}  # address of a signed value: number of its sign bit
HISTORY = 10_000  # goals that are remembered


class Servo:
    """Simulates one servo in position mode: its memory table, and a shaft that turns to its goal under torque.

    number: its id. ends: its position limits, steps. speed: steps per second. obeys_old_goals: it obeys its goal once
    torque comes on, however old that is; else only one that was written since torque went off.

    **Assumed:** a real servo does one of both (no document says which), and its encoder is exact. It cannot show
    gravity, load, heat or play: a shaft without torque stays where it is.

    `at` is the angle of the shaft in steps; Present_Position is `at` less Homing_Offset. `goals` has (seconds of
    time.monotonic(), steps) of each goal it got. `releases` counts how often its torque was switched off while it was
    on.
    """

    def __init__(self, number: int, ends: Sequence[int], speed: float, *, obeys_old_goals: bool = False) -> None:
        self.memory = bytearray(128)
        self.memory[:2], self.memory[ID_AT] = bytes(FIRMWARE), number
        for at, value in ((MODEL_AT, MODEL), (MIN_AT, ends[0]), (MAX_AT, ends[1])):
            self.set(at, value)
        self.at, self._speed, self._moved = float(min(max(MIDDLE, ends[0]), ends[1])), speed, clock.monotonic()
        self.goals: deque[tuple[float, int]] = deque(maxlen=HISTORY)
        self.releases = 0
        self._obeys_old_goals = obeys_old_goals
        self._has_goal = False  # one that was written while the torque was off

    @property
    def has_torque(self) -> bool:
        return self.memory[TORQUE_AT] == 1

    def get(self, at: int) -> int:
        """Return the two-byte value at address `at`, with its sign if it has one."""
        value = struct.unpack_from("<H", self.memory, at)[0]
        sign = 1 << SIGNS.get(at, 16)
        return sign - value if value & sign else value

    def set(self, at: int, value: int) -> None:
        """Write a two-byte value at address `at`, as sign and magnitude if it has a sign."""
        sign = 1 << SIGNS.get(at, 16)
        struct.pack_into("<H", self.memory, at, min(abs(value), sign - 1) | (sign if value < 0 else 0))

    def move(self) -> None:
        """Turn as far as the time since the last call allows."""
        now, offset = clock.monotonic(), self.get(OFFSET_AT)
        most, self._moved = self._speed * (now - self._moved), now
        if self.has_torque:
            goal = min(max(self.get(GOAL_AT), self.get(MIN_AT)), self.get(MAX_AT)) + offset
            self.at += min(max(goal - self.at, -most), most)
        self.set(PRESENT_AT, round(self.at) - offset)

    def obey(self, instruction: int, given: bytes) -> bytes | None:
        """Carry out one instruction and return what its answer holds; None: it is malformed or unknown."""
        if instruction == READ and len(given) == 2:
            self.move()
            return bytes(self.memory[given[0] : given[0] + given[1]])
        if instruction == WRITE and len(given) > 1:
            self.write(given[0], given[1:])
        elif instruction != PING:
            return None
        return b""

    def write(self, at: int, data: bytes) -> None:
        """Write `data` at address `at`. Torque that comes on holds the shaft, unless there is a goal that it obeys."""
        self.move()
        had_torque, data = self.has_torque, data[: max(0, len(self.memory) - at)]
        self.memory[at : at + len(data)] = data
        if at <= GOAL_AT < at + len(data):
            self.goals.append((clock.monotonic(), self.get(GOAL_AT)))
            self._has_goal = not had_torque
        if self.has_torque and not had_torque:
            if not (self._has_goal or self._obeys_old_goals):
                self.set(GOAL_AT, self.get(PRESENT_AT))
            self._has_goal = False
        elif had_torque and not self.has_torque:
            self.releases += 1


class FeetechBus(Closing):
    """Serves six servos at `path`, a serial port; a context manager.

    ids: of the servos, in the order of MOTORS. speed, obeys_old_goals: of each servo. `servos` has the servos by id.
    is_plugged: while it is False all packets are ignored; the servos keep their power, and turn to their goals.
    to_drop, to_damage: how many of the next answers get lost, or have a wrong checksum.

    **Assumed:** a real bus loses or damages whole answers, and each packet to it arrives. It cannot show collisions of
    two answers, electrical noise, or how long a USB adapter holds bytes back.

    Raises ValueError unless there are six ids, OSError if there is no pseudo-terminal left.
    """

    def __init__(
        self, *, ids: Sequence[int] = range(1, 7), speed: float = SPEED, obeys_old_goals: bool = False
    ) -> None:  # fmt: skip
        self.servos = {
            number: Servo(number, ends, speed, obeys_old_goals=obeys_old_goals)
            for number, ends in zip(ids, ENDS, strict=True)
        }
        self.is_plugged, self._is_closed = True, False
        self.to_drop = self.to_damage = 0
        self._master, self._slave = os.openpty()
        tty.setraw(self._slave)  # open as long as this is, so that a client may close it and come again
        os.set_blocking(self._master, False)  # a client that does not read must not stop the bus
        self.path = os.ttyname(self._slave)
        self._waker = os.pipe()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="feetech", daemon=True)
        self._thread.start()

    @property
    def positions(self) -> dict[int, float]:
        """Where the shafts are, {id: steps}."""
        with self._lock:
            for servo in self.servos.values():
                servo.move()
            return {number: servo.at for number, servo in self.servos.items()}

    def place(self, positions: Mapping[int, float]) -> None:
        """Turn shafts as a hand would, {id: steps}; one with torque turns back."""
        with self._lock:
            for number, at in positions.items():
                self.servos[number].move()
                self.servos[number].at = float(at)

    def calibration(self) -> dict[str, dict[str, int]]:
        """Return lerobot's calibration of these servos, as it stands in its files."""
        with self._lock:
            return {
                name: {
                    "id": number, "drive_mode": 0, "homing_offset": servo.get(OFFSET_AT),
                    "range_min": servo.get(MIN_AT), "range_max": servo.get(MAX_AT),
                }
                for name, (number, servo) in zip(MOTORS, self.servos.items(), strict=True)
            }  # fmt: skip

    def close(self) -> None:
        """End the bus; may be called twice."""
        if not self._is_closed:
            self._is_closed = True
            os.write(self._waker[1], b".")
            self._thread.join()
            for descriptor in (self._master, self._slave, *self._waker):
                os.close(descriptor)

    def _serve(self) -> None:
        run_first()
        data = b""
        while self._waker[0] not in (ready := select.select([self._master, self._waker[0]], [], [])[0]):
            if self._master in ready:
                data = self._obey_whole(data + os.read(self._master, 4096))

    def _obey_whole(self, data: bytes) -> bytes:
        """Obey each whole packet; return what is left."""
        while (begin := data.find(b"\xff\xff")) >= 0 and len(data) >= begin + 4:
            data = data[begin:]
            number, length = data[2], data[3]
            is_header, packet = number <= BROADCAST and length >= 2, data[2 : 4 + length]
            if is_header and len(data) < 4 + length:
                return data
            if not is_header or ~sum(packet[:-1]) & 0xFF != packet[-1]:
                data = data[1:]  # no packet, or a damaged one: look on from the next byte
                continue
            data = data[4 + length :]
            if self.is_plugged:
                with self._lock:
                    self._obey(number, packet[2], packet[3:-1])
        return data if begin >= 0 else data[-1:]

    def _obey(self, number: int, instruction: int, given: bytes) -> None:
        if instruction == SYNC_READ:
            for each in given[2:]:
                self._one(each, READ, given[:2])
        elif instruction == SYNC_WRITE and len(given) > 2 and given[1]:
            self._sync_write(given)
        elif number != BROADCAST:
            self._one(number, instruction, given)
        elif instruction == PING:
            for each in self.servos:
                self._one(each, PING, given)
        elif instruction == WRITE:  # the only other one that all may get at once: nobody answers
            for servo in self.servos.values():
                servo.obey(instruction, given)

    def _one(self, number: int, instruction: int, given: bytes) -> None:
        """Let one servo obey and answer, if there is one of this id."""
        if number in self.servos and (found := self.servos[number].obey(instruction, given)) is not None:
            self._answer(number, found)

    def _sync_write(self, given: bytes) -> None:
        at, size, parts = given[0], given[1], given[2:]
        for i in range(0, len(parts) - size, size + 1):
            if parts[i] in self.servos:
                self.servos[parts[i]].write(at, parts[i + 1 : i + 1 + size])

    def _answer(self, number: int, data: bytes) -> None:
        if self.to_drop:
            self.to_drop -= 1
            return
        body = bytes([number, len(data) + 2, 0]) + data
        checksum = ~sum(body) & 0xFF
        if self.to_damage:
            self.to_damage -= 1
            checksum ^= 0xFF
        with suppress(BlockingIOError):  # nobody reads, and a serial port too would lose it
            os.write(self._master, b"\xff\xff" + body + bytes([checksum]))


def main() -> None:
    parser = argparse.ArgumentParser(description="An SO-101 and its leader arm to rehearse with, without either.")
    parser.add_argument("folder", type=Path, help="gets the links follower and leader, and their calibration")
    parser.add_argument("--leader-waves", action="store_true", help="the leader moves as if a hand moved it")
    options = parser.parse_args()
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    options.folder.mkdir(parents=True, exist_ok=True)
    links = [options.folder / name for name in ("follower", "leader")]
    with FeetechBus(obeys_old_goals=True) as follower, FeetechBus(obeys_old_goals=True) as leader:
        for link, bus in zip(links, (follower, leader), strict=True):
            link.unlink(missing_ok=True)
            link.symlink_to(bus.path)
            (options.folder / f"{link.name}.json").write_text(json.dumps(bus.calibration(), indent=4))
        sys.stdout.write(f"servos at {links[0]} and {links[1]}; their calibration is beside them. Ctrl-C ends them\n")
        sys.stdout.flush()
        begin = clock.monotonic()
        while not ended.wait(0.02):
            if options.leader_waves:
                share = 0.2 * math.sin(0.5 * (clock.monotonic() - begin))
                middles = {number: ((low + high) / 2, high - low) for number, (low, high) in enumerate(ENDS, 1)}
                leader.place({number: middle + share * length for number, (middle, length) in middles.items()})
    for link in links:
        with suppress(FileNotFoundError):
            link.unlink()


if __name__ == "__main__":
    main()
