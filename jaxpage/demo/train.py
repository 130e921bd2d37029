"""Train the demo model: `python -m jaxpage.demo.train`, or measure one: `... train eval`.

One command, on a CPU or a GPU. It may be killed at any time: the same command resumes from its last checkpoint, and
gives the same weights, because the data of a step depends only on the seed and the step.
"""

from __future__ import annotations

import functools
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from optax.contrib import MuonDimensionNumbers, muon

from jaxpage.demo import checkpoint, evaluate, network, save, start, tokens
from jaxpage.models.config import ModelConfig

PACKAGED = checkpoint()
STAGES = (
    tokens.Stage(start=0, rows=3, length=192),
    tokens.Stage(start=120, rows=6, length=256),
    tokens.Stage(start=240, rows=12, length=320),
    tokens.Stage(start=480, rows=24, length=448, tables=0.6),
    tokens.Stage(start=600, rows=12, length=256, tables=0.4),  # tables are learned, sums are not
)
WATCHED = ("look-up 3", "look-up 8", "look-up 16", "look-up 24", "json 3", "sum 0..99", "talk")
WARM_UP = 20  # steps over which the learning rates rise

Params = dict[str, jax.Array]
Step = Callable[[Params, optax.OptState, Any], tuple[Any, Any, jax.Array]]


@dataclass(frozen=True)
class Training:
    """One run. The packaged checkpoint was made with the defaults."""

    output: Path = Path("demo_model")  # the saved model; its state is kept in `<output>.state`
    steps: int = 1500
    tokens_per_step: int = 6144
    matrix_rate: float = 0.008  # Muon's, for the matrices in the layers
    vector_rate: float = 0.003  # Adam's, for the embedding and the norms; biases: 3 times as much
    record_rate: float = 0.1  # factor on the rates for the attention of layer 0 (see `start`)
    decay: float = 0.45  # fraction of the steps, at the end, over which the rates fall to 0
    seed: int = 0
    log_every: int = 25
    save_every: int = 100  # steps; held-out accuracy is measured too


def main(options: Training) -> None:
    """Train, or resume training, and save the model.

    Raises ValueError if the state has other options, FileExistsError if the output exists.
    """
    check_options(options)
    tokenizer = tokens.train_tokenizer()
    config = network.model_config(tokenizer.get_vocab_size())
    params = jax.tree.map(jnp.asarray, start.weights(config, tokenizer, seed=options.seed))

    def batch_of(step: int) -> tokens.Batch:
        stage, size = stage_of(options, step), options.tokens_per_step
        return tokens.training_batch(tokenizer, stage, tokens=size, seed=options.seed, step=step)

    def watch(params: network.Params) -> dict[str, float]:
        return evaluate.accuracy(params, config, tokenizer, suites=WATCHED, questions=60)

    params = fit(options, params, functools.partial(loss_of, config), batch_of, watch)
    save.write(options.output, params, tokenizer)
    print(f"saved {options.output}")
    report(options.output)


def loss_of(config: ModelConfig, params: network.Params, batch: tokens.Batch) -> jax.Array:
    return network.loss(params, config, batch)


def fit(
    options: Any,
    params: Params,
    loss: Callable[[Params, Any], jax.Array],
    batch_of: Callable[[int], Any],
    watch: Callable[[Params], dict[str, float]],
) -> Params:
    """Train, or resume training, on the `batch_of` each step. Prints the loss and the results of `watch`.

    `options`: a `Training`, or an object with its fields.
    """
    optimiser = optimiser_of(options, params)
    memory, step_of = optimiser.init(params), make_step(loss, optimiser)
    count = sum(p.size for p in params.values())
    print(f"{count:,} parameters, {jax.default_backend()}")
    with ocp.CheckpointManager(
        _state_folder(options) / "steps",
        options=ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False),
    ) as manager:
        done = manager.latest_step() or 0
        if done:
            saved = ocp.args.StandardRestore((params, memory))
            params, memory = manager.restore(done, args=saved)
            print(f"going on after step {done}")
        began, seen = time.monotonic(), 0
        for step in range(done + 1, options.steps + 1):
            batch = batch_of(step - 1)
            params, memory, found = step_of(params, memory, batch)
            seen += batch.tokens.size
            if step % options.log_every == 0:
                rate = seen / (time.monotonic() - began)
                print(f"step {step}: loss {found:.3f}, {rate:.0f} tokens/s", flush=True)
            if step % options.save_every == 0 or step == options.steps:
                manager.save(step, args=ocp.args.StandardSave((params, memory)))
                shares = ", ".join(f"{suite} {share:.2f}" for suite, share in watch(params).items())
                print(f"  held out: {shares}", flush=True)
    return params


def stage_of(options: Training, step: int) -> tokens.Stage:
    """The stage of a step's rows: mostly the newest one, sometimes an earlier one, so that nothing is forgotten."""
    reached = [stage for stage in STAGES if step >= stage.start]
    rng = random.Random(f"stage {options.seed}/{step}")
    return reached[-1] if rng.random() < 0.6 else rng.choice(reached)


def optimiser_of(options: Any, params: Params) -> optax.GradientTransformation:
    """Muon for the matrices of the layers, Adam for all other parameters."""

    def schedule(rate: float) -> optax.Schedule:
        falling = int(options.steps * options.decay)
        parts = [
            optax.linear_schedule(0.0, rate, WARM_UP),
            optax.constant_schedule(rate),
            optax.linear_schedule(rate, 0.0, falling),
        ]
        return optax.join_schedules(parts, [WARM_UP, options.steps - falling])

    def scale(updates: Any, _: Any) -> Any:
        return {path: update * factors[path] for path, update in updates.items()}

    weights_are_out_in = MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    matrices: Any = {
        path: weights_are_out_in if p.ndim == 2 and "embed" not in path else None
        for path, p in params.items()
    }
    factors = {
        path: (3.0 if path.endswith("bias") else 1.0)
        * (options.record_rate if "layers.0.self_attn" in path else 1.0)
        for path in params
    }
    by_kind = muon(
        schedule(options.matrix_rate),
        adam_learning_rate=schedule(options.vector_rate),
        adam_b2=0.98,
        muon_weight_dimension_numbers=matrices,
    )
    return optax.chain(by_kind, optax.stateless(scale))


def make_step(
    loss: Callable[[Params, Any], jax.Array], optimiser: optax.GradientTransformation
) -> Step:
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, memory: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        found, gradients = jax.value_and_grad(loss)(params, batch)
        updates, memory = optimiser.update(gradients, memory, params)
        return optax.apply_updates(params, updates), memory, found

    return step


def _state_folder(options: Any) -> Path:
    return options.output.resolve().with_name(options.output.name + ".state")


def check_options(options: Any) -> None:
    """Store the options of this run, or compare them with those of the run to resume.

    Raises ValueError if they differ, FileExistsError if the output exists.
    """
    if options.output.exists():
        raise FileExistsError(f"{options.output} exists already; name another folder with --output")
    given = asdict(options) | {"output": options.output.name}
    path = _state_folder(options) / "options.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(given, indent=2) + "\n", encoding="utf-8")
    elif (begun := json.loads(path.read_text(encoding="utf-8"))) != given:
        changed = {k: (begun.get(k), v) for k, v in given.items() if begun.get(k) != v}
        raise ValueError(
            f"{path.parent} holds a run with other options, {changed} (then, now); "
            "give the same options, or remove it to start anew"
        )


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
