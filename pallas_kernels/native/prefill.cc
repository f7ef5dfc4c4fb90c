// Attention of new tokens to each other, expanded: keys and values of each head.
//
// A task is up to 128 queries of one head and one request. Keys and values are laid out once for all of them: 64 keys
// side by side, so that products need no sums over lanes, and bfloat16 in pairs along the sum, as it is multiplied.

#include "attention.h"

namespace {

constexpr int64_t kQueries = 128;  // enough that laying out keys is little beside their products

// What is multiplied at once along a sum: a float, or two values of bfloat16.
template <typename T>
struct Cells;

template <>
struct Cells<float> {
  typedef float Cell;
  static constexpr int64_t kWide = 1;
  static inline float cell(float first, float) { return first; }
  static inline float rounded(const float* from) { return *from; }
};

template <>
struct Cells<BFloat16> {
  typedef uint32_t Cell;
  static constexpr int64_t kWide = 2;
  static inline uint32_t cell(BFloat16 first, BFloat16 second) { return first.bits | uint32_t{second.bits} << 16; }
  static inline uint32_t rounded(const float* from) {
    BFloat16 pair[2];
    store(from[0], pair);
    store(from[1], pair + 1);
    return cell(pair[0], pair[1]);
  }
};

// `sums[m, :] += x[m, :] @ w` for M rows of x and C vectors of columns of w, both in cells; strides are in cells.
template <int M, int C, typename T>
inline void multiply(const typename Cells<T>::Cell* x, int64_t x_stride, const typename Cells<T>::Cell* w,
                     int64_t w_stride, int64_t depth, Floats (&sums)[M][C]) {
  typedef typename Along<T, T>::Vector Vector;
  for (int64_t k = 0; k < depth; ++k) {
    Vector weights[C];
    for (int c = 0; c < C; ++c) weights[c] = load<Vector>(w + k * w_stride + c * kLanes);
    for (int m = 0; m < M; ++m) {
      const Vector value = Vector{} + x[m * x_stride + k];
      for (int c = 0; c < C; ++c) Along<T, T>::add(sums[m][c], value, weights[c]);
    }
  }
}

// The queries of a task, and 64 keys and values, as they are multiplied.
template <typename T>
struct Laid {
  typedef Cells<T> Types;
  typedef typename Types::Cell Cell;
  static constexpr int64_t kWide = Types::kWide;

  int64_t D, V, depth, width;  // elements of a key and of a value; cells of a key, and of a row of values
  std::vector<Cell> queries, keys, values;  // [count, depth], [depth, 64], [64 / kWide, width]
  std::vector<T> row;

  Laid(int64_t count, int64_t D, int64_t V)
      : D(D), V(V), depth((D + kWide - 1) / kWide), width((V + kLanes - 1) / kLanes * kLanes), queries(count * depth),
        keys(depth * kPage), values(kPage / kWide * width), row(depth * kWide) {}

  void lay_query(int64_t n, const T* from) {
    std::copy_n(from, D, row.begin());
    for (int64_t k = 0; k < depth; ++k) queries[n * depth + k] = Types::cell(row[k * kWide], row[k * kWide + kWide - 1]);
  }

  // Key j has `own` elements of its own, and the rest with all heads.
  void lay_key(int64_t j, const T* own, int64_t own_width, const T* shared) {
    std::copy_n(own, own_width, row.begin());
    std::copy_n(shared, D - own_width, row.begin() + own_width);
    for (int64_t k = 0; k < depth; ++k) keys[k * kPage + j] = Types::cell(row[k * kWide], row[k * kWide + kWide - 1]);
  }

  // Values j to j + kWide - 1; those from `number` on are 0: their weights are, but what lies here may be NaN.
  void lay_values(int64_t j, int64_t number, const T* from, int64_t stride) {
    Cell* to = &values[j / kWide * width];
    for (int64_t r = 0; r < V; ++r) {
      const T first = j < number ? from[r] : T{}, second = j + kWide - 1 < number ? from[(kWide - 1) * stride + r] : T{};
      to[r] = Types::cell(first, second);
    }
  }

  // Takes the first `visible[m]` of the 64 keys into query `first + m`, for M queries; sums have rows of `width`.
  template <int M>
  void take(int64_t first, const int64_t (&visible)[M], float scale, Running running) const {
    float scores[M][kPage];
    for (int64_t j = 0; j < kPage; j += kColumns * kLanes) {
      Floats sums[M][kColumns] = {};
      multiply<M, kColumns, T>(&queries[first * depth], depth, &keys[j], kPage, depth, sums);
      for (int m = 0; m < M; ++m) std::memcpy(&scores[m][j], sums[m], sizeof(sums[m]));
    }
    weigh<M>(scores, visible, scale, width, running);
    Cell weights[M][kPage / kWide];
    for (int m = 0; m < M; ++m) {
      for (int64_t j = 0; j < kPage; j += kWide) weights[m][j / kWide] = Types::rounded(&scores[m][j]);
    }
    int64_t r = 0;
    for (; r + kColumns * kLanes <= width; r += kColumns * kLanes) add<M, kColumns>(weights, r, running.out);
    for (; r < width; r += kLanes) add<M, 1>(weights, r, running.out);
  }

  template <int M, int C>
  void add(const Cell (&weights)[M][kPage / kWide], int64_t column, float* out) const {
    Floats sums[M][C];
    for (int m = 0; m < M; ++m) std::memcpy(sums[m], out + m * width + column, sizeof(sums[m]));
    multiply<M, C, T>(&weights[0][0], kPage / kWide, &values[column], width, kPage / kWide, sums);
    for (int m = 0; m < M; ++m) std::memcpy(out + m * width + column, sums[m], sizeof(sums[m]));
  }

  // Takes the 64 keys from `start` on into queries `first` to `first + M - 1`; query n sees the first `seen[n]` of all.
  template <int M>
  void take_from(int64_t start, int64_t first, const int64_t* seen, float scale, Running running) const {
    int64_t visible[M];
    for (int m = 0; m < M; ++m) visible[m] = seen[m] - start;
    if (*std::max_element(visible, visible + M) > 0) take<M>(first, visible, scale, running);
  }
};

// What is asked: q [T, H, N + P], k [T, H, N], shared [T, P], v [T, H, V], out [T, H, V], lse [T, H].
template <typename T>
struct Asked {
  const T *q, *k, *shared, *v;
  T* out;
  float* lse;
  int64_t H, N, P, V;
  float scale;
};

// Rows of one chunk, which begins with row `begin`, and head h.
template <typename T>
void attend(const Asked<T>& a, const Part& part, int64_t begin, int64_t h) {
  Laid<T> laid(part.count, a.N + a.P, a.V);
  std::vector<float> top(part.count, kNone), total(part.count), out(part.count * laid.width);
  std::vector<int64_t> seen(part.count);
  for (int64_t n = 0; n < part.count; ++n) {
    laid.lay_query(n, a.q + ((part.first + n) * a.H + h) * (a.N + a.P));
    seen[n] = part.chunk < 0 ? 0 : part.first + n + 1 - begin;
  }
  for (int64_t start = 0; start < seen.back(); start += kPage) {
    const int64_t number = std::min(kPage, seen.back() - start), token = begin + start;
    for (int64_t j = 0; j < number; ++j) {
      laid.lay_key(j, a.k + ((token + j) * a.H + h) * a.N, a.N, a.shared + (token + j) * a.P);
    }
    for (int64_t j = 0; j < kPage; j += Cells<T>::kWide) {
      laid.lay_values(j, number, a.v + ((token + std::min(j, number - 1)) * a.H + h) * a.V, a.H * a.V);
    }
    for (int64_t n = 0; n < part.count; n += kRows) {
      const Running running = {&top[n], &total[n], &out[n * laid.width]};
      switch (std::min<int64_t>(kRows, part.count - n)) {
        case 1: laid.template take_from<1>(start, n, &seen[n], a.scale, running); break;
        case 2: laid.template take_from<2>(start, n, &seen[n], a.scale, running); break;
        case 3: laid.template take_from<3>(start, n, &seen[n], a.scale, running); break;
        default: laid.template take_from<4>(start, n, &seen[n], a.scale, running);
      }
    }
  }
  for (int64_t n = 0; n < part.count; ++n) {
    const int64_t row = (part.first + n) * a.H + h;
    finish(top[n], total[n], &out[n * laid.width], a.V, a.out + row * a.V, a.lse + row);
  }
}

// New tokens of chunks, each to those before it in its chunk: q [T, H, N + P], keys [T, H, N] and for all heads [T, P],
// values [T, H, V], cu_lengths [G + 1] -> [T, H, V], lse [T, H].
ffi::Error prefill_attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer shared,
                             ffi::AnyBuffer v, ffi::Buffer<ffi::S32> cu_lengths, ffi::Result<ffi::AnyBuffer> out,
                             ffi::ResultBuffer<ffi::F32> lse, float scale) {
  return with_type(q, k, [&](auto type) {
    typedef decltype(type) T;
    const int64_t tokens = q.dimensions()[0], H = q.dimensions()[1];
    const Asked<T> asked = {data<T>(q), data<T>(k), data<T>(shared), data<T>(v), data<T>(out), lse->typed_data(), H,
                            k.dimensions()[2], shared.dimensions()[1], v.dimensions()[2], scale};
    const std::vector<Part> parts = parts_of(cu_lengths, tokens, kQueries);
    for_each(pool, parts.size() * H, parts.size() * H, [&](int64_t i) {
      const Part& part = parts[i / H];
      const int64_t begin = part.chunk < 0 ? 0 : cu_lengths.typed_data()[part.chunk];
      attend(asked, part, std::clamp<int64_t>(begin, 0, part.first), i % H);
    });
    return ffi::Error::Success();
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(PrefillAttention, prefill_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale"));
