"""WitCert for vLLM. Nothing happens unless the environment variable WITCERT_POLICY names a policy file.

This module imports the standard library only: vLLM logs a plugin whose import fails and serves on without it, so
everything that can fail is inside `load`, which stops the process instead.
"""

import importlib.util
import os

POLICY_VARIABLE = "WITCERT_POLICY"


def load() -> None:
    """Entry point `vllm.general_plugins`, called in every vLLM process, possibly more than once.

    Raises SystemExit with one line when the policy, the quantizer or the engine cannot be used.
    """
    path = os.environ.get(POLICY_VARIABLE)
    if not path:
        return
    if importlib.util.find_spec("vllm") is None:
        raise SystemExit("witcert: vLLM is not installed in this environment; install vllm==0.32.0 into it")
    try:
        from witcert_vllm.plugin import install

        install(path)
    except Exception as error:
        deliberate = any(cls.__name__ == "WitCertError" for cls in type(error).__mro__)
        said = " ".join(str(error).split())
        raise SystemExit(f"witcert: {said if deliberate else f'{type(error).__name__}: {said}'}") from error
