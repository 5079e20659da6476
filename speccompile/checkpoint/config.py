"""What a Llama target and an EAGLE head are, as frozen data.

These records are the only description of a model that the rest of the package sees: readers
(:mod:`speccompile.checkpoint`) fill them from Hugging Face, GGUF or EAGLE files, the model graph
(:mod:`speccompile.model`) is built from them, and the engine manifest stores them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

RopeKind = Literal["default", "linear", "llama3", "yarn"]
HeadKind = Literal["eagle1", "eagle3"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding (rotate-half form).

    ``kind`` selects the frequency law; the remaining fields are read only by the laws that use
    them (``factor``: linear, llama3, yarn; ``low/high_freq_factor``: llama3; ``beta_*``,
    ``attention_factor``: yarn).  Source of the laws: Hugging Face ``modeling_rope_utils``.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """A Llama 2 / 3.x target model.  Sizes are in elements, ids are vocabulary ids."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """An EAGLE draft head.

    ``aux_layers`` lists the target layers whose *input* residual stream feeds an EAGLE-3 head
    (SafeAILab numbering; every reader converts to it), in ascending order; it is empty for
    EAGLE-1 and for EAGLE-3 heads that take the target's post-norm hidden state.
    ``first_input_norm`` is an EAGLE-1 matter: its usual layout has no norm before the first attention, an
    EAGLE-3 head always does.  The flags from ``has_fc`` on record which optional tensors the file carries,
    because the presence of a tensor, not a config key, decides.
    """

    kind: HeadKind
    num_hidden_layers: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...] = ()
    has_fc: bool = True
    fc_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    first_input_norm: bool = False
    final_norm: bool = True
    norm_before_residual: bool = False
    norm_feedback: bool = False
    fc_norm: bool = False
    fc_input_norm: bool = False
    own_embedding: bool = False
    own_lm_head: bool = False

    @property
    def feature_size(self) -> int:
        """Width F of the target feature rows the head consumes."""
        return self.target_hidden_size * max(1, len(self.aux_layers))


def config_to_json(config: Any) -> dict[str, Any]:
    """Plain-JSON form of any of the records above (tuples become lists)."""
    return asdict(config)


def rope_from_json(data: dict[str, Any]) -> RopeConfig:
    return RopeConfig(**data)


def llama_from_json(data: dict[str, Any]) -> LlamaConfig:
    """Inverse of :func:`config_to_json` for a target; an unknown key raises TypeError."""
    return LlamaConfig(
        **{**data, "rope": rope_from_json(data["rope"]), "eos_token_ids": tuple(data["eos_token_ids"])}
    )


def head_from_json(data: dict[str, Any]) -> HeadConfig:
    """Inverse of :func:`config_to_json` for a head; an unknown key raises TypeError."""
    return HeadConfig(
        **{**data, "rope": rope_from_json(data["rope"]), "aux_layers": tuple(data["aux_layers"])}
    )
