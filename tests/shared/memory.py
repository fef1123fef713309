"""The drivers of an SO-101 and of a Dobot arm, with nothing but memory between them and their simulated devices.

Each says what tests/shared/rude.py asks of an arm: `at` where it is, `led` where its motors are led to, NaN without
torque, [J] each; `got` how many messages that could move something have reached it; `upset` what the world does to it.
"""

import os
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
from serl_client import clock

from robot_infra.drivers import dobot_protocol as p
from robot_infra.drivers.dobot import DobotArm
from robot_infra.drivers.lerobot import LerobotArm
from robot_infra.sim.dobot_machine import Machine
from robot_infra.sim.feetech import (
    ENDS,
    GOAL_AT,
    MAX_AT,
    MIN_AT,
    MOTORS,
    SYNC_WRITE,
    TORQUE_AT,
    WRITE,
    FeetechBus,
    Servo,
)  # fmt: skip


class MemoryBus(FeetechBus):
    """The servos of a FeetechBus without a terminal and a thread: a packet is obeyed when it is written.

    got: packets that changed something. to_delay: how many of the next answers come after the one that follows.
    """

    def __init__(self):
        self.servos = {number: Servo(number, ends, 3000, obeys_old_goals=True) for number, ends in enumerate(ENDS, 1)}
        self.is_plugged, self.to_drop, self.to_damage, self.to_delay, self.got = True, 0, 0, 0, 0
        self._lock, self._rest, self._late = nullcontext(), b"", []
        self._out, self._master = os.pipe()
        os.set_blocking(self._out, False)

    def close(self):
        os.close(self._out)
        os.close(self._master)

    def port(self, name):
        """In place of scservo_sdk's PortHandler: each look at its clock lets a millisecond pass."""
        from scservo_sdk.port_handler import PortHandler

        made = PortHandler(name)
        made.setBaudRate = lambda baud: setattr(made, "is_open", self.is_plugged) or self.is_plugged
        made.closePort = lambda: setattr(made, "is_open", False)
        made.ser = SimpleNamespace(reset_input_buffer=lambda: self._read(1 << 16))
        made.getCurrentTime = lambda: clock.sleep(0.001) or 1e3 * clock.monotonic()
        made.readPort, made.writePort = self._read, self._write
        return made

    def _read(self, most):
        try:
            return os.read(self._out, most)
        except BlockingIOError:
            return b""

    def _write(self, packet):
        self._rest = self._obey_whole(self._rest + bytes(packet))
        return len(packet)

    def _obey(self, number, instruction, given):
        self.got += instruction in (WRITE, SYNC_WRITE)
        super()._obey(number, instruction, given)

    def _answer(self, number, data):
        if self.to_delay:
            self.to_delay -= 1
            self._late.append((number, data))
            return
        super()._answer(number, data)
        while self._late:
            super()._answer(*self._late.pop())


class SO101(LerobotArm):
    """An SO-101 on a MemoryBus, whose port scservo_sdk must have been given. folder: of its calibration, `me.json`."""

    def __init__(self, bus, folder):
        self.bus = bus
        low, high = np.array(ENDS, float).T
        self._low, self._share = low, np.where(np.array(MOTORS) == "gripper", 100, 200) / (high - low)
        self._words = {"type": "so101_follower", "id": "me", "calibration_dir": folder, "use_degrees": False}
        self.begin_anew()

    def begin_anew(self):
        super().__init__("a port", robot=self._words)

    @property
    def got(self):
        return self.bus.got

    @property
    def at(self):
        return self._percent([*self.bus.positions.values()])

    def led(self):
        goals = [servo.get(GOAL_AT) if servo.has_torque else np.nan for servo in self.bus.servos.values()]
        return self._percent(np.clip(goals, *np.array(ENDS).T))

    def upset(self, random, *, mends=False):
        if mends:
            self.bus.is_plugged |= random.random() < 0.9
            return
        what = random.choice(["drop", "damage", "delay", "unplug", "power"])
        if what == "unplug":
            self.bus.is_plugged = random.random() < 0.5
        elif what == "power":
            for servo in self.bus.servos.values():
                if random.random() < 0.5:
                    servo.memory[TORQUE_AT] = 0
                    servo.at = float(np.clip(servo.at + random.normal(0, 200), servo.get(MIN_AT), servo.get(MAX_AT)))
        else:
            setattr(self.bus, f"to_{what}", int(random.integers(1, 7)))

    def _percent(self, steps):
        return (np.array(steps) - self._low) * self._share - 100 * (np.array(MOTORS) != "gripper")


class MemoryController:
    """A Machine without a network: what is sent is obeyed at once, and its newest packet comes when one looks."""

    def __init__(self, version):
        self.machine, self.got = Machine(p.VERSIONS[version], power_s=0.1), 0
        self.is_plugged, self.is_silent, self.cuts = True, False, 0
        self._before = clock.monotonic()

    def connect(self, address, timeout):
        if not self.is_plugged:
            raise ConnectionRefusedError
        return Wire(self, address[1])

    def advance(self):
        """Let its time follow the clock, at once where nothing moves or is about to."""
        machine = self.machine
        for _ in range(int((clock.monotonic() - self._before) / p.PERIOD)):
            self._before += p.PERIOD
            is_due = min(machine._enabled_at, machine._power_at) < np.inf
            if is_due or machine.speed.any() or (machine.q != machine._target).any():
                machine.advance(p.PERIOD)
            else:
                machine.time += p.PERIOD


class Wire:
    """One port of a MemoryController, as a socket."""

    def __init__(self, served, port):
        self._served, self._port, self._cuts, self._out, self._seen = served, port, served.cuts, b"", -1.0

    def setblocking(self, *words):
        pass

    setsockopt = close = setblocking

    def recv(self, most):
        served = self._served
        served.advance()
        if served.cuts > self._cuts:
            return b""
        is_new = self._port == p.FEEDBACK and served.is_plugged and not served.is_silent
        if is_new and served.machine.time > self._seen:
            self._seen = served.machine.time
            return served.machine.packet()
        data, self._out = self._out, b""
        if not data:
            raise BlockingIOError
        return data

    def send(self, data):
        served = self._served
        if served.cuts > self._cuts:
            raise BrokenPipeError
        if served.is_plugged:
            served.advance()
            served.got += not data.startswith(b"GetErrorID")
            self._out += (served.machine.obey(data.decode(), self._port) or "").encode()
        return len(data)


class Dobot(DobotArm):
    """A Dobot arm on a MemoryController, whose ports the driver must have been given."""

    def __init__(self, served, version):
        self.served, self._named = served, version
        self.begin_anew()

    def begin_anew(self):
        super().__init__("a host", version=self._named)

    @property
    def got(self):
        return self.served.got

    @property
    def at(self):
        return np.deg2rad(self.served.machine.q)

    def led(self):
        machine = self.served.machine
        return np.deg2rad(np.where(machine.is_enabled, machine._target, np.nan))

    def upset(self, random, *, mends=False):
        served, machine = self.served, self.served.machine
        if mends:
            machine.release()
            served.is_plugged, served.is_silent, machine.is_tcp = random.random() < 0.9, False, True
            return
        what = random.choice(["alarm", "press", "disable", "pause", "screen", "cut", "unplug", "silence", "hand"])
        if what in ("press", "disable", "pause"):
            getattr(machine, str(what))()
        elif what == "alarm":
            machine.alarm(p.COLLIDED)
        elif what == "hand":
            machine.disable()
            machine.stand(machine.q + random.normal(0, 10, 6))
        elif what == "screen":
            machine.is_tcp = False
        elif what == "cut":
            served.cuts += 1
        else:
            served.is_plugged, served.is_silent = what != "unplug", what == "silence"
