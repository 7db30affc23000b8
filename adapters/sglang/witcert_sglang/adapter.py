"""What this adapter is called, and the SGLang that it was tested with. Importable without SGLang."""

from witcert_core.serving import Adapter

ADAPTER = Adapter(
    engine="SGLang",
    module="sglang",
    tested="0.5.23",
    package="witcert_sglang",
    distribution="witcert-sglang",
    plugins="sglang.srt.plugins",
    chooser="SGLANG_PLUGINS",
)
