"""Joins two arms into one bimanual robot: prefixes left_ and right_; a fault of one holds both."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
from serl_client.env import Observation
from serl_client.errors import ConfigError, RobotFault
from serl_client.spec import Array, Feature

from robot_infra.drivers.arm import LEADER, Arm
from robot_infra.drivers.owner import open_arm

STATE = "observation.state"
JOINED = (STATE, LEADER)  # of these the left arm's entries come first, then the right one's
WORDS = {"driver", "address", "options"}


class BimanualArm(Arm):
    """Drives two arms that need not be of the same kind; the guard sees one.

    address: a name of the pair. left, right: {driver, address, options} of each arm, as of a single one: the full name
    of a class derived from Arm, where it is, and further arguments; nobody else may own either of them.

    What they observe is merged by name. The state and a leader arm's positions are joined, left first. If one arm
    raises RobotFault, the guard writes to neither, so that both controllers hold their newest set point. Raises
    ConfigError if both observe something else by the same name, or only one has a leader arm, or knows its tool.
    """

    def __init__(self, address: str, *, left: Mapping[str, Any], right: Mapping[str, Any]) -> None:
        self._arms: dict[str, Arm] = {}
        with ExitStack() as stack:
            for side, words in (("left", left), ("right", right)):
                if not {"driver", "address"} <= set(words) <= WORDS:
                    raise ConfigError(
                        f"task.env.options.{side}: say driver and address of this arm, and its options: {words}"
                    )
                arm = open_arm(words["driver"], str(words["address"]), words.get("options") or {})
                self._arms[side] = stack.enter_context(arm)
            self._describe()
            self._opened = stack.pop_all()

    def _describe(self) -> None:
        """Say what both are made of."""
        arms = self._arms.items()
        self.entries = {f"{side}_{name}": unit for side, arm in arms for name, unit in arm.entries.items()}
        self.ranges = {f"{side}_{name}": ends for side, arm in arms for name, ends in arm.ranges.items()}
        self.is_simulated = all(arm.is_simulated for arm in self._arms.values())
        self.leads = self._arms["left"].leads
        if self._arms["right"].leads != self.leads:
            raise ConfigError("the leader of one arm follows and the other one does not: say it of both, or of neither")
        self.tools = tuple(f"{side}_{name}" for side, arm in arms for name in arm.tools)
        self._at: list[Array] = []  # the newest measurement of each arm
        self._split = len(self._arms["left"].entries)
        features: dict[str, Feature] = {}
        for arm in self._arms.values():
            if twice := sorted(set(arm.observation) & set(features) - set(JOINED)):
                raise ConfigError(f"both arms observe {twice[0]}: give the cameras of one of them other names")
            features |= arm.observation
        for name in JOINED:
            if name in features:
                features[name] = self._joined(name)
        self.observation = features

    def _joined(self, name: str) -> Feature:
        """Return the feature of both arms' values of this name. An arm without a state gives its positions."""
        size, names = 0, []
        for side, arm in self._arms.items():
            part = arm.observation.get(name)
            if part is None and name == LEADER:
                raise ConfigError("one arm has a leader arm and the other has none: give both one, or neither")
            entries = part.names if part else tuple(arm.entries)
            size += part.shape[0] if part else len(entries)
            names += [f"{side}_{entry}" for entry in entries]
        return Feature((size,), names=tuple(names) if len(names) == size else ())

    def read(self) -> Array:
        self._at = [np.asarray(at, float) for at in self._each(lambda arm: arm.read())]
        return np.concatenate(self._at)

    def write(self, positions: Array) -> Array | None:
        parts = iter(wanted := self._parts(positions))
        made = self._each(lambda arm: arm.write(next(parts)))
        if all(part is None for part in made):
            return None
        return np.concatenate([part if of is None else of for part, of in zip(wanted, made, strict=True)])

    def recover(self) -> None:
        self._each(lambda arm: arm.recover())

    def enable(self) -> Array:
        held = self._each(lambda arm: arm.enable())
        sizes = [len(arm.entries) for arm in self._arms.values()]
        return np.concatenate([np.full(n, np.nan) if at is None else at for at, n in zip(held, sizes, strict=True)])

    def close(self) -> None:
        self._opened.close()

    def tool(self, positions: Array) -> Array | None:
        parts = iter(self._parts(positions))
        tools = [tool for tool in self._each(lambda arm: arm.tool(next(parts))) if tool is not None]
        if len(tools) == 1:
            raise ConfigError(
                "one arm knows where its tool is and the other does not, so that nothing would limit it: take drivers "
                "that both say it, or neither"
            )
        return np.concatenate([np.atleast_2d(tool) for tool in tools]) if tools else None

    def sense(self) -> Observation:
        found = self._each(lambda arm: arm.sense())
        merged = found[0] | found[1]
        for name in self.observation.keys() & set(JOINED):
            values = [one.get(name, at) for one, at in zip(found, self._at, strict=True)]
            merged[name] = np.concatenate(values).astype(np.float32)
        return merged

    def read_leader(self) -> Array:
        return np.concatenate(self._each(lambda arm: arm.read_leader()))

    def enable_leader(self) -> Array:
        return np.concatenate(self._each(lambda arm: arm.enable_leader()))

    def lead(self, positions: Array | None) -> None:
        parts = iter([None, None] if positions is None else self._parts(positions))
        self._each(lambda arm: arm.lead(next(parts)))

    def _parts(self, positions: Array) -> list[Array]:
        return np.split(positions, [self._split])

    def _each(self, call: Callable[[Arm], Any]) -> list[Any]:
        """Return what each arm answers. Raises RobotFault that says which arm failed; the next one is not asked."""
        answers = []
        for side, arm in self._arms.items():
            try:
                answers.append(call(arm))
            except RobotFault as fault:
                raise RobotFault(f"{side} arm: {fault}", fault.kind) from None
        return answers
