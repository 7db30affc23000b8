"""WitCert for SGLang. Nothing happens unless the environment variable WITCERT_POLICY names a policy file.

This module imports the standard library only: SGLang logs a plugin whose import fails and serves on without it, so
everything that can fail is inside `load`, which stops the process instead.
"""

import os


def load() -> None:
    """Entry point `sglang.srt.plugins`, called once in every SGLang process.

    Raises SystemExit with one line when the policy, the quantizer or the engine cannot be used: SGLang catches
    ordinary exceptions here and would go on unmetered.
    """
    path = os.environ.get("WITCERT_POLICY")
    if not path:
        return
    try:
        from witcert_core.serving import install_adapter
        from witcert_sglang.adapter import ADAPTER
    except Exception as error:
        raise SystemExit(f"witcert: {type(error).__name__}: {error}") from error
    install_adapter(ADAPTER, path)
