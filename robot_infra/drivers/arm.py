"""Defines the driver of a real arm: derive a class from it to add a robot. Only the guard calls it."""

from collections.abc import Mapping, Sequence

from serl_client.env import Observation
from serl_client.spec import Array, Feature

UNITS = ("rad", "m", "deg", "%", "")
LEADER = "leader"  # what `sense` calls the positions of a leader arm, in the order of `entries`


class Arm:
    """Drives one arm. The guard makes it in a process of its own, and calls it there from one thread.

        class Slide(Arm):  # a linear axis with a gripper, whose maker gives a class Port
            entries = {"x": "m", "gripper": ""}

            def __init__(self, address):
                self._port = Port(address)

            def read(self):
                return np.array(self._port.positions(), np.float32)

            def write(self, positions):
                self._port.go_to(positions.tolist())

    The tutorial docs/tutorials/own_robot.md goes on from here.

    The constructor takes `address` (a device, a host or a serial number) and options of its own. It connects, moves
    nothing, and leaves the motors on or off as they are. Each method returns within a few milliseconds, `recover` and
    `enable` within seconds, and raises RobotFault for what fails. If no more positions come, because the guard was
    killed, the arm's own controller must hold the last ones.
    """

    entries: Mapping[str, str]  # {entry of its positions, as limits and home name it: one of UNITS, "" for no unit}
    ranges: Mapping[str, Sequence[float]] = {}  # {entry: [low, high]} of entries whose ends it knows itself
    observation: Mapping[str, Feature] = {}  # what `sense` gives
    tools: Sequence[str] = ("tool",)  # names of its tools, as limits name them, where `tool` knows them
    leads: bool = False  # true: it has a leader arm with motors, which `lead` moves
    is_simulated: bool = False  # true: nobody can be hurt, so it moves before a person has said ready

    def read(self) -> Array:
        """Return the measured positions [J]."""
        raise NotImplementedError

    def write(self, positions: Array) -> Array | None:
        """Send set points [J] to the arm's controller: `servo_hz` times a second, once `enable` has returned.

        Return what the controller made of them [J], if it tells; None: it takes them as they are.
        """
        raise NotImplementedError

    def recover(self) -> None:
        """Connect again what was lost and clear a fault, after a person has said ready; the motors stay as they are."""

    def enable(self) -> Array | None:
        """Switch the motors on where the arm stands, once the guard has seen that this is within its range.

        It must move nothing: a controller that remembers an old goal gets the measured positions before its motors come
        on, and motors that were on keep their goals. Return the positions [J] at which the motors hold it now, as the
        controller tells and not as a sensor does; NaN for each entry of which it tells nothing; None: of none.
        """
        return None

    def close(self) -> None:
        """Give the connection back. The motors stay on, because an arm without torque falls."""

    def tool(self, positions: Array) -> Array | None:
        """Return where the tool is at these positions [J], as [3] metres, or each of `tools`, as [K, 3].

        None: this is not known.
        """
        return None

    def sense(self) -> Observation:
        """Return what `observation` names, once for each step; images are uint8 [height, width, channel].

        `observation.state` replaces the measured positions. A name that does not begin with `observation.` is kept
        from policies, for judges.
        """
        return {}

    def read_leader(self) -> Array:
        """Return the measured positions [J] of the leader arm. The guard asks for this and the next two if `leads`."""
        raise NotImplementedError

    def enable_leader(self) -> Array:
        """Switch on those motors of the leader that are off, where it stands; return where all hold it, [J]."""
        raise NotImplementedError

    def lead(self, positions: Array | None) -> None:
        """Send set points [J] to the leader, once `enable_leader` has returned; None: switch its motors off."""
        raise NotImplementedError

    def scene(self, seed: int) -> None:
        """Set up the start that `seed` names, at once: only simulations can, and they need no way home."""
        raise NotImplementedError
