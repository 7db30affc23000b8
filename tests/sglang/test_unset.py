"""Without WITCERT_POLICY nothing is installed; the contract with SGLang's private names is read from SGLang itself."""

from __future__ import annotations

import inspect
import os
import pkgutil
import subprocess
import sys

import pytest
from witcert_sglang.plugin import Installation

from witcert_core.policy import parse_policy

pytestmark = pytest.mark.sglang

PROBE = """
import sys
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
before = dict(ATTENTION_BACKENDS)
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
changed = [name for name in ATTENTION_BACKENDS if ATTENTION_BACKENDS[name] is not before[name]]
ours = sorted(m for m in sys.modules if m.startswith("witcert"))
print(len(HookRegistry._hooks), len(HookRegistry._patched), changed, ours)
"""


def test_nothing_is_installed_without_a_policy() -> None:
    env = {k: v for k, v in os.environ.items() if k != "WITCERT_POLICY"}
    done = subprocess.run([sys.executable, "-c", PROBE], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "0 0 [] ['witcert_sglang']"


def test_every_hooked_function_has_the_parameters_we_use() -> None:
    policy = parse_policy({"version": 1, "quantizer": {"name": "none"}})
    for hook in Installation(policy, policy.build_quantizer()).hooks():
        owner, _, name = hook.target.rpartition(".")
        raw = inspect.getattr_static(pkgutil.resolve_name(owner), name)
        function = inspect.unwrap(raw.__func__ if isinstance(raw, classmethod) else raw)
        parameters = tuple(inspect.signature(function).parameters)
        assert parameters[: len(hook.parameters)] == hook.parameters, hook.target
