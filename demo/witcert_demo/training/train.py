"""Train the retrieval model: ``python -m witcert_demo.training.train --out DIR --seed 0 --threads 1``.

AdamW over the curriculum, loss on answer tokens only, less than an hour on one CPU core. The run ends with
an evaluation and a Hugging Face checkpoint in DIR, beside it ``training.json``: command, seed, versions, wall
time and accuracies. The state is saved on the way; the same command with ``--resume`` goes on from there, to
the same weights as an unbroken run with the same thread count on the same machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from witcert_demo.checkpoint import write_checkpoint
from witcert_demo.model import ModelConfig, TinyLlama
from witcert_demo.tasks import TASKS
from witcert_demo.training.curriculum import CURRICULUM, SMOKE, Stage, batch_of_step, num_steps
from witcert_demo.training.offline import evaluate_model

STATE_FILE = "train_state.pt"
_SAVE_EVERY = 100
_PRINT_EVERY = 50
_EVALUATION_SEED = 2024


@dataclass(frozen=True)
class Recipe:
    """Everything the weights depend on, apart from machine, torch version and thread count."""

    seed: int = 0
    curriculum: tuple[Stage, ...] = CURRICULUM
    model: ModelConfig = field(default_factory=ModelConfig)
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    num_warmup_steps: int = 100
    flat_share: float = 0.6
    final_share: float = 0.02

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, flat for ``flat_share`` of all steps, then a cosine down to ``final_share``."""
        warmup = min(1.0, (step + 1) / self.num_warmup_steps)
        progress = step / num_steps(self.curriculum)
        late = max(0.0, progress - self.flat_share) / (1 - self.flat_share)
        cosine = 0.5 * (1 + math.cos(math.pi * late))
        return self.learning_rate * warmup * (self.final_share + (1 - self.final_share) * cosine)


def smoke_recipe(seed: int) -> Recipe:
    """Few steps, so a shorter warm-up to a higher rate."""
    return Recipe(seed=seed, curriculum=SMOKE, learning_rate=3e-3, num_warmup_steps=20, flat_share=0.9)


class Trainer:
    """Model, optimizer and history of one run; ``losses`` in nats per answer token, one a step."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        torch.manual_seed(recipe.seed)
        self.model = TinyLlama(recipe.model)
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() >= 2]
        gains = [parameter for parameter in self.model.parameters() if parameter.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": recipe.weight_decay},
                {"params": gains, "weight_decay": 0.0},
            ],
            lr=recipe.learning_rate,
            betas=(0.9, 0.98),
            eps=1e-9,
        )
        self.losses: list[float] = []
        self.num_tokens = 0
        self.seconds = 0.0

    @property
    def step(self) -> int:
        """Number of updates made."""
        return len(self.losses)

    def train_step(self) -> float:
        """One update on the next batch of the curriculum; returns the share of answer tokens right."""
        started = time.monotonic()
        batch = batch_of_step(self.recipe.curriculum, self.recipe.seed, self.step)
        ids, is_answer = torch.from_numpy(batch.ids), torch.from_numpy(batch.is_answer)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate_at(self.step)
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model.logits(self.model.hidden(ids[:, :-1])[is_answer[:, 1:]])
        targets = ids[:, 1:][is_answer[:, 1:]]
        loss = F.cross_entropy(logits.float(), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.item())
        self.num_tokens += ids.numel()
        self.seconds += time.monotonic() - started
        return (logits.argmax(-1) == targets).float().mean().item()

    def save(self, path: Path) -> None:
        """Write the state so that a crash while writing leaves the previous one in place."""
        state = {
            "recipe": json.dumps(asdict(self.recipe)),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "losses": self.losses,
            "num_tokens": self.num_tokens,
            "seconds": self.seconds,
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, path)

    def load(self, path: Path) -> None:
        """Go on from ``path``. Raises ``ValueError`` if it was made with another recipe."""
        state = torch.load(path, weights_only=True)
        if state["recipe"] != json.dumps(asdict(self.recipe)):
            raise ValueError(
                f"{path} was made with another recipe ({state['recipe']}); resume with the same --seed and "
                "--smoke, or start again without --resume"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses = state["losses"]
        self.num_tokens, self.seconds = state["num_tokens"], state["seconds"]


def train(recipe: Recipe, out: Path, *, resume: bool = False, stop_at: int | None = None) -> Trainer:
    """Run ``recipe`` to its end, or to step ``stop_at``, keeping the state in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(recipe)
    if resume:
        trainer.load(out / STATE_FILE)
    trainer.model.train()
    end = num_steps(recipe.curriculum) if stop_at is None else min(stop_at, num_steps(recipe.curriculum))
    shares: list[float] = []
    while trainer.step < end:
        shares.append(trainer.train_step())
        if trainer.step % _PRINT_EVERY == 0 or trainer.step == end:
            loss, share = sum(trainer.losses[-len(shares) :]) / len(shares), sum(shares) / len(shares)
            print(
                f"step {trainer.step}/{end} loss {loss:.4f} answer tokens right {share:.3f} "
                f"lr {recipe.learning_rate_at(trainer.step - 1):.1e} "
                f"tokens {trainer.num_tokens / 1e6:.2f}M {trainer.seconds:.0f}s",
                flush=True,
            )
            shares.clear()
        if trainer.step % _SAVE_EVERY == 0 or trainer.step == end:
            trainer.save(out / STATE_FILE)
    trainer.model.eval()
    return trainer


def measure(model: TinyLlama, lengths: Sequence[int], count: int) -> dict[str, dict[str, float]]:
    """Exact-match accuracy of every task at every prompt length, cache unquantized."""
    return {
        str(num_tokens): {
            task: evaluate_model(model, None, task, num_tokens=num_tokens, count=count, seed=_EVALUATION_SEED).accuracy
            for task in TASKS
        }
        for num_tokens in lengths
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m witcert_demo.training.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of checkpoint and run state")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help=f"go on from {STATE_FILE} in --out")
    parser.add_argument("--smoke", action="store_true", help="a few seconds, only to see the loss fall")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    recipe = smoke_recipe(options.seed) if options.smoke else Recipe(seed=options.seed)
    trainer = train(recipe, options.out, resume=options.resume)
    lengths, count = ((64,), 8) if options.smoke else ((128, 256, 512, 1024), 128)
    accuracies = measure(trainer.model, lengths, count)
    write_checkpoint(options.out, trainer.model.state_dict(), recipe.model)
    record = {
        "command": f"python -m witcert_demo.training.train --out DIR --seed {options.seed} --threads {options.threads}"
        + (" --smoke" if options.smoke else ""),
        "seed": options.seed,
        "threads": options.threads,
        "num_steps": trainer.step,
        "num_tokens": trainer.num_tokens,
        "num_parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "wall_time_s": round(trainer.seconds),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "machine": platform.machine(),
        "recipe": asdict(recipe),
        "evaluation": {
            "score": "exact match of the whole answer, greedy, cache unquantized",
            "count_per_task": count,
            "sample_seed": _EVALUATION_SEED,
            "accuracy_by_prompt_tokens": accuracies,
        },
    }
    (options.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(accuracies), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
