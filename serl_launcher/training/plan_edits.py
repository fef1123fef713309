"""Decides what of a phase may be edited between two starts of a run: pace, batches, evaluations, higher bounds."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from serl_client.errors import ConfigError
from serl_client.words import check_choice

from serl_launcher.training.plan import Actors, Phase, Plan, Update, parse


def check_edits(plan: Plan, name: str | None, said: Mapping[str, Any], *, accept: bool) -> list[str]:
    """Return how a phase in which a checkpoint stands was edited since, as `name: now, then`.

    Pace, batches, publications and the evaluations within it may change, and bounds may be raised. Anything else needs
    `accept`: it may end the phase at once, or give what was learned another meaning.
    name: of that phase; None: the plan had ended. said: the phase as it was. Raises ConfigError if the plan lacks the
    phase, and for an edit that nobody accepted.
    """
    if name is None:
        return []
    check_choice(name, plan.phases, "phase", "the checkpoint stands in a phase that the plan does not have")
    then, now = _completed(said), plain(plan.phases[name])
    edits = {key: f"{name}.{key}: {now[key]}, {then.get(key)}" for key in now if now[key] != then.get(key)}
    if (asked := [text for key, text in edits.items() if not _is_free(key, then.get(key), now[key])]) and not accept:
        raise ConfigError(
            f"phase {name!r} was edited since the checkpoint (now, then): {'; '.join(asked)}. Say accept_plan=true to "
            "go on with the phase as it is now, or restore it"
        )
    return list(edits.values())


def _is_free(key: str, then: Any, now: Any) -> bool:
    """Return whether a key of a phase may change without consent."""
    if key == "updates":
        return [{**each, "every": 1, "batch": None} for each in then] == [
            {**each, "every": 1, "batch": None} for each in now
        ]
    return key in ("pace", "publish_every", "evaluate") or (key == "until" and is_raised(then, now))


def is_raised(then: Sequence[str], now: Sequence[str], *, truly: bool = False) -> bool:
    """Return whether conditions are the same but for bounds, none of which is lower now; truly: and one is higher."""
    before, after = ([parse(text) for text in texts] for texts in (then, now))
    same = [[[replace(term, bound=0.0) for term in terms] for terms in each] for each in (before, after)]
    if same[0] != same[1]:
        return False
    bounds = list(zip(*([term.bound for terms in each for term in terms] for each in (before, after)), strict=True))
    return all(old <= new for old, new in bounds) and (not truly or any(old < new for old, new in bounds))


def _completed(phase: Mapping[str, Any]) -> dict[str, Any]:
    """Return a phase as `plain` gives it, with the defaults of options that it was kept without."""
    updates = [json.loads(json.dumps(asdict(Update(**update)))) for update in phase["updates"]]
    within = phase.get("evaluate") and {**phase["evaluate"], "phase": _completed(phase["evaluate"]["phase"])}
    return {**phase, "actors": asdict(Actors(**phase["actors"])), "updates": updates, "evaluate": within}


def plain(phase: Phase | None) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(phase))) if phase else {}
