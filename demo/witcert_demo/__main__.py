"""`python -m witcert_demo`: what `make demo` runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from witcert_demo.run import MODELS, main

parser = argparse.ArgumentParser(prog="python -m witcert_demo", description="A metered SGLang server on this CPU.")
model_help = "smollm2, a real chat model, or tiny, in this repository (default: smollm2 where it can be had)"
parser.add_argument("--model", choices=MODELS, help=model_help)
kept_help = "directory the real model is kept in (default .cache/smollm2)"
parser.add_argument("--models", type=Path, default=Path(".cache/smollm2"), help=kept_help)
parser.add_argument("--per-task", type=int, default=3, help="tiny: questions of each of the four tasks (default 3)")
parser.add_argument("--num-tokens", type=int, default=512, help="tiny: length of a prompt, 48 to 1984 (default 512)")
parser.add_argument("--svg", type=Path, help="also save the output as a picture")
logs_help = "directory of the servers' logs (default .cache/demo)"
parser.add_argument("--logs", type=Path, default=Path(".cache/demo"), help=logs_help)
options = parser.parse_args()
sys.exit(main(options.model, options.models, options.per_task, options.num_tokens, options.svg, options.logs))
