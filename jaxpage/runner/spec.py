"""Static parameters shared by all programs of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from jax.typing import DTypeLike

from jaxpage.kv_groups import KVGroups
from jaxpage.models.recurrent_config import RecurrentLayers
from jaxpage.pictures.border import VisionConfig
from jaxpage.research_config import ResearchSpec
from jaxpage.sampling.fields import Processors


@dataclass(frozen=True, kw_only=True)
class PictureSpec:
    """How pictures are encoded on the device, and the size of the picture cache."""

    vision: VisionConfig
    sizes: tuple[int, ...]  # padded numbers of patches, ascending
    num_rows: int  # of the cache, including the null row
    has_positions: bool  # tokens have three rotary positions, which differ from their index

    def size_for(self, num_patches: int) -> int:
        """The smallest size that holds `num_patches`. Raises ValueError if none does."""
        size = next((size for size in self.sizes if size >= num_patches), None)
        if size is None:
            raise ValueError(
                f"a picture has {num_patches} patches, the largest encoder takes {self.sizes[-1]}"
            )
        return size


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """Shapes and static choices of an engine's programs."""

    block_size: int
    max_model_len: int
    num_blocks_per_row: int  # M
    groups: KVGroups  # G
    num_slots: int  # Q, including the null slot
    vocab_size: int  # V
    hidden_size: int  # E
    dtype: DTypeLike  # of hidden states
    decode_steps: int  # most decode steps in one launch
    num_drafts: int = 0  # most drafts of a row in a step
    has_draft_model: bool = False  # which makes them; otherwise the host does
    feature_size: int = 0  # of the features that an EAGLE head reads; 0: there is no head
    num_top_logprobs: int  # W
    logprobs_mode: str
    num_scored: int  # prompt tokens that are scored at a time
    prompt_embeds: bool = False  # `forward` takes embeddings in place of tokens
    processors: Processors = ()  # the user's logits processors
    pictures: PictureSpec | None = None  # for models that take pictures
    recurrent: RecurrentLayers | None = None  # for models with layers that have a recurrent state
    # Whose kernel changes them for rows of one token, "tpu" or "gpu"; None: XLA does, see `ops.state_kernel`.
    state_kernel: str | None = None
    num_cached_states: int = 0  # recurrent states in the prefix cache
    num_adapters: int = 0  # adapter slots of the model
    # (layers with experts, experts per layer), if tokens are counted by expert
    expert_load: tuple[int, int] | None = None
    research: ResearchSpec | None = None  # what requests may capture and change inside the model
    strict: bool = False  # results do not depend on the batch, bit for bit; see `runner.strict`

    @property
    def cached_state_slots(self) -> range:
        """Slots of recurrent states in the prefix cache."""
        return range(self.num_slots, self.num_slots + self.num_cached_states)

    @property
    def prompt_logprobs_mode(self) -> str:
        """The mode of prompt tokens: nothing samples them, so they have neither a temperature nor processed logits."""
        return "raw_logits" if self.logprobs_mode.endswith("logits") else "raw"
