"""Training batches with the target's features, wherever they come from.

A shard's stored features are read when they belong to this target and these aux layers; every other text is
run through the frozen target in the training loop (online distillation).  The graph is the runtime's own;
only attention is dense here.  Legend: B texts, T positions, h hidden size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from speccompile.checkpoint.config import config_to_json
from speccompile.checkpoint.head_aux import usual_aux_layers
from speccompile.model.layers import causal_attend
from speccompile.model.llama import Llama
from speccompile.train.batches import Batch
from speccompile.train.cache import CacheError, RolloutCache, SequenceRef
from speccompile.train.feature_cache import FeatureCache, TextFeatures, feature_key

_DIGEST_SAMPLE = 256


def target_digest(target: Llama) -> str:
    """SHA-256 (hex) of the config and of up to about 256 evenly spaced elements of every weight, as bfloat16.

    Cheap, and the same whether a bfloat16 checkpoint was loaded as bfloat16 or float32.
    """
    digest = hashlib.sha256(json.dumps(config_to_json(target.config), sort_keys=True).encode())
    for name, weight in sorted(target.named_parameters()):
        sample = weight.detach().flatten()[:: max(1, weight.numel() // _DIGEST_SAMPLE)]
        digest.update(name.encode() + sample.to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def run_target(target: Llama, texts: Sequence[Tensor], aux_layers: tuple[int, ...]) -> list[TextFeatures]:
    """Features of texts (ids i64 [n], lengths may differ), in one padded pass on the target's device.

    Texts are padded at the end, so no position of a text sees padding.
    """
    weight = target.embed_tokens.weight
    token_BT = pad_sequence([ids.to(weight.device) for ids in texts], batch_first=True)
    position = torch.arange(token_BT.shape[1], device=weight.device).expand_as(token_BT)
    hidden, aux = target(token_BT, position, causal_attend, aux_layers)
    aux = aux if aux_layers else aux[..., :0]
    return [TextFeatures(hidden[b, : len(ids)], aux[b, : len(ids)]) for b, ids in enumerate(texts)]


class FeatureSource:
    """Batches of a rollout cache for a head that reads ``aux_layers`` (none: the post-norm hidden state).

    ``feature_cache`` keeps computed features on disk; features stored in shards are never copied there.
    Runs on the target's device and gives float tensors of its dtype (on CUDA: written for it, not run).
    """

    def __init__(
        self,
        target: Llama,
        cache: RolloutCache,
        aux_layers: tuple[int, ...] = (),
        feature_cache: FeatureCache | None = None,
    ) -> None:
        self.target, self.cache, self.aux_layers, self.feature_cache = (
            target, cache, aux_layers, feature_cache,
        )  # fmt: skip
        self.digest = target_digest(target)

    def is_stored(self, ref: SequenceRef) -> bool:
        """Whether the shard holds the features of this target and of these aux layers.

        A shard that names no target is taken at its word; the trainer checks that the target agrees.
        """
        shard = self.cache.shard(ref)
        if "hidden" not in shard.widths or shard.target not in (None, self.digest):
            return False
        size = self.target.config.hidden_size
        if shard.widths["hidden"] != size:
            raise CacheError(
                f"{ref.shard}: wrong target: features are {shard.widths['hidden']} wide, its are {size}"
            )
        if not self.aux_layers:
            return True
        layers = shard.aux_layers
        if layers is None:
            layers = usual_aux_layers(self.target.config.num_hidden_layers)
        return layers == self.aux_layers and shard.widths.get("aux") == size * len(layers)

    def batch(
        self, refs: list[SequenceRef], max_length: int, supervise: Callable[[Tensor, Tensor], Tensor]
    ) -> Batch:
        """Padded sequences, cut to ``max_length`` features; ``supervise(ids, answer)`` gives the labels.

        Padding is never supervised.  Raises CacheError for ids or widths of another target.
        """
        length = [min(ref.features, max_length) for ref in refs]
        tokens = [self.cache.tokens(ref) for ref in refs]
        for ref, (ids, _) in zip(refs, tokens, strict=True):
            if int(ids.max()) >= self.target.config.vocab_size:
                raise CacheError(f"{ref.shard}: wrong target: id {int(ids.max())} is outside its vocabulary")
        features = self._features(refs, [ids[:n] for (ids, _), n in zip(tokens, length, strict=True)])
        labels = [supervise(ids, answer)[: n + 1] for (ids, answer), n in zip(tokens, length, strict=True)]
        device = self.target.embed_tokens.weight.device
        hidden = pad_sequence([f.hidden for f in features], batch_first=True)
        return Batch(
            token=pad_sequence(
                [ids[: n + 1] for (ids, _), n in zip(tokens, length, strict=True)], batch_first=True
            ).to(device),
            supervised=pad_sequence(labels, batch_first=True).to(device),
            hidden=hidden,
            feature=pad_sequence([f.aux for f in features], batch_first=True) if self.aux_layers else hidden,
            length=torch.tensor(length, device=device),
        )

    def _features(self, refs: list[SequenceRef], texts: list[Tensor]) -> list[TextFeatures]:
        weight = self.target.embed_tokens.weight
        found = [self._known(ref, ids) for ref, ids in zip(refs, texts, strict=True)]
        missing = [i for i, features in enumerate(found) if features is None]
        if missing:
            for i, new in zip(
                missing,
                run_target(self.target, [texts[i] for i in missing], self.aux_layers),
                strict=True,
            ):
                found[i] = new
                if self.feature_cache is not None:
                    self.feature_cache.put(self._key(texts[i]), new)
        return [TextFeatures(f.hidden.to(weight), f.aux.to(weight)) for f in found if f is not None]

    def _known(self, ref: SequenceRef, ids: Tensor) -> TextFeatures | None:
        """Features of ``ids`` from the shard or from the feature cache."""
        if self.is_stored(ref):
            hidden = self.cache.feature(ref, "hidden")[: len(ids)]
            aux = self.cache.feature(ref, "aux")[: len(ids)] if self.aux_layers else hidden[:, :0]
            return TextFeatures(hidden, aux)
        return self.feature_cache.get(self._key(ids)) if self.feature_cache is not None else None

    def _key(self, ids: Tensor) -> str:
        return feature_key(ids, self.digest, self.aux_layers, self.target.embed_tokens.weight.dtype)
