"""Loading a tokenizer, and incremental detokenization.

Knows transformers' and tokenizers' interfaces. Must not know requests, sequences or the engine.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpage.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # what decoders write for invalid or incomplete UTF-8
# Prompt tokens that may affect the text of the first output token, as in vLLM: so many, or more where they begin
# inside a character.
_CONTEXTS = range(4, 24)
_MAX_CHARACTER = 4  # bytes of a UTF-8 character, so also tokens
# Half of it is at least 3 bytes, enough to end any character that began before them.
_MAX_WINDOW = 8


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """The Hugging Face tokenizer in a local folder; runs no code from it. Raises ValueError."""
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():
        raise ValueError(f"tokenizer={folder!r} is not a folder; download the tokenizer first")
    advice = (
        "name another folder with tokenizer=, or set skip_tokenizer_init=True and give "
        "prompt_token_ids"
    )
    try:
        # Prompts that are too long are truncated on the left, as in vLLM.
        found = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, truncation_side="left"
        )
    except Exception as e:  # of many types, depending on which file is missing or broken
        raise ValueError(f"no tokenizer can be loaded from {folder}: {e}; {advice}") from e
    # For a folder without a vocabulary transformers makes a tokenizer without tokens.
    if not found("a b 1", add_special_tokens=False)["input_ids"]:
        raise ValueError(
            f"{folder} has no vocabulary: tokenizer.json (or tokenizer.model, or vocab.json) is "
            f"missing; {advice}"
        )
    return found


def load_chat_template(chat_template: str | os.PathLike[str] | None) -> str | None:
    """The template, given its text or a file name. Raises ValueError for neither."""
    if chat_template is None:
        return None
    if not isinstance(chat_template, str | os.PathLike):
        raise ValueError(f"chat_template must be a file or a template, got {chat_template!r}")
    if isinstance(chat_template, str) and ("{" in chat_template or "\n" in chat_template):
        return chat_template
    try:
        return Path(chat_template).read_text(encoding="utf-8")
    except OSError as e:
        raise ValueError(
            f"chat_template={chat_template!r} is neither a readable file nor a template: {e}"
        ) from None


def bad_words_token_ids(tokenizer: Any, bad_words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The token ids of each word at the start of a text and after a space, as vLLM tokenizes them.

    The second form counts only if the space is part of its first token. Raises ValueError for what is no text.
    """
    found: list[tuple[int, ...]] = []
    for word in bad_words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"bad_words has {word!r:.200} with a lone surrogate, which is no character; leave it out"
            ) from None
        plain, spaced = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False))
            for space in ("", " ")
        )
        found.append(plain)
        if len(spaced) == len(plain) and spaced[:1] != plain[:1]:
            found.append(spaced)
    return tuple(found)


class Detokenizer:
    """The text of one sequence, with detection of stop strings.

    The text equals the tokenizer's decoding of all ids at once, with the end of the prompt as context. It never ends
    inside a character, or in what may become a stop string.
    """

    def __init__(
        self, tokenizer: Any, params: SamplingParams, prompt_token_ids: Sequence[int] = ()
    ):
        self._decode = token_decoder(tokenizer, params, prompt_token_ids)
        self._tokenizer = tokenizer
        self._stop = list(params.stop or ())
        self._include_stop = params.include_stop_str_in_output
        self._num_held_back = max(map(len, self._stop), default=1) - 1
        if self._include_stop:
            self._num_held_back = 0
        self._text = ""
        self._done = False

    @property
    def text(self) -> str:
        """The text that is final: all of it after `flush`, a stop string or a stop token."""
        if self._done or not self._num_held_back:
            return self._text
        return self._text[: -self._num_held_back]

    def append(self, token_id: int, *, ends: bool, check_stop: bool) -> str | None:
        """Add a token. Returns the stop string that it completes, if any, which ends the text.

        `ends`: this is a stop token, whose text is left out unless `include_stop_str_in_output`. `check_stop`: False
        until there are `min_tokens` tokens.
        """
        assert not self._done, "the text has ended"
        new = "" if ends and not self._include_stop else self._decode.append(token_id)
        if ends:
            new += self._decode.flush()
            self._done = True
        self._text += new
        if not (new and check_stop and self._stop):
            return None
        found = find_stop(self._text, len(new), self._stop)
        if found is None:
            return None
        stop, end = found
        self._text = self._text[: end if self._include_stop else end - len(stop)]
        self._done = True
        return stop

    def flush(self) -> None:
        """The last token was added: release what was held back. Does nothing if the text has ended."""
        if not self._done:
            self._text += self._decode.flush()
            self._done = True

    def decode_token(self, token_id: int, before: Sequence[int] = ()) -> str:
        """The text of one token after `before`, for `Logprob.decoded_token`.

        As in vLLM, a token that ends inside a character has no text, and the token that completes the character has all
        of it.
        """
        text = _decode_one(self._tokenizer, token_id)
        return _completed(self._tokenizer, token_id, before) if text.endswith(REPLACEMENT) else text


@lru_cache(maxsize=65536)
def _decode_one(tokenizer: Any, token_id: int) -> str:
    return tokenizer.decode([token_id])


def _completed(tokenizer: Any, token_id: int, before: Sequence[int]) -> str:
    """The character that `token_id` completes after the tokens of `before`, else ""."""
    begun = []
    for earlier in reversed(before[-(_MAX_CHARACTER - 1) :]):
        if not _decode_one(tokenizer, earlier).endswith(REPLACEMENT):
            break
        begun.insert(0, earlier)
        text = tokenizer.decode([*begun, token_id])
        if not text.endswith(REPLACEMENT):
            return text
    return ""


def find_stop(text: str, num_new: int, stops: Sequence[str]) -> tuple[str, int] | None:
    """The stop string that ends first within the last `num_new` characters, and where it ends.

    If several end there, the first in the list.
    """
    best = None
    for stop in stops:
        # A match that ends in the new part starts at most len(stop) - 1 characters before it.
        at = text.find(stop, max(0, len(text) - num_new - len(stop) + 1))
        if at >= 0 and (best is None or at + len(stop) < best[1]):
            best = (stop, at + len(stop))
    return best


def token_decoder(
    tokenizer: Any, params: SamplingParams, prompt_token_ids: Sequence[int] = ()
) -> ByteDecoder | WindowDecoder:
    """The exact decoder for byte-level tokenizers, the general one for others."""
    from tokenizers import decoders

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and isinstance(backend.decoder, decoders.ByteLevel):
        return ByteDecoder(_token_bytes(tokenizer), skip_special=params.skip_special_tokens)
    return WindowDecoder(tokenizer, params, prompt_token_ids)


class ByteDecoder:
    """Text of byte-level tokens: tokens are bytes, and UTF-8 says where characters end."""

    def __init__(self, token_bytes: TokenBytes, *, skip_special: bool):
        self._token_bytes = token_bytes
        self._skipped = token_bytes.special if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def append(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._utf8.decode(self._token_bytes[token_id])

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class TokenBytes(dict[int, bytes]):
    """The bytes of each token of a byte-level tokenizer, computed at first use."""

    def __init__(self, tokenizer: Any):
        super().__init__()
        self._backend = tokenizer.backend_tokenizer
        self.special = _special_ids(tokenizer)

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        alphabet = _byte_alphabet()
        if token is None:  # a padding row of the embedding
            value = b""
        elif all(c in alphabet for c in token):
            value = bytes(alphabet[c] for c in token)
        else:  # an added token, which is its own text
            value = token.encode()
        self[token_id] = value
        return value


@lru_cache(maxsize=8)
def _token_bytes(tokenizer: Any) -> TokenBytes:
    return TokenBytes(tokenizer)


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes map to themselves, the others to U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


@lru_cache(maxsize=8)
def _special_ids(tokenizer: Any) -> frozenset[int]:
    return frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)


class WindowDecoder:
    """Text of any tokenizer's tokens, by decoding a short window at each token.

    The text of `ids[:read]` was returned already. These tokens stay in the window as context, since a token may decode
    differently at the start of a text. The text of the others is returned once it ends with a complete character.
    """

    def __init__(
        self, tokenizer: Any, params: SamplingParams, prompt_token_ids: Sequence[int] = ()
    ):
        self._tokenizer = tokenizer
        self._keywords = {
            "skip_special_tokens": params.skip_special_tokens,
            "clean_up_tokenization_spaces": False,
        }
        if not hasattr(tokenizer, "backend_tokenizer"):  # only slow tokenizers have this option
            keyword = "spaces_between_special_tokens"
            self._keywords[keyword] = params.spaces_between_special_tokens
        self._skipped = _special_ids(tokenizer) if params.skip_special_tokens else frozenset()
        self._ids = self._context(prompt_token_ids)
        self._read = len(self._ids)
        self._seen = self._text(self._ids)

    def _context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The end of the prompt; [] if it ends inside a character."""
        for length in _CONTEXTS:
            ids = [i for i in prompt_token_ids[-length:] if i not in self._skipped]
            if not self._text(ids).endswith(REPLACEMENT):
                return ids
        return []

    def append(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        text = self._text(self._ids)
        if not text.endswith(REPLACEMENT):
            return self._commit(len(self._ids), text)
        # Invalid bytes must not make the window grow without end. Cutting is safe if the parts decode like the whole,
        # with enough bytes after the cut to end any character.
        if len(self._ids) - self._read >= _MAX_WINDOW:
            middle = len(self._ids) - _MAX_WINDOW // 2
            head = self._text(self._ids[:middle])
            if head + self._text(self._ids[middle:]) == text:
                return self._commit(middle, head)
        return ""

    def flush(self) -> str:
        return self._commit(len(self._ids), self._text(self._ids))

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, **self._keywords) if ids else ""

    def _commit(self, end: int, text: str) -> str:
        """Move `ids[read:end]` to the context; `text` is that of `ids[:end]`."""
        if text.startswith(self._seen):
            new = text[len(self._seen) :]
        else:  # the new bytes changed the text of old ones, which was returned already
            new = self._text(self._ids[self._read : end])
        self._ids = self._ids[self._read :]
        self._read = end - self._read
        self._seen = self._text(self._ids[: self._read])
        return new
