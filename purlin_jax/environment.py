"""Numbers that the environment sets."""

from __future__ import annotations

import os


def number(name: str, default: float) -> float:
    """The variable `name`, or the default where it is empty or not set.

    Raises:
      ValueError: it is no number, or negative.
    """
    given = os.environ.get(name) or str(default)
    try:
        found = float(given)
    except ValueError:
        found = -1.0
    if not found >= 0:
        raise ValueError(f"purlin: {name}={given}; unset it, or set it to a number as {default:g}")
    return found
