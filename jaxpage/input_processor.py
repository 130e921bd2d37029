"""Turns prompts and params into `Request`s: tokenised, checked, named and seeded.

Knows prompt forms, params and limits. Must not know the engine or its caller, so that everything which takes prompts
can share it. Requests are not added to anything here: if it raises, nothing has changed.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpage.captures import wanted_captures
from jaxpage.chat_outputs import ChatFormat, chat_format
from jaxpage.chat_template import check_conversations
from jaxpage.interventions import slot_values
from jaxpage.lora.request import Adapter, LoRARequest
from jaxpage.pictures.border import Picture
from jaxpage.pictures.messages import has_media, pictures_of
from jaxpage.pictures.reader import PictureReader
from jaxpage.pictures.sources import sources_of
from jaxpage.prompts import (
    EmbedsForm,
    Limits,
    Prompt,
    check,
    check_params,
    check_prompt_scores,
    parse,
    parse_chat,
    truncate,
)
from jaxpage.reasoning import ALWAYS_REASON, reasoning_tokens, to_reasoning_config
from jaxpage.request import MaskSource, Request
from jaxpage.sampling.features import features_of, processors_of, slot_fields_of
from jaxpage.sampling_params import SamplingParams
from jaxpage.tokenization import Tokenization, read_tokenization
from jaxpage.tokenizer import bad_words_token_ids, load_chat_template

if TYPE_CHECKING:
    from jaxpage.adapter_cache import AdapterCache
    from jaxpage.build import Built
    from jaxpage.structured_outputs.compiler import GrammarCompiler

AnyLoRA = LoRARequest | Sequence[LoRARequest | None] | None


class InputProcessor:
    """Creates the requests of one engine, and numbers them for ids and seeds. Not thread-safe.

    `ids_in_use` contains the request ids that are taken.
    """

    def __init__(self, built: Built, ids_in_use: Container[str]):
        self.tokenizer = built.tokenizer
        self.limits = Limits(
            vocab_size=built.vocab_size,
            max_model_len=built.config.max_model_len,
            max_logprobs=built.config.max_logprobs,
            has_tokenizer=built.tokenizer is not None,
            embeds=_embeds_form(built),
            has_recurrent_state=built.has_recurrent_state,
        )
        self.pictures = _picture_reader(built)  # None: the model takes no pictures
        self.eos_token_ids = built.eos_token_ids  # the first is the tokenizer's EOS
        self._config = built.config
        self._default_sampling = built.default_sampling
        self._ids_in_use = ids_in_use
        self._num_requests = 0  # created since start
        self._adapters = built.adapters
        self._research = built.research

    def default_params(self) -> SamplingParams:
        """The values of the model's generation config, otherwise vLLM's defaults."""
        return SamplingParams(**self._default_sampling)

    @property
    def default_options(self) -> dict[str, Any]:
        """The same as a dict of values that differ from vLLM's defaults."""
        return dict(self._default_sampling)

    @functools.cached_property
    def max_token_len(self) -> int:
        """Length in characters of the longest token of the vocabulary; 1 without a tokenizer."""
        return max(map(len, self.tokenizer.get_vocab()), default=1) if self.tokenizer else 1

    def decode(self, token_ids: Sequence[int]) -> str | None:
        """The text of ids, including special tokens; None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.decode(list(token_ids))

    def count_tokens(self, text: str) -> int:
        """The number of tokens of a text, without special tokens."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def parse(
        self, prompts: Any, tokenization_kwargs: Mapping[str, Any] | None = None
    ) -> list[Prompt]:
        """One or several prompts, tokenised. Raises ValueError for anything that is not a prompt."""
        how = self._read(tokenization_kwargs)
        parsed = parse(prompts, self.tokenizer, how)
        return self._truncated([self._with_media(prompt) for prompt in parsed], how)

    def parse_chat(self, messages: Sequence[Any], **options: Any) -> list[Prompt]:
        """One or several conversations, as ids; `options` are those of `prompts.parse_chat`. Raises ValueError."""
        template = options.get("chat_template") or self._config.chat_template
        how = self._read(options.get("tokenization_kwargs"))
        loaded = [self._loaded(conversation) for conversation in check_conversations(messages)]
        pictures = [pictures_of(conversation) for conversation in loaded]
        if any(pictures):
            how = how.uncut()  # the text has a placeholder for each picture, which must not be lost
        options |= {"chat_template": template, "tokenization_kwargs": how}
        prompts = parse_chat(loaded, self.tokenizer, **options)
        seen = [
            self._expanded(prompt, its_pictures)
            for prompt, its_pictures in zip(prompts, pictures, strict=True)
        ]
        return self._truncated(seen, how)

    def _loaded(self, conversation: Sequence[Any]) -> Sequence[Any]:
        """The conversation with its pictures loaded. For models without vision, rendering refuses pictures later."""
        if self.pictures is None or not has_media(conversation):
            return conversation
        return self.pictures.load(conversation)

    def _with_media(self, prompt: Prompt) -> Prompt:
        """The prompt with its "multi_modal_data" converted to pictures."""
        if prompt.media is None:
            return prompt
        if self.pictures is None:
            raise ValueError('"multi_modal_data" is not for this model, which takes text only')
        pictures = self.pictures.of_prompt(prompt.media)
        return self._expanded(dataclasses.replace(prompt, media=None), pictures)

    def _expanded(self, prompt: Prompt, pictures: Sequence[Picture]) -> Prompt:
        """The prompt with one placeholder token for each embedding of its pictures."""
        if self.pictures is None or not pictures:
            return prompt
        token_ids, placed = self.pictures.expand(prompt.token_ids, pictures)
        return dataclasses.replace(prompt, token_ids=token_ids, pictures=placed)

    def _read(self, tokenization_kwargs: Mapping[str, Any] | None) -> Tokenization:
        """What the options mean here. Raises ValueError."""
        most = self.limits.max_model_len
        how = read_tokenization(tokenization_kwargs).within(most, most - 1)
        # As in vLLM, texts keep their BOS unless a side is named.
        return how if how.side else how.cut_by_tokenizer()

    def _truncated(self, prompts: list[Prompt], how: Tokenization) -> list[Prompt]:
        if how.length is None:
            return prompts
        return [truncate(prompt, how.length, self.limits, how.side) for prompt in prompts]

    def chat_format(self, chat_template: str | None) -> ChatFormat:
        """How the model writes tool calls and reasoning, from the options or a chat template. Raises ValueError."""
        template = load_chat_template(chat_template or self._config.chat_template)
        return chat_format(self._config, self.tokenizer, template)

    def requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: int | Sequence[int] | None = None,
        complete: Callable[[SamplingParams], SamplingParams] = lambda params: params,
        *,
        lora_request: AnyLoRA = None,
    ) -> list[Request]:
        """A request for each prompt, with its number as id. `complete` may extend the params of each request.

        `params`, `priority` and `lora_request` are one for all or one for each; without params, the defaults. Raises
        ValueError if any prompt or its params cannot be served, or an adapter cannot be loaded.
        """
        all_params = _one_each(
            "sampling_params", self.default_params() if params is None else params,
            SamplingParams, len(prompts),
        )  # fmt: skip
        priorities = _one_each("priority", 0 if priority is None else priority, int, len(prompts))
        adapters = self._adapters_of(lora_request, len(prompts))
        requests = []
        for index, prompt in enumerate(prompts):
            number = self._num_requests + index
            try:
                request = self._request(
                    prompt, complete(all_params[index]), number=number, priority=priorities[index]
                )
            except ValueError as e:
                where = f"prompt {index} of {len(prompts)}: " if len(prompts) > 1 else ""
                raise ValueError(f"{where}{e}") from None
            request.adapter = adapters[index]
            while request.request_id in self._ids_in_use:
                request.request_id = f"_{request.request_id}"
            requests.append(request)
        self._num_requests += len(prompts)
        return requests

    def request(
        self,
        request_id: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> Request:
        """A request for the single prompt in `prompts`, with an id chosen by the caller. Raises ValueError."""
        if not isinstance(request_id, str):
            raise ValueError(f"request_id must be a str, got {request_id!r}")
        if request_id in self._ids_in_use:
            raise ValueError(f"request_id {request_id!r} is in use; choose another or abort it")
        if len(prompts) != 1:
            raise ValueError(f"one prompt at a time, with at least one token; got {len(prompts)}")
        (request,) = self.requests(prompts, params, priority, lora_request=lora_request)
        request.request_id = request_id
        return request

    @property
    def adapters(self) -> AdapterCache:
        """The adapters in host memory. Raises ValueError without `enable_lora`."""
        if self._adapters is None:
            raise ValueError("adapters need an engine that was started with enable_lora=True")
        return self._adapters

    def _adapters_of(self, wanted: Any, count: int) -> list[Adapter | None]:
        """The adapter or None for each of `count` prompts. Raises ValueError if one cannot be loaded."""
        if wanted is None:
            return [None] * count
        is_list = isinstance(wanted, Sequence) and not isinstance(wanted, str)
        each: list[Any] = list(wanted) if is_list else [wanted] * count
        if len(each) != count:
            raise ValueError(f"lora_request has {len(each)} entries for {count} prompts")
        # Each once, however many prompts name it: its folder may be rewritten meanwhile.
        found: dict[LoRARequest, Adapter] = {}
        for one in each:
            if one is not None and not (isinstance(one, LoRARequest) and one in found):
                found[one] = self.adapters.get(one)
        return [None if one is None else found[one] for one in each]

    def _rounded(self, prompt: Prompt) -> np.ndarray | None:
        """The prompt's embeddings rounded to the model's dtype, as a copy that the caller cannot change."""
        form = self.limits.embeds
        if prompt.embeds is None or form is None:
            return None
        return np.array(prompt.embeds, form.dtype, order="C")

    def _request(
        self, prompt: Prompt, params: SamplingParams, *, number: int, priority: int
    ) -> Request:
        params = dataclasses.replace(params)  # the caller may change the original later
        bad_words = ()
        if params.bad_words:
            if self.tokenizer is None:
                raise ValueError(f"bad_words={params.bad_words} needs a tokenizer")
            bad_words = bad_words_token_ids(self.tokenizer, params.bad_words)
        reasoning = None
        if params.thinking_token_budget is not None:
            markers = self._config.reasoning_config
            reasoning = reasoning_tokens(markers, self.tokenizer, self.limits.vocab_size)
        if params.truncate_prompt_tokens is not None:
            prompt = truncate(prompt, params.truncate_prompt_tokens, self.limits)
        check(prompt, self.limits)
        check_params(params, bad_words, self.limits)
        if params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None:
            check_prompt_scores(prompt, params, self.limits)
        if params.max_tokens is None:
            params.max_tokens = self.limits.max_model_len - len(prompt.token_ids)
            if params.min_tokens > params.max_tokens:
                raise ValueError(
                    f"min_tokens={params.min_tokens} is more than the {params.max_tokens} tokens that "
                    f"max_model_len={self.limits.max_model_len} leaves for an answer"
                )
        # EOS always ends a structured output, because a complete output cannot be continued.
        goes_on = params.ignore_eos and params.structured_outputs is None
        eos_token_ids = () if goes_on else self.eos_token_ids
        seed = params.seed
        request = Request(
            request_id=str(number),
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            params=params,
            seed=derive_seed(self._config.seed, number) if seed is None else seed % 2**32,
            stop_token_ids=frozenset((*eos_token_ids, *(params.stop_token_ids or ()))),
            eos_token_ids=frozenset(eos_token_ids[:1]),
            all_eos_token_ids=frozenset(self.eos_token_ids),
            bad_words_token_ids=bad_words,
            reasoning=reasoning,
            priority=priority,
            cache_salt=prompt.cache_salt,
            prompt_embeds=self._rounded(prompt),
            pictures=prompt.pictures,
            mask_source=self._mask_source(prompt, params),
            captures=wanted_captures(params.capture, len(prompt.token_ids), self._research),
        )
        self._set_scoring(request)
        processors = processors_of(self._config)
        request.features = features_of(request, processors)
        fields = slot_fields_of(request, self.limits.vocab_size, processors)
        fields |= slot_values(params.interventions, len(prompt.token_ids), self._research)
        if prompt.pictures is not None and prompt.pictures.positions is not None:
            fields["position_offset"] = prompt.pictures.position_offset
        request.slot_fields = fields
        return request

    def _set_scoring(self, request: Request) -> None:
        """Set whether its whole vocabulary and its prompt are scored; the latter sets `skip_reading_prefix_cache`."""
        params = request.params
        all_at_once = self.limits.max_logprobs == -1  # top logprobs cover the whole vocabulary
        ids = params.logprob_token_ids is not None
        request.wants_vocabulary = ids or (params.logprobs == -1 and not all_at_once)
        prompt_ids = params.prompt_logprob_token_ids is not None
        request.scores_prompt = params.prompt_logprobs is not None or prompt_ids
        request.wants_prompt_vocabulary = prompt_ids or params.prompt_logprobs == -1
        if request.scores_prompt:
            params.skip_reading_prefix_cache = True  # scoring needs hidden states, not just KV

    def _mask_source(self, prompt: Prompt, params: SamplingParams) -> MaskSource | None:
        """The source of its masks, whose grammar starts to compile; None without structured outputs."""
        if params.structured_outputs is None:
            return None
        from jaxpage.structured_outputs.masks import GrammarMasks, reasoning_at_end

        config, reasoning = to_reasoning_config(self._config.reasoning_config), None
        is_reasoning = False
        if config and not self._grammars.config.enable_in_reasoning:
            wanted_by = "structured_outputs behind reasoning"
            reasoning = reasoning_tokens(
                config, self.tokenizer, self.limits.vocab_size, wanted_by=wanted_by
            )
            at_end = reasoning_at_end(prompt.token_ids, reasoning.start, reasoning.end)
            always = config.reasoning_parser in ALWAYS_REASON
            is_reasoning = always if at_end is None else at_end
            reasoning = None if at_end is False else reasoning
        # Forced tokens have no logprobs, and ignore other constraints.
        incompatible = (
            params.logprobs,
            params.logprob_token_ids,
            params.allowed_token_ids,
            params.logit_bias,
            params.bad_words,
        )
        return GrammarMasks(
            self._grammars,
            self._grammars.compile(params.structured_outputs),
            reasoning=reasoning,
            is_reasoning=is_reasoning,
            forces=all(x is None or x == [] or x == {} for x in incompatible),
        )

    @functools.cached_property
    def _grammars(self) -> GrammarCompiler:
        from jaxpage.structured_outputs.compiler import GrammarCompiler
        from jaxpage.structured_outputs.config import to_structured_outputs_config

        if self.tokenizer is None:
            raise ValueError("structured_outputs needs a tokenizer")
        return GrammarCompiler(
            self.tokenizer,
            vocab_size=self.limits.vocab_size,
            eos_token_ids=self.eos_token_ids,
            config=to_structured_outputs_config(self._config.structured_outputs_config),
        )


def _embeds_form(built: Built) -> EmbedsForm | None:
    if not built.config.enable_prompt_embeds:
        return None
    model = built.model.config
    return EmbedsForm(model.hidden_size, np.dtype(model.dtype))


def _picture_reader(built: Built) -> PictureReader | None:
    if built.picture_processor is None:
        return None
    config = built.config
    return PictureReader(
        processor=built.picture_processor,
        sources=sources_of(config.allowed_local_media_path, config.allowed_media_domains),
        limit_mm_per_prompt=config.limit_mm_per_prompt,
        most_patches=built.most_patches,
        most_tokens=config.max_model_len,
    )


def derive_seed(engine_seed: int, number: int) -> int:
    """The uint32 seed of the `number`-th request of an engine, if the request has no seed of its own."""
    digest = hashlib.blake2b(f"{engine_seed} {number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _one_each(name: str, value: Any, kind: type, count: int) -> list[Any]:
    """`value` repeated for each of `count` prompts, unless it is already a list of that length."""
    values = [value] * count if isinstance(value, kind) else value
    if not isinstance(values, Sequence) or not all(isinstance(v, kind) for v in values):
        raise ValueError(f"{name} must be of type {kind.__name__}, or a list of it, got {value!r}")
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} prompts")
    return list(values)
