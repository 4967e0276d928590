"""What a Llama is and which ONNX dialect it is written in."""

from __future__ import annotations

import dataclasses
import enum

from paged_trt.plugins.errors import ConfigError


class Dialect(enum.Enum):
    """How a producer of ONNX spells attention, rotary embedding and normalisation."""

    ATTENTION23_PAST = "attention23-past"
    """Opset 23; `Attention` takes the past and gives the present; RoPE by tables."""
    ATTENTION23_CONCAT = "attention23-concat"
    """Opset 23 as `torch.onnx.export` writes it: `Concat(past, new)` and repeated KV heads."""
    ATTENTION24_CONCAT = "attention24-concat"
    """Opset 24 likewise, with RMSNorm and RoPE left in primitives."""
    GQA = "gqa"
    """`com.microsoft::GroupQueryAttention` of packed QKV that rotates by itself."""
    GQA_SPLIT = "gqa-split"
    """The same of separate q, k and v that are rotated before it."""

    @property
    def opset(self) -> int:
        """Version of the standard operators."""
        return {Dialect.ATTENTION24_CONCAT: 24, Dialect.GQA: 22, Dialect.GQA_SPLIT: 22}.get(
            self, 23
        )

    @property
    def ir_version(self) -> int:
        """Version of the file format that came with `opset`."""
        return {22: 10, 23: 11, 24: 12}[self.opset]

    @property
    def is_gqa(self) -> bool:
        """Whether attention is `com.microsoft::GroupQueryAttention`."""
        return self in {Dialect.GQA, Dialect.GQA_SPLIT}

    @property
    def has_position_ids(self) -> bool:
        """Whether the graph has the input `position_ids`."""
        return self is not Dialect.GQA


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Shape of a Llama-family decoder.

    Attributes:
        window: tokens that a query sees, itself included; None is all of them.
        softcap: bound of the attention scores, `softcap * tanh(score / softcap)`; None is none.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    bos_token_id: int
    eos_token_id: int
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5
    tie_embeddings: bool = False
    window: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        for field in ("hidden_size", "intermediate_size", "num_layers", "vocab_size"):
            if getattr(self, field) < 1:
                raise ConfigError(f"`{field}` is {getattr(self, field)}; pass at least 1")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"`num_heads` {self.num_heads} is not a multiple of `num_kv_heads` "
                f"{self.num_kv_heads}; pass a multiple"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ConfigError(
                f"`head_dim` {self.head_dim} is odd; pass an even number, because rotary "
                "embedding rotates pairs"
            )
        if self.window is not None and self.window < 1:
            raise ConfigError(f"`window` is {self.window}; pass at least 1, or None for no window")

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names (those of Hugging Face) and shapes `[out, in]` of all weights, in file order."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden)
        }
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}"
            shapes |= {
                f"{prefix}.input_layernorm.weight": (hidden,),
                f"{prefix}.self_attn.q_proj.weight": (query, hidden),
                f"{prefix}.self_attn.k_proj.weight": (key, hidden),
                f"{prefix}.self_attn.v_proj.weight": (key, hidden),
                f"{prefix}.self_attn.o_proj.weight": (hidden, query),
                f"{prefix}.post_attention_layernorm.weight": (hidden,),
                f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
                f"{prefix}.mlp.up_proj.weight": (inner, hidden),
                f"{prefix}.mlp.down_proj.weight": (hidden, inner),
            }
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def hugging_face(self) -> dict[str, object]:
        """Content of the `config.json` of a Hugging Face folder."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_positions,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_epsilon,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_embeddings,
            "sliding_window": self.window,
            "attn_logit_softcapping": self.softcap,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
        }
