"""The 1,797 real handwritten digits of scikit-learn's wheel, and a judge of samples."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits
from sklearn.svm import SVC


def images_and_labels() -> tuple[np.ndarray, np.ndarray]:
    """Images [1797, 8, 8] float32 in [-1, 1] and labels [1797] int32."""
    digits = load_digits()
    return digits.images.astype(np.float32) / 8 - 1, digits.target.astype(np.int32)


class Judge:
    """A support vector classifier trained on the even-numbered digits and tested on the others."""

    def __init__(self) -> None:
        images, labels = images_and_labels()
        flat = images.reshape(len(images), -1)
        self._model = SVC(gamma=0.064).fit(flat[::2], labels[::2])
        self.accuracy = float(self._model.score(flat[1::2], labels[1::2]))

    def agreement(self, images: np.ndarray, labels: np.ndarray) -> float:
        """Share of `images` [n, 8, 8] that the classifier calls by their label."""
        return float(self._model.score(np.clip(images, -1, 1).reshape(len(images), -1), labels))
