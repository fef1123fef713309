"""A client of a Dobot controller, written from its protocol document alone: it shares no code with the product.

ADDRESS V3|V4 as words of a program: clears errors, enables, moves joint 1 by two degrees, and prints where it is.
"""

import socket
import struct
import sys
import time

PORTS = {"V3": (29999, 30003), "V4": (29999, 29999)}  # of the dashboard and of motions


class Client:
    """Asks the dashboard, streams set points, and reads the feedback; angles are degrees."""

    def __init__(self, address, version):
        self.version, (dashboard, motion) = version, PORTS[version]
        self.dashboard = socket.create_connection((address, dashboard), timeout=10)
        self.motion = self.dashboard if motion == dashboard else socket.create_connection((address, motion), timeout=10)
        self.feedback = socket.create_connection((address, 30004), timeout=10)
        self.text = ""

    def ask(self, command):
        """The error number of a command, and what stands between the braces of its reply."""
        self.dashboard.sendall(command.encode())
        return self.answer(command.partition("(")[0])

    def answer(self, name):
        while ";" not in self.text:
            self.text += self.dashboard.recv(1024).decode()
        reply, self.text = self.text.split(";", 1)
        error, rest = reply.split(",", 1)
        values, call = rest.rsplit("},", 1)
        assert call.startswith(f"{name}("), reply
        return int(error), values.removeprefix("{")

    def servo(self, angles):
        """One set point; V3 has no reply to it."""
        self.motion.sendall(f"ServoJ({','.join(map(str, angles))},t=0.03,gain=500)".encode())
        return self.answer("ServoJ") if self.version == "V4" else (0, "")

    def packet(self):
        """(robot mode, joint angles, error flag) of the next packet of 1440 bytes."""
        data = b""
        while len(data) < 1440:
            data += self.feedback.recv(1440 - len(data))
        assert struct.unpack_from("<H", data, 0) == (1440,)
        assert struct.unpack_from("<Q", data, 48) == (0x0123456789ABCDEF,)
        return struct.unpack_from("<Q", data, 24)[0], struct.unpack_from("<6d", data, 432), data[1029]

    def until(self, modes):
        """Wait for one of these modes; return the joint angles."""
        while (seen := self.packet())[0] not in modes:
            pass
        return seen[1]

    def close(self):
        for link in {self.dashboard, self.motion, self.feedback}:
            link.close()


def main(address, version):
    client = Client(address, version)
    if client.packet()[0] in (9, 11):
        alarms = client.ask("GetErrorID()")[1]
        assert client.ask("ClearError()")[0] == 0, alarms
    assert client.ask("EnableRobot()")[0] == 0
    start = client.until((5, 7))
    for step in range(1, 21):
        assert client.servo([start[0] + step / 10, *start[1:]])[0] == 0
        time.sleep(0.03)
    while abs(client.packet()[1][0] - start[0] - 2) > 0.01:
        pass
    sys.stdout.write(f"{client.packet()[1]}\n")
    client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
