"""A tiny target and an EAGLE-1 head that often guesses it right, as folders on disk.

The target's embeddings outweigh its residual branches, so it is nearly a bigram model; the head passes
the embedding through.  They agree often but not always, which is what tests of losslessness need.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.builders import write_llama, write_tokenizer
from tests.checkpoint.head_builders import VOCAB, H, safeailab1

EMBEDDING_SCALE = 16.0


def write_agreeing_pair(folder: Path) -> tuple[Path, Path]:
    """Paths of target and head."""
    target, draft = folder / "target", folder / "draft"
    write_llama(target, hidden_size=H, vocab_size=VOCAB, bos_token_id=0, eos_token_id=1)
    write_tokenizer(target)
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"] *= EMBEDDING_SCALE
    weights["model.norm.weight"] = torch.ones(H)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})

    def agree(_config: dict, tensors: dict) -> None:
        for name, tensor in tensors.items():
            if name == "fc.weight":
                tensors[name] = torch.cat((torch.eye(H), torch.zeros(H, H)), dim=1).to(tensor.dtype)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensors[name] = torch.zeros_like(tensor)

    return target, safeailab1(draft, agree)
