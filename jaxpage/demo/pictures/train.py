"""Train the demo model with pictures: `python -m jaxpage.demo.pictures.train`, or measure one: `... train eval`.

One command, on a CPU or a GPU. It may be killed at any time: the same command resumes from its last checkpoint, and
gives the same weights, because the data of a step depends only on the seed and the step.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxpage.demo.pictures import checkpoint, evaluate, examples, network, save
from jaxpage.demo.train import check_options, fit

PACKAGED = checkpoint()


@dataclass(frozen=True)
class Training:
    """One run. The packaged checkpoint was made with the defaults."""

    output: Path = Path("picture_model")  # the saved model; its state is kept in `<output>.state`
    steps: int = 3000
    pictures_per_step: int = 24
    matrix_rate: float = 0.01  # Muon's, for the matrices in the layers
    vector_rate: float = 0.003  # Adam's, for all other parameters; biases: 3 times as much
    record_rate: float = 1.0  # factor on the rates for the attention of layer 0
    decay: float = 0.45  # fraction of the steps, at the end, over which the rates fall to 0
    seed: int = 0
    log_every: int = 25
    save_every: int = 250  # steps; held-out accuracy is measured too


def main(options: Training) -> None:
    """Train, or resume training, and save the model.

    Raises ValueError if the state has other options, FileExistsError if the output exists.
    """
    check_options(options)
    tokenizer = examples.train_tokenizer()
    config = network.model_config(tokenizer.get_vocab_size())

    def loss(params: network.Params, batch: network.Batch) -> jax.Array:
        return network.loss(params, config, batch)

    def batch_of(step: int) -> network.Batch:
        rows = options.pictures_per_step
        return examples.training_batch(tokenizer, rows=rows, seed=options.seed, step=step)

    watch = functools.partial(_watch, tokenizer=tokenizer)
    params = fit(options, network.start(config, options.seed), loss, batch_of, watch)
    save.write(options.output, params, tokenizer)
    print(f"saved {options.output}")
    report(options.output)


def _watch(params: network.Params, tokenizer: Any) -> dict[str, float]:
    config = network.model_config(tokenizer.get_vocab_size())
    return evaluate.accuracy(params, config, tokenizer, questions=60)


def report(folder: Path = PACKAGED, questions: int = 200) -> None:
    """Print the held-out accuracy of a saved model, in bfloat16."""
    found = evaluate.accuracy(*save.read(folder), questions=questions)
    for suite, share in found.items():
        print(f"{suite:<12} {share:.3f}", flush=True)


if __name__ == "__main__":
    import tyro

    if sys.argv[1:2] == ["eval"]:
        tyro.cli(report, args=sys.argv[2:])
    else:
        main(tyro.cli(Training))
