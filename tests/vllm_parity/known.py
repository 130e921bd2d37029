"""What differs on purpose, and why: each entry says which differences it accounts for, as narrowly as it can.

Those that users may notice are in `jaxpage/README.md` too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.vllm_parity.compare import TOLERANCE, Difference
from tests.vllm_parity.engines import Answer, Request
from tests.vllm_parity.requests import EOS, OTHER_EOS, START_ID


@dataclass(frozen=True)
class Case:
    """A difference, and the request and answers in which it was found."""

    difference: Difference
    request: Request
    ours: Answer
    theirs: Answer

    @property
    def where(self) -> str:
        return self.difference.where

    @property
    def fields(self) -> dict[str, Any]:
        return self.request["fields"]

    @property
    def is_answered(self) -> bool:
        """By both."""
        return "completions" in self.ours and "completions" in self.theirs

    @property
    def our_completion(self) -> dict[str, Any]:
        return self.ours["completions"][self.difference.index]

    @property
    def their_completion(self) -> dict[str, Any]:
        return self.theirs["completions"][self.difference.index]


@dataclass(frozen=True)
class Known:
    name: str
    why: str
    accounts_for: Callable[[Case], bool]


def _only_in_gpu_runner(case: Case) -> bool:
    return case.where == "refused" and "requires the V2 model runner" in (
        case.difference.theirs or ""
    )


def _trace(case: Case) -> bool:
    ours = case.difference.ours or ""
    return case.where == "refused" and "trace_decode_token_ids" in ours


def _ends_within_a_character(case: Case) -> bool:
    x = case.difference
    return x.where == "text" and x.ours.rstrip("\ufffd") == x.theirs


def _begins_within_a_character(case: Case) -> bool:
    x = case.difference
    is_cut = "truncate_prompt_tokens" in case.fields
    return is_cut and x.where == "text" and x.theirs.lstrip("\ufffd") == x.ours


def _begun_by_the_first_token(case: Case) -> bool:
    x = case.difference
    return x.where == "prompt_logprobs texts" and x.row <= 3 and x.theirs[3] == "" != x.ours[3]


def _ranks_of_given_ids(case: Case) -> bool:
    x, ids = case.difference, case.fields.get("logprob_token_ids") or []
    if x.where != "logprobs ranks" or x.theirs[0] not in ids:
        return False
    return x.theirs[2] == ids.index(x.theirs[0]) + 1


def _raw_logprobs(case: Case) -> bool:
    if "structured_outputs" not in case.fields:
        return False
    x = case.difference
    if x.where == "cumulative_logprob":
        return x.theirs >= x.ours or x.theirs == -math.inf
    if x.where == "logprobs values" and x.ours[2] == x.theirs[2] == 1:
        return x.theirs[1] >= x.ours[1] - TOLERANCE
    return x.where.startswith("logprobs ") and x.where not in ("logprobs type", "logprobs length")


def _grammar_comes_first(case: Case) -> bool:
    limits = ("allowed_token_ids", "bad_words", "logit_bias", "min_tokens")
    if not case.is_answered or "structured_outputs" not in case.fields:
        return False
    if not any(x in case.fields for x in limits):
        return False
    ours, theirs = case.our_completion, case.their_completion
    row = case.difference.row
    took_first = case.where == "token_ids" and theirs["token_ids"][row] == 0
    return took_first or theirs["finish_reason"] == "error" != ours["finish_reason"]


def _forced_end_against_grammar(case: Case) -> bool:
    if not case.is_answered or "structured_outputs" not in case.fields:
        return False
    ours, theirs = case.our_completion["finish_reason"], case.their_completion["finish_reason"]
    has_failed = theirs == "error" and ours in ("error", "length")
    return "thinking_token_budget" in case.fields and has_failed


def _starts_to_think_again(case: Case) -> bool:
    if case.where != "token_ids" or case.fields.get("thinking_token_budget") is None:
        return False
    known = case.ours["prompt_token_ids"] + case.our_completion["token_ids"][: case.difference.row]
    return known.count(START_ID) > 1


def _other_eos(case: Case) -> bool:
    if case.where != "token_ids" or "structured_outputs" not in case.fields:
        return False
    return case.difference.ours == [OTHER_EOS]


def _grammar_ends_it(case: Case) -> bool:
    if not case.is_answered or "structured_outputs" not in case.fields:
        return False
    if not case.fields.get("ignore_eos"):
        return False
    ours, theirs = case.our_completion, case.their_completion
    *before, last = ours["token_ids"]
    return last in (EOS, OTHER_EOS) and theirs["token_ids"][: len(before)] == before


def _negative_length(case: Case) -> bool:
    return case.where == "refused" and case.fields.get("truncate_prompt_tokens", 0) < -1


def _stops_at_replacements(case: Case) -> bool:
    stops = "".join(case.fields.get("stop", ()))
    return "\ufffd" in stops and case.where in ("num_tokens", "text")


def _says_the_error(case: Case) -> bool:
    if case.where != "stop_reason":
        return False
    reasons = [x["finish_reason"] for x in (case.our_completion, case.their_completion)]
    return reasons == ["error", "error"]


KNOWN: list[Known] = [
    Known(
        "text within a character",
        "Text that ends inside a UTF-8 character ends with U+FFFD, as tokenizer.decode has it; vLLM drops it.",
        _ends_within_a_character,
    ),
    Known(
        "prompt cut within a character",
        "The text is that of the output alone. vLLM's begins with what is left of the prompt's last character.",
        _begins_within_a_character,
    ),
    Known(
        "character begun by the first prompt token",
        "A token that completes a character reads as all of it. vLLM forgets the first token of a prompt, which has no "
        "logprob.",
        _begun_by_the_first_token,
    ),
    Known(
        "ranks of logprob_token_ids",
        "They are ranks in the vocabulary. vLLM numbers the ids in the order of the list.",
        _ranks_of_given_ids,
    ),
    Known(
        "raw logprobs beside a grammar",
        "They are the model's, of all tokens. vLLM masks the logits before it looks at them.",
        _raw_logprobs,
    ),
    Known(
        "a grammar comes first",
        "What other fields would forbid is allowed where a grammar leaves nothing else. In vLLM no token is left, "
        "the first of the vocabulary is taken, and the grammar's refusal ends the request with an error.",
        _grammar_comes_first,
    ),
    Known(
        "a grammar ends its output",
        "Also with ignore_eos: EOS ends an output that matches. vLLM goes on, without the grammar.",
        _grammar_ends_it,
    ),
    Known(
        "a grammar ends with every EOS",
        "Also with those of the generation config, as with xgrammar in vLLM. vLLM's guidance knows the tokenizer's.",
        _other_eos,
    ),
    Known(
        "start of reasoning, again",
        "thinking_token_budget counts from the last start marker, as vLLM does it on a GPU. vLLM's runner for CPUs "
        "counts from the first.",
        _starts_to_think_again,
    ),
    Known(
        "forced end of reasoning that a grammar forbids",
        "Both end with an error. jaxpage may have written first what the grammar leaves no choice about, and an output "
        "that is long enough ends before its last token is looked at.",
        _forced_end_against_grammar,
    ),
    Known(
        "stop_reason of an error",
        "It says what went wrong; vLLM's is None.",
        _says_the_error,
    ),
    Known(
        "truncate_prompt_tokens below -1",
        "They are refused. vLLM takes every negative number for -1.",
        _negative_length,
    ),
    Known(
        "stop strings with U+FFFD",
        "Bytes that are no character read as U+FFFD once that is certain; in vLLM when the next character is there.",
        _stops_at_replacements,
    ),
    Known(
        "not in vLLM's runner for CPUs",
        "prompt_logprob_token_ids need vLLM's second model runner, which needs Triton.",
        _only_in_gpu_runner,
    ),
    Known(
        "trace_decode_token_ids",
        "They are refused, with what to do instead.",
        _trace,
    ),
]


def cause(case: Case) -> Known | None:
    """The first that accounts for it."""
    return next((k for k in KNOWN if k.accounts_for(case)), None)
