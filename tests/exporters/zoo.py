"""Tiny models with random weights, of the families that people export.

Sizes are unlike each other, so that a transposed or swapped one shows. Weights are large enough
for logits that tell tokens apart: a model whose logits are all alike agrees with anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

VOCAB: Final = 500
"""The size of nothing else: onnxruntime-genai's builder finds the LM head by it."""
MAX_POSITIONS: Final = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One family.

    Attributes:
        config: class of the configuration in transformers.
        settings: its arguments, on top of `SIZES`.
        implementation: attention implementation to export with.
    """

    config: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    implementation: str = "sdpa"


SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.08,
}
_GEMMA: Final = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 100,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_activation": "gelu_pytorch_tanh",
}
_GPT2: Final = {
    "n_embd": 256,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": MAX_POSITIONS,
    "num_key_value_heads": 4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
FAMILIES: Final[dict[str, Family]] = {
    "llama": Family(config="LlamaConfig"),
    "llama-eager": Family(config="LlamaConfig", implementation="eager"),
    "qwen2": Family(config="Qwen2Config"),
    "qwen3": Family(config="Qwen3Config", settings={"head_dim": 64}),
    "mistral": Family(config="MistralConfig", settings={"sliding_window": 100}),
    "gemma2": Family(
        config="Gemma2Config",
        settings={**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 30.0},
        # transformers offers this one no other implementation that can be exported.
        implementation="eager",
    ),
    "gemma3": Family(config="Gemma3TextConfig", settings=_GEMMA),
    "phi3": Family(
        config="Phi3Config", settings={"original_max_position_embeddings": MAX_POSITIONS}
    ),
    "gpt2": Family(config="GPT2Config", settings=_GPT2),
    "opt": Family(
        config="OPTConfig",
        settings={"ffn_dim": 384, "word_embed_proj_dim": 256, "num_key_value_heads": 4},
    ),
    "falcon-alibi": Family(
        config="FalconConfig",
        settings={
            "alibi": True,
            "new_decoder_architecture": False,
            "multi_query": False,
            "num_kv_heads": 4,
            "num_key_value_heads": 4,
            "ffn_hidden_size": 384,
        },
    ),
    "bloom": Family(
        config="BloomConfig",
        settings={"n_layer": 2, "n_head": 4, "num_key_value_heads": 4},
        implementation="eager",
    ),
}


def make_model(family: str, *, dtype: str) -> Any:
    """The model in evaluation mode, the same weights at each call.

    Args:
        family: a key of FAMILIES.
        dtype: `float16`, `bfloat16` or `float32`.
    """
    import torch
    import transformers

    found = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, found.config)(**{**SIZES, **found.settings})
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=found.implementation, dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                # Norm weights and biases as training leaves them: neither all one nor all zero.
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif "embed_tokens" in name or "wte" in name or "word_embeddings" in name:
                parameter.mul_(4)
    if dtype == "float32":
        # Weights that float16 holds: then only the arithmetic of an engine differs.
        model = model.half()
    return model.to(getattr(torch, dtype)).eval()
