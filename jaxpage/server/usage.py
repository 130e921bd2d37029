"""The token counts of a call."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from jaxpage.outputs import RequestOutput


@dataclass
class Usage:
    """Sums over the prompts of a call."""

    with_details: bool  # include the number of cached prompt tokens
    prompt_tokens: dict[int, int] = field(default_factory=dict)  # by prompt
    cached_tokens: dict[int, int] = field(default_factory=dict)
    # by prompt and number of the continuation
    sampled_tokens: Counter[tuple[int, int]] = field(default_factory=Counter)

    @property
    def completion_tokens(self) -> int:
        return self.sampled_tokens.total()

    def add(self, index: int, output: RequestOutput) -> None:
        """Add an output of prompt `index`; all its tokens are new."""
        self.add_prompt(index, output)
        for completion in output.outputs:
            self.sampled_tokens[index, completion.index] += len(completion.token_ids)

    def add_prompt(self, index: int, output: RequestOutput) -> None:
        """Add prompt `index` alone, without the tokens that were sampled."""
        self.prompt_tokens[index] = len(output.prompt_token_ids)
        self.cached_tokens[index] = output.num_cached_tokens

    def response_body(self, num_reasoning_tokens: int) -> dict[str, Any]:
        """The usage object of responses."""
        num_prompt, cached = sum(self.prompt_tokens.values()), sum(self.cached_tokens.values())
        return {
            "input_tokens": num_prompt,
            # Cache writes are free here, so they are not counted.
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
            "total_tokens": num_prompt + self.completion_tokens,
        }

    def message_body(self) -> dict[str, Any]:
        """The usage object of Anthropic's messages, which counts cached tokens apart from the rest of the prompt."""
        cached = sum(self.cached_tokens.values())
        return {
            "input_tokens": sum(self.prompt_tokens.values()) - cached,
            "cache_creation_input_tokens": 0,  # cache writes are free here
            "cache_read_input_tokens": cached,
            "output_tokens": self.completion_tokens,
        }

    def chunk_body(self, index: int, number: int) -> dict[str, Any]:
        """Usage so far of one continuation of prompt `index`, as in vLLM's chunks."""
        return _counts(self.prompt_tokens[index], self.sampled_tokens[index, number])

    def body(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        body = _counts(sum(self.prompt_tokens.values()), self.completion_tokens)
        if self.with_details:
            body["prompt_tokens_details"] = {"cached_tokens": sum(self.cached_tokens.values())}
        return body

    def whole_body(self) -> dict[str, Any]:
        """The same for a whole answer, where vLLM has unknown details as null."""
        return {"prompt_tokens_details": None, "completion_tokens_details": None, **self.body()}


def _counts(num_prompt: int, num_sampled: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }
