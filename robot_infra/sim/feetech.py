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
import time
import tty
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

MOTORS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")  # ids 1 to 6
ENDS = ((800, 3300), (900, 3200), (900, 3100), (850, 3200), (0, 4095), (2000, 3500))  # of each one's way, steps
MIDDLE = 2047  # of a turn of 4096 steps
SPEED = 3000.0  # steps per second
MODEL, FIRMWARE = 777, (3, 10)
PING, READ, WRITE, SYNC_READ, SYNC_WRITE, BROADCAST = 1, 2, 3, 0x82, 0x83, 0xFE
MODEL_AT, ID_AT, MIN_AT, MAX_AT, TORQUE_AT, GOAL_AT, PRESENT_AT = 3, 5, 9, 11, 40, 42, 56  # in the memory table
HISTORY = 10_000  # goals that are remembered


class Servo:
    """One servo: its memory table, and a shaft that turns to its goal while its torque is on."""

    def __init__(self, number: int, ends: Sequence[int], speed: float) -> None:
        self.memory = bytearray(128)
        self.memory[:2], self.memory[ID_AT] = bytes(FIRMWARE), number
        for at, value in ((MODEL_AT, MODEL), (MIN_AT, ends[0]), (MAX_AT, ends[1])):
            self._set(at, value)
        self.at, self._speed, self._moved = float(min(max(MIDDLE, ends[0]), ends[1])), speed, time.monotonic()
        self.releases = 0  # how often its torque was switched off while it was on

    @property
    def has_torque(self) -> bool:
        return self.memory[TORQUE_AT] == 1

    def move(self) -> None:
        """Turn as far as the time since the last call allows."""
        now = time.monotonic()
        most, self._moved = self._speed * (now - self._moved), now
        if self.has_torque:
            goal = min(max(self._get(GOAL_AT), self._get(MIN_AT)), self._get(MAX_AT))
            self.at += min(max(goal - self.at, -most), most)
        self._set(PRESENT_AT, round(self.at))

    def read(self, at: int, count: int) -> bytes:
        self.move()
        return bytes(self.memory[at : at + count])

    def write(self, at: int, data: bytes) -> None:
        self.move()
        had_torque = self.has_torque
        self.memory[at : at + len(data)] = data
        if self.has_torque and not had_torque:
            self._set(GOAL_AT, round(self.at))  # torque alone moves nothing
        self.releases += had_torque and not self.has_torque

    def _get(self, at: int) -> int:
        return struct.unpack_from("<H", self.memory, at)[0]

    def _set(self, at: int, value: int) -> None:
        struct.pack_into("<H", self.memory, at, value)


class FeetechBus:
    """Serves six servos at `path`, a serial port; a context manager.

    speed: of each servo, steps per second. `goals` has (seconds of time.monotonic(), {id: steps}) of each sync write of
    goals, `servos` the servos by id.
    """

    def __init__(self, *, speed: float = SPEED) -> None:
        self.servos = {number: Servo(number, ends, speed) for number, ends in enumerate(ENDS, 1)}
        self.goals: deque[tuple[float, dict[int, int]]] = deque(maxlen=HISTORY)
        self.is_plugged = True
        self._dropped = 0  # answers that are still to get lost
        self._master, self._slave = os.openpty()
        tty.setraw(self._slave)  # open as long as this is, so that a client may close it and come again
        self.path = os.ttyname(self._slave)
        self._waker = os.pipe()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="feetech", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

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
                self.servos[number].at = float(at)

    def drop(self, count: int) -> None:
        """Lose the next `count` answers."""
        self._dropped = count

    def calibration(self) -> dict[str, dict[str, int]]:
        """Return lerobot's calibration of these servos, as it stands in its files."""
        return {
            name: {"id": number, "drive_mode": 0, "homing_offset": 0, "range_min": low, "range_max": high}
            for number, (name, (low, high)) in enumerate(zip(MOTORS, ENDS, strict=True), 1)
        }

    def close(self) -> None:
        """End the bus; may be called twice."""
        if self._thread.is_alive():
            os.write(self._waker[1], b".")
            self._thread.join()
            for descriptor in (self._master, self._slave, *self._waker):
                os.close(descriptor)

    def _serve(self) -> None:
        data = b""
        while self._waker[0] not in (ready := select.select([self._master, self._waker[0]], [], [])[0]):
            if self._master in ready:
                data = self._take(data + os.read(self._master, 4096))

    def _take(self, data: bytes) -> bytes:
        """Answer each whole packet; return what is left."""
        while (begin := data.find(b"\xff\xff")) >= 0 and len(data) >= begin + 4:
            data = data[begin:]
            number, length = data[2], data[3]
            if len(data) < 4 + length:
                return data
            packet, data = data[2 : 4 + length], data[4 + length :]
            if self.is_plugged and ~sum(packet[:-1]) & 0xFF == packet[-1]:
                with self._lock:
                    self._obey(number, packet[2], packet[3:-1])
        return data if data.find(b"\xff") >= 0 else b""

    def _obey(self, number: int, instruction: int, given: bytes) -> None:
        servo = self.servos.get(number)
        if instruction == PING:
            for each in self.servos if number == BROADCAST else [number] * (servo is not None):
                self._answer(each, b"")
        elif instruction == READ and servo:
            self._answer(number, servo.read(*given))
        elif instruction == WRITE and servo:
            servo.write(given[0], given[1:])
            self._answer(number, b"")
        elif instruction == SYNC_READ:
            for each in given[2:]:
                if each in self.servos:
                    self._answer(each, self.servos[each].read(given[0], given[1]))
        elif instruction == SYNC_WRITE:
            self._sync_write(given[0], given[1], given[2:])

    def _sync_write(self, at: int, size: int, parts: bytes) -> None:
        written = {parts[i]: parts[i + 1 : i + 1 + size] for i in range(0, len(parts), size + 1)}
        for number, data in written.items():
            if number in self.servos:
                self.servos[number].write(at, data)
        if at == GOAL_AT:
            self.goals.append(
                (time.monotonic(), {each: struct.unpack("<H", data[:2])[0] for each, data in written.items()})
            )

    def _answer(self, number: int, data: bytes) -> None:
        if self._dropped:
            self._dropped -= 1
            return
        body = bytes([number, len(data) + 2, 0]) + data
        os.write(self._master, b"\xff\xff" + body + bytes([~sum(body) & 0xFF]))


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
    with FeetechBus() as follower, FeetechBus() as leader:
        for link, bus in zip(links, (follower, leader), strict=True):
            link.unlink(missing_ok=True)
            link.symlink_to(bus.path)
            (options.folder / f"{link.name}.json").write_text(json.dumps(bus.calibration(), indent=4))
        sys.stdout.write(f"servos at {links[0]} and {links[1]}; their calibration is beside them. Ctrl-C ends them\n")
        sys.stdout.flush()
        begin = time.monotonic()
        while not ended.wait(0.02):
            if options.leader_waves:
                share = 0.2 * math.sin(0.5 * (time.monotonic() - begin))
                middles = {number: ((low + high) / 2, high - low) for number, (low, high) in enumerate(ENDS, 1)}
                leader.place({number: middle + share * way for number, (middle, way) in middles.items()})
    for link in links:
        with suppress(FileNotFoundError):
            link.unlink()


if __name__ == "__main__":
    main()
