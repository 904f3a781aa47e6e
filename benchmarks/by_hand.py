"""Small Hugging Face models at the peak that checkpointing by hand has: what would users have done without Outgrow?

    python benchmarks/by_hand.py --output benchmarks/results/by-hand.json
    python benchmarks/by_hand.py --ragged --output benchmarks/results/by-hand-ragged.json
    python benchmarks/by_hand.py --compiled --output benchmarks/results/by-hand-compiled.json

Each model trains plainly, with its own `gradient_checkpointing_enable()`, and in a session whose budget is the
measured peak of the latter; each in a process of its own, on one thread, by turns, with glibc's heap kept. Times are
medians. With `--ragged` each step has sentences of another length, or larger or smaller images, at random: the peak
is that of the largest, and times are means. With `--compiled` each layer is compiled (`layer.compile()`), in all
three set-ups. Needs `transformers`; weights and data are made up.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

from environment import environment, write

STEPS, SETTLING = 20, 8
RAGGED_STEPS, RAGGED_SETTLING = 160, 60
_BATCH, _WORDS = 4, 2000
# glibc keeps what is freed, for all set-ups alike.
_KEEPS_HEAP = {"MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "9000000000"}
_UNBOUNDED = 1 << 40

Loss = Callable[[int], Any]


def built(name: str) -> tuple[Any, Loss]:
    """A model, and what gives its loss on a batch of sentences of so many words, or of images so wide."""
    import torch
    import transformers

    small = {"vocab_size": _WORDS, "num_attention_heads": 4}
    wide = {**small, "hidden_size": 256, "num_hidden_layers": 6}
    images = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024}
    own: dict[str, tuple[str, dict[str, Any]]] = {
        "GPT2LMHeadModel": ("GPT2Config", {"vocab_size": _WORDS, "n_embd": 256, "n_layer": 6, "n_head": 4}),
        "BertForMaskedLM": ("BertConfig", {**wide, "intermediate_size": 1024}),
        "LlamaForCausalLM": ("LlamaConfig", {**wide, "num_key_value_heads": 2, "intermediate_size": 688}),
        "MixtralForCausalLM": (
            "MixtralConfig",
            {
                **small,
                "hidden_size": 192,
                "num_hidden_layers": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 512,
                "num_local_experts": 4,
            },
        ),
        "MambaForCausalLM": (
            "MambaConfig",
            {"vocab_size": _WORDS, "hidden_size": 192, "num_hidden_layers": 4, "state_size": 8},
        ),
        "ViTForImageClassification": ("ViTConfig", {**images, "image_size": 112, "patch_size": 8}),
        "SwinForImageClassification": (
            "SwinConfig",
            {"embed_dim": 48, "depths": [2, 2, 2, 2], "num_heads": [2, 4, 8, 8]},
        ),
        "SegformerForSemanticSegmentation": ("SegformerConfig", {"num_labels": 10}),
    }
    configuration, given = own[name]
    model = getattr(transformers, name)(getattr(transformers, configuration)(**given)).train()

    def loss_of_words(length: int) -> Any:
        words = torch.randint(5, _WORDS, (_BATCH, length))
        return model(input_ids=words, labels=words).loss

    def loss_of_images(side: int) -> Any:
        pixels = torch.randn(_BATCH, 3, side, side)
        labels = torch.zeros(_BATCH, *([side, side] if name.startswith("Seg") else []), dtype=torch.long)
        return model(pixel_values=pixels, labels=labels).loss

    return model, loss_of_images if name.startswith(("ViT", "Swin", "Segformer")) else loss_of_words


# The sizes of a batch, where it may have more than one: the last is that of all steps that are not ragged.
MODELS: dict[str, Sequence[int]] = {
    "GPT2LMHeadModel": range(32, 193),
    "BertForMaskedLM": range(32, 193),
    "LlamaForCausalLM": range(32, 193),
    "MixtralForCausalLM": range(32, 193),
    "MambaForCausalLM": range(32, 193),
    "ViTForImageClassification": (112,),
    "SwinForImageClassification": (224,),
    "SegformerForSemanticSegmentation": range(64, 129, 4),
}


# Whose layers are compiled without a break, and can do with what checkpointing by hand takes then.
COMPILED = ("GPT2LMHeadModel", "BertForMaskedLM", "LlamaForCausalLM")


def train(name: str, *, by_hand: bool, compiled: bool, budget: int | None, turns: Connection) -> None:
    """A process: a step at each word that comes, and back go its seconds and its peak in bytes (0: not measured)."""
    import torch

    import outgrow

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss = built(name)
    if by_hand:
        model.gradient_checkpointing_enable()
    if compiled:
        model.config.use_cache = False  # checkpointing does that by itself
        from transformers.modeling_layers import GradientCheckpointingLayer

        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    session = None if budget is None else outgrow.Session(model, optimizer, budget=budget)
    while size := turns.recv():
        torch.manual_seed(1)
        start = time.perf_counter()
        if session is None:
            loss(size).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with session.step():
                loss(size).backward()
                optimizer.step()
                optimizer.zero_grad()
        seconds = time.perf_counter() - start
        turns.send((seconds, 0 if session is None else session.summary().measured_peak_bytes))
    if session is not None:
        session.close()


class SetUp:
    """One of them, ready for its turns."""

    def __init__(self, name: str, *, by_hand: bool = False, compiled: bool, budget: int | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._turns, theirs = context.Pipe()
        arguments = {"by_hand": by_hand, "compiled": compiled, "budget": budget, "turns": theirs}
        self._process = context.Process(target=train, args=(name,), kwargs=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def step(self, size: int) -> tuple[float, int]:
        """Seconds, and the peak in bytes."""
        self._turns.send(size)
        seconds, peak = self._turns.recv()
        return float(seconds), int(peak)

    def close(self) -> None:
        self._turns.send(0)
        self._process.join()


def peak_of(name: str, *, by_hand: bool, compiled: bool) -> int:
    """Live bytes at the highest, in a session that has room for all; optimizer state is there from the second on."""
    alone = SetUp(name, by_hand=by_hand, compiled=compiled, budget=_UNBOUNDED)
    peak = max(alone.step(MODELS[name][-1])[1] for _ in range(3))
    alone.close()
    return peak


def compared(
    name: str,
    sizes: Sequence[int],
    settling: int,
    average: Callable[[Iterable[float]], float],
    *,
    compiled: bool,
) -> dict[str, Any]:
    """The row of one model trained on batches of these sizes: bytes, and seconds on average once all has settled."""
    plain_peak, hand_peak = (peak_of(name, by_hand=by_hand, compiled=compiled) for by_hand in (False, True))
    set_ups = {
        "plain": SetUp(name, compiled=compiled),
        "by_hand": SetUp(name, by_hand=True, compiled=compiled),
        "outgrow": SetUp(name, compiled=compiled, budget=hand_peak),
    }
    taken: dict[str, list[tuple[float, int]]] = {kind: [] for kind in set_ups}
    for size in sizes:
        for kind, set_up in set_ups.items():
            taken[kind].append(set_up.step(size))
    for set_up in set_ups.values():
        set_up.close()
    seconds = {f"{kind}_seconds": average(each for each, _ in steps[settling:]) for kind, steps in taken.items()}
    peak = max(each for _, each in taken["outgrow"])
    return {"model": name, "plain_bytes": plain_peak, "by_hand_bytes": hand_peak, "outgrow_bytes": peak, **seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--ragged", action="store_true", help="batches of ever other sizes")
    parser.add_argument("--compiled", action="store_true", help=f"compile each layer (of {', '.join(COMPILED)})")
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    os.environ.update(_KEEPS_HEAP, OMP_NUM_THREADS="1", TRANSFORMERS_VERBOSITY="error")
    rows = []
    for name in options.models or (COMPILED if options.compiled else MODELS):
        known = MODELS[name]
        if options.ragged and len(known) == 1:
            continue
        if options.ragged:
            draw = Random(0)
            sizes = [draw.choice(known) for _ in range(RAGGED_STEPS)]
            rows.append(compared(name, sizes, RAGGED_SETTLING, mean, compiled=options.compiled))
        else:
            rows.append(compared(name, [known[-1]] * STEPS, SETTLING, median, compiled=options.compiled))
        row = rows[-1]
        hand, ours = (row[f"{kind}_seconds"] / row["plain_seconds"] for kind in ("by_hand", "outgrow"))
        share = row["by_hand_bytes"] / row["plain_bytes"]
        print(
            f"{name} at {share:.0%} of its plain peak: by hand {hand:.2f} plain steps, Outgrow {ours:.2f}", flush=True
        )
    if options.output:
        write(options.output, {"environment": {**environment(), "threads": 1}, "rows": rows})
    else:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
