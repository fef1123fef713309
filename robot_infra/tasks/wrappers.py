"""Wraps gymnasium suites (MiniGrid, Atari) whose spaces do not fit GymEnv: its option `wrap`."""

from typing import Any


def numbers(env: Any) -> Any:
    """Return a MiniGrid task that is seen as numbers, uint8 [147]: kind, colour and state of the 7 x 7 fields ahead."""
    from gymnasium.wrappers import FlattenObservation
    from minigrid.wrappers import ImgObsWrapper

    return FlattenObservation(ImgObsWrapper(env))


def atari(env: Any, *, pixels: int, repeat: int) -> Any:
    """Return an Atari game, made with frameskip=1, that is seen as grey pictures [pixels, pixels, 1].

    Each action is repeated, and a picture is the larger of the last two frames (Machado et al. 2018, JAIR 61).
    """
    from gymnasium.wrappers import AtariPreprocessing

    return AtariPreprocessing(env, screen_size=pixels, frame_skip=repeat, grayscale_newaxis=True)
