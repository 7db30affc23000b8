"""A model of random weights whose tokens are bytes: it can write what the demonstration's closed vocabulary cannot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from witcert_demo.vocabulary import VOCAB_SIZE

MARKS = ("<pad>", "<bos>", "<end>")  # the ids that the demonstration's config gives them
LAYERS = 2


def write_byte_model(checkpoint: Path, target: Path) -> Path:
    """The config of `checkpoint`, fewer layers, a tokenizer of bytes; to be served with `--load-format dummy`."""
    target.mkdir()
    config = json.loads((checkpoint / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
    if (checkpoint / "generation_config.json").exists():
        shutil.copy(checkpoint / "generation_config.json", target)
    symbols = [*MARKS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    symbols += [f"<unused{i}>" for i in range(len(symbols), VOCAB_SIZE)]
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*MARKS, *symbols[len(MARKS) + 256 :]])
    tokenizer.save(str(target / "tokenizer.json"))
    pad, bos, end = MARKS
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "bos_token": bos,
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    return target
