"""The token counts of a call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxpage.outputs import RequestOutput


@dataclass
class Usage:
    """Sums over the prompts of a call."""

    with_details: bool  # include the number of cached prompt tokens
    prompt_tokens: dict[int, int] = field(default_factory=dict)  # by prompt
    cached_tokens: dict[int, int] = field(default_factory=dict)
    completion_tokens: int = 0

    def add(self, index: int, output: RequestOutput) -> None:
        """Add an output of prompt `index`; all its tokens are new."""
        self.add_prompt(index, output)
        self.completion_tokens += sum(len(c.token_ids) for c in output.outputs)

    def add_prompt(self, index: int, output: RequestOutput) -> None:
        """Add prompt `index` alone, before its first tokens."""
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

    def body(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        num_prompt = sum(self.prompt_tokens.values())
        body: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": num_prompt + self.completion_tokens,
        }
        if self.with_details:
            body["prompt_tokens_details"] = {"cached_tokens": sum(self.cached_tokens.values())}
        return body

    def whole_body(self) -> dict[str, Any]:
        """The same for a whole answer, where vLLM has unknown details as null."""
        return {"prompt_tokens_details": None, "completion_tokens_details": None, **self.body()}
