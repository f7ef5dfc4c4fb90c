// Products of few rows with weights that stay where they are: decode on a CPU.
//
// A decode step reads every active weight once, for one to a few dozen rows. XLA:CPU copies a weight that a loop slices
// out of a stack, widens bfloat16 weights to float32 in memory, and reads the weight again for each row. These kernels
// address the stack and multiply all rows while a weight is in registers or in the first cache.

#include <type_traits>
#include <vector>

#include "e4m3.h"
#include "vectors.h"

namespace {

constexpr int64_t kHelpedBytes = 256 << 10;  // weights per further thread: less is read before that thread has come
constexpr int64_t kTaskBytes = 128 << 10;  // weights of a task: reading them takes far longer than handing it over
constexpr int64_t kBlock = 128;            // values of K, and columns, that share a scale

// Rows of one product: `out[m, :] = x[m, :] @ w.T`, or `@ w` where the weight is [K, N].
template <typename X, typename T, typename O>
struct Product {
  const X* x;
  const T* w;
  O* out;
  int64_t rows;
};

// C vectors of columns of a weight [K, N], times M rows.
template <int M, int C, typename T, typename O>
inline void combined(const T* x, const T* w, O* out, const Shape& shape) {
  Floats sums[M][C] = {};
  combine<M, C>(x, w, sums, shape);
  for (int m = 0; m < M; ++m) {
    for (int i = 0; i < C * kLanes; ++i) store(sums[m][i / kLanes][i % kLanes], out + m * shape.out_stride + i);
  }
}

#if defined(__AVX512BF16__)

// The same of bfloat16, 64 columns: rows k and k + 1 of the weight become pairs, which are multiplied as they are.
template <int M, typename O>
inline void combined_pairs(const BFloat16* x, const BFloat16* w, O* out, const Shape& shape) {
  __m512 sums[M][2][2] = {};  // of 32 columns: columns 0 to 3 of each 8, and 4 to 7
  for (int64_t k = 0; k < shape.depth; k += 2) {
    const bool both = k + 1 < shape.depth;
    __m512i low[2], high[2];
    for (int h = 0; h < 2; ++h) {
      const BFloat16* row = w + k * shape.w_stride + h * 2 * kLanes;
      const __m512i first = _mm512_loadu_si512(row);
      const __m512i second = both ? _mm512_loadu_si512(row + shape.w_stride) : __m512i{};
      low[h] = _mm512_unpacklo_epi16(first, second);
      high[h] = _mm512_unpackhi_epi16(first, second);
    }
    for (int m = 0; m < M; ++m) {
      const BFloat16* from = x + m * shape.x_stride + k;
      const __m512i pair = _mm512_set1_epi32(from[0].bits | (both ? uint32_t{from[1].bits} << 16 : 0));
      for (int h = 0; h < 2; ++h) {
        sums[m][h][0] = _mm512_dpbf16_ps(sums[m][h][0], (__m512bh)pair, (__m512bh)low[h]);
        sums[m][h][1] = _mm512_dpbf16_ps(sums[m][h][1], (__m512bh)pair, (__m512bh)high[h]);
      }
    }
  }
  const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i back = _mm512_add_epi32(front, _mm512_set1_epi32(8));
  for (int m = 0; m < M; ++m) {
    for (int h = 0; h < 2; ++h) {
      O* to = out + m * shape.out_stride + h * 2 * kLanes;
      store_vector((Floats)_mm512_permutex2var_ps(sums[m][h][0], front, sums[m][h][1]), to);
      store_vector((Floats)_mm512_permutex2var_ps(sums[m][h][0], back, sums[m][h][1]), to + kLanes);
    }
  }
}

#endif

// One column of a weight [K, N], where no whole vector is left.
template <typename T, typename O>
inline void combined_one(const T* x, const T* w, O* out, const Shape& shape) {
  float total = 0;
  for (int64_t k = 0; k < shape.depth; ++k) total = fused(widen(x[k]), widen(w[k * shape.w_stride]), total);
  store(total, out);
}

// Columns `first` to `last` of a weight [N, K], or, transposed, [K, N]; `cached` where rows before have read them.
template <bool kTransposed, int M, typename X, typename T, typename O>
void columns(const X* x, const T* w, O* out, const Shape& shape, int64_t first, int64_t last, bool cached) {
  int64_t n = first;
  if constexpr (kTransposed) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, BFloat16>) {
      for (; n + kColumns * kLanes <= last; n += kColumns * kLanes) combined_pairs<M>(x, w + n, out + n, shape);
    }
#endif
    for (; n + kColumns * kLanes <= last; n += kColumns * kLanes) combined<M, kColumns>(x, w + n, out + n, shape);
    for (; n + kLanes <= last; n += kLanes) combined<M, 1>(x, w + n, out + n, shape);
    for (; n < last; ++n) {
      for (int m = 0; m < M; ++m) combined_one(x + m * shape.x_stride, w + n, out + m * shape.out_stride + n, shape);
    }
  } else {
    for (; n + kColumns <= last; n += kColumns) {
      const T* from = w + n * shape.w_stride;
      if (cached) {
        dots<false, M, kColumns>(x, from, out + n, shape);
      } else {
        dots<true, M, kColumns>(x, from, out + n, shape);
      }
    }
    for (; n < last; ++n) dots<false, M, 1>(x, w + n * shape.w_stride, out + n, shape);
  }
}

// The same of all rows of a product. The columns are few enough to stay in the cache for the next rows.
template <bool kTransposed, typename X, typename T, typename O>
void part(const Product<X, T, O>& product, const Shape& shape, int64_t first, int64_t last, bool cached = false) {
  for (int64_t m = 0; m < product.rows; m += kRows) {
    const X* x = product.x + m * shape.x_stride;
    O* out = product.out + m * shape.out_stride;
    switch (std::min<int64_t>(kRows, product.rows - m)) {
      case 1: columns<kTransposed, 1>(x, product.w, out, shape, first, last, cached || m > 0); break;
      case 2: columns<kTransposed, 2>(x, product.w, out, shape, first, last, cached || m > 0); break;
      case 3: columns<kTransposed, 3>(x, product.w, out, shape, first, last, cached || m > 0); break;
      default: columns<kTransposed, 4>(x, product.w, out, shape, first, last, cached || m > 0);
    }
  }
}

// Makes `products` of one shape, N columns each.
template <typename T, typename O>
void run(ffi::ThreadPool& pool, const std::vector<Product<T, T, O>>& products, const Shape& shape, int64_t N,
         bool transposed = false) {
  const int64_t unit = transposed ? kColumns * kLanes : kColumns;
  const int64_t fitting = kTaskBytes / std::max<int64_t>(1, shape.depth * sizeof(T));
  const int64_t width = std::max<int64_t>(unit, fitting / unit * unit);
  const int64_t parts = (N + width - 1) / width;
  const int64_t bytes = N * shape.depth * sizeof(T) * products.size();
  for_each(pool, parts * products.size(), bytes / kHelpedBytes, [&](int64_t i) {
    const int64_t first = i % parts * width, last = std::min(first + width, N);
    if (transposed) {
      part<true>(products[i / parts], shape, first, last);
    } else {
      part<false>(products[i / parts], shape, first, last);
    }
  });
}

// Memory of a thread for `count` values: a load that meets two lines of the cache takes twice as long.
template <typename T>
struct Scratch {
  struct alignas(kVectorBytes) Line {
    T values[kVectorBytes / sizeof(T)];
  };
  explicit Scratch(int64_t count) : lines((count * sizeof(T) + sizeof(Line) - 1) / sizeof(Line)) {}
  T* data() { return lines.data()->values; }
  std::vector<Line> lines;
};

// Writes `depth` values of a row of INT4 weights times their scales, which lie `stride` apart.
template <typename T>
inline void decode_row(const Int4* words, const BFloat16* scale, int64_t stride, int64_t depth, T* out) {
  for (; depth > 0; depth -= kRun, words += kWordsOfRun) {
    for (int64_t w = 0; w < kWordsOfRun; w += kCacheLine / sizeof(Int4)) fetch_ahead(words + w);
    for (int j = 0; j < kRun / kWordsOfRun; ++j, scale += stride, out += kWordsOfRun) {
      const float factor = widen(*scale);
#pragma GCC unroll 4
      for (int64_t w = 0; w < kWordsOfRun; w += kLanes) {
        const Words bits = load<Words>(words + w) >> 4 * j & 15u;
        store_vector((__builtin_convertvector((Ints)bits, Floats) - 8.0f) * factor, out + w);
      }
    }
  }
}

// Makes products with INT4 weights, which become values of T in the first cache: the bits are those of the product with
// dequantized weights.
template <typename T>
void run(ffi::ThreadPool& pool, const std::vector<Product<T, Int4, T>>& products,
         const std::vector<const BFloat16*>& scales, int64_t N, int64_t K) {
  const int64_t row_words = K / (kRun / kWordsOfRun), row_bytes = row_words * sizeof(Int4);
  const int64_t width = std::max<int64_t>(kColumns, kTaskBytes / row_bytes / kColumns * kColumns);
  const int64_t parts = (N + width - 1) / width;
  for_each(pool, parts * products.size(), N * row_bytes * products.size() / kHelpedBytes, [&](int64_t i) {
    const Product<T, Int4, T>& product = products[i / parts];
    const BFloat16* scale = scales[i / parts];
    const int64_t first = i % parts * width, last = std::min(first + width, N);
    Scratch<T> decoded(kColumns * K);
    for (int64_t n = first; n < last; n += kColumns) {
      const int64_t count = std::min<int64_t>(kColumns, last - n);
      for (int64_t c = 0; c < count; ++c) {
        decode_row(product.w + (n + c) * row_words, scale + n + c, N, K, decoded.data() + c * K);
      }
      const Product<T, T, T> some = {product.x, decoded.data(), product.out + n, product.rows};
      part<false>(some, {K, K, K, N}, 0, count, true);
    }
  });
}

// e4m3 bytes of four codes, whose magnitudes are the lowest 16 bits of each word; `step` has a group's power in every lane. A
// byte is 4 c + 8 of code c, 0 of code 0 and 8 of code 1, and the step where it is not 0. Signs are those of `sign`.
inline Words e4m3_of(Words magnitudes, Words sign, Words step) {
  Words codes = (magnitudes | magnitudes << 8) & 0x00ff00ffu;
  codes = (codes | codes << 4) & 0x07070707u;
  const Words some = (codes + 0x07070707u) >> 3 & 0x01010101u, more = (codes + 0x06060606u) >> 3 & 0x01010101u;
  return (codes << 2) + some * (step + 4u) + (more << 2) | (sign & 0x80808080u);
}

// Writes `depth` e4m3 values of a row of FP4 weights; powers of neighboring blocks lie `stride` apart.
inline void decode_row(const Fp4* words, const uint32_t* powers, int64_t stride, int64_t depth, E4M3* out) {
  constexpr int kPairs = 8;  // words of two groups
  for (; depth > 0; depth -= kBlock, words += kWordsOfBlock, powers += stride, out += kBlock) {
    fetch_ahead(words);
    for (int64_t w = 0; w < kWordsOfBlock; w += kLanes) {
      Words step;
      for (int i = 0; i < kLanes; ++i) step[i] = *powers >> ((w + i) / kPairs * 16 + i % 2 * 8) & 255u;
      const Words bits = load<Words>(words + w);
      const Words front = e4m3_of(bits & 0x7777u, bits, step), back = e4m3_of(bits >> 16 & 0x7777u, bits << 4, step);
#if defined(__AVX512F__)
      const Words pairs[] = {
          lanes<Words, 0, 2, 4, 6, 16, 18, 20, 22, 1, 3, 5, 7, 17, 19, 21, 23>(front, back),
          lanes<Words, 8, 10, 12, 14, 24, 26, 28, 30, 9, 11, 13, 15, 25, 27, 29, 31>(front, back)};
#else
      const Words pairs[] = {lanes<Words, 0, 2, 4, 6, 8, 10, 12, 14>(front, back),
                             lanes<Words, 1, 3, 5, 7, 9, 11, 13, 15>(front, back)};
#endif
      std::memcpy(out + w * 8, pairs, sizeof(pairs));
    }
  }
}

// The scales of block-quantized operands: of x one per row and 128 of K, [K / 128, rows]; of a weight one per 128 x 128.
struct Scales {
  const float *x, *w;
  int64_t rows;  // of the array of x
};

#if defined(DSV3_E4M3_PAIRS)

// Rows of e4m3 with the scales of columns that share theirs: `w_scale`, one per 128 of K.
class ScaledRows {
 public:
  ScaledRows(const E4M3* x, const Scales& scale, const float* w_scale, int64_t rows, int64_t K)
      : rows_(rows), depth_(paired_depth(K)), x_(rows * depth_), factors_((K + kBlock - 1) / kBlock * rows) {
    for (int64_t m = 0; m < rows; ++m) {
      decode_row(decoder(), x + m * K, K, x_.data() + m * depth_);
      for (size_t b = 0; b < factors_.size() / rows; ++b) factors_[b * rows + m] = scale.x[b * scale.rows + m] * w_scale[b];
    }
  }

  // Columns `first` to `last` of the weight, of which w is column 0; `out` belongs to it.
  template <typename O>
  void columns(const E4M3* w, O* out, int64_t N, int64_t K, int64_t first, int64_t last, bool) {
    for (int64_t m = 0; m < rows_; m += kRows) {
      const auto with = [&](auto count) {
        scaled_columns<count()>(decoder(), x_.data() + m * depth_, w, &factors_[m], rows_, out + m * N, {K, depth_, K, N},
                                first, last);
      };
      switch (std::min<int64_t>(kRows, rows_ - m)) {
        case 1: with(std::integral_constant<int, 1>()); break;
        case 2: with(std::integral_constant<int, 2>()); break;
        case 3: with(std::integral_constant<int, 3>()); break;
        default: with(std::integral_constant<int, 4>());
      }
    }
  }

 private:
  static const Decoder& decoder() {
    static const Decoder decoder;
    return decoder;
  }

  int64_t rows_, depth_;
  Scratch<BFloat16> x_;
  std::vector<float> factors_;
};

#else

inline void scaled(const E4M3* x, float factor, int64_t count, float* out) {
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) {
    const Floats values = widened(x + k) * factor;
    std::memcpy(out + k, &values, sizeof(values));
  }
  if (k < count) {
    E4M3 rest[kLanes] = {};
    std::memcpy(rest, x + k, count - k);
    const Floats values = widened(rest) * factor;
    std::memcpy(out + k, &values, (count - k) * sizeof(float));
  }
}

// The same with float32 rows, into which the scales are multiplied.
class ScaledRows {
 public:
  ScaledRows(const E4M3* x, const Scales& scale, const float* w_scale, int64_t rows, int64_t K)
      : rows_(rows), depth_((K + kBlock - 1) / kBlock * kBlock), x_(rows * depth_) {
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t b = 0; b < depth_ / kBlock; ++b) {
        const float both = scale.x[b * scale.rows + m] * w_scale[b];
        const int64_t k = b * kBlock;
        scaled(x + m * K + k, both * kE4M3Unit * kE4M3Unit, std::min(kBlock, K - k), &x_[m * depth_ + k]);
      }
    }
  }

  template <typename O>
  void columns(const E4M3* w, O* out, int64_t N, int64_t K, int64_t first, int64_t last, bool cached) {
    part<false>(Product<float, E4M3, O>{x_.data(), w, out, rows_}, {K, depth_, K, N}, first, last, cached);
  }

 private:
  int64_t rows_, depth_;
  std::vector<float> x_;
};

#endif

// Calls `task(product, rows, first, last)` for tasks of 128 columns, which share their scales, with ScaledRows of theirs.
template <typename W, typename O, typename Task>
void for_each_block(ffi::ThreadPool& pool, const std::vector<Product<E4M3, W, O>>& products,
                    const std::vector<Scales>& scales, int64_t N, int64_t K, int64_t bytes, const Task& task) {
  const int64_t parts = (N + kBlock - 1) / kBlock, depth_blocks = (K + kBlock - 1) / kBlock;
  for_each(pool, parts * products.size(), bytes * products.size() / kHelpedBytes, [&](int64_t i) {
    const Product<E4M3, W, O>& product = products[i / parts];
    const Scales& scale = scales[i / parts];
    ScaledRows rows(product.x, scale, scale.w + i % parts * depth_blocks, product.rows, K);
    const int64_t first = i % parts * kBlock;
    task(i / parts, rows, first, std::min(first + kBlock, N));
  });
}

// Makes products of e4m3.
template <typename O>
void run(ffi::ThreadPool& pool, const std::vector<Product<E4M3, E4M3, O>>& products, const std::vector<Scales>& scales,
         int64_t N, int64_t K) {
  for_each_block(pool, products, scales, N, K, N * K, [&](int64_t i, ScaledRows& rows, int64_t first, int64_t last) {
    rows.columns(products[i].w, products[i].out, N, K, first, last, false);
  });
}

// Makes products with FP4 weights, which become e4m3 in the first cache: the bits are those of the product with e4m3.
template <typename O>
void run(ffi::ThreadPool& pool, const std::vector<Product<E4M3, Fp4, O>>& products,
         const std::vector<const uint32_t*>& powers, const std::vector<Scales>& scales, int64_t N, int64_t K) {
  constexpr int64_t kDecoded = 4;
  const int64_t row_words = K / kBlock * kWordsOfBlock, bytes = N * row_words * sizeof(Fp4);
  for_each_block(pool, products, scales, N, K, bytes, [&](int64_t i, ScaledRows& rows, int64_t first, int64_t last) {
    Scratch<E4M3> decoded(kDecoded * K);
    for (int64_t n = first; n < last; n += kDecoded) {
      const int64_t count = std::min(kDecoded, last - n);
      for (int64_t c = 0; c < count; ++c) {
        decode_row(products[i].w + (n + c) * row_words, powers[i] + n + c, N, K, decoded.data() + c * K);
      }
      rows.columns(decoded.data(), products[i].out + n, N, K, 0, count, true);
    }
  });
}

// Calls `body(T, O)` with values of the types of operands and result.
template <typename Body>
ffi::Error with_types(const ffi::AnyBuffer& x, const ffi::AnyBuffer& w, ffi::Result<ffi::AnyBuffer>& out, Body body) {
  const ffi::DataType type = x.element_type(), result = out->element_type();
  if (type != w.element_type()) return wrong("x and w are of different types");
  if (type == ffi::F32 && result == ffi::F32) return body(float{}, float{});
  if (type == ffi::BF16 && result == ffi::F32) return body(BFloat16{}, float{});
  if (type == ffi::BF16 && result == ffi::BF16) return body(BFloat16{}, BFloat16{});
  return wrong("no product of these types");
}

// x [M, K], w [L, N, K], layer -> [M, N].
ffi::Error layer_product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::S32> layer,
                         ffi::Result<ffi::AnyBuffer> out) {
  return with_types(x, w, out, [&](auto type, auto result) {
    typedef decltype(type) T;
    typedef decltype(result) O;
    const int64_t rows = x.dimensions()[0], K = x.dimensions()[1], N = w.dimensions()[1];
    const int64_t index = std::clamp<int64_t>(*layer.typed_data(), 0, w.dimensions()[0] - 1);
    run<T, O>(pool, {{data<T>(x), data<T>(w) + index * N * K, data<O>(out), rows}}, {K, K, K, N}, N);
    return ffi::Error::Success();
  });
}

// x [M, H, K], w [L, H, N, K] or, transposed, [L, H, K, N], layer -> [M, H, N].
ffi::Error head_product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::S32> layer,
                        ffi::Result<ffi::AnyBuffer> out, bool transposed) {
  return with_types(x, w, out, [&](auto type, auto result) {
    typedef decltype(type) T;
    typedef decltype(result) O;
    const int64_t rows = x.dimensions()[0], H = x.dimensions()[1], K = x.dimensions()[2];
    const int64_t N = out->dimensions()[2];
    const int64_t index = std::clamp<int64_t>(*layer.typed_data(), 0, w.dimensions()[0] - 1);
    std::vector<Product<T, T, O>> products;
    for (int64_t h = 0; h < H; ++h) {
      products.push_back({data<T>(x) + h * K, data<T>(w) + (index * H + h) * N * K, data<O>(out) + h * N, rows});
    }
    run(pool, products, {K, H * K, transposed ? N : K, H * N}, N, transposed);
    return ffi::Error::Success();
  });
}

// Calls `product(first, rows, group)` for each run of tiles of one group, and makes the rows of the others zero.
template <typename Add>
void runs_of(const ffi::Buffer<ffi::S32>& tile_group, const ffi::Buffer<ffi::S32>& offset, int64_t num_groups,
             ffi::Result<ffi::AnyBuffer>& out, const Add& product) {
  const int64_t tiles = tile_group.element_count(), height = out->dimensions()[0] / tiles;
  const int64_t row_bytes = out->size_bytes() / out->dimensions()[0];
  const int32_t* groups = tile_group.typed_data();
  for (int64_t first = 0, last; first < tiles; first = last) {
    for (last = first + 1; last < tiles && groups[last] == groups[first];) ++last;
    if (groups[first] < 0) {
      std::memset(data<char>(out) + first * height * row_bytes, 0, (last - first) * height * row_bytes);
    } else {
      const int64_t group = std::clamp<int64_t>(*offset.typed_data() + groups[first], 0, num_groups - 1);
      product(first * height, (last - first) * height, group);
    }
  }
}

// x [A, K], w [G, N, K], tile_group [A / tile], offset -> [A, N]; rows of tiles without a group are zero. Tiles of one
// group that lie side by side are one product.
ffi::Error grouped_product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::S32> tile_group,
                           ffi::Buffer<ffi::S32> offset, ffi::Result<ffi::AnyBuffer> out) {
  return with_types(x, w, out, [&](auto type, auto result) {
    typedef decltype(type) T;
    typedef decltype(result) O;
    const int64_t K = x.dimensions()[1], N = w.dimensions()[1];
    std::vector<Product<T, T, O>> products;
    runs_of(tile_group, offset, w.dimensions()[0], out, [&](int64_t first, int64_t rows, int64_t group) {
      products.push_back({data<T>(x) + first * K, data<T>(w) + group * N * K, data<O>(out) + first * N, rows});
    });
    run(pool, products, {K, K, K, N}, N);
    return ffi::Error::Success();
  });
}

template <typename Body>
ffi::Error with_result(ffi::Result<ffi::AnyBuffer>& out, Body body) {
  if (out->element_type() == ffi::F32) return body(float{});
  if (out->element_type() == ffi::BF16) return body(BFloat16{});
  return wrong("results are float32 or bfloat16");
}

// As `grouped_product`, of e4m3: x [A, K], x_scale [K / 128, A], w [G, N, K], w_scale [G, N / 128, K / 128].
ffi::Error fp8_grouped_product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> x_scale, ffi::AnyBuffer w,
                               ffi::Buffer<ffi::F32> w_scale, ffi::Buffer<ffi::S32> tile_group,
                               ffi::Buffer<ffi::S32> offset, ffi::Result<ffi::AnyBuffer> out) {
  if (x.element_type() != ffi::F8E4M3FN || w.element_type() != ffi::F8E4M3FN) return wrong("x and w must be e4m3");
  return with_result(out, [&](auto result) {
    typedef decltype(result) O;
    const int64_t A = x.dimensions()[0], K = x.dimensions()[1], G = w.dimensions()[0], N = w.dimensions()[1];
    const int64_t blocks = w_scale.element_count() / G;
    std::vector<Product<E4M3, E4M3, O>> products;
    std::vector<Scales> scales;
    runs_of(tile_group, offset, G, out, [&](int64_t first, int64_t rows, int64_t group) {
      products.push_back({data<E4M3>(x) + first * K, data<E4M3>(w) + group * N * K, data<O>(out) + first * N, rows});
      scales.push_back({x_scale.typed_data() + first, w_scale.typed_data() + group * blocks, A});
    });
    run(pool, products, scales, N, K);
    return ffi::Error::Success();
  });
}

// As `fp8_grouped_product`, of FP4: w [G, N, K / 8], w_powers [G, K / 128, N].
ffi::Error fp4_grouped_product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> x_scale,
                               ffi::Buffer<ffi::U32> w, ffi::Buffer<ffi::U32> w_powers, ffi::Buffer<ffi::F32> w_scale,
                               ffi::Buffer<ffi::S32> tile_group, ffi::Buffer<ffi::S32> offset,
                               ffi::Result<ffi::AnyBuffer> out) {
  if (x.element_type() != ffi::F8E4M3FN) return wrong("x must be e4m3");
  return with_result(out, [&](auto result) {
    typedef decltype(result) O;
    const int64_t A = x.dimensions()[0], K = x.dimensions()[1], G = w.dimensions()[0], N = w.dimensions()[1];
    std::vector<Product<E4M3, Fp4, O>> products;
    std::vector<const uint32_t*> powers;
    std::vector<Scales> scales;
    runs_of(tile_group, offset, G, out, [&](int64_t first, int64_t rows, int64_t group) {
      const Fp4* words = static_cast<const Fp4*>(w.untyped_data()) + group * (w.element_count() / G);
      products.push_back({data<E4M3>(x) + first * K, words, data<O>(out) + first * N, rows});
      powers.push_back(w_powers.typed_data() + group * (w_powers.element_count() / G));
      scales.push_back(
          {x_scale.typed_data() + first, w_scale.typed_data() + group * (w_scale.element_count() / G), A});
    });
    run(pool, products, powers, scales, N, K);
    return ffi::Error::Success();
  });
}

// As `grouped_product`, of INT4: w [G, N, K / 8], w_scale [G, K / 32, N].
ffi::Error int4_grouped_product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> w,
                                ffi::Buffer<ffi::BF16> w_scale, ffi::Buffer<ffi::S32> tile_group,
                                ffi::Buffer<ffi::S32> offset, ffi::Result<ffi::AnyBuffer> out) {
  const auto made = [&](auto type) {
    typedef decltype(type) T;
    const int64_t K = x.dimensions()[1], G = w.dimensions()[0], N = w.dimensions()[1];
    const BFloat16* scale = reinterpret_cast<const BFloat16*>(w_scale.untyped_data());
    std::vector<Product<T, Int4, T>> products;
    std::vector<const BFloat16*> scales;
    runs_of(tile_group, offset, G, out, [&](int64_t first, int64_t rows, int64_t group) {
      const Int4* words = static_cast<const Int4*>(w.untyped_data()) + group * (w.element_count() / G);
      products.push_back({data<T>(x) + first * K, words, data<T>(out) + first * N, rows});
      scales.push_back(scale + group * (w_scale.element_count() / G));
    });
    run(pool, products, scales, N, K);
    return ffi::Error::Success();
  };
  if (out->element_type() != x.element_type()) return wrong("results are of the type of x");
  if (x.element_type() == ffi::F32) return made(float());
  if (x.element_type() == ffi::BF16) return made(BFloat16());
  return wrong("x must be float32 or bfloat16");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(LayerProduct, layer_product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(HeadProduct, head_product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("transposed"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(GroupedProduct, grouped_product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(Fp8GroupedProduct, fp8_grouped_product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(Fp4GroupedProduct, fp4_grouped_product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(Int4GroupedProduct, int4_grouped_product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());

// Returns 1 where the compiler was told that this CPU multiplies bfloat16, 0 where the kernels widen it first.
extern "C" int multiplies_bfloat16() {
#if defined(__AVX512BF16__)
  return 1;
#else
  return 0;
#endif
}
