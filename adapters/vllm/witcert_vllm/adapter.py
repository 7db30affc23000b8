"""What this adapter is called, and the vLLM that it was tested with. Importable without vLLM."""

from witcert_core.serving import Adapter

ADAPTER = Adapter(
    engine="vLLM",
    module="vllm",
    tested="0.32.0",
    package="witcert_vllm",
    distribution="witcert-vllm",
    plugins="vllm.general_plugins",
    chooser="VLLM_PLUGINS",
)
