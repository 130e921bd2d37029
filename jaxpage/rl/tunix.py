"""`JaxpageRollout`: a `Sampler` as a rollout engine for Tunix (`google-tunix`, extra `tunix`).

Knows Tunix's `BaseRollout`: texts in, lists of arrays out, one seed for all members of a group. Must not know how a
sampler works.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]

from jaxpage.rl.rollout import Rollout
from jaxpage.rl.sampler import Sampler
from jaxpage.rl.seeds import GroupSeeds
from jaxpage.sampling_params import SamplingParams

RolloutConfig = (
    Any  # base_rollout.RolloutConfig, whose type is unknown where Tunix is not installed
)


class JaxpageRollout(base_rollout.BaseRollout):
    """`ClusterConfig(rollout_engine=functools.partial(JaxpageRollout, model=FOLDER, ...))`.

    Samples with the arrays of the trainer's live module. Prompts are tokenised by the trainer's tokenizer, and
    completions include their stop token. Calls of `generate` from many threads share steps.
    """

    def __init__(
        self,
        *,
        model: str,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        rollout_config: RolloutConfig,
        mesh: Mesh | None = None,
        **options: Any,
    ):
        """`model`: a folder with the config.json of `rollout_actor`, whose layout is Tunix's, MaxText's or ours.

        Tunix passes everything but `model` and `options`. `options` are those of `Sampler`, with other defaults:
        `max_model_len` is what prompt and completion of `rollout_config` need, `dtype` is its `data_type`. Raises
        ValueError for a module that does not fit config.json, has adapters, or was offloaded to host memory.
        """
        _check_module(rollout_actor)
        length = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate
        defaults: dict[str, Any] = {"max_model_len": length + 1, "skip_tokenizer_init": True}
        if rollout_config.data_type is not None:
            defaults["dtype"] = jnp.dtype(rollout_config.data_type).name
        if mesh is not None and not mesh.empty:
            defaults["mesh"] = mesh
        self.mesh = mesh  # Tunix reads it
        self.sampler = Sampler(rollout_actor, model, **(defaults | options))
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._version = 0
        self._group_seeds: dict[int, GroupSeeds] = {}  # by a call's seed

    def generate(
        self, prompts: str | Sequence[str], rollout_config: RolloutConfig, **kwargs: Any
    ) -> base_rollout.RolloutOutput:
        """One completion for each prompt. The returned prompts are int32[N, P], P = `max_prompt_length`, or the next
        power of two if one is longer.

        A completion's randomness depends on `rollout_config.seed` (None: 0), the weight version, its prompt, and how
        often this prompt has occurred, so members of a group, which share a seed, differ, in one call or in many.
        Log-probabilities are normalised over the whole vocabulary at the sampling temperature; the pad id is not
        sampled, unless it is a stop token. Raises the errors of `Sampler.generate`.
        """
        if kwargs:
            raise ValueError(f"generate got {sorted(kwargs)}, which jaxpage does not support")
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        ids = [self._encode(text) for text in texts]
        stops = list(rollout_config.eos_tokens or [self.eos_id()])
        pad = self.pad_id()
        params = SamplingParams(
            max_tokens=rollout_config.max_tokens_to_generate,
            temperature=rollout_config.temperature,
            top_p=1.0 if rollout_config.top_p is None else rollout_config.top_p,
            top_k=rollout_config.top_k or 0,
            stop_token_ids=stops,
            ignore_eos=True,  # `stop_token_ids` are the only stops
            # Tunix's trainer treats each pad id as padding, and so computes wrong positions for what follows it.
            logit_bias=None if pad in stops else {pad: -100.0},
        )
        seeds = self._seeds(_base_seed(rollout_config.seed))
        rollout = self.sampler.generate(ids, params, seed=seeds)
        tokens = [np.asarray(rollout.completion(i), np.int32) for i in range(len(rollout))]
        logprobs = [rollout.logprobs[i, : len(each)] for i, each in enumerate(tokens)]
        return base_rollout.RolloutOutput(
            text=[self._text(rollout, i) for i in range(len(rollout))],
            logits=None,
            tokens=tokens,
            left_padded_prompt_tokens=self._padded(ids, rollout_config.max_prompt_length),
            logprobs=logprobs if rollout_config.return_logprobs else None,
        )

    def get_per_token_logps(
        self,
        prompt_tokens: jax.Array,
        completion_tokens: jax.Array,
        completion_mask: jax.Array | None = None,
    ) -> jax.Array:
        """float32[B, C]: of completions [B, C], padded on the right, given prompts [B, P], padded on the left.

        At temperature 1, with the current weights, computed as a prefill. 0 for padding: whatever follows the last
        token of `completion_mask`, or without a mask what follows the first EOS, or pad ids at the end.
        """
        prompts = [self._without_padding(row) for row in np.asarray(prompt_tokens)]
        completions = np.asarray(completion_tokens)
        if completion_mask is None:
            lengths = [self._length(row) for row in completions]
        else:
            lengths = [_last(row) for row in np.asarray(completion_mask, bool)]
        rows = [
            prompt + row[:length].tolist()
            for prompt, row, length in zip(prompts, completions, lengths, strict=True)
        ]
        scored = self.sampler.score(rows)
        found = np.zeros(completions.shape, np.float32)
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            found[i, :length] = scored.logprobs[i, len(prompt) : len(prompt) + length]
        return jnp.asarray(found)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Sample with these parameters from the next step on. The actor's own arrays are not copied."""
        self.sampler.update(params)

    def pad_id(self) -> int:
        return _value(self._tokenizer.pad_id)

    def eos_id(self) -> int:
        return _value(self._tokenizer.eos_id)

    def model(self) -> None:
        """None. If it were the actor, Tunix would notice the shared weights and never call `update_params`."""
        return None

    def _encode(self, text: str) -> list[int]:
        """As Tunix's own sampler: with exactly one BOS, if the tokenizer has one."""
        bos = _value(getattr(self._tokenizer, "bos_id", None))
        ids = [int(each) for each in self._tokenizer.encode(text)]
        if not bos:
            return ids
        while ids and ids[0] == bos:
            ids = ids[1:]
        return [bos, *ids]

    def _text(self, rollout: Rollout, row: int) -> str:
        ids = rollout.completion(row)
        return self._tokenizer.decode(ids[:-1] if rollout.finish_reasons[row] == "stop" else ids)

    def _padded(self, prompts: Sequence[Sequence[int]], width: int) -> np.ndarray:
        longest = max(len(each) for each in prompts)
        if longest > width:  # in a later turn of a conversation
            width = 1 << (longest - 1).bit_length()
        padded = np.full((len(prompts), width), self.pad_id(), np.int32)
        for row, ids in zip(padded, prompts, strict=True):
            row[width - len(ids) :] = ids
        return padded

    def _without_padding(self, row: np.ndarray) -> list[int]:
        (tokens,) = np.nonzero(row != self.pad_id())
        return row[tokens[0] :].tolist() if tokens.size else []

    def _length(self, row: np.ndarray) -> int:
        (ends,) = np.nonzero(row == self.eos_id())
        return int(ends[0]) + 1 if ends.size else _last(row != self.pad_id())

    def _seeds(self, seed: int) -> GroupSeeds:
        with self._lock:
            version = self.sampler.version
            if self._version != version:
                # One that counts at this version goes on; one without a version is another call's, about to count.
                kept = [
                    each for each in self._group_seeds.items() if each[1].version in (None, version)
                ]
                self._version, self._group_seeds = version, dict(kept)
            return self._group_seeds.setdefault(seed, GroupSeeds(seed))


def _check_module(module: nnx.Module) -> None:
    leaves = jax.tree.leaves(nnx.state(module, nnx.LoRAParam))
    if leaves:
        raise ValueError(
            f"{type(module).__name__} has {len(leaves)} parameters of adapters (nnx.LoRAParam), which are not "
            "supported in a trainer's layout; train all parameters, or jaxpage's own module with enable_lora"
        )
    for leaf in jax.tree.leaves(nnx.state(module, nnx.Param)):
        if getattr(leaf.sharding, "memory_kind", None) == "pinned_host":
            raise ValueError(
                "offload_to_cpu=True is not supported: jaxpage reads the actor's arrays where they are; leave it out"
            )


def _base_seed(seed: Any) -> int:
    """An int from `RolloutConfig.seed`, which may be None, a number, or a jax key."""
    if seed is None:
        return 0
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    numbers = np.asarray(seed)
    if numbers.size == 1:
        return int(numbers.item())
    return int.from_bytes(hashlib.sha256(numbers.tobytes()).digest()[:8], "little", signed=True)


def _last(is_token: np.ndarray) -> int:
    """The number of entries up to the last True one."""
    (tokens,) = np.nonzero(is_token)
    return int(tokens[-1]) + 1 if tokens.size else 0


def _value(attribute: Any) -> Any:
    """An id of a tokenizer, which may be a method or a property."""
    return attribute() if callable(attribute) else attribute
