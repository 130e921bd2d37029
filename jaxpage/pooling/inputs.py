"""Turns prompts and pairs of prompts for pooling models into texts to compute: tokenises, truncates, checks.

Knows prompt forms and limits. Must not know engines or tasks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxpage.chat_template import render
from jaxpage.config import ResolvedConfig
from jaxpage.pooling.engine import Text
from jaxpage.pooling.sentence_transformers import SentenceTransformer
from jaxpage.prompts import Limits, Prompt, check_encodable, encode, parse, parse_chat, too_long
from jaxpage.tokenization import Tokenization, read_tokenization
from jaxpage.tokenizer import load_chat_template


@dataclass(kw_only=True)
class PairPrompt(Prompt):
    """Two texts as one sequence."""

    # for each token which of the texts it is from, 0 or 1; for models with token types
    type_ids: list[int] | None = None


class PoolingInputs:
    """Turns prompts into texts. A method that raises changes nothing."""

    def __init__(
        self,
        tokenizer: Any,
        config: ResolvedConfig,
        folder: SentenceTransformer,
        *,
        vocab_size: int,
        joins_pairs: bool,
    ):
        """`joins_pairs`: whether the tokenizer joins the texts of a pair; otherwise they are concatenated."""
        self.tokenizer = tokenizer
        self.limits = Limits(
            vocab_size=vocab_size,
            max_model_len=config.max_model_len,
            max_logprobs=0,
            has_tokenizer=tokenizer is not None,
        )
        self._config, self._folder, self._joins_pairs = config, folder, joins_pairs

    @functools.cached_property
    def max_token_len(self) -> int:
        """Characters of the longest token of the vocabulary; 1 without a tokenizer."""
        return max(map(len, self.tokenizer.get_vocab()), default=1) if self.tokenizer else 1

    def decode(self, token_ids: Sequence[int]) -> str | None:
        """The text of ids, special tokens included; None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.decode(list(token_ids))

    def parse(
        self,
        prompts: Any,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        *,
        prompt_name: str | None = None,
    ) -> list[Prompt]:
        """One prompt or many, as ids. Raises ValueError for an invalid prompt.

        `prompt_name`: which of the folder's prompts is prepended to each text, as in sentence-transformers.
        """
        how = self._read(tokenization_kwargs)
        prompts = self._with_prompt(prompts, prompt_name)
        if self._folder.lower_case:
            prompts = _lowered(prompts)
        return parse(prompts, self.tokenizer, how)

    def parse_chat(self, messages: Sequence[Any], **options: Any) -> list[Prompt]:
        """One conversation or many, rendered; `options` are those of `prompts.parse_chat`. Raises ValueError."""
        template = options.pop("chat_template", None) or self._config.chat_template
        how = self._read(options.pop("tokenization_kwargs", None))
        return parse_chat(
            messages,
            self.tokenizer,
            chat_template=template,
            tokenization_kwargs=how,
            **options,
        )

    def pairs(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[Prompt]:
        """Each query and its document as one sequence. Raises ValueError.

        A `chat_template` (or the engine's) renders them as messages with the roles "query" and "document".
        """
        if self.tokenizer is None:
            raise ValueError("scoring texts needs a tokenizer; leave out skip_tokenizer_init=True")
        how = self._read(tokenization_kwargs)
        template = load_chat_template(chat_template or self._config.chat_template)
        if template is None and self._joins_pairs:
            return self._joined(queries, documents, how)
        texts = [
            q + d if template is None else self._rendered(q, d, template)
            for q, d in zip(queries, documents, strict=True)
        ]
        return parse(texts, self.tokenizer, how)

    def cut(self, texts: Any, max_tokens: int) -> Any:
        """Prompts of any form, whose texts end after so many tokens; 0: as they are. Raises ValueError."""
        if not max_tokens:
            return texts
        if self.tokenizer is None:
            raise ValueError("limits of tokens per text need a tokenizer, skip_tokenizer_init=True")
        if self._folder.lower_case:
            texts = _lowered(texts)
        return _mapped(texts, lambda text: self._beginning(text, max_tokens))

    def _beginning(self, text: str, max_tokens: int) -> str:
        check_encodable([text])
        while True:
            found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            offsets = found["offset_mapping"]
            if len(offsets) <= max_tokens:
                return text
            # Without its end a text may have other tokens, even more of them, so that it is cut again.
            end = min(offsets[max_tokens - 1][1], offsets[max_tokens][0])
            text = text[: min(end, len(text) - 1)]

    def texts(self, prompts: Sequence[Prompt]) -> list[Text]:
        """What the engine computes. Raises ValueError for prompts that it cannot compute."""
        texts = []
        for index, prompt in enumerate(prompts):
            try:
                self._check(prompt)
            except ValueError as error:
                where = f"prompt {index} of {len(prompts)}: " if len(prompts) > 1 else ""
                raise ValueError(f"{where}{error}") from None
            type_ids = prompt.type_ids if isinstance(prompt, PairPrompt) else None
            texts.append(Text(token_ids=prompt.token_ids, type_ids=type_ids))
        return texts

    def _check(self, prompt: Prompt) -> None:
        limits, num_tokens = self.limits, len(prompt.token_ids)
        if prompt.embeds is not None:
            raise ValueError('"prompt_embeds" are not supported by pooling models')
        if prompt.media is not None:
            raise ValueError('"multi_modal_data" is not for this model, which takes text only')
        if num_tokens == 0:
            raise ValueError("the prompt is empty; it must have at least one token")
        if num_tokens > limits.max_model_len:
            message = too_long(limits.max_model_len, f"{num_tokens} input tokens")
            raise ValueError(f"{message}; shorten it, or give truncate_prompt_tokens")
        wrong = next((i for i in prompt.token_ids if not 0 <= i < limits.vocab_size), None)
        if wrong is not None:
            raise ValueError(
                f"prompt_token_ids has {wrong}, the vocabulary has ids 0..{limits.vocab_size - 1}"
            )

    def _read(self, tokenization_kwargs: Mapping[str, Any] | None) -> Tokenization:
        """What the options mean here: the tokenizer truncates, which keeps its special tokens at both ends."""
        most = self.limits.max_model_len
        how = read_tokenization(tokenization_kwargs).within(most, most).cut_by_tokenizer()
        return replace(how, side=how.side or "right")

    def _with_prompt(self, prompts: Any, name: str | None) -> Any:
        if name is None:
            return prompts
        known = self._folder.prompts
        if name not in known:
            names = ", ".join(map(repr, known)) or "none"
            raise ValueError(f"the model has no prompt {name!r} (prompt_name); there are: {names}")
        if not self._folder.includes_prompt:
            raise ValueError(
                "prompt_name: the model excludes prompts from the mean, which is not supported"
            )
        return _mapped(prompts, lambda text: known[name] + text)

    def _joined(
        self, queries: Sequence[str], documents: Sequence[str], how: Tokenization
    ) -> list[Prompt]:
        if self._folder.lower_case or how.lower_case:
            queries, documents = [q.lower() for q in queries], [d.lower() for d in documents]
        check_encodable([*queries, *documents])
        found = encode(self.tokenizer, how, list(queries), list(documents))
        # The tokenizer does not truncate to less than its special tokens.
        longest = max(map(len, found["input_ids"]), default=0)
        if how.length is not None and longest > how.length:
            num_special = self.tokenizer.num_special_tokens_to_add(pair=True)
            raise ValueError(
                f"truncate_prompt_tokens={how.length} is too small for a pair of texts, which has {num_special} "
                "special tokens"
            )
        type_ids = found.get("token_type_ids") or [None] * len(queries)
        return [
            PairPrompt(token_ids=list(ids), type_ids=types)
            for ids, types in zip(found["input_ids"], type_ids, strict=True)
        ]

    def _rendered(self, query: str, document: str, template: str) -> str:
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        return render(messages, self.tokenizer, chat_template=template)


def _lowered(prompts: Any) -> Any:
    return _mapped(prompts, str.lower)


def _mapped(prompts: Any, function: Any) -> Any:
    """Apply `function` to the texts among prompts of any form; other prompts are unchanged."""
    if isinstance(prompts, str):
        return function(prompts)
    if isinstance(prompts, Mapping):
        text = prompts.get("prompt")
        return {**prompts, "prompt": function(text)} if isinstance(text, str) else prompts
    if isinstance(prompts, list | tuple):
        return [_mapped(p, function) if isinstance(p, str | Mapping) else p for p in prompts]
    return prompts
