"""Keeps what a frozen network says of each stored image, from the first batch on that asks: pixels are encoded once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from serl_client.spec import Array, Feature

from serl_launcher.replay.choice import Numbers


@dataclass(frozen=True, slots=True)
class Encoder:
    """A function of images that never changes: uint8 [n, height, width, channel] -> [n, ...] of this feature."""

    feature: Feature
    encode: Callable[[Array], Array]


class EncodedImages:
    """Stands in the place of the images of a source, [rows, ...]: `take` gives what the encoder says of them.

    It is not saved: a run that resumes encodes anew what it draws.
    """

    def __init__(self, images: Array, encoder: Encoder) -> None:
        self._images, self._encode, feature = images, encoder.encode, encoder.feature
        self._values = np.zeros((len(images), *feature.shape), feature.dtype)
        self._is_known = np.zeros(len(images), bool)

    def forget(self, rows: Numbers) -> None:
        """Encode these rows anew: they hold other images now."""
        self._is_known[rows] = False

    def take(self, rows: Numbers, **how: Any) -> Array:
        """Copy what is said of these rows, as numpy's `take` copies numbers."""
        if not self._is_known.take(rows).all():
            new = np.unique(rows[~self._is_known[rows]])
            self._values[new], self._is_known[new] = self._encode(self._images[new]), True
        return self._values.take(rows, **how)
