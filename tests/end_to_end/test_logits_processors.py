"""Logits processors of the engine's user: compiled into every step, asked for by request."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxpage import SamplingParams
from jaxpage.sampling.fields import SamplerFeature, SlotField
from tests import checkpoints


def only(request, vocab_size):
    return (request.params.extra_args or {}).get("only")


def keep_one(logits, state, slots, positions):
    """Nothing but token `only`, and the one behind it at odd positions."""
    wanted = state["only"][slots] + positions % 2
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
    return jnp.where(ids[None, :] == wanted[:, None], logits, -jnp.inf)


def negate(logits, state, slots, positions):
    return -logits


KEEP_ONE = SamplerFeature(
    name="keep one",
    fields=(SlotField(name="only", fill=-1, value=only),),
    asked=lambda request: only(request, 0) is not None,
    apply=keep_one,
)
NEGATE = SamplerFeature(
    name="negate",
    asked=lambda request: (request.params.extra_args or {}).get("negate", False),
    apply=negate,
)


@pytest.mark.slow
def test_each_request_has_what_it_asks_for(tmp_path):
    path = checkpoints.build("qwen2", 0, tmp_path)
    llm = checkpoints.make_llm(path, logits_processors=[KEEP_ONE, NEGATE])
    plain = checkpoints.make_llm(path, enforce_eager=True)
    prompt = {"prompt_token_ids": [5, 6, 7]}
    # A row that asks for neither is as without them, whatever others in its step ask for.
    asked = [None, {"only": 40}, {"negate": True}, {"only": 50, "negate": True}]
    params = [
        SamplingParams(max_tokens=8, ignore_eos=True, temperature=0, extra_args=a) for a in asked
    ]
    free, one, negated, both = llm.generate([prompt] * 4, params, use_tqdm=False)
    assert free.outputs[0].token_ids == plain.generate(prompt, params[0])[0].outputs[0].token_ids
    assert one.outputs[0].token_ids == [40 + p % 2 for p in range(3, 11)]
    # The second one turns -inf into inf: it acted on what the first one left.
    assert both.outputs[0].token_ids[0] not in (50, 51)
    assert negated.outputs[0].token_ids != free.outputs[0].token_ids
    assert llm.stats().num_recompiles == 0


@pytest.mark.parametrize(
    ("processors", "message"),
    [
        (["module.Name"], "must be a list of"),
        ([negate], "must be a list of"),
        ([SamplerFeature(name="x", asked=lambda r: True)], "with a function `apply`"),
        ([NEGATE, NEGATE], "names negate are in use"),
        ([SamplerFeature(name="penalties", asked=lambda r: True, apply=negate)], "penalties"),
        (
            [
                SamplerFeature(
                    name="x", fields=(SlotField(name="seed", value=only),), asked=only, apply=negate
                )
            ],
            "names seed are in use",
        ),
        (
            [
                SamplerFeature(
                    name="x",
                    fields=(SlotField(name="draft_hidden", value=only),),
                    asked=only,
                    apply=negate,
                )
            ],
            "names draft_hidden are in use",
        ),
    ],
)
def test_what_is_no_processor_is_refused(tmp_path, processors, message):
    with pytest.raises(ValueError, match=message):
        checkpoints.make_llm(tmp_path, logits_processors=processors)
