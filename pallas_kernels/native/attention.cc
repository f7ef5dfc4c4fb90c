// Attention of a decode step over paged latents, absorbed: one cached row is key and value of all heads.
//
// A task is up to four queries of one request. It walks the request's pages once, with a running maximum, so its memory
// does not grow with the context.

#include <cmath>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t kPage = 64;  // tokens
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

// What a step asks for, with the strides of its arrays in elements.
template <typename T>
struct Attention {
  const T* q;      // [B, S, H, D]
  const T* pages;  // [pages, 64, D]
  const int32_t *page_table, *lengths;
  T* out;      // [B, S, H, R]
  float* lse;  // [B, S, H]
  int64_t S, H, D, R, table_width, num_pages, first_page;
  float scale;
};

// Queries of one block: running maximum, sum and unnormalized output of each.
template <int M>
struct Running {
  float top[M], total[M];
  std::vector<float> out;  // [M, R]
};

// Turns the scores of a page into weights, and brings what was summed before to the new maximum.
template <int M>
void weigh(float (&scores)[M][kPage], const int64_t (&visible)[M], float scale, int64_t R, Running<M>& running) {
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

// `out[m, :] += weights[m, :] @ keys[:, :R]`.
template <int M, typename T>
void add_values(const float (&weights)[M][kPage], const T* keys, int64_t count, int64_t R, int64_t D, float* out) {
  constexpr int64_t width = kColumns * kLanes;
  const Shape shape = {count, kPage, D, R};
  int64_t r = 0;
  for (; r + width <= R; r += width) {
    Floats sums[M][kColumns];
    for (int m = 0; m < M; ++m) std::memcpy(sums[m], out + m * R + r, sizeof(sums[m]));
    combine<M, kColumns>(&weights[0][0], keys + r, sums, shape);
    for (int m = 0; m < M; ++m) std::memcpy(out + m * R + r, sums[m], sizeof(sums[m]));
  }
  for (; r < R; ++r) {
    for (int m = 0; m < M; ++m) {
      for (int64_t i = 0; i < count; ++i) out[m * R + r] += weights[m][i] * widen(keys[i * D + r]);
    }
  }
}

// Queries `first` to `first + M - 1` of the S * H of request `b`.
template <int M, typename T>
void attend(const Attention<T>& a, int64_t b, int64_t first) {
  Running<M> running = {{}, {}, std::vector<float>(M * a.R)};
  int64_t seen[M], longest = 0;
  for (int m = 0; m < M; ++m) {
    running.top[m] = kNone;
    seen[m] = std::min<int64_t>(a.lengths[b], a.table_width * kPage) - (a.S - 1 - (first + m) / a.H);
    longest = std::max(longest, seen[m]);
  }
  const int64_t row = b * a.S * a.H + first;
  for (int64_t start = 0; start < longest; start += kPage) {
    const int64_t page = a.first_page + a.page_table[b * a.table_width + start / kPage];
    const T* keys = a.pages + std::clamp<int64_t>(page, 0, a.num_pages - 1) * kPage * a.D;
    const int64_t count = std::min(kPage, longest - start);
    float scores[M][kPage];
    int64_t visible[M], i = 0;
    for (int m = 0; m < M; ++m) visible[m] = seen[m] - start;
    const Shape shape = {a.D, a.D, a.D, kPage};
    for (; i + kColumns <= count; i += kColumns) {
      dots<M, kColumns>(a.q + row * a.D, keys + i * a.D, &scores[0][i], shape);
    }
    for (; i < count; ++i) dots<M, 1>(a.q + row * a.D, keys + i * a.D, &scores[0][i], shape);
    weigh<M>(scores, visible, a.scale, a.R, running);
    add_values<M>(scores, keys, count, a.R, a.D, running.out.data());
  }
  for (int m = 0; m < M; ++m) {
    const bool any = running.total[m] > 0;
    const float factor = any ? 1 / running.total[m] : 0;
    for (int64_t r = 0; r < a.R; ++r) store(running.out[m * a.R + r] * factor, a.out + (row + m) * a.R + r);
    a.lse[row + m] = any ? running.top[m] + std::log(running.total[m]) : -kNone;
  }
}

template <typename T>
ffi::Error run(ffi::ThreadPool& pool, const Attention<T>& attention, int64_t B) {
  const int64_t queries = attention.S * attention.H, blocks = (queries + kRows - 1) / kRows;
  int64_t bytes = 0;
  for (int64_t b = 0; b < B; ++b) bytes += blocks * attention.lengths[b] * attention.D * sizeof(T);
  for_each(pool, B * blocks, bytes / kHelpedBytes, [&](int64_t i) {
    const int64_t b = i / blocks, first = i % blocks * kRows;
    switch (std::min<int64_t>(kRows, queries - first)) {
      case 1: attend<1>(attention, b, first); break;
      case 2: attend<2>(attention, b, first); break;
      case 3: attend<3>(attention, b, first); break;
      default: attend<4>(attention, b, first);
    }
  });
  return ffi::Error::Success();
}

// q [B, S, H, D], pages [pages, 64, D], page_table [B, Mp], lengths [B], first_page -> [B, S, H, R], lse [B, S, H].
ffi::Error decode_attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer pages,
                            ffi::Buffer<ffi::S32> page_table, ffi::Buffer<ffi::S32> lengths,
                            ffi::Buffer<ffi::S32> first_page, ffi::Result<ffi::AnyBuffer> out,
                            ffi::ResultBuffer<ffi::F32> lse, float scale) {
  const auto dims = q.dimensions();
  if (q.element_type() != pages.element_type()) return wrong("q and pages are of different types");
  if (pages.dimensions()[1] != kPage) return wrong("pages have 64 rows");
  const auto with = [&](auto type) {
    typedef decltype(type) T;
    return run<T>(pool,
                  {data<T>(q), data<T>(pages), page_table.typed_data(), lengths.typed_data(), data<T>(out),
                   lse->typed_data(), dims[1], dims[2], dims[3], out->dimensions()[3], page_table.dimensions()[1],
                   pages.dimensions()[0], *first_page.typed_data(), scale},
                  dims[0]);
  };
  if (q.element_type() == ffi::F32) return with(float{});
  if (q.element_type() == ffi::BF16) return with(BFloat16{});
  return wrong("no attention of this type");
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
