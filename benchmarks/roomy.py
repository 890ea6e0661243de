"""`bridge` as if the disk were large: a sparse model's output is holes, which the check of free space cannot know."""

from __future__ import annotations

import shutil
from typing import Any

from bridge.cli import cli

if __name__ == "__main__":
    real = shutil.disk_usage
    usage: Any = lambda path: real(path)._replace(free=1 << 50)  # noqa: E731
    shutil.disk_usage = usage
    cli()
