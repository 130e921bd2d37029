"""Interventions on the device: rows of a step whose requests change values inside the model.

What is changed stands in the request state, so it follows a sequence through chunks, decode steps, preemption and other
batches; vectors are data, so another one compiles nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpage.interventions import FACTOR, POINT, START, STOP, STRIDE, VECTOR, InterventionSpec
from jaxpage.models.decoder import CausalLM
from jaxpage.models.inputs import ForwardInput
from jaxpage.models.taps import LAST_POINT, tapped
from jaxpage.sampling.fields import RequestState


def changed_hidden_states(
    model: CausalLM,
    inputs: ForwardInput,
    state: RequestState,
    slots: jax.Array,
    spec: InterventionSpec,
) -> jax.Array:
    """`model.hidden_states` [T, E] with the interventions of the request slots int32[T] of the tokens."""
    positions = inputs.positions

    def tap(name: str, value: jax.Array) -> jax.Array:
        if name not in spec.points:
            return value
        index = spec.points.index(name)
        for n in range(spec.max_interventions):
            start, stop, stride = (state[key][slots, n] for key in (START, STOP, STRIDE))
            here = (state[POINT][slots, n] == index) & (positions >= start) & (positions < stop)
            here &= (positions - start) % stride == 0
            factor, vector = state[FACTOR][slots, n][:, None], state[VECTOR][slots, n]
            changed = factor * value.astype(jnp.float32) + vector
            value = jnp.where(here[:, None], changed.astype(value.dtype), value)
        return value

    return tap(LAST_POINT, tapped(model, tap).hidden_states(inputs))
