// Binds the CPU kernels to the operators that speccompile/ops defines: checks, pointers, dispatch on dtype.
// Uses torch's stable C ABI: light to compile, and threads come from torch's own pool.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "attention.h"
#include "int8_linear.h"
#include "sampling.h"
#include "walk.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

struct TorchPool {
  int threads() const { return int(torch::stable::get_num_threads()); }
  template <class F>
  void run(int threads, const F& f) const {
    torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) { f(); });
  }
};

template <class T>
const T* pointer(const Tensor& x, ScalarType dtype, int64_t numel, const char* name) {
  STD_TORCH_CHECK(x.scalar_type() == dtype && x.is_contiguous() && x.numel() == numel, "speccompile: ", name,
                  " must be contiguous, of the schema's dtype, with ", numel, " elements");
  return static_cast<const T*>(x.const_data_ptr());
}

const int64_t* i64(const Tensor& x, int64_t numel, const char* name) {
  return pointer<int64_t>(x, ScalarType::Long, numel, name);
}
const int32_t* i32(const Tensor& x, int64_t numel, const char* name) {
  return pointer<int32_t>(x, ScalarType::Int, numel, name);
}
const float* f32(const Tensor& x, int64_t numel, const char* name) {
  return pointer<float>(x, ScalarType::Float, numel, name);
}

// Copies only if the rows themselves are not dense; a strided view of a fused projection is taken as it is.
Tensor dense_rows(const Tensor& x) { return x.stride(x.dim() - 1) == 1 ? x : torch::stable::contiguous(x); }

speccompile::Layout layout_of(const Tensor& cu_rows, const Tensor& prefix_len, const Tensor* suffix_start,
                              const Tensor& block_table) {
  const int64_t requests = prefix_len.numel(), width = block_table.size(1);
  return {requests,
          width,
          i32(cu_rows, requests + 1, "cu_rows"),
          i32(prefix_len, requests, "prefix_len"),
          suffix_start ? i32(*suffix_start, requests, "suffix_start") : nullptr,
          i32(block_table, requests * width, "block_table")};
}

void check_slots(const speccompile::Layout& l, int64_t rows, int64_t block_size) {
  STD_TORCH_CHECK(l.cu_rows[l.requests] <= rows, "speccompile: cu_rows counts more rows than the call has");
  for (int64_t r = 0; r < l.requests; ++r) {
    const int64_t slots = int64_t(l.prefix_len[r]) + l.suffix_start[r] + l.cu_rows[r + 1] - l.cu_rows[r];
    STD_TORCH_CHECK(slots <= l.table_width * block_size, "speccompile: request ", r, " needs ", slots,
                    " KV slots, its block table has ", l.table_width * block_size);
  }
}

// Guards what an append writes against a block table that points outside the cache.
void check_written_blocks(const speccompile::Layout& l, int64_t blocks, int64_t block_size) {
  for (int64_t r = 0; r < l.requests; ++r) {
    const int64_t first = int64_t(l.prefix_len[r]) + l.suffix_start[r], stop = first + l.cu_rows[r + 1] - l.cu_rows[r];
    for (int64_t b = first / block_size; b * block_size < stop; ++b)
      STD_TORCH_CHECK(0 <= l.table(r)[b] && l.table(r)[b] < blocks, "speccompile: request ", r,
                      " has block id ", l.table(r)[b], ", the KV cache has ", blocks, " blocks");
  }
}

speccompile::CacheShape shape_of(const Tensor& k_cache, const Tensor& v_cache) {
  const speccompile::CacheShape shape{k_cache.size(1), k_cache.size(2), k_cache.size(3)};
  STD_TORCH_CHECK(k_cache.is_contiguous() && v_cache.is_contiguous() && k_cache.numel() == v_cache.numel() &&
                      v_cache.size(2) == shape.block_size && v_cache.size(3) == shape.head_dim,
                  "speccompile: expected contiguous k_cache [blocks, H, D, block_size] and v_cache "
                  "[blocks, H, block_size, D]");
  return shape;
}

template <class T>
speccompile::Cache<T> writable(const Tensor& k_cache, const Tensor& v_cache) {
  return {static_cast<T*>(k_cache.mutable_data_ptr()), static_cast<T*>(v_cache.mutable_data_ptr()),
          shape_of(k_cache, v_cache)};
}

// Calls f with a null pointer of an unsigned type as wide as the elements of x: moving data needs no more.
template <class F>
void by_element_size(const Tensor& x, const F& f) {
  STD_TORCH_CHECK(x.element_size() == 2 || x.element_size() == 4, "speccompile: the KV cache must be bf16, fp16 or fp32");
  return x.element_size() == 2 ? f(static_cast<uint16_t*>(nullptr)) : f(static_cast<uint32_t*>(nullptr));
}

void kv_append(Tensor k_cache, Tensor v_cache, Tensor k, Tensor v, Tensor cu_rows, Tensor prefix_len,
               Tensor suffix_start, Tensor block_table) {
  const auto layout = layout_of(cu_rows, prefix_len, &suffix_start, block_table);
  check_slots(layout, k.size(0), k_cache.size(3));
  check_written_blocks(layout, k_cache.size(0), k_cache.size(3));
  STD_TORCH_CHECK(k.scalar_type() == k_cache.scalar_type() && v.scalar_type() == v_cache.scalar_type(),
                  "speccompile: k and v must have the dtype of the KV cache");
  k = dense_rows(k);
  v = dense_rows(v);
  by_element_size(k_cache, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    const speccompile::NewRows<T> rows{static_cast<const T*>(k.const_data_ptr()),
                                       static_cast<const T*>(v.const_data_ptr()),
                                       k.stride(0), k.stride(1), v.stride(0), v.stride(1)};
    speccompile::append(writable<T>(k_cache, v_cache), rows, layout);
  });
}

void kv_compact(Tensors k_caches, Tensors v_caches, Tensor path, Tensor path_len, Tensor cu_rows, Tensor prefix_len,
                Tensor block_table) {
  const auto layout = layout_of(cu_rows, prefix_len, nullptr, block_table);
  const int64_t* path_data = i64(path, layout.requests * path.size(1), "path");
  const int64_t* lengths = i64(path_len, layout.requests, "path_len");
  const int64_t layers = int64_t(k_caches.size());
  int64_t moved = 0;
  for (int64_t r = 0; r < layout.requests; ++r) moved += lengths[r] - 1;
  speccompile::for_each_unit(TorchPool{}, layers, moved * layers >= 64, [&](int64_t i) {
    by_element_size(k_caches[i], [&](auto* element) {
      using T = std::remove_pointer_t<decltype(element)>;
      speccompile::compact(writable<T>(k_caches[i], v_caches[i]), layout, path_data, path.size(1), lengths);
    });
  });
}

template <class T>
void attend(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& mask,
            const speccompile::Layout& layout, double scale, const Tensor& out) {
  const speccompile::Cache<const T> cache{static_cast<const T*>(k_cache.const_data_ptr()),
                                          static_cast<const T*>(v_cache.const_data_ptr()),
                                          shape_of(k_cache, v_cache)};
  STD_TORCH_CHECK(q.size(2) == cache.shape.head_dim && q.size(1) % cache.shape.heads == 0,
                  "speccompile: q does not fit the heads of the KV cache");
  check_slots(layout, q.size(0), cache.shape.block_size);
  const int64_t words = mask.size(1);
  speccompile::tree_attention<T>({static_cast<const T*>(q.const_data_ptr()), q.stride(0), q.stride(1),
                                  static_cast<T*>(out.mutable_data_ptr()), q.size(0), q.size(1), cache, layout,
                                  i64(mask, q.size(0) * words, "mask"), words, float(scale)},
                                 TorchPool{});
}

Tensor tree_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor mask, Tensor cu_rows, Tensor prefix_len,
                      Tensor suffix_start, Tensor block_table, double scale) {
  STD_TORCH_CHECK(q.scalar_type() == k_cache.scalar_type() && q.scalar_type() == v_cache.scalar_type(),
                  "speccompile: q must have the dtype of the KV cache");
  const auto layout = layout_of(cu_rows, prefix_len, &suffix_start, block_table);
  q = dense_rows(q);
  Tensor out = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2)});
  switch (q.scalar_type()) {
    case ScalarType::BFloat16: attend<speccompile::Bf16>(q, k_cache, v_cache, mask, layout, scale, out); break;
    case ScalarType::Half: attend<speccompile::Fp16>(q, k_cache, v_cache, mask, layout, scale, out); break;
    case ScalarType::Float: attend<float>(q, k_cache, v_cache, mask, layout, scale, out); break;
    default: STD_TORCH_CHECK(false, "speccompile: tree_attention takes bf16, fp16 or fp32");
  }
  return out;
}

Tensor draw_tokens(Tensor logits, Tensor seed, Tensor position, Tensor temperature, Tensor top_k, Tensor top_p,
                   Tensor min_p) {
  const int64_t rows = logits.size(0), vocabulary = logits.size(1);
  Tensor drawn = torch::stable::new_empty(logits, {rows}, ScalarType::Long);
  const auto *k = i64(top_k, rows, "top_k");
  const auto *p = f32(top_p, rows, "top_p"), *min = f32(min_p, rows, "min_p");
  speccompile::draw_tokens(
      f32(logits, rows * vocabulary, "logits"), rows, vocabulary,
      {i64(seed, rows, "seed"), i64(position, rows, "position"), f32(temperature, rows, "temperature")},
      [=](int64_t n) { return speccompile::Filters{k[n], p[n], min[n]}; }, TorchPool{},
      static_cast<int64_t*>(drawn.mutable_data_ptr()));
  return drawn;
}

Tensor draft_topk(Tensor logits, Tensor token_ids, Tensor seed, Tensor position, Tensor temperature, int64_t k) {
  const int64_t rows = logits.size(0), width = logits.size(1);
  STD_TORCH_CHECK(0 < k && k <= width, "speccompile: draft_topk needs 0 < k <= draft vocabulary");
  Tensor topk = torch::stable::new_empty(logits, {rows, k}, ScalarType::Long);
  speccompile::draft_topk(
      f32(logits, rows * width, "logits"), rows, width, i64(token_ids, width, "token_ids"),
      {i64(seed, rows, "seed"), i64(position, rows, "position"), f32(temperature, rows, "temperature")}, k,
      TorchPool{}, static_cast<int64_t*>(topk.mutable_data_ptr()));
  return topk;
}

std::tuple<Tensor, Tensor> walk_tree(Tensor drawn, Tensor token, Tensor parent, Tensor cu_rows, int64_t max_path) {
  const int64_t rows = drawn.numel(), requests = cu_rows.numel() - 1;
  const auto *drawn_data = i64(drawn, rows, "drawn"), *token_data = i64(token, rows, "token"),
             *parent_data = i64(parent, rows, "parent");
  const int32_t* cu = i32(cu_rows, requests + 1, "cu_rows");
  STD_TORCH_CHECK(max_path > 0 && cu[requests] <= rows, "speccompile: walk_tree got more rows in cu_rows than it has");
  Tensor path = torch::stable::new_empty(drawn, {requests, max_path});
  Tensor path_len = torch::stable::new_empty(drawn, {requests});
  auto* paths = static_cast<int64_t*>(path.mutable_data_ptr());
  auto* lengths = static_cast<int64_t*>(path_len.mutable_data_ptr());
  for (int64_t r = 0; r < requests; ++r)
    lengths[r] = speccompile::walk_tree(drawn_data, token_data, parent_data, cu[r], cu[r + 1], max_path,
                                        paths + r * max_path);
  return {path, path_len};
}

template <class T>
void multiply_int8(const Tensor& x, const int8_t* weight, const float* scale, const Tensor& out) {
  speccompile::int8_linear<T>({static_cast<const T*>(x.const_data_ptr()), x.stride(0), x.size(0), x.size(1),
                               out.size(1), weight, scale, static_cast<float*>(out.mutable_data_ptr())},
                              TorchPool{});
}

Tensor int8_linear(Tensor x, Tensor weight, Tensor scale) {
  const int64_t columns = scale.numel(), panels = (columns + speccompile::kPanel - 1) / speccompile::kPanel;
  const int64_t steps = (x.size(1) + 3) / 4;
  STD_TORCH_CHECK(x.size(1) <= speccompile::kMostInputs, "speccompile: int8_linear takes at most ",
                  speccompile::kMostInputs, " inputs");
  x = dense_rows(x);
  Tensor out = torch::stable::new_empty(x, {x.size(0), columns}, ScalarType::Float);
  const auto* packed = pointer<int8_t>(weight, ScalarType::Char, panels * steps * speccompile::kStepBytes, "weight");
  const float* scales = f32(scale, columns, "scale");
  switch (x.scalar_type()) {
    case ScalarType::BFloat16: multiply_int8<speccompile::Bf16>(x, packed, scales, out); break;
    case ScalarType::Half: multiply_int8<speccompile::Fp16>(x, packed, scales, out); break;
    case ScalarType::Float: multiply_int8<float>(x, packed, scales, out); break;
    default: STD_TORCH_CHECK(false, "speccompile: int8_linear takes bf16, fp16 or fp32");
  }
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(speccompile, CPU, m) {
  m.impl("kv_append", TORCH_BOX(&kv_append));
  m.impl("kv_compact", TORCH_BOX(&kv_compact));
  m.impl("tree_attention", TORCH_BOX(&tree_attention));
  m.impl("draw_tokens", TORCH_BOX(&draw_tokens));
  m.impl("draft_topk", TORCH_BOX(&draft_topk));
  m.impl("walk_tree", TORCH_BOX(&walk_tree));
  m.impl("int8_linear", TORCH_BOX(&int8_linear));
}
