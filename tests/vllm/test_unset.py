"""Without WITCERT_POLICY nothing is installed; what the adapter assumes of vLLM is read from vLLM itself."""

from __future__ import annotations

import inspect
import os
import pkgutil
import subprocess
import sys

import pytest
from witcert_vllm.refusals.server import OPTIONS, WORKERS

pytestmark = pytest.mark.vllm

PROBE = """
import sys
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.entrypoints.launchers import app
touched = [f for f in (EngineArgs.create_engine_config, OutputProcessor.process_outputs, OutputProcessor.add_request,
                       app.init_entrypoints_middleware)
           if hasattr(f, "__witcert_original__")]
paths = [m.name for m in AttentionBackendEnum if m.value and m.get_path() != m.value]
print(touched, paths, sorted(m for m in sys.modules if m.startswith("witcert")))
"""


def test_nothing_is_installed_without_a_policy() -> None:
    env = {k: v for k, v in os.environ.items() if k != "WITCERT_POLICY"}
    done = subprocess.run([sys.executable, "-c", PROBE], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[] [] ['witcert_vllm']"


def test_every_refused_option_is_an_option_with_a_fine_default() -> None:
    from vllm.engine.arg_utils import EngineArgs

    defaults = EngineArgs.__dataclass_fields__
    for option in OPTIONS:
        assert option.name in defaults
        assert defaults[option.name].default == option.allowed or not defaults[option.name].default


def test_the_workers_we_extend_exist() -> None:
    for stock, ours in WORKERS.items():
        if "cpu" in stock:
            assert issubclass(pkgutil.resolve_name(ours), pkgutil.resolve_name(stock))


def test_the_scheduler_asks_its_connector_too_late_without_us() -> None:
    """What `scheduler.py` is for; if vLLM ever changes this order, the subclass can go."""
    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(Scheduler.update_from_output)
    assert source.index("self._free_request(") < source.index("self._update_from_kv_xfer_finished(")
