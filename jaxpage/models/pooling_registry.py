"""The supported architectures with one output per text: how they are built, and the names of their tensors.

Every decoder of `registry` is also supported, under transformers' names of its other heads. Knows families; must not
know files or engines.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jaxpage.models import registry
from jaxpage.models.encoder import Encoder, encoder_config
from jaxpage.models.modernbert import ModernBert, modernbert_config
from jaxpage.models.pooling_model import (
    DecoderStates,
    Does,
    Head,
    LinearHead,
    NormedHead,
    PoolingModel,
    PoolingModelConfig,
    RewardHead,
    TanhHead,
)
from jaxpage.models.sources import Naming, renamed

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SUFFIXES: dict[str, Does] = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "token_classify",
    "ForProcessRewardModel": "token_classify",
    "ForRewardModel": "token_classify",
    "Model": "embed",
}
_REWARD_SUFFIXES = ("ForProcessRewardModel", "ForRewardModel")
_CAUSAL = "ForCausalLM"
_UNUSED = ("lm_head.", "score.")  # prefixes of heads that a decoder's checkpoint may have
# Decoders with another name than their generative form, and generative forms with another ending.
_DECODER_NAMES = {"Gemma3Text": "Gemma3"}
_GENERATIVE = {"GPT2": "GPT2LMHeadModel"}

_BERT_NAMES = {
    "embeddings.LayerNorm.": "embeddings.norm.",
    "encoder.layer.": "layers.",
    "attention.self.": "",
    "attention.output.dense.": "attention_output.",
    "attention.output.LayerNorm.": "attention_norm.",
    "intermediate.dense.": "up.",
    "output.dense.": "down.",
    "output.LayerNorm.": "output_norm.",
    # Checkpoints converted from TensorFlow.
    ".gamma": ".weight",
    ".beta": ".bias",
}
_MODERNBERT_NAMES = {
    "embeddings.tok_embeddings.": "tok_embeddings.",
    "embeddings.norm.": "embedding_norm.",
}


@dataclass(frozen=True)
class Architecture:
    """A parsed architecture name: "Bert" that does "embed"; `generates` if this is its generative form."""

    name: str
    family: str
    does: Does
    is_encoder: bool
    generates: bool = False
    is_reward: bool = False


def architecture(hf_config: PretrainedConfig) -> Architecture | None:
    """The architecture in config.json if it can pool, including generative models after conversion; else None."""
    name = (hf_config.architectures or [""])[0]
    for family in _decoders():
        if name == _generative(family):
            return Architecture(name, family, "embed", False, generates=True)
    for suffix, does in _SUFFIXES.items():
        if not name.endswith(suffix):
            continue
        family = name.removesuffix(suffix)
        if family in _ENCODERS:
            if suffix in _REWARD_SUFFIXES:
                return None
            return Architecture(name, family, does, True)
        family = _DECODER_NAMES.get(family, family)
        if _generative(family) in registry.REGISTRY:
            is_reward = suffix in _REWARD_SUFFIXES
            return Architecture(name, family, does, False, is_reward=is_reward)
        return None
    return None


def _generative(family: str) -> str:
    """The name of a decoder's generative form."""
    return _GENERATIVE.get(family, family + _CAUSAL)


def _decoders() -> list[str]:
    """All families of decoders."""
    names = {name: family for family, name in _GENERATIVE.items()}
    names |= {n: n.removesuffix(_CAUSAL) for n in registry.REGISTRY if n.endswith(_CAUSAL)}
    return [names[name] for name in registry.REGISTRY if name in names]


def supported() -> str:
    """The names, for error messages."""
    families = ", ".join([*_ENCODERS, *_decoders()])
    return (
        f"{families}, each as ...Model, ...ForSequenceClassification or ...ForTokenClassification"
    )


def build(
    hf_config: PretrainedConfig,
    found: Architecture,
    *,
    dtype: Any,
    max_model_len: int | None = None,
    with_head: bool = True,
) -> tuple[PoolingModel, Naming]:
    """The abstract model of a config, and where its parameters are in checkpoints. Raises ValueError.

    `with_head=False`: the head is set later, or there is none.
    """
    make = _ENCODERS.get(found.family) if found.is_encoder else _decoder
    assert make is not None
    return make(hf_config, found, dtype, max_model_len, with_head)


Builder = Callable[[Any, Architecture, Any, int | None, bool], tuple[PoolingModel, Naming]]


def _num_labels(hf: Any, found: Architecture, with_head: bool) -> int:
    if found.does == "embed" or not with_head:
        return 0
    if found.name.endswith("ForRewardModel"):
        return 1  # Qwen2's reward models; their config does not have it
    return hf.num_labels


def _bert(first_position: Callable[[Any], int], tensors_prefix: str, has_pooler: bool) -> Builder:
    """BERT: the classifier reads the encoder's pooler; RoBERTa: it has its own layer."""

    def build_bert(
        hf: Any, found: Architecture, dtype: Any, max_model_len: int | None, with_head: bool
    ) -> tuple[PoolingModel, Naming]:
        layers = encoder_config(hf, dtype=dtype, first_position=first_position(hf))
        num_labels = _num_labels(hf, found, with_head)
        config = PoolingModelConfig(
            architecture=found.name,
            does=found.does,
            pooling="CLS",
            vocab_size=layers.vocab_size,
            hidden_size=layers.hidden_size,
            dtype=layers.dtype,
            longest=layers.longest,
            num_labels=num_labels,
            is_causal=False,
            layers=repr(layers),
            initializer_range=layers.initializer_range,
        )
        head: Head | None = None
        heads = {}
        if num_labels and found.does == "classify":
            head = TanhHead(config)
            heads = {"classifier.dense.": "head.dense.", "classifier.out_proj.": "head.out."}
            if has_pooler:
                heads = {"pooler.dense.": "head.dense.", "classifier.": "head.out."}
        elif num_labels:
            head = LinearHead(config, bias=True)
            heads = {"classifier.": "head.out."}
        naming = _naming(tensors_prefix, _BERT_NAMES, heads, ("embeddings.position_ids",))
        return PoolingModel(config, Encoder(layers), head), naming

    return build_bert


def _modernbert(
    hf: Any, found: Architecture, dtype: Any, max_model_len: int | None, with_head: bool
) -> tuple[PoolingModel, Naming]:
    layers = modernbert_config(hf, dtype=dtype)
    num_labels = _num_labels(hf, found, with_head)
    is_mean = found.does == "classify" and hf.classifier_pooling == "mean"
    config = PoolingModelConfig(
        architecture=found.name,
        does=found.does,
        pooling="MEAN" if is_mean else "CLS",
        vocab_size=layers.vocab_size,
        hidden_size=layers.hidden_size,
        dtype=layers.dtype,
        longest=layers.longest,
        num_labels=num_labels,
        is_causal=False,
        layers=repr(layers),
        initializer_range=layers.initializer_range,
    )
    head = None
    if num_labels:
        head = NormedHead(
            config,
            activation=hf.classifier_activation,
            eps=hf.norm_eps,
            bias=hf.classifier_bias,
            norm_bias=hf.norm_bias,
        )
    heads = {"head.dense.": "head.dense.", "head.norm.": "head.norm.", "classifier.": "head.out."}
    naming = _naming("model.", _MODERNBERT_NAMES, heads if num_labels else {}, ())
    return PoolingModel(config, ModernBert(layers), head), naming


def _decoder(
    hf: Any, found: Architecture, dtype: Any, max_model_len: int | None, with_head: bool
) -> tuple[PoolingModel, Naming]:
    family = registry.REGISTRY[_generative(found.family)]
    is_causal = bool(getattr(hf, "is_causal", True))
    if getattr(hf, "use_bidirectional_attention", None):
        is_causal = False
        hf = copy.copy(hf)
        hf.use_bidirectional_attention = False  # here the batch defines the mask
    generating = replace(
        family.config_from_hf(hf, dtype=dtype, max_model_len=max_model_len),
        architecture=_generative(found.family),
    )
    if generating.recurrent is not None:
        raise ValueError(
            f"{found.name} is not supported for pooling: it has layers with a recurrent state, in which texts of a row "
            "would see each other"
        )
    num_labels = _num_labels(hf, found, with_head)
    config = PoolingModelConfig(
        architecture=found.name,
        does=found.does,
        pooling="LAST" if is_causal or found.does != "embed" else "MEAN",
        vocab_size=generating.vocab_size,
        hidden_size=generating.hidden_size,
        dtype=generating.dtype,
        longest=generating.max_model_len,
        num_labels=num_labels,
        is_causal=is_causal,
        layers=repr(generating),
        initializer_range=generating.initializer_range,
    )
    head: Head | None = None
    heads: dict[str, str] = {}
    if num_labels and found.is_reward:
        head, heads = RewardHead(config), {"score.0.": "head.dense.", "score.2.": "head.out."}
    elif num_labels:
        head = LinearHead(config, bias=found.does == "token_classify")
        heads = dict.fromkeys(("score.", "classifier."), "head.out.")
    layers = DecoderStates(family.module(generating).model, is_causal=is_causal)
    inside = "layers.decoder."

    def name(theirs: str) -> str | None:
        """Checkpoints of decoders without a language-model head may omit "model."."""
        for old, new in heads.items():
            if theirs.startswith(old):
                return new + theirs.removeprefix(old)
        known = family.tensor_name(theirs)
        if known is None or known.startswith(_UNUSED) or family.is_idle(generating, known):
            return None
        return inside + known.removeprefix("model.")

    def inner(name: str) -> str:
        return inside + name.removeprefix("model.")

    weight_map = {
        inner(path): renamed(place, inner) for path, place in family.weight_map(generating).items()
    }
    return PoolingModel(config, layers, head), Naming(tensor_name=name, weight_map=weight_map)


def _naming(
    prefix: str, names: dict[str, str], heads: dict[str, str], unused: tuple[str, ...]
) -> Naming:
    """The naming of an encoder whose tensors may have `prefix`; `heads`: prefixes of a head's tensors -> ours."""

    def name(theirs: str) -> str | None:
        known = theirs.removeprefix(prefix)
        for old, new in heads.items():
            if known.startswith(old):
                return new + known.removeprefix(old)
        if known in unused or not known.startswith(_ENCODER_PARTS):
            return None
        for old, new in names.items():
            known = known.replace(old, new)
        return f"layers.{known}"

    return Naming(tensor_name=name, weight_map={})


# Prefixes of an encoder's own tensors; all others belong to unused heads.
_ENCODER_PARTS = ("embeddings.", "encoder.", "layers.", "final_norm.")

_ENCODERS: dict[str, Builder] = {
    "Bert": _bert(lambda hf: 0, "bert.", True),
    "Roberta": _bert(lambda hf: hf.pad_token_id + 1, "roberta.", False),
    "XLMRoberta": _bert(lambda hf: hf.pad_token_id + 1, "roberta.", False),
    "ModernBert": _modernbert,
}
