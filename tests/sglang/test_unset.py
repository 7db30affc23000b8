"""Without WITCERT_POLICY nothing is installed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
