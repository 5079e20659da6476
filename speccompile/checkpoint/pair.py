"""Whether a head belongs to a target: decided once, before anything is compiled.

Also decides, once for the whole engine, whether the head's own embedding is kept or the target's is shared.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer

from speccompile.checkpoint.heads import Head
from speccompile.checkpoint.target import EMBEDDING, Target
from speccompile.checkpoint.tokenizer_files import load_tokenizer
from speccompile.errors import PairError

_ROWS = 4096


def check_pair(target: Target, head: Head) -> Head:
    """Raises :class:`PairError` for a head of another target; returns the head to build with.

    That is the same head, sharing the target's embedding when its own copy is equal.
    """
    _compare("hidden size", target, target.config.hidden_size, head, head.config.target_hidden_size)
    _compare("vocabulary size", target, target.config.vocab_size, head, head.config.vocab_size)
    _check_layers(target, head)
    _check_tokenizer(target, head)
    return head.sharing_embedding() if _same_embedding(target, head) else head


def _compare(what: str, target: Target, has: int, head: Head, expects: int) -> None:
    if has != expects:
        raise PairError(
            f"{head.path}: this head belongs to another target: it expects {what} {expects}, but "
            f"{target.path} has {has}"
        )


def _check_layers(target: Target, head: Head) -> None:
    layers, count = head.config.aux_layers, target.config.num_hidden_layers
    if layers and layers[-1] >= count:
        raise PairError(
            f"{head.path}: this head reads the input of target layer {layers[-1]} (aux layers {list(layers)}"
            f"), but {target.path} has {count} layers, 0 to {count - 1}"
        )


def _check_tokenizer(target: Target, head: Head) -> None:
    """A head folder may carry the tokenizer it was trained with; its ids must be the target's.

    Tokens that only one side added (a pad token, say) are no difference.
    """
    folder = head.path if head.path.is_dir() else head.path.parent
    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    tokenizers = load_tokenizer(path), Tokenizer.from_str(target.tokenizer.tokenizer_json)
    own, other = (t.get_vocab(with_added_tokens=True) for t in tokenizers)
    base_own, base_other = (t.get_vocab(with_added_tokens=False) for t in tokenizers)
    compared = base_own.keys() | base_other.keys() | (own.keys() & other.keys())
    differing = sorted(t for t in compared if own.get(t) != other.get(t))
    if differing:
        token = differing[0]
        raise PairError(
            f"{path}: this head was trained with another tokenizer: {len(own)} tokens, {target.path} has "
            f"{len(other)}; {len(differing)} differ, first {token!r} (id {own.get(token)} "
            f"and {other.get(token)})"
        )


def _same_embedding(target: Target, head: Head) -> bool:
    """Compared in the target's dtype, all rows, in blocks so that no second copy is made."""
    if not head.config.own_embedding or head.config.hidden_size != target.config.hidden_size:
        return False
    own, other = head.tensor("embed_tokens.weight"), target.tensor(EMBEDDING)
    blocks = zip(own.split(_ROWS), other.split(_ROWS), strict=True)
    return all(torch.equal(mine.to(theirs.dtype), theirs) for mine, theirs in blocks)
