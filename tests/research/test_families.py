"""Captures and interventions of engines with families of notebooks, against hooks on transformers' model."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpage import SamplingParams
from jaxpage.research import ResearchConfig, add, scale
from tests import checkpoints, dense_families

PROMPT = np.random.default_rng(0).integers(3, checkpoints.VOCAB_SIZE, 37).tolist()
MAX_TOKENS = 12
POINTS = ("hook_attn_out", "hook_mlp_out", "hook_resid_post")
VECTOR = np.random.default_rng(1).standard_normal(64).astype(np.float32)
# Of each family the list of layers, and in one of them attention and MLP.
MODULES = {
    "gpt_neox": ("gpt_neox.layers", "attention", "mlp"),
    "gpt2": ("transformer.h", "attn", "mlp"),
    "phi": ("model.layers", "self_attn", "mlp"),
}


@pytest.fixture(scope="module", params=MODULES)
def case(request, tmp_path_factory):
    """(family, checkpoint)"""
    path = dense_families.build(request.param, 0, tmp_path_factory.mktemp(request.param))
    return request.param, path


def hooked(family, path, hook):
    """transformers' model, where `hook(name, value)` sees and replaces values."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    layers, attention, mlp = MODULES[family]
    for index, layer in enumerate(model.get_submodule(layers).children()):
        parts = (layer.get_submodule(attention), layer.get_submodule(mlp), layer)
        for point, part in zip(POINTS, parts, strict=True):
            name = f"blocks.{index}.{point}"

            def replace(module, inputs, output, name=name):
                if isinstance(output, tuple):
                    return (hook(name, output[0]), *output[1:])
                return hook(name, output)

            part.register_forward_hook(replace)
    return model


@pytest.mark.slow
def test_captures_are_what_hooks_see(case):
    import torch

    family, path = case
    llm = checkpoints.make_llm(
        path,
        enforce_eager=True,
        max_num_batched_tokens=16,
        research=ResearchConfig(captures=[f"blocks.*.{point}" for point in POINTS]),
    )
    params = SamplingParams(
        temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False, capture="*"
    )
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    (completion,) = output.outputs
    assert completion.captures is not None
    seen = {}

    def see(name, value):
        seen[name] = value[0].numpy()
        return value

    model = hooked(family, path, see)
    with torch.no_grad():
        model(torch.tensor([[*PROMPT, *completion.token_ids]]))
    for name, expected in seen.items():
        positions, values = completion.captures[name]
        assert positions.tolist() == list(range(len(PROMPT) + MAX_TOKENS - 1))
        np.testing.assert_allclose(values, expected[positions], atol=1e-4, rtol=0, err_msg=name)
    assert len(seen) == 9


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_interventions_change_what_hooks_change(case, point):
    import torch

    family, path = case
    asked = {
        f"blocks.1.{point}": lambda x: x + torch.tensor(VECTOR),
        f"blocks.0.{point}": lambda x: x * -0.5,
    }
    first, second = asked
    interventions = [add(first, VECTOR, slice(None)), scale(second, -0.5, slice(None))]
    llm = checkpoints.make_llm(
        path,
        enforce_eager=True,
        max_num_batched_tokens=16,
        research=ResearchConfig(points=[f"blocks.*.{point}"], max_interventions=2),
    )
    params = SamplingParams(
        temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0, detokenize=False,
        interventions=interventions,
    )  # fmt: skip
    plain = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
    changed, unchanged = checkpoints.answers(llm, [PROMPT] * 2, [params, plain])
    assert changed[0] != unchanged[0]
    model = hooked(family, path, lambda name, x: asked.get(name, lambda same: same)(x))
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *changed[0]]])).logits[0]
    expected = torch.log_softmax(logits[len(PROMPT) - 1 : -1], dim=-1).numpy()
    assert changed[0] == expected.argmax(axis=-1).tolist()
    np.testing.assert_allclose(changed[1], expected.max(axis=-1), atol=1e-4, rtol=0)
