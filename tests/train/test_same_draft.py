"""Training loss on a text is what the runtime computes on it: unrolled logits against the paged programs."""

import dataclasses

import pytest
import torch

from speccompile.model.programs import DraftExtend, DraftStep
from speccompile.train.features import FeatureSource
from speccompile.train.initial import empty_head, fill_layers, new_head_config
from speccompile.train.unroll import unroll
from tests.train.tiny import tiny_cache, tiny_config, tiny_target

BLOCKS, BLOCK_SIZE, STEPS = 12, 8, 3

IDS = torch.tensor(sorted({0, 2, 3, *range(7, 96, 2)}))


def live_head(target, kind, layers, norm_feedback=None, aux_layers="0,1,2", layer_norms="no"):
    torch.manual_seed(3)
    aux_layers = aux_layers if kind == "eagle3" else ""
    config = tiny_config(kind=kind, layers=layers, aux_layers=aux_layers, layer_norms=layer_norms)
    shape = new_head_config(config, target, len(IDS))
    if norm_feedback is not None:
        shape = dataclasses.replace(shape, norm_feedback=norm_feedback)
    head = empty_head(shape, target, IDS)
    fill_layers(head, target, config, 0, None)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.requires_grad and name != "lm_head.weight":
                parameter.normal_(std=0.2).add_(1.0 if "norm" in name else 0.0)
    return head


def keeping_logits(program, head, kept):
    """The program with its candidate choice replaced by a note of the logits and one dummy candidate."""
    made = program(head, IDS, 1)

    def candidates(scored, *_):
        kept.append(head.lm_head(scored).float())
        return torch.zeros(len(scored), 1, dtype=torch.int64)

    made.candidates = candidates
    return made


@torch.no_grad()
def runtime_logits(head, token, feature, column):
    """One request: the true pairs up to ``column``, then the tokens of the text as a chain of drafts."""
    c, kept = head.config, []
    caches = [
        [torch.zeros(BLOCKS, c.num_key_value_heads, *size) for _ in head.layers]
        for size in ((c.head_dim, BLOCK_SIZE), (BLOCK_SIZE, c.head_dim))
    ]
    table = torch.randperm(BLOCKS).to(torch.int32)[None]

    def layout(start, rows, prefix, suffix):
        mask = torch.tensor([[(2 << (suffix + i)) - 1] for i in range(rows)])
        cu_rows = torch.tensor([0, rows], dtype=torch.int32)
        lengths = (torch.tensor([n], dtype=torch.int32) for n in (prefix, suffix))
        return (torch.arange(start, start + rows), mask, cu_rows, *lengths, table)

    zero, one = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    pairs = column + 1
    extend, step = (keeping_logits(p, head, kept) for p in (DraftExtend, DraftStep))
    position, *rest = layout(0, pairs, 0, 0)
    hidden, _ = extend(
        token[1 : pairs + 1], position, *rest, feature, torch.arange(pairs), zero + column, one, zero, *caches
    )
    for s in range(1, STEPS):
        topk = token[column + 1 + s].view(1, 1)
        hidden, _ = step(*layout(column + s, 1, pairs, s - 1), hidden, topk, zero, zero, one, zero, *caches)
    return torch.cat(kept)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("kind", ["eagle1", "eagle1-layer-norms", "eagle3", "eagle3-norm-feedback"])
def test_unrolled_logits_equal_the_runtime_programs(kind, layers, tmp_path):
    target = tiny_target()
    cache = tiny_cache(tmp_path, target)
    variants = {"layer-norms": {"layer_norms": "yes"}, "norm-feedback": {"norm_feedback": True}, "": {}}
    head = live_head(target, kind[:6], layers, **variants[kind[7:]])
    refs = sorted(cache.refs, key=lambda r: r.features)[-2:]
    source = FeatureSource(target, cache, head.config.aux_layers)
    batch = source.batch(refs, 64, lambda _ids, answer: answer)
    with torch.no_grad():
        steps = unroll(head, batch.token, batch.feature, STEPS)
        logits = torch.stack([head.lm_head(scored) for _, scored in steps], dim=2)
    for b, length in enumerate(batch.length.tolist()):
        for column in (0, length // 2, length - STEPS):
            expected = runtime_logits(head, batch.token[b], batch.feature[b], column)
            torch.testing.assert_close(logits[b, column], expected, rtol=1e-3, atol=1e-3)
