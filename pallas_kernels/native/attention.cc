// Attention over paged latents, absorbed (one cached row is key and value of all heads), and of new tokens to each other.
//
// A task is some queries that see the same keys. It walks those once, 64 at a time, with a running maximum, so its memory
// does not grow with the context.

#include <cmath>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t kPage = 64;  // tokens; also the keys of a step of new tokens
constexpr int64_t kQueries = 64;  // of a task of prefill: enough that fetching keys is little beside their products
constexpr int64_t kHelpedBytes = 256 << 10;  // latents per further thread, as in products
constexpr float kNone = -std::numeric_limits<float>::infinity();

// exp(x) for x <= 0, within 2 units in the last place; 0 below -87, where it is no normal number.
inline Floats exp_of(Floats x) {
  typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));
  const Floats power = x * 1.44269504f;
  const Ints whole = __builtin_convertvector(power - 0.5f, Ints);  // towards zero, which is up here: to the nearest
  const Floats n = __builtin_convertvector(whole, Floats);
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  Floats y = 1.9875691500e-4f * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const Floats scaled = y * (Floats)((whole + 127) << 23);
  return (Floats)((Ints)scaled & (x > -87.0f));
}

// Queries that see the same keys: strides are elements from one query to the next.
template <typename T>
struct Queries {
  const T* q;    // each of `depth` elements
  T* out;        // each of `width` elements
  float* lse;
  int64_t count, q_stride, out_stride, lse_stride, depth, width;
  float scale;
};

// Up to 64 keys of `depth` elements, and the values that belong to them.
template <typename T>
struct Keys {
  const T *keys, *values;
  int64_t key_stride, value_stride;
};

// Up to four queries: running maximum and sum, and `width` unnormalized values of each.
struct Running {
  float *top, *total, *out;
};

// Turns the scores of 64 keys into weights, and brings what was summed before to the new maximum.
template <int M>
void weigh(float (&scores)[M][kPage], const int64_t (&visible)[M], float scale, int64_t R, Running running) {
  for (int m = 0; m < M; ++m) {
    Floats tops = {};
    tops += running.top[m];
    for (int64_t i = 0; i < kPage; i += kLanes) {
      for (int64_t lane = i; lane < i + kLanes; ++lane) {
        scores[m][lane] = lane < visible[m] ? scores[m][lane] * scale : kNone;
      }
      const Floats found = load<Floats>(&scores[m][i]);
      tops = found > tops ? found : tops;
    }
    float top = tops[0];
    for (int lane = 1; lane < kLanes; ++lane) top = std::max(top, tops[lane]);
    const float base = top == kNone ? 0 : top;
    Floats sums = {};
    for (int64_t i = 0; i < kPage; i += kLanes) {
      const Floats weights = exp_of(load<Floats>(&scores[m][i]) - base);
      std::memcpy(&scores[m][i], &weights, sizeof(weights));
      sums += weights;
    }
    const float shrink = std::exp(running.top[m] - base);
    running.total[m] = running.total[m] * shrink + sum(sums);
    running.top[m] = top;
    if (shrink != 1) {
      for (int64_t r = 0; r < R; ++r) running.out[m * R + r] *= shrink;
    }
  }
}

// C vectors of columns of `out[m, :] += weights[m, :] @ values`.
template <int M, int C, typename T>
inline void add_columns(const float (&weights)[M][kPage], const T* values, const Shape& shape, float* out) {
  Floats sums[M][C];
  for (int m = 0; m < M; ++m) std::memcpy(sums[m], out + m * shape.out_stride, sizeof(sums[m]));
  combine<M, C>(&weights[0][0], values, sums, shape);
  for (int m = 0; m < M; ++m) std::memcpy(out + m * shape.out_stride, sums[m], sizeof(sums[m]));
}

// `out[m, :] += weights[m, :] @ values`.
template <int M, typename T>
void add_values(const float (&weights)[M][kPage], const Keys<T>& from, int64_t count, int64_t R, float* out) {
  const Shape shape = {count, kPage, from.value_stride, R};
  int64_t r = 0;
  for (; r + kColumns * kLanes <= R; r += kColumns * kLanes) {
    add_columns<M, kColumns>(weights, from.values + r, shape, out + r);
  }
  for (; r + kLanes <= R; r += kLanes) add_columns<M, 1>(weights, from.values + r, shape, out + r);
  for (; r < R; ++r) {
    for (int m = 0; m < M; ++m) {
      for (int64_t i = 0; i < count; ++i) out[m * R + r] += weights[m][i] * widen(from.values[i * shape.w_stride + r]);
    }
  }
}

// Takes the first `visible[m]` of up to 64 keys into query `first + m`, for M queries.
template <int M, typename T>
void take(const Queries<T>& queries, int64_t first, const Keys<T>& from, const int64_t* seen, int64_t start,
          Running running) {
  float scores[M][kPage];
  int64_t visible[M], count = 0, i = 0;
  for (int m = 0; m < M; ++m) {
    visible[m] = seen[m] - start;
    count = std::max(count, std::min(kPage, visible[m]));
  }
  if (count <= 0) return;
  const T* q = queries.q + first * queries.q_stride;
  const Shape shape = {queries.depth, queries.q_stride, from.key_stride, kPage};
  for (; i + kColumns <= count; i += kColumns) {
    dots<M, kColumns>(q, from.keys + i * from.key_stride, &scores[0][i], shape);
  }
  for (; i < count; ++i) dots<M, 1>(q, from.keys + i * from.key_stride, &scores[0][i], shape);
  weigh<M>(scores, visible, queries.scale, queries.width, running);
  add_values<M>(scores, from, count, queries.width, running.out);
}

// Attends: query n sees the first `seen[n]` keys, and `fetch(start, count)` brings 64 of them, the last time fewer.
template <typename T, typename Fetch>
void attend(const Queries<T>& queries, const std::vector<int64_t>& seen, const Fetch& fetch) {
  const int64_t R = queries.width;
  std::vector<float> top(queries.count, kNone), total(queries.count), out(queries.count * R);
  const int64_t longest = *std::max_element(seen.begin(), seen.end());
  for (int64_t start = 0; start < longest; start += kPage) {
    const Keys<T> keys = fetch(start, std::min(kPage, longest - start));
    for (int64_t n = 0; n < queries.count; n += kRows) {
      const Running running = {&top[n], &total[n], &out[n * R]};
      switch (std::min<int64_t>(kRows, queries.count - n)) {
        case 1: take<1>(queries, n, keys, &seen[n], start, running); break;
        case 2: take<2>(queries, n, keys, &seen[n], start, running); break;
        case 3: take<3>(queries, n, keys, &seen[n], start, running); break;
        default: take<4>(queries, n, keys, &seen[n], start, running);
      }
    }
  }
  for (int64_t n = 0; n < queries.count; ++n) {
    const bool any = total[n] > 0;
    const float factor = any ? 1 / total[n] : 0;
    for (int64_t r = 0; r < R; ++r) store(out[n * R + r] * factor, queries.out + n * queries.out_stride + r);
    queries.lse[n * queries.lse_stride] = any ? top[n] + std::log(total[n]) : -kNone;
  }
}

// The pages of requests, and how they are asked.
template <typename T>
struct Pages {
  const T* pages;  // [pages, 64, D]
  const int32_t *table, *lengths;  // [B, table_width], [B]
  int64_t table_width, num_pages, first_page, D, R;
  float scale;

  int64_t length(int64_t b) const { return std::clamp<int64_t>(lengths[b], 0, table_width * kPage); }

  // `count` queries, one behind the other, of request b; query n sees `seen[n]` of its tokens.
  void ask(int64_t b, const T* q, int64_t count, const std::vector<int64_t>& seen, T* out, float* lse) const {
    const Queries<T> queries = {q, out, lse, count, D, R, 1, D, R, scale};
    attend(queries, seen, [&](int64_t start, int64_t) {
      const int64_t page = first_page + table[b * table_width + start / kPage];
      const T* rows = pages + std::clamp<int64_t>(page, 0, num_pages - 1) * kPage * D;
      return Keys<T>{rows, rows, D, D};
    });
  }
};

template <typename T>
Pages<T> pages_of(const ffi::AnyBuffer& pages, const ffi::Buffer<ffi::S32>& table, const ffi::Buffer<ffi::S32>& lengths,
                  const ffi::Buffer<ffi::S32>& first_page, int64_t R, float scale) {
  return {data<T>(pages), table.typed_data(), lengths.typed_data(), table.dimensions()[1], pages.dimensions()[0],
          *first_page.typed_data(), pages.dimensions()[2], R, scale};
}

template <typename Body>
ffi::Error with_type(const ffi::AnyBuffer& q, const ffi::AnyBuffer& keys, const Body& body) {
  if (q.element_type() != keys.element_type()) return wrong("q and keys are of different types");
  if (q.element_type() == ffi::F32) return body(float{});
  if (q.element_type() == ffi::BF16) return body(BFloat16{});
  return wrong("no attention of this type");
}

// q [B, S, H, D], pages [pages, 64, D], page_table [B, Mp], lengths [B], first_page -> [B, S, H, R], lse [B, S, H].
// A task is up to four queries of one request: a step of few requests has work for all threads.
ffi::Error decode_attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer pages,
                            ffi::Buffer<ffi::S32> page_table, ffi::Buffer<ffi::S32> lengths,
                            ffi::Buffer<ffi::S32> first_page, ffi::Result<ffi::AnyBuffer> out,
                            ffi::ResultBuffer<ffi::F32> lse, float scale) {
  if (pages.dimensions()[1] != kPage) return wrong("pages have 64 rows");
  return with_type(q, pages, [&](auto type) {
    typedef decltype(type) T;
    const int64_t B = q.dimensions()[0], S = q.dimensions()[1], H = q.dimensions()[2], R = out->dimensions()[3];
    const Pages<T> cache = pages_of<T>(pages, page_table, lengths, first_page, R, scale);
    const int64_t blocks = (S * H + kRows - 1) / kRows;
    int64_t bytes = 0;
    for (int64_t b = 0; b < B; ++b) bytes += blocks * cache.length(b) * cache.D * sizeof(T);
    for_each(pool, B * blocks, bytes / kHelpedBytes, [&](int64_t i) {
      const int64_t b = i / blocks, first = i % blocks * kRows, row = b * S * H + first;
      std::vector<int64_t> seen(std::min<int64_t>(kRows, S * H - first));
      for (size_t m = 0; m < seen.size(); ++m) seen[m] = cache.length(b) - (S - 1 - (first + int64_t(m)) / H);
      cache.ask(b, data<T>(q) + row * cache.D, seen.size(), seen, data<T>(out) + row * R, lse->typed_data() + row);
    });
    return ffi::Error::Success();
  });
}

// Rows `first` to `first + count - 1` of chunk `chunk`, which is -1 for rows of no chunk.
struct Part {
  int64_t chunk, first, count;
};

// Cuts chunks that end at `ends` [G + 1] (the first entry is their begin), and the rows behind them, into parts of at
// most `most` rows. Bounds are kept within 0 and `rows`, whatever the ends are.
std::vector<Part> parts_of(const ffi::Buffer<ffi::S32>& ends, int64_t rows, int64_t most) {
  std::vector<Part> parts;
  int64_t first = 0;
  const int64_t G = ends.element_count() - 1;
  for (int64_t g = 0; g <= G; ++g) {
    const int64_t end = g < G ? std::clamp<int64_t>(ends.typed_data()[g + 1], first, rows) : rows;
    for (; first < end; first += std::min(most, end - first)) {
      parts.push_back({g < G ? g : -1, first, std::min(most, end - first)});
    }
  }
  return parts;
}

// q [T, H, D], pages, page_table [G, Mp], context_lengths [G], cu_lengths [G + 1], first_page -> [T, H, R], lse [T, H].
ffi::Error context_attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer pages,
                             ffi::Buffer<ffi::S32> page_table, ffi::Buffer<ffi::S32> lengths,
                             ffi::Buffer<ffi::S32> cu_lengths, ffi::Buffer<ffi::S32> first_page,
                             ffi::Result<ffi::AnyBuffer> out, ffi::ResultBuffer<ffi::F32> lse, float scale) {
  if (pages.dimensions()[1] != kPage) return wrong("pages have 64 rows");
  return with_type(q, pages, [&](auto type) {
    typedef decltype(type) T;
    const int64_t tokens = q.dimensions()[0], H = q.dimensions()[1], R = out->dimensions()[2];
    const Pages<T> cache = pages_of<T>(pages, page_table, lengths, first_page, R, scale);
    const std::vector<Part> parts = parts_of(cu_lengths, tokens, std::max<int64_t>(1, kQueries / H));
    for_each(pool, parts.size(), parts.size(), [&](int64_t i) {
      const auto [chunk, token, count] = parts[i];
      const int64_t row = token * H, queries = count * H;
      const std::vector<int64_t> seen(queries, chunk < 0 ? 0 : cache.length(chunk));
      cache.ask(std::max<int64_t>(0, chunk), data<T>(q) + row * cache.D, queries, seen, data<T>(out) + row * R,
                lse->typed_data() + row);
    });
    return ffi::Error::Success();
  });
}

// New tokens of chunks, each to those before it in its chunk: q [T, H, N + P], keys [T, H, N] and for all heads [T, P],
// values [T, H, V], cu_lengths [G + 1] -> [T, H, V], lse [T, H].
ffi::Error prefill_attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer shared,
                             ffi::AnyBuffer v, ffi::Buffer<ffi::S32> cu_lengths, ffi::Result<ffi::AnyBuffer> out,
                             ffi::ResultBuffer<ffi::F32> lse, float scale) {
  return with_type(q, k, [&](auto type) {
    typedef decltype(type) T;
    const int64_t tokens = q.dimensions()[0], H = q.dimensions()[1], D = q.dimensions()[2];
    const int64_t N = k.dimensions()[2], P = shared.dimensions()[1], V = v.dimensions()[2];
    const std::vector<Part> parts = parts_of(cu_lengths, tokens, kQueries);
    for_each(pool, parts.size() * H, parts.size() * H, [&](int64_t i) {
      const auto [chunk, first, count] = parts[i / H];
      const int64_t h = i % H, row = first * H + h;
      const int64_t begin = chunk < 0 ? first : std::clamp<int64_t>(cu_lengths.typed_data()[chunk], 0, first);
      std::vector<int64_t> seen(count);
      for (int64_t n = 0; n < count; ++n) seen[n] = chunk < 0 ? 0 : first + n + 1 - begin;
      std::vector<T> keys(kPage * D), values(kPage * V);  // of one head, which lie far apart in k and v
      const auto fetch = [&](int64_t start, int64_t number) {
        for (int64_t j = 0; j < number; ++j) {
          const int64_t token = begin + start + j;
          std::copy_n(data<T>(k) + (token * H + h) * N, N, &keys[j * D]);
          std::copy_n(data<T>(shared) + token * P, P, &keys[j * D + N]);
          std::copy_n(data<T>(v) + (token * H + h) * V, V, &values[j * V]);
        }
        return Keys<T>{keys.data(), values.data(), D, V};
      };
      const Queries<T> queries = {data<T>(q) + row * D, data<T>(out) + row * V, lse->typed_data() + row, count, H * D,
                                  H * V, H, D, V, scale};
      attend(queries, seen, fetch);
    });
    return ffi::Error::Success();
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DecodeAttention, decode_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ContextAttention, context_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale"));

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
