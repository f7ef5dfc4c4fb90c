// Vectors of this CPU, the two inner products that every kernel is made of, and work for several threads.
//
// A sum is made in one order, whatever the number of rows and threads: lanes of a vector along K, then a tree over the
// lanes. So a row's result does not depend on the rows beside it.

#ifndef DSV3_VECTORS_H_
#define DSV3_VECTORS_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kColumns = 4;  // vectors of a weight at once; with 4 rows of x 16 sums, in 32 registers
#else
constexpr int kVectorBytes = 32;
constexpr int kColumns = 2;  // 8 sums, in 16 registers
#endif
constexpr int kLanes = kVectorBytes / 4;
constexpr int kRows = 4;      // rows of x at once
constexpr int kStreamedRows = 2;  // rows of x with which weights are multiplied as they come; four would load x too often
constexpr int64_t kCacheLine = 64;  // bytes
constexpr int64_t kAhead = 8 << 10;  // bytes of weights that are on their way from memory
constexpr int kSpins = 4096;  // looks at the other threads' tasks before the core is given away

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef float Quad __attribute__((vector_size(16)));
typedef float Eight __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));
typedef int8_t Bytes __attribute__((vector_size(kVectorBytes / 4)));

struct BFloat16 {
  uint16_t bits;
};

struct E4M3 {
  uint8_t bits;
};

// Words of eight INT4 weights, numbers minus 8, in the order of `pallas_kernels.int4`: the same bits of 32 words are 32 values of
// K, which share a scale, and 32 words are 256 of K.
struct Int4 {
  uint32_t bits;
};

constexpr int64_t kWordsOfRun = 32, kRun = 256;

// Words of eight FP4 weights in the order of `pallas_kernels.fp4`: 16 words are 128 of K, with powers of four groups in a word.
struct Fp4 {
  uint32_t bits;
};

constexpr int64_t kWordsOfBlock = 16;

inline float widen(float x) { return x; }

inline float widen(BFloat16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float out;
  std::memcpy(&out, &bits, sizeof(out));
  return out;
}

inline void store(float x, float* out) { *out = x; }

inline void store(float x, BFloat16* out) {  // to the nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  out->bits = x == x ? rounded : (bits >> 16) | 0x40;
}

inline void store_vector(Floats x, float* out) { std::memcpy(out, &x, sizeof(x)); }

inline void store_vector(Floats x, BFloat16* out) {  // rounds as `store`
#if defined(__AVX512BF16__)
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
#else
  const Words bits = (Words)x, is_nan = (Words)(x != x);
  const Words nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Halves rounded = __builtin_convertvector((nearest & ~is_nan) | ((bits >> 16 | 0x40u) & is_nan), Halves);
#endif
  std::memcpy(out, &rounded, sizeof(rounded));
}

template <typename V>
inline V load(const void* from) {
  V out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}

template <typename V>
inline V load_part(const void* from, int64_t bytes) {  // the rest is zero
  V out = {};
  std::memcpy(&out, from, bytes);
  return out;
}

inline Floats widened(const float* from) { return load<Floats>(from); }

inline Floats widened(const BFloat16* from) {
  return (Floats)(__builtin_convertvector(load<Halves>(from), Words) << 16);
}

// e4m3 values times 2^-8. Their bits are those of a float16 with a smaller exponent; its conversion keeps subnormals,
// which arithmetic in the mode that XLA sets would not. NaN, which no checkpoint holds, becomes 480 * 2^-8.
constexpr float kE4M3Unit = 256;

inline Floats widened(const E4M3* from) {
  typedef int16_t Shorts __attribute__((vector_size(kVectorBytes / 2)));
  const Shorts bits = (__builtin_convertvector(load<Bytes>(from), Shorts) << 7) & (int16_t)0xbfff;
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_cvtph_ps(0xffff, (__m256i)bits);
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps((__m128i)bits);
#else
  const Words wide = __builtin_convertvector((Halves)bits, Words);
  const Words magnitude = (wide & 0x7fffu) << 13;  // 112 exponents below a float's
  const Floats normal = (Floats)((magnitude + (112u << 23)) | (wide & 0x8000u) << 16);
  const Floats small = (Floats)(magnitude + (113u << 23)) - 0x1p-14f;
  const Words is_small = magnitude < (1u << 23);
  return (Floats)(((Words)small | (wide & 0x8000u) << 16) & is_small | (Words)normal & ~is_small);
#endif
}

// Lanes of two vectors, numbered through; GCC 11 and older have no __builtin_shufflevector.
template <typename V, int... I, typename U>
inline V lanes(U a, U b) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, I...);
#else
  constexpr int kOfOne = sizeof(U) / sizeof(float);
  return V{(I < kOfOne ? a[I % kOfOne] : b[I % kOfOne])...};
#endif
}

inline Quad quarters(Floats x) {  // adds the lanes that are 4 apart
#if defined(__AVX512F__)
  const Eight half = lanes<Eight, 0, 1, 2, 3, 4, 5, 6, 7>(x, x) + lanes<Eight, 8, 9, 10, 11, 12, 13, 14, 15>(x, x);
#else
  const Eight half = x;
#endif
  return lanes<Quad, 0, 1, 2, 3>(half, half) + lanes<Quad, 4, 5, 6, 7>(half, half);
}

// The sums over the lanes of four vectors, each in the same order.
inline Quad sums(Floats a, Floats b, Floats c, Floats d) {
  const Quad p = quarters(a), q = quarters(b), r = quarters(c), s = quarters(d);
  const Quad pq = lanes<Quad, 0, 4, 1, 5>(p, q) + lanes<Quad, 2, 6, 3, 7>(p, q);
  const Quad rs = lanes<Quad, 0, 4, 1, 5>(r, s) + lanes<Quad, 2, 6, 3, 7>(r, s);
  return lanes<Quad, 0, 1, 4, 5>(pq, rs) + lanes<Quad, 2, 3, 6, 7>(pq, rs);
}

inline float sum(Floats x) { return sums(x, x, x, x)[0]; }

// `sum + x * y`, rounded once where the machine can. Written out, because GCC splits it in some loops for some processors: then
// the bits of a row would depend on the number of rows.
inline float fused(float x, float y, float sum) {
#if defined(__FMA__)
  return __builtin_fmaf(x, y, sum);
#else
  return sum + x * y;
#endif
}

inline Floats fused(Floats x, Floats y, Floats sum) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum);
#else
  return sum + x * y;
#endif
}

// A vector along K of x, of type X, and one of a weight, of type T, in the form in which they are multiplied. Sums are
// float32.
template <typename X, typename T>
struct Along {
  static constexpr int64_t kStep = kLanes;
  typedef Floats Vector;
  static inline Floats weights(const T* from) { return widened(from); }
  static inline void add(Floats& acc, Floats x, Floats w) { acc = fused(x, w, acc); }
};

template <>
struct Along<BFloat16, BFloat16> {
  static constexpr int64_t kStep = 2 * kLanes;
  typedef Words Vector;  // pairs of bfloat16
  static inline Words weights(const BFloat16* from) { return load<Words>(from); }
  static inline void add(Floats& acc, Words x, Words w) {
#if defined(__AVX512BF16__)
    acc = (Floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)(__m512i)x, (__m512bh)(__m512i)w);
#else
    acc = fused((Floats)(x << 16), (Floats)(w << 16), acc);
    acc = fused((Floats)(x & 0xffff0000u), (Floats)(w & 0xffff0000u), acc);
#endif
  }
};

// Asks for the weights that lie `kAhead` behind these. The processor fetches ahead of a stream too, but less far, and hardly of
// several rows at once. The address is only a hint: behind the last weight nothing is read.
inline void fetch_ahead(const void* weights) {
  __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(weights) + kAhead), 0, 2);
}

struct Shape {
  int64_t depth;                           // K
  int64_t x_stride, w_stride, out_stride;  // elements between rows
};

// `acc[m][c] += x[m, :] * w[c, :]` for M rows of x and C rows of w; lanes are along K. With `kFetch` w comes from memory.
template <bool kFetch, int M, int C, typename X, typename T>
inline void multiply(const X* x, const T* w, Floats (&acc)[M][C], const Shape& shape) {
  typedef Along<X, T> Types;
  typedef typename Types::Vector Vector;
  int64_t k = 0;
  for (; k + Types::kStep <= shape.depth; k += Types::kStep) {
    Vector weights[C];
    for (int c = 0; c < C; ++c) {
      const T* from = w + c * shape.w_stride + k;
      if (kFetch && k * sizeof(T) % kCacheLine == 0) fetch_ahead(from);
      weights[c] = Types::weights(from);
    }
    for (int m = 0; m < M; ++m) {
      const Vector values = load<Vector>(x + m * shape.x_stride + k);
      for (int c = 0; c < C; ++c) Types::add(acc[m][c], values, weights[c]);
    }
  }
  if (const int64_t left = shape.depth - k) {
    T rest[Types::kStep];
    for (int c = 0; c < C; ++c) {
      std::memset(rest, 0, sizeof(rest));
      std::memcpy(rest, w + c * shape.w_stride + k, left * sizeof(T));
      const Vector weights = Types::weights(rest);
      for (int m = 0; m < M; ++m) {
        Types::add(acc[m][c], load_part<Vector>(x + m * shape.x_stride + k, left * sizeof(X)), weights);
      }
    }
  }
}

// `out[m, c]` becomes the sum over the lanes of `acc[m][c]`.
template <int M, int C, typename O>
inline void add_lanes(const Floats (&acc)[M][C], O* out, const Shape& shape) {
  for (int m = 0; m < M; ++m) {
    const Quad found = sums(acc[m][0], acc[m][1 % C], acc[m][2 % C], acc[m][3 % C]);
    for (int c = 0; c < C; ++c) store(found[c], out + m * shape.out_stride + c);
  }
}

// `out[m, c] = x[m, :] . w[c, :]` for M rows of x and C rows of w, which come from memory or are in the cache.
template <bool kFetch, int M, int C, typename X, typename T, typename O>
inline void dots(const X* x, const T* w, O* out, const Shape& shape) {
  Floats acc[M][C] = {};
  if constexpr (kFetch && M <= kStreamedRows) {
    for (int c = 0; c < C; ++c) {  // one row of w after the other, as they lie in memory; the bits are the same
      Floats one[M][1] = {};
      multiply<kFetch, M, 1>(x, w + c * shape.w_stride, one, shape);
      for (int m = 0; m < M; ++m) acc[m][c] = one[m][0];
    }
  } else {
    multiply<kFetch, M, C>(x, w, acc, shape);
  }
  add_lanes(acc, out, shape);
}

// `totals[m][c] += x[m, k] * w[k, c]` over k, for M rows of x and C vectors of columns of w.
template <int M, int C, typename X, typename T>
inline void combine(const X* x, const T* w, Floats (&totals)[M][C], const Shape& shape) {
  for (int64_t k = 0; k < shape.depth; ++k) {
    Floats weights[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) weights[c] = widened(w + k * shape.w_stride + c * kLanes);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const Floats value = Floats{} + widen(x[m * shape.x_stride + k]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) totals[m][c] = fused(value, weights[c], totals[m][c]);
    }
  }
}

// Runs `task(0 .. count - 1)` on the caller and on up to `helpers` threads of XLA's pool that come in time. Each thread begins
// with tasks of its own that lie side by side, then takes those that are left of the others'. Two threads that take neighbours in
// turns read weights slower: the processor fetches ahead into the other one's task. Nothing waits for a thread that has not begun:
// it finds no task left, and touches nothing but `State`.
template <typename Task>
void for_each(ffi::ThreadPool& pool, int64_t count, int64_t helpers, const Task& task) {
  const int64_t threads = 1 + std::min({helpers, pool.num_threads() - 1, count - 1});
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  struct alignas(kCacheLine) Share {
    std::atomic<int64_t> next{0};  // counted from the first task of this share
  };
  struct State {
    explicit State(int64_t threads) : shares(threads) {}
    std::vector<Share> shares;
    std::atomic<int64_t> done{0};
  };
  const auto state = std::make_shared<State>(threads);
  const auto work = [state, count, threads, &task](int64_t own) {
    for (int64_t s = own; s < own + threads; ++s) {
      const int64_t share = s % threads, first = share * count / threads, last = (share + 1) * count / threads;
      for (int64_t i; (i = first + state->shares[share].next.fetch_add(1)) < last;) {
        task(i);
        state->done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  for (int64_t i = 1; i < threads; ++i) pool.Schedule([work, i] { work(i); });
  work(0);
  for (int spins = 0; state->done.load(std::memory_order_acquire) < count; ++spins) {
    if (spins >= kSpins) std::this_thread::yield();
  }
}

inline ffi::Error wrong(const char* what) { return ffi::Error(ffi::ErrorCode::kInvalidArgument, what); }

template <typename T>
const T* data(const ffi::AnyBuffer& buffer) {
  return static_cast<const T*>(buffer.untyped_data());
}

template <typename O>
O* data(ffi::Result<ffi::AnyBuffer>& buffer) {
  return static_cast<O*>(buffer->untyped_data());
}

}  // namespace

#endif  // DSV3_VECTORS_H_
