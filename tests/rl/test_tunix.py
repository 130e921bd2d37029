"""`JaxpageRollout` in Tunix: its models, its trainer's forward and its own sampler are what it is compared with.

Skipped without Tunix, which is not in the extra `test`: it brings 40 packages of 500 MB, and an older transformers than
the one that is this suite's oracle.
"""

from __future__ import annotations

import functools
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import transformers
from flax import nnx
from jax.sharding import Mesh

from tests.few_programs import few_programs
from tests.rl.modules import OPTIONS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its dependencies
    pytest.importorskip("tunix", reason="needs the extra `tunix`")
    from tunix.generate.sampler import CacheConfig
    from tunix.generate.sampler import Sampler as VanillaSampler
    from tunix.models.qwen3.model import ModelConfig, Qwen3
    from tunix.rl import common, rl_cluster
    from tunix.rl.agentic import agentic_grpo_learner
    from tunix.rl.rollout.base_rollout import RolloutConfig

    from jaxpage.rl.tunix import JaxpageRollout

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

WORDS = ["<pad>", "<s>", "</s>", *"a b c d e f g h i j k l m n o p q r s t u v w x y z".split()]
CONFIG = RolloutConfig(
    max_tokens_to_generate=10,
    max_prompt_length=8,
    temperature=0.8,
    seed=jnp.array(3),
    return_logprobs=True,
)


class Words:
    """A tokenizer of words."""

    def encode(self, text, **_):
        return [WORDS.index(word) for word in text.split()]

    def decode(self, ids, **_):
        return " ".join(WORDS[each] for each in ids)

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2

    def pad_id(self):
        return 0


class ChatParser:
    """A conversation as its words."""

    assistant_token = ""

    def parse(self, messages, **_):
        return " ".join(np.asarray(message["content"]).item() for message in messages)


@pytest.fixture(scope="module", autouse=True)
def promotion():
    """Tunix mixes dtypes and ranks, in threads of its own too."""
    ours = {
        "jax_numpy_dtype_promotion": jax.config.jax_numpy_dtype_promotion,
        "jax_numpy_rank_promotion": jax.config.jax_numpy_rank_promotion,
    }
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    for name, value in ours.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    config = transformers.Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )
    folder = tmp_path_factory.mktemp("config")
    config.save_pretrained(folder)
    return str(folder)


def make_actor(seed: int = 0) -> Qwen3:
    config = ModelConfig(
        num_layers=2,
        vocab_size=len(WORDS),
        embed_dim=32,
        hidden_dim=48,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        rope_theta=1_000_000,  # Tunix 0.1.7 computes with this one, whatever is said here
        norm_eps=1e-6,
        use_tied_embedding=True,
    )
    actor = Qwen3(config, rngs=nnx.Rngs(seed))
    embedding = actor.embedder.input_embedding
    embedding.set_value(2.5 * embedding.get_value())  # so that logits are not flat
    return actor


def make_rollout(actor, path, config=CONFIG, **options):
    with few_programs():
        rollout = JaxpageRollout(
            rollout_actor=actor,
            tokenizer=Words(),
            rollout_config=config,
            model=path,
            **(OPTIONS | options),
        )
    rollout.sampler.wait_until_warm()
    return rollout


@pytest.fixture(scope="module")
def bound(path):
    actor = make_actor()
    rollout = make_rollout(actor, path)
    yield actor, rollout
    rollout.sampler.shutdown()


def padded(rows, width):
    return jnp.array([[*row, *[0] * (width - len(row))] for row in rows], jnp.int32)


def trainers_logps(actor, output, temperature):
    """What Tunix's trainer computes for a rollout."""
    graphdef, state = nnx.split(actor)
    return common.compute_per_token_logps(
        graphdef,
        state,
        prompt_tokens=jnp.asarray(output.left_padded_prompt_tokens),
        completion_tokens=padded(output.tokens, 10),
        pad_id=0,
        eos_id=2,
        temperature=temperature,
    )


def assert_logprobs(output, expected):
    for found, row in zip(output.logprobs, np.asarray(expected), strict=True):
        np.testing.assert_allclose(found, row[: len(found)], atol=2e-5)


def test_a_rollout_has_the_form_and_the_logprobs_of_the_trainer(bound):
    actor, rollout = bound
    output = rollout.generate(["a b c", "x"] * 6, CONFIG)
    prompts = output.left_padded_prompt_tokens
    assert prompts.shape == (12, 8)
    assert prompts[:2].tolist() == [[0, 0, 0, 0, 1, 3, 4, 5], [0, 0, 0, 0, 0, 0, 1, 26]]
    assert output.logits is None
    for text, tokens, logprobs in zip(output.text, output.tokens, output.logprobs, strict=True):
        assert 1 <= len(tokens) <= 10 and len(logprobs) == len(tokens)
        assert 2 not in tokens[:-1] and (tokens[-1] == 2 or len(tokens) == 10)
        assert rollout._tokenizer.encode(text) == tokens[: len(tokens) - (tokens[-1] == 2)].tolist()
    assert any(tokens[-1] == 2 for tokens in output.tokens), "the stop token is among them"
    assert all(0 not in tokens for tokens in output.tokens), "the trainer would take it for padding"
    assert_logprobs(output, trainers_logps(actor, output, 0.8))


def test_it_samples_what_tunix_samples(bound):
    actor, rollout = bound
    prompts = ["a b c", "x", "k k j z"]
    greedy = RolloutConfig(max_tokens_to_generate=10, max_prompt_length=8, temperature=0.0)
    theirs = VanillaSampler(actor, Words(), CacheConfig(32, 2, 2, 16))(
        prompts, max_generation_steps=10, max_prompt_length=8, temperature=0.0
    )
    ours = rollout.generate(prompts, greedy)
    assert ours.logprobs is None, "they were not asked for"
    for found, expected in zip(ours.tokens, theirs.tokens, strict=True):
        assert found[: len(expected)].tolist() == np.asarray(expected).tolist()  # theirs lack EOS
    np.testing.assert_array_equal(ours.left_padded_prompt_tokens, theirs.padded_prompt_tokens)


def test_logprobs_of_given_tokens_are_the_trainers(bound):
    actor, rollout = bound
    output = rollout.generate(["a b c", "x"], CONFIG)
    completions = padded(output.tokens, 10)
    found = np.asarray(rollout.get_per_token_logps(output.left_padded_prompt_tokens, completions))
    expected = np.asarray(trainers_logps(actor, output, 1.0))
    assert found.shape == (2, 10)
    for row, (tokens, logprobs) in enumerate(zip(output.tokens, found, strict=True)):
        np.testing.assert_allclose(logprobs[: len(tokens)], expected[row, : len(tokens)], atol=2e-5)
        assert not logprobs[len(tokens) :].any()
    mask = jnp.arange(10)[None] < jnp.array([[1], [0]])
    masked = rollout.get_per_token_logps(output.left_padded_prompt_tokens, completions, mask)
    assert np.count_nonzero(masked) == 1 and masked[0, 0] == found[0, 0]


def test_members_of_a_group_differ_and_come_again(path):
    """The learner sends each with the same prompt and seed, from threads."""
    actor, sets = make_actor(), []
    for num_threads in (1, 8):
        rollout = make_rollout(actor, path)

        def one(_, rollout=rollout):
            return tuple(rollout.generate(["a b"], CONFIG).tokens[0].tolist())

        with ThreadPoolExecutor(num_threads) as threads:
            sets.append(sorted(threads.map(one, range(8))))
        other = rollout.generate(["a b"], RolloutConfig(10, 0.8, seed=jax.random.key(1)))
        assert tuple(other.tokens[0].tolist()) not in sets[0]
        rollout.sampler.shutdown()
    assert sets[0] == sets[1] and len(set(sets[0])) == 8


def test_members_of_a_group_differ_after_a_step_of_training_that_nobody_announced(path):
    actor = make_actor()
    rollout = make_rollout(actor, path)
    rollout.generate(["a b"], CONFIG)
    norm = actor.final_norm.w
    norm.set_value(norm.get_value() * 1.01)
    tokens = [tuple(rollout.generate(["a b"], CONFIG).tokens[0].tolist()) for _ in range(4)]
    assert len(set(tokens)) == 4
    rollout.sampler.shutdown()


def test_longer_prompts_of_later_turns_are_kept(bound):
    _, rollout = bound
    output = rollout.generate("a b c d e f g h i", CONFIG)
    assert output.left_padded_prompt_tokens.shape == (1, 16)
    assert output.left_padded_prompt_tokens[0, 6:].tolist() == [1, *range(3, 12)]


def test_what_cannot_be_had_is_refused(bound, path):
    _, rollout = bound
    with pytest.raises(ValueError, match=r"generate got \['images'\]"):
        rollout.generate(["a"], CONFIG, images=[])
    with pytest.raises(ValueError, match="prompts are empty"):
        rollout.generate([], CONFIG)
    actor = make_actor()
    actor.adapter = nnx.LoRAParam(jnp.ones((2, 2)))
    with pytest.raises(ValueError, match="Qwen3 has 1 parameters of adapters"):
        make_rollout(actor, path)
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    actor = make_actor()
    norm = actor.final_norm.w
    norm.set_value(jax.device_put(norm.get_value(), host))
    with pytest.raises(ValueError, match="offload_to_cpu=True is not supported"):
        make_rollout(actor, path)


def make_cluster(path, rollout_mesh=None):
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    roles = rl_cluster.Role
    return rl_cluster.RLCluster(
        actor=make_actor(),
        reference=make_actor(),
        tokenizer=Words(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={
                roles.ACTOR: mesh,
                roles.REFERENCE: mesh,
                roles.ROLLOUT: rollout_mesh or mesh,
            },
            rollout_engine=functools.partial(JaxpageRollout, model=path, **OPTIONS),
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.sgd(0.1), eval_every_n_steps=100, max_steps=3
            ),
            rollout_config=CONFIG,
        ),
    )


def params_of(model):
    return jax.tree.map(np.asarray, nnx.state(model, nnx.Param))


def test_grpo_with_jaxpage_as_rollout(path):
    """Tunix's learner, unchanged: its own metrics say that sampler and trainer agree after each of its steps."""
    with few_programs():
        cluster = make_cluster(path)
    metrics: dict[str, list[float]] = {}
    learner = agentic_grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        reward_fns=lambda prompts, completions, **_: [
            float(text.count("a")) for text in completions
        ],
        algo_config=agentic_grpo_learner.GRPOConfig(num_generations=4, max_response_length=10),
        chat_parser=ChatParser(),
    )
    assert learner.should_sync_weights
    log = cluster.buffer_metrics_async
    cluster.buffer_metrics_async = lambda each, **options: (
        [metrics.setdefault(name, []).append(value[0]) for name, value in each.items()],
        log(each, **options),
    )
    before = params_of(cluster.actor_trainer.model)
    prompts = np.array(["a b", "c d"])
    batch = {"prompts": prompts, "question": prompts, "answer": np.array(["a", "a"])}
    learner.train([batch] * 3)
    after = params_of(cluster.actor_trainer.model)
    assert cluster.global_steps == 3
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    assert any((x != y).any() for x, y in pairs)
    assert cluster.rollout.sampler.version >= 3
    differences = metrics["sampler_trainer/logp_diff_max"]
    assert len(differences) >= 3 and max(differences) < 2e-5
    assert max(metrics["generation/completions/mean_length"]) > 2
    cluster.rollout.sampler.shutdown()


def test_a_rollout_on_other_devices_has_a_copy_that_is_renewed(path):
    away = Mesh(np.array(jax.devices()[2:4]).reshape(1, 2), ("fsdp", "tp"))
    with few_programs():
        cluster = make_cluster(path, away)
    assert cluster.r2m[rl_cluster.Role.ROLLOUT] == cluster.rollout.mesh == away
    actor = cluster.actor_trainer.model
    for _, variable in nnx.to_flat_state(nnx.state(actor, nnx.Param)):
        variable.set_value(variable.get_value() * 1.1)
    cluster.sync_weights()
    output = cluster.generate(["a b c", "x"])
    assert_logprobs(output, trainers_logps(actor, output, 0.8))
    cluster.rollout.sampler.shutdown()
