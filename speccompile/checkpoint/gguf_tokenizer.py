"""Rebuilds ``tokenizer.json`` from the vocabulary inside a GGUF file.

Two models exist in Llama files: ``gpt2`` (byte-level BPE; the split before BPE is named by
``tokenizer.ggml.pre``) and ``llama`` (SentencePiece BPE with byte fallback, merges implied by the scores).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from speccompile.checkpoint.config import LlamaConfig
from speccompile.checkpoint.gguf_file import CONTROL_TOKEN, GgufFile
from speccompile.checkpoint.tokenizer_files import TokenizerFiles
from speccompile.errors import CheckpointError

_USER_DEFINED_TOKEN = 4

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The regular expressions that each value of tokenizer.ggml.pre stands for, applied one after the other.
_SPLITS: dict[str, tuple[str, ...]] = {
    "smollm": (r"\p{N}", _GPT2_SPLIT),
    "gpt-2": (_GPT2_SPLIT,),
    "llama-bpe": (_LLAMA3_SPLIT,),
    "llama3": (_LLAMA3_SPLIT,),
    "llama-v3": (_LLAMA3_SPLIT,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")


def gguf_tokenizer_files(file: GgufFile, config: LlamaConfig) -> TokenizerFiles:
    """The tokenizer of a GGUF file; an unknown model or pre-tokenizer is refused by name."""
    builders: dict[str, Callable[[GgufFile], Tokenizer]] = {
        "gpt2": _byte_level_bpe,
        "llama": _sentencepiece_bpe,
    }
    model = file.require("tokenizer.ggml.model")
    if model not in builders:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.model {model!r} is not supported; gpt2 and llama are"
        )
    tokenizer = builders[model](file)
    tokens = file.require("tokenizer.ggml.tokens")
    _add_special_tokens(tokenizer, file, tokens)
    named = _named_tokens(file, tokens)
    add_bos = _adds_bos(file) and "bos_token" in named
    if add_bos:
        bos = named["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0",
            pair=f"{bos}:0 $A:0 {bos}:1 $B:1",
            special_tokens=[(bos, config.bos_token_id)],
        )
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str(),
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            **named,
            "add_bos_token": add_bos,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_position_embeddings,
        },
        chat_template=file.get("tokenizer.chat_template"),
        bos_token_id=config.bos_token_id,
        eos_token_ids=config.eos_token_ids,
    )


def _adds_bos(file: GgufFile) -> bool:
    """The stored flag; without it SentencePiece and Llama 3 models add BOS, other BPE models do not."""
    implied = file.get("tokenizer.ggml.model") == "llama" or file.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    return bool(file.get("tokenizer.ggml.add_bos_token", implied))


def _byte_level_bpe(file: GgufFile) -> Tokenizer:
    pre = file.get("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.pre {pre!r} is not supported; one of {', '.join(_SPLITS)} is"
        )
    tokens = file.require("tokenizer.ggml.tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [_merge_pair(file, vocab, m) for m in file.require("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3_NAMES))
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merge_pair(file: GgufFile, vocab: dict[str, int], merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if left not in vocab or right not in vocab or left + right not in vocab:
        raise CheckpointError(f"{file.path}: tokenizer.ggml.merges holds {merge!r}, not two known pieces")
    return left, right


def _sentencepiece_bpe(file: GgufFile) -> Tokenizer:
    tokens = file.require("tokenizer.ggml.tokens")
    scores = file.require("tokenizer.ggml.scores")
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = tokens[file.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(vocab, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space_prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if space_prefix else spaces
    )
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every split of every piece into two known pieces, ordered by the score of the whole, best first."""
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, index in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                merges.append((-scores[index], vocab[left], vocab[right], left, right))
    merges.sort(key=lambda m: m[:3])
    return [(left, right) for *_, left, right in merges]


def _add_special_tokens(tokenizer: Tokenizer, file: GgufFile, tokens: list[str]) -> None:
    types = file.require("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.token_type does not have one entry per token")
    control = [
        AddedToken(t, special=True) for t, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN
    ]
    user = [
        AddedToken(t, normalized=False)
        for t, kind in zip(tokens, types, strict=True)
        if kind == _USER_DEFINED_TOKEN
    ]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(user)


def _named_tokens(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {hf: file.get(f"tokenizer.ggml.{gguf}_token_id") for gguf, hf in names.items()}
    return {f"{hf}_token": tokens[i] for hf, i in ids.items() if i is not None}
