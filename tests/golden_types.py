"""Types of the golden tests' fixtures."""

from __future__ import annotations

from collections.abc import Callable

Golden = Callable[[str, str], None]
