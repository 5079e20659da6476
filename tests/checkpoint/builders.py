"""Tiny random checkpoints, written by transformers, tokenizers and gguf themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role') }}"
    "{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog 1234",
    "hello there, it's 10 of them and a few others besides",
    "where the wild thyme blows, quite over-canopied with luscious woodbine",
]
SPECIAL = ["<s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def random_llama(*, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> LlamaForCausalLM:
    """A model whose every parameter, norms and biases included, is random."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **overrides}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.to(dtype).eval()


def write_llama(
    folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, shard: str = "1GB", **overrides: Any
) -> LlamaForCausalLM:
    """Saves a random model as transformers does; ``shard`` is ``max_shard_size``, the rest is config."""
    model = random_llama(seed=seed, dtype=dtype, **overrides)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def edit_json(path: Path, **changes: Any) -> None:
    """Sets keys of a JSON file; a value of None removes the key."""
    data = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))


def train_bpe() -> Tokenizer:
    """A byte-level BPE of 320 ids trained on a few lines; ids 0.. are :data:`SPECIAL`."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[AddedToken(t, special=True) for t in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS * 4, trainer)
    assert core.get_vocab_size() == 320
    return core


def write_tokenizer(folder: Path, core: Tokenizer | None = None, **config: Any) -> PreTrainedTokenizerFast:
    """Saves a tokenizer with a chat template (``chat_template.jinja``) as transformers 5 does."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core or train_bpe(), bos_token="<s>", eos_token="<|end|>", **config
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return fast
