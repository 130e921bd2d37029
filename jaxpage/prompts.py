"""Parses every form of a prompt into token ids, and checks requests before they run.

Knows prompt forms, tokenising and the limits of a request. Must not know the engine: checks depend only on the prompt,
its params and `Limits`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxpage.chat_template import CONTENT_FORMATS, check_conversations, render
from jaxpage.pictures.prompt import PromptPictures
from jaxpage.sampling.constraints import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_LOGIT_BIAS
from jaxpage.sampling_params import SamplingParams
from jaxpage.tokenization import Tokenization, check_length, is_int, read_tokenization
from jaxpage.tokenizer import load_chat_template

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds", "cache_salt", "multi_modal_data")
# vLLM's types of prompts, and the key that each needs.
_TYPES = {"text": "prompt", "token": "prompt_token_ids", "embeds": "prompt_embeds"}
_MAY_BE_EMPTY = ("mm_processor_kwargs", "multi_modal_uuids")  # keys of vLLM that say nothing then
# Names of a rendering's own arguments, and of variables that it gives to the template itself.
_FIXED = (
    "chat_template",
    "conversation",
    "messages",
    "return_dict",
    "tokenize",
    "tokenizer",
    "tools",
)


@dataclass(kw_only=True)
class Prompt:
    """One prompt, as ids."""

    token_ids: list[int]
    text: str | None = None
    cache_salt: str | None = None  # prompts with different salts share no cached KV
    embeds: np.ndarray | None = None  # [T, E] in the place of T tokens, whose ids are 0 then
    media: Any = None  # "multi_modal_data", not parsed yet
    pictures: PromptPictures | None = None  # in the place of some of the tokens


class EmbedsForm(NamedTuple):
    """The required shape and dtype of a prompt's embeddings."""

    hidden_size: int
    dtype: np.dtype  # the model's, to which they are rounded


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of what the engine supports."""

    vocab_size: int
    max_model_len: int  # tokens of prompt and answer
    max_logprobs: int  # -1: no limit
    has_tokenizer: bool
    embeds: EmbedsForm | None = None  # of prompts given as embeddings; None: there are none
    has_recurrent_state: bool = False  # some layers of the model


def parse(
    prompts: Any,
    tokenizer: Any,
    tokenization_kwargs: Mapping[str, Any] | Tokenization | None = None,
) -> list[Prompt]:
    """One or several prompts (see `LLM.generate`) as ids; texts get the tokenizer's special tokens.

    `tokenization_kwargs`: see `read_tokenization`. After `cut_by_tokenizer` the tokenizer truncates texts, and other
    prompts are cut at the same end; otherwise that is left to the caller, who knows the limits. Raises ValueError for
    unknown forms, and for text if `tokenizer` is None.
    """
    if hasattr(prompts, "tolist"):  # an array of ids
        prompts = prompts.tolist()
    if _is_one(prompts):
        prompts = [prompts]
    elif not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise ValueError(
            f"prompts must be a str, a list of ids, a dict, or a list of them, got {prompts!r}"
        )
    parsed = [_parse_one(prompt) for prompt in prompts]
    how = read_tokenization(tokenization_kwargs)
    # Pictures are inserted for placeholders in the text, none of which may be lost.
    _tokenize([prompt for prompt in parsed if prompt.media is not None], tokenizer, how.uncut())
    _tokenize([prompt for prompt in parsed if prompt.media is None], tokenizer, how)
    return [_cut_like_text(prompt, tokenizer, how) for prompt in parsed]


def _is_one(prompt: Any) -> bool:
    is_ids = isinstance(prompt, list | tuple) and len(prompt) > 0 and is_int(prompt[0])
    return isinstance(prompt, str | Mapping) or is_ids


def _parse_one(prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(token_ids=[], text=prompt)
    if not isinstance(prompt, Mapping):
        return Prompt(token_ids=_to_ids(prompt))
    _check_keys(prompt)
    text, ids, embeds, salt, media = (prompt.get(key) for key in _PROMPT_KEYS)
    if text is None and ids is None and embeds is None:
        raise ValueError(
            f'a prompt needs "prompt", "prompt_token_ids" or "prompt_embeds", got {dict(prompt)!r}'
        )
    if embeds is not None and not (text is None and ids is None and media is None):
        others = '"prompt", "prompt_token_ids" and "multi_modal_data"'
        raise ValueError(f'"prompt_embeds" stand alone: leave {others} out')
    if text is not None and not isinstance(text, str):
        raise ValueError(f'"prompt" must be a str, got {text!r}; ids go into "prompt_token_ids"')
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ValueError(f'"cache_salt" must be a non-empty str, got {salt!r}')
    if embeds is not None:
        embeds = _to_embeds(embeds)
        return Prompt(token_ids=[0] * len(embeds), cache_salt=salt, embeds=embeds)
    token_ids = [] if ids is None else _to_ids(ids)
    if ids is not None and not token_ids:
        raise ValueError("a prompt must have at least one token, prompt_token_ids is empty")
    return Prompt(token_ids=token_ids, text=text, cache_salt=salt, media=media or None)


def _check_keys(prompt: Mapping[str, Any]) -> None:
    """Raise ValueError for keys of a prompt that ask for something unknown."""
    unknown = [
        key
        for key, value in prompt.items()
        if key not in (*_PROMPT_KEYS, "type")
        and value is not None
        and not (key in _MAY_BE_EMPTY and value == {})
    ]
    if unknown:
        raise ValueError(
            f"a prompt with {', '.join(map(repr, unknown))} is not supported; a dict may have "
            f"{', '.join(_PROMPT_KEYS)}"
        )
    kind = prompt.get("type")
    if kind is not None and not (isinstance(kind, str) and kind in _TYPES):
        raise ValueError(f'the "type" of a prompt must be one of {", ".join(_TYPES)}, got {kind!r}')
    if kind is not None and prompt.get(_TYPES[kind]) is None:
        raise ValueError(f'a prompt of "type": "{kind}" needs "{_TYPES[kind]}"')


def _to_embeds(embeds: Any) -> np.ndarray:
    """An array [T, E] or [1, T, E] of NumPy, JAX or torch as NumPy [T, E]."""
    if hasattr(embeds, "detach"):  # torch, whose bfloat16 NumPy does not know
        embeds = embeds.detach().cpu().float()
    array = np.asarray(embeds)
    if array.ndim == 3 and len(array) == 1:
        array = array[0]
    is_float = np.issubdtype(array.dtype, np.floating) or array.dtype == ml_dtypes.bfloat16
    if array.ndim != 2 or len(array) == 0 or not is_float:
        raise ValueError(
            f'"prompt_embeds" must be floats [T, E] with at least one row, got {array.dtype} '
            f"{list(array.shape)}"
        )
    return array


def _to_ids(ids: Any) -> list[int]:
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise ValueError(f"a prompt must be a str, a list of ids or a dict, got {ids!r}")
    wrong = next((i for i, token_id in enumerate(ids) if not is_int(token_id)), None)
    if wrong is not None:
        raise ValueError(f"token ids must be ints, got {ids[wrong]!r} at position {wrong}")
    return [int(token_id) for token_id in ids]


def _tokenize(prompts: Iterable[Prompt], tokenizer: Any, how: Tokenization) -> None:
    """Tokenise all prompts that have only text in one call, in which fast tokenizers use several threads."""
    for prompt in prompts:
        if prompt.text is None and prompt.embeds is None and how.needs_text:
            if tokenizer is None:
                raise ValueError("needs_detokenization needs a tokenizer, skip_tokenizer_init=True")
            prompt.text = tokenizer.decode(prompt.token_ids)
        elif prompt.text is not None and not prompt.token_ids and how.lower_case:
            prompt.text = prompt.text.lower()
    texts = [p.text for p in prompts if p.text is not None and not p.token_ids]
    if not texts:
        return
    if tokenizer is None:
        raise ValueError("text prompts need a tokenizer, skip_tokenizer_init=True; give ids")
    texts = list(dict.fromkeys(texts))
    check_encodable(texts)
    ids_of = dict(zip(texts, encode(tokenizer, how, texts)["input_ids"], strict=True))
    for prompt in prompts:
        if prompt.text is not None and not prompt.token_ids:
            prompt.token_ids = list(ids_of[prompt.text])


def encode(tokenizer: Any, how: Tokenization, *texts: list[str]) -> Mapping[str, Any]:
    """What the tokenizer makes of texts, or of pairs of them; if it truncates, then at the side that is named."""
    if how.side is None or not how.options.get("truncation"):
        return tokenizer(*texts, **how.options)
    usual, tokenizer.truncation_side = tokenizer.truncation_side, how.side
    try:
        return tokenizer(*texts, **how.options)
    finally:
        tokenizer.truncation_side = usual


def _cut_like_text(prompt: Prompt, tokenizer: Any, how: Tokenization) -> Prompt:
    """Cut ids and embeddings at the end where the tokenizer cuts texts, unless pictures are still to be inserted."""
    longest = how.options.get("max_length")
    if longest is None or prompt.media is not None:
        return prompt
    return _cut(prompt, longest, how.side or getattr(tokenizer, "truncation_side", None))


def _cut(prompt: Prompt, length: int, side: str | None) -> Prompt:
    kept = slice(length) if side == "right" else slice(-length, None)
    embeds = None if prompt.embeds is None else prompt.embeds[kept]
    return replace(prompt, token_ids=prompt.token_ids[kept], embeds=embeds)


def check_encodable(texts: Iterable[str]) -> None:
    """Raise ValueError unless a tokenizer can take the texts."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the prompt has a lone surrogate, {text[error.start]!r}, at position {error.start}, "
                'which is no character; replace it: text.encode(errors="replace").decode()'
            ) from None


def parse_chat(
    messages: Sequence[Any],
    tokenizer: Any,
    *,
    chat_template: str | None = None,
    chat_template_content_format: str = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tokenization_kwargs: Mapping[str, Any] | Tokenization | None = None,
) -> list[Prompt]:
    """One or several conversations, rendered by the chat template and tokenised.

    `chat_template_content_format`: see `chat_template.render`. Raises ValueError.
    """
    if tokenizer is None:
        raise ValueError("chat needs a tokenizer, skip_tokenizer_init=True; give ids to generate")
    if add_generation_prompt and continue_final_message:
        raise ValueError("continue_final_message=True needs add_generation_prompt=False")
    if chat_template_content_format not in CONTENT_FORMATS:
        raise ValueError(
            f"chat_template_content_format must be one of {', '.join(CONTENT_FORMATS)}, got "
            f"{chat_template_content_format!r}"
        )
    if fixed := sorted({*_FIXED} & {*(chat_template_kwargs or ())}):
        raise ValueError(
            f"chat_template_kwargs must not have {', '.join(fixed)}, which the engine sets; a template goes into "
            "chat_template, tools into tools"
        )
    options = dict(chat_template_kwargs or {}) | {
        "chat_template": load_chat_template(chat_template),
        "content_format": chat_template_content_format,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "tools": None if tools is None else list(tools),
    }
    prompts = [
        Prompt(token_ids=[], text=render(conversation, tokenizer, **options))
        for conversation in check_conversations(messages)
    ]
    how = read_tokenization(tokenization_kwargs)
    # Special tokens are in the template.
    how = replace(how, options={"add_special_tokens": False} | how.options)
    _tokenize(prompts, tokenizer, how)
    return prompts


def truncate(prompt: Prompt, length: int, limits: Limits, side: str | None = None) -> Prompt:
    """The last `length` tokens of a prompt, or with the side "right" the first. Raises ValueError.

    -1: as many as leave room for one output token.
    """
    check_length(length, limits.max_model_len)
    length = limits.max_model_len - 1 if length == -1 else length
    if prompt.pictures is not None and length < len(prompt.token_ids):
        raise ValueError("truncate_prompt_tokens would cut a prompt with pictures; make it shorter")
    return _cut(prompt, length, side)


def too_long(max_model_len: int, contains: str) -> str:
    """The message for a prompt that "contains" so many "input tokens" or "characters".

    Clients look for these words, which are vLLM's.
    """
    return f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains {contains}"


def check_prompt_scores(prompt: Prompt, params: SamplingParams, limits: Limits) -> None:
    """Raise ValueError for prompt logprobs that are not possible for this prompt."""
    if prompt.embeds is not None:
        raise ValueError("prompt_logprobs need token ids, and this prompt is embeddings")
    if params.prompt_logprob_token_ids is None:
        return
    rows, start = params.prompt_logprob_token_ids, params.prompt_logprob_start or 0
    num_tokens = len(prompt.token_ids)
    num_scored = max(0, num_tokens - 1 - start)
    if len(rows) != num_scored:
        raise ValueError(
            f"prompt_logprob_token_ids has {len(rows)} rows, but a prompt of {num_tokens} tokens has {num_scored} "
            f"to be scored with prompt_logprob_start={start}: those behind the token {start}"
        )
    width = max(map(len, rows))
    if width > limits.max_logprobs != -1:
        raise ValueError(
            f"prompt_logprob_token_ids has {width} ids in a row, which is more than "
            f"max_logprobs={limits.max_logprobs}; start the engine with a larger max_logprobs"
        )
    for row in rows:
        _check_ids("prompt_logprob_token_ids", [i for i in row if i != -1], limits)


def check(prompt: Prompt, limits: Limits) -> None:
    """Raise ValueError for a prompt that is empty, too long, or has ids that do not exist."""
    num_tokens = len(prompt.token_ids)
    if num_tokens == 0:
        raise ValueError("the prompt is empty; it must have at least one token")
    if num_tokens >= limits.max_model_len:
        message = too_long(limits.max_model_len, f"{num_tokens} input tokens")
        raise ValueError(
            f"{message}, which leaves no room for an answer; shorten it or raise max_model_len"
        )
    _check_ids("prompt_token_ids", prompt.token_ids, limits)
    if prompt.embeds is not None:
        _check_embeds(prompt.embeds, limits)


def _check_embeds(embeds: np.ndarray, limits: Limits) -> None:
    if limits.embeds is None:
        raise ValueError('"prompt_embeds" need LLM(..., enable_prompt_embeds=True)')
    if embeds.shape[1] != limits.embeds.hidden_size:
        raise ValueError(
            f'"prompt_embeds" are {list(embeds.shape)}, but the embeddings of this model have '
            f"{limits.embeds.hidden_size} dimensions"
        )
    if not np.isfinite(embeds.astype(np.float32)).all():
        raise ValueError('"prompt_embeds" must be finite, got NaN or infinity')


def check_params(
    params: SamplingParams, bad_words: Sequence[Sequence[int]], limits: Limits
) -> None:
    """Raise ValueError if `params` exceed `limits`; `bad_words` are those of the params, as ids."""
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
        _check_ids(name, getattr(params, name) or (), limits)
    if params.stop and not limits.has_tokenizer:
        raise ValueError(f"stop={params.stop} needs a tokenizer; use stop_token_ids")
    num_biases = len(params.logit_bias or ())
    if num_biases > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias has {num_biases} entries, the limit is {MAX_LOGIT_BIAS}")
    if len(bad_words) > MAX_BAD_WORDS:
        raise ValueError(
            f"bad_words are {len(bad_words)} sequences of ids, the limit is {MAX_BAD_WORDS}"
        )
    for ids in bad_words:
        _check_ids("bad_words", ids, limits)
        if not 1 <= len(ids) <= MAX_BAD_WORD_LEN:
            raise ValueError(
                f"a bad word has {len(ids)} tokens, it must have 1 to {MAX_BAD_WORD_LEN}"
            )
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and wanted > limits.max_logprobs != -1:
            raise ValueError(
                f"{name}={wanted} is more than max_logprobs={limits.max_logprobs}; start the engine with a "
                "larger max_logprobs, or ask for all with -1"
            )


def _check_ids(name: str, ids: Iterable[int], limits: Limits) -> None:
    ids = list(ids)
    if ids and not 0 <= min(ids) <= max(ids) < limits.vocab_size:
        wrong = next(i for i in ids if not 0 <= i < limits.vocab_size)
        raise ValueError(f"{name} has {wrong}, the vocabulary has ids 0..{limits.vocab_size - 1}")
