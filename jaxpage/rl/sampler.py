"""`Sampler`: an engine that samples with the live parameters of a trainer's module.

Knows how requests, weights and pauses of one engine go together. Must not know trainers' layouts (`binding`) nor how
an engine runs.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import jax
import numpy as np
from flax import nnx

from jaxpage.async_llm.step_loop import PauseMode
from jaxpage.async_llm.tasks import Tasks
from jaxpage.build import build
from jaxpage.config import EngineConfig, ResolvedConfig
from jaxpage.engine.engine import Engine
from jaxpage.input_processor import InputProcessor
from jaxpage.outputs import RequestOutput
from jaxpage.request import Request
from jaxpage.rl.binding import Binding
from jaxpage.rl.logprobs import logprobs, logprobs_of_rows
from jaxpage.rl.parity import ParityReport, compare
from jaxpage.rl.rollout import Padded, Rollout, make_rollout
from jaxpage.rl.scoring import Scored, make_scored, scoring_params
from jaxpage.rl.seeds import GroupSeeds
from jaxpage.rl.strict import strict_logprobs
from jaxpage.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxpage.engine.stats import EngineStats
    from jaxpage.runner.runner import Runner

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Option of the engine -> why a sampler has no use for it.
_NOT_FOR_TRAINING = {
    "quantization": "the parameters are the trainer's",
    "kv_offload_dir": "KV on disk is of weights that change",
    "runner": "a sampler generates",
}


class Sampler:
    """Samples with the parameters of a live NNX module. All methods may be called from any thread.

    `module`: one of jaxpage's models, or a module with the layout of Tunix or MaxText. Its arrays are looked up at
    every launch and never held, so a module that was trained is sampled from as it is: nothing is copied, and KV of
    before is not found any more. Replace parameters between calls, or `pause` first: what runs meanwhile may see some
    new and some old.

    Where the arrays are on other devices than the engine, or divided in another way, the engine has a copy, which
    `update` renews.
    """

    def __init__(self, module: nnx.Module, model: str, **options: Any):
        """`model`: a folder with the module's config.json, and its tokenizer unless `skip_tokenizer_init`.

        `options` are those of `LLM`. Defaults that differ: `dtype` is the module's, `logprobs_mode` "temperature".
        Raises ValueError for options that cannot be had, and for a module that does not fit config.json.
        """
        binding = Binding(module)
        options = {"dtype": binding.dtype, "logprobs_mode": "temperature"} | options
        if not hasattr(module, "visual"):  # the text part of a model that could see
            options = {"limit_mm_per_prompt": {"image": 0}} | options
        config = EngineConfig.from_options(model=model, load_format="dummy", **options)
        _check_options(config)
        built = build(config, bind=binding.prepare)
        assert isinstance(built.engine, Engine)
        self.config: ResolvedConfig = built.config
        self._binding, self._engine = binding, built.engine
        # (how often parameters had been replaced, the version from there on), ascending; callers read while it grows
        self._versions = [(0, 0)]
        runner: Any = built.engine.runner
        self._runner: Runner = runner
        self._read_weights()
        runner.weights_changed()  # there were none before
        self._tasks = Tasks(built)
        self._is_asleep = False
        self.tokenizer: Any = built.tokenizer  # None with `skip_tokenizer_init`
        self.vocab_size = built.vocab_size
        pad_id = built.tokenizer and built.tokenizer.pad_token_id
        self.pad_id: int = pad_id or 0  # of padding in rollouts
        # The threads know the tasks and not this object, so it can go while they run.
        self._finalizer = weakref.finalize(self, Tasks.shut_down, self._tasks)

    # Sampling.

    def generate(
        self,
        prompts: Any,
        params: SamplingParams | None = None,
        n: int | None = None,
        seed: int | GroupSeeds | None = None,
    ) -> Rollout:
        """Sample `n` completions of each prompt, and return when all have ended.

        `prompts`: a list of texts or of lists of ids. `params`: None for temperature 1 up to `max_model_len`; `n`
        takes the place of `params.n`. Calls from several threads share steps: 256 threads with a prompt each are
        served as one call with 256.

        `seed`: the same seed and prompts give the same tokens, whatever else runs; equal prompts of one call differ.
        `GroupSeeds` counts equal prompts over calls, for members of a group that come one by one. None: the params'
        seed, else one of the engine's, in the order of requests.

        Raises ValueError for what cannot be served, before anything runs; RuntimeError if a parameter was donated or
        deleted, StepFailedError and EngineDeadError as `AsyncLLM.generate`.
        """
        prompts = [prompts] if _is_one_prompt(prompts) else [_plain(each) for each in prompts]
        if not prompts:
            raise ValueError("prompts are empty; give at least one")
        self._binding.check_alive()
        params = _params(params, n, has_tokenizer=not self.config.skip_tokenizer_init)
        group = seed if isinstance(seed, GroupSeeds | None) else GroupSeeds(int(seed))
        version = self.version if isinstance(seed, GroupSeeds) else 0
        seeds: list[int] = []

        def prepare(inputs: InputProcessor) -> list[Request]:
            parsed = inputs.parse(prompts)
            if group is not None:
                seeds.extend(group.next(prompt.token_ids, version) for prompt in parsed)
                each = [dataclasses.replace(params, seed=seed) for seed in seeds]
                return inputs.requests(parsed, each)
            seeds.extend([-1 if params.seed is None else params.seed] * len(parsed))
            return inputs.requests(parsed, params)

        outputs = _wait(self._tasks.submit(prepare, len(prompts)))
        return make_rollout(
            outputs,
            seeds,
            pad_id=self.pad_id,
            temperature=params.temperature,
            logprobs_mode=self.config.logprobs_mode,
            version_of=self._version_of,
        )

    def score(
        self,
        token_ids: Sequence[Any],
        targets: Sequence[Sequence[int]] | None = None,
        top_k: int = 0,
        temperature: float = 1.0,
    ) -> Scored:
        """The log-probabilities of given tokens, with the current weights: prompts that are computed, and no answers.

        `token_ids`: sequences of ids, each shorter than `max_model_len`. `targets`: ids that are scored in the place of
        these tokens, one for each. `top_k`: besides, the most likely tokens in their place, at most `max_logprobs`. No
        cached KV is read. The device holds the logits of 64 tokens at a time, however long the sequences are.

        Raises ValueError for what cannot be served, and for a temperature other than 1; else as `generate`.
        """
        if temperature != 1:
            raise ValueError(
                f"temperature={temperature} cannot be scored with, only 1; jaxpage.rl.logprobs computes others"
            )
        if self.config.logprobs_mode.endswith("logits"):
            raise ValueError(f"logprobs_mode={self.config.logprobs_mode!r} has no logprobs")
        sequences = [_plain(each) for each in token_ids]
        if not sequences:
            raise ValueError("token_ids are empty; give at least one sequence")
        wanted = None if targets is None else [_plain(each) for each in targets]
        self._binding.check_alive()
        params = scoring_params(sequences, wanted, top_k)

        def prepare(inputs: InputProcessor) -> list[Request]:
            prompts = inputs.parse([{"prompt_token_ids": each} for each in sequences])
            return inputs.requests(prompts, params)

        return make_scored(_wait(self._tasks.submit(prepare, len(sequences))), top_k)

    def logprob_fn(self) -> Callable[..., jax.Array]:
        """`f(params, batch, temperature=1.0)`: `jaxpage.rl.logprobs` of parameters in the bound module's layout.

        Pure and differentiable by `params`: the module, its `nnx.State`, or a tree of arrays with its names. With
        `numerics="strict"` its values are those of the sampler, bit for bit, on the same kind of device.
        """
        model_of, compute = self._binding.model_of, self._compute_logprobs()

        def logprob(params: Any, batch: Padded, temperature: float = 1.0) -> jax.Array:
            return compute(model_of(params), batch, temperature)

        return logprob

    def _compute_logprobs(self) -> Callable[..., jax.Array]:
        if self.config.numerics == "strict":
            return partial(strict_logprobs, block_size=self.config.block_size)
        return logprobs

    def check_parity(self, rollout: Rollout) -> ParityReport:
        """Compare a rollout with the forward of `logprob_fn`, on the weights that are read now.

        Raises ValueError for a rollout that such a forward cannot repeat: of other weights than the current version's,
        or with logprobs of another mode than "temperature", or "raw" at temperature 1. With `numerics="strict"`
        ParityError if any logprob differs by a bit.
        """
        others = {v for row in rollout.weight_versions for v, _, _ in row} - {self.version}
        if others:
            raise ValueError(
                f"the rollout has tokens of weight versions {sorted(others)}; the current one is {self.version}"
            )
        mode, temperature = rollout.logprobs_mode, rollout.temperature
        if mode != "temperature" and (mode != "raw" or temperature not in (0, 1)):
            raise ValueError(f"logprobs_mode={mode!r} at temperature {temperature} is not compared")
        batch = rollout.to_padded(side="right")
        model, compute = self._binding.model_of(), self._compute_logprobs()
        found = logprobs_of_rows(compute, model, batch, temperature or 1.0)
        report = compare(batch.logprobs[batch.completion_mask], found[batch.completion_mask])
        if self.config.numerics == "strict":
            report.require_equal()
        return report

    # Weights.

    @property
    def version(self) -> int:
        """Of the weights that the last step or `update` found: 0 at first, and 1 more at each change."""
        return self._version_of(self._engine.scheduler.counters.num_weight_changes)

    def update(
        self, params: Any = None, version: int | None = None, keep_cache: bool = False
    ) -> int:
        """Take other weights between two steps; returns their version.

        `params`: None to look at the module again; or a module, an `nnx.State`, or a tree of arrays with the module's
        names, all or some, to be sampled with instead of the module's, which stays as it is. These are held until the
        next `update`; those that are the module's own arrays are not. `version`: a number of the caller's.
        `keep_cache`: KV of the old weights goes on being found.

        Where the arrays are, nothing is copied and nothing compiled. For a module on the engine's devices this call is
        not needed: each step looks by itself. Requests that run go on with the new weights, and `weight_versions` says
        which token is whose; `pause` first to have none. Raises ValueError for names or shapes that the module does not
        have, RuntimeError for arrays that were donated or deleted; the old weights stay then.
        """

        def take() -> int:
            if params is None:
                self._binding.forget_swapped()
            else:
                self._binding.swap(params)
            self._read_weights()
            number = self._engine.look_at_weights(keep_cache=keep_cache)
            if version is not None:
                if self._versions[-1][0] == number:
                    self._versions[-1] = (number, version)
                else:
                    self._versions.append((number, version))
            return self._version_of(number)

        return self._call(take)

    def _read_weights(self) -> None:
        num_bytes = self._binding.refresh()
        if num_bytes:
            logger.info("copied %.1f MB of parameters to the engine's devices", num_bytes / 1e6)
        self._runner.read_from(self._binding.variables)

    def _version_of(self, number: int) -> int:
        index = bisect_right(self._versions, number, key=itemgetter(0))
        known, version = self._versions[index - 1]
        return version + number - known

    # Pauses.

    def pause(self, mode: Literal["keep", "wait", "abort"] = "keep") -> None:
        """Sample no more; returns when the device computes nothing any more. Calls of `generate` that come now wait.

        Requests that run stay as they are ("keep"), are answered to their end ("wait"), or end with what they have, and
        their calls return that ("abort"). Without an `update` in between, those that were kept have the tokens that
        they would have had. With one they go on with the new weights and the KV that they have;
        `reset_prefix_cache(recompute=True)` has it computed anew. Raises ValueError for an unknown mode.
        """
        if mode not in tuple(PauseMode):
            raise ValueError(f"mode must be one of {', '.join(PauseMode)}, got {mode!r}")
        self._tasks.pause(PauseMode(mode)).result().result()

    def resume(self) -> None:
        """Go on, with the requests that came while paused. Raises RuntimeError while asleep."""
        if self._is_asleep:
            raise RuntimeError("the sampler is asleep and has no KV pool; call wake() first")
        self._call(self._tasks.steps.resume)

    @property
    def is_paused(self) -> bool:
        return self._tasks.steps.is_paused

    def abort(self) -> None:
        """End all requests with what they have: their calls return it, with finish_reason "abort"."""
        was_paused = self.is_paused
        self.pause("abort")
        if not was_paused:
            self.resume()

    def sleep(self, kv: bool = True, weights: bool = False) -> None:
        """Pause, keeping requests, and free the memory of the KV pool until `wake`; what was in it is computed anew.

        Raises ValueError for `weights=True`: they are the module's, whose owner moves them.
        """
        if weights:
            raise ValueError("weights=True: the parameters are the module's; move them there")
        self.pause("keep")
        if not kv or self._is_asleep:
            return

        def free() -> None:
            self._engine.reset_prefix_cache(reset_running_requests=True)
            self._runner.free_pool()

        self._is_asleep = True
        self._call(free)

    def wake(self) -> None:
        """Allocate the KV pool again, and go on. Nothing is compiled."""
        if self._is_asleep:
            self._call(self._runner.recover)
            self._is_asleep = False
        self.resume()

    # The engine.

    def wait_until_warm(self) -> None:
        """Until every program is compiled. Raises what the compiler raised."""
        self._engine.wait_until_warm()

    def stats(self) -> EngineStats:
        """The engine's counters, as of now."""
        return self._engine.stats()

    def reset_prefix_cache(self, recompute: bool = False) -> bool:
        """Forget all cached KV. False, and nothing happens, while requests hold blocks.

        With `recompute` they give them back, and their KV is computed anew with the current weights.
        """
        return self._call(lambda: self._engine.reset_prefix_cache(reset_running_requests=recompute))

    def shutdown(self) -> None:
        """End the engine; calls that wait raise EngineDeadError. Done at exit too."""
        self._finalizer()

    def _call(self, action: Callable[[], T]) -> T:
        """Have the engine's thread do something between two steps."""
        return self._tasks.steps.call(action).result()


def _check_options(config: EngineConfig) -> None:
    for name, reason in _NOT_FOR_TRAINING.items():
        if getattr(config, name) not in (None, "auto", "generate"):
            raise ValueError(
                f"{name}={getattr(config, name)!r} is not for a sampler: {reason}; leave it out"
            )
    if config.data_parallel_size > 1 or config.nnodes > 1:
        raise ValueError(
            f"a sampler is one engine in one process, got data_parallel_size={config.data_parallel_size} and "
            f"nnodes={config.nnodes}; divide the parameters with tensor_parallel_size or mesh"
        )


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, str | dict):
        return True
    return len(prompts) > 0 and isinstance(prompts[0], int)


def _plain(prompt: Any) -> Any:
    return prompt.tolist() if isinstance(prompt, np.ndarray | jax.Array) else prompt


def _params(params: SamplingParams | None, n: int | None, *, has_tokenizer: bool) -> SamplingParams:
    params = SamplingParams(max_tokens=None) if params is None else params
    return dataclasses.replace(
        params,
        n=params.n if n is None else n,
        logprobs=0,
        logprob_token_ids=None,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        detokenize=params.detokenize and has_tokenizer,
    )


def _wait(futures: Sequence[Future[RequestOutput]]) -> list[RequestOutput]:
    """All results; if one cannot be had, the requests of the others are aborted."""
    try:
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        raise
