"""How an adapter is put into an engine's process, and what stops a server at its start: one line that names it."""

from __future__ import annotations

import importlib.util
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from witcert_core.errors import WitCertError
from witcert_core.serving.refusals import Refusal, refuse

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adapter:
    """What an adapter is called, and the version of its engine that it was tested with.

    engine: as messages call it, "SGLang". module: of the engine. package, distribution: of the adapter.
    plugins: the engine's entry-point group. chooser: the environment variable that says which of them are loaded.
    """

    engine: str
    module: str
    tested: str
    package: str
    distribution: str
    plugins: str
    chooser: str

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    def installed_version(self) -> str:
        """That of the engine installed here."""
        return str(import_module(self.module).__version__)

    def version_row(self) -> Refusal[str]:
        """Of the installed version; a build of the tested one ("0.32.0+cpu") is that one."""
        return Refusal(
            f"any {self.engine} but {self.tested}",
            f"{self.distribution} was tested with {self.engine} {self.tested}, on whose private names it relies "
            "(`witcert doctor` checks them)",
            "install that version, or unset WITCERT_POLICY to serve without a meter",
            lambda found: found.partition("+")[0] != self.tested and f"{self.engine} {found} is installed",
        )

    def check_version(self) -> None:
        """Raise UnsupportedError unless the engine installed here is the tested one."""
        refuse([self.version_row()], self.installed_version())


def install_adapter(adapter: Adapter, policy_path: str) -> None:
    """Put the policy at `policy_path` in force in this process of the engine; what hinders it ends the process.

    Raises SystemExit with one line: engines catch ordinary exceptions of a plugin and would go on unmetered.
    """
    if not adapter.installed:
        raise SystemExit(
            f"witcert: {adapter.engine} is not installed in this environment; install {adapter.module}=="
            f"{adapter.tested} into it"
        )
    refuse_on_error(_install, adapter, policy_path)


def _install(adapter: Adapter, policy_path: str) -> None:
    adapter.check_version()
    import_module(f"{adapter.package}.plugin").install(policy_path)


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
