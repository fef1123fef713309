"""Compositions of config/ that are kept: Hydra takes a fifth of a second for each, and tests ask for few of them."""

import pickle
from functools import cache

import pytest
from hydra import compose
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from serl_launcher import config
from tests.shared.common import CONFIG

GROUPS = frozenset(config.groups(CONFIG))


@cache
def _kept(choices):
    """Pickled: a tenth of the time that a deep copy takes."""
    return pickle.dumps(compose("base", list(choices), return_hydra_config=True))


def composed_once(name, words, return_hydra_config=False):
    """Return what hydra.compose does: what the choices make is composed once, and the values are set in a copy of it.

    Any other folder than config/ is composed anew each time.
    """
    sources = GlobalHydra.instance().config_loader().get_sources()
    if not any(source.path == str(CONFIG) for source in sources):
        return compose(name, list(words), return_hydra_config=return_hydra_config)
    overrides = OverridesParser.create().parse_overrides(list(words))
    chosen = [override for override in overrides if override.key_or_group in GROUPS]
    made = pickle.loads(_kept(tuple(str(override.input_line) for override in chosen)))
    if not return_hydra_config:
        del made._content["hydra"]
    ConfigLoaderImpl._apply_overrides_to_config([each for each in overrides if each not in chosen], made)
    return made


@pytest.fixture(autouse=True)
def composes_once(monkeypatch):
    """Applies to every test, and not to the programs that tests start."""
    monkeypatch.setattr(config, "compose", composed_once)
