"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator

from jaxpage.sampling_params import RequestOutputKind, SamplingParams
from jaxpage.server.protocol.lists import ListOf
from jaxpage.server.protocol.sampling import SamplingRequest, make_params


class CompletionRequest(SamplingRequest):
    """OpenAI's completion request, with vLLM's extras."""

    prompt: str | ListOf[int] | ListOf[ListOf[int]] | ListOf[str] | None = None
    prompt_embeds: Any = None
    max_tokens: int | None = Field(16, ge=0)
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool = True

    @field_validator("max_tokens")
    @classmethod
    def _null_is_the_default(cls, value: int | None) -> int:
        return 16 if value is None else value

    @property
    def only_scores(self) -> bool:
        """Whether nothing is generated: the prompt is returned, possibly with its logprobs."""
        return self.echo and self.max_tokens == 0

    def prompts(self) -> list[str | list[int]]:
        """Each prompt. Raises ValueError."""
        if self.prompt_embeds is not None:
            raise ValueError(
                "prompt_embeds are not served: they travel as pickles, which are never loaded; "
                "use LLM.generate"
            )
        if self.suffix:
            raise ValueError("suffix is not supported; leave it out")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError(f"best_of={self.best_of} is not supported; use n")
        prompt = self.prompt
        if prompt is None or prompt == []:
            raise ValueError("prompt is missing: a text, a list of token ids, or a list of them")
        if isinstance(prompt, str):
            return [prompt]
        ids = [x for x in prompt if isinstance(x, int)]
        return [ids] if ids else [x for x in prompt if not isinstance(x, int)]

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The sampling params of each prompt. Raises ValueError."""
        options = self.sampling_options(defaults)
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1, or 0 with echo")
        options["max_tokens"] = 1 if self.only_scores else self.max_tokens
        options |= self.options_of_logprobs(self.logprobs)
        if self.only_scores and self.logprob_token_ids:
            raise ValueError("logprob_token_ids are those of sampled tokens, and max_tokens is 0")
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            options["prompt_logprobs"] = self.logprobs
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return make_params({**options, "output_kind": kind})
