"""The shape of the demo model: its config.json and its tensors, by their published names."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama-shaped decoder with a tied head."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    intermediate_size: int = 704
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return every tensor's shape by name: just these and no others are in the file."""
        hidden, mlp = self.hidden_size, self.intermediate_size
        q_width = self.num_attention_heads * self.head_dim
        kv_width = self.num_key_value_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        for layer in range(self.num_hidden_layers):
            name = f"model.layers.{layer}"
            shapes[f"{name}.input_layernorm.weight"] = (hidden,)
            shapes[f"{name}.self_attn.q_proj.weight"] = (q_width, hidden)
            shapes[f"{name}.self_attn.k_proj.weight"] = (kv_width, hidden)
            shapes[f"{name}.self_attn.v_proj.weight"] = (kv_width, hidden)
            shapes[f"{name}.self_attn.o_proj.weight"] = (hidden, q_width)
            shapes[f"{name}.post_attention_layernorm.weight"] = (hidden,)
            shapes[f"{name}.mlp.gate_proj.weight"] = (mlp, hidden)
            shapes[f"{name}.mlp.up_proj.weight"] = (mlp, hidden)
            shapes[f"{name}.mlp.down_proj.weight"] = (hidden, mlp)
        return shapes

    def config(self, boundary_id: int) -> dict[str, object]:
        """Return config.json; `boundary_id` both begins and ends a text."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **asdict(self),
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "rope_scaling": None,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "bos_token_id": boundary_id,
            "eos_token_id": boundary_id,
            "pretraining_tp": 1,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }
