"""Writes a file beside its final place and moves it there whole, so that nobody sees half of one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """A path beside ``path`` for a new file, which replaces ``path`` when the block ends and goes when it raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    staging = Path(name)
    try:
        yield staging
        staging.chmod(0o644)  # mkstemp makes it private
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)
