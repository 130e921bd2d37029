"""Compiles grammars for one tokenizer, in background threads, and caches them.

Knows llguidance, a tokenizer, and time. Must not know requests or the engine.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import llguidance
import llguidance.hf
from transformers import PreTrainedTokenizerFast

from jaxpage.structured_outputs.config import StructuredOutputsConfig
from jaxpage.structured_outputs.grammar import limits, to_grammar
from jaxpage.structured_outputs.params import StructuredOutputsParams

_MAX_KEPT = 128  # compiled grammars; that of a large schema takes some MB


@dataclass(frozen=True, eq=False)
class CompilingGrammar:
    """A grammar that is being compiled, or was. `deadline`: monotonic seconds."""

    matcher: Future[llguidance.LLMatcher]  # in its initial state; copy it
    deadline: float


class GrammarCompiler:
    """The grammars of an engine. Thread-safe.

    `vocab_size` is the model's; `eos_token_ids` end an output that matches. Raises ValueError for a tokenizer that
    llguidance cannot read, and for models without EOS, whose outputs could not end.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        config: StructuredOutputsConfig,
    ):
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ValueError(
                f"structured outputs need a fast tokenizer of transformers, got {type(tokenizer).__name__}"
            )
        if not eos_token_ids:
            raise ValueError("structured outputs need an EOS id to end with; the model has none")
        self.config = config
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "jaxpage-grammar")
        self._kept: OrderedDict[str, Future[llguidance.LLMatcher]] = OrderedDict()
        self._lock, self._tokens_lock = threading.Lock(), threading.Lock()
        self._one_has_ended = threading.Condition()
        self._num_ended = 0

    def compile(self, params: StructuredOutputsParams) -> CompilingGrammar:
        """Start compiling. Raises ValueError now for errors that show in the text alone."""
        grammar = to_grammar(params, self.config)
        with self._lock:
            future = self._kept.pop(grammar, None)
            if future is None or (future.done() and future.exception() is not None):
                future = self._threads.submit(self._compile, grammar)
                future.add_done_callback(self._count_ended)
            self._kept[grammar] = future  # now the most recently used
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return CompilingGrammar(future, time.monotonic() + self.config.compile_timeout)

    @property
    def num_ended(self) -> int:
        """How many were compiled or failed."""
        return self._num_ended

    def wait(self, num_ended: int, deadline: float) -> None:
        """Wait until more than `num_ended` were compiled or failed, or until the deadline."""
        with self._one_has_ended:
            self._one_has_ended.wait_for(
                lambda: self._num_ended > num_ended, max(0.0, deadline - time.monotonic())
            )

    def _count_ended(self, _: Future) -> None:
        with self._one_has_ended:
            self._num_ended += 1
            self._one_has_ended.notify_all()

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        with self._tokens_lock:  # only one thread creates them
            tokens = self._tokens
        matcher = llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits(self.config))
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    @functools.cached_property
    def _tokens(self) -> llguidance.LLTokenizer:
        """Takes about a second for a large vocabulary, so the first grammar creates it, in the background."""
        return llguidance.hf.from_tokenizer(
            self._tokenizer,
            n_vocab=max(self.vocab_size, len(self._tokenizer)),
            eos_token=list(self.eos_token_ids),
        )
