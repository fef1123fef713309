"""Composes config/ and the command line's options (Hydra) into one config, and refuses unknown or wrong ones. No torch.

Hydra composes. We check each word before, because Hydra refuses some in many lines, and accepts some that make no
sense. Each error is one sentence.
"""

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, InstantiationException, OverrideParseException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from serl_client.errors import ConfigError
from serl_client.words import check_choice, nearest
from yaml import YAMLError

from serl_launcher.sharing import denied

REMEMBERED = ("algo", "policy", "head", "network", "critic")  # groups whose words a run keeps, if it reads them
MOVED = {  # {former name of a module: its name}; former ones stand in yamls, words and checkpoints that people keep
    "serl_launcher.utils.optim": "serl_launcher.optim.optimizer",
    **{f"robot_infra.robots.{name}": f"robot_infra.drivers.{name}" for name in ("bimanual", "dobot", "lerobot")},
    **{
        f"robot_infra.robots.{name}": f"robot_infra.tasks.{name}"
        for name in ("arm", "corridor", "dobot_cell", "dobot_sim", "fake", "gym", "puck", "sim_arm", "wall", "wrappers")
    },
}
OTHERS = {  # {a word of other projects' scripts, such as Hi-ORS and HIL-SERL: what it is here}
    "checkpoint_path": "a run is its folder, and resumed: say run_dir=..., or policy.weights=... for a published PI0",
    "unique_identifier": "say run_dir=runs/... for the run, and name=... for this actor",
    "training.num_gpus": "say ranks=...",
    "logging.logger": "say log=wandb, tensorboard or false",
    "exp_name": "say run_dir=runs/...",
}
ALSO = {"log": False, "task.cameras": "auto"}  # what they take besides their default's kind
NATIVE = re.compile(r"task\.env\.cameras\.\w+\.(width|height|fps)")  # null: as the camera has it
INFERENCE_PORT = 5589  # of a learner
DAMAGED = "bring it back from a backup, or delete it, and say again what this run was begun with"
NOISE = ("full_key", "object_type", "reference_type", "See http", "Set the environment")  # lines that help nobody


def composed(folder: Path, words: Sequence[str]) -> DictConfig:
    """Compose folder/base.yaml with the command line's words (`algo=sac`, `seed=1`), and resolve all values.

    A run folder keeps the words of REMEMBERED with which its run began. They hold until a new word replaces them. So
    an evaluation, or another plan, needs no repetition. The words of a plan that trains nothing hold for that one
    start: an evaluation with policy.head.steps=1 does not change how the run trains.

    Raises ConfigError for an unknown choice or key, with the nearest right one; for a value of another kind than the
    yaml's; for a missing value; for a seed that is none; for a word about a group that the run does not read
    (`policy=gaussian head=mip`); and for a plan that is made for another algorithm than the run's.
    """
    others = [word for word in words if _key(word) in REMEMBERED or _group(word) not in REMEMBERED]
    plain: dict[tuple[str, ...], DictConfig] = {}
    place = _composed(folder, others, plain)  # where the run is, and what plan and algorithm choose for themselves
    said = {_key(word) for word in words}
    remembered = [word for word in _remembered(place) if said.isdisjoint((_key(word), _group(word)))]
    for word in sorted(set(place.remembered) - set(_defaults(folder))):
        begun = next((kept for kept in remembered if _key(kept) == _key(word)), word)
        if begun != word:
            raise ConfigError(
                f"plan and algorithm are made for {word}, and the run in {place.run_dir} was begun with {begun}: "
                f"choose another run_dir=..., or say {_key(word)}=... to have it that way"
            )
    words = [*remembered, *words]
    made = place if words == others else _composed(folder, words, plain)
    _check_read(folder, [word for word in words if word not in remembered], made)
    if (kept := _remembered(place)) and not _trains(made):
        made.remembered = kept
    seed = OmegaConf.select(made, "seed", default=0)
    if not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise ConfigError(f"seed={seed}: say a whole number from 0 on")
    if OmegaConf.select(made, "inference_port") == "auto" and not made.actor:
        made.inference_port = INFERENCE_PORT
    return made


def _defaults(folder: Path) -> list[str]:
    """Return what base.yaml chooses of each group, as words."""
    entries: Any = OmegaConf.select(OmegaConf.load(folder / "base.yaml"), "defaults", default=[])
    return [f"{group}={name}" for entry in entries if isinstance(entry, Mapping) for group, name in entry.items()]


def saved(run_dir: Path) -> DictConfig:
    """Return the config with which a learner was last started on this run folder; an empty one if none ever was."""
    kept = run_dir / "config.yaml"
    try:
        found = _renamed(OmegaConf.load(kept)) if kept.is_file() else OmegaConf.create()
    except PermissionError as error:
        raise ConfigError(denied(error)) from None
    except (OmegaConfBaseException, OSError, RecursionError, ValueError, YAMLError) as error:
        raise ConfigError(f"{kept} cannot be read ({str(error).partition(chr(10))[0]}): {DAMAGED}") from None
    if not isinstance(found, DictConfig):
        raise ConfigError(f"{kept} holds no settings: {DAMAGED}")
    return found


def renamed(tree: Any) -> Any:
    """Return a tree of plain data in which each string that names a thing of a module of MOVED has its new name."""
    if isinstance(tree, Mapping):
        return {key: renamed(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [renamed(value) for value in tree]
    module, dot, name = tree.rpartition(".") if isinstance(tree, str) else ("", "", "")
    return f"{MOVED[module]}{dot}{name}" if module in MOVED else tree


def _renamed(config: Any) -> Any:
    """Return a DictConfig with today's names; a key that it does not have stays an error."""
    is_strict = bool(OmegaConf.is_struct(config))
    return OmegaConf.create(renamed(OmegaConf.to_container(config)), flags={"struct": is_strict})


def _remembered(config: DictConfig) -> list[str]:
    """Return the words that the run folder of this config keeps."""
    return list(OmegaConf.select(saved(Path(str(config.run_dir))), "remembered", default=[])) if config.learner else []


def _trains(config: DictConfig) -> bool:
    phases = OmegaConf.select(config, "plan.phases") or {}
    return any("updates" in phase for phase in phases.values() if isinstance(phase, Mapping))


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def _group(word: str) -> str:
    return _key(word).partition(".")[0]


def _composed(folder: Path, words: Sequence[str], plain: dict[tuple[str, ...], DictConfig]) -> DictConfig:
    """plain: what choices alone make; a composition takes a tenth of a second."""
    choices = groups(folder)
    try:
        overrides = [_read(word) for word in words]
        chosen = [override for override in overrides if override.key_or_group in choices]
        values = [override for override in overrides if override not in chosen]
        for override in chosen:
            names = choices[override.key_or_group]
            where = f"{override.input_line} (there are {', '.join(names)})"
            check_choice(override.value(), names, override.key_or_group, where)
        with initialize_config_dir(str(folder), version_base="1.3"):
            said = tuple(str(override.input_line) for override in chosen)
            if said not in plain:
                plain[said] = compose("base", list(said), return_hydra_config=True)
            for override in values:
                _check(override, plain[said])
            config = compose("base", list(words), return_hydra_config=True) if values else copy.deepcopy(plain[said])
        taken = {group: f"{group}={config.hydra.runtime.choices[group]}" for group in _read_groups(config)}
        with open_dict(config):
            del config.hydra
        kept = (word for word in words if _group(word) in taken and word not in taken.values())
        config.remembered = [*taken.values(), *kept]
        for name in _missing(OmegaConf.to_container(config)):
            raise ConfigError(f"{name} has no value: say {name}=...")
        config = _renamed(config)
        OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(_sentence(error)) from None
    return config


def groups(folder: Path) -> dict[str, list[str]]:
    """Return {group: its choices}."""
    found = sorted(path for path in folder.iterdir() if path.is_dir())
    return {path.name: sorted(yaml.stem for yaml in path.glob("*.yaml")) for path in found}


def factory(config: DictConfig, name: str, *arguments: Any) -> Callable[..., Any]:
    """Return the callable that the config describes under `name`. The caller will call it with `arguments`.

    Raises ConfigError if it does not exist, or if it does not take the options that stand there.
    """
    try:
        made = instantiate(OmegaConf.select(config, name))
        inspect.signature(made).bind(*arguments)
    except InstantiationException as error:
        raise ConfigError(f"{name}: {_sentence(error)}") from None
    except (TypeError, ValueError) as error:  # of inspect; a partial hides the reason in the cause
        raise ConfigError(f"{name}: {_sentence(error.__cause__ or error)}") from None
    return made


def changeable(config: DictConfig, name: str) -> set[str]:
    """Return the full names (`algo.policy.steps`) of the options below `name` that a trained run may change.

    A class names its own in a tuple `changeable`, and has those of its bases: rates, schedules and weights of losses,
    what costs memory or time, and what belongs to its sampler alone. What gives the saved state its meaning is in none:
    sizes, scales, the discount.
    """
    node = OmegaConf.select(config, name)
    if not isinstance(node, DictConfig):
        return set()
    kinds = getattr(get_object(node._target_), "__mro__", ()) if "_target_" in node else ()
    of_class = {option for kind in kinds for option in vars(kind).get("changeable", ())}
    below = (changeable(config, f"{name}.{key}") for key in node)
    return {f"{name}.{option}" for option in of_class}.union(*below)


def cameras(config: DictConfig) -> dict[str, list[str]]:
    """Return {word of the command line: the cameras that it names} for each part of a resolved config that has one."""
    algo = OmegaConf.to_container(config.algo)
    own = OmegaConf.to_container(config.policy) if isinstance(algo, Mapping) and "policy" in algo else {}
    found = {where: names for where, names in _cameras(algo, "algo") if not where.startswith("algo.policy.")}
    return {**dict(_cameras(own, "policy")), **found}


def _cameras(tree: Any, where: str) -> Iterator[tuple[str, list[str]]]:
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        if key == "cameras":
            yield f"{where}.{key}", [value] if isinstance(value, str) else list(value)
        yield from _cameras(value, f"{where}.{key}")


def _read_groups(config: DictConfig) -> list[str]:
    """Return the groups of REMEMBERED that a run of this unresolved config reads: the algorithm, and what it names."""
    text = str(OmegaConf.to_container(config, resolve=False))
    return [group for group in REMEMBERED if group == "algo" or f"${{{group}}}" in text]


def _check_read(folder: Path, words: Sequence[str], config: DictConfig) -> None:
    """Raise ConfigError if one of the words is about a group that this config does not read."""
    read = {_group(word) for word in config.remembered}
    chosen = " ".join(config.remembered[:2])
    for word in words:
        if (group := _group(word)) not in REMEMBERED or group in read:
            continue
        own = [name for name in ("algo", "policy") if group in config[name]]
        readers = [
            f"{path.parent.name}={path.stem}" for path in sorted(folder.glob("*/*.yaml"))
            if f"{group}: ${{{group}}}" in path.read_text()
        ]  # fmt: skip
        how = [f"{own[0]}.{word}"] if own and "." in _key(word) else []
        raise ConfigError(f"{word}: {chosen} does not read {group}: say {' or '.join([*how, *readers])}")


def _read(word: str) -> Override:
    try:
        override = OverridesParser.create().parse_overrides([word])[0]
    except OverrideParseException:
        raise ConfigError(
            f"cannot read {word!r}: write name=value, as in seed=1, and quote a text with spaces, commas or brackets"
            + (f", so {quoted}" if (quoted := _quoted(word)) else "")
        ) from None
    if override.is_sweep_override():
        raise ConfigError(f"{word}: give one value; a list is written {override.key_or_group}=[...], in quotes")
    return override


def _quoted(word: str) -> str:
    """Return the word as a shell and Hydra take it, if it lacks nothing but quotes; else an empty text."""
    key, found, value = word.partition("=")
    if not found:
        return ""
    is_list = value.startswith("[") and value.endswith("]")
    texts = [part.strip(" '\"") for part in (value[1:-1].split(",") if is_list else [value])]
    said = ", ".join(text if re.fullmatch(r"[\w.-]+", text) else f"'{text}'" for text in texts)
    said = f"{key}=[{said}]" if is_list else f"{key}={said}"
    try:
        OverridesParser.create().parse_overrides([said])
    except OverrideParseException:
        return ""
    return f'"{said}"'


def _check(override: Override, defaults: DictConfig) -> None:
    """Raise ConfigError if there is no such key, or if its value is of another kind than the default."""
    *above, last = override.key_or_group.split(".")
    node: Any = defaults
    for depth, part in enumerate((above or [last]) if override.is_add() else [*above, last]):
        if not isinstance(node, DictConfig):
            return
        if part not in map(str, node.keys()):
            raise ConfigError(_unknown(override, part, node, ".".join(above[:depth]) or "the config"))
        if depth < len(above) and OmegaConf.is_interpolation(node, part):
            its = str(node._get_node(part)).strip("${}")
            rest = str(override.input_line).partition(".".join([*above[: depth + 1], ""]))[2]
            raise ConfigError(f"{override.input_line}: {'.'.join(above[: depth + 1])} is {its}: say {its}.{rest}")
        node = _value(node, part)
    if override.is_delete() and not above:
        raise ConfigError(f"{override.input_line}: {last} can be changed, but not left out: say {last}=...")
    if not override.is_add() and not override.is_delete():
        _check_kind(override, node)


def _value(node: DictConfig, key: str) -> Any:
    """Return the value under `key`; None if it is missing, or interpolates a missing one."""
    try:
        return OmegaConf.select(node, key)
    except OmegaConfBaseException:
        return None


def _unknown(override: Override, part: str, node: DictConfig, where: str) -> str:
    if ours := OTHERS.get(str(override.key_or_group)):
        return f"{override.input_line}: {where} has no key {part!r}; {ours}"
    hint = nearest(part, [str(key) for key in node]) or f"to add it, write +{override.input_line}"
    return f"{override.input_line}: {where} has no key {part!r}; {hint}"


def _check_kind(override: Override, default: Any) -> None:
    value = override.value()
    if (isinstance(value, str) and "${" in value) or ALSO.get(override.key_or_group, ...) == value:
        return
    if value is None and NATIVE.fullmatch(override.key_or_group):
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, bool):
        fits, kind = isinstance(value, bool), "true or false"
    elif isinstance(default, int | float):
        fits, kind = is_number, "a number"
    else:
        fits, kind = not isinstance(default, str) or is_number or (isinstance(value, str) and value), "a text"
    if not fits:
        raise ConfigError(f"{override.input_line}: should be {kind}, like {str(default).lower()}")


def _missing(node: Any, where: str = "") -> Iterator[str]:
    """Yield the names of the values that a person has to give, depth first."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _missing(value, f"{where}.{key}" if where else str(key))
    elif node == "???":
        yield where


def _sentence(error: BaseException) -> str:
    """Return a library's error of several lines as one line."""
    lines = [line.strip() for line in str(error).splitlines()]
    text = " ".join(line for line in lines if line and not line.startswith(NOISE))
    return text.partition(", set env var")[0]
