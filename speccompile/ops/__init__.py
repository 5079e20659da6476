"""Our operators (namespace ``speccompile``): schema, reference and shape twin, one file each.

Importing this package registers them with PyTorch; the references run until a plugin
(:mod:`speccompile.build.plugin`) is loaded.
"""

from speccompile.ops.attention import tree_attention
from speccompile.ops.cache_append import kv_append
from speccompile.ops.cache_compact import kv_compact
from speccompile.ops.draft import draft_topk
from speccompile.ops.drawing import draw_tokens
from speccompile.ops.int8_linear import int8_linear
from speccompile.ops.noise import gumbel_noise
from speccompile.ops.walk import walk_tree

__all__ = [
    "draft_topk",
    "draw_tokens",
    "gumbel_noise",
    "int8_linear",
    "kv_append",
    "kv_compact",
    "tree_attention",
    "walk_tree",
]
