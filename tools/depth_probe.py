"""How many of a target's layers a draft would need: a probe without any training.

A linear map takes (embedding of token i+1, final feature of position i) to the residual stream that layer
``L`` of the target reads at position i+1; the target's layers from ``L`` on then finish the job.  The share
of answer tokens found this way is what a head with that many live layers starts from.

    python tools/depth_probe.py --model TARGET --fit ROLLOUTS --measure ROLLOUTS [--first 29,27,22,15,2]

Both caches come from ``speccompile rollout``; --fit texts must be others than --measure texts.
"""

from __future__ import annotations

from pathlib import Path

import click
import torch
from torch import Tensor

from speccompile.checkpoint.target import open_target
from speccompile.model.llama import Llama
from speccompile.model.load import load_llama
from speccompile.train.cache import RolloutCache
from speccompile.train.features import causal_attend, run_target
from speccompile.train.fusion import eagle1_pairs, ridge_map

Text = tuple[Tensor, Tensor]


def texts(folder: Path, count: int) -> list[Text]:
    """Ids and answer masks of about ``count`` evenly spaced sequences."""
    cache = RolloutCache(folder, 0)
    return [cache.tokens(ref) for ref in cache.refs[:: max(1, len(cache.refs) // count)]]


def fit(target: Llama, layers: list[int], sample: list[Text]) -> dict[int, Tensor]:
    """Per layer, the ridge map [h, 2h] onto the stream it reads."""
    size = target.config.hidden_size
    found = [(ids, run_target(target, [ids], tuple(layers))[0]) for ids, _ in sample]
    pairs = eagle1_pairs(target.embed_tokens.weight, ((ids, f.hidden, f.aux) for ids, f in found))
    both, _ = ridge_map(pairs)
    return dict(zip(layers, both.split(size), strict=True))


@torch.no_grad()
def hits(target: Llama, layer: int, fc: Tensor, text: Text) -> Tensor:
    """Whether token i+2 is the best, and among the best three, for every answer token, bool [n, 2]."""
    ids, answer = text
    (found,) = run_target(target, [ids], ())
    pair = torch.cat((target.embed_tokens(ids[1:-1]).float(), found.hidden[:-2].float()), dim=1)
    x = (pair @ fc.T).to(found.hidden.dtype)[None]
    cos_sin = target.rotary(torch.arange(1, len(ids) - 1)[None])
    for block in target.layers[layer:]:
        x = block(x, cos_sin, causal_attend)
    top = target.lm_head(target.norm(x)[0][answer[2:]]).topk(3, dim=-1).indices
    match = top == ids[2:][answer[2:], None]
    return torch.stack((match[:, 0], match.any(1)), dim=1)


@click.command()
@click.option("--model", type=click.Path(path_type=Path), required=True)
@click.option("--fit", "fit_folder", type=click.Path(path_type=Path), required=True)
@click.option("--measure", type=click.Path(path_type=Path), required=True)
@click.option("--first", default="29,27,25,22,19,15,8,2", show_default=True, help="First live layers.")
@click.option("--fit-texts", default=120, show_default=True)
@click.option("--measure-texts", default=20, show_default=True)
def main(
    model: Path, fit_folder: Path, measure: Path, first: str, fit_texts: int, measure_texts: int
) -> None:
    """Share of the target's next tokens found by its last layers from a linear guess of their input."""
    opened = open_target(model)
    target = load_llama(opened.config, opened.tensor, torch.bfloat16)
    layers = sorted({int(layer) for layer in first.split(",")})
    maps = fit(target, layers, texts(fit_folder, fit_texts))
    measured = texts(measure, measure_texts)
    print("first live layer  live layers  best is right  among best three  tokens")
    for layer in reversed(layers):
        table = torch.cat([hits(target, layer, maps[layer], text) for text in measured]).float()
        best, three = table.mean(0).tolist()
        print(f"{layer:16}  {len(target.layers) - layer:11}  {best:13.3f}  {three:16.3f}  {len(table):6}")


if __name__ == "__main__":
    main()
