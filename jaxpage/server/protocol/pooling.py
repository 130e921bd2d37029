"""Bodies of `/v1/embeddings`, `/classify`, `/score`, `/rerank` and `/pooling`: vLLM's fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from jaxpage.pooling.inputs import PoolingInputs
from jaxpage.pooling.params import PoolingParams
from jaxpage.server.protocol.lists import ListOf
from jaxpage.server.protocol.sampling import OpenModel, RequestId

POOLING_PATHS = (
    "/v1/embeddings", "/classify", "/pooling", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
)  # fmt: skip

# A text, its ids, or several of either.
Input = str | ListOf[int] | ListOf[str] | ListOf[ListOf[int]]


class PoolingFields(OpenModel):
    """Common fields."""

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)  # nothing is cached
    request_id: RequestId | None = None
    priority: int = 0
    use_activation: bool | None = None

    def params(self, **more: Any) -> PoolingParams:
        """Raises ValueError."""
        return PoolingParams(use_activation=self.use_activation, **more)

    def tokenization(self) -> dict[str, Any]:
        """`tokenization_kwargs`."""
        return {
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
            "truncation_side": self.truncation_side,
        }


class InputFields(PoolingFields):
    """For independent texts: `input`, or one conversation as `messages`."""

    input: Input | None = None
    messages: Annotated[ListOf[dict[str, Any]], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    def prompts(self) -> list[Any]:
        """The texts or ids, not the conversation. Raises ValueError."""
        if (self.input is None) == (self.messages is None):
            raise ValueError("input or messages must be given, and not both")
        given = self.input
        if given is None:
            return []
        if given == []:
            raise ValueError("input must not be empty")
        is_one = isinstance(given, str) or isinstance(given[0], int)
        return [given] if is_one else list(given)

    def tokenization(self) -> dict[str, Any]:
        """`tokenization_kwargs`."""
        return {"add_special_tokens": self.add_special_tokens, **super().tokenization()}


class EmbeddingRequest(InputFields):
    """OpenAI's request for embeddings."""

    encoding_format: Literal["float", "base64"] = "float"
    # How numbers become bytes for base64; without effect on "float", as in vLLM.
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] = "float32"
    endianness: Literal["native", "big", "little"] = "native"
    dimensions: int | None = Field(None, ge=1)
    normalize: bool | None = None  # old name of use_activation
    prompt_name: str | None = None  # one of the model's sentence-transformers prompts

    def params(self, **more: Any) -> PoolingParams:
        """Raises ValueError."""
        found = super().params(dimensions=self.dimensions, **more)
        if found.use_activation is None:
            found.use_activation = self.normalize
        return found


class ClassifyRequest(InputFields):
    """Classification of texts."""


class PoolingRequest(EmbeddingRequest):
    """The model's outputs as numbers."""

    task: str | None = None


class PairFields(PoolingFields):
    """For pairs of texts."""

    max_tokens_per_query: int | None = Field(None, ge=0)  # longer texts lose their end; 0: no limit
    max_tokens_per_doc: int | None = Field(None, ge=0)

    def cut(self, inputs: PoolingInputs, queries: Any, documents: Any) -> tuple[Any, Any]:
        """Both without what is too long. Raises ValueError."""
        most = inputs.limits.max_model_len
        for name in ("max_tokens_per_query", "max_tokens_per_doc"):
            limit = getattr(self, name) or 0
            if limit >= most:
                raise ValueError(f"{name}={limit} must be less than max_model_len={most}")
        return (
            inputs.cut(queries, self.max_tokens_per_query or 0),
            inputs.cut(documents, self.max_tokens_per_doc or 0),
        )


class ScoreRequest(PairFields):
    """Scores of pairs of texts, under one of three pairs of names."""

    queries: Any = None
    documents: Any = None
    data_1: Any = None
    data_2: Any = None
    text_1: Any = None
    text_2: Any = None

    def pair(self) -> tuple[Any, Any]:
        """Raises ValueError."""
        names = (("queries", "documents"), ("data_1", "data_2"), ("text_1", "text_2"))
        given = [pair for pair in names if any(getattr(self, name) is not None for name in pair)]
        if len(given) != 1 or any(getattr(self, name) is None for name in given[0]):
            known = ", or ".join(" and ".join(pair) for pair in names)
            raise ValueError(f"a score needs two texts, or lists of them: {known}")
        first, second = given[0]
        return getattr(self, first), getattr(self, second)


class Document(BaseModel):
    """A text to rank."""

    text: str


class RerankRequest(PairFields):
    """Documents ranked by their relevance to a query, as in Cohere's and Jina's APIs."""

    query: str
    documents: str | ListOf[str | Document] = Field(min_length=1)
    top_n: int = Field(0, ge=0)  # 0: all

    def texts(self) -> list[str]:
        if isinstance(self.documents, str):
            return [self.documents]
        return [d if isinstance(d, str) else d.text for d in self.documents]
