"""The paged engine against transformers' torch models: greedy tokens and logprobs, every family, mixed lengths."""

import numpy as np
import pytest
import torch
import transformers

from jaxpage import SamplingParams
from tests import checkpoints

NUM_TOKENS = 64
PROMPT_LENS = (1, 2, 7, 31, 64, 130, 300)
# transformers switches these two RoPE types in the middle of a sequence; jaxpage decides once, by max_model_len, so
# that chunking and caching never change an answer. Here the lengths stay on one side of the switch.
LIMITS = {
    ("llama", 3): {"max_model_len": 200, "prompt_lens": (1, 7, 64, 130)},
    ("phi3", 2): {"max_model_len": 512, "prompt_lens": (130, 200, 300)},
}
FAST = {("qwen2", 0)}
# Each family, windows in all layers and in some, RoPE that depends on max_model_len. The other variants are deep: their
# logits are compared in `models/test_families.py`.
SLOW = {
    ("llama", 0),
    ("llama", 3),
    ("mistral", 0),
    ("qwen3", 2),
    ("phi3", 2),
    ("gemma2", 1),
    ("gemma3", 0),
}


def prompts_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, checkpoints.VOCAB_SIZE, length).tolist() for length in lengths]


def torch_logits_of(path, prompts, answers):
    """Per prompt: float32[64, V], from which transformers takes the next token before each of its answer's. No batch,
    so no padding.

    Where each of these is the best one, they are what it generates.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for prompt, answer in zip(prompts, answers, strict=True):
            logits = model(torch.tensor([prompt + answer[:-1]])).logits[0]
            yield logits[len(prompt) - 1 :].numpy()


def log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def cases():
    for case in checkpoints.CASES:
        marks = () if case in FAST else pytest.mark.slow if case in SLOW else pytest.mark.deep
        yield pytest.param(*case, marks=marks, id=f"{case[0]}-{case[1]}")


@pytest.mark.parametrize(("family", "variant"), list(cases()))
def test_greedy_tokens_equal_transformers(family, variant, tmp_path):
    limits = LIMITS.get((family, variant), {})
    path = checkpoints.build(family, variant, tmp_path)
    prompts = prompts_of(limits.get("prompt_lens", PROMPT_LENS))
    sizes = {"max_model_len": limits.get("max_model_len", 512)}
    # In the fast core with programs that other files have too.
    check_greedy_tokens(
        path, prompts, **(checkpoints.TIGHT if (family, variant) in FAST else sizes)
    )


def check_greedy_tokens(path, prompts, **sizes):
    """Tokens equal transformers', their log-probabilities and those of the best others are within 1e-4."""
    sizes = {"max_model_len": 512, "max_num_batched_tokens": 256} | sizes
    llm = checkpoints.make_llm(path, enforce_eager=True, **sizes)
    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=5, detokenize=False
    )
    outputs = llm.generate(prompts, params, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    theirs = torch_logits_of(path, prompts, [list(answer.token_ids) for answer in answers])
    for answer, logits in zip(answers, theirs, strict=True):
        assert len(answer.token_ids) == NUM_TOKENS
        assert list(answer.token_ids) == logits.argmax(axis=-1).tolist()
        expected = log_softmax(logits)
        for step, entry in enumerate(answer.logprobs):
            assert len(entry) == 5
            for token, logprob in entry.items():
                assert abs(logprob.logprob - expected[step, token]) < 1e-4
                assert logprob.rank == 1 + (expected[step] > expected[step, token] + 1e-6).sum()


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=pytest.mark.slow if f in ("llama", "gemma3") else pytest.mark.deep)
        for f in checkpoints.VARIANTS
    ],
)
def test_bfloat16_logprobs_stay_near_float32(family, tmp_path):
    """Along torch's bf16 continuation, our bf16 logprobs are as near to float32 as torch's own are.

    Both round each layer's output to 8 bits of mantissa, in other places, so tokens may differ; the bound is twice
    torch's own largest error on the same tokens, plus the 2^-8 relative step of a bf16 logit.

    Most families are deep: `models/test_families.py` compares the logits of each.
    """
    path = checkpoints.build(family, 0, tmp_path)
    prompt = prompts_of([100])[0]
    exact = checkpoints.torch_logits(path, np.array([prompt]))[0]
    rounded = checkpoints.torch_logits(path, np.array([prompt]), dtype="bfloat16")[0]
    torch_error = np.abs(log_softmax(rounded) - log_softmax(exact)).max()
    llm = checkpoints.make_llm(
        path,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_logprobs=checkpoints.VOCAB_SIZE,
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=1, logprobs=checkpoints.VOCAB_SIZE, detokenize=False
    )
    lengths = range(5, 100, 5)
    outputs = llm.generate([prompt[:length] for length in lengths], params, use_tqdm=False)
    for length, output in zip(lengths, outputs, strict=True):
        expected = log_softmax(exact[length - 1])
        entry = output.outputs[0].logprobs[0]
        ours = np.array([entry[token].logprob for token in range(checkpoints.VOCAB_SIZE)])
        bound = 2 * torch_error + np.abs(exact[length - 1]).max() * 2**-8
        assert np.abs(ours - expected).max() <= bound
