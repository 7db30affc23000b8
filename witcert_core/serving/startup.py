"""What stops a server at its start: one line that names it, whatever went wrong."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from witcert_core.errors import WitCertError

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


def refuse_on_error(check: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run a start-up check of ours; what it raises becomes SystemExit with one line, which ends this process.

    Engines log ordinary exceptions of a plugin and serve on without it. The traceback is logged at debug level.
    """
    try:
        return check(*args, **kwargs)
    except Exception as error:
        _LOG.debug("why the server was stopped at its start", exc_info=error)
        raise SystemExit(f"witcert: {in_one_line(error)}") from error


def in_one_line(error: BaseException) -> str:
    """A refusal as it is; of any other error its kind, its words and where in this package it came from."""
    said = " ".join(str(error).split())
    if isinstance(error, WitCertError):
        return said
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if "witcert" in frame.filename), frames[-1] if frames else None)
    where = "" if frame is None else f" (in {frame.name}, {Path(frame.filename).name}:{frame.lineno})"
    return (
        f"{type(error).__name__}: {said}{where}, so the meter cannot start and nothing is served; unset WITCERT_POLICY "
        "to serve without it, and please report this line"
    )
