// Attention over paged latents, absorbed: one cached row is key and value of all heads.
//
// A task is some queries that see the same keys. It walks those once, 64 at a time, with a running maximum, so its memory
// does not grow with the context.

#include "attention.h"

namespace {

constexpr int64_t kQueries = 64;  // of a task of prefill: they take each page while it is in the cache
constexpr int64_t kHelpedBytes = 256 << 10;  // latents per further thread, as in products

// Queries that see the same keys, one behind the other.
template <typename T>
struct Queries {
  const T* q;  // [count, depth]
  T* out;      // [count, width]
  float* lse;  // [count]
  int64_t count, depth, width;
  float scale;
};

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
void add_values(const float (&weights)[M][kPage], const T* values, int64_t count, int64_t R, int64_t D, float* out) {
  const Shape shape = {count, kPage, D, R};
  int64_t r = 0;
  for (; r + kColumns * kLanes <= R; r += kColumns * kLanes) {
    add_columns<M, kColumns>(weights, values + r, shape, out + r);
  }
  for (; r + kLanes <= R; r += kLanes) add_columns<M, 1>(weights, values + r, shape, out + r);
  for (; r < R; ++r) {
    for (int m = 0; m < M; ++m) {
      float& sum = out[m * R + r];
      for (int64_t i = 0; i < count; ++i) sum = fused(weights[m][i], widen(values[i * D + r]), sum);
    }
  }
}

// Takes the first `visible[m]` of up to 64 keys into query `first + m`, for M queries.
template <int M, typename T>
void take(const Queries<T>& queries, int64_t first, const T* keys, const int64_t* seen, int64_t start,
          Running running) {
  float scores[M][kPage];
  int64_t visible[M], count = 0, i = 0;
  for (int m = 0; m < M; ++m) {
    visible[m] = seen[m] - start;
    count = std::max(count, std::min(kPage, visible[m]));
  }
  if (count <= 0) return;
  const int64_t D = queries.depth;
  const T* q = queries.q + first * D;
  const Shape shape = {D, D, D, kPage};
  for (; i + kColumns <= count; i += kColumns) {
    dots<false, M, kColumns>(q, keys + i * D, &scores[0][i], shape);
  }
  for (; i < count; ++i) dots<false, M, 1>(q, keys + i * D, &scores[0][i], shape);
  weigh<M>(scores, visible, queries.scale, queries.width, running);
  add_values<M>(scores, keys, count, queries.width, D, running.out);
}

// Attends: query n sees the first `seen[n]` keys; `page(start)` has those from `start` on.
template <typename T, typename Page>
void attend(const Queries<T>& queries, const std::vector<int64_t>& seen, const Page& page) {
  const int64_t R = queries.width;
  std::vector<float> top(queries.count, kNone), total(queries.count), out(queries.count * R);
  const int64_t longest = *std::max_element(seen.begin(), seen.end());
  for (int64_t start = 0; start < longest; start += kPage) {
    const T* keys = page(start);
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
    finish(top[n], total[n], &out[n * R], R, queries.out + n * R, queries.lse + n);
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
    const Queries<T> queries = {q, out, lse, count, D, R, scale};
    attend(queries, seen, [&](int64_t start) {
      const int64_t page = first_page + table[b * table_width + start / kPage];
      return pages + std::clamp<int64_t>(page, 0, num_pages - 1) * kPage * D;
    });
  }
};

template <typename T>
Pages<T> pages_of(const ffi::AnyBuffer& pages, const ffi::Buffer<ffi::S32>& table, const ffi::Buffer<ffi::S32>& lengths,
                  const ffi::Buffer<ffi::S32>& first_page, int64_t R, float scale) {
  return {data<T>(pages), table.typed_data(), lengths.typed_data(), table.dimensions()[1], pages.dimensions()[0],
          *first_page.typed_data(), pages.dimensions()[2], R, scale};
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
