"""`record_expert_load`: the steps count what transformers' routers choose for the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from jaxpage import SamplingParams
from tests import checkpoints, mixtures
from tests.end_to_end.test_parity import prompts_of


def recounted(path, sequences) -> np.ndarray:
    """int64[layers with experts, X]: tokens of `sequences` that transformers' model routes to each expert."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    routers = [module for name, module in model.named_modules() if name.endswith(".mlp.gate")]
    counts = np.zeros((len(routers), routers[0].num_experts), np.int64)

    def counted(layer):
        def hook(module, inputs, outputs):
            *_, chosen = outputs
            counts[layer] += np.bincount(chosen.numpy().ravel(), minlength=counts.shape[1])

        return hook

    for layer, router in enumerate(routers):
        router.register_forward_hook(counted(layer))
    with torch.no_grad():
        for sequence in sequences:
            model(torch.tensor([sequence]))
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "num_devices", "num_experts"),
    [("qwen3_moe", 1, 16), ("qwen3_moe", 2, 16), ("glm4_moe", 2, 12)],
)
def test_counts_are_those_of_transformers(family, num_devices, num_experts, tmp_path):
    """Of prompts in chunks beside rows that decode, with padding. Nothing is computed for the last tokens."""
    first = {"first_k_dense_replace": 1} if family == "glm4_moe" else {}
    path = mixtures.build(family, 1, tmp_path, num_hidden_layers=3, **first)
    llm = checkpoints.make_llm(
        path,
        record_expert_load=True,
        tensor_parallel_size=num_devices,
        enable_prefix_caching=False,
    )
    prompts = prompts_of((1, 30, 7, 90))
    params = SamplingParams(
        temperature=0.0, max_tokens=11, ignore_eos=True, logprobs=0, detokenize=False
    )
    assert llm.stats().expert_load == ()
    answers = checkpoints.answers(llm, prompts, params)
    expected = recounted(path, [p + a[:-1] for p, (a, _) in zip(prompts, answers, strict=True)])
    stats = llm.stats()
    assert expected.shape == (2, num_experts)  # the first of three layers has no experts
    np.testing.assert_array_equal(stats.expert_load, expected)
    np.testing.assert_allclose(stats.expert_imbalance, expected.max(1) / expected.mean(1))
    assert stats.num_recompiles == 0
