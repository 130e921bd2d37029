"""Interventions and captures on the device: values inside the model that requests change or return.

Interventions are part of the request state, so they apply in every chunk, decode step and batch, and after preemption.
Vectors are data, so a different one compiles nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpage.interventions import FACTOR, POINT, START, STOP, STRIDE, VECTOR
from jaxpage.models.decoder import CausalLM
from jaxpage.models.inputs import ForwardInput
from jaxpage.models.taps import LAST_POINT, tapped
from jaxpage.research_config import ResearchSpec
from jaxpage.sampling.fields import RequestState


def tapped_hidden_states(
    model: CausalLM,
    inputs: ForwardInput,
    state: RequestState,
    slots: jax.Array,
    spec: ResearchSpec,
) -> tuple[jax.Array, jax.Array | None]:
    """`model.hidden_states` [T, E] with the interventions of the tokens' request slots, int32[T].

    Also the values [T, J, E] of J captured points; None if nothing is captured.
    """
    positions = inputs.positions
    seen: dict[str, jax.Array] = {}

    def tap(name: str, value: jax.Array) -> jax.Array:
        if name in spec.points:
            value = changed(name, value)
        if name in spec.captures:
            seen[name] = value
        return value

    def changed(name: str, value: jax.Array) -> jax.Array:
        index = spec.points.index(name)
        for n in range(spec.max_interventions):
            start, stop, stride = (state[key][slots, n] for key in (START, STOP, STRIDE))
            here = (state[POINT][slots, n] == index) & (positions >= start) & (positions < stop)
            here &= (positions - start) % stride == 0
            factor, vector = state[FACTOR][slots, n][:, None], state[VECTOR][slots, n]
            new = factor * value.astype(jnp.float32) + vector
            value = jnp.where(here[:, None], new.astype(value.dtype), value)
        return value

    hidden = tap(LAST_POINT, tapped(model, tap).hidden_states(inputs))
    if not spec.captures:
        return hidden, None
    return hidden, jnp.stack([seen[name] for name in spec.captures], axis=1)
